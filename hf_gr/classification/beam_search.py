# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The label sequences that a constrained beam search finds, and answers of several labels. Knows no text.

Axes: B batch, P prompt, K beams, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.generation.internals import as_it_is, default_generation_fields
from hf_gr.generation.models import start_token
from hf_gr.generation.torch.constraints import SeveralLabels
from hf_gr.generation.torch.logits_process import ConstraintLogitsProcessor
from hf_gr.generation.torch.loop import dead
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.transition import device_catalogue

from .label_search import Floats, Found
from .model import LabelModel, Prompts
from .result import Method


class BeamSearch:
    """Searches for the best label sequences after prompts; or, with the constraint of `answers`, of several labels."""

    method: Method = "beams"

    def __init__(
        self, model: LabelModel, snapshot: Snapshot, *, num_beams: int, answers: SeveralLabels | None = None
    ) -> None:
        self.model, self.snapshot, self.num_beams, self.answers = model, snapshot, num_beams, answers

    def find(self, prompts: Prompts) -> list[Found]:
        """The best sequences after each prompt of a batch."""
        search = self._labels if self.answers is None else self._answers
        found: list[Found] = []
        for rows, log_probs in zip(*search(prompts), strict=True):
            mine = rows[: int(np.isfinite(log_probs).sum())]
            labels, is_whole = self._read(mine)
            num_nodes = self.num_beams * (rows.shape[1] - 1)
            found.append(Found(mine[is_whole], log_probs[: len(mine)][is_whole], labels, num_nodes))
        return found

    def _labels(self, prompts: Prompts) -> tuple[Longs, Floats]:
        """`[B, K, T]` sequences of one label, padded, and their log-probabilities `[B, K]`."""
        tokens, _ = self.model.to_device(prompts)
        plan = DecodePlan(  # by the probability of whole labels, however long: no length penalty, no early end
            prompt=tokens,
            num_beams=self.num_beams,
            num_return_sequences=self.num_beams,
            num_kept=2 * self.num_beams,
            do_sample=False,
            length_penalty=0.0,
            early_stopping=False,
            max_new_tokens=self.snapshot.max_length,
            fill_token_id=PADDING,
            missing_token_id=PADDING,
        )
        catalogue = device_catalogue(combine_rules([self.snapshot]), tokens.device)
        scorer = self.model.scorers(prompts, width=self.num_beams)()
        decoded = decode(scorer, catalogue, plan).cropped()
        return self._by_prompt(decoded.sequences.cpu().numpy(), decoded.scores.cpu().numpy())

    def _answers(self, prompts: Prompts) -> tuple[Longs, Floats]:
        """The same of answers of several labels, by transformers' own loop."""
        assert self.answers is not None
        model = self.model.model
        tokens, mask = self.model.to_device(prompts)
        eos_token_id = self.answers.rules.shared.eos_token_id
        config = GenerationConfig(
            num_beams=max(self.num_beams, 2),  # one would be greedy search, without scores of answers
            num_return_sequences=self.num_beams,
            max_new_tokens=self.answers.longest_answer,
            length_penalty=0.0,
            early_stopping=False,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
            decoder_start_token_id=start_token(model.generation_config, model.config),
            return_dict_in_generate=True,
            output_scores=True,
        )
        # The model's own generation config, such as its penalties, is meant for other texts than labels.
        config.update(**default_generation_fields(config), defaults_only=True)
        processors = LogitsProcessorList([ConstraintLogitsProcessor._of(self.answers)])
        how: dict[str, Any] = {"attention_mask": mask, "logits_processor": processors}
        out: Any = GenerationMixin.generate(model, tokens, as_it_is(config), **how)  # pyright: ignore
        sequences = out.sequences[:, out.sequences.shape[1] - out.beam_indices.shape[1] :].cpu().numpy()
        is_end = sequences == eos_token_id
        sequences = np.where(is_end.cumsum(axis=1) > is_end, PADDING, sequences)
        log_probs = torch.where(dead(out.sequences_scores), -torch.inf, out.sequences_scores)
        return self._by_prompt(sequences, log_probs.cpu().numpy())

    def _by_prompt(self, sequences: Longs, log_probs: Floats) -> tuple[Longs, Floats]:
        return sequences.reshape(-1, self.num_beams, sequences.shape[-1]), log_probs.reshape(-1, self.num_beams)

    def _read(self, rows: Longs) -> tuple[list[Sequence[Any]], list[int]]:
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
