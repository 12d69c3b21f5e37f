# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call of `generate` must answer, from a model's plain forwards over every legal sequence. Knows no trie.

Nothing of the library is used; the written-down beam search is that of `tests/reference.py`: no cache, no batch of
beams, one request at a time. A decoder's prompt is read without its padding; an encoder's positions may count it, as
in BART.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from draws import Batch
from numpy.typing import NDArray
from reference import ReferenceTrie, reference_beam_search
from torch import Tensor

# Of log-probabilities in fp32, relative: two orders of addition over some hundred terms of these sizes.
TOLERANCE = 1e-4
# (the last token, scores of the vocabulary) -> scores
Processor = Callable[[int, NDArray[np.float64]], NDArray[np.float64]]


class Request:
    """One prompt, padded on the left, and its legal sequences, end tokens included.

    `start` are the tokens that a decoder starts with, none for a model without an encoder; `processor` changes
    log-probabilities (logits for paths that do not compete) before the constraint.
    """

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        mask: Sequence[int],
        *,
        start: Sequence[int],
        sequences: Sequence[tuple[int, ...]],
        processor: Processor | None,
    ) -> None:
        self.sequences = sorted(set(sequences))
        self.legal = frozenset(self.sequences)
        self.trie = ReferenceTrie(self.sequences)
        self.processor = processor
        self.last = [*prompt, *start][-1]
        self.logits: dict[tuple[int, ...], NDArray[np.float64]] = {}
        if self.sequences:
            self._read(model, list(prompt), list(mask), list(start))

    @torch.no_grad()
    def _read(self, model: Any, prompt: list[int], mask: list[int], start: list[int]) -> None:
        """Logits after every prefix, by plain forwards over the sequences of each length."""
        for length in sorted({len(sequence) for sequence in self.sequences}):
            beginnings = sorted({sequence[:-1] for sequence in self.sequences if len(sequence) == length})
            new = [prefix for prefix in beginnings if prefix not in self.logits]
            for some in (new[first : first + 128] for first in range(0, len(new), 128)):
                paths = torch.tensor(some, dtype=torch.long).view(len(some), length - 1)
                rows = _forward(model, prompt, mask, start, paths)[:, -length:].double().numpy()
                for prefix, row in zip(some, rows, strict=True):
                    for known in range(length):
                        self.logits[prefix[:known]] = row[known]

    def scores(self, prefix: tuple[int, ...], *, competes: bool) -> NDArray[np.float64]:
        """Processed scores of the vocabulary after a prefix: of log-probabilities where paths compete."""
        scores = self.logits[prefix]
        if competes:
            scores = scores - np.logaddexp.reduce(scores)
        return scores if self.processor is None else self.processor([self.last, *prefix][-1], scores)

    def steps(self, sequence: tuple[int, ...], *, renormalize: bool) -> list[float]:
        """The score of every token of a legal sequence."""
        found = []
        for place, token in enumerate(sequence):
            prefix = sequence[:place]
            scores = self.scores(prefix, competes=True)
            norm = np.logaddexp.reduce(scores[self.trie.allowed(prefix)]) if renormalize else 0.0
            found.append(float(scores[token] - norm) if np.isfinite(scores[token]) else -np.inf)
        return found

    def beams(
        self, num_beams: Any, *, renormalize: bool, length_penalty: float, noise: int | None = None
    ) -> list[tuple[tuple[int, ...], float]]:
        """The slow beam search; with `noise`, every score is moved by as much as rounding may move it."""

        def score(prefix: tuple[int, ...]) -> NDArray[np.float64]:
            scores = self.scores(prefix, competes=True)
            if noise is None:
                return scores
            rng = np.random.default_rng([noise, *prefix])
            return scores * (1 + TOLERANCE * rng.uniform(-0.5, 0.5, scores.shape))

        if not self.sequences:
            return []
        found = reference_beam_search(
            score, self.sequences, num_beams, renormalize_logits=renormalize, length_penalty=length_penalty
        )
        return [(sequence, value) for sequence, value in found if np.isfinite(value)]

    def is_greedy(self, sequence: tuple[int, ...]) -> bool:
        """Whether every token is the best legal one, up to rounding."""
        for place, token in enumerate(sequence):
            scores = self.scores(sequence[:place], competes=False)
            best = max(scores[self.trie.allowed(sequence[:place])])
            if not np.isfinite(scores[token]) or scores[token] < best - TOLERANCE * (1 + abs(best)):
                return False
        return True


def _forward(model: Any, prompt: list[int], mask: list[int], start: list[int], paths: Tensor) -> Tensor:
    """Logits `[R, T, V]` of a plain forward without a cache."""
    if model.config.is_encoder_decoder:
        given = {"input_ids": torch.tensor(prompt), "attention_mask": torch.tensor(mask)}
        rows = {name: value.expand(len(paths), -1) for name, value in given.items()}
        decoded = torch.cat([torch.tensor(start, dtype=torch.long).expand(len(paths), -1), paths], dim=1)
        return model(**rows, decoder_input_ids=decoded, use_cache=False).logits
    real = torch.tensor(prompt, dtype=torch.long)[len(mask) - sum(mask) :]
    tokens = torch.cat([real.expand(len(paths), -1), paths], dim=1)
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:  # RoBERTa's own would not begin with 0
        given["position_ids"] = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return model(**given).logits


def requests_of(model: Any, batch: Batch, processor: Processor | None = None) -> list[Request]:
    """The requests of a batch, read once for all calls that are judged by them."""
    is_encoder_decoder, found = model.config.is_encoder_decoder, list[Request]()
    of_row = [batch.inputs["input_ids"].tolist(), batch.inputs["attention_mask"].tolist(), batch.start.tolist()]
    for prompt, mask, more, legal in zip(*of_row, batch.legal, strict=True):
        start = [model.config.decoder_start_token_id, *more] if is_encoder_decoder else []
        found.append(Request(model, prompt, mask, start=start, sequences=legal, processor=processor))
    return found


def check_rows(
    batch: Batch,
    requests: Sequence[Request],
    rows: list[list[int]],
    scores: list[float] | None,
    *,
    is_exact: bool,
    num_beams: Any,
    renormalize: bool = False,
    length_penalty: float = 1.0,
    proven: list[int] | None = None,
    is_ordered: bool = True,
) -> None:
    """Judge the generated rows of a batch, as many for every prompt: legal, of the right scores, and the right ones.

    `scores` are `sequences_scores`, or None if paths do not compete. Where the answer `is_exact`, it must be that of
    the slow search; of every prompt the first ones that are `proven` must be the best of all its sequences. The other
    arguments are as in the call.
    """
    each, left = divmod(len(rows), len(requests))
    assert not left
    for number, request in enumerate(requests):
        here = slice(number * each, (number + 1) * each)
        found = [_read(row, of_row, request, batch.wanted[number]) for row, of_row in batch.items(number, rows[here])]
        if scores is None:
            _judge_paths(request, found, is_exact=is_exact)
        else:
            how = {"renormalize": renormalize, "length_penalty": length_penalty}
            more = {"num_beams": num_beams, "is_exact": is_exact, "is_ordered": is_ordered}
            _judge_beams(request, found, scores[here], **more, **how)
            if proven is not None:
                _judge_proof(request, found, scores[here], proven[number], **how)


def _read(row: list[int], items: list[Any], request: Request, wanted: set[Any]) -> tuple[int, ...] | None:
    """The sequence that a row begins with; None for a row of padding."""
    beginnings = (tuple(row[:length]) for length in range(1, len(row) + 1))
    sequence = next((beginning for beginning in beginnings if beginning in request.legal), None)
    assert (sequence is None) == (not items), f"row {row} has items {items}"
    assert set(items) <= wanted
    if sequence is not None:
        assert len(set(row[len(sequence) :])) <= 1, f"row {row} goes on after its end"
    return sequence


def _judge_paths(request: Request, found: list[tuple[int, ...] | None], *, is_exact: bool) -> None:
    """Paths that do not compete stand in no order."""
    there = [sequence for sequence in found if sequence is not None]
    for one in there:  # a sampled token is one that no processor forbids
        assert request.is_greedy(one) if is_exact else np.isfinite(request.steps(one, renormalize=False)).all(), found
    if request.processor is None:  # nothing ends a path early
        assert len(there) == (len(found) if request.sequences else 0)


def _judge_beams(
    request: Request,
    found: list[tuple[int, ...] | None],
    scores: list[float],
    *,
    num_beams: Any,
    is_exact: bool,
    is_ordered: bool,
    renormalize: bool,
    length_penalty: float,
) -> None:
    there = [sequence for sequence in found if sequence is not None]
    assert found[: len(there)] == there, "missing rows come last"
    assert len(set(there)) == len(there), "a sequence twice"
    assert not np.isnan(scores).any(), scores
    assert all(score == -np.inf for score in scores[len(there) :]), scores
    assert not is_ordered or all(left >= right for left, right in pairwise(scores)), scores
    how = {"renormalize": renormalize, "length_penalty": length_penalty}
    for sequence, score in zip(there, scores, strict=False):
        expected = sum(request.steps(sequence, renormalize=renormalize)) / len(sequence) ** length_penalty
        assert is_close(score, expected, scale=len(sequence) ** -length_penalty), (sequence, score, expected)
    if not is_exact:
        return
    best = request.beams(num_beams, **how)[: len(found)]
    same = len(there) == len(best) and all(
        is_close(score, value, scale=len(sequence) ** -length_penalty)
        for score, (sequence, value) in zip(scores, best, strict=False)
    )
    # Where two candidates are as good as equal, rounding decides which one goes on.
    others = (request.beams(num_beams, noise=noise, **how)[: len(found)] for noise in range(20))
    assert same or any([one for one, _ in other] == there for other in others), (
        f"found {list(zip(there, scores, strict=False))}, expected {best}"
    )


def _judge_proof(
    request: Request,
    found: list[tuple[int, ...] | None],
    scores: list[float],
    num_proven: int,
    *,
    renormalize: bool,
    length_penalty: float,
) -> None:
    """The proven ones are the best of all, up to rounding; others may have the places of equal ones."""
    ranked = {
        sequence: sum(request.steps(sequence, renormalize=renormalize)) / len(sequence) ** length_penalty
        for sequence in request.sequences
    }
    best = sorted((value for value in ranked.values() if np.isfinite(value)), reverse=True)
    assert num_proven <= sum(sequence is not None for sequence in found)
    for place, (score, value) in enumerate(zip(scores[:num_proven], best, strict=False)):
        sequence: Any = found[place]
        assert is_close(score, value, scale=len(sequence) ** -length_penalty), (place, score, value)


def is_close(found: float, expected: float, *, scale: float) -> bool:
    """Whether two scores differ by rounding; `scale` divides sums of log-probabilities into scores."""
    return abs(found - expected) <= TOLERANCE * (abs(expected) + scale)
