# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores tree nodes by a model, with the nodes of a request on the sequence axis, over one prompt.

A scorer is static: hashable, equal to any other of the same configuration, without arrays; a program is compiled
once for all equal ones. Everything that changes is an argument: parameters, prompt, cache. Nothing is mutated.

Axes: B batch, P prompt, N nodes of one call, S slots (nodes scored so far), V vocabulary, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import HostOrDevice

Params = Any  # a pytree of arrays: `FlaxModel.params`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompt:
    """The start of a request.

    Attributes:
        input_ids: the prompt; for a decoder padded on the left, for an encoder padded anywhere.
        mask: real tokens of the prompt.
        decoder_input_ids: the first tokens of an encoder-decoder's sequences, all of them real; None for a decoder.
    """

    input_ids: Int[HostOrDevice, "batch prompt"]
    mask: Bool[HostOrDevice, "batch prompt"]
    decoder_input_ids: Int[HostOrDevice, "batch start"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """Keys and values of some tokens; heads come before tokens, as attention multiplies them."""

    keys: Float[Array, "*layers batch heads tokens head_dim"]
    values: Float[Array, "*layers batch heads tokens head_dim"]

    def behind(self, others: KeysValues | None) -> KeysValues:
        """Those of other tokens, then these."""
        return self if others is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-2), others, self)


Layered: TypeAlias = KeysValues | tuple[KeysValues, ...]  # of all layers: stacked, or one by one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of a prompt, stored once a request, and of the nodes after it.

    Attributes:
        prompt: of the tokens that nodes follow: the prompt of a decoder, the start of an encoder-decoder's sequences.
        prompt_mask: real tokens among those.
        next_position: the position after them.
        suffix: of nodes, in scoring order: a new node gets the next slot, and keeps it. None before the first.
        slot_depths: the depth of the node in each slot; None before the first.
        cross: of the encoder's tokens; None for a decoder.
        cross_mask: real tokens among those.
    """

    prompt: Layered
    prompt_mask: Bool[Array, "batch prompt"]
    next_position: Int[Array, " batch"]
    suffix: Layered | None = None
    slot_depths: Int[Array, " slots"] | None = None
    cross: Layered | None = None
    cross_mask: Bool[Array, "batch source"] | None = None

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return 0 if self.slot_depths is None else len(self.slot_depths)

    def by_layer(self) -> Any:
        """What each layer needs of prompt, encoder and nodes, as `layers.over_layers` takes it."""
        parts = (self.prompt, self.cross, self.suffix)
        if not isinstance(self.prompt, tuple):
            return parts
        return tuple(zip(*((None,) * len(self.prompt) if part is None else part for part in parts), strict=True))

    def depths_with(self, depths: Int[Array, " nodes"]) -> Int[Array, " slots"]:
        """The depths of all slots once nodes of these depths follow those in use."""
        return depths if self.slot_depths is None else jnp.concatenate([self.slot_depths, depths])

    def split(self, depths: Int[Array, " nodes"]) -> Cache:
        """The same, where nodes of these depths have been computed as the prompt's last tokens."""
        end = self.prompt_mask.shape[-1]
        prompt = jax.tree.map(lambda array: array[..., :end, :], self.prompt)
        return replace(self, prompt=prompt).grow(jax.tree.map(lambda array: array[..., end:, :], self.prompt), depths)

    def grow(self, suffix: Layered, depths: Int[Array, " nodes"]) -> Cache:
        """The cache with new nodes of these depths; `suffix` also has those in use."""
        return replace(self, suffix=suffix, slot_depths=self.depths_with(depths))


ScorerCache: TypeAlias = Any  # a pytree of the scorer's own: `Cache` for the models here, `HeadCache` for a draft head


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes. Pure: call it inside `jax.jit`."""

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch vocab"], ScorerCache]:
        """Compute the prompt, once a request.

        Returns:
            The logits after the prompt (fp32), and a cache without nodes.
        """
        ...

    def score(
        self,
        params: Params,
        cache: ScorerCache,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, " nodes"],
        visible: Bool[Array, "batch nodes slots"],
    ) -> tuple[Float[Array, "batch nodes vocab"], ScorerCache]:
        """Compute new nodes in one forward, of one or of several levels.

        Args:
            params: the parameters that the prompt was computed with.
            cache: as returned by the last call.
            tokens: the token that each node ends with.
            depths: tokens from the prompt to each node, itself included: 1 for a node right after the prompt.
            visible: whether a node sees each slot: true for its ancestors and for itself. The slots of this call come
                after those of `cache`.

        Returns:
            The logits after each node (fp32), and the cache with the nodes.
        """
        ...


@runtime_checkable
class JointScorer(Scorer, Protocol):
    """A scorer whose prefill may include nodes."""

    def prefill_with(
        self,
        params: Params,
        prompt: Prompt,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, " nodes"],
        visible: Bool[Array, "batch nodes nodes"],
    ) -> tuple[Float[Array, "batch one_and_nodes vocab"], ScorerCache]:
        """`prefill`, then `score` of nodes below the prompt, in one forward; arguments are theirs.

        Returns:
            The logits after the prompt, then those after each node (fp32), and the cache with the nodes.
        """
        ...
