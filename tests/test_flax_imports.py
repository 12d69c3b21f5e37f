# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Neither framework is loaded, or needed, for the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = "import sys; sys.modules[{name!r}] = None\n"
LOADED = "print(*[name for name in {names!r} if sys.modules.get(name)])"
CALL = """
import numpy as np
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig
index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
model = AutoModelForGenerativeRetrieval.from_pretrained({folder!r})
out = model.generate(np.array([[1, 2]]), constraint_index=index, num_beams=3, num_return_sequences=3)
assert sorted(index.items(np.asarray(out)[:, 2:])) == [["ham"], ["jam"], ["yam"]]
assert sys.modules["torch"] is None
"""
RECOMMEND = """
import logging
from hf_gr import recommend, evaluate
users = [["ham", "jam"], ["jam", "yam", "ham"]]
options = {{"constraint_index": index, "num_beams": 3, "progress": False}}
assert sorted(recommend({folder!r}, users, top_k=3, **options)[0]) == ["ham", "jam", "yam"]
found = evaluate({{"model": model}}, users, cutoffs=(3,), sampled_users=0, num_resamples=0, baselines=False, **options)
assert found.results[0].metrics["recall@3"] == 1
assert not any(name.startswith(("hf_gr.torch", "accelerate")) for name in sys.modules)
"""


def run(code: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr


def test_the_torch_path_loads_no_jax() -> None:
    code = "import hf_gr\nfor name in hf_gr.__all__: getattr(hf_gr, name)\nimport hf_gr.generation.torch.loading\n"
    out, error = run(code + LOADED.format(names=("jax", "flax", "hf_gr.flax")))
    assert (out, error) == ("", "")


def test_without_jax_the_error_names_the_extra(tmp_path: Path) -> None:
    load = (
        f"from hf_gr import AutoModelForGenerativeRetrieval as A; A.from_pretrained({str(tmp_path)!r}, backend='flax')"
    )
    _, error = run(BLOCKED.format(name="jax") + load)
    assert 'pip install "hf-gr[flax]"' in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("DraftHead", "hf_gr.flax.draft_head.DraftHead"),
        ("ConstraintLogitsProcessor", "FlaxConstraintLogitsProcessor"),
    ],
)
def test_without_torch_the_error_names_it(name: str, fix: str) -> None:
    _, error = run(BLOCKED.format(name="torch") + f"from hf_gr import {name}")
    assert f"ImportError: hf_gr.{name} needs PyTorch: pip install torch" in error.splitlines()[-1]
    assert fix in error.splitlines()[-1]


def test_the_flax_path_needs_no_torch(tmp_path: Path) -> None:
    """The parts that need no model, then a whole call, with torch blocked: `backend="auto"` then means Flax."""
    pytest.importorskip("jax")
    pytest.importorskip("flax")
    from transformers import Qwen3Config

    from hf_gr.flax.model import FlaxModel

    config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, intermediate_size=8)
    config.eos_token_id = config.bos_token_id = None
    FlaxModel(config).save_pretrained(tmp_path)
    out, error = run(
        BLOCKED.format(name="torch")
        + CALL.format(folder=str(tmp_path))
        + RECOMMEND.format(folder=str(tmp_path))
        + LOADED.format(names=("hf_gr.torch",))
    )
    assert "Traceback" not in error, error
    assert out == ""


@pytest.mark.parametrize(
    "module", ["auto", "named_catalogues", "checks", "configuration", "flax.checks", "flax.outputs"]
)
def test_what_both_sides_share_needs_neither(module: str) -> None:
    code = f"{BLOCKED.format(name='torch')}{BLOCKED.format(name='jax')}import hf_gr.generation.{module}"
    _, error = run(code)
    if module == "flax.outputs":  # its annotations are JAX's
        assert "jax" in error
    else:
        assert "Traceback" not in error, error
