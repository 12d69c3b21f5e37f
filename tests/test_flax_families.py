# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` of every architecture that Flax has, against PyTorch's mixin on the same checkpoint.

Prompts are padded, and longer than windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, build, prompts

pytest.importorskip("flax", reason="needs the extra flax")

import jax
from test_flax_generate import BEAMS, INDEX, RAGGED, check

from hf_gr import AutoModelForGenerativeRetrieval, enable
from hf_gr.flax.families import FAMILIES as IN_FLAX

QUICK = ("gemma3_text", "bart")  # windows in a decoder; an encoder-decoder with learned positions
FIELDS: dict[str, dict[str, Any]] = {"phi3": {"sliding_window": 3}, "gemma2": {"attn_logit_softcapping": 2.0}}


@pytest.mark.parametrize(
    "family",
    [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in sorted(IN_FLAX)],
)
def test_beams_are_those_of_pytorch(family: str, tmp_path: Path) -> None:
    model = enable(build(family, config=FIELDS.get(family) or ({} if family in FAMILIES else FAMILIES["llama"])))
    model.save_pretrained(tmp_path)
    pair = (model, AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax"))
    with jax.default_matmul_precision("highest"):
        if family in QUICK:
            check(pair, prompts(3, 9, padded=True), constraint_index=RAGGED, **BEAMS)
        else:
            check(pair, prompts(3, 9, padded=True), constraint_index=INDEX, drafting="trie", **BEAMS)
