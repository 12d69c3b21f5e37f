# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft head, as that of `hf_gr.torch.draft_head`, which tells what it computes. Knows no trie.

Heads are trained in PyTorch (`hf_gr.training.DraftHeadTrainer`); here they decode.

Axes: B batch, N nodes of a level, L levels, H hidden size, T_l codes of level l, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from hf_gr.files import draft_head as head_files
from hf_gr.files.cards import head_card, head_facts
from hf_gr.files.draft_head_config import DraftHeadConfig
from hf_gr.files.hub_mixin import HubMixin

from .arrays import along
from .layers import to_logits
from .parameters import Facts, Parameters
from .scorers import NodeRoom, Params, Prompt


class DraftHead(HubMixin, Parameters, what="draft head", files=head_files.FILES):
    """Logits of every level's codes, from hidden states and from the codes before; `model.draft_head`.

    Its attributes are the tensors of `hf_gr.torch.draft_head.DraftHead`, under the same names.

    Args:
        config: its shape.
        codebooks: for every level the token ids of its codes, distinct; the vocabulary is the model's.
        arrays: the parameters by name, those of `shapes_of`.
        placeholder_embeddings: the placeholders' input embeddings, where they are known.

    Raises:
        ValueError: codebooks that are not those of `config`.
    """

    def __init__(
        self,
        config: DraftHeadConfig,
        codebooks: Sequence[Any],
        *,
        arrays: Mapping[str, Array],
        placeholder_embeddings: npt.NDArray[Any] | None = None,
    ) -> None:
        codes = [np.asarray(level, dtype=np.int64).ravel() for level in codebooks]
        head_files.check_codebooks(config, codes)
        super().__init__(arrays)
        numbers = {}
        for level, tokens in enumerate(codes):
            # By token, its place among the level's codes; other tokens get one that is never read.
            columns = np.zeros(int(tokens.max()) + 1, np.int32)
            columns[tokens] = np.arange(len(tokens), dtype=np.int32)
            numbers |= {f"codebook_{level}": jnp.asarray(tokens, jnp.int32), f"columns_{level}": jnp.asarray(columns)}
        self._facts: Any = Facts(
            tuple(arrays), config=config, codes=codes, numbers=numbers, rows=placeholder_embeddings
        )

    @property
    def config(self) -> DraftHeadConfig:
        """Its shape."""
        return self._facts.config

    @property
    def placeholder_embeddings(self) -> npt.NDArray[Any] | None:
        """The placeholders' input embeddings `[L, E]` from its file; None if unknown."""
        return self._facts.rows

    @property
    def params(self) -> Params:
        """The parameters and the codes' numbers, as `HeadScorer` takes them."""
        return self.params_on(None)

    def params_on(self, sharding: Sharding | None) -> Params:
        """`params` on several devices; kept for every sharding in use."""

        def make(arrays: dict[str, Array]) -> Params:
            params = self._facts.numbers | arrays
            return params if sharding is None else jax.device_put(params, sharding)

        return self._facts.params(self, sharding, make)

    def astype(self, dtype: Any) -> DraftHead:
        """The same head with parameters of another type."""
        arrays = {name: array.astype(dtype) for name, array in self._facts.arrays(self).items()}
        return DraftHead(self.config, self._facts.codes, arrays=arrays, placeholder_embeddings=self._facts.rows)

    def codebook(self, level: int) -> npt.NDArray[Any]:
        """The tokens of a level's codes."""
        return self._facts.codes[level]

    @classmethod
    def _from_folder(cls, folder: Path) -> DraftHead:
        def make(config: DraftHeadConfig, tensors: dict[str, Any], rows: Any) -> DraftHead:
            shapes = shapes_of(config)
            sizes = {f"codebook_{level}": (size,) for level, size in enumerate(config.codebook_sizes)}
            head_files.check_tensors(shapes | sizes, tensors)
            arrays = {name: jnp.asarray(tensors[name]) for name in shapes}
            return cls(config, [tensors[name] for name in sizes], arrays=arrays, placeholder_embeddings=rows)

        return head_files.load_head(folder, lambda kind, shape, data: np.frombuffer(data, kind).reshape(shape), make)

    def facts(self) -> str:
        """What model cards say about it."""
        arrays = list(self._facts.arrays(self).values())
        return head_facts(self.config, sum(array.size for array in arrays), str(arrays[0].dtype))

    def save_beside(self, directory: Path, embeddings: npt.NDArray[Any]) -> None:
        """Write the two files next to those of a model with these input embeddings, which has a card of its own."""
        places = list(self.config.placeholder_token_ids)
        self._save(directory, rows=embeddings[places] if places else None)

    def _save(self, directory: Path, *, name: str | None = None, rows: npt.NDArray[Any] | None = None) -> None:
        """Save; with a `name`, also write a card that tells users to load the head by it."""
        tensors = {name: np.asarray(array) for name, array in self._facts.arrays(self).items()}
        tensors |= {f"codebook_{level}": codes for level, codes in enumerate(self._facts.codes)}
        rows = self.placeholder_embeddings if rows is None else rows
        tensors |= {} if rows is None else {head_files.PLACEHOLDERS: rows}
        kept = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        card = None if name is None else head_card(self.facts(), name)
        head_files.save(safetensors.numpy, directory, self.config.to_dict(), kept, card=card)


def shapes_of(config: DraftHeadConfig) -> dict[str, tuple[int, ...]]:
    """The parameters' names and shapes: those of torch's modules."""
    size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for level, codes in enumerate(config.codebook_sizes):
        shapes[f"logit_heads.{level}.weight"] = (codes, size)
    if config.transition == "none":
        return shapes
    cell = {"weight_ih": (size, size), "weight_hh": (size, size), "bias_ih": (size,), "bias_hh": (size,)}
    for level, codes in enumerate(config.codebook_sizes[:-1]):
        shapes[f"embeddings.{level}.weight"] = (codes, size)
        if config.transition == "rnn":
            shapes |= {f"transitions.{level}.{name}": shape for name, shape in cell.items()}
    return shapes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadCache(NodeRoom):
    """What a head continues from: hidden states, and the recurrent states of nodes."""

    of_prompt = "hidden"

    hidden: Float[Array, "batch positions hidden"]  # hidden states of the prompt's last token and of the placeholders


@dataclass(frozen=True)
class HeadScorer:
    """A draft head as a scorer: nodes cost a small matrix product, and no forward of the model.

    Each call scores the next level. Its parameters are `{"model": ..., "head": DraftHead.params}`.
    """

    config: DraftHeadConfig  # the head's shape
    model: Any  # the model's scorer, which reads the prompt
    # to have logits over the whole vocabulary, `-inf` for all but the level's codes, as outputs want them; None for
    # the codes alone, whose places `columns` tells
    vocab_size: int | None = None

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch codes"], HeadCache]:
        """See `Scorer.prefill`: the prompt and the placeholders, once."""
        num_last = self.config.num_placeholders + 1
        return self.begin(
            params, self.model.hidden_states(params["model"], self._with_placeholders(prompt), num_last=num_last)
        )

    def begin(
        self, params: Params, hidden: Float[Array, "batch positions hidden"]
    ) -> tuple[Float[Array, "batch codes"], HeadCache]:
        """The same from given hidden states of the prompt's last token and of the placeholders."""
        hidden = hidden.astype(params["head"]["logit_heads.0.weight"].dtype)
        return self._logits(params, hidden, hidden[:, :1], level=0)[:, 0], HeadCache(hidden)

    def score(
        self,
        params: Params,
        cache: HeadCache,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, "batch nodes"],
        visible: Bool[Array, "batch nodes slots_and_nodes"],
        wanted: Int[Array, "batch wanted"] | None = None,
    ) -> tuple[Float[Array, "batch wanted codes"], Float[Array, "batch nodes hidden"]]:
        """See `Scorer.score`: level by level, for the levels that have nodes."""
        slot_depths = cache.depths_with(depths)
        # Of the nodes that a node sees, its parent is the one with one token less.
        parents = (visible & (slot_depths[:, None] == depths[..., None] - 1)).argmax(-1)
        states = jnp.zeros((*tokens.shape, cache.hidden.shape[-1]), dtype=cache.hidden.dtype)

        def advanced(states: Array, is_here: Array, depth: int) -> Array:
            if depth == 1:  # below the prompt
                above = jnp.broadcast_to(cache.hidden[:, :1], states.shape)
            else:
                known = states if cache.room is None else jnp.concatenate([cache.room, states], axis=1)
                above = along(known, parents[..., None])
            return jnp.where(is_here, self.advance(params, above, tokens, level=depth - 1), states)

        def scored(logits: Array, is_here: Array, depth: int) -> Array:
            return jnp.where(is_here, self._logits(params, cache.hidden, of_wanted, level=depth), logits)

        states = self._by_depth(advanced, states, depths)
        of_wanted, depths = states, depths
        if wanted is not None:
            of_wanted, depths = along(states, wanted[..., None]), along(depths, wanted)
        nothing = jnp.zeros((*depths.shape, self._width), dtype=jnp.float32)
        return self._by_depth(scored, nothing, depths), states

    def _by_depth(self, step: Any, values: Array, depths: Int[Array, "batch nodes"]) -> Array:
        """Change values of nodes by `step(values, is_here, depth)`, one depth after the other."""
        for depth in range(1, self.config.num_levels):
            is_here = (depths == depth)[..., None]
            values = lax.cond(is_here.any(), partial(step, depth=depth), lambda values, _: values, values, is_here)
        return values

    @property
    def columns(self) -> Any:
        """From tokens to their places in the logits; None if logits are over the vocabulary."""
        return self._columns if self.vocab_size is None else None

    def advance(
        self,
        params: Params,
        state: Float[Array, "batch nodes hidden"],
        tokens: Int[Array, "batch nodes"],
        *,
        level: int,
    ) -> Float[Array, "batch nodes hidden"]:
        """The states after one more token, which is of `level`: equation 3."""
        if self.config.transition == "none":
            return state
        head, cell = params["head"], f"transitions.{level}"
        embedded = head[f"embeddings.{level}.weight"][self._columns(params, tokens, level=level)]
        if self.config.transition == "add":
            return state + embedded
        of_token, of_state = (
            x @ head[f"{cell}.weight_{side}"].T + head[f"{cell}.bias_{side}"]
            for x, side in ((embedded, "ih"), (state, "hh"))
        )
        return jnp.tanh(of_token + of_state)

    def _with_placeholders(self, prompt: Prompt) -> Prompt:
        """The prompt with the placeholders after it (in an encoder-decoder, after the decoder's first tokens)."""
        ids = jnp.array(self.config.placeholder_token_ids, dtype=jnp.int32)
        placeholders = jnp.broadcast_to(ids, (len(prompt.input_ids), len(ids)))
        if prompt.decoder_input_ids is not None:
            start = jnp.concatenate([prompt.decoder_input_ids, placeholders], axis=1)
            return replace(prompt, decoder_input_ids=start)
        tokens = jnp.concatenate([prompt.input_ids, placeholders], axis=1)
        mask = jnp.concatenate([prompt.mask, jnp.ones(placeholders.shape, dtype=bool)], axis=1)
        return Prompt(tokens, mask)

    def _columns(self, params: Params, tokens: Int[Array, "*shape"], *, level: int) -> Int[Array, "*shape"]:
        """The places of tokens among a level's codes; an arbitrary place for a token that is none of them."""
        columns = params["head"][f"columns_{level}"]
        return columns[jnp.clip(tokens, 0, len(columns) - 1)]

    @property
    def _width(self) -> int:
        """Columns of the logits."""
        return max(self.config.codebook_sizes) if self.vocab_size is None else self.vocab_size

    def _logits(
        self,
        params: Params,
        hidden: Float[Array, "batch positions hidden"],
        state: Float[Array, "batch nodes hidden"],
        *,
        level: int,
    ) -> Float[Array, "batch nodes codes"]:
        """The logits of the codes that follow states of a level: equation 2; `-inf` beyond the level's own codes."""
        head = params["head"]
        if self.config.use_placeholders:
            placeholder = hidden[:, level + 1, None]
            state = state + placeholder if self.config.use_state else jnp.broadcast_to(placeholder, state.shape)
        logits = to_logits(state, head[f"logit_heads.{level}.weight"])
        over = jnp.full((*logits.shape[:-1], self._width), -jnp.inf, dtype=logits.dtype)
        if self.vocab_size is None:
            return lax.dynamic_update_slice_in_dim(over, logits, 0, axis=-1)
        return over.at[..., head[f"codebook_{level}"]].set(logits)


__all__ = ["DraftHead", "DraftHeadConfig", "HeadCache", "HeadScorer", "shapes_of"]
