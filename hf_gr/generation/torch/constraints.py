# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which scores a logits processor keeps: one sequence of the catalogue, or several labels. Knows no prompts.

Axes: P prompts; R rows, as many for each prompt; T generated tokens; S scored positions of each row, the last one
after all tokens; V tokens of the vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_gr.catalogue.generated import items_of, items_of_batch, prompts_of, read_generated
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.separators import Answers, check_separator, split
from hf_gr.catalogue.sequences import read_rows
from hf_gr.torch.transition import DeviceCatalogue, advance, children, device_catalogue

MOST_NODES = 2**22  # of tries that are walked by their edges, eight bytes each: 32 MB
# The score of filler tokens, where the dtype has room for it: far below any sum of log-probabilities, and below the
# -1e9 by which transformers' beam search marks finished beams.
FILLING = -1e30
# A lower score of one step can only be a filler's, whatever the temperature.
NEARLY_IMPOSSIBLE = -1e20


class Constraint(ABC):
    """Which tokens may follow."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules

    @property
    def max_token_id(self) -> int:
        """The largest token that may follow."""
        return self.rules.shared.max_token_id

    @abstractmethod
    def mask(self, generated: Tensor, scores: Tensor, num_prompts: int) -> Tensor:
        """Mask `[R, S, V]` scores by the `[R, T]` tokens before them."""

    @abstractmethod
    def items(self, sequences: Any) -> list[list[ItemId]]:
        """The items of generated answers, `[rows, T]`; see `ConstraintLogitsProcessor.items`."""

    def _unblocked(self, scores: Tensor, is_legal: Tensor) -> Tensor:
        """The scores; where other processors left no legal token, all are possible: the constraint holds."""
        is_left = (is_legal & (scores != -torch.inf)).any(dim=-1, keepdim=True)
        return scores.masked_fill(is_legal & ~is_left, self._filling(scores.dtype))

    def _over(self, scores: Tensor) -> Tensor:
        """The scores of finished rows."""
        over = torch.full_like(scores, -torch.inf)
        over[..., self._end] = self._filling(scores.dtype)
        return over

    @property
    def _end(self) -> int:
        """The token that finished rows continue with."""
        return self.rules.shared.eos_token_id or 0

    @staticmethod
    def _filling(dtype: torch.dtype) -> float:
        """Its score."""
        # Still finite when divided by a temperature of 1/16; even fp16's -4094 is below its logits.
        return max(FILLING, torch.finfo(dtype).min / 16)


class OneSequence(Constraint):
    """An answer is one sequence of the catalogue.

    Where `num_beams` rows of a prompt compete, one is alive at first, and no dead or complete one ends again:
    transformers' beam search would count it as another sequence found.
    """

    def __init__(self, rules: BatchRules, *, num_beams: int = 1) -> None:
        super().__init__(rules)
        self.num_beams = num_beams

    @property
    def _end(self) -> int:
        """See `Constraint._end`."""
        return int(super()._end == 0) if self.num_beams > 1 else super()._end

    def mask(self, generated: Tensor, scores: Tensor, num_prompts: int) -> Tensor:
        """See `Constraint.mask`."""
        catalogue = device_catalogue(self.rules, scores.device)
        num_rows, num_scores = scores.shape[:2]
        first = generated.shape[1] - num_scores + 1
        # A step along edges does not check what is alive: where one child alone continues, a dead node's child has no
        # bits of its own, and nodes hidden from a row have living children.
        is_whole = catalogue.alive is None and catalogue.hidden is None
        by_edges = is_whole and catalogue.trie.num_nodes <= MOST_NODES
        states = torch.zeros((num_prompts, num_rows // num_prompts), dtype=torch.long, device=scores.device)
        masked: list[Tensor] = []
        for level in range(generated.shape[1] + 1):
            if level >= first:
                masked.append(self._mask_level(states, scores[:, level - first], catalogue, level))
            if level < min(generated.shape[1], catalogue.max_length):
                tokens = generated[:, level].reshape(states.shape)
                if by_edges:
                    states = catalogue.trie.follow(states, tokens)
                else:
                    states = advance(states, tokens, catalogue, level=level)
        return torch.stack(masked, dim=1) if num_scores > 1 else masked[0][:, None] if masked else scores

    def items(self, sequences: Any) -> list[list[ItemId]]:
        """See `Constraint.items`."""
        return items_of_batch(self.rules, sequences)

    def _mask_level(self, states: Tensor, scores: Tensor, catalogue: DeviceCatalogue, level: int) -> Tensor:
        if level >= catalogue.max_length:
            return self._over(scores)
        legal = children(states, catalogue, level=level)
        num_rows, vocab_size = scores.shape
        is_legal, tokens = legal.legal.flatten(0, 1), legal.tokens.flatten(0, 1)
        if level == 0 and self.num_beams > 1:
            is_legal = is_legal & (torch.arange(num_rows, device=scores.device) % self.num_beams == 0)[:, None]
        # One pass over rows times vocabulary takes all the time. Illegal tokens go to an entry after the rows.
        masked = scores.new_full((num_rows * vocab_size + 1,), -torch.inf)
        first = torch.arange(0, num_rows * vocab_size, vocab_size, device=scores.device)[:, None]
        places = torch.where(is_legal, first + tokens, num_rows * vocab_size)
        kept_scores = self._unblocked(scores.gather(1, tokens), is_legal)
        masked = masked.scatter_(0, places.flatten(), kept_scores.flatten())[:-1].view(scores.shape)
        end = masked[:, self._end]
        masked[:, self._end] = torch.where(is_legal.any(dim=-1), end, self._filling(scores.dtype))
        return masked


class SeveralLabels(Constraint):
    """An answer is several labels, each at most once, with a separator between them: on the host, row by row.

    The separator, as tokens, must not be inside a label; the catalogue has an end token.
    """

    def __init__(self, rules: BatchRules, separator: tuple[int, ...], max_labels: int | None) -> None:
        super().__init__(rules)
        for snapshot in rules.snapshots:
            check_separator(snapshot, separator)
        self.separator = separator
        most = max(snapshot.num_sequences for snapshot in rules.snapshots)
        self.max_labels = None if max_labels is None else max(min(int(max_labels), most), 1)  # none comes twice
        self._answers: dict[int, Answers] = {}

    @property
    def max_token_id(self) -> int:
        """The largest token that may follow."""
        return max(super().max_token_id, *self.separator)

    def mask(self, generated: Tensor, scores: Tensor, num_prompts: int) -> Tensor:
        """See `Constraint.mask`."""
        (num_rows, num_scores, _), allowed = scores.shape, torch.zeros(scores.shape, dtype=torch.bool)
        first = generated.shape[1] - num_scores + 1
        for number, row in enumerate(generated.tolist()):
            answers = self._answers_of(number * num_prompts // num_rows)
            for place in range(num_scores):
                allowed[number, place, answers.next_tokens(row[: first + place])] = True
        allowed = allowed.to(scores.device)
        masked = self._unblocked(scores.masked_fill(~allowed, -torch.inf), allowed)
        return torch.where(allowed.any(dim=-1, keepdim=True), masked, self._over(scores))

    def items(self, sequences: Any) -> list[list[ItemId]]:
        """See `Constraint.items`: those of all labels of an answer."""
        rows = read_generated(sequences)
        answers, prompt_of = [self.split(row) for row in rows.tolist()], prompts_of(self.rules, len(rows))
        row_of = np.repeat(np.arange(len(rows)), [len(labels) for labels in answers])
        labels, _ = read_rows([label for labels in answers for label in labels])
        found: list[list[ItemId]] = [[] for _ in rows]
        for row, items in zip(row_of.tolist(), items_of(self.rules, labels, prompt_of[row_of]), strict=True):
            found[row] += items
        return found

    def split(self, row: list[int]) -> list[list[int]]:
        """The labels of one answer; none of a cut-off one, whose last label may be another's beginning."""
        eos_token_id = self.rules.shared.eos_token_id
        assert eos_token_id is not None
        return split(row, self.separator, eos_token_id) if eos_token_id in row else []

    @property
    def longest_answer(self) -> int | None:
        """The most tokens of an answer, its end token included; None if nothing limits its labels."""
        if self.max_labels is None:
            return None
        of_label = self.rules.shared.max_length - 1
        return self.max_labels * (of_label + len(self.separator)) - len(self.separator) + 1

    def _answers_of(self, prompt: int) -> Answers:
        """What may follow a prompt: items hidden from it are dead there."""
        rules, key = self.rules, prompt
        if rules.excluded_ids is None:
            key = 0 if rules.rule_of_row is None else int(rules.rule_of_row[prompt])
        if key not in self._answers:
            snapshot = rules.of_row(prompt)
            if rules.excluded_ids is not None:
                items = list(rules.excluded_ids[prompt])
                known = [item for item, is_item in zip(items, snapshot.has_items(items), strict=True) if is_item]
                snapshot = snapshot.remove(known) if known else snapshot
            self._answers[key] = Answers(snapshot, self.separator, self.max_labels)
        return self._answers[key]
