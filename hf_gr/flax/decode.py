# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then accept, level by level. Knows no model beyond its scorer.

All of it, prefill included, is one pure function of arrays, made to be compiled as one program: levels are unrolled,
shapes follow from the plan and the catalogue, and nothing asks the device. Every array has the batch in front, so that
the rows of a batch may be spread over devices.

With a drafter there are two ways on from a level: if all that can follow fits a draft, one forward scores it and the
rest is decided by lookups; else the level is decided as without, and the next one asks again.

Axes: B batch, K beams, C children, V vocabulary, P prompt, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from . import beam
from .beam import Beams, Finished, Number
from .scorers import Cache, Params, Prompt, Scorer
from .speculation import Drafter, Lookahead, Speculation
from .transition import Children, DeviceCatalogue, children, is_leaf, over_vocabulary, static
from .tree import Nodes, Tree
from .warpers import keep_min_p, keep_top_k, keep_top_p, renormalize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """What one call asks for; names and meanings are transformers'.

    Attributes:
        num_beams: K; 1 decodes every path for itself (greedy, or sampling). Static, as are all up to `rows_axis`.
        num_return_sequences: R.
        num_kept: candidates kept a level: K and some to go on with when the best ones end.
        do_sample: sample instead of taking the best.
        early_stopping: when a row with K complete sequences is done.
        top_k: children that are sampled from; None for all.
        min_tokens_to_keep: children that no warper takes away.
        renormalize_logits: have scores normalised over the legal tokens of each step.
        output_scores: keep the processed scores of every level.
        output_logits: keep the logits of every level.
        exit_early: skip levels once nothing can change.
        drafter: who proposes nodes to be scored ahead; None for nobody.
        rows_axis: the mesh axis over which rows are spread that go on together; None if these go on alone.
        length_penalty: exponent of the length that scores are divided by. This and what follows may change from call
            to call without another program.
        max_new_tokens: the longest sequence that the heuristic of `early_stopping="never"` reckons with.
        fill_token_id: what follows the end of a sequence.
        missing_token_id: what a row consists of where there is no further sequence; not `fill_token_id` if such a row
            would be a sequence of the catalogue.
        temperature: what scores are divided by; None for nothing.
        top_p: probability of the children that are sampled from; None for all.
        min_p: the least probability of those, relative to the largest; None for any.
    """

    num_beams: int = static()
    num_return_sequences: int = static()
    num_kept: int = static()
    do_sample: bool = static()
    early_stopping: bool | str = static()
    top_k: int | None = static(default=None)
    min_tokens_to_keep: int = static(default=1)
    renormalize_logits: bool = static(default=False)
    output_scores: bool = static(default=False)
    output_logits: bool = static(default=False)
    exit_early: bool = static(default=True)
    drafter: Drafter | None = static(default=None)
    rows_axis: str | None = static(default=None)
    length_penalty: Number = 1.0
    max_new_tokens: int | Int[Array, ""] = 0
    fill_token_id: int | Int[Array, ""] = -1
    missing_token_id: int | Int[Array, ""] = -1
    temperature: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None

    @property
    def is_beam_search(self) -> bool:
        """Whether the paths of a row compete."""
        return self.num_beams > 1

    @property
    def width(self) -> int:
        """Paths a row."""
        return max(self.num_beams, self.num_return_sequences)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoded:
    """What came out: transformers' fields, generated part only.

    Attributes:
        sequences: tokens, `fill_token_id` behind the end; a row of `missing_token_id` where there was no further one.
        scores: `-inf` for such a row.
        beam_indices: paths within the row, -1 behind the end.
        num_levels: levels that were decided before nothing could change any more.
        step_scores: one entry a level, if asked for; what was not decided means nothing.
        step_logits: one entry a level, if asked for; what was not decided means nothing.
        speculation: how many forwards it took, and what was scored ahead.
    """

    sequences: Int[Array, "batch returned length"]
    scores: Float[Array, "batch returned"]
    beam_indices: Int[Array, "batch returned length"]
    num_levels: Int[Array, " batch"]
    step_scores: tuple[Float[Array, "batch paths vocab"], ...] | None
    step_logits: tuple[Float[Array, "batch paths vocab"], ...] | None
    speculation: Speculation


# Of one level, what of it is put out: scores and logits.
Step = tuple[Array | None, Array | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What one level hands over to the next. What grows is last, so that the rest keeps its places.

    `source` is what logits come from: the tree and the model's cache, or what was scored ahead.
    """

    beams: Beams
    finished: Finished
    num_levels: Int[Array, ""]
    source: tuple[Tree, Cache] | Lookahead


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Outcome:
    """What is left behind the last level."""

    finished: Finished
    num_levels: Int[Array, ""]
    speculation: Speculation
    steps: tuple[Step, ...]


def decode(
    scorer: Scorer,
    params: Params,
    catalogue: DeviceCatalogue,
    prompt: Prompt,
    plan: DecodePlan,
    key: Key[Array, " batch"] | None = None,
) -> Decoded:
    """Decode the best legal sequences of a batch.

    Args:
        scorer: the model; static.
        params: its parameters.
        catalogue: what each row may be answered with.
        prompt: what each row begins with.
        plan: what is asked for.
        key: of the draws of every row; none are drawn without `do_sample`.

    Returns:
        R sequences a row: the best first, then rows of padding where there are no more.

    Source: STATIC, algorithm 1, with candidates scored before any truncation.
    """
    prompt_logits, cache = scorer.prefill(params, prompt)
    batch_size = len(prompt_logits)
    # Equal beams need not be scored K times over.
    width = 1 if plan.is_beam_search else plan.width
    state = _State(
        beams=Beams.start(batch_size, width, independent=not plan.is_beam_search),
        finished=Finished.none_yet(batch_size, plan.width, catalogue.max_length),
        num_levels=jnp.int32(0),
        source=(Tree.over_prompt(batch_size, width), cache),
    )
    search = _Search(scorer, params, catalogue, plan, key)
    shape = (batch_size, width, prompt_logits.shape[-1])
    state, step = search.decide(jnp.broadcast_to(prompt_logits[:, None], shape), state, level=0)
    outcome = search.go_on(state, level=1)
    step_scores, step_logits = zip(step, *outcome.steps, strict=True)
    return Decoded(
        *_best(outcome.finished, plan),
        num_levels=jnp.broadcast_to(outcome.num_levels, batch_size),
        step_scores=step_scores if plan.output_scores else None,
        step_logits=step_logits if plan.output_logits else None,
        speculation=outcome.speculation,
    )


# The whole of a call as one program; there is one for every scorer, static plan, and shapes of what is given.
decode_program = jax.jit(decode, static_argnames=("scorer",))


@dataclass(frozen=True)
class _Search:
    """What is the same on all levels of a call, and the two ways on from one."""

    scorer: Scorer
    params: Params
    catalogue: DeviceCatalogue
    plan: DecodePlan
    key: Key[Array, " batch"] | None

    def go_on(self, state: _State, *, level: int) -> _Outcome:
        """From a level to the end."""
        if level == self.catalogue.max_length:
            return _outcome(state)
        drafter = self.plan.drafter
        if drafter is None or not drafter.size(level):
            return self._plainly(state, level=level)
        nodes, num_steps, fits = drafter.draft(state.beams, self.catalogue, level=level)
        fits = _in_all_rows(fits, self.plan) & _any_left(state.beams, state.finished, self.plan)
        return lax.cond(
            fits,
            lambda state: self._ahead(state, nodes, num_steps, level=level),
            lambda state: self._plainly(state, level=level),
            state,
        )

    def decide(self, logits: Float[Array, "batch beams vocab"], state: _State, *, level: int) -> tuple[_State, Step]:
        """One level, by the logits behind the beams; and what of it is put out."""
        beams, catalogue, plan = state.beams, self.catalogue, self.plan
        legal = children(beams.states, catalogue, level=level)
        scores = child_scores(logits, in_columns(legal, self.scorer, self.params, level=level), plan)
        step_scores = _per_path(over_vocabulary(scores, legal, logits.shape[-1]), plan) if plan.output_scores else None
        step_logits = _per_path(logits.astype(jnp.float32), plan) if plan.output_logits else None
        scores = jnp.where(legal.legal, beams.scores[..., None] + scores, beam.DEAD)
        of_level = None if self.key is None else jax.vmap(lambda key: jax.random.fold_in(key, level))(self.key)
        beams, finished = accept(beams, state.finished, legal, scores, catalogue, plan, level=level, key=of_level)
        num_levels = state.num_levels + 1
        return replace(state, beams=beams, finished=finished, num_levels=num_levels), (step_scores, step_logits)

    def _plainly(self, state: _State, *, level: int) -> _Outcome:
        """Score the live beams, decide their level, and go on."""
        state, step = self._one_level(state, level=level)
        rest = self.go_on(state, level=level + 1)
        return replace(rest, steps=(step, *rest.steps))

    def _ahead(self, state: _State, nodes: Nodes, num_steps: Int[Array, ""], *, level: int) -> _Outcome:
        """Score the live beams and all that can follow, and decide all levels."""
        logits, source = self._score_ahead(state, nodes, num_steps, level=level)
        state, step = self.decide(logits, replace(state, source=source), level=level)
        steps = [step]
        for below in range(level + 1, self.catalogue.max_length):
            state, step = self._one_level(state, level=below)
            steps.append(step)
        return replace(_outcome(state), steps=tuple(steps))

    def _one_level(self, state: _State, *, level: int) -> tuple[_State, Step]:
        """Score the live beams, or look their logits up, and decide; or leave all as it is if nothing can change."""

        def run(state: _State) -> tuple[_State, Step]:
            if isinstance(state.source, Lookahead):
                logits, source = state.source.logits(state.beams)
            else:
                logits, source = self._score(state.beams, *state.source)
            return self.decide(logits, replace(state, source=source), level=level)

        may_be_done = self.plan.exit_early and any(self.catalogue.has_leaves[:level])
        return _unless_done(run, state, self.plan) if may_be_done else run(state)

    def _score(
        self, beams: Beams, tree: Tree, cache: Cache
    ) -> tuple[Float[Array, "batch beams vocab"], tuple[Tree, Cache]]:
        """One forward over the live beams."""
        tree = tree.grow(beams.parents)
        depths = jnp.full(beams.scores.shape[1], tree.depth, dtype=jnp.int32)
        logits, cache = self.scorer.score(self.params, cache, beams.tokens, depths, tree.attention_mask())
        return logits, (tree, cache)

    def _score_ahead(
        self, state: _State, nodes: Nodes, num_steps: Int[Array, ""], *, level: int
    ) -> tuple[Float[Array, "batch beams vocab"], Lookahead]:
        """One forward over the live beams and what is drafted below them; it is the last one."""
        assert not isinstance(state.source, Lookahead)
        beams, (tree, cache) = state.beams, state.source
        tree, num_beams = tree.grow(beams.parents), beams.scores.shape[1]
        tokens = jnp.concatenate([beams.tokens, nodes.tokens], axis=1)
        depths = jnp.concatenate([jnp.full(num_beams, tree.depth, dtype=jnp.int32), nodes.depths])
        visible = tree.mask_with(nodes, num_levels=self.catalogue.max_length - 1 - level)
        logits, _ = self.scorer.score(self.params, cache, tokens, depths, visible)
        dead = self.catalogue.dead_state
        ahead = Lookahead.over(
            nodes, logits[:, num_beams:], num_steps=num_steps, target_forwards=level, dead_state=dead
        )
        return logits[:, :num_beams], ahead


def _outcome(state: _State) -> _Outcome:
    """What is left of the last level's state, without what its logits came from."""
    source, batch_size = state.source, len(state.beams.scores)
    if isinstance(source, Lookahead):
        speculation = source.speculation
    else:  # the prefill decides the first level, a forward each of the others
        speculation = Speculation.none(batch_size, target_forwards=state.num_levels - 1)
    return _Outcome(state.finished, state.num_levels, speculation, ())


def _unless_done(run: Callable[[_State], Any], state: _State, plan: DecodePlan) -> Any:
    """Decide a level if any row can still change; else leave everything as it is, in the shapes of the next level."""
    shapes, after = jax.tree.flatten(jax.eval_shape(run, state))
    # What is given back as it came is not copied, the prompt's keys above all.
    of_state = len(jax.tree.leaves(state))

    def skip(state: _State) -> Any:
        leaves = [*jax.tree.leaves(state), *[None] * (len(shapes) - of_state)]
        same = [
            leaf
            if leaf is not None and (leaf.shape, leaf.dtype) == (then.shape, then.dtype)
            else jnp.zeros(then.shape, then.dtype)
            for leaf, then in zip(leaves, shapes, strict=True)
        ]
        return jax.tree.unflatten(after, same)

    return lax.cond(_any_left(state.beams, state.finished, plan), run, skip, state)


def in_columns(legal: Children, scorer: Scorer, params: Params, *, level: int) -> Children:
    """Children by their places in a scorer's logits, where those are not over the vocabulary."""
    columns = getattr(scorer, "columns", None)
    if columns is None:
        return legal
    return replace(legal, tokens=jnp.where(legal.legal, columns(params, legal.tokens, level=level), -1))


def child_scores(
    logits: Float[Array, "batch beams vocab"], legal: Children, plan: DecodePlan
) -> Float[Array, "batch beams children"]:
    """The scores of one step for the children of every beam; what stands at illegal ones means nothing.

    Beam methods add up log-softmax values over the *full* vocabulary, invalid tokens then dropped; independent paths
    compare logits: transformers' meanings. What comes behind the constraint there, does so here: warpers, which
    compare legal tokens alone, and the normalisation over them.
    """
    logits = logits.astype(jnp.float32)
    scores = legal.scores(logits)
    if plan.is_beam_search:
        scores = scores - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    scores = jnp.where(legal.legal, scores, beam.DEAD)
    if plan.do_sample:
        keep = {"min_tokens_to_keep": plan.min_tokens_to_keep}
        scores = scores if plan.temperature is None else scores / plan.temperature
        scores = scores if plan.top_k is None else keep_top_k(scores, plan.top_k, **keep)
        scores = scores if plan.top_p is None else keep_top_p(scores, plan.top_p, **keep)
        scores = scores if plan.min_p is None else keep_min_p(scores, plan.min_p, **keep)
    return renormalize(scores) if plan.renormalize_logits else scores


def accept(
    beams: Beams,
    finished: Finished,
    legal: Children,
    scores: Float[Array, "batch beams children"],
    catalogue: DeviceCatalogue,
    plan: DecodePlan,
    *,
    level: int,
    key: Key[Array, " batch"] | None = None,
) -> tuple[Beams, Finished]:
    """Decide one level: extend the beams, and move what is complete to the finished."""
    may_end = catalogue.has_leaves[level]
    how: dict[str, Any] = {"dead_state": catalogue.dead_state, "do_sample": plan.do_sample, "key": key}
    if not plan.is_beam_search:
        kept = beam.choose(beams, legal, scores, **how)
        ends = is_leaf(kept.states, catalogue, level=level + 1)
        return beam.retire_in_place(kept, finished, ends) if may_end else (kept, finished)

    all_end = level + 1 == catalogue.max_length and not catalogue.is_ragged and not plan.do_sample
    num_kept = plan.num_kept if (may_end and not all_end) or plan.do_sample else plan.num_beams
    kept = beam.select(beams, legal, scores, num_kept=num_kept, **how)
    if all_end:
        return kept, beam.finish(_widened(kept, plan.width), length_penalty=plan.length_penalty)
    if may_end:
        beams, finished = beam.retire(
            kept,
            finished,
            is_leaf(kept.states, catalogue, level=level + 1),
            length_penalty=plan.length_penalty,
            early_stopping=plan.early_stopping,
        )
    else:
        beams = beam.keep_best(kept, plan.num_beams) if plan.do_sample else kept
    if any(catalogue.has_leaves[: level + 1]):
        finished = beam.update_may_improve(
            beams,
            finished,
            length_penalty=plan.length_penalty,
            early_stopping=plan.early_stopping,
            max_new_tokens=plan.max_new_tokens,
        )
    return beams, finished


def _any_left(beams: Beams, finished: Finished, plan: DecodePlan) -> Bool[Array, ""]:
    """Whether some row can still change."""
    open_rows = (beams.scores > beam.DEAD).any(axis=-1, keepdims=True)
    if plan.is_beam_search:
        open_rows = open_rows & finished.may_improve
        if plan.early_stopping is True:
            open_rows = open_rows & ~finished.is_full
    left = open_rows.any()
    return left if plan.rows_axis is None else lax.psum(left.astype(jnp.int32), plan.rows_axis) > 0


def _in_all_rows(flag: Bool[Array, ""], plan: DecodePlan) -> Bool[Array, ""]:
    """Whether something holds wherever rows go on together."""
    return flag if plan.rows_axis is None else lax.pmin(flag.astype(jnp.int32), plan.rows_axis) > 0


def _best(
    finished: Finished, plan: DecodePlan
) -> tuple[Int[Array, "batch returned length"], Float[Array, "batch returned"], Int[Array, "batch returned length"]]:
    """The R best of every row."""
    beam_indices = finished.beam_indices[:, : plan.num_return_sequences]
    scores = finished.scores[:, : plan.num_return_sequences]
    is_there = scores[..., None] > beam.DEAD
    beam_indices = jnp.where(is_there, beam_indices, -1)
    sequences = jnp.where(beam_indices >= 0, finished.sequences[:, : plan.num_return_sequences], plan.fill_token_id)
    return jnp.where(is_there, sequences, plan.missing_token_id), scores, beam_indices


def _widened(beams: Beams, width: int) -> Beams:
    """The same beams, and dead ones behind them."""
    missing = width - beams.scores.shape[1]

    def filled(array: Array, value: Any) -> Array:
        return jnp.pad(array, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)), constant_values=value)

    return Beams(
        sequences=filled(beams.sequences, 0),
        beam_indices=filled(beams.beam_indices, -1),
        scores=filled(beams.scores, beam.DEAD),
        states=filled(beams.states, 0),
    )


def _per_path(step: Float[Array, "batch beams vocab"], plan: DecodePlan) -> Float[Array, "batch paths vocab"]:
    """A row for every path; the first one of a plain beam search is the same for all."""
    batch_size, num_beams, vocab_size = step.shape
    if num_beams == 1:
        return jnp.broadcast_to(step, (batch_size, plan.width, vocab_size))
    return jnp.pad(step, ((0, 0), (0, plan.width - num_beams), (0, 0)), constant_values=beam.DEAD)
