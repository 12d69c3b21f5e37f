# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/golden/head_v1: what users have on their disks, written by the code of 55573ba. It is never written again.

If a test fails, the code is wrong, or the format has changed and needs version 2, with golden files beside these.
"""

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


def check_files(head: Any, folder: Path) -> None:
    head.save_pretrained(folder)
    for name in FILES:
        assert (folder / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_the_golden_head_loads_in_pytorch_and_is_saved_to_the_same_bytes(tmp_path: Path) -> None:
    head = DraftHead.from_pretrained(GOLDEN)
    assert head.config == CONFIG
    assert [head.codebook(level).tolist() for level in range(3)] == CODEBOOKS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = DraftHead(CONFIG, CODEBOOKS).state_dict()
        rows = torch.randn(3, 8)
    assert head.state_dict().keys() == expected.keys()
    # Drawn anew, to within the last digits of another release of PyTorch; the file is what counts to the bit.
    assert all(torch.allclose(tensor, expected[name]) for name, tensor in head.state_dict().items())
    assert torch.allclose(head.placeholder_embeddings, rows)  # pyright: ignore[reportArgumentType]
    check_files(head, tmp_path)


def test_both_backends_read_the_same_tensors_and_save_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("flax")
    from hf_gr.flax.draft_head import DraftHead as FlaxDraftHead

    ours, theirs = FlaxDraftHead.from_pretrained(GOLDEN), DraftHead.from_pretrained(GOLDEN)
    assert ours.config == theirs.config
    named = dict(theirs.named_parameters())
    arrays = {name: array for name, array in ours.params.items() if name in named}
    assert arrays.keys() == named.keys()
    assert all(np.array_equal(array, named[name].detach().numpy()) for name, array in arrays.items())
    assert all(np.array_equal(ours.codebook(level), theirs.codebook(level).numpy()) for level in range(3))
    rows: Any = theirs.placeholder_embeddings
    assert np.array_equal(ours.placeholder_embeddings, rows.numpy())  # pyright: ignore[reportArgumentType]
    check_files(ours, tmp_path)
