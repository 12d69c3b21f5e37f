# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is scored together with the live beams, and what was scored. Knows no trie and no model.

Axes: B batch, K beams, N drafted nodes, M beams and drafted nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import HostOrDevice, static
from .beam import DEAD, Beams
from .transition import DeviceCatalogue
from .tree import Nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation:
    """What one call scored ahead, and what was accepted. Inside a program everything is an array.

    Attributes:
        target_forwards: forwards of the model after the prefill, 0 if that scored all; the same for all rows that are
            decided together.
        draft_forwards: forwards of a draft model after its prefill.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row; a level may be drafted several times.
        accepted_steps: levels decided from a draft: at most all but the first, as AtSpeed counts.
        chosen: the draft that `drafting="auto"` has decided on for calls like this one: "none", "trie", "head" or
            "assistant"; None while it still compares, and without "auto" (static: no program knows it).
    """

    target_forwards: Int[HostOrDevice, " batch"] | int
    draft_forwards: Int[HostOrDevice, " batch"] | int
    drafted_nodes: Int[HostOrDevice, " batch"]
    accepted_nodes: Int[HostOrDevice, " batch"]
    drafted_steps: Int[HostOrDevice, " batch"]
    accepted_steps: Int[HostOrDevice, " batch"]
    chosen: str | None = static(default=None)

    @classmethod
    def none(cls, batch_size: int) -> Speculation:
        """Nothing was scored yet but the prompt."""
        nothing = jnp.zeros(batch_size, dtype=jnp.int32)
        return cls(nothing, nothing, nothing, nothing, nothing, nothing)

    def after_forward(self) -> Speculation:
        """One more forward of the model."""
        return replace(self, target_forwards=self.target_forwards + 1)

    def drafting(self, draft: Draft, dead_state: Int[Array, ""]) -> Speculation:
        """A draft is scored ahead."""
        drafted = (draft.nodes.states != dead_state).sum(-1, dtype=jnp.int32)
        return replace(
            self,
            draft_forwards=self.draft_forwards + draft.num_forwards,
            drafted_nodes=self.drafted_nodes + drafted,
            drafted_steps=self.drafted_steps + draft.num_steps,
        )

    def accepting(self, num_nodes: Int[Array, " batch"]) -> Speculation:
        """Beams stand on so many of the drafted nodes of a level: of one without any, nothing was drafted."""
        return replace(
            self,
            accepted_nodes=self.accepted_nodes + num_nodes,
            accepted_steps=self.accepted_steps + (num_nodes > 0),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Nodes to score ahead.

    Attributes:
        nodes: the nodes, below the live beams of each row.
        num_steps: their levels, by row.
        num_forwards: forwards of a draft model that they took.
    """

    nodes: Nodes
    num_steps: Int[Array, " batch"]
    num_forwards: Int[Array, ""]

    @classmethod
    def none(cls, batch_size: int, size: int, dead_state: Int[Array, ""]) -> Draft:
        """Padding alone."""
        return cls(Nodes.none(batch_size, size, dead_state), jnp.zeros(batch_size, dtype=jnp.int32), jnp.int32(0))

    def with_rows(self, rows: Bool[Array, " batch"], nodes: Nodes, num_steps: Int[Array, " batch"]) -> Draft:
        """The same with the first nodes of some rows."""

        def put(new: Array, old: Array) -> Array:
            new = jnp.where(rows[:, None], new, old[:, : new.shape[1]])
            return jnp.concatenate([new, old[:, new.shape[1] :]], axis=1)

        nodes = jax.tree.map(put, nodes, self.nodes)
        return replace(self, nodes=nodes, num_steps=jnp.where(rows, num_steps, self.num_steps))


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams. Static: hashable, without arrays."""

    def size(self, *, at_root: bool) -> int:
        """How many nodes a draft has, padding included: below the prompt, or below later beams; 0 for no draft."""
        ...

    @property
    def num_first(self) -> int:
        """How many levels a draft below the prompt can have."""
        ...

    def draft(
        self, beams: Beams, levels: Int[Array, " batch"], wanted: Bool[Array, " batch"], catalogue: DeviceCatalogue
    ) -> Draft:
        """Nodes below the beams of some rows.

        Args:
            beams: the live beams, with room for all tokens.
            levels: tokens of the beams of each row; 0 for all rows below the prompt.
            wanted: rows that are still to be decided.
            catalogue: the catalogue.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scored:
    """What one forward has scored: the prompt's end or the live beams, then what was drafted below.

    Attributes:
        logits: after each.
        totals: the log of the summed exponentials of each.
        states: trie nodes.
        depths: tokens from the prompt to each.
        made: what each is to later nodes: see `Scorer.score`; None for the prompt's end.
        levels: tokens of the live beams, by row.
        num_live: how many are no draft (static).
    """

    logits: Float[Array, "batch nodes vocab"]
    totals: Float[Array, "batch nodes"]
    states: Int[Array, "batch nodes"]
    depths: Int[Array, "batch nodes"]
    made: Any
    levels: Int[Array, " batch"]
    num_live: int = static()

    @classmethod
    def of(cls, logits: Float[Array, "batch nodes vocab"], states: Int[Array, "batch nodes"], **others: Any) -> Scored:
        """The same; computes `totals`."""
        return cls(logits, jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1), states, **others)

    def num_accepted(self, beams: Beams, places: Int[Array, "batch beams"]) -> Int[Array, " batch"]:
        """How many drafted nodes the living beams stand on: several paths may share one."""
        alive = beams.scores > DEAD
        own = jnp.arange(self.num_live, self.states.shape[1], dtype=jnp.int32)
        return ((places[..., None] == own) & alive[..., None]).any(1).sum(-1, dtype=jnp.int32)
