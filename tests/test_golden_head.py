# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""tests/golden/head_v1: what users have on their disks. It is never written again: if a test fails, the code is wrong,
or the format has changed and needs version 2, with golden files beside these."""

from pathlib import Path
from typing import Any

import pytest

from hf_gr.files.draft_head import FILES
from hf_gr.flax.draft_head import DraftHead as FlaxDraftHead
from hf_gr.torch.draft_head import DraftHead, DraftHeadConfig

GOLDEN = Path(__file__).parent / "golden" / "head_v1"
CONFIG = DraftHeadConfig(hidden_size=8, codebook_sizes=(4, 3, 2), placeholder_token_ids=(20, 21, 22))
CODEBOOKS = [[3, 5, 7, 4], [8, 9, 12], [15, 14]]


@pytest.mark.parametrize("kind", [DraftHead, FlaxDraftHead])
def test_the_golden_head_is_saved_to_the_same_bytes(kind: Any, tmp_path: Path) -> None:
    head = kind.from_pretrained(GOLDEN)
    assert head.config == CONFIG
    assert [head.codebook(level).tolist() for level in range(3)] == CODEBOOKS
    head.save_pretrained(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()
