# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation without a catalogue: greedy, sampling, beams. Knows no model beyond its scorer, and no trie.

One program: the prompt, then a loop with a static room for tokens and a dynamic end. The prompt's keys are shared by
all paths of a row; a generated token has a slot of its own, which is never moved: a path sees the slots of its
ancestors. Meaning and order are those of transformers' `_sample` and `_beam_search`.

Axes: B batch, K paths, V vocabulary, M candidates kept, T room for tokens, R returned sequences a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from . import beam
from .arrays import HostOrDevice, WholeNumber, along, static
from .beam import Beams, Finished
from .decode import in_any_row, warped, with_prompt
from .devices import DATA, MODEL
from .noise import Bits, Noise, follow, gumbel_after, paths_of
from .plan import DecodePlan
from .processors import apply
from .scorers import Params, Prompt, Scorer, ScorerCache
from .tree import slots_seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainPlan:
    """The options of one call.

    Attributes:
        options: those that calls with a catalogue have, too.
        ends: the end tokens, of the vocabulary.
        room: T, at least `options.max_new_tokens` (static).
        fills: whether paths that have ended are filled up with `options.fill_token_id`, as they are where there is an
            end token; others go on until all have ended, as in transformers (static).
    """

    options: DecodePlan
    ends: Bool[HostOrDevice, " vocab"]
    room: int = static()
    fills: bool = static()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generated:
    """The result: transformers' fields, generated part only.

    Attributes:
        sequences: tokens; the fill token after the end.
        scores: of beams.
        beam_indices: paths within the row, -1 after the end; of beams.
        num_steps: tokens until nothing of a row could change any more.
        step_scores: of every step, if requested; those of later steps than `num_steps`, and of beams that do not exist
            since too few tokens are allowed, mean nothing.
        step_logits: likewise.
    """

    sequences: Int[Array, "batch returned room"]
    scores: Float[Array, "batch returned"]
    beam_indices: Int[Array, "batch returned room"]
    num_steps: Int[Array, " batch"]
    step_scores: Float[Array, "room batch paths vocab"] | None
    step_logits: Float[Array, "room batch paths vocab"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What one step hands to the next.

    `beams` have room for T tokens, and as their states whether a path that competes with none has ended.
    """

    step: Int[Array, ""]
    beams: Beams
    finished: Finished
    num_steps: Int[Array, " batch"]
    is_open: Bool[Array, " batch"]
    cache: ScorerCache
    bits: Bits | None
    step_scores: Float[Array, "room batch paths vocab"] | None
    step_logits: Float[Array, "room batch paths vocab"] | None


def generate(scorer: Scorer, params: Params, prompt: Prompt, plan: PlainPlan, noise: Noise | None = None) -> Generated:
    """Generate sequences of the whole vocabulary.

    Args:
        scorer: the model; static.
        params: its parameters.
        prompt: the start of each row.
        plan: the options.
        noise: what is drawn comes from; nothing is without `do_sample`.

    Returns:
        R sequences a row: of beams the best, best first.
    """
    plan = replace(plan, options=with_prompt(plan.options, prompt))
    options = plan.options
    logits, cache = scorer.prefill(params, prompt)
    batch_size, width = len(logits), options.width
    cache = cache.with_room((plan.room - 1) * width)
    state = _start(batch_size, logits.shape[-1], cache, plan, noise)
    state = _decide(jnp.broadcast_to(logits[:, None], (batch_size, width, logits.shape[-1])), state, plan)

    def is_any_left(state: _State) -> Bool[Array, ""]:
        return in_any_row(state.is_open, options)

    def advance(state: _State) -> _State:
        logits, cache = _score(scorer, params, state, plan)
        return _decide(logits, replace(state, cache=cache), plan)

    return _result(lax.while_loop(is_any_left, advance, state), plan)


# A whole call as one program; there is one for every scorer, static plan, and set of argument shapes.
plain_program = jax.jit(generate, static_argnames=("scorer",))


@partial(jax.jit, static_argnames=("mesh", "scorer"))
def plain_on_mesh(
    mesh: Mesh, scorer: Scorer, params: Params, prompt: Prompt, plan: PlainPlan, noise: Noise | None = None
) -> Generated:
    """`generate` on several devices: see `devices.decode_on_mesh`. Rows on all devices take equally many steps."""
    if mesh.shape[MODEL] > 1:
        prompt, noise = lax.with_sharding_constraint((prompt, noise), NamedSharding(mesh, P(DATA)))
        return generate(scorer, params, prompt, plan, noise)
    plan = replace(plan, options=replace(plan.options, rows_axis=DATA))
    rows, of_steps = P(DATA), P(None, DATA)
    outputs = Generated(
        rows,  # pyright: ignore
        rows,  # pyright: ignore
        rows,  # pyright: ignore
        rows,  # pyright: ignore
        of_steps if plan.options.output_scores else None,  # pyright: ignore
        of_steps if plan.options.output_logits else None,  # pyright: ignore
    )
    specs = (P(), rows, P(), None if noise is None else rows)
    run = jax.shard_map(partial(generate, scorer), mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)
    return run(params, prompt, plan, noise)


def _start(batch_size: int, vocab_size: int, cache: ScorerCache, plan: PlainPlan, noise: Noise | None) -> _State:
    """Before the first token."""
    options = plan.options
    width, is_beam_search = options.width, options.is_beam_search
    beams = Beams.start(batch_size, width, independent=not is_beam_search)
    bits = None
    if noise is not None:
        bits = noise.prefixes(beams.sequences, paths=None if is_beam_search else paths_of(beams))
    shape = (batch_size, width, plan.room)
    # Paths that do not compete go on from themselves.
    first = jnp.full(width, -1, jnp.int32) if is_beam_search else jnp.arange(width, dtype=jnp.int32)
    beams = replace(
        beams,
        sequences=jnp.broadcast_to(jnp.asarray(options.fill_token_id, jnp.int32), shape),
        beam_indices=jnp.broadcast_to(first[:, None], shape),
    )
    nothing = jnp.zeros((plan.room, batch_size, width, vocab_size), jnp.float32)
    return _State(
        step=jnp.int32(0),
        beams=beams,
        finished=Finished.none_yet(batch_size, width, plan.room),
        num_steps=jnp.zeros(batch_size, jnp.int32),
        is_open=jnp.ones(batch_size, dtype=bool),
        cache=cache,
        bits=bits,
        step_scores=nothing if options.output_scores else None,
        step_logits=nothing if options.output_logits else None,
    )


def _score(
    scorer: Scorer, params: Params, state: _State, plan: PlainPlan
) -> tuple[Float[Array, "batch paths vocab"], ScorerCache]:
    """One forward over the last token of every path: it sees the slots of its ancestors, and itself."""
    number, beams = state.step, state.beams
    batch_size, width = beams.scores.shape
    tokens = lax.dynamic_index_in_dim(beams.sequences, number - 1, axis=-1, keepdims=False)
    seen = slots_seen(beams.beam_indices, jnp.broadcast_to(number, batch_size), state.cache.num_slots)
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch_size, width, width))
    visible = jnp.concatenate([seen, own], axis=-1)
    depths = jnp.broadcast_to(number, (batch_size, width))
    fed = jnp.maximum(tokens, 0)  # -1 may be what fills paths that have ended
    logits, nodes = scorer.score(params, state.cache, fed, depths, visible)
    return logits, state.cache.put(nodes, depths, (number - 1) * width)


def _decide(logits: Float[Array, "batch paths vocab"], state: _State, plan: PlainPlan) -> _State:
    """Append one token to every path."""
    options, step = plan.options, state.step
    logits = logits.astype(jnp.float32)
    scores = _scores(logits, state, plan)
    step_scores = None if state.step_scores is None else state.step_scores.at[step].set(scores)
    step_logits = None if state.step_logits is None else state.step_logits.at[step].set(logits)
    decide = _decide_beams if options.is_beam_search else _decide_paths
    beams, finished, is_open = decide(scores, state, plan)
    bits = state.bits
    if bits is not None:
        parents, tokens = (
            lax.dynamic_index_in_dim(of, step, axis=-1, keepdims=False) for of in (beams.beam_indices, beams.sequences)
        )
        bits = follow((along(bits[0], parents), along(bits[1], parents)), tokens)
    return _State(
        step=step + 1,
        beams=beams,
        finished=finished,
        num_steps=jnp.where(state.is_open, step + 1, state.num_steps),
        is_open=state.is_open & is_open & (step + 1 < options.max_new_tokens),
        cache=state.cache,
        bits=bits,
        step_scores=step_scores,
        step_logits=step_logits,
    )


def _scores(
    logits: Float[Array, "batch paths vocab"], state: _State, plan: PlainPlan
) -> Float[Array, "batch paths vocab"]:
    """What transformers' `logits_processor` makes of them."""
    options = plan.options
    scores = jax.nn.log_softmax(logits, axis=-1) if options.is_beam_search else logits
    if (processors := options.processors) is not None:
        paths = processors.paths(state.beams.sequences, number=state.step)
        scores = apply((*processors.before, *processors.after), paths, scores, step=state.step)
    return warped(scores, options)


def _decide_beams(
    scores: Float[Array, "batch beams vocab"], state: _State, plan: PlainPlan
) -> tuple[Beams, Finished, Bool[Array, " batch"]]:
    """The best, or drawn, continuations of all beams of a row; those that end are among the finished."""
    options, step, beams = plan.options, state.step, state.beams
    vocab_size = scores.shape[-1]
    flat = (beams.scores[..., None] + scores).reshape(len(scores), -1)
    keys = flat if state.bits is None else flat + gumbel_after(state.bits, _all_tokens(vocab_size)).reshape(flat.shape)
    chosen = lax.top_k(keys, min(options.num_kept, flat.shape[-1]))[1]
    parents = chosen // vocab_size
    kept = beams.take(parents)
    kept = replace(
        kept,
        sequences=kept.sequences.at[..., step].set(chosen - parents * vocab_size),
        beam_indices=kept.beam_indices.at[..., step].set(parents),
        scores=along(flat, chosen),
    )
    ends = _ended(kept, step, plan)
    how = {"length_penalty": options.length_penalty, "early_stopping": options.early_stopping, "length": step + 1}
    beams, finished = beam.retire(kept, state.finished, ends, **how)
    finished = beam.update_may_improve(beams, finished, max_new_tokens=options.max_new_tokens, **how)
    is_open = (beams.scores > beam.DEAD).any(-1) & finished.may_improve[:, 0]
    if options.early_stopping is True:
        is_open = is_open & ~finished.is_full[:, 0]
    return beams, finished, is_open


def _decide_paths(
    scores: Float[Array, "batch paths vocab"], state: _State, plan: PlainPlan
) -> tuple[Beams, Finished, Bool[Array, " batch"]]:
    """The best, or a drawn, continuation of every path."""
    step, beams, has_ended = state.step, state.beams, state.beams.states > 0
    keys = scores if state.bits is None else scores + gumbel_after(state.bits, _all_tokens(scores.shape[-1]))
    tokens = keys.argmax(axis=-1).astype(jnp.int32)
    if plan.fills:
        tokens = jnp.where(has_ended, plan.options.fill_token_id, tokens)
    beams = replace(beams, sequences=beams.sequences.at[..., step].set(tokens))
    has_ended = has_ended | _ended(beams, step, plan)
    return replace(beams, states=has_ended.astype(jnp.int32)), state.finished, ~has_ended.all(-1)


def _ended(kept: Beams, step: WholeNumber, plan: PlainPlan) -> Bool[Array, "batch kept"]:
    """Which paths are complete: by their last token, their length, or a criterion."""
    tokens = lax.dynamic_index_in_dim(kept.sequences, step, axis=-1, keepdims=False)
    ends = (jnp.asarray(plan.ends)[jnp.maximum(tokens, 0)] & (tokens >= 0)) | (step + 1 >= plan.options.max_new_tokens)
    processors = plan.options.processors
    if processors is None or not processors.criteria:
        return ends
    return ends | processors.ended(processors.paths(kept.sequences, number=step + 1))


def _result(state: _State, plan: PlainPlan) -> Generated:
    """The R first of every row."""
    options = plan.options
    if not options.is_beam_search:
        sequences, beam_indices = state.beams.sequences, state.beams.beam_indices
        scores = state.beams.scores
    else:
        finished = state.finished
        is_there = finished.scores[..., None] > beam.DEAD
        beam_indices = jnp.where(is_there, finished.beam_indices, -1)
        sequences = jnp.where(beam_indices >= 0, finished.sequences, options.fill_token_id)
        scores = beam.true_scores(finished.scores, length_penalty=options.length_penalty, longest=plan.room)
    number = options.num_return_sequences
    return Generated(
        sequences[:, :number],
        scores[:, :number],
        beam_indices[:, :number],
        state.num_steps,
        state.step_scores,
        state.step_logits,
    )


def _all_tokens(vocab_size: int) -> Int[Array, "1 1 vocab"]:
    return jnp.arange(vocab_size, dtype=jnp.int32)[None, None]
