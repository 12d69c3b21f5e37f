# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Neither framework is loaded, or needed, for the other."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, T5Config

from hf_gr.flax.model import FlaxModel

BLOCKED = "import sys; sys.modules[{name!r}] = None\n"
LOADED = "print(*[name for name in {names!r} if sys.modules.get(name)])"
CALL = """
import numpy as np
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig
folder = FOLDER
index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
for name in ("t5", "qwen3"):
    model = AutoModelForGenerativeRetrieval.from_pretrained(f"{folder}/{name}")
    model.save_pretrained(f"{folder}/{name}")
call = {"constraint_index": index, "num_beams": 3, "num_return_sequences": 3}
out = AutoModelForGenerativeRetrieval.from_pretrained(f"{folder}/{name}").generate(np.array([[1, 2]]), **call)
assert sorted(index.items(np.asarray(out)[:, 2:])) == [["ham"], ["jam"], ["yam"]]
assert sys.modules["torch"] is None
"""
RECOMMEND = """
from hf_gr import recommend, evaluate
users = [["ham", "jam"], ["jam", "yam", "ham"]]
options = {"constraint_index": index, "num_beams": 3, "progress": False}
assert sorted(recommend(f"{folder}/{name}", users, top_k=3, **options)[0]) == ["ham", "jam", "yam"]
found = evaluate({"model": model}, users, cutoffs=(3,), sampled_users=0, num_resamples=0, baselines=False, **options)
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
    [("DraftHead", "hf_gr.flax.draft_head.DraftHead"), ("ConstraintLogitsProcessor", "FlaxConstraintLogitsProcessor")],
)
def test_without_torch_the_error_names_it(name: str, fix: str) -> None:
    _, error = run(BLOCKED.format(name="torch") + f"from hf_gr import {name}")
    assert f"ImportError: hf_gr.{name} needs PyTorch: pip install torch" in error.splitlines()[-1]
    assert fix in error.splitlines()[-1]


def test_the_flax_path_needs_no_torch(tmp_path: Path) -> None:
    """What needs no model, then loading, saving and whole calls without torch: `backend="auto"` then means Flax."""
    sizes: dict[str, Any] = {"vocab_size": 16, "eos_token_id": None, "bos_token_id": None}
    qwen3 = Qwen3Config(hidden_size=8, num_hidden_layers=1, head_dim=8, intermediate_size=8, **sizes)
    for name, config in (("qwen3", qwen3), ("t5", T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, **sizes))):
        FlaxModel(config).save_pretrained(tmp_path / name)
    code = BLOCKED.format(name="torch") + CALL + RECOMMEND + LOADED.format(names=("hf_gr.torch",))
    out, error = run(code.replace("FOLDER", repr(str(tmp_path))))
    assert "Traceback" not in error, error
    assert out == ""


def test_what_both_sides_share_needs_neither() -> None:
    modules = ("auto", "named_catalogues", "checks", "configuration")
    imports = "\n".join(f"import hf_gr.generation.{module}" for module in modules)
    _, error = run(BLOCKED.format(name="torch") + BLOCKED.format(name="jax") + imports)
    assert "Traceback" not in error, error
