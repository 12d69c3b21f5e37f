# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers of several labels, by transformers' constrained beam search. Knows no text."""

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.generation.internals import as_it_is, default_generation_fields
from hf_gr.generation.models import start_token
from hf_gr.generation.torch.constraints import SeveralLabels
from hf_gr.generation.torch.logits_process import ConstraintLogitsProcessor
from hf_gr.generation.torch.loop import dead

from .label_search import Found
from .model import LabelModel, Prompts
from .result import Method


class BeamSearch:
    """Searches for the best answers of several labels after prompts."""

    method: Method = "beams"

    def __init__(
        self, model: LabelModel, snapshot: Snapshot, answers: SeveralLabels, *, num_beams: int, renormalizes: bool
    ) -> None:
        self.model, self.snapshot, self.answers, self.num_beams = model, snapshot, answers, num_beams
        self.renormalizes = renormalizes

    def find(self, prompts: Prompts) -> list[Found]:
        """The best answers after each prompt of a batch."""
        tokens, mask = self.model.to_device(prompts)
        model, eos_token_id = self.model.model, self.snapshot.eos_token_id
        config = GenerationConfig(
            num_beams=max(self.num_beams, 2),  # one would be greedy search, without scores of answers
            num_return_sequences=self.num_beams,
            max_new_tokens=self.answers.longest_answer,
            length_penalty=0.0,
            early_stopping=False,
            renormalize_logits=self.renormalizes,
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
        log_probs = torch.where(dead(out.sequences_scores), -torch.inf, out.sequences_scores).double().cpu().numpy()
        shape = len(tokens), self.num_beams
        return [self._found(*row) for row in zip(sequences.reshape(*shape, -1), log_probs.reshape(shape), strict=True)]

    def _found(self, rows: Any, log_probs: Any) -> Found:
        """The answers of one text: a limit may cut some off, and there may be fewer than beams."""
        is_whole = np.isfinite(log_probs) & (rows == self.snapshot.eos_token_id).any(axis=1)
        rows, log_probs = rows[is_whole], log_probs[is_whole]
        labels: list[list[Any]] = []
        for row in rows.tolist():
            parts = [self.snapshot.items_of(np.array([label]))[0] for label in self.answers.split(row)]
            labels.append([tuple(label for alike in parts for label in alike)])
        # No model gives all texts together more than 1, so the other answers have the rest at most.
        left = max(1.0 - float(np.exp(log_probs).sum()), 0.0)
        return Found(rows, log_probs, labels, left, self.num_beams * (rows.shape[1] - 1))
