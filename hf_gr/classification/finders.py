# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of label sequences after a batch of prompts: one finder for each way. Knows no text.

`exact` scores all of them, `bounded` those that can matter, `beams` what a beam search finds; that one also finds
answers of several labels. All have the same methods. A `Scoring`, one for each framework, asks the model.

Axes: B batch, P prompt, S sequences, K beams, T tokens of a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import build_trie

from .label_trees import Sequences, labels_of, token_rows

Method = Literal["exact", "bounded", "beams"]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Found:
    """What was found for one text.

    Attributes:
        log_probs: `[S]` of label sequences.
        labels: what each stands for: labels that tokenize alike; for answers, one tuple of labels.
        num_scored: nodes that were scored.
        rows: the tokens of each, where they differ from text to text.
    """

    log_probs: Floats
    labels: Sequence[Sequence[Any]]
    num_scored: int
    rows: Longs | None = None


class Scoring(ABC):
    """A model that says how probable labels are after prompts, in one framework.

    Prompts are `[B, P]` tokens and their mask, in NumPy, and so is what is found.

    Attributes:
        config: the model's.
        dtype: of the weights.
        vocab_size: V, the tokens that the model can write.
        takes_trees: whether `probable` is there.
    """

    config: Any
    dtype: Any
    vocab_size: int
    takes_trees: bool

    @abstractmethod
    def evaluation(self) -> AbstractContextManager[Any]:
        """Within this context the model can be asked."""

    @abstractmethod
    def read_answers(self, snapshot: Snapshot, separator: Any, max_labels: Any, tokenizer: Any) -> Any:
        """The constraint of answers of several labels.

        Raises:
            ValueError: names the argument, its value, what is expected, and the fix.
        """

    @abstractmethod
    def every(self, sequences: Sequences, *, batch_size: int) -> Callable[[Longs, Longs], Floats]:
        """What gives, after the prompts of a batch, the log-probabilities `[B, S]` of all sequences."""

    @abstractmethod
    def probable(
        self, sequences: Sequences, *, tolerance: float, at_least: int
    ) -> Callable[[Longs, Longs], list[tuple[Longs, Floats, int]]]:
        """What gives, for each prompt, numbers and log-probabilities of those that matter, and the nodes scored."""

    @abstractmethod
    def search(
        self, snapshot: Snapshot, answers: Any, *, num_beams: int, max_new_tokens: int, batch_size: int
    ) -> Callable[[Longs, Longs], tuple[Longs, Floats]]:
        """What gives, after the prompts of a batch, the best sequences `[B, K, T]`, padded, and theirs `[B, K]`."""


class Finder(ABC):
    """Finds label sequences after a batch of prompts.

    Args:
        scoring: the model.
        snapshot: the labels.
    """

    method: Method = "beams"

    def __init__(self, scoring: Scoring, snapshot: Snapshot) -> None:
        self.scoring = scoring
        self.snapshot = snapshot

    @abstractmethod
    def find(self, input_ids: Longs, mask: Longs) -> list[Found]:
        """What the model may write after each prompt."""

    @abstractmethod
    def calibrate(self, input_ids: Longs, mask: Longs) -> None:
        """Take a prompt that says nothing; `prior` then knows what is probable after it."""

    @abstractmethod
    def prior(self, found: Found) -> Floats:
        """The log-probabilities of the same sequences after the prompt that says nothing."""


class ExactFinder(Finder):
    """All sequences.

    Args:
        scoring: the model.
        snapshot: the labels.
        sequences: all of them.
        batch_size: the most prompts of a batch.
    """

    method: Method = "exact"

    def __init__(self, scoring: Scoring, snapshot: Snapshot, sequences: Sequences, *, batch_size: int) -> None:
        super().__init__(scoring, snapshot)
        self.sequences = sequences
        self.labels = labels_of(snapshot, sequences)
        self.score = scoring.every(sequences, batch_size=batch_size)
        self._prior: Any = None

    def find(self, input_ids: Longs, mask: Longs) -> list[Found]:
        """See `Finder.find`."""
        scores = self.score(input_ids, mask)
        return [Found(row, self.labels, self.sequences.num_inner_nodes) for row in scores]

    def calibrate(self, input_ids: Longs, mask: Longs) -> None:
        """See `Finder.calibrate`."""
        self._prior = self.find(input_ids, mask)[0].log_probs

    def prior(self, found: Found) -> Floats:
        """See `Finder.prior`."""
        return self._prior


class BoundedFinder(Finder):
    """The sequences that can matter; see `bounded`.

    Args:
        scoring: the model, which takes trees.
        snapshot: the labels.
        sequences: all of them.
        tolerance: see `BoundedScorer`.
        at_least: see `BoundedScorer`.
    """

    method: Method = "bounded"

    def __init__(
        self, scoring: Scoring, snapshot: Snapshot, sequences: Sequences, *, tolerance: float, at_least: int
    ) -> None:
        super().__init__(scoring, snapshot)
        self.labels = labels_of(snapshot, sequences)
        self.score = scoring.probable(sequences, tolerance=tolerance, at_least=at_least)

    def find(self, input_ids: Longs, mask: Longs) -> list[Found]:
        """See `Finder.find`."""
        return [
            Found(log_probs, [self.labels[number] for number in numbers.tolist()], num_scored)
            for numbers, log_probs, num_scored in self.score(input_ids, mask)
        ]

    def calibrate(self, input_ids: Longs, mask: Longs) -> None:
        """See `Finder.calibrate`."""
        raise NotImplementedError("a calibrated label may be improbable: all of them are scored instead")

    def prior(self, found: Found) -> Floats:
        """See `Finder.prior`."""
        raise NotImplementedError("see calibrate")


class BeamFinder(Finder):
    """What a beam search finds.

    Args:
        scoring: the model.
        snapshot: the labels.
        num_beams: K.
        answers: the constraint of answers of several labels; None for one label.
        max_new_tokens: of an answer.
        batch_size: the most prompts of a batch.
    """

    def __init__(
        self,
        scoring: Scoring,
        snapshot: Snapshot,
        *,
        num_beams: int,
        answers: Any = None,
        max_new_tokens: int | None = None,
        batch_size: int,
    ) -> None:
        super().__init__(scoring, snapshot)
        self.num_beams = num_beams
        self.answers = answers
        self.search = scoring.search(
            snapshot,
            answers,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens or snapshot.max_length,
            batch_size=batch_size,
        )
        self.neutral: tuple[Longs, Longs] | None = None
        self.known: dict[bytes, float] = {}  # log-probabilities after the neutral prompt, by tokens

    def find(self, input_ids: Longs, mask: Longs) -> list[Found]:
        """See `Finder.find`."""
        found: list[Found] = []
        for rows, scores in zip(*self.search(input_ids, mask), strict=True):
            mine = rows[: int(np.isfinite(scores).sum())]
            labels, is_whole = self._labels(mine)
            num_nodes = self.num_beams * (rows.shape[1] - 1)
            found.append(Found(scores[: len(mine)][is_whole], labels, num_nodes, mine[is_whole]))
        return found

    def calibrate(self, input_ids: Longs, mask: Longs) -> None:
        """See `Finder.calibrate`."""
        self.neutral = input_ids, mask

    def prior(self, found: Found) -> Floats:
        """See `Finder.prior`; what other texts have found is scored once."""
        assert found.rows is not None
        assert self.neutral is not None
        rows = {row[row >= 0].tobytes(): row for row in found.rows}
        if new := [row for key, row in rows.items() if key not in self.known]:
            sequences = Sequences.of(build_trie(np.stack(new))[0])
            scores = self.scoring.every(sequences, batch_size=1)(*self.neutral)
            for row, score in zip(token_rows(sequences), scores[0].tolist(), strict=True):
                self.known[row[row >= 0].tobytes()] = score
        return np.array([self.known[key] for key in rows])

    def _labels(self, rows: Longs) -> tuple[list[Sequence[Any]], list[int]]:
        """What each row stands for, and the rows that stand for something: a limit may cut an answer off."""
        if self.answers is None:
            return list(self.snapshot.items_of(rows)), list(range(len(rows)))
        found: list[Sequence[Any]] = []
        is_whole: list[int] = []
        for number, row in enumerate(rows.tolist()):
            if self.snapshot.eos_token_id in row:
                parts = [self.snapshot.items_of(np.array([label]))[0] for label in self.answers.split(row)]
                found.append([tuple(label for alike in parts for label in alike)])
                is_whole.append(number)
        return found, is_whole
