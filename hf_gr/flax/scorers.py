# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Scores tree nodes by a model, with the nodes of a request on the sequence axis, over one prompt.

A scorer is static: hashable, equal to any other of the same configuration, without arrays; a program is compiled
once for all equal ones. Everything that changes is an argument: parameters, prompt, cache. Nothing is mutated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import HostOrDevice

Params = Any  # a pytree of arrays: `FlaxModel.params`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prompt:
    """The start of a request."""

    # the prompt; for a decoder padded on the left, for an encoder padded anywhere
    input_ids: Int[HostOrDevice, "batch prompt"]
    mask: Bool[HostOrDevice, "batch prompt"]  # real tokens of the prompt
    # the first tokens of an encoder-decoder's sequences, all of them real; None for a decoder
    decoder_input_ids: Int[HostOrDevice, "batch start"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeysValues:
    """Keys and values of some tokens; heads come before tokens, as attention multiplies them."""

    keys: Float[Array, "*layers batch heads tokens head_dim"]
    values: Float[Array, "*layers batch heads tokens head_dim"]


Layered: TypeAlias = KeysValues | tuple[KeysValues, ...]  # of all layers: stacked, or one by one


Room = TypeVar("Room", bound="NodeRoom")  # not `Self`, which beartype accepts only on whole classes


@dataclass(frozen=True, kw_only=True)
class NodeRoom:
    """A fixed room for what later nodes read of earlier ones, in the form of the field that `of_prompt` names."""

    of_prompt: ClassVar[str]  # the field with the same of the prompt: arrays `[..., tokens, width]`
    room: Any = None  # by slot; the content of a slot that no node sees means nothing. None before `with_room`.
    slot_depths: Int[Array, "batch slots"] | None = None  # the depth of the node in each slot; 1 before there is one

    @property
    def num_slots(self) -> int:
        """Slots for nodes."""
        return 0 if self.slot_depths is None else self.slot_depths.shape[1]

    def depths_with(self, depths: Int[Array, "batch nodes"]) -> Int[Array, "batch slots_and_nodes"]:
        """The depths of all slots, then those of new nodes."""
        return depths if self.slot_depths is None else jnp.concatenate([self.slot_depths, depths], axis=1)

    def with_room(self: Room, num_slots: int) -> Room:
        """The same with room for nodes."""
        if not num_slots:
            return self

        def empty(array: Array) -> Array:
            return jnp.zeros((*array.shape[:-2], num_slots, array.shape[-1]), dtype=array.dtype)

        room = jax.tree.map(empty, getattr(self, self.of_prompt))
        one = jax.tree.leaves(room)[0]
        return replace(self, room=room, slot_depths=jnp.ones((one.shape[_batch_axis(one)], num_slots), jnp.int32))

    def keep(
        self: Room,
        nodes: Any,  # the new nodes
        depths: Int[Array, "batch nodes"],  # of those
        places: Int[Array, "batch slots"],  # for every slot a place among the new nodes
        is_new: Bool[Array, "batch slots"],  # which slots are given that node; the others stay as they are
    ) -> Room:
        """The same with those of new nodes in some slots."""
        if self.slot_depths is None:
            return self

        def kept(room: Array, new: Array) -> Array:
            batch = _batch_axis(room)
            shape = (*[1] * batch, len(places), *[1] * (room.ndim - batch - 3), -1, 1)
            found = jnp.take_along_axis(new, places.reshape(shape), axis=-2, mode="clip")
            return jnp.where(is_new.reshape(shape), found, room)

        depths = jnp.where(is_new, jnp.take_along_axis(depths, places, axis=1, mode="clip"), self.slot_depths)
        return replace(self, room=jax.tree.map(kept, self.room, nodes), slot_depths=depths)


def _batch_axis(room: Array) -> int:
    """Of `[*layers, batch, heads, slots, width]`, or `[batch, slots, width]`."""
    return max(room.ndim - 4, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache(NodeRoom):
    """Keys and values of a prompt, stored once a request, and of nodes after it, for which there is a fixed room."""

    of_prompt = "prompt"

    # of the tokens that nodes follow: the prompt of a decoder, the start of an encoder-decoder's sequences
    prompt: Layered
    prompt_mask: Bool[Array, "batch prompt"]  # real tokens among those
    next_position: Int[Array, " batch"]  # the position after them
    cross: Layered | None = None  # of the encoder's tokens; None for a decoder
    cross_mask: Bool[Array, "batch source"] | None = None  # real tokens among those

    def by_layer(self) -> Any:
        """What each layer needs of prompt, encoder and nodes, as `layers.over_layers` takes it."""
        parts = (self.prompt, self.cross, self.room)
        if not isinstance(self.prompt, tuple):
            return parts
        return tuple(zip(*((None,) * len(self.prompt) if part is None else part for part in parts), strict=True))

    def split(self) -> tuple[Cache, Layered]:
        """The same of the prompt alone, where nodes have been computed as its last tokens; and those of the nodes."""
        end = self.prompt_mask.shape[-1]
        prompt, nodes = (
            jax.tree.map(lambda array, part=part: array[..., part, :], self.prompt)
            for part in (slice(end), slice(end, None))
        )
        return replace(self, prompt=prompt), nodes


ScorerCache: TypeAlias = Any  # a pytree of the scorer's own: `Cache` for the models here, `HeadCache` for a draft head


@runtime_checkable
class Scorer(Protocol):
    """Scores the children of a prompt, then of its tree nodes. Pure: call it inside `jax.jit`."""

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch vocab"], ScorerCache]:
        """Compute the prompt, once a request.

        Returns:
            The logits after the prompt (fp32), and a cache without room for nodes: `with_room` makes some.
        """
        ...

    def score(
        self,
        params: Params,  # the parameters that the prompt was computed with
        cache: ScorerCache,  # of the prompt and of earlier nodes
        tokens: Int[Array, "batch nodes"],  # the token that each node ends with
        # tokens from the prompt to each node, itself included: 1 for a node right after the prompt
        depths: Int[Array, "batch nodes"],
        # whether a node sees what is in each slot of the cache, then each of these nodes: true for its ancestors and
        # for itself
        visible: Bool[Array, "batch nodes slots_and_nodes"],
        # places of the nodes after which logits are wanted; None for all
        wanted: Int[Array, "batch wanted"] | None = None,
    ) -> tuple[Float[Array, "batch wanted vocab"], Any]:
        """Compute new nodes in one forward, of one or of several levels.

        Returns:
            The logits after each wanted node (fp32), and what the nodes are to later ones, which `cache.keep`
            stores.
        """
        ...


@runtime_checkable
class JointScorer(Scorer, Protocol):
    """A scorer whose prefill may include nodes."""

    def read_with(
        self,
        params: Params,
        prompt: Prompt,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, "batch nodes"],
        visible: Bool[Array, "batch nodes nodes"],
    ) -> tuple[Float[Array, "batch one_and_nodes hidden"], ScorerCache, Any]:
        """`prefill`, then `score` of nodes below the prompt, in one forward; arguments are theirs.

        Returns:
            The last layer's normed output at the prompt's end, then at each node; the cache of the prompt; and what
            the nodes are to later ones.
        """
        ...

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """The logits (fp32) that follow from the last layer's normed output."""
        ...
