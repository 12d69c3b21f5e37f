# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one loop: score, then accept, level by level. Knows no model beyond its scorer.

All of it, prefill included, is one pure function of arrays, to be compiled as one program: levels are unrolled, shapes
follow from the plan and the catalogue, and nothing synchronises. The batch is every array's first axis, so that the
rows of a batch may be sharded over devices.

With a drafter, the first levels of the catalogue are scored together with the prompt, if they fit whatever is hidden.
From the next level on there are two ways to continue: if all legal continuations fit a draft, one forward scores them
and lookups decide the rest; else the level is decided as without a draft, and the next level checks again.

Axes: B batch, K beams, C children, V vocabulary, P prompt, T generated tokens, R returned sequences a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from . import beam
from .arrays import Number, WholeNumber, static
from .beam import Beams, Finished
from .children import Children
from .noise import Noise, paths_of
from .scorers import JointScorer, Params, Prompt, Scorer, ScorerCache
from .speculation import Drafter, Lookahead, Speculation
from .transition import DeviceCatalogue, children, is_leaf, over_vocabulary
from .tree import Nodes, Tree
from .warpers import keep_min_p, keep_top_k, keep_top_p, renormalize


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The options of one call; names and meanings are transformers'.

    Attributes:
        num_beams: K; 1 decodes every path on its own (greedy, or sampling). Static, as are all up to `rows_axis`.
        num_return_sequences: R.
        num_kept: candidates kept a level: K, plus spares to replace beams that end here.
        do_sample: sample instead of taking the best.
        early_stopping: when a row with K complete sequences is done.
        top_k: number of children to sample from; None for all.
        min_tokens_to_keep: children that every warper keeps.
        renormalize_logits: normalise scores over the legal tokens of each step.
        forces_end: whether the longest sequences' last token, the end token, is certain: transformers'
            `forced_eos_token_id`.
        output_scores: keep the processed scores of every level.
        output_logits: keep the logits of every level.
        exit_early: skip levels once nothing can change.
        drafter: proposes nodes to score ahead; None for no draft.
        rows_axis: the mesh axis over which rows that advance together are sharded; None if these advance alone.
        length_penalty: exponent of the length that scores are divided by. This and the following may change from call
            to call without a new program.
        max_new_tokens: the longest sequence that the heuristic of `early_stopping="never"` assumes.
        fill_token_id: what follows the end of a sequence.
        missing_token_id: fills a row that has no sequence left; not `fill_token_id` if such a row would be a sequence
            of the catalogue.
        temperature: divisor of scores; None for none.
        top_p: total probability of the children to sample from; None for all.
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
    forces_end: bool = static(default=False)
    output_scores: bool = static(default=False)
    output_logits: bool = static(default=False)
    exit_early: bool = static(default=True)
    drafter: Drafter | None = static(default=None)
    rows_axis: str | None = static(default=None)
    length_penalty: Number = 1.0
    max_new_tokens: WholeNumber = 0
    fill_token_id: WholeNumber = -1
    missing_token_id: WholeNumber = -1
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
    """The result: transformers' fields, generated part only.

    Attributes:
        sequences: tokens, `fill_token_id` after the end; a row of `missing_token_id` where no sequence is left.
        scores: `-inf` for such a row.
        beam_indices: paths within the row, -1 after the end.
        num_levels: levels decided before nothing could change any more.
        step_scores: one entry a level, if requested; those of undecided levels mean nothing.
        step_logits: one entry a level, if requested; those of undecided levels mean nothing.
        speculation: the number of forwards, and what was scored ahead.
    """

    sequences: Int[Array, "batch returned length"]
    scores: Float[Array, "batch returned"]
    beam_indices: Int[Array, "batch returned length"]
    num_levels: Int[Array, " batch"]
    step_scores: tuple[Float[Array, "batch paths vocab"], ...] | None
    step_logits: tuple[Float[Array, "batch paths vocab"], ...] | None
    speculation: Speculation


# The requested outputs of one level: scores and logits.
Step = tuple[Array | None, Array | None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """The state passed from one level to the next. What grows is last, so that the other leaves keep their places.

    Logits come from `source`: the tree and the model's cache, or what was scored ahead; None once all is decided.
    """

    beams: Beams
    finished: Finished
    num_levels: Int[Array, ""]
    speculation: Speculation
    source: tuple[Tree, ScorerCache] | Lookahead | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Outcome:
    """The result after the last level."""

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
    noise: Noise | None = None,
) -> Decoded:
    """Decode the best legal sequences of a batch.

    Args:
        scorer: the model; static.
        params: its parameters.
        catalogue: the legal sequences of each row.
        prompt: the start of each row.
        plan: the options.
        noise: what is drawn comes from; nothing is without `do_sample`.

    Returns:
        R sequences a row: the best first, then rows of padding if there are fewer.

    Source: STATIC, algorithm 1, with candidates scored before any truncation.
    """
    search = _Search(scorer, params, catalogue, plan, noise)
    logits, state = search.start(prompt)
    state, step = search.decide(logits, state, level=0)
    outcome = search.run_from(state, level=1)
    step_scores, step_logits = zip(step, *outcome.steps, strict=True)
    return Decoded(
        *_best(outcome.finished, plan),
        num_levels=jnp.broadcast_to(outcome.num_levels, len(outcome.finished.scores)),
        step_scores=step_scores if plan.output_scores else None,
        step_logits=step_logits if plan.output_logits else None,
        speculation=outcome.speculation,
    )


# A whole call as one program; there is one for every scorer, static plan, and set of argument shapes.
decode_program = jax.jit(decode, static_argnames=("scorer",))


@dataclass(frozen=True)
class _Search:
    """What all levels of a call share, and the two ways to continue from one."""

    scorer: Scorer
    params: Params
    catalogue: DeviceCatalogue
    plan: DecodePlan
    noise: Noise | None

    def start(self, prompt: Prompt) -> tuple[Float[Array, "batch beams vocab"], _State]:
        """Compute the prompt, and the catalogue's first levels with it if those are drafted."""
        plan, drafter, batch_size = self.plan, self.plan.drafter, len(prompt.input_ids)
        # Equal beams need not be scored K times.
        width = 1 if plan.is_beam_search else plan.width
        speculation, tree = Speculation.none(batch_size), Tree.over_prompt(batch_size, width)
        if drafter is None or not drafter.size(0):
            prompt_logits, cache = self.scorer.prefill(self.params, prompt)
            source = (tree, cache)
        else:  # equal beams are one root
            nodes, num_steps, _ = drafter.draft(Beams.start(batch_size, 1), self.catalogue, level=0)
            visible = Tree.over_prompt(batch_size, 1).mask_with(nodes, num_levels=drafter.num_first)[:, 1:]
            assert isinstance(self.scorer, JointScorer)
            logits, cache = self.scorer.prefill_with(self.params, prompt, nodes.tokens, nodes.depths, visible)
            prompt_logits, tree = logits[:, 0], replace(tree, num_slots=nodes.tokens.shape[1])
            source = Lookahead((tree, cache), nodes, logits[:, 1:], drafter.num_first)
            speculation = speculation.drafting(nodes, num_steps, dead_state=self.catalogue.dead_state)
        state = _State(
            beams=Beams.start(batch_size, width, independent=not plan.is_beam_search),
            finished=Finished.none_yet(batch_size, plan.width, self.catalogue.max_length),
            num_levels=jnp.int32(0),
            speculation=speculation,
            source=source,
        )
        return jnp.broadcast_to(prompt_logits[:, None], (batch_size, width, prompt_logits.shape[-1])), state

    def run_from(self, state: _State, *, level: int) -> _Outcome:
        """Decode from a level to the end."""
        if level == self.catalogue.max_length:
            return _Outcome(state.finished, state.num_levels, state.speculation, ())
        drafter = self.plan.drafter
        if isinstance(state.source, Lookahead) or drafter is None or not drafter.size(level):
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
        """Decide one level from the logits after the beams; also returns the requested outputs."""
        beams, catalogue, plan = state.beams, self.catalogue, self.plan
        legal = children(beams.states, catalogue, level=level)
        scores = child_scores(logits, in_columns(legal, self.scorer, self.params, level=level), plan)
        if plan.forces_end and level + 1 == catalogue.max_length:
            scores = jnp.where(scores > beam.DEAD, 0.0, scores)
        step_scores = _per_path(over_vocabulary(scores, legal, logits.shape[-1]), plan) if plan.output_scores else None
        step_logits = _per_path(logits.astype(jnp.float32), plan) if plan.output_logits else None
        scores = jnp.where(legal.legal, beams.scores[..., None] + scores, beam.DEAD)
        beams, finished = accept(beams, state.finished, legal, scores, catalogue, plan, level=level, noise=self.noise)
        num_levels = state.num_levels + 1
        return replace(state, beams=beams, finished=finished, num_levels=num_levels), (step_scores, step_logits)

    def _plainly(self, state: _State, *, level: int) -> _Outcome:
        """Score the live beams, or look up their logits, decide their level, and continue."""
        state, step = self._one_level(state, level=level)
        rest = self.run_from(state, level=level + 1)
        return replace(rest, steps=(step, *rest.steps))

    def _ahead(self, state: _State, nodes: Nodes, num_steps: Int[Array, ""], *, level: int) -> _Outcome:
        """Score the live beams and all legal continuations, and decide all levels."""
        logits, state = self._score_ahead(state, nodes, num_steps, level=level)
        state, step = self.decide(logits, state, level=level)
        rest = self.run_from(state, level=level + 1)
        return replace(rest, steps=(step, *rest.steps))

    def _one_level(self, state: _State, *, level: int) -> tuple[_State, Step]:
        """Score the live beams, or look up their logits, and decide; change nothing if no row can change."""

        def run(state: _State) -> tuple[_State, Step]:
            if isinstance(state.source, Lookahead):
                logits, accepted, source = state.source.logits(state.beams)
                speculation = state.speculation.accepting(accepted)
            else:
                assert state.source is not None
                logits, source = self._score(state.beams, *state.source)
                speculation = state.speculation.after_forward()
            return self.decide(logits, replace(state, source=source, speculation=speculation), level=level)

        may_be_done = self.plan.exit_early and any(self.catalogue.has_leaves[:level])
        return _unless_done(run, state, self.plan) if may_be_done else run(state)

    def _score(
        self, beams: Beams, tree: Tree, cache: ScorerCache
    ) -> tuple[Float[Array, "batch beams vocab"], tuple[Tree, ScorerCache]]:
        """One forward over the live beams."""
        tree = tree.grow(beams.parents)
        depths = jnp.full(beams.scores.shape[1], tree.depth, dtype=jnp.int32)
        logits, cache = self.scorer.score(self.params, cache, beams.tokens, depths, tree.attention_mask())
        return logits, (tree, cache)

    def _score_ahead(
        self, state: _State, nodes: Nodes, num_steps: Int[Array, ""], *, level: int
    ) -> tuple[Float[Array, "batch beams vocab"], _State]:
        """One forward over the live beams and the nodes drafted below them: the last one of the call."""
        assert isinstance(state.source, tuple)
        beams, (tree, cache) = state.beams, state.source
        tree, num_beams = tree.grow(beams.parents), beams.scores.shape[1]
        tokens = jnp.concatenate([beams.tokens, nodes.tokens], axis=1)
        depths = jnp.concatenate([jnp.full(num_beams, tree.depth, dtype=jnp.int32), nodes.depths])
        num_levels = self.catalogue.max_length - 1 - level
        visible = tree.mask_with(nodes, num_levels=num_levels)
        logits, _ = self.scorer.score(self.params, cache, tokens, depths, visible)
        ahead = Lookahead(None, nodes, logits[:, num_beams:], num_levels)
        speculation = state.speculation.after_forward()
        speculation = speculation.drafting(nodes, num_steps, dead_state=self.catalogue.dead_state)
        return logits[:, :num_beams], replace(state, source=ahead, speculation=speculation)


def _unless_done(run: Callable[[_State], Any], state: _State, plan: DecodePlan) -> Any:
    """Decide a level if any row can still change; else return the state unchanged, in the shapes of the next level."""
    after: list[Any] = []

    def leaves_of(state: _State) -> list[Array]:
        leaves, structure = jax.tree.flatten(run(state))
        after.append(structure)
        return leaves

    shapes = jax.eval_shape(leaves_of, state)  # flat: classes hold arrays, not shapes
    # Leaves returned unchanged are not copied, above all the prompt's keys.
    of_state = len(jax.tree.leaves(state))

    def skip(state: _State) -> Any:
        leaves = [*jax.tree.leaves(state), *[None] * (len(shapes) - of_state)]
        same = [
            leaf
            if leaf is not None and (leaf.shape, leaf.dtype) == (then.shape, then.dtype)
            else jnp.zeros(then.shape, then.dtype)
            for leaf, then in zip(leaves, shapes, strict=False)  # the last level needs no logits any more
        ]
        return jax.tree.unflatten(after[0], same)

    return lax.cond(_any_left(state.beams, state.finished, plan), run, skip, state)


def in_columns(legal: Children, scorer: Scorer, params: Params, *, level: int) -> Children:
    """Children by their columns in a scorer's logits, if those are not over the vocabulary."""
    columns = getattr(scorer, "columns", None)
    if columns is None:
        return legal
    return replace(legal, tokens=jnp.where(legal.legal, columns(params, legal.tokens, level=level), -1))


def child_scores(
    logits: Float[Array, "batch beams vocab"], legal: Children, plan: DecodePlan
) -> Float[Array, "batch beams children"]:
    """The scores of one step for the children of every beam; the entries at illegal ones mean nothing.

    Beam methods sum log-softmax values over the *full* vocabulary and then drop invalid tokens; independent paths
    compare logits. As in transformers, warpers, which compare only legal tokens, and the normalisation over those come
    after the constraint.
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
    noise: Noise | None = None,
) -> tuple[Beams, Finished]:
    """Decide one level: extend the beams, and move complete ones to the finished."""
    may_end = catalogue.has_leaves[level]
    how: dict[str, Any] = {"dead_state": catalogue.dead_state}
    if plan.do_sample:
        assert noise is not None, "samples are drawn from noise"
        how["noise"] = noise.gumbel(beams, legal, paths=None if plan.is_beam_search else paths_of(beams))
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
    """Whether a flag holds on all devices whose rows advance together."""
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
    sequences = jnp.where(is_there, sequences, plan.missing_token_id)
    if plan.is_beam_search:
        longest = finished.sequences.shape[-1]
        scores = beam.true_scores(scores, length_penalty=plan.length_penalty, longest=longest)
    return sequences, scores, beam_indices


def _widened(beams: Beams, width: int) -> Beams:
    """The same beams, and dead ones after them."""
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
    """A row for every path; the first step of a plain beam search is the same for all paths."""
    batch_size, num_beams, vocab_size = step.shape
    if num_beams == 1:
        return jnp.broadcast_to(step, (batch_size, plan.width, vocab_size))
    return jnp.pad(step, ((0, 0), (0, plan.width - num_beams), (0, 0)), constant_values=beam.DEAD)
