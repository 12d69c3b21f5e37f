# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What was scored ahead, and logits for the live beams from that. Knows no trie and no model.

Axes: B batch, K beams, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import HostOrDevice, along, static
from .beam import DEAD, Beams
from .transition import DeviceCatalogue
from .tree import Nodes, Tree
from .verifiers import locate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation:
    """What one call scored ahead, and what was accepted. Inside a program everything is an array.

    Attributes:
        target_forwards: forwards of the model after the prefill, 0 if that scored all; the same for all rows that are
            decided together.
        draft_forwards: forwards of a draft model: none.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row.
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

    def drafting(self, nodes: Nodes, num_steps: Int[Array, ""], *, dead_state: Int[Array, ""]) -> Speculation:
        """Nodes of `num_steps` levels were scored ahead."""
        drafted = (nodes.states != dead_state).sum(-1, dtype=jnp.int32)
        return replace(self, drafted_nodes=self.drafted_nodes + drafted, drafted_steps=self.drafted_steps + num_steps)

    def accepting(self, num_nodes: Int[Array, " batch"]) -> Speculation:
        """Beams stand on so many of the drafted nodes of a level: of one without any, nothing was drafted."""
        return replace(
            self,
            accepted_nodes=self.accepted_nodes + num_nodes,
            accepted_steps=self.accepted_steps + (num_nodes > 0).any(),
        )


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams. Static: hashable, without arrays."""

    def size(self, level: int) -> int:
        """How many nodes a draft below beams of a level has, padding included; 0 if nothing is ever drafted."""
        ...

    @property
    def num_first(self) -> int:
        """How many levels a draft from the root has; others reach the catalogue's last level but one."""
        ...

    def draft(
        self, beams: Beams, catalogue: DeviceCatalogue, *, level: int
    ) -> tuple[Nodes, Int[Array, ""], Bool[Array, ""]]:
        """All legal continuations of the beams, or from the root all of the first levels, which always fit.

        Args:
            beams: the live beams.
            catalogue: the catalogue.
            level: tokens of each beam.

        Returns:
            The nodes; their number of levels; and whether they are complete and not empty: else they must not be used.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lookahead:
    """What was scored ahead: the logits after all legal continuations.

    Attributes:
        rest: what the next forward continues from: the tree of the beams, whose slots are places among these nodes,
            and the scorer's cache. None if there is none. It is first, as all that is left in the end.
        nodes: the drafted nodes.
        scored: the logits after each.
        num_levels: how many levels are still to be decided from these (static).
    """

    rest: tuple[Tree, Any] | None
    nodes: Nodes
    scored: Float[Array, "batch nodes vocab"]
    num_levels: int = static()

    def logits(
        self, beams: Beams
    ) -> tuple[Float[Array, "batch beams vocab"], Int[Array, " batch"], Lookahead | tuple[Tree, Any] | None]:
        """Look up the beams.

        Returns:
            The logits after every beam, arbitrary ones after beams that have ended; the number of nodes they stand on;
            and where the next level's logits come from.
        """
        places, _ = locate(beams, self.nodes)  # every live beam has a place: the draft is complete
        alive = beams.scores > DEAD
        own = jnp.arange(self.nodes.states.shape[1], dtype=jnp.int32)
        stood_on = ((places[..., None] == own) & alive[..., None]).any(1)  # several paths may share a node
        rest = None if self.rest is None else (self.rest[0].grow(beams.parents, places), self.rest[1])
        after = replace(self, rest=rest, num_levels=self.num_levels - 1) if self.num_levels > 1 else rest
        return along(self.scored, places[..., None]), stood_on.sum(-1, dtype=jnp.int32), after
