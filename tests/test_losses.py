# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Each training loss against its literal twin, on random ragged catalogues."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gr import ConstraintIndex
from hf_gr.training import losses
from hf_gr.training.atspeed_trainer import compare_levels
from hf_gr.training.losses import LevelLogProbs
from hf_gr.training.packing import PathScores
from hf_gr.training.paths import training_catalogue, walk

CPU = torch.device("cpu")
VOCABULARY = 9
EOS = 0
LOSS_TOL = 1e-9  # double precision throughout, some hundred additions


@dataclass(frozen=True)
class Case:
    """One random batch, as the twins read it and as the losses do."""

    draft: Any
    target: Any
    legal: Any
    sequences: Any
    labels: Any
    label_draft: Any
    levels: list[LevelLogProbs]
    threshold: torch.Tensor
    mask: torch.Tensor
    paths: torch.Tensor
    scores: PathScores
    logits: torch.Tensor


def make_case(seed: int, *, num_beams: int = 4, batch_size: int = 3) -> Case:
    """A ragged catalogue, some of its sequences for each row, a label, and two random models."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(1, VOCABULARY, rng.integers(1, 4)).tolist() for _ in range(12)]
    index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS)
    known = list(index)
    length = index.max_length
    paths = torch.full((batch_size, num_beams + 1, length), -1)
    sequences, labels = [], []
    for row in range(batch_size):
        number = int(rng.integers(1, num_beams + 1))  # where there are fewer than K
        chosen = [known[at] for at in rng.permutation(len(known))[:number]]
        label = known[rng.integers(len(known))]
        for place, sequence in [*enumerate(chosen), (num_beams, label)]:
            paths[row, place, : len(sequence)] = torch.tensor(sequence)
        sequences.append(chosen)
        labels.append(label)

    def model() -> tuple[Callable[[int, tuple[int, ...]], np.ndarray], torch.Tensor, torch.Tensor]:
        """Log-probabilities by row and prefix, and the logits of all paths that give them."""
        made: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

        def logits_of(row: int, prefix: tuple[int, ...]) -> np.ndarray:
            return made.setdefault((row, prefix), rng.normal(size=VOCABULARY) * 2)

        first = np.stack([logits_of(row, ()) for row in range(batch_size)])[:, None]
        rest = np.stack(
            [
                [
                    [logits_of(row, tuple(paths[row, k, : t + 1].tolist())) for t in range(length - 1)]
                    for k in range(num_beams + 1)
                ]
                for row in range(batch_size)
            ]
        )

        def log_probs(row: int, prefix: tuple[int, ...]) -> np.ndarray:
            values = logits_of(row, prefix)
            return values - np.logaddexp.reduce(values)

        return log_probs, torch.from_numpy(first), torch.from_numpy(rest)

    q, first, rest = model()
    p, target_first, target_rest = model()
    logits = torch.cat([first.flatten(), rest.flatten()]).requires_grad_()
    flat_first, flat_rest = logits.split([first.numel(), rest.numel()])
    scores = PathScores(flat_first.view(first.shape).log_softmax(-1), flat_rest.view(rest.shape).log_softmax(-1))
    target = PathScores(target_first.log_softmax(-1), target_rest.log_softmax(-1))

    walked = walk(paths[:, :-1], training_catalogue(index, CPU))
    dense = [level.gather(target.levels()[at][:, : level.below.legal.shape[1]]) for at, level in enumerate(walked)]
    dense = [level.restore(values[level.stored]) for level, values in zip(walked, dense, strict=True)]
    mask = paths[:, :-1] >= 0
    levels = compare_levels(walked, scores, dense)
    chosen = [level.of_chosen(values) for level, values in zip(walked, dense, strict=True)]
    threshold = losses.kth_log_probs(torch.stack(chosen, dim=-1), mask)

    def along(of: Callable[..., Any]) -> list[list[list[Any]]]:
        return [
            [[of(row, tuple(sequence[:t])) for t in range(len(sequence))] for sequence in chosen]
            for row, chosen in enumerate(sequences)
        ]

    return Case(
        draft=along(q),
        target=along(p),
        legal=along(
            lambda row, prefix: index.allowed_next_tokens(list(prefix)) if prefix else sorted({s[0] for s in known})
        ),
        sequences=sequences,
        labels=labels,
        label_draft=[[q(row, tuple(label[:t])) for t in range(len(label))] for row, label in enumerate(labels)],
        levels=levels,
        threshold=threshold,
        mask=mask,
        paths=paths,
        scores=scores,
        logits=logits,
    )


def ours(name: str, case: Case, **options: Any) -> torch.Tensor:
    label_mask = case.paths[:, -1] >= 0
    log_probs = case.scores.of_tokens(case.paths)
    if name == "sft":
        return losses.sft(log_probs[:, -1], label_mask)
    if name == "seqkd":
        return losses.seqkd(log_probs, case.paths >= 0)
    if name == "align_s":
        return losses.align_s(case.levels, case.threshold, case.mask, **options)
    return getattr(losses, name)(case.levels, case.mask, **options)


def twin(name: str, case: Case, **options: Any) -> float:
    if name == "sft":
        return reference.reference_sft(case.label_draft, case.labels)
    if name == "seqkd":
        pairs = zip(case.sequences, case.labels, strict=True)
        drafts = zip(case.draft, case.label_draft, strict=True)
        return reference.reference_seqkd([[*d, label] for d, label in drafts], [[*s, label] for s, label in pairs])
    of = getattr(reference, f"reference_{name}")
    return of(case.draft, case.target, case.legal, case.sequences, **options)


ALL = [
    ("sft", {}),
    ("seqkd", {}),
    ("align_s", {"num_tokens": 2}),
    ("align_s", {"num_tokens": None}),
    ("align_r", {"num_tokens": 2}),
    ("align_r", {"num_tokens": None}),
    ("align_f", {}),
]


def differences(seed: int) -> dict[str, float]:
    case = make_case(seed)
    return {
        f"{name} {options}": abs(float(ours(name, case, **options).detach()) - twin(name, case, **options))
        for name, options in ALL
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_losses_equal_their_twins(seed: int) -> None:
    assert max(differences(seed).values()) < LOSS_TOL


@pytest.mark.parametrize(("name", "options"), ALL)
def test_gradients_are_finite_and_skip_what_is_not_there(name: str, options: dict[str, Any]) -> None:
    case = make_case(5)
    ours(name, case, **options).backward()
    assert case.logits.grad is not None
    assert case.logits.grad.isfinite().all()
    first = case.scores.first.numel()
    # The logits after a token that is not there, or that ends its sequence, are nobody's.
    rest = case.logits.grad[first:].view(case.scores.rest.shape)
    assert rest.any()
    assert not rest[case.paths[..., 1:] < 0].any()


@pytest.mark.parametrize(("name", "options"), ALL)
def test_gradients_equal_finite_differences(name: str, options: dict[str, Any]) -> None:
    case = make_case(7)
    (gradient,) = torch.autograd.grad(ours(name, case, **options), case.logits)
    direction = torch.from_numpy(np.random.default_rng(0).normal(size=len(gradient)))
    # A step in one direction, by way of the levels that hang on the logits.
    step = 1e-6

    def shifted(sign: int) -> float:
        return float(ours(name, at_logits(case, case.logits.detach() + sign * step * direction), **options))

    numeric = (shifted(1) - shifted(-1)) / (2 * step)
    assert abs(numeric - float(gradient @ direction)) < 1e-6  # error of the step, squared


def at_logits(case: Case, logits: torch.Tensor) -> Case:
    first, rest = case.scores.first, case.scores.rest
    flat_first, flat_rest = logits.split([first.numel(), rest.numel()])
    scores = PathScores(flat_first.view(first.shape).log_softmax(-1), flat_rest.view(rest.shape).log_softmax(-1))
    # Children are in token order: where they stand in the old log-probabilities is where they stand in the new.
    levels = []
    for at, level in enumerate(case.levels):
        old = case.scores.levels()[at][:, : level.draft.shape[1]]
        places = (old[..., None, :] == level.draft[..., None]).int().argmax(-1)
        levels.append(replace(level, draft=scores.levels()[at][:, : level.draft.shape[1]].gather(-1, places)))
    return replace(case, scores=scores, levels=levels)


def test_nothing_there_is_nothing_lost() -> None:
    case = make_case(1)
    mask = torch.zeros_like(case.mask)
    levels = [replace(level, legal=torch.zeros_like(level.legal)) for level in case.levels]
    values = [
        losses.align_s(levels, case.threshold, mask, num_tokens=2),
        losses.align_r(levels, mask, num_tokens=2),
        losses.seqkd(case.scores.of_tokens(case.paths), case.paths < -1),
    ]
    assert [value.item() for value in values] == [0.0] * 3
    sum(values).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert not case.logits.grad.any()  # pyright: ignore[reportOptionalMemberAccess]


def test_impossible_tokens_give_no_nan() -> None:
    """A model that forbids tokens by logits of -inf, as some do for their special tokens."""
    logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    draft = logits.log_softmax(-1)
    target = torch.tensor([[[-0.5, -torch.inf, -1.0]]])
    mask = torch.ones((1, 1), dtype=torch.bool)
    pair = LevelLogProbs(draft, target, torch.ones_like(draft, dtype=torch.bool))
    total = losses.align_f([pair], mask[None])
    for num_tokens in (2, 3, None):
        total = total + losses.align_s([pair], mask * -1.0, mask[None], num_tokens=num_tokens)
        total = total + losses.align_r([pair], mask[None], num_tokens=num_tokens)
    total.backward()
    assert total.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def flip_the_density(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(losses.align_s)
    assert "divergence - density" in source
    planted = dict(vars(losses))
    exec(source.replace("divergence - density", "divergence + density"), planted)
    monkeypatch.setattr(losses, "align_s", planted["align_s"])


def take_the_best_for_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (log_probs * mask)[:, 0]

    monkeypatch.setattr(losses, "kth_log_probs", wrong)


def forget_the_legal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = losses._best_of_draft

    def wrong(pair: LevelLogProbs, *args: Any, **kwargs: Any) -> Any:
        return right(replace(pair, legal=torch.ones_like(pair.legal)), *args, **kwargs)

    monkeypatch.setattr(losses, "_best_of_draft", wrong)


def take_the_other_models_top(monkeypatch: pytest.MonkeyPatch) -> None:
    right = losses._best_of_draft

    def wrong(pair: LevelLogProbs, num_tokens: int | None) -> Any:
        target, draft, is_token = right(replace(pair, draft=pair.target, target=pair.draft), num_tokens)
        return draft, target, is_token

    monkeypatch.setattr(losses, "_best_of_draft", wrong)


def forget_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum() / mask.sum()

    monkeypatch.setattr(losses, "_mean", wrong)


def swap_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    right = losses._best_of_draft

    def wrong(pair: LevelLogProbs, *args: Any, **kwargs: Any) -> Any:
        return right(replace(pair, draft=pair.target, target=pair.draft), *args, **kwargs)

    monkeypatch.setattr(losses, "_best_of_draft", wrong)


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (flip_the_density, "align_s"),
        (take_the_best_for_the_threshold, "align_s"),
        (forget_the_legal_tokens, "align_s"),
        (forget_the_legal_tokens, "align_r"),
        (take_the_other_models_top, "align_r"),
        (forget_the_lengths, "seqkd"),
        (forget_the_lengths, "align_r"),
        (swap_the_models, "align_f"),
        (forget_the_legal_tokens, "align_f"),
    ],
)
def test_a_planted_error_is_seen(plant: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    largest = max(value for seed in range(5) for key, value in differences(seed).items() if key.startswith(name))
    assert largest > 1e3 * LOSS_TOL
