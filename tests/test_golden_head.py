# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/golden/head_v1: what users have on their disks. It is never written again: if a test fails, the code is wrong,
or the format has changed and needs version 2, with golden files beside these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_gr.files.draft_head import FILES
from hf_gr.torch.draft_head import DraftHead, DraftHeadConfig

GOLDEN = Path(__file__).parent / "golden" / "head_v1"
CONFIG = DraftHeadConfig(hidden_size=8, codebook_sizes=(4, 3, 2), placeholder_token_ids=(20, 21, 22))
CODEBOOKS = [[3, 5, 7, 4], [8, 9, 12], [15, 14]]


@pytest.mark.parametrize("backend", ["torch", "flax"])
def test_the_golden_head_is_saved_to_the_same_bytes(backend: str, tmp_path: Path) -> None:
    head = head_class(backend).from_pretrained(GOLDEN)
    assert head.config == CONFIG
    assert [head.codebook(level).tolist() for level in range(3)] == CODEBOOKS
    head.save_pretrained(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


def head_class(backend: str) -> Any:
    if backend == "torch":
        return DraftHead
    pytest.importorskip("flax")
    from hf_gr.flax.draft_head import DraftHead as FlaxDraftHead

    return FlaxDraftHead


def test_both_backends_read_the_same_tensors() -> None:
    ours, theirs = (head_class(backend).from_pretrained(GOLDEN) for backend in ("flax", "torch"))
    named = dict(theirs.named_parameters()) | {"placeholders": theirs.placeholder_embeddings}
    arrays = {name: array for name, array in ours.params.items() if name in named}
    arrays["placeholders"] = ours.placeholder_embeddings
    assert arrays.keys() == named.keys()
    assert all(np.array_equal(array, named[name].detach().numpy()) for name, array in arrays.items())
    # Drawn anew, to within the last digits of another release of PyTorch; the file is what counts to the bit.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = DraftHead(CONFIG, CODEBOOKS).state_dict() | {"placeholders": torch.randn(3, 8)}
    assert all(torch.allclose(tensor, expected[name]) for name, tensor in named.items())
