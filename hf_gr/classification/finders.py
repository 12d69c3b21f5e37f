# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of label sequences after a batch of prompts: of all of them, or of the best. Knows no text.

Small label sets are scored whole (`exhaustive`), larger ones by a beam search (`hf_gr.torch.decode`).

Axes: B batch, P prompt, S sequences, K beams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue.snapshot import Snapshot, combine_rules
from hf_gr.catalogue.trie import build_trie
from hf_gr.generation.models import start_token
from hf_gr.generation.torch.layouts import choose_layout, prefilled
from hf_gr.generation.torch.models import output_size_of, output_weight_of
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import device_catalogue

from .exhaustive import ExhaustiveScorer, Sequences, num_inner_nodes

# Of a batch, by row: the log-probabilities of label sequences, and the labels that each stands for.
Found = list[tuple[Float[Tensor, " sequences"], Sequence[Sequence[str]]]]
Finder = Callable[[Tensor, Tensor], Found]


def sequences_if_small(snapshot: Snapshot, max_tree_nodes: int) -> Sequences | None:
    """All sequences of a label set that is small enough to be scored as a whole; None for a larger one."""
    if not max_tree_nodes:
        return None
    trie = snapshot.base.segment.trie if snapshot.is_compact else build_trie(snapshot.rows())[0]
    return Sequences.of(trie) if num_inner_nodes(trie) <= max_tree_nodes else None


def make_finder(
    model: Any, snapshot: Snapshot, sequences: Sequences | None, *, batch_size: int, num_beams: int
) -> Finder:
    """What scores label sequences after a batch of prompts: all of them exactly, or those that beams find."""
    if sequences is None:
        return _beam_finder(model, snapshot, num_beams)
    return _exact_finder(model, snapshot, sequences, batch_size)


def _exact_finder(model: Any, snapshot: Snapshot, sequences: Sequences, batch_size: int) -> Finder:
    rows = sequences.trie.sequences(sequences.leaves())
    labels: Any = snapshot.items(rows.astype(np.int64))
    weight = output_weight_of(model)
    exhaustive = ExhaustiveScorer(
        sequences,
        batch_size=batch_size,
        vocab_size=output_size_of(model),
        as_tree=choose_layout(model) == "tree" and not model.config.is_encoder_decoder,
        device=model.device if weight is None else weight.device,
    )

    def find(input_ids: Tensor, mask: Tensor) -> Found:
        scores = exhaustive.score(_scorers(model, input_ids, mask, width=2))
        return [(row, labels) for row in scores.cpu()]

    return find


def _beam_finder(model: Any, snapshot: Snapshot, num_beams: int) -> Finder:
    rules = combine_rules([snapshot])

    def find(input_ids: Tensor, mask: Tensor) -> Found:
        scorer, device = _scorers(model, input_ids, mask, width=num_beams)(), input_ids.device
        plan = _beam_search(input_ids, num_beams, snapshot)
        decoded = decode(scorer, device_catalogue(rules, device), plan).cropped()
        items: Any = snapshot.items(decoded.sequences.cpu().numpy())
        found: Found = []
        for row, scores in enumerate(decoded.scores.view(-1, num_beams).cpu()):
            number, start = int(scores.isfinite().sum()), row * num_beams
            found.append((scores[:number], items[start : start + number]))
        return found

    return find


def _scorers(model: Any, input_ids: Tensor, mask: Tensor, *, width: int) -> Callable[[], Scorer]:
    """Scorers over a batch of prompts, which share one prefill."""
    if not model.config.is_encoder_decoder:
        return prefilled(model, input_ids, None, mask, width=width)
    start = start_token(model.generation_config, model.config)
    if start is None:
        raise ValueError("model has no decoder_start_token_id, expected one: set it in model.generation_config")
    return prefilled(model, torch.full_like(input_ids[:, :1], start), input_ids, mask, width=width)


def _beam_search(input_ids: Int[Tensor, "batch prompt"], num_beams: int, snapshot: Snapshot) -> DecodePlan:
    """A search by the probability of whole labels, however long: no length penalty, no early end."""
    return DecodePlan(
        prompt=input_ids,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        num_kept=2 * num_beams,
        do_sample=False,
        length_penalty=0.0,
        early_stopping=False,
        max_new_tokens=snapshot.max_length,
        fill_token_id=-1,
        missing_token_id=-1,
    )
