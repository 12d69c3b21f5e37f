# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft model or a draft head that searches ahead for the target's beams, and the catalogue below. Decides nothing.

Axes: B batch, K beams, N nodes of a level of the search, D nodes of a draft, S slots, V vocabulary, C children.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core.beam import DEAD, Beams, of_level, paths_of, to_room, widened
from hf_gr.core.decide import draft_best

from .arrays import along, where_rows
from .decode import child_scores, in_columns, last_tokens
from .drafters import TreeDrafter, open_children, sample, subtree
from .scorers import Params, Prompt, ScorerCache
from .speculation import Context, Draft, Scored
from .transition import children
from .tree import Nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What a draft model knows of the prompts.

    Attributes:
        logits: after the prompts.
        cache: of the prompts alone.
    """

    logits: Float[Array, "batch vocab"]
    cache: ScorerCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Search:
    """The state of a search.

    Attributes:
        nodes: of the last level, with room for all tokens; at first the target's beams.
        paths: the path that each belongs to, where paths do not compete.
        behind: how far each is behind what its path would choose.
        places: where each is among the live beams and the drafted nodes.
        seen: which slots of the cache each sees.
        logits: after each.
        cache: the draft model's.
        depths: tokens of the nodes of each row.
        is_on: the rows that search on.
        draft: what has been drafted.
    """

    nodes: Beams
    paths: Int[Array, "batch nodes"]
    behind: Float[Array, "batch nodes"]
    places: Int[Array, "batch nodes"]
    seen: Bool[Array, "batch nodes slots"]
    logits: Float[Array, "batch nodes vocab"]
    cache: ScorerCache
    depths: Int[Array, " batch"]
    is_on: Bool[Array, " batch"]
    draft: Draft


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts the whole legal subtree below the beams once it fits; a draft model narrows it until then.

    It continues from the target's beams and their scores: only what follows is guessed.

    Attributes:
        scorer: the draft model's.
        num_beams: N.
        num_steps: levels of a draft (AtSpeed's gamma).
        num_levels: L.
        tree: drafts what fits without a search.
        rest: by level of the last nodes found, the room for all that is below them; 0 where that is not tried.
        whole: open nodes of the catalogue's first levels, which are searched whole.
        first_level: where a search can begin: below the prompt, or only after it.
        tail: tokens that the target reads behind the prompt for a draft head: its placeholders.

    Source: AtSpeed, section 3; xGR leaves drafts open.
    """

    scorer: Any
    num_beams: int
    num_steps: int
    num_levels: int
    tree: TreeDrafter
    rest: tuple[int, ...]
    whole: tuple[int, ...] = ()
    first_level: int = 0
    tail: tuple[int, ...] = ()

    @property
    def num_first(self) -> int:
        """See `Drafter.num_first`."""
        return self.tree.num_first if self.first_level else self.num_levels - 1

    def size(self, *, at_root: bool) -> int:
        """See `Drafter.size`."""
        size = self.tree.size(at_root=at_root)
        if self._steps(at_root=at_root) == 0:
            return size
        return max(size, self._steps(at_root=at_root) * self._width(at_root=at_root) + max(self.rest, default=0))

    def start(self, params: Params, prompt: Prompt, hidden: Float[Array, "batch positions hidden"] | None) -> Memory:
        """Read the prompts."""
        if hidden is None:
            return Memory(*self.scorer.prefill(params, prompt))
        return Memory(*self.scorer.begin(params, hidden))

    def draft(
        self, beams: Beams, levels: Int[Array, " batch"], wanted: Bool[Array, " batch"], context: Context
    ) -> Draft:
        """See `Drafter.draft`."""
        at_root = beams.sequences.shape[-1] == 0
        size, dead_state = self.size(at_root=at_root), context.catalogue.dead_state
        num_live = 1 if at_root else beams.states.shape[1]
        none = Draft.none(len(levels), size, dead_state, num_live=num_live, width=self._width(at_root=at_root))
        draft = none.with_rows(wanted, self.tree.draft(beams, levels, wanted, context))
        if not self._steps(at_root=at_root):
            return draft
        if context.plan.is_relaxed:
            draft = replace(draft, log_probs=self._no_log_probs(len(levels), context))
        is_on = wanted & ~draft.is_whole & (levels >= self.first_level) & (levels < self.num_levels - 1)
        return lax.cond(
            is_on.any(),
            lambda: self._search(
                to_room(beams, self.num_levels), levels, is_on, draft.with_rows(is_on, none), context, at_root=at_root
            ),
            lambda: draft,
        )

    @property
    def _counted(self) -> int:
        """Forwards of a model that a call of the scorer is: a head is none."""
        return int(not self.tail)

    def _steps(self, *, at_root: bool) -> int:
        """The most levels that a search can have."""
        if at_root:
            return 0 if self.first_level else min(len(self.whole) + self.num_steps, self.num_levels - 1)
        return max(min(self.num_steps, self.num_levels - 2), 0)

    def _width(self, *, at_root: bool) -> int:
        """Nodes of a level of a search, padding included."""
        return max(self.num_beams, *self.whole) if at_root and self.whole else self.num_beams

    def _no_log_probs(self, batch_size: int, context: Context) -> tuple[Array, ...]:
        nothing = jnp.zeros((batch_size, self.num_beams), dtype=jnp.int32)
        shapes = [children(nothing, context.catalogue, level=n).tokens.shape for n in range(self.num_levels - 1)]
        return tuple(jnp.full(shape, DEAD) for shape in shapes)

    def _search(
        self,
        beams: Beams,
        levels: Int[Array, " batch"],
        is_on: Bool[Array, " batch"],
        draft: Draft,
        context: Context,
        *,
        at_root: bool,
    ) -> Draft:
        """Drafts for the rows that are on; those of others stay."""
        width, num_steps = self._width(at_root=at_root), self._steps(at_root=at_root)
        search = self._begin(beams, levels, is_on, draft, context, at_root=at_root)
        first_slot = search.cache.num_slots - (num_steps - 1) * width

        def step(number: Array, search: _Search) -> _Search:
            depths = search.depths
            for level in range(0 if at_root else 1, self.num_levels - 1):

                def at_level(search: _Search, is_here: Array, level: int = level) -> _Search:
                    return self._step(search, is_here, number, context, level=level, num_steps=num_steps)

                is_here = search.is_on & (depths == level)
                search = lax.cond(is_here.any(), at_level, lambda search, _: search, search, is_here)
            steps_left = num_steps if at_root else self.num_steps
            search = replace(search, is_on=search.is_on & (number + 1 < steps_left))
            if num_steps == 1:
                return search
            return lax.cond(
                search.is_on.any(),
                lambda: self._forward(search, first_slot + number * width, context),
                lambda: search,
            )

        def advance(numbered: tuple[Array, _Search]) -> tuple[Array, _Search]:
            return numbered[0] + 1, step(*numbered)

        _, search = lax.while_loop(lambda numbered: numbered[1].is_on.any(), advance, (jnp.int32(0), search))
        return search.draft

    def _begin(
        self,
        beams: Beams,
        levels: Int[Array, " batch"],
        is_on: Bool[Array, " batch"],
        draft: Draft,
        context: Context,
        *,
        at_root: bool,
    ) -> _Search:
        """Read the target's beams: all tokens of each, which the draft model does not know."""
        memory, (batch_size, num_live) = context.memory, beams.states.shape
        width, num_steps = self._width(at_root=at_root), self._steps(at_root=at_root)
        num_read = 0 if at_root else (self.num_levels - 2) * num_live
        cache = memory.cache.with_room(num_read + (num_steps - 1) * width)
        seen = jnp.zeros((batch_size, num_live, cache.num_slots), dtype=bool)
        if at_root:
            logits = jnp.broadcast_to(memory.logits[:, None], (batch_size, num_live, memory.logits.shape[-1]))
            places = jnp.zeros((batch_size, num_live), dtype=jnp.int32)  # all beams are the prompt's end
        else:
            tokens = jnp.moveaxis(beams.sequences[..., : self.num_levels - 2], -1, 1).reshape(batch_size, -1)
            own = jnp.arange(num_read, dtype=jnp.int32)
            depth, beam = 1 + own // num_live, own % num_live
            depths = jnp.broadcast_to(depth, tokens.shape)
            own_visible = (beam[:, None] == beam) & (depth[:, None] >= depth)
            visible = jnp.zeros((batch_size, num_read, cache.num_slots + num_read), dtype=bool)
            visible = visible.at[..., cache.num_slots :].set(own_visible)
            places = jnp.broadcast_to(jnp.arange(num_live, dtype=jnp.int32), beams.states.shape)
            last = jnp.maximum(levels - 1, 0)[:, None] * num_live + places
            logits, made = self.scorer.score(context.params, cache, tokens, depths, visible, last)
            cache = cache.put(made, depths, 0)
            is_read = (beam == places[..., None]) & (depth <= levels[:, None, None])
            seen = seen.at[..., :num_read].set(is_read)
            draft = replace(draft, num_forwards=draft.num_forwards + self._counted)
        missing = ((0, 0), (0, width - num_live))
        return _Search(
            nodes=widened(beams, width),
            paths=jnp.pad(paths_of(beams), missing),
            behind=jnp.zeros((batch_size, width), dtype=jnp.float32),
            places=jnp.pad(places, missing),
            seen=jnp.pad(seen, (*missing, (0, 0))),
            logits=jnp.pad(logits, (*missing, (0, 0))),
            cache=cache,
            depths=levels,
            is_on=is_on,
            draft=draft,
        )

    def _step(
        self,
        search: _Search,
        is_here: Bool[Array, " batch"],
        number: Int[Array, ""],
        context: Context,
        *,
        level: int,
        num_steps: int,
    ) -> _Search:
        """The nodes of one more level for the rows that are here, and all below them if it fits."""
        catalogue, plan, end = context.catalogue, context.plan, self.num_levels
        width = search.places.shape[1]
        above = of_level(search.nodes, level, width=width)
        legal = children(above.states, catalogue, level=level)
        scored = Scored.of(
            search.logits, above.states, depths=above.states, made=None, levels=search.depths, num_live=width
        )
        own = in_columns(legal, self.scorer, context.params, level=level)
        scores = child_scores(scored, paths_of(above), own, above, plan, max_length=end)
        scores = jnp.where(legal.legal, above.scores[..., None] + scores, DEAD)
        paths, behind, draft = search.paths, search.behind, search.draft
        if plan.is_relaxed:
            below, log_probs = sample(
                above, legal, scores, number=self.num_beams, catalogue=catalogue, noise=context.noise
            )
            assert draft.log_probs is not None
            kept = where_rows(is_here, log_probs, draft.log_probs[level])
            draft = replace(draft, log_probs=(*draft.log_probs[:level], kept, *draft.log_probs[level + 1 :]))
        else:
            is_open = open_children(legal, catalogue, depth=level + 1)
            at_root = width > self.num_beams
            wanted = self.whole[level] if at_root and level < len(self.whole) else self.num_beams
            below, paths, behind = draft_best(
                above,
                paths,
                behind,
                legal,
                scores,
                is_open,
                plan,
                number=wanted,
                dead_state=catalogue.dead_state,
                noise=context.noise,
            )
            missing = ((0, 0), (0, width - wanted))
            below, paths, behind = widened(below, width), jnp.pad(paths, missing), jnp.pad(behind, missing)
            below = replace(below, states=below.states.at[:, wanted:].set(catalogue.dead_state))
        places = draft.num_live + number * width + jnp.arange(width, dtype=jnp.int32)
        nodes = Nodes(
            below.tokens,
            along(search.places, below.parents),
            below.states,
            jnp.full(below.tokens.shape, level + 1, dtype=jnp.int32),
        )
        draft = draft.with_nodes(is_here, nodes, number * width)
        fits, num_rest = is_here & (level + 2 == end), 0
        if self.rest[level + 1]:
            size, start = self.rest[level + 1], num_steps * width
            used = (number + 1) * self.num_beams
            rest, num_rest, fits = subtree(
                below.states,
                search.depths + 1,
                is_here,
                catalogue,
                first=level + 1,
                end=end,
                size=size,
                room=size,
                budget=self.tree.budget,
                least=self.tree.least,
                used=used,
            )
            in_rest = rest.parents - width + draft.num_live + start
            parents = jnp.where(rest.parents < width, rest.parents + places[0], in_rest)
            states = jnp.where(fits[:, None], rest.states, catalogue.dead_state)
            rest = replace(rest, parents=parents, states=states)
            draft, num_rest = draft.with_nodes(fits, rest, start), jnp.where(fits, num_rest, 0)
        draft = replace(
            draft,
            num_steps=draft.num_steps + jnp.where(is_here, 1 + num_rest, 0),
            num_guessed=draft.num_guessed + is_here,
        )
        new = (
            to_room(below, end),
            paths,
            behind,
            jnp.broadcast_to(places, below.states.shape),
            along(search.seen, below.parents[..., None]),
        )
        old = (search.nodes, search.paths, search.behind, search.places, search.seen)
        nodes, paths, behind, places, seen = where_rows(is_here, new, old)
        depths = search.depths + is_here
        return replace(
            search,
            nodes=nodes,
            paths=paths,
            behind=behind,
            places=places,
            seen=seen,
            depths=depths,
            is_on=search.is_on & ~fits & (depths < end - 1),
            draft=draft,
        )

    def _forward(self, search: _Search, slot: Int[Array, ""], context: Context) -> _Search:
        """One forward of the draft model over the nodes of the last level, which get the slots from `slot` on."""
        batch_size, width = search.places.shape
        tokens = last_tokens(search.nodes, search.depths)
        depths = jnp.broadcast_to(search.depths[:, None], tokens.shape)
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch_size, width, width))
        visible = jnp.concatenate([search.seen, own], axis=-1)
        logits, made = self.scorer.score(context.params, search.cache, tokens, depths, visible)
        seen = lax.dynamic_update_slice_in_dim(search.seen, own, slot, axis=2)
        return replace(
            search,
            logits=logits,
            cache=search.cache.put(made, depths, slot),
            seen=seen,
            draft=replace(search.draft, num_forwards=search.draft.num_forwards + self._counted),
        )
