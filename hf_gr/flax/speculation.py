# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What was scored ahead, and logits for the live beams from that. Knows no trie and no model.

Axes: B batch, K beams, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import HostOrDevice, along
from .beam import DEAD, Beams
from .transition import DeviceCatalogue
from .tree import Nodes
from .verifiers import locate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation:
    """What one call scored ahead, and what was accepted. Inside a program everything is an array.

    Attributes:
        target_forwards: forwards of the model after the prefill; the same for all rows that are decided together.
        draft_forwards: forwards of a draft model: none.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row.
        accepted_steps: levels decided from a draft.
    """

    target_forwards: Int[HostOrDevice, " batch"] | int
    draft_forwards: Int[HostOrDevice, " batch"] | int
    drafted_nodes: Int[HostOrDevice, " batch"]
    accepted_nodes: Int[HostOrDevice, " batch"]
    drafted_steps: Int[HostOrDevice, " batch"]
    accepted_steps: Int[HostOrDevice, " batch"]

    @classmethod
    def none(cls, batch_size: int, *, target_forwards: int | Int[Array, ""]) -> Speculation:
        """Nothing was scored ahead."""
        nothing = jnp.zeros(batch_size, dtype=jnp.int32)
        return cls(nothing + target_forwards, *[nothing] * 5)


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams. Static: hashable, without arrays."""

    def size(self, level: int) -> int:
        """How many nodes a draft below beams of a level has, padding included; 0 if nothing is ever drafted."""
        ...

    def draft(
        self, beams: Beams, catalogue: DeviceCatalogue, *, level: int
    ) -> tuple[Nodes, Int[Array, ""], Bool[Array, ""]]:
        """All legal continuations of the beams.

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
        nodes: the drafted nodes.
        scored: the logits after each.
        speculation: what happened so far.
    """

    nodes: Nodes
    scored: Float[Array, "batch nodes vocab"]
    speculation: Speculation

    @classmethod
    def over(
        cls,
        nodes: Nodes,
        scored: Float[Array, "batch nodes vocab"],
        *,
        num_steps: Int[Array, ""],
        target_forwards: int,
        dead_state: Int[Array, ""],
    ) -> Lookahead:
        """Scored nodes of `num_steps` levels; none is accepted yet."""
        none = Speculation.none(len(scored), target_forwards=target_forwards)
        drafted = (nodes.states != dead_state).sum(-1, dtype=jnp.int32)
        return cls(nodes, scored, replace(none, drafted_nodes=drafted, drafted_steps=none.drafted_steps + num_steps))

    def logits(self, beams: Beams) -> tuple[Float[Array, "batch beams vocab"], Lookahead]:
        """The logits after every beam; arbitrary ones after beams that have ended."""
        places, _ = locate(beams, self.nodes)  # every live beam has a place: the draft is complete
        alive = beams.scores > DEAD
        own = jnp.arange(self.nodes.states.shape[1], dtype=jnp.int32)
        stood_on = ((places[..., None] == own) & alive[..., None]).any(1)  # several paths may share a node
        before = self.speculation
        after = replace(
            before,
            accepted_nodes=before.accepted_nodes + stood_on.sum(-1, dtype=jnp.int32),
            accepted_steps=before.accepted_steps + 1,
        )
        return along(self.scored, places[..., None]), replace(self, speculation=after)
