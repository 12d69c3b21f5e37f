# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft model or a draft head that searches ahead for the target's beams, and the catalogue below. Decides nothing.

Axes: B batch, K beams, N nodes of a level of the search, D nodes of a draft, S slots, V vocabulary, C children.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core.beam import DEAD, Beams, of_level, paths_of, to_room, widened
from hf_gr.core.decide import draft_best, draw

from .arrays import along, where_rows
from .decode import child_scores, in_columns, score_nodes
from .drafters import TreeDrafter, open_children, subtree
from .noise import DRAFTS
from .scorers import Params, Prompt, ScorerCache
from .speculation import Context, Draft, Scored
from .transition import children
from .tree import Nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Search:
    """The state of a search."""

    # of the last level, with room for all tokens; at first the target's beams, each with a path of its own
    nodes: Beams
    behind: Float[Array, "batch nodes"]  # how far each one's score is below that of its path's own choice
    logits: Float[Array, "batch nodes vocab"]  # after each
    cache: ScorerCache  # the draft model's, with a slot for each node of each level
    depths: Int[Array, " batch"]  # tokens of the nodes of each row
    is_on: Bool[Array, " batch"]  # the rows whose search continues
    draft: Draft  # what has been drafted


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts the whole legal subtree below the beams once it fits; a draft model narrows it until then.

    It starts from the target's beams and their scores: only later tokens are guessed.

    Source: AtSpeed, section 3; xGR leaves drafts open.
    """

    scorer: Any  # the draft model's
    num_beams: int  # N
    num_steps: int  # levels of a draft (AtSpeed's gamma)
    num_levels: int  # L
    tree: TreeDrafter  # drafts what fits without a search
    # by level of the last nodes found, the room for all that is below them; 0 where that is not tried
    rest: tuple[int, ...]
    whole: tuple[int, ...] = ()  # open nodes of the catalogue's first levels, which are searched whole
    first_level: int = 0  # where a search can begin: below the prompt, or only after it
    tail: tuple[int, ...] = ()  # tokens that the target reads after the prompt for a draft head: its placeholders

    @property
    def num_first(self) -> int:
        """The most levels of a draft below the prompt."""
        return self.tree.num_first if self.first_level else self.num_levels - 1

    def size(self, *, at_root: bool) -> int:
        """See `TreeDrafter.size`."""
        size = self.tree.size(at_root=at_root)
        if self._steps(at_root=at_root) == 0:
            return size
        return max(size, self._steps(at_root=at_root) * self._width(at_root=at_root) + max(self.rest, default=0))

    def start(self, params: Params, prompt: Prompt, hidden: Float[Array, "batch positions hidden"] | None) -> Any:
        """Read the prompts: the logits after them, and the cache of them alone."""
        return self.scorer.prefill(params, prompt) if hidden is None else self.scorer.begin(params, hidden)

    def draft(
        self, beams: Beams, levels: Int[Array, " batch"], wanted: Bool[Array, " batch"], context: Context
    ) -> Draft:
        """See `TreeDrafter.draft`."""
        at_root = beams.sequences.shape[-1] == 0
        size, dead_state = self.size(at_root=at_root), context.catalogue.dead_state
        num_live = 1 if at_root else beams.states.shape[1]
        none = Draft.none(len(levels), size, dead_state, num_live=num_live, width=self._width(at_root=at_root))
        draft = none.with_rows(wanted, self.tree.draft(beams, levels, wanted, context))
        if not self._steps(at_root=at_root):
            return draft
        if context.plan.is_relaxed:
            nothing, catalogue = jnp.zeros((len(levels), self.num_beams), dtype=jnp.int32), context.catalogue
            shapes = [children(nothing, catalogue, level=n).tokens.shape for n in range(self.num_levels - 1)]
            draft = replace(draft, log_probs=tuple(jnp.full(shape, DEAD) for shape in shapes))
        is_on = wanted & ~draft.is_whole & (levels >= self.first_level) & (levels < self.num_levels - 1)
        return lax.cond(
            is_on.any(),
            lambda: self._search(
                to_room(beams, self.num_levels), levels, is_on, draft.with_rows(is_on, none), context, at_root=at_root
            ),
            lambda: draft,
        )

    def _steps(self, *, at_root: bool) -> int:
        """The most levels that a search can have."""
        if at_root:
            return 0 if self.first_level else min(len(self.whole) + self.num_steps, self.num_levels - 1)
        return max(min(self.num_steps, self.num_levels - 2), 0)

    def _width(self, *, at_root: bool) -> int:
        """Nodes of a level of a search, padding included."""
        return max(self.num_beams, *self.whole) if at_root and self.whole else self.num_beams

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
        """Drafts for the rows whose search continues; those of other rows stay."""
        num_steps, width = self._steps(at_root=at_root), self._width(at_root=at_root)
        start = num_steps * width
        if at_root:  # all beams are the prompt's end
            logits, cache = context.memory
            logits = jnp.broadcast_to(logits[:, None], (*beams.states.shape, logits.shape[-1]))
            cache, num_forwards = cache.with_room((num_steps - 1) * width), 0
        else:
            (logits, cache), num_forwards = self._read(beams, levels, context), int(not self.tail)
        missing, own = width - beams.states.shape[1], jnp.arange(width, dtype=jnp.int32)
        nodes = widened(beams, width)
        search = _Search(
            nodes=replace(nodes, beam_indices=jnp.broadcast_to(own[:, None], nodes.beam_indices.shape)),
            behind=jnp.zeros(nodes.scores.shape, dtype=jnp.float32),
            logits=jnp.pad(logits, ((0, 0), (0, missing), (0, 0))),
            cache=cache,
            depths=levels,
            is_on=is_on,
            draft=replace(draft, num_forwards=draft.num_forwards + num_forwards),
        )

        def advance(numbered: tuple[Array, _Search]) -> tuple[Array, _Search]:
            number, search = numbered
            depths = search.depths
            for level in range(0 if at_root else 1, self.num_levels - 1):
                is_here = search.is_on & (depths == level)
                grow = partial(self._grow, levels=levels, number=number, context=context, level=level, start=start)
                search = lax.cond(is_here.any(), grow, lambda search, _: search, search, is_here)
            steps_left = num_steps if at_root else self.num_steps
            search = replace(search, is_on=search.is_on & (number + 1 < steps_left))
            if num_steps > 1:
                forward = partial(self._forward, context=context)
                search = lax.cond(search.is_on.any(), forward, lambda search: search, search)
            return number + 1, search

        return lax.while_loop(lambda numbered: numbered[1].is_on.any(), advance, (jnp.int32(0), search))[1].draft

    def _read(
        self, beams: Beams, levels: Int[Array, " batch"], context: Context
    ) -> tuple[Float[Array, "batch beams vocab"], ScorerCache]:
        """Read all tokens of the target's beams, which the draft model does not know: a copy for each beam."""
        (batch_size, num_live), num_read = beams.states.shape, self.num_levels - 2
        cache = context.memory[1].with_room(num_read * self.num_beams)
        tokens = jnp.moveaxis(beams.sequences[..., :num_read], -1, 1).reshape(batch_size, -1)
        depth, beam = jnp.divmod(jnp.arange(num_read * num_live, dtype=jnp.int32), num_live)
        depths = jnp.broadcast_to(1 + depth, tokens.shape)
        own = jnp.pad((beam[:, None] == beam) & (depth[:, None] >= depth), ((0, 0), (cache.num_slots, 0)))
        visible = jnp.broadcast_to(own, (batch_size, *own.shape))
        last = jnp.maximum(levels - 1, 0)[:, None] * num_live + jnp.arange(num_live, dtype=jnp.int32)
        logits, made = self.scorer.score(context.params, cache, tokens, depths, visible, last)
        depth, beam = jnp.divmod(jnp.arange(cache.num_slots, dtype=jnp.int32), self.num_beams)
        places = jnp.broadcast_to(depth * num_live + jnp.minimum(beam, num_live - 1), (batch_size, cache.num_slots))
        return logits, cache.keep(made, depths, places, jnp.ones_like(places, dtype=bool))

    def _grow(
        self,
        search: _Search,
        is_here: Bool[Array, " batch"],
        *,
        levels: Int[Array, " batch"],
        number: Int[Array, ""],
        context: Context,
        level: int,
        start: int,
    ) -> _Search:
        """The nodes of one more level for the rows that are here, and all below them, from a start on, if it fits."""
        catalogue, plan, end, draft = context.catalogue, context.plan, self.num_levels, search.draft
        batch_size, width = search.behind.shape
        above = of_level(search.nodes, level, width=width)
        legal = children(above.states, catalogue, level=level)
        scored = Scored.of(search.logits, above.states, depths=above.states, made=None, levels=levels)
        in_logits = in_columns(legal, self.scorer, context.params, level=level)
        scores = child_scores(scored, paths_of(above), in_logits, above, plan, max_length=end)
        scores = catalogue.biased(scores, above.states, legal)
        scores = jnp.where(legal.legal, above.scores[..., None] + scores, DEAD)
        how: dict[str, Any] = {"dead_state": catalogue.dead_state}
        if plan.is_relaxed:
            noise = context.noise.stream(DRAFTS)
            below, log_probs = draw(above, legal, scores, number=self.num_beams, noise=noise, **how)
            behind = search.behind
            assert draft.log_probs is not None
            kept = where_rows(is_here, log_probs, draft.log_probs[level])
            draft = replace(draft, log_probs=(*draft.log_probs[:level], kept, *draft.log_probs[level + 1 :]))
        else:
            wanted = self.whole[level] if width > self.num_beams and level < len(self.whole) else self.num_beams
            is_open = open_children(legal, catalogue, depth=level + 1)
            of_levels = jnp.broadcast_to(levels[:, None, None], (batch_size, width, 1))
            paths = along(search.nodes.beam_indices, of_levels, axis=2)[..., 0]
            below, _, behind = draft_best(
                above, paths, search.behind, legal, scores, is_open, plan, number=wanted, noise=context.noise, **how
            )
            below, behind = widened(below, width), jnp.pad(behind, ((0, 0), (0, width - wanted)))
            below = replace(below, states=below.states.at[:, wanted:].set(catalogue.dead_state))
        # Among the live beams, which are one at the root, and what is drafted.
        live = jnp.where(below.parents < draft.num_live, below.parents, 0)
        parents = jnp.where(number == 0, live, draft.num_live + (number - 1) * width + below.parents)
        depths = jnp.full(below.tokens.shape, level + 1, dtype=jnp.int32)
        draft = draft.with_nodes(is_here, Nodes(below.tokens, parents, below.states, depths), number * width)
        fits, num_rest = is_here & (level + 2 == end), 0
        if self.rest[level + 1]:
            rest, num_rest, fits = subtree(
                below.states,
                search.depths + 1,
                is_here,
                catalogue,
                first=level + 1,
                end=end,
                size=self.rest[level + 1],
                room=self.rest[level + 1],
                budget=self.tree.budget,
                least=self.tree.least,
                used=(number + 1) * self.num_beams,
            )
            first = jnp.where(rest.parents < width, draft.num_live + number * width, draft.num_live + start - width)
            states = jnp.where(fits[:, None], rest.states, catalogue.dead_state)
            draft = draft.with_nodes(fits, replace(rest, parents=rest.parents + first, states=states), start)
            num_rest = jnp.where(fits, num_rest, 0)
        draft = replace(
            draft,
            num_steps=draft.num_steps + jnp.where(is_here, 1 + num_rest, 0),
            num_guessed=draft.num_guessed + is_here,
        )
        nodes, behind = where_rows(is_here, (to_room(below, end), behind), (search.nodes, search.behind))
        depths = search.depths + is_here
        is_on = search.is_on & ~fits & (depths < end - 1)
        return replace(search, nodes=nodes, behind=behind, depths=depths, is_on=is_on, draft=draft)

    def _forward(self, search: _Search, context: Context) -> _Search:
        """One forward of the draft model over the nodes of the last level, which get the slots of their level."""
        depths, num_slots = search.depths, search.cache.num_slots
        logits, made = score_nodes(self.scorer, context.params, search.cache, search.nodes, depths)
        depth, place = jnp.divmod(jnp.arange(num_slots, dtype=jnp.int32), search.behind.shape[1])
        is_new = depth == depths[:, None] - 1
        of_nodes = jnp.broadcast_to(depths[:, None], search.behind.shape)
        cache = search.cache.keep(made, of_nodes, jnp.broadcast_to(place, is_new.shape), is_new)
        # A head is no forward of a model.
        draft = replace(search.draft, num_forwards=search.draft.num_forwards + int(not self.tail))
        return replace(search, logits=logits, cache=cache, draft=draft)
