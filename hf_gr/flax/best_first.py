# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop of `exact=True`: prefixes are scored best first until the best items are proven. Knows no model.

One pure function of arrays, to be compiled as one program, like `decode`. A forward scores the M best prefixes of
every row, whatever their lengths; a row that is done scores padding until all are.

Axes: M prefixes scored in one forward.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core import best_first as core
from hf_gr.core.beam import DEAD, Beams, Finished
from hf_gr.core.best_first import Below, Prefixes
from hf_gr.core.decide import best

from . import ops
from .decode import Decoded, Loop, read_prompt
from .noise import Noise
from .scorers import Params, Prompt, Scorer, ScorerCache
from .scores import DecodePlan, renormalize
from .speculation import Context, Speculation
from .transition import Children, DeviceCatalogue, children
from .tree import Nodes

NO_SLOT = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The state passed from one forward to the next."""

    waiting: Prefixes
    found: Prefixes  # the R best sequences so far
    lost: Float[Array, "batch 1"]  # the best key that did not fit
    places: Int[Array, "batch prefixes"]  # of what the next forward scores, among those that wait
    flags: Bool[Array, "batch prefixes"]  # which of these there are, the first ones of a row
    num_nodes: Int[Array, " batch"]  # scored after the prompt, without those drafted
    speculation: Speculation  # the other counts
    cache: ScorerCache  # a slot for each node scored, in their order: a row never scores more than there are


def best_first(
    scorer: Scorer,
    params: Params,
    catalogue: DeviceCatalogue,
    prompt: Prompt,
    plan: DecodePlan,
    noise: Noise | None = None,
    draft_params: None = None,
) -> Decoded:
    """The best R sequences of the catalogue for each row, best first, then padding; the arguments are `decode`'s.

    The result depends neither on the number of prefixes of a forward (`num_beams`) nor on a drafter, unless the work
    ends at `max_nodes`: then it is the best that was found. There are at most as many forwards: a row that is not done
    scores one prefix in each.
    """
    search = _BestFirst(scorer, params, catalogue, plan, noise, draft_params)
    state = search.start(prompt)
    if search.num_levels > 1:
        state = lax.while_loop(lambda state: state.flags.any(), search.advance, state)
    found, columns = state.found, jnp.arange(search.num_levels)
    is_token = (columns < found.depths[..., None]) & (found.keys > DEAD)[..., None]
    paths = is_token.astype(jnp.int32) - 1
    sequences, keys, paths = best(Finished(ops, found.sequences, paths, found.keys, found.keys[:, :1] > DEAD), plan)
    return Decoded(
        sequences,
        keys if noise is None else jnp.where(keys > DEAD, found.scores, keys),
        paths,
        perturbed_scores=None if noise is None else keys,
        num_levels=jnp.full(len(found.keys), search.num_levels),
        num_proven=core.num_proven(found, state.waiting, state.lost, max_length=search.num_levels),
        step_scores=None,
        step_logits=None,
        speculation=replace(state.speculation, num_nodes=state.num_nodes),
    )


best_first_program = jax.jit(best_first, static_argnames=("scorer",))


class _BestFirst(Loop):
    """Scores the best prefixes of all lengths."""

    @property
    def groups(self) -> core.Groups | None:
        """Of the items, if a list may have so many of one at most."""
        of, most = self.catalogue.groups, self.plan.max_per_group
        return None if of is None or most is None else core.Groups(of, most)

    def start(self, prompt: Prompt) -> _State:
        """Score the prompt, and what is drafted below it."""
        plan, drafter, batch_size = self.plan, self.plan.drafter, len(prompt.input_ids)
        root, num_drafted, num_first = self._none(batch_size, 1), 0, 0
        nodes, speculation = Nodes.none(batch_size, 0, self.catalogue.dead_state), Speculation.none(batch_size)
        if drafter is not None and drafter.size(at_root=True):
            beams = Beams.start(ops, root.depths, batch_size=batch_size, width=1)
            context, every = Context(self.catalogue, plan), jnp.ones(batch_size, dtype=bool)
            draft = drafter.draft(beams, jnp.zeros(batch_size, dtype=jnp.int32), every, context)
            nodes, num_drafted, num_first = draft.nodes, draft.nodes.tokens.shape[1], drafter.num_first
            speculation = speculation.drafting(draft, self.catalogue.dead_state)
        logits, _, cache, made = read_prompt(self.scorer, self.params, prompt, nodes, num_levels=self.num_levels)
        # Nothing follows the children of the last level's nodes: no node sees those.
        cache = cache.with_room(num_drafted + plan.max_nodes if self.num_levels > 2 else 0)
        waiting, found = (self._none(batch_size, number) for number in (plan.max_nodes, plan.num_return_sequences))
        state = _State(
            waiting,
            found,
            lost=waiting.keys[:, :1],
            places=jnp.zeros((batch_size, 0), dtype=jnp.int32),
            flags=jnp.zeros((batch_size, 0), dtype=bool),
            num_nodes=jnp.zeros(batch_size, dtype=jnp.int32),
            speculation=speculation,
            cache=cache,
        )
        root = replace(root, keys=root.scores) if self.noise is None else core.drawn_root(root, self.noise)
        below = self._below(root, logits[:, :1], range(1))
        own = jnp.broadcast_to(jnp.arange(num_drafted, dtype=jnp.int32), nodes.tokens.shape)
        for level in range(1, 1 + num_first):
            is_there = (nodes.depths == level) & (nodes.states != self.catalogue.dead_state)
            above = jnp.where(is_there, jnp.maximum(nodes.parents - 1, 0), 0)  # the root has the first place
            # Children of one node are consecutive.
            first = above * below.scores.shape[-1]
            places = jnp.where(is_there, first + nodes.states - below.children.take(first)[1], 0)
            keys = jnp.where(is_there, ops.along(below.inner.reshape(batch_size, -1), places), DEAD)
            drafted = _in_slots(below.take(places, keys).with_states(nodes.states), own)
            state = self._with(state, below.without(places, is_there), range(level - 1, level))
            counts = state.speculation.accepting(is_there.sum(-1, dtype=jnp.int32))
            state = replace(state, speculation=counts)
            below = self._below(drafted, logits[:, 1:], range(level, level + 1))
        state = self._with(state, below, range(num_first, num_first + 1))
        if num_drafted:
            depths = jnp.pad(nodes.depths, ((0, 0), (1, 0)))
            before = jnp.full(batch_size, -1, dtype=jnp.int32)  # the root has no slot
            state = replace(state, cache=_kept(cache, made, depths, before, before + 2 + num_drafted))
        return self._with_next(state)

    def advance(self, state: _State) -> _State:
        """One more forward."""
        flags, waiting = state.flags, state.waiting
        picked = waiting.take(state.places)
        picked = picked.with_states(jnp.where(flags, picked.states, self.catalogue.dead_state))
        depths = jnp.where(flags, picked.depths, 1)
        # A row's nodes have consecutive slots, those drafted below the prompt the first ones.
        drafter, number = self.plan.drafter, flags.sum(-1, dtype=jnp.int32)
        start = state.num_nodes + (0 if drafter is None else drafter.size(at_root=True))
        own = start[:, None] + jnp.arange(flags.shape[1], dtype=jnp.int32)
        slots = jnp.arange(state.cache.num_slots, dtype=jnp.int32)
        seen = (picked.slots[..., None] == slots).any(-2)
        itself = jnp.broadcast_to(jnp.eye(flags.shape[1], dtype=bool), (*flags.shape, flags.shape[1]))
        logits, made = self.scorer.score(
            self.params,
            state.cache,
            ops.pick(picked.sequences, depths - 1),
            depths,
            jnp.concatenate([seen, itself], axis=-1),
        )
        state = replace(
            state,
            waiting=core.taken_out(waiting, state.places, flags),
            num_nodes=state.num_nodes + number,
            speculation=state.speculation.after_forward(),
            cache=_kept(state.cache, made, depths, start, number),
        )
        levels = range(1, self.num_levels)
        return self._with_next(self._with(state, self._below(_in_slots(picked, own), logits, levels), levels))

    def _with(self, state: _State, below: Below, levels: range) -> _State:
        """The same with the children of nodes of these levels."""
        state = replace(state, lost=core.with_broken(state.lost, below))
        if levels.start + 1 < self.num_levels:
            waiting, lost = core.with_best(state.waiting, below, state.lost)
            state = replace(state, waiting=waiting, lost=lost)
        if any(self.catalogue.has_leaves[level] for level in levels):
            found = core.with_ended(state.found, below, self.groups)
            state = replace(state, found=found, waiting=core.without_full(state.waiting, found, self.groups))
        return state

    def _with_next(self, state: _State) -> _State:
        """The same with the choice of what the next forward scores."""
        plan, steps = self.plan, max(self.num_levels - 1, 1)
        width, left = min(plan.num_beams, plan.max_nodes // steps), plan.max_nodes - state.num_nodes
        how = {"number": width, "max_nodes": plan.max_nodes, "max_length": self.num_levels}
        places, flags = core.next_prefixes(state.waiting, state.found, left=left[:, None], **how)
        return replace(state, places=places, flags=flags)

    def _below(
        self,
        nodes: Prefixes,  # of these levels
        logits: Float[Array, "batch nodes vocab"],
        levels: range,
    ) -> Below:
        """The children of some nodes, with their scores and keys."""
        plan, (legal, ends) = self.plan, self._children(nodes, levels)
        logits = logits if plan.temperature is None else logits.astype(jnp.float32) / plan.temperature
        scores = legal.scores(logits).astype(jnp.float32)
        scores = scores - jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        if plan.renormalize_logits:
            scores = renormalize(jnp.where(legal.legal, scores, DEAD))
        if plan.forces_end and self.num_levels - 1 in levels:  # only the end token is left
            scores = jnp.where((nodes.depths == self.num_levels - 1)[..., None], 0.0, scores)
        steps = self.catalogue.biased(scores, nodes.states, legal)
        how: dict[str, Any] = {"length_penalty": plan.length_penalty, "noise": self.noise}
        is_whole = plan.renormalize_logits and self.catalogue.bias is None
        return core.ranked(nodes, legal, steps, ends, is_whole=is_whole, **how)

    def _children(self, nodes: Prefixes, levels: range) -> tuple[Children, Bool[Array, "batch nodes children"]]:
        """The children of nodes of these levels, and which are complete: a node has children on its own level only."""
        size = max(self.catalogue.trie.branching[level] for level in levels)
        tokens, first = jnp.full((*nodes.states.shape, size), -1), nodes.states * 0
        ends = jnp.zeros(tokens.shape, dtype=bool)
        for level in levels:
            below, is_here = children(nodes.states, self.catalogue, level=level), nodes.depths == level
            tokens = jnp.maximum(tokens, ops.pad(below.tokens, size - below.tokens.shape[-1], -1))
            first = jnp.where(is_here, below.first, first)
            if self.catalogue.has_leaves[level]:
                states = below.first[..., None] + jnp.arange(size, dtype=jnp.int32)
                ends = ends | (is_here[..., None] & self.catalogue.is_leaf(states, level=level + 1))
        return Children(tokens, first), ends

    def _none(self, batch_size: int, number: int) -> Prefixes:
        like = jnp.zeros(0)
        how = {"batch_size": batch_size, "max_length": self.num_levels, "no_slot": NO_SLOT}
        return Prefixes.none(ops, like, number=number, **how)


def _in_slots(nodes: Prefixes, own: Int[Array, "batch nodes"]) -> Prefixes:
    """Nodes as their children see them: with their own slots, too."""
    return nodes.with_slots(jnp.concatenate([nodes.slots[..., 1:], own[..., None]], axis=-1))


def _kept(
    cache: ScorerCache, made: Any, depths: Array, start: Int[Array, " batch"], number: Int[Array, " batch"]
) -> ScorerCache:
    """The cache with the first nodes of each row, which has so many, in the slots from its start on."""
    places = jnp.arange(cache.num_slots, dtype=jnp.int32) - start[:, None]
    return cache.keep(made, depths, places.clip(0, depths.shape[1] - 1), (places >= 0) & (places < number[:, None]))
