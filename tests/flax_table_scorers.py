# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The JAX twin of `table_scorers`: logits from tables by prefix, known to a scorer by what a node sees alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hf_gr.flax.scorers import Prompt


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableCache:
    """The token and the depth of the node in each slot."""

    slots: Any

    def with_room(self, num_slots: int) -> TableCache:
        return TableCache(jnp.zeros((len(self.slots), num_slots, 2), jnp.int32))

    @property
    def num_slots(self) -> int:
        return self.slots.shape[1]

    def keep(self, nodes: Any, depths: Any, places: Any, is_new: Any) -> TableCache:
        found = jnp.take_along_axis(nodes, places[..., None], axis=1, mode="clip")
        return TableCache(jnp.where(is_new[..., None], found, self.slots))

    def put(self, nodes: Any, depths: Any, start: Any) -> TableCache:
        return TableCache(jax.lax.dynamic_update_slice_in_dim(self.slots, nodes, start, axis=1))


@dataclass(frozen=True)
class TableScorer:
    """A scorer that reads a node's prefix off the slots that it sees: its parameters are the tables, by depth."""

    vocabulary: int

    def prefill(self, params: list[Any], prompt: Prompt) -> tuple[Any, TableCache]:
        batch_size = len(prompt.input_ids)
        logits = jnp.broadcast_to(params[0][:, 0], (batch_size, self.vocabulary))
        return logits, TableCache(jnp.zeros((batch_size, 0, 2), jnp.int32))

    def read_with(
        self, params: list[Any], prompt: Prompt, tokens: Any, depths: Any, visible: Any
    ) -> tuple[Any, TableCache, Any]:
        first, cache = self.prefill(params, prompt)
        scored, made = self.score(params, cache, tokens, depths, visible)
        return jnp.concatenate([first[:, None], scored], axis=1), cache, made

    def logits(self, params: list[Any], hidden: Any) -> Any:
        return hidden

    def score(
        self, params: list[Any], cache: TableCache, tokens: Any, depths: Any, visible: Any, wanted: Any = None
    ) -> tuple[Any, Any]:
        made = jnp.stack([tokens, depths], axis=-1)
        known_tokens, known_depths = jnp.moveaxis(jnp.concatenate([cache.slots, made], axis=1), -1, 0)
        behind = depths[..., None] - known_depths[:, None]
        worth = jnp.where(behind >= 0, self.vocabulary ** jnp.maximum(behind, 0), 0)
        prefixes = (jnp.where(visible, worth, 0) * known_tokens[:, None]).sum(-1)
        stacked = jnp.concatenate([jnp.broadcast_to(t, (len(tokens), *t.shape[1:])) for t in params], axis=1)
        starts = np.cumsum([0, *(t.shape[1] for t in params)])
        places = jnp.asarray(starts)[depths] + prefixes
        places = places if wanted is None else jnp.take_along_axis(places, wanted, axis=1)
        return jnp.take_along_axis(stacked, places[..., None], axis=1), made


def prompt_of(batch_size: int) -> Prompt:
    """A prompt that nobody reads."""
    ones = np.ones((batch_size, 2), np.int32)
    return Prompt(ones, ones.astype(bool))  # pyright: ignore
