# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The nnx model: parameters under their Hugging Face names, from and to transformers' checkpoints.

The forward is in `forward.py`, as pure functions of `FlaxModel.params`: the same arrays in
a few large pieces, because the cost of a call grows with the number of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hf_gr.files import draft_head as head_files
from hf_gr.files.cards import model_card
from hf_gr.files.hub import Source, commit_of
from hf_gr.files.hub_mixin import HubMixin

from . import checkpoint
from .arrays import is_on_host, stacked
from .devices import parameter_sharding
from .draft_head import DraftHead
from .families import FAMILIES, to_spec
from .forward import ModelScorer
from .layers import MIN_SCANNED_LAYERS
from .parameters import Facts, Parameters
from .scorers import Params
from .spec import HEAD, Spec

_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)")


class FlaxModel(HubMixin, Parameters, what="model"):
    """A model in JAX, of one of `hf_gr.flax.families.FAMILIES`, on the checkpoints that transformers loads in PyTorch.

    Its attributes are the checkpoint's tensors: `model.model.layers[0].self_attn.q_proj.weight` is an `nnx.Param` in
    torch's `[out, in]` layout, to be read, replaced or trained. `params` holds the same numbers for `scorer`.

    Args:
        config: a config of transformers.
        arrays: the parameters by name; random ones if None.
        rngs: the source of random ones; seed 0 if None.
        dtype: of random ones.

    Attributes:
        config: the config.
        generation_config: transformers' defaults of `generate`.
        draft_head: for `generate(drafting="head")`, if the checkpoint has one.
        spec: the static facts of the config.

    Raises:
        NotImplementedError: an architecture or a field that is not implemented in Flax; it names the field.
        ValueError: an array that is missing, unexpected or of the wrong shape.

    Example:
        >>> from transformers import LlamaConfig
        >>> model = FlaxModel(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> model.model.layers[1].mlp.up_proj.weight.shape
        (11008, 8)
        >>> model(np.array([[3, 4, 5]])).shape
        (1, 3, 8)
    """

    draft_head: DraftHead | None = None

    def __init__(
        self,
        config: Any,
        *,
        arrays: Mapping[str, Array] | None = None,
        rngs: nnx.Rngs | None = None,
        dtype: Any = "float32",
    ) -> None:
        spec = to_spec(config)
        if arrays is None:
            arrays = random_arrays(spec, nnx.Rngs(0) if rngs is None else rngs, dtype=dtype)
        elif spec.is_tied and HEAD in arrays:
            spec = spec.untie()
        _check_shapes(arrays, spec.shapes())
        if config.model_type == "t5" and any(array.dtype == jnp.float16 for array in arrays.values()):
            raise NotImplementedError(
                "dtype='float16', expected 'float32' or 'bfloat16': T5's activations overflow in float16, and "
                "parts in float32, as transformers has them, are not implemented in Flax"
            )
        super().__init__(arrays)
        # `commit`: that the weights were downloaded at.
        self._facts: Any = Facts(tuple(arrays), config=config, spec=spec, generation_config=None, commit=None)

    @classmethod
    def from_pretrained(  # noqa: D417
        cls,
        repo_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        dtype: Any = None,
    ) -> FlaxModel:
        """Load a checkpoint from a folder or the Hub: one or several safetensors, as transformers saves them.

        Args:
            dtype: what to convert parameters to: "float32", "bfloat16" or "float16", as a name or as jax.numpy's; None
                or "auto" for the checkpoint's own.
            all others: as for `ConstraintIndex.from_pretrained`.

        Raises:
            ValueError: no checkpoint there; a tensor that is missing, unexpected or of the wrong shape.
            NotImplementedError: an architecture or a field that is not implemented in Flax; it names the field.
        """
        from transformers import AutoConfig, GenerationConfig

        wanted = checkpoint.check_dtype(dtype)
        source = Source(repo_or_dir, revision, token, cache_dir, local_files_only, subfolder)
        folder = checkpoint.find(source)
        config = AutoConfig.from_pretrained(folder)
        own = str(config.dtype or "").removeprefix("torch.")
        arrays = checkpoint.load(folder, to_spec(config), dtype=wanted or (own if own in checkpoint.DTYPES else None))
        commit = commit_of(folder / checkpoint.CONFIG)
        config.name_or_path = str(repo_or_dir)
        model = cls(config, arrays=arrays)
        model._facts.commit = None if source.is_folder else commit
        if (folder / checkpoint.GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        if (of_head := head_files.find(source.at(commit))) is not None:
            model.add_draft_head(DraftHead.from_pretrained(of_head))
        return model

    def add_draft_head(self, head: DraftHead) -> DraftHead:
        """Give the model a draft head; it replaces an existing one.

        Args:
            head: trained in PyTorch, such as `DraftHead.from_pretrained(...)`. Its placeholders' embeddings are
                written into the model's, in the rows of their ids. It must have been trained on these weights, which
                cannot be checked.

        Returns:
            The head, `model.draft_head`, in the model's dtype.

        Raises:
            ValueError: a head with another hidden size, or with codes or placeholders outside the model's vocabulary.
        """
        if not isinstance(head, DraftHead):
            raise ValueError(
                f"head is a {type(head).__name__}, expected hf_gr.flax.draft_head.DraftHead: heads are made and "
                "trained in PyTorch; save it there, and load it by DraftHead.from_pretrained(...)"
            )
        config, vocabulary = head.config, self.spec.vocab_size
        if config.hidden_size != self.spec.hidden_size:
            raise ValueError(
                f"the draft head has hidden_size={config.hidden_size}, expected the model's, {self.spec.hidden_size}: "
                "is it another model's head?"
            )
        tokens = [*config.placeholder_token_ids, *(int(head.codebook(n).max()) for n in range(config.num_levels))]
        if max(tokens) >= vocabulary:
            raise ValueError(
                f"the draft head has token {max(tokens)}, expected less than {vocabulary}, the model's vocabulary: "
                "add the head in PyTorch, model.add_draft_head(head), which resizes the embeddings, and save the model"
            )
        rows = head.placeholder_embeddings
        if rows is not None and len(rows):
            parameter = attrgetter(self.spec.embedding)(self)
            known = np.array(parameter.get_raw_value())
            if rows.shape[1] != known.shape[1]:
                raise ValueError(
                    f"the draft head has placeholder embeddings of size {rows.shape[1]}, expected the model's, "
                    f"{known.shape[1]}: it is another model's head; load that model"
                )
            places = list(config.placeholder_token_ids)
            if not np.array_equal(known[places], rows.astype(known.dtype)):
                known[places] = rows
                parameter.set_raw_value(jax.device_put(known, parameter.get_raw_value().sharding))
        self.draft_head = head.astype(self.dtype)
        return self.draft_head

    def save_pretrained(self, save_directory: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Save a checkpoint that transformers and this class load.

        A checkpoint with a draft head or a named catalogue gets a model card unless it has one.

        Args:
            save_directory: created if necessary; a checkpoint in it is replaced.
            max_shard_size: of a file; a larger checkpoint becomes several files and an index.

        Raises:
            ValueError: a file in the folder's place.
            OSError: a file that cannot be written, such as on a full disk.
        """
        folder = Path(save_directory)
        catalogue = getattr(self.generation_config, "constraint_index", None)
        has_ours = self.draft_head is not None or catalogue is not None
        self._save(folder, name=folder.resolve().name if has_ours else None, max_shard_size=max_shard_size)

    def __call__(
        self, input_ids: ArrayLike, attention_mask: ArrayLike | None = None, decoder_input_ids: ArrayLike | None = None
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits after every token (of the decoder), in fp32.

        Args:
            input_ids: `[B, P]`.
            attention_mask: `[B, P]`, 1 or true at real tokens; all of them if None.
            decoder_input_ids: `[B, Q]`, of an encoder-decoder.

        Raises:
            ValueError: a wrong number of axes or rows, or no rows; tokens, in NumPy or a list, outside the vocabulary
                (those in JAX are not checked); decoder tokens for a model without an encoder, or none for one with an
                encoder; more tokens than learned positions.
        """
        tokens = _to_tokens(input_ids, "input_ids", self.spec.vocab_size)
        mask = jnp.ones(tokens.shape, dtype=bool) if attention_mask is None else jnp.asarray(attention_mask) != 0
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask has shape {mask.shape}, expected {tokens.shape}, that of input_ids")
        if (decoder_input_ids is not None) != self.is_encoder_decoder:
            what = "some: an encoder-decoder's sequences begin with them" if self.is_encoder_decoder else "none"
            raise ValueError(f"decoder_input_ids={decoder_input_ids!r}, expected {what}")
        if decoder_input_ids is None:
            self.spec.check_length(tokens.shape[1])
            return _forward(self.scorer, self.params, tokens, mask)
        start = _to_tokens(decoder_input_ids, "decoder_input_ids", self.spec.vocab_size)
        if len(start) != len(tokens):
            raise ValueError(f"decoder_input_ids has {len(start)} rows, expected {len(tokens)}, those of input_ids")
        self.spec.check_length(start.shape[1], of_encoder=tokens.shape[1])
        return _forward(self.scorer, self.params, tokens, mask, start)

    @property
    def config(self) -> Any:
        """The config of transformers."""
        return self._facts.config

    @property
    def generation_config(self) -> Any:
        """Defaults of `generate`: those of the config, unless others were loaded or set."""
        if self._facts.generation_config is None:
            from transformers import GenerationConfig

            self._facts.generation_config = GenerationConfig.from_model_config(self.config)
        return self._facts.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._facts.generation_config = value

    @property
    def spec(self) -> Spec:
        """The static facts."""
        return self._facts.spec

    @property
    def scorer(self) -> ModelScorer:
        """The forward, over `params`; equal for models of equal `spec`."""
        return ModelScorer(self.spec)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompts."""
        return self.spec.names.encoder is not None

    @property
    def dtype(self) -> Any:
        """The embeddings' dtype, in which everything is computed."""
        return attrgetter(self.spec.embedding)(self).dtype

    @property
    def params(self) -> Params:
        """The parameters as `scorer` takes them: layers stacked, or one by one if there are few.

        They are made on first use and kept until a parameter is replaced. They are a second copy of the parameters;
        on an accelerator, the only copy there if the model was loaded with `from_pretrained`.
        """
        return self.params_on(None)

    def params_on(self, mesh: Mesh | None) -> Params:
        """`params` on the devices of a mesh from `devices.to_mesh`, by its rules; kept for every mesh in use."""
        return self._facts.params(self, mesh, lambda arrays: to_params(arrays, self.spec, mesh=mesh))

    def named_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The parameters by name, in the host's memory."""
        return {name: np.asarray(array) for name, array in self._facts.arrays(self).items()}

    def _save(self, directory: Path, *, name: str | None, max_shard_size: int | str = "5GB") -> None:
        arrays = self.named_arrays()

        def write_configs(work: Path) -> None:
            self.config.dtype = str(next(iter(arrays.values())).dtype)
            self.config.architectures = [FAMILIES[self.config.model_type][0]]
            self.config.save_pretrained(work)
            self.generation_config.save_pretrained(work)

        card = None
        if name is not None:
            card = model_card(
                name,
                architecture=FAMILIES[self.config.model_type][0],
                is_encoder_decoder=self.is_encoder_decoder,
                catalogue=getattr(self.generation_config, "constraint_index", None),
                head=None if self.draft_head is None else self.draft_head.facts(),
            )
        checkpoint.save(directory, arrays, write_configs, max_shard_size=max_shard_size, card=card)
        if self.draft_head is not None:
            self.draft_head.save_beside(directory, arrays[self.spec.embedding])


def random_arrays(spec: Spec, rngs: nnx.Rngs, *, dtype: Any = "float32") -> dict[str, Array]:
    """Parameters by name, for tests and training: norms that change nothing, zero biases, and weights of unit gain."""
    name = checkpoint.check_dtype(dtype) or "float32"
    norm = 0.0 if spec.norm == "rms_plus_one" else 1.0
    arrays: dict[str, Array] = {}
    for parameter, shape in spec.shapes().items():
        if len(shape) == 1 or parameter.endswith("bias"):
            is_norm = parameter.endswith("weight")  # the others are biases
            arrays[parameter] = jnp.full(shape, norm if is_norm else 0.0, dtype=name)
        else:
            arrays[parameter] = jax.random.normal(rngs.params(), shape, dtype=name) * shape[-1] ** -0.5
    return arrays


def to_params(arrays: Mapping[str, Array], spec: Spec, *, mesh: Mesh | None = None) -> Params:
    """Parameters by their Hugging Face names, in the form that scorers take; on a mesh, by its rules.

    Layers are stacked for `lax.scan` if there are many.

    Returns:
        Under the name of each stack its layers, as one dict of stacked arrays or as a tuple of dicts; parameters that
        not every layer has, and all others, under their own names.
    """

    def placed(name: str, array: Any) -> Array:
        if mesh is None:
            return _on_device(array)
        return jax.device_put(array, parameter_sharding(name, array.shape, mesh))

    layers: dict[str, list[dict[str, Array]]] = {stack: [{} for _ in range(n)] for stack, n in spec.stacks.items()}
    params: dict[str, Any] = {}
    for name, array in spec.arrange(arrays).items():
        found = _LAYER.fullmatch(name)
        if found is not None and found[1] in layers:
            layers[found[1]][int(found[2])][found[3]] = array
        else:
            params[name] = placed(name, array)
    for stack, of_stack in layers.items():
        common = set.intersection(*(set(layer) for layer in of_stack))
        for place, layer in enumerate(of_stack):
            own = {f"{stack}.{place}.{name}": layer[name] for name in layer if name not in common}
            params |= {name: placed(name, array) for name, array in own.items()}
        names = [name for name in of_stack[0] if name in common]
        if len(of_stack) >= MIN_SCANNED_LAYERS:
            params[stack] = {name: placed(name, stacked([layer[name] for layer in of_stack])) for name in names}
        else:
            params[stack] = tuple({name: placed(name, layer[name]) for name in names} for layer in of_stack)
    return params


@partial(jax.jit, static_argnums=0)
def _forward(scorer: ModelScorer, params: Params, *arrays: Array) -> Array:
    return scorer(params, *arrays)


def _on_device(array: Any) -> Array:
    """An array on JAX's device: arrays in the host's memory are moved there."""
    if isinstance(array, np.ndarray):
        return jnp.asarray(array)
    return jnp.asarray(np.asarray(array)) if jax.default_backend() != "cpu" and is_on_host(array) else array


def _check_shapes(arrays: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name in {**expected, **arrays}:
        found, wanted = arrays.get(name), expected.get(name)
        if found is None or found.shape != wanted:
            has = "is not there" if found is None else f"has shape {list(found.shape)}"
            of = "none of that name" if wanted is None else f"shape {list(wanted)}"
            raise ValueError(f"arrays[{name!r}] {has}, expected {of}: arrays and config do not belong together")


def _to_tokens(tokens: ArrayLike, name: str, vocab_size: int) -> Array:
    if isinstance(tokens, jax.Array):  # may be a tracer, or on a device: its values are not read
        array: Any = tokens
    else:
        array = np.asarray(tokens)
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected integers [batch, tokens]")
    if not array.size:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected at least one row and one token")
    if isinstance(array, np.ndarray):
        for token in (array.min(), array.max()):
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} has token {token}, expected 0 to less than {vocab_size}, the vocabulary's")
    return jnp.asarray(array)
