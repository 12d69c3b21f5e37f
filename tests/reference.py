# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious oracles, one prefix and one token at a time. They share no code with what they judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

ScoreFunction = Callable[[tuple[int, ...]], npt.NDArray[np.floating]]


class ReferenceTrie:
    """What follows each prefix, and the items that end with it, with the meanings of `ConstraintIndex`."""

    def __init__(self, sequences: Iterable[Sequence[int]], eos_token_id: int | None = None) -> None:
        """Insert sequences one by one, with the end token where they lack it; row numbers are the items."""
        self.eos_token_id = eos_token_id
        self._next: dict[tuple[int, ...], set[int]] = {}
        self._items: dict[tuple[int, ...], list[int]] = {}
        for item, row in enumerate(map(tuple, sequences)):
            tokens = row if eos_token_id is None or row[-1] == eos_token_id else (*row, eos_token_id)
            for length, token in enumerate(tokens):
                self._next.setdefault(tokens[:length], set()).add(token)
            self._items.setdefault(tokens, []).append(item)

    def allowed(self, prefix: Sequence[int]) -> list[int]:
        """The tokens that may follow a prefix, ascending."""
        return sorted(self._next.get(tuple(prefix), ()))

    def items(self, row: Sequence[int]) -> list[int]:
        """The items of a generated row; what follows a complete sequence, or a negative token, is padding."""
        found: tuple[int, ...] = ()
        for token in row:
            if token < 0 or not self.allowed(found):
                break
            found = (*found, token)
        if self.eos_token_id in self.allowed(found):  # the row was given without its end token
            found = (*found, self.eos_token_id)
        return list(self._items.get(found, []))

    def sequences(self) -> list[tuple[int, ...]]:
        """Every distinct sequence, in lexicographic order, the end token included."""
        return sorted(self._items)


def reference_answers(
    labels: Sequence[Sequence[int]], separator: Sequence[int], *, eos_token_id: int, max_labels: int | None = None
) -> set[tuple[int, ...]]:
    """Every answer of one or several distinct labels (without end tokens), enumerated; for a handful of labels."""
    most = len(labels) if max_labels is None else min(max_labels, len(labels))
    answers: set[tuple[int, ...]] = set()
    for number in range(1, most + 1):
        for chosen in permutations(labels, number):
            tokens = list(chosen[0])
            for label in chosen[1:]:
                tokens += [*separator, *label]
            answers.add((*tokens, eos_token_id))
    return answers


def reference_allowed(answers: Iterable[tuple[int, ...]], prefix: Sequence[int]) -> list[int]:
    """The tokens that extend a prefix of an answer to a longer one, ascending."""
    given = tuple(prefix)
    return sorted({one[len(given)] for one in answers if len(one) > len(given) and one[: len(given)] == given})


def reference_label_scores(
    score: str,
    labels: Sequence[Sequence[int]],
    logits: Callable[[list[int]], npt.NDArray[np.floating]],
    after_neutral: Callable[[list[int]], npt.NDArray[np.floating]] | None = None,
) -> list[float]:
    """The score of each label, its end token included, by one forward for each: the oracle of `classify`.

    `logits` maps a label's tokens without the last to `[tokens, vocabulary]`, after the prompt and each of those;
    `after_neutral` does after the prompt of the neutral text.
    """
    found: list[float] = []
    for label in labels:
        total = 0.0
        for place, row in enumerate(np.asarray(logits(list(label[:-1])), dtype=np.float64)):
            same = [other for other in labels if list(other[:place]) == list(label[:place])]
            legal = sorted({other[place] for other in same}) if score == "renormalized" else slice(None)
            total += float(row[label[place]] - np.logaddexp.reduce(row[legal]))
        found.append(total / len(label) if score == "mean" else total)
    if score == "pmi":
        assert after_neutral is not None
        priors = reference_label_scores("sum", labels, after_neutral)
        found = [own - prior for own, prior in zip(found, priors, strict=True)]
    return found


def reference_beam_search(
    score_fn: ScoreFunction,
    sequences: Iterable[Sequence[int]],
    num_beams: int | Sequence[int],  # by level, the last one for all that follow
    *,
    eos_token_id: int | None = None,
    length_penalty: float = 1.0,
    renormalize_logits: bool = False,
) -> list[tuple[tuple[int, ...], float]]:
    """Constrained beam search over Python lists, one beam and one token at a time.

    What is complete is finished if it is among the `num_beams` best of its level, and dropped otherwise; the
    `num_beams` best of the others live on: transformers' search with `early_stopping="never"`. Finished ones rank by
    `score / length**length_penalty`, the end token counted, then in lexicographic order, without scores of `-inf`.
    """
    trie = ReferenceTrie(sequences, eos_token_id=eos_token_id)
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    widths = [num_beams] if isinstance(num_beams, int) else list(num_beams)
    while live:
        width = widths[min(len(live[0][0]), len(widths) - 1)]
        candidates: list[tuple[tuple[int, ...], float]] = []
        for prefix, score in live:
            log_probs = np.asarray(score_fn(prefix), dtype=np.float64)
            legal = trie.allowed(prefix)
            norm = float(np.logaddexp.reduce(log_probs[legal])) if renormalize_logits else 0.0
            for token in legal:
                if np.isfinite(log_probs[token]):
                    candidates.append(((*prefix, token), score + float(log_probs[token]) - norm))
        finished += [
            (tokens, score / len(tokens) ** length_penalty)
            for tokens, score in _best(candidates, width)
            if not trie.allowed(tokens)
        ]
        live = _best([candidate for candidate in candidates if trie.allowed(candidate[0])], width)
    return _best(finished, max(widths))


def reference_head_log_probs(
    hidden: Array,
    weights: Mapping[str, Array],
    codebooks: Sequence[Sequence[int]],
    prefix: Sequence[int],
    *,
    transition: str,
    use_state: bool = True,
    use_placeholders: bool = True,
) -> dict[int, float]:
    """A draft head's log-probability of every code after a prefix, one vector at a time (NEZHA, equations 1 to 3).

    `hidden` is `[L + 1, H]`, of the prompt's last token and the placeholders; weights are named as in a state_dict.
    """
    state = np.asarray(hidden[0], dtype=np.float64)
    for level, token in enumerate(prefix):
        if transition == "none":
            break
        embedded = weights[f"embeddings.{level}.weight"][list(codebooks[level]).index(token)]
        cell = {name.split(".", 2)[2]: value for name, value in weights.items() if f"transitions.{level}." in name}
        if transition == "add":
            state = state + embedded
        else:
            of_input = cell["weight_ih"] @ embedded + cell["bias_ih"]
            state = np.tanh(of_input + cell["weight_hh"] @ state + cell["bias_hh"])
    read = state if use_state else np.zeros_like(state)
    if use_placeholders:
        read = read + hidden[len(prefix) + 1]
    logits = weights[f"logit_heads.{len(prefix)}.weight"] @ read
    logits = logits - np.logaddexp.reduce(logits)
    return {token: float(value) for token, value in zip(codebooks[len(prefix)], logits, strict=True)}


def _best(candidates: list[tuple[tuple[int, ...], float]], number: int) -> list[tuple[tuple[int, ...], float]]:
    return sorted(candidates, key=lambda candidate: (-candidate[1], candidate[0]))[:number]


Array = npt.NDArray[np.floating]
# By row, sequence and position: log-probabilities over the vocabulary, and the tokens that the catalogue allows there.
Distributions = Sequence[Sequence[Sequence[Array]]]
LegalTokens = Sequence[Sequence[Sequence[Sequence[int]]]]
Sequences = Sequence[Sequence[Sequence[int]]]


def reference_sft(draft: Sequence[Sequence[Array]], labels: Sequence[Sequence[int]]) -> float:
    """L_Rec of AtSpeed: -1/B sum_b 1/|y| sum_t log q(y_t | x, y_<t); log q by row and position of its label."""
    losses = []
    for log_q, label in zip(draft, labels, strict=True):
        losses.append(-sum(float(log_q[t][token]) for t, token in enumerate(label)) / len(label))
    return sum(losses) / len(losses)


def reference_seqkd(draft: Distributions, sequences: Sequences) -> float:
    """The mean of the same over the label and the target's sequences of all rows, in any order."""
    flat_draft = [log_q for row in draft for log_q in row]
    return reference_sft(flat_draft, [sequence for row in sequences for sequence in row])


def reference_align_s(
    draft: Distributions, target: Distributions, legal: LegalTokens, sequences: Sequences, *, num_tokens: int | None
) -> float:
    """Equation 4 of AtSpeed with the mean over the sequences of all rows.

    For each position: sum over V_c of q log(q / p), minus sum over V_c of q log(q / p(y_K)). V_c are the `num_tokens`
    legal tokens of largest q; y_K is the last sequence of the row that has a token at this position.
    """

    def term(b: int, k: int, t: int) -> float:
        log_q, log_p, row = draft[b][k][t], target[b][k][t], sequences[b]
        last = max(j for j, other in enumerate(row) if len(other) > t)
        log_p_of_last = float(target[b][last][t][row[last][t]])
        kept = _likeliest(log_q, legal[b][k][t], num_tokens)
        total = sum(float(np.exp(log_q[v]) * (log_q[v] - log_p[v])) for v in kept)
        return total - sum(float(np.exp(log_q[v]) * (log_q[v] - log_p_of_last)) for v in kept)

    return _mean(term, sequences)


def reference_align_r(
    draft: Distributions, target: Distributions, legal: LegalTokens, sequences: Sequences, *, num_tokens: int | None
) -> float:
    """Equation 8 of AtSpeed: the mean over sequences of 1/|y| sum_t 1/2 sum over V_c of |p' - q'|.

    V_c are the `num_tokens` legal tokens of largest q; p' and q' are renormalised there.
    """

    def term(b: int, k: int, t: int) -> float:
        kept = _likeliest(draft[b][k][t], legal[b][k][t], num_tokens)
        q, p = (np.exp([float(log_probs[b][k][t][v]) for v in kept]) for log_probs in (draft, target))
        return 0.5 * float(np.abs(p / p.sum() - q / q.sum()).sum())

    return _mean(term, sequences)


def reference_align_f(draft: Distributions, target: Distributions, legal: LegalTokens, sequences: Sequences) -> float:
    """The mean over sequences of 1/|y| sum_t sum over legal tokens of p log(p / q)."""

    def term(b: int, k: int, t: int) -> float:
        log_q, log_p = draft[b][k][t], target[b][k][t]
        return sum(float(np.exp(log_p[v]) * (log_p[v] - log_q[v])) for v in legal[b][k][t])

    return _mean(term, sequences)


def _mean(term: Callable[[int, int, int], float], sequences: Sequences) -> float:
    """The mean over the sequences of all rows of the mean over their positions."""
    means = [
        sum(term(b, k, t) for t in range(len(sequence))) / len(sequence)
        for b, row in enumerate(sequences)
        for k, sequence in enumerate(row)
    ]
    return sum(means) / len(means)


def _likeliest(log_probs: Array, tokens: Sequence[int], number: int | None) -> list[int]:
    return sorted(tokens, key=lambda token: (-log_probs[token], token))[:number]


def reference_relaxed_selection(
    p: Mapping[Hashable, float],
    q: Mapping[Hashable, float],
    drafted: Sequence[Hashable],
    num_kept: int,
    rng: np.random.Generator,
) -> list[Hashable]:
    """One step of AtSpeed's relaxed sampling verification, one sequence at a time (algorithm 2, lines 6 to 19).

    `p` and `q` are the target's and the draft's probabilities, `drafted` is in the order of drawing. Unlike the paper,
    of more that pass than are needed the first are kept, and what `norm(max(0, p - q))` cannot fill is drawn from p.
    """
    kept: list[Hashable] = []
    for sequence in drafted:
        if p.get(sequence, 0.0) > 0.0 and rng.uniform() <= p[sequence] / q[sequence]:
            kept.append(sequence)
    kept = kept[:num_kept]
    residual = {sequence: max(0.0, p[sequence] - q.get(sequence, 0.0)) for sequence in p}
    for weights in (residual, p):
        while len(kept) < num_kept:
            rest = [sequence for sequence in p if weights[sequence] > 0.0 and sequence not in kept]
            if not rest:
                break
            mass = np.array([weights[sequence] for sequence in rest])
            kept.append(rest[rng.choice(len(rest), p=mass / mass.sum())])
    return kept


def reference_uniform(
    seed: int, prefix: Sequence[int], token: int, *, path: int | None = None, stream: int = 0
) -> float:
    """The uniform noise, in (0, 1), of the candidate `prefix + [token]` of a prompt with this seed.

    Independent paths have numbers; stream 0 is of samples, others have other purposes.
    """

    def mixed(bits: int, width: int, steps: Sequence[tuple[int, int]]) -> int:
        for shift, factor in steps:
            bits = (bits ^ (bits >> shift)) * factor % 2**width
        return bits

    def output(state: int, number: int) -> int:
        """Of SplitMix64 with that state; outputs are counted from 0."""
        after = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        return mixed(after, 64, [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)])

    state = output(output(seed, stream) if stream else seed, 0)
    state = state if path is None else output(state, -2 - path)
    for before in prefix:
        state = output(state, before)
    bits = (state + token * (state >> 32 | 1)) % 2**32
    bits = mixed(bits, 32, [(16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)])
    return min((bits + 0.5) / 2**32, 1 - 2**-24)


def reference_gumbel(seed: int, prefix: Sequence[int], token: int, **kwargs: Any) -> float:
    """The Gumbel noise of a candidate: `-log(-log(1 - uniform))`."""
    return -math.log(-math.log1p(-reference_uniform(seed, prefix, token, **kwargs)))
