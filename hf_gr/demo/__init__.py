# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr demo`: a generative recommender of films, trained and used on this machine.

The data flow in `run`: `data` (films, their features, histories) -> `hf_gr.training` (semantic IDs and a small Qwen3,
saved with its catalogue) -> `hf_gr.recommend`, `hf_gr.evaluate` and `compare` -> `show` (print).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_gr import ConstraintIndex, SemanticIds

__all__ = ["toy"]


def toy(num_items: int = 12_000, *, seed: int = 0) -> tuple[Any, SemanticIds, ConstraintIndex]:
    """A stand-in for your own recommender: a small model with random weights, and a catalogue of random items.

    Args:
        num_items: items, numbered from 0, of 4 codes each.
        seed: of the codes and of the weights.

    Returns:
        A Qwen3 with hf_gr's `generate`, in evaluation mode; the items' semantic IDs, which make prompts
        (`ids.encode([17, 42])`); and the catalogue.

    Example:
        >>> model, ids, index = toy(100)
        >>> len(index.item_ids), len(ids.encode([17, 42])), model.config.vocab_size == ids.vocab_size
        (100, 8, True)
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hf_gr import SemanticIds, enable

    codes = torch.randint(0, 256, (num_items, 4), generator=torch.Generator().manual_seed(seed))
    ids = SemanticIds(codes, level_sizes=[256] * 4, offset=3)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = enable(Qwen3ForCausalLM(Qwen3Config(vocab_size=ids.vocab_size, **sizes)))
    return model.eval(), ids, ids.constraint_index()
