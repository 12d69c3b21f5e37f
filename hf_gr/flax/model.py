# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The nnx model: parameters under their Hugging Face names, from and to transformers' checkpoints.

What is computed with them is in `decoder.py` and `t5.py`, as pure functions of `FlaxModel.params`: the same arrays in
a few large pieces, because a call costs as much as its arguments are many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hf_gr.hub import push_folder

from . import checkpoint
from .checkpoint import Spec, to_spec
from .decoder import DecoderScorer
from .layers import MIN_SCANNED_LAYERS
from .scorers import Params
from .t5 import T5Scorer

_LAYER = re.compile(r"(.+?)\.(\d+)\.(.+)")


class Parameters(nnx.Module):
    """Parameters, and groups of them, as attributes: `self_attn.q_proj.weight` is just that.

    Args:
        arrays: by dotted names; numbers become places of an `nnx.List`.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        for name, group in _groups(arrays).items():
            setattr(self, name, _to_node(group))


class FlaxModel(Parameters):
    """A Llama, Qwen2, Qwen3, Mistral, Gemma or T5 in JAX, on the checkpoints that transformers loads in PyTorch.

    Its attributes are the checkpoint's tensors: `model.model.layers[0].self_attn.q_proj.weight` is an `nnx.Param` in
    torch's `[out, in]` layout, to be read, replaced or trained. `params` are the same numbers for `scorer`.

    Args:
        config: a config of transformers.
        arrays: the parameters by name; random ones if None.
        rngs: where random ones come from; seed 0 if None.
        dtype: of random ones.

    Attributes:
        config: the config.
        generation_config: transformers' defaults of `generate`.
        spec: the static facts that the config says.

    Raises:
        NotImplementedError: an architecture or a field that is not implemented in Flax; it names the field.

    Example:
        >>> from transformers import LlamaConfig
        >>> model = FlaxModel(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> model.model.layers[1].mlp.up_proj.weight.shape
        (11008, 8)
        >>> model(np.array([[3, 4, 5]])).shape
        (1, 3, 8)
    """

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
        elif spec.is_tied and checkpoint.HEAD in arrays:
            spec = spec.untie()
        super().__init__(arrays)
        self._facts = _Facts(config, spec, tuple(arrays))

    @classmethod
    def from_pretrained(
        cls,
        repo_or_dir: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        dtype: Any = None,
    ) -> Self:
        """Load a checkpoint from a folder or the Hub: one or several safetensors, as transformers saves them.

        Args:
            repo_or_dir: folder or repository id.
            revision: branch, tag or commit.
            token: of the Hub.
            cache_dir: where downloads are kept.
            local_files_only: use nothing but what was downloaded before.
            subfolder: of the checkpoint within the folder or repository.
            dtype: what to convert parameters to: "float32", "bfloat16" or "float16", as a name or as jax.numpy's; None
                or "auto" for the checkpoint's own.

        Raises:
            ValueError: nothing there; a tensor that is missing, unexpected or of another shape.
            NotImplementedError: an architecture or a field that is not implemented in Flax; it names the field.
        """
        from transformers import AutoConfig, GenerationConfig

        wanted = checkpoint.check_dtype(dtype)
        folder = checkpoint.find(
            repo_or_dir,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        config = AutoConfig.from_pretrained(folder)
        own = str(config.dtype or "").removeprefix("torch.")
        arrays = checkpoint.load(folder, to_spec(config), dtype=wanted or (own if own in checkpoint.DTYPES else None))
        config._name_or_path = str(repo_or_dir)
        model = cls(config, arrays=arrays)
        if (folder / checkpoint.GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model

    def save_pretrained(self, save_directory: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Save a checkpoint that transformers loads, and this class.

        Args:
            save_directory: made if it is not there; a checkpoint in it is replaced.
            max_shard_size: of a file; what is larger becomes several, and an index.

        Raises:
            ValueError: a file in the folder's place.
            OSError: a file that cannot be written, such as on a full disk.
        """
        self._save(Path(save_directory), max_shard_size=max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Upload the checkpoint to a repository of the Hub, which is created if need be; a model card there is kept.

        Returns:
            The commit's address.
        """
        from hf_gr.cards import model_card

        def save(folder: Path, name: str) -> None:
            card = model_card(
                name,
                architecture=self.config.architectures[0],
                is_encoder_decoder=self.is_encoder_decoder,
                catalogue=getattr(self.generation_config, "constraint_index", None),
            )
            self._save(folder, max_shard_size=max_shard_size, card=card)

        return push_folder(
            save,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        decoder_input_ids: ArrayLike | None = None,
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits behind every token (of the decoder), in fp32.

        Args:
            input_ids: `[B, P]`.
            attention_mask: `[B, P]`, 1 or true at real tokens; all of them if None.
            decoder_input_ids: `[B, Q]`, of an encoder-decoder.

        Raises:
            ValueError: another number of axes or rows, or decoder tokens where there is no decoder, or none where
                there is one.
            NotImplementedError: more tokens than a sliding window.
        """
        tokens = _to_tokens(input_ids, "input_ids")
        mask = jnp.ones(tokens.shape, dtype=bool) if attention_mask is None else jnp.asarray(attention_mask) != 0
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask has shape {mask.shape}, expected {tokens.shape}, that of input_ids")
        self.spec.check_length(tokens.shape[1])
        if (decoder_input_ids is not None) != self.is_encoder_decoder:
            what = "some: an encoder-decoder's sequences begin with them" if self.is_encoder_decoder else "none"
            raise ValueError(f"decoder_input_ids={decoder_input_ids!r}, expected {what}")
        if decoder_input_ids is None:
            return _forward(self.scorer, self.params, tokens, mask)
        start = _to_tokens(decoder_input_ids, "decoder_input_ids")
        if len(start) != len(tokens):
            raise ValueError(f"decoder_input_ids has {len(start)} rows, expected {len(tokens)}, those of input_ids")
        return _forward(self.scorer, self.params, tokens, mask, start)

    @property
    def config(self) -> Any:
        """The config of transformers."""
        return self._facts.config

    @property
    def generation_config(self) -> Any:
        """Defaults of `generate`; those that the config says, unless others were loaded or set."""
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
    def scorer(self) -> DecoderScorer | T5Scorer:
        """The forward, over `params`; equal for models of equal `spec`."""
        return self.spec.scorer

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts are read by an encoder."""
        return isinstance(self.scorer, T5Scorer)

    @property
    def dtype(self) -> Any:
        """The type of the embeddings, which everything is computed in."""
        return self._facts.get(self)[0].dtype

    @property
    def params(self) -> Params:
        """The parameters as `scorer` takes them: layers stacked, or one by one where there are few.

        They are made at the first use and kept until a parameter is replaced. They take the memory of the parameters
        once more: on an accelerator they are the only copy there, if the model was loaded with `from_pretrained`.
        """
        arrays = [parameter.get_raw_value() for parameter in self._facts.get(self)]
        facts = self._facts
        if facts.params is not None and all(map(_is, arrays, facts.made_of)):
            return facts.params
        params = to_params(dict(zip(facts.names, arrays, strict=True)), self.spec.stacks)
        if not any(isinstance(array, Tracer) for array in arrays):
            facts.params, facts.made_of = params, arrays
        return params

    def _save(self, folder: Path, *, max_shard_size: int | str, card: str | None = None) -> None:
        arrays = {
            name: np.asarray(parameter.get_raw_value())
            for name, parameter in zip(self._facts.names, self._facts.get(self), strict=True)
        }

        def write_configs(work: Path) -> None:
            self.config.dtype = str(next(iter(arrays.values())).dtype)
            self.config.architectures = [_architecture(self.config.model_type)]
            self.config.save_pretrained(work)
            self.generation_config.save_pretrained(work)

        checkpoint.save(folder, arrays, write_configs, max_shard_size=max_shard_size, card=card)


class _Facts:
    """What a model has beside its parameters. nnx takes such an object as it is, equal to itself alone."""

    def __init__(self, config: Any, spec: Spec, names: tuple[str, ...]) -> None:
        self.config = config
        self.generation_config: Any = None
        self.spec = spec
        self.names = names
        self.get = attrgetter(*names)  # finds 300 parameters in 0.1 ms
        self.params: Params = None
        self.made_of: Sequence[Array] = ()


def random_arrays(spec: Spec, rngs: nnx.Rngs, *, dtype: Any = "float32") -> dict[str, Array]:
    """Parameters by name, for tests and for training: norms that do nothing, no biases, and weights of unit gain."""
    name = checkpoint.check_dtype(dtype) or "float32"
    norm = 0.0 if getattr(spec, "norms_plus_one", False) else 1.0
    arrays: dict[str, Array] = {}
    for parameter, shape in spec.shapes().items():
        if len(shape) == 1:
            arrays[parameter] = jnp.full(shape, norm if "norm" in parameter else 0.0, dtype=name)
        else:
            arrays[parameter] = jax.random.normal(rngs.params(), shape, dtype=name) * shape[-1] ** -0.5
    return arrays


def to_params(arrays: Mapping[str, Array], stacks: Mapping[str, int], *, scanned: bool | None = None) -> Params:
    """Parameters by name, as scorers take them.

    Args:
        arrays: by their Hugging Face names.
        stacks: where equal layers are, and how many: `{"model.layers": 28}`.
        scanned: whether layers are stacked, for `lax.scan`; None to decide by their number.

    Returns:
        Under the name of each stack its layers, as one dict of stacked arrays or as a tuple of dicts; what not every
        layer has, and everything else, under its own name.
    """
    layers: dict[str, list[dict[str, Array]]] = {stack: [{} for _ in range(num)] for stack, num in stacks.items()}
    params: dict[str, Any] = {}
    for name, array in arrays.items():
        found = _LAYER.fullmatch(name)
        if found is not None and found[1] in layers:
            layers[found[1]][int(found[2])][found[3]] = array
        else:
            params[name] = _on_device(array)
    for stack, of_stack in layers.items():
        common = set.intersection(*(set(layer) for layer in of_stack))
        for place, layer in enumerate(of_stack):
            params |= {f"{stack}.{place}.{name}": _on_device(layer[name]) for name in layer if name not in common}
        names = [name for name in of_stack[0] if name in common]
        if len(of_stack) >= MIN_SCANNED_LAYERS if scanned is None else scanned:
            params[stack] = {name: _stack([layer[name] for layer in of_stack]) for name in names}
        else:
            params[stack] = tuple({name: _on_device(layer[name]) for name in names} for layer in of_stack)
    return params


@partial(jax.jit, static_argnums=0)
def _forward(scorer: DecoderScorer | T5Scorer, params: Params, *arrays: Array) -> Array:
    return scorer(params, *arrays)


def _groups(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    groups: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = array
    return groups


def _to_node(group: Mapping[str, Array]) -> nnx.Module | nnx.Param:
    if "" in group:
        return nnx.Param(group[""])
    if all(name[0].isdigit() for name in group):
        parts = _groups(group)
        return nnx.List([_to_node(parts[str(place)]) for place in range(len(parts))])
    return Parameters(group)


def _stack(arrays: Sequence[Array]) -> Array:
    if all(_is_on_host(array) for array in arrays):  # without a program to compile for every shape
        return jnp.asarray(np.stack([np.asarray(array) for array in arrays]))
    return jnp.stack(arrays)


def _on_device(array: Array) -> Array:
    """An array where JAX computes: those that wait in the host's memory are moved."""
    return jnp.asarray(np.asarray(array)) if jax.default_backend() != "cpu" and _is_on_host(array) else array


def _is_on_host(array: Array) -> bool:
    return not isinstance(array, Tracer) and {device.platform for device in array.devices()} == {"cpu"}


def _is(one: Any, other: Any) -> bool:
    return one is other


def _to_tokens(tokens: ArrayLike, name: str) -> Array:
    array = jnp.asarray(tokens)
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected integers [batch, tokens]")
    return array


def _architecture(family: str) -> str:
    """The class of transformers that a checkpoint of ours belongs to."""
    names = {"gemma": "Gemma", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return "T5ForConditionalGeneration" if family == "t5" else f"{names[family]}ForCausalLM"
