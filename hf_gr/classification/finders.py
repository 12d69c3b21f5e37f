# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of label sequences after a batch of prompts: one finder for each way. Knows no text.

`exact` scores all of them, `bounded` those that can matter, `beams` what a beam search finds; that one also finds
answers of several labels. All have the same methods.

Axes: B batch, P prompt, S sequences, K beams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.snapshot import Snapshot, combine_rules
from hf_gr.catalogue.trie import PADDING, build_trie
from hf_gr.generation.models import start_token
from hf_gr.generation.torch.constraints import SeveralLabels
from hf_gr.generation.torch.layouts import choose_layout, prefilled
from hf_gr.generation.torch.models import output_size_of, output_weight_of
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.transition import device_catalogue

from .bounded import BoundedScorer
from .exhaustive import ExhaustiveScorer, Sequences

Method = Literal["exact", "bounded", "beams"]


@dataclass(frozen=True)
class Found:
    """What was found for one text.

    Attributes:
        log_probs: of label sequences.
        labels: what each stands for: labels that tokenize alike; for answers, one tuple of labels.
        num_scored: nodes that were scored.
        rows: the tokens of each, where they differ from text to text.
    """

    log_probs: Float[Tensor, " sequences"]
    labels: Sequence[Sequence[Any]]
    num_scored: int
    rows: Longs | None = None


class Finder(ABC):
    """Scores label sequences after a batch of prompts.

    Args:
        model: the model.
        snapshot: the labels.
    """

    method: Method = "beams"

    def __init__(self, model: Any, snapshot: Snapshot) -> None:
        self.model = model
        self.snapshot = snapshot

    @abstractmethod
    def find(self, input_ids: Int[Tensor, "batch prompt"], mask: Int[Tensor, "batch prompt"]) -> list[Found]:
        """What the model may write after each prompt."""

    @abstractmethod
    def calibrate(self, input_ids: Int[Tensor, "1 prompt"], mask: Int[Tensor, "1 prompt"]) -> None:
        """Take a prompt that says nothing; `prior` then knows what is probable after it."""

    @abstractmethod
    def prior(self, found: Found) -> Float[Tensor, " sequences"]:
        """The log-probabilities of the same sequences after the prompt that says nothing."""

    def _scorers(self, input_ids: Tensor, mask: Tensor, *, width: int) -> Callable[[], Any]:
        """Scorers over a batch of prompts, which share one prefill."""
        model = self.model
        if not model.config.is_encoder_decoder:
            return prefilled(model, input_ids, None, mask, width=width)
        start = start_token(model.generation_config, model.config)
        if start is None:
            raise ValueError("model has no decoder_start_token_id, expected one: set it in model.generation_config")
        return prefilled(model, torch.full_like(input_ids[:, :1], start), input_ids, mask, width=width)

    def _all_of(self, sequences: Sequences, *, batch_size: int) -> ExhaustiveScorer:
        weight = output_weight_of(self.model)
        return ExhaustiveScorer(
            sequences,
            batch_size=batch_size,
            vocab_size=output_size_of(self.model),
            as_tree=takes_trees(self.model),
            device=self.model.device if weight is None else weight.device,
        )


class ExactFinder(Finder):
    """All sequences.

    Args:
        model: the model.
        snapshot: the labels.
        sequences: all of them.
        batch_size: the most prompts of a batch.
    """

    method: Method = "exact"

    def __init__(self, model: Any, snapshot: Snapshot, sequences: Sequences, *, batch_size: int) -> None:
        super().__init__(model, snapshot)
        self.sequences = sequences
        self.labels = labels_of(snapshot, sequences)
        self.exhaustive = self._all_of(sequences, batch_size=batch_size)
        self._prior: Any = None

    def find(self, input_ids: Int[Tensor, "batch prompt"], mask: Int[Tensor, "batch prompt"]) -> list[Found]:
        """See `Finder.find`."""
        scores = self.exhaustive.score(self._scorers(input_ids, mask, width=2))
        return [Found(row, self.labels, self.sequences.num_inner_nodes) for row in scores.cpu()]

    def calibrate(self, input_ids: Int[Tensor, "1 prompt"], mask: Int[Tensor, "1 prompt"]) -> None:
        """See `Finder.calibrate`."""
        self._prior = self.find(input_ids, mask)[0].log_probs

    def prior(self, found: Found) -> Float[Tensor, " sequences"]:
        """See `Finder.prior`."""
        return self._prior


class BoundedFinder(Finder):
    """The sequences that can matter; see `bounded`.

    Args:
        model: the model, a decoder in the tree layout.
        snapshot: the labels.
        sequences: all of them.
        tolerance: see `BoundedScorer`.
        at_least: see `BoundedScorer`.
    """

    method: Method = "bounded"

    def __init__(
        self, model: Any, snapshot: Snapshot, sequences: Sequences, *, tolerance: float, at_least: int
    ) -> None:
        super().__init__(model, snapshot)
        self.labels = labels_of(snapshot, sequences)
        vocab_size = output_size_of(model)
        self.scorer = BoundedScorer(sequences, vocab_size=vocab_size, tolerance=tolerance, at_least=at_least)

    def find(self, input_ids: Int[Tensor, "batch prompt"], mask: Int[Tensor, "batch prompt"]) -> list[Found]:
        """See `Finder.find`."""
        rows = self.scorer.score(self._scorers(input_ids, mask, width=1024))
        return [Found(row.log_probs, [self.labels[n] for n in row.numbers.tolist()], row.num_scored) for row in rows]

    def calibrate(self, input_ids: Int[Tensor, "1 prompt"], mask: Int[Tensor, "1 prompt"]) -> None:
        """See `Finder.calibrate`."""
        raise NotImplementedError("a calibrated label may be improbable: all of them are scored instead")

    def prior(self, found: Found) -> Float[Tensor, " sequences"]:
        """See `Finder.prior`."""
        raise NotImplementedError("see calibrate")


class BeamFinder(Finder):
    """What a beam search finds.

    Args:
        model: the model.
        snapshot: the labels.
        num_beams: K.
        answers: the constraint of answers of several labels; None for one label.
        max_new_tokens: of an answer.
    """

    def __init__(
        self,
        model: Any,
        snapshot: Snapshot,
        *,
        num_beams: int,
        answers: SeveralLabels | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        super().__init__(model, snapshot)
        self.num_beams = num_beams
        self.rules = combine_rules([snapshot])
        self.answers = answers
        self.max_new_tokens = max_new_tokens or snapshot.max_length
        self.neutral: tuple[Tensor, Tensor] | None = None
        self.known: dict[bytes, float] = {}  # log-probabilities after the neutral prompt, by tokens

    def find(self, input_ids: Int[Tensor, "batch prompt"], mask: Int[Tensor, "batch prompt"]) -> list[Found]:
        """See `Finder.find`."""
        num_beams, device = self.num_beams, input_ids.device
        if self.answers is None:
            catalogue: Any = device_catalogue(self.rules, device)
        else:
            catalogue = self.answers.catalogue(len(input_ids), device, max_length=self.max_new_tokens)
        plan = DecodePlan(  # by the probability of whole labels, however long: no length penalty, no early end
            prompt=input_ids,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            num_kept=2 * num_beams,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            max_new_tokens=self.max_new_tokens,
            fill_token_id=PADDING,
            missing_token_id=PADDING,
        )
        scorer = self._scorers(input_ids, mask, width=num_beams)()
        decoded = decode(scorer, catalogue, plan).cropped()
        sequences = decoded.sequences.cpu().numpy()
        found: list[Found] = []
        for row, scores in enumerate(decoded.scores.view(-1, num_beams).cpu()):
            mine = sequences[row * num_beams : row * num_beams + int(scores.isfinite().sum())]
            labels, is_whole = self._labels(mine)
            num_nodes = num_beams * (sequences.shape[1] - 1)
            found.append(Found(scores[: len(mine)][is_whole], labels, num_nodes, mine[is_whole]))
        return found

    def calibrate(self, input_ids: Int[Tensor, "1 prompt"], mask: Int[Tensor, "1 prompt"]) -> None:
        """See `Finder.calibrate`."""
        self.neutral = input_ids, mask

    def prior(self, found: Found) -> Float[Tensor, " sequences"]:
        """See `Finder.prior`; what other texts have found is scored once."""
        assert found.rows is not None
        assert self.neutral is not None
        rows = {row[row >= 0].tobytes(): row for row in found.rows}
        if new := [row for key, row in rows.items() if key not in self.known]:
            sequences = Sequences.of(build_trie(np.stack(new))[0])
            scores = self._all_of(sequences, batch_size=1).score(self._scorers(*self.neutral, width=2))
            for row, score in zip(token_rows(sequences), scores[0].tolist(), strict=True):
                self.known[row[row >= 0].tobytes()] = score
        return torch.tensor([self.known[key] for key in rows])

    def _labels(self, rows: Longs) -> tuple[list[Sequence[Any]], list[int]]:
        """What each row stands for, and the rows that stand for something: a limit may cut an answer off."""
        if self.answers is None:
            return list(self.snapshot.items(rows)), list(range(len(rows)))
        found: list[Sequence[Any]] = []
        is_whole: list[int] = []
        for number, row in enumerate(rows.tolist()):
            if self.snapshot.eos_token_id in row:
                parts = [self.snapshot.items(np.array([label]))[0] for label in self.answers.split(row)]
                found.append([tuple(label for alike in parts for label in alike)])
                is_whole.append(number)
        return found, is_whole


def takes_trees(model: Any) -> bool:
    """Whether a model scores nodes as a tree over one prompt."""
    return choose_layout(model) == "tree" and not model.config.is_encoder_decoder


def all_sequences(snapshot: Snapshot) -> Sequences:
    """All sequences of a label set."""
    return Sequences.of(snapshot.base.segment.trie if snapshot.is_compact else build_trie(snapshot.rows())[0])


def token_rows(sequences: Sequences) -> Longs:
    """The tokens of all sequences."""
    return sequences.trie.sequences(sequences.leaves()).astype(np.int64)


def labels_of(snapshot: Snapshot, sequences: Sequences) -> Any:
    """The labels of all sequences."""
    return snapshot.items(token_rows(sequences))
