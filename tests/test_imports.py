# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What importing hf_gr costs, and what it offers."""

import subprocess
import sys

import pytest

import hf_gr

HEAVY = ("torch", "transformers", "jax", "flax", "accelerate", "pandas", "sklearn", "fastapi", "uvicorn", "ray")


@pytest.mark.parametrize(
    "statement",
    [
        "import hf_gr; dir(hf_gr)",
        "from hf_gr import ConstraintIndex, SemanticIds",
        "from hf_gr import ConstraintIndex; ConstraintIndex.from_sequences([[5, 7]]).items([[5, 7]])",
        "import hf_gr.files.hub, hf_gr.files.cards",
        "import tempfile; from hf_gr import ConstraintIndex as C; d = tempfile.mkdtemp();"
        "C.from_sequences([[5, 7]]).save_pretrained(d); C.from_pretrained(d)",
    ],
)
def test_the_catalogue_loads_no_framework(statement: str) -> None:
    code = f"import sys; {statement}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_the_server_names_its_extra() -> None:
    code = "import sys; sys.modules['fastapi'] = None; import hf_gr.serving.app"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert 'hf_gr.serving.app needs fastapi: pip install "hf-gr[serve]"' in done.stderr


def test_every_public_name_resolves() -> None:
    assert [getattr(hf_gr, name).__name__ for name in hf_gr.__all__] == sorted(hf_gr.__all__)
    assert set(hf_gr.__all__) <= set(dir(hf_gr))
    with pytest.raises(AttributeError, match="no attribute 'ConstraintIndx'; it exports .*ConstraintIndex"):
        _ = hf_gr.ConstraintIndx
