# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels scored by a model in PyTorch, as a tree over one prompt. `flax_scoring` is its twin.

Axes: B batch, P prompt, S sequences, K beams, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.generation.internals import as_it_is, default_generation_fields
from hf_gr.generation.models import start_token
from hf_gr.generation.torch.constraints import SeveralLabels
from hf_gr.generation.torch.layouts import prefilled, takes_tree
from hf_gr.generation.torch.logits_process import ConstraintLogitsProcessor, read_several
from hf_gr.generation.torch.models import base_model, evaluation, output_size_of, output_weight_of
from hf_gr.generation.torch.several import is_dead
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.transition import device_catalogue

from .bounded import BoundedScorer
from .exhaustive import ExhaustiveScorer
from .finders import Floats, Scoring
from .label_trees import Sequences


class TorchScoring(Scoring):
    """See `Scoring`.

    Args:
        model: of transformers, also in wrappers for training and with adapters of weights.

    Raises:
        ValueError: a model that cannot generate or takes no tree, or with a learned prefix.
    """

    takes_trees = True

    def __init__(self, model: Any) -> None:
        adapter: Any = getattr(model, "active_peft_config", None)
        inner = base_model(model) if isinstance(model, torch.nn.Module) else None
        if not isinstance(inner, GenerationMixin):
            raise ValueError(f"model is a {type(model).__name__}, expected a language model of transformers")
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"model has a {adapter.peft_type.value} adapter, expected one of weights such as LoRA: a learned "
                "prefix is not supported"
            )
        if not takes_tree(inner):
            raise ValueError(
                f"model is a {type(inner).__name__}, which cannot score the nodes of a tree, "
                "expected another: its generate(constraint_index=...) finds the best labels"
            )
        self.model: Any = inner
        self.config, self.dtype = self.model.config, self.model.dtype
        self.vocab_size = output_size_of(inner)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `Scoring.evaluation`: without gradients; every module is in its own mode again afterwards."""
        with torch.no_grad(), evaluation(self.model):
            yield

    def read_answers(self, snapshot: Snapshot, separator: Any, max_labels: Any, tokenizer: Any) -> SeveralLabels:
        """See `Scoring.read_answers`."""
        return read_several(combine_rules([snapshot]), separator, max_labels, tokenizer)

    def every(self, sequences: Sequences, *, batch_size: int) -> Callable[[Longs, Longs], Floats]:
        """See `Scoring.every`."""
        weight = output_weight_of(self.model)
        scorer = ExhaustiveScorer(
            sequences,
            batch_size=batch_size,
            vocab_size=self.vocab_size,
            device=self.model.device if weight is None else weight.device,
        )
        return lambda input_ids, mask: scorer.score(self._scorers(input_ids, mask, width=2)).cpu().numpy()

    def probable(
        self, sequences: Sequences, *, tolerance: float, at_least: int
    ) -> Callable[[Longs, Longs], list[tuple[Longs, Floats, int]]]:
        """See `Scoring.probable`."""
        scorer = BoundedScorer(sequences, vocab_size=self.vocab_size, tolerance=tolerance, at_least=at_least)

        def score(input_ids: Longs, mask: Longs) -> list[tuple[Longs, Floats, int]]:
            rows = scorer.score(self._scorers(input_ids, mask, width=1024))
            return [(row.numbers, row.log_probs.numpy(), row.num_scored) for row in rows]

        return score

    def search(
        self,
        snapshot: Snapshot,
        answers: SeveralLabels | None,
        *,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Callable[[Longs, Longs], tuple[Longs, Floats]]:
        """See `Scoring.search`."""
        if answers is not None:
            return partial(self._search_answers, answers, num_beams, max_new_tokens)
        rules = combine_rules([snapshot])

        def find(input_ids: Longs, mask: Longs) -> tuple[Longs, Floats]:
            device = self.model.device
            catalogue = device_catalogue(rules, device)
            plan = DecodePlan(  # by the probability of whole labels, however long: no length penalty, no early end
                prompt=torch.from_numpy(input_ids).to(device),
                num_beams=num_beams,
                num_return_sequences=num_beams,
                num_kept=2 * num_beams,
                do_sample=False,
                length_penalty=0.0,
                early_stopping=False,
                max_new_tokens=max_new_tokens,
                fill_token_id=PADDING,
                missing_token_id=PADDING,
            )
            decoded = decode(self._scorers(input_ids, mask, width=num_beams)(), catalogue, plan).cropped()
            sequences = decoded.sequences.cpu().numpy()
            shape = len(input_ids), num_beams
            return sequences.reshape(*shape, -1), decoded.scores.cpu().numpy().reshape(shape)

        return find

    def _search_answers(
        self, answers: SeveralLabels, num_beams: int, max_new_tokens: int, input_ids: Longs, mask: Longs
    ) -> tuple[Longs, Floats]:
        """Answers of several labels, by transformers' own loop."""
        tokens, seen = (torch.from_numpy(array).to(self.model.device) for array in (input_ids, mask))
        eos_token_id = answers.rules.shared.eos_token_id
        config = GenerationConfig(
            num_beams=max(num_beams, 2),  # one would be greedy search, without scores of answers
            num_return_sequences=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=0.0,
            early_stopping=False,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
            decoder_start_token_id=start_token(self.model.generation_config, self.model.config),
            return_dict_in_generate=True,
            output_scores=True,
        )
        # What the model's own config says of other texts, such as penalties, is not for labels.
        config.update(**default_generation_fields(config), defaults_only=True)
        processors = LogitsProcessorList([ConstraintLogitsProcessor._of(answers)])
        how: dict[str, Any] = {"attention_mask": seen, "logits_processor": processors}
        out: Any = GenerationMixin.generate(self.model, tokens, as_it_is(config), **how)  # pyright: ignore
        sequences = out.sequences[:, out.sequences.shape[1] - out.beam_indices.shape[1] :].cpu().numpy()
        is_end = sequences == eos_token_id
        sequences = np.where(is_end.cumsum(axis=1) > is_end, PADDING, sequences)
        scores = np.where(is_dead(out.sequences_scores).cpu(), -np.inf, out.sequences_scores.cpu())
        shape = len(input_ids), num_beams
        return sequences.reshape(*shape, -1), scores.reshape(shape)

    def _scorers(self, input_ids: Longs, mask: Longs, *, width: int) -> Callable[[], Any]:
        """Scorers over a batch of prompts, which share one prefill."""
        model = self.model
        tokens, seen = (torch.from_numpy(array).to(model.device) for array in (input_ids, mask))
        if not model.config.is_encoder_decoder:
            return prefilled(model, tokens, None, seen, width=width)
        start = start_token(model.generation_config, model.config)
        if start is None:
            raise ValueError("model has no decoder_start_token_id, expected one: set it in model.generation_config")
        first: Tensor = torch.full_like(tokens[:, :1], start)
        return prefilled(model, first, tokens, seen, width=width)
