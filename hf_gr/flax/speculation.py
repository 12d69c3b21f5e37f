# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The nodes scored together with the live beams, and counts of them. Knows no trie and no model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core import plan
from hf_gr.core.beam import DEAD, Beams
from hf_gr.core.plan import static

from .arrays import along
from .transition import DeviceCatalogue
from .tree import Nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Speculation(plan.Speculation):
    """`hf_gr.core.plan.Speculation`; inside a program everything is an array, forwards by row."""

    @classmethod
    def none(cls, batch_size: int) -> Speculation:
        """Nothing was scored yet but the prompt."""
        nothing = jnp.zeros(batch_size, dtype=jnp.int32)
        return cls(nothing, nothing, nothing, nothing, nothing, nothing)

    def after_forward(self) -> Speculation:
        """One more forward of the model."""
        return replace(self, target_forwards=self.target_forwards + 1)

    def drafting(self, draft: Draft | None, dead_state: Int[Array, ""]) -> Speculation:
        """A draft, if there is one, is scored ahead."""
        if draft is None:
            return self
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
            self, accepted_nodes=self.accepted_nodes + num_nodes, accepted_steps=self.accepted_steps + (num_nodes > 0)
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Nodes to score ahead."""

    nodes: Nodes  # the nodes, below the live beams of each row
    num_steps: Int[Array, " batch"]  # their levels, by row
    num_forwards: Int[Array, ""]  # forwards of a draft model that they took
    is_whole: Bool[Array, " batch"]  # the rows of which all that follows is drafted
    num_guessed: Int[Array, " batch"]  # the first levels, which a draft model has found; each has `width` places
    # by level of the nodes above, what a relaxed draft drew its nodes with; None for others
    log_probs: tuple[Float[Array, "batch above children"], ...] | None = None
    num_live: int = static(default=1)  # places before the nodes in the numbers of their parents (static)
    width: int = static(default=0)  # nodes of a level of a draft model's search, padding included (static)

    @classmethod
    def none(
        cls, batch_size: int, size: int, dead_state: Int[Array, ""], *, num_live: int = 1, width: int = 0
    ) -> Draft:
        """Padding alone."""
        nothing = jnp.zeros(batch_size, dtype=jnp.int32)
        nodes, is_whole = Nodes.none(batch_size, size, dead_state), jnp.zeros(batch_size, dtype=bool)
        return cls(nodes, nothing, jnp.int32(0), is_whole, nothing, num_live=num_live, width=width)

    def with_rows(self, rows: Bool[Array, " batch"], other: Draft) -> Draft:
        """The same with another draft, which is not larger, of some rows."""
        names = ("num_steps", "is_whole", "num_guessed")
        values = {name: jnp.where(rows, getattr(other, name), getattr(self, name)) for name in names}
        return replace(self, **values).with_nodes(rows, other.nodes, 0)

    def with_nodes(self, rows: Bool[Array, " batch"], nodes: Nodes, start: int | Int[Array, ""]) -> Draft:
        """The same with nodes of some rows in the places from `start` on."""

        def put(new: Array, old: Array) -> Array:
            before = lax.dynamic_slice_in_dim(old, start, new.shape[1], axis=1)
            return lax.dynamic_update_slice_in_dim(old, jnp.where(rows[:, None], new, before), start, axis=1)

        return replace(self, nodes=jax.tree.map(put, nodes, self.nodes))


@dataclass(frozen=True)
class Context:
    """What a drafter may read."""

    catalogue: DeviceCatalogue  # the catalogue
    plan: Any  # the options of the call
    noise: Any = None  # the source of randomness, if it samples
    params: Any = None  # the draft model's parameters; None without one
    memory: Any = None  # the draft model's state after the prompts; None without one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scored:
    """The scores of one forward: of the prompt's end or the live beams, then of the nodes drafted below."""

    logits: Float[Array, "batch nodes vocab"]  # after each
    totals: Float[Array, "batch nodes"]  # the log of the summed exponentials of each
    states: Int[Array, "batch nodes"]  # trie nodes
    depths: Int[Array, "batch nodes"]  # tokens from the prompt to each
    made: Any  # what each is to later nodes: see `Scorer.score`; None for the prompt's end
    levels: Int[Array, " batch"]  # tokens of the live beams, by row
    draft: Draft | None = None  # where the nodes come from; None without any
    num_live: int = static(default=1)  # how many are no draft (static)

    @classmethod
    def of(cls, logits: Float[Array, "batch nodes vocab"], states: Int[Array, "batch nodes"], **others: Any) -> Scored:
        """The same; computes `totals`."""
        return cls(logits, jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1), states, **others)

    def num_accepted(self, beams: Beams, places: Int[Array, "batch beams"]) -> Int[Array, " batch"]:
        """How many drafted nodes the living beams stand on: several paths may share one."""
        alive = beams.scores > DEAD
        own = jnp.arange(self.num_live, self.states.shape[1], dtype=jnp.int32)
        return ((places[..., None] == own) & alive[..., None]).any(1).sum(-1, dtype=jnp.int32)

    def drawn(
        self, own: Int[Array, "batch beams"], *, level: int
    ) -> tuple[Nodes, Int[Array, "batch beams"], Bool[Array, " batch"]]:
        """What a relaxed draft drew below the beams of a level, which are at places `own` among the nodes.

        Returns:
            The nodes, in drawing order, by places among those one level above; where the beams are among those; and
            the rows that have such nodes.
        """
        draft = self.draft
        assert draft is not None
        step = level - self.levels
        has_some = (step >= 0) & (step < draft.num_guessed)
        step = jnp.where(has_some, step, 0)[:, None]
        places = step * draft.width + jnp.arange(draft.width, dtype=jnp.int32)
        nodes = jax.tree.map(lambda of_all: along(of_all, places), draft.nodes)
        first = jnp.where(step > 0, draft.num_live + (step - 1) * draft.width, 0)  # of the level above
        return replace(nodes, parents=nodes.parents - first), jnp.clip(own - first, 0, draft.width - 1), has_some
