# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then decide, level by level. Knows no model beyond its scorer.

All of it, prefill included, is one pure function of arrays, to be compiled as one program: a loop of one forward each,
whose shapes follow from the plan and the catalogue; nothing synchronises. The batch is every array's first axis, so
that the rows of a batch may be sharded over devices.

A forward scores the live beams of every row and, with a drafter, nodes below them; the first one scores the prompt,
too. Then the levels of the catalogue are decided in order, each for the rows whose beams have come to it and are all
among the nodes that the forward scored: each row advances at its own pace.

Axes: R returned sequences a row.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hf_gr.core import beam
from hf_gr.core.beam import Beams, Finished, of_level, to_room, widened
from hf_gr.core.decide import accept, best, can_change, proven
from hf_gr.core.verifiers import locate, relaxed_places

from . import ops
from .arrays import along, where_rows
from .noise import PASSES, Noise
from .scorers import JointScorer, Params, Prompt, Scorer, ScorerCache
from .scores import DecodePlan, warped
from .speculation import Context, Draft, Scored, Speculation
from .transition import Children, DeviceCatalogue, children, over_vocabulary
from .tree import Nodes, nodes_seen, slots_seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoded:
    """The result: transformers' fields, generated part only."""

    # tokens, `fill_token_id` after the end; a row of `missing_token_id` where no sequence is left
    sequences: Int[Array, "batch returned length"]
    scores: Float[Array, "batch returned"]  # `-inf` for such a row
    beam_indices: Int[Array, "batch returned length"]  # paths within the row, -1 after the end
    num_levels: Int[Array, " batch"]  # levels decided before nothing could change any more
    num_proven: Int[Array, " batch"] | None  # first answers of a row that are proven to be the best
    # one entry a level, if requested; those of undecided levels mean nothing
    step_scores: tuple[Float[Array, "batch paths vocab"], ...] | None
    step_logits: tuple[Float[Array, "batch paths vocab"], ...] | None
    speculation: Speculation  # the number of forwards, and what was scored ahead
    # of samples without replacement, by which they are ranked
    perturbed_scores: Float[Array, "batch returned"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The state passed from one forward to the next."""

    beams: Beams  # with room for all tokens
    levels: Int[Array, " batch"]  # tokens of the beams of each row
    finished: Finished  # the results so far
    speculation: Speculation  # the counts
    cache: ScorerCache  # the scorer's, with a slot for each beam of each level
    memory: Any  # what the drafter's model knows of the prompts; None without one
    step_scores: tuple[Array, ...] | None  # by level, if they are kept
    step_logits: tuple[Array, ...] | None  # by level, if they are kept


def decode(
    scorer: Scorer,  # the model; static
    params: Params,  # its parameters
    catalogue: DeviceCatalogue,  # the legal sequences of each row
    prompt: Prompt,  # the start of each row
    plan: DecodePlan,  # the options
    noise: Noise | None = None,  # the source of randomness; None without `do_sample`
    draft_params: Params | None = None,  # of the drafter's model, if it has one
) -> Decoded:
    """Decode the best legal sequences of a batch.

    Returns:
        R sequences a row: the best first, then rows of padding if there are fewer.

    Source: STATIC, algorithm 1, with candidates scored before any truncation; AtSpeed, algorithms 1 and 2.
    """
    if plan.processors is not None:
        plan = replace(plan, processors=plan.processors.after(prompt))
    search = _Search(scorer, params, catalogue, plan, noise, draft_params)
    state = lax.while_loop(search.any_open, search.advance, search.start(prompt))
    return Decoded(
        *best(state.finished, plan),
        num_levels=jnp.broadcast_to(_most(state.levels, plan), len(state.levels)),
        num_proven=proven(state.beams, state.finished, plan, max_length=catalogue.max_length),
        step_scores=state.step_scores,
        step_logits=state.step_logits,
        speculation=state.speculation,
    )


# A whole call as one program; there is one for every scorer, static plan, and set of argument shapes.
decode_program = jax.jit(decode, static_argnames=("scorer",))


@dataclass(frozen=True)
class Loop:
    """What all forwards of a call share."""

    scorer: Scorer
    params: Params
    catalogue: DeviceCatalogue
    plan: DecodePlan
    noise: Noise | None
    draft_params: Params | None

    @property
    def num_levels(self) -> int:
        """L."""
        return self.catalogue.max_length


class _Search(Loop):
    """Decides levels of beams."""

    def start(self, prompt: Prompt) -> _State:
        """Compute the prompt, and the draft below it; decide the first level, and the drafted ones."""
        plan, drafter, (batch_size, _) = self.plan, self.plan.drafter, prompt.input_ids.shape
        levels = jnp.zeros(batch_size, dtype=jnp.int32)
        how = {"independent": not plan.is_beam_search, "certifies": plan.certifies}
        beams = Beams.start(ops, levels, batch_size=batch_size, width=plan.width, **how)
        nodes, draft, memory = Nodes.none(batch_size, 0, self.catalogue.dead_state), None, None
        if drafter is not None and not drafter.tail:
            memory = drafter.start(self.draft_params, prompt, None)
        if drafter is not None and drafter.size(at_root=True):
            context = Context(self.catalogue, plan, self.noise, self.draft_params, memory)
            draft = drafter.draft(beams, levels, jnp.ones(batch_size, dtype=bool), context)
            nodes = draft.nodes
        tail = () if drafter is None else drafter.tail
        logits, hidden, cache, made = read_prompt(
            self.scorer, self.params, prompt, nodes, tail, num_levels=self.num_levels
        )
        if drafter is not None and drafter.tail:
            memory = drafter.start(self.draft_params, prompt, hidden)
        root = jnp.zeros((batch_size, 1), dtype=jnp.int32)
        states, depths = _behind(root, nodes.states), _behind(root, nodes.depths)
        scored = Scored.of(logits, states, depths=depths, made=made, levels=levels, draft=draft)
        no_steps = (jnp.zeros((batch_size, plan.width, logits.shape[-1]), dtype=jnp.float32),) * self.num_levels
        state = _State(
            beams=to_room(beams, self.num_levels),
            levels=levels,
            finished=Finished.none_yet(
                ops, levels, batch_size=batch_size, width=plan.width, max_length=self.num_levels
            ),
            speculation=Speculation.none(batch_size).drafting(draft, self.catalogue.dead_state),
            cache=cache.with_room(max(self.num_levels - 2, 0) * plan.width),
            memory=memory,
            step_scores=no_steps if plan.output_scores else None,
            step_logits=no_steps if plan.output_logits else None,
        )
        return self._decide_all(state, scored, range(1 if draft is None or drafter is None else 1 + drafter.num_first))

    def any_open(self, state: _State) -> Bool[Array, ""]:
        """Whether some row needs a forward."""
        return _in_any_row(self._open_rows(state), self.plan)

    def advance(self, state: _State) -> _State:
        """One forward, and all decisions that it allows."""
        drafter = self.plan.drafter
        if drafter is None or not drafter.size(at_root=False):
            return self._score_and_decide(state, None)
        context = Context(self.catalogue, self.plan, self.noise, self.draft_params, state.memory)
        draft = drafter.draft(state.beams, state.levels, self._open_rows(state), context)
        speculation = state.speculation.drafting(draft, self.catalogue.dead_state)
        return self._score_and_decide(replace(state, speculation=speculation), draft)

    def _score_and_decide(self, state: _State, draft: Draft | None) -> _State:
        """The same, with a draft."""
        beams, levels, drafted = state.beams, state.levels, None if draft is None else draft.nodes
        forward = partial(score_nodes, self.scorer, self.params, state.cache, beams, levels)
        states, depths = beams.states, jnp.broadcast_to(levels[:, None], beams.states.shape)
        if draft is None or drafted is None:
            logits, made = forward()
        else:
            logits, made = lax.cond(
                _in_any_row(draft.num_steps > 0, self.plan),
                lambda: forward(drafted),
                lambda: jax.tree.map(partial(_with_more, behind=drafted.tokens.shape[1]), forward()),
            )
            states, depths = _behind(states, drafted.states), _behind(depths, drafted.depths)
        num_live = beams.states.shape[1]
        scored = Scored.of(logits, states, depths=depths, made=made, levels=levels, draft=draft, num_live=num_live)
        state = replace(state, speculation=state.speculation.after_forward())
        return self._decide_all(state, scored, range(1, self.num_levels))

    def _decide_all(self, state: _State, scored: Scored, levels: range) -> _State:
        """Decide levels in order, each for the rows that are there; then store what later nodes see."""
        places = jnp.zeros((self.num_levels, *state.beams.states.shape), dtype=jnp.int32)
        for level in levels:
            decided = (state, places)

            def decide(decided: tuple[_State, Array], is_here: Array, level: int = level) -> tuple[_State, Array]:
                return self._decide(*decided, scored, is_here, level=level)

            is_here = self._open_rows(state) & (state.levels == level)
            state, places = lax.cond(is_here.any(), decide, lambda decided, _: decided, decided, is_here)
        if scored.made is None or not state.cache.num_slots:
            return state
        depths = jnp.arange(1, 1 + state.cache.num_slots // self.plan.width)
        is_new = (scored.levels[:, None] <= depths) & (depths < state.levels[:, None])
        slots = jnp.moveaxis(places[1 : 1 + len(depths)], 0, 1).reshape(len(state.levels), -1)
        is_new = jnp.repeat(is_new, self.plan.width, axis=1)
        return replace(state, cache=state.cache.keep(scored.made, scored.depths, slots, is_new))

    def _decide(
        self, state: _State, places: Int[Array, "levels batch beams"], scored: Scored, is_here: Array, *, level: int
    ) -> tuple[_State, Int[Array, "levels batch beams"]]:
        """Decide one level for the rows that are there, and whose beams have all been scored."""
        catalogue, plan = self.catalogue, self.plan
        beams = of_level(state.beams, level, width=1 if not level and plan.is_beam_search else plan.width)
        own, found = locate(beams, scored.states)
        # A row without living beams is found anywhere.
        is_here = is_here & found & ((level == scored.levels) | (beams.scores > beam.DEAD).any(-1))
        legal = children(beams.states, catalogue, level=level)
        in_logits = in_columns(legal, self.scorer, self.params, level=level)
        scores = child_scores(scored, own, in_logits, beams, plan, max_length=self.num_levels)
        vocab_size, steps = scored.logits.shape[-1], {}
        if state.step_scores is not None:
            step = over_vocabulary(scores, legal, vocab_size)
            steps["step_scores"] = _with_step(state.step_scores, step, is_here, level=level)
        if state.step_logits is not None:
            step = along(scored.logits, own[..., None]).astype(jnp.float32)
            steps["step_logits"] = _with_step(state.step_logits, step, is_here, level=level)
        scores = catalogue.biased(scores, beams.states, legal)
        beams, is_there = beams.judged(scores, legal.legal)
        scores = jnp.where(is_there, beams.scores[..., None] + scores, beam.DEAD)
        picked, log_probs = None, None if scored.draft is None else scored.draft.log_probs
        if log_probs is not None and level + 1 < self.num_levels:
            picked = self._picked(scored, log_probs[level], beams, own, legal, scores, level=level)
        kept, finished = accept(
            beams, state.finished, legal, scores, catalogue, plan, level=level, noise=self.noise, picked=picked
        )
        num_accepted = jnp.where(is_here & (level > scored.levels), scored.num_accepted(beams, own), 0)
        new = (widened(to_room(kept, self.num_levels), plan.width), finished)
        kept, finished = where_rows(is_here, new, (state.beams, state.finished))
        levels = jnp.where(is_here, level + 1, state.levels)
        speculation = state.speculation.accepting(num_accepted)
        state = replace(state, beams=kept, levels=levels, finished=finished, speculation=speculation, **steps)
        return state, places.at[level, :, : own.shape[1]].set(own)

    def _picked(
        self,
        scored: Scored,
        log_probs: Float[Array, "batch above children"],  # of what was drawn
        beams: Beams,
        own: Int[Array, "batch beams"],
        legal: Children,
        scores: Float[Array, "batch beams children"],
        *,
        level: int,
    ) -> Int[Array, "batch kept"]:
        """Places of the children that relaxed verification picks; of rows without a draft those that are drawn."""
        assert self.noise is not None
        gumbel, number = self.noise.gumbel(beams, legal), self.plan.num_kept
        drawn, places, has_some = scored.drawn(own, level=level)
        picked = relaxed_places(
            legal,
            scores,
            drawn,
            log_probs,
            places,
            num_kept=number,
            uniform=self.noise.stream(PASSES).uniform(beams, legal),
            gumbel=gumbel,
            ops=ops,
        )
        keys = (scores + gumbel).reshape(len(scores), -1)
        others = lax.top_k(keys, min(number, keys.shape[1]))[1]
        picked, others = (
            jnp.pad(one, ((0, 0), (0, number - one.shape[1])), constant_values=keys.shape[1])
            for one in (picked, others)
        )
        return jnp.where(has_some[:, None], picked, others)

    def _open_rows(self, state: _State) -> Bool[Array, " batch"]:
        """The rows that have levels left, and may still change."""
        is_open = state.levels < self.num_levels
        if self.plan.exit_early and (self.catalogue.is_ragged or self.plan.has_criteria):
            is_open = is_open & can_change(state.beams, state.finished, self.plan)
        if self.plan.keeps_steps:  # of every level that any row needs
            any_open = _in_any_row(is_open, self.plan)
            behind = (state.levels < _most(state.levels, self.plan)) & (state.levels < self.num_levels)
            is_open = jnp.where(any_open, state.levels < self.num_levels, behind)
        return is_open


def read_prompt(
    scorer: Scorer, params: Params, prompt: Prompt, nodes: Nodes, tail: tuple[int, ...] = (), *, num_levels: int
) -> tuple[Float[Array, "batch nodes vocab"], Array | None, ScorerCache, Any]:
    """Compute the prompt, drafted nodes below it, and a tail after it, which no other token sees.

    Returns:
        The logits after the prompt and the nodes; the output at the prompt's end and at the tail, if there is one;
        the cache of the prompt; and what the nodes are to later ones, with a place for the prompt's end.
    """
    batch_size, num_nodes = nodes.tokens.shape
    if not num_nodes and not tail:
        logits, cache = scorer.prefill(params, prompt)
        return logits[:, None], None, cache, None
    assert isinstance(scorer, JointScorer)
    visible = nodes_seen(nodes.parents, 1, num_levels=num_levels - 1)[0][:, 1:, 1:]
    tokens, depths = nodes.tokens, nodes.depths
    if tail:
        own = jnp.arange(len(tail), dtype=jnp.int32)
        tokens = _behind(tokens, jnp.broadcast_to(jnp.array(tail, dtype=jnp.int32), (batch_size, len(tail))))
        depths = _behind(depths, jnp.broadcast_to(1 + own, (batch_size, len(tail))))
        visible = jnp.pad(visible, ((0, 0), (0, len(tail)), (0, len(tail))))
        visible = visible.at[:, num_nodes:, num_nodes:].set(own[:, None] >= own)
    hidden, cache, made = scorer.read_with(params, prompt, tokens, depths, visible)
    logits = scorer.logits(params, hidden[:, : 1 + num_nodes])
    made = jax.tree.map(lambda array: _with_more(array[..., :num_nodes, :], front=1), made)
    of_tail = _behind(hidden[:, :1], hidden[:, 1 + num_nodes :]) if tail else None
    return logits, of_tail, cache, made if num_nodes else None


def _behind(first: Array, second: Array) -> Array:
    """The arrays of some nodes, followed by those of others."""
    return jnp.concatenate([first, second], axis=1)


def score_nodes(
    scorer: Scorer,
    params: Params,
    cache: ScorerCache,  # with a slot for each beam of each level
    beams: Beams,  # with room for all tokens
    levels: Int[Array, " batch"],
    drafted: Nodes | None = None,
) -> tuple[Float[Array, "batch nodes vocab"], Any]:
    """One forward over beams, and the nodes drafted below them."""
    tokens = along(beams.sequences, jnp.maximum(levels - 1, 0)[:, None, None], axis=2)[..., 0]
    (batch_size, width), num_levels = tokens.shape, beams.sequences.shape[-1]
    depths, own = jnp.broadcast_to(levels[:, None], tokens.shape), jnp.eye(width, dtype=bool)
    own = jnp.broadcast_to(own, (batch_size, width, width))
    of_slots = slots_seen(beams.beam_indices, levels, cache.num_slots)
    if drafted is not None:
        tokens, depths = _behind(tokens, drafted.tokens), _behind(depths, drafted.depths)
        own, of_beam = nodes_seen(drafted.parents, width, num_levels=num_levels - 2)
        of_slots = along(of_slots, of_beam[..., None])
    return scorer.score(params, cache, tokens, depths, jnp.concatenate([of_slots, own], axis=-1))


def _with_more(array: Array, *, front: int = 0, behind: int = 0) -> Array:
    """Nodes `[..., nodes, width]`, with padding before or after them."""
    return jnp.pad(array, (*[(0, 0)] * (array.ndim - 2), (front, behind), (0, 0)))


def _with_step(
    steps: tuple[Array, ...], step: Float[Array, "batch beams vocab"], rows: Bool[Array, " batch"], *, level: int
) -> tuple[Array, ...]:
    """The steps, with one level's of some rows: a row for every path, all equal after the prompt of beams."""
    if step.shape[1] == 1:
        step = jnp.broadcast_to(step, steps[level].shape)
    missing = steps[level].shape[1] - step.shape[1]
    step = jnp.pad(step, ((0, 0), (0, missing), (0, 0)), constant_values=beam.DEAD)
    return (*steps[:level], where_rows(rows, step, steps[level]), *steps[level + 1 :])


def _in_any_row(flags: Bool[Array, " batch"], plan: DecodePlan) -> Bool[Array, ""]:
    """Whether a flag holds in some row, on any device whose rows advance together."""
    return flags.any() if plan.rows_axis is None else _most(flags.astype(jnp.int32), plan) > 0


def _most(numbers: Int[Array, "*shape"], plan: DecodePlan) -> Int[Array, ""]:
    """The largest number, on all devices whose rows advance together."""
    most = numbers.max()
    return most if plan.rows_axis is None else lax.pmax(most, plan.rows_axis)


def in_columns(legal: Children, scorer: Scorer, params: Params, *, level: int) -> Children:
    """Children by their columns in a scorer's logits, if those are not over the vocabulary."""
    columns = getattr(scorer, "columns", None)
    if columns is None:
        return legal
    return replace(legal, tokens=jnp.where(legal.legal, columns(params, legal.tokens, level=level), -1))


def child_scores(
    scored: Scored,
    places: Int[Array, "batch beams"],
    legal: Children,
    beams: Beams,
    plan: DecodePlan,
    *,
    max_length: int,
) -> Float[Array, "batch beams children"]:
    """The scores of one step for the children of every beam, which stands on a scored node; `-inf` at illegal ones.

    Beam methods sum log-softmax values over the *full* vocabulary and then drop invalid tokens; independent paths
    compare logits. As in transformers, warpers, which compare only legal tokens, and the normalisation over those come
    after the constraint; processors see what they would see there.
    """
    if plan.forces_end and beams.sequences.shape[-1] + 1 == max_length:  # only the end token is left
        scores = jnp.zeros(legal.tokens.shape, jnp.float32)
    else:
        rows = jnp.arange(len(places))[:, None, None]
        scores = scored.logits[rows, places[..., None], jnp.maximum(legal.tokens, 0)].astype(jnp.float32)
        if plan.is_beam_search:
            scores = scores - along(scored.totals, places)[..., None]
    scores = jnp.where(legal.legal, scores, beam.DEAD)
    if plan.processors is not None:
        size = {"vocab_size": scored.logits.shape[-1], "room": max_length}
        scores = plan.processors.scores(scores, legal, beams.sequences, **size)
    return warped(scores, plan)
