# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Several devices, in a process that has them; and the whole decode lowered for TPUs, on a machine without one.

Lowering proves that every operation of the program exists on a TPU: neither that it compiles there, nor its numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import EOS, build

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex
from hf_gr.flax import devices
from hf_gr.flax.decode import decode
from hf_gr.generation.flax import mixin as flax

ROWS = np.random.default_rng(0).integers(3, 24, size=(50, 4))
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 4].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_four_devices(marked: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    worker = Path(__file__).with_name("flax_on_four_devices.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "-m",
        marked,
        str(worker),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, env=environment | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("family", "options"),
    [("t5", {"num_beams": 4}), ("qwen3", {"num_beams": 4}), ("qwen3", {"do_sample": True, "top_p": 0.9})],
    ids=["t5", "beams", "samples"],
)
def test_the_whole_decode_lowers_for_tpus(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program, prefill and all levels: nothing in it calls back to the host, nothing is of a CPU alone."""
    build(family, config={"num_hidden_layers" if family == "qwen3" else "num_layers": 1}).save_pretrained(tmp_path)
    model = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, backend="flax", dtype="bfloat16")

    class Lowered(Exception):
        program: Any

    def lower(scorer: Any, *args: Any) -> Any:
        done = Lowered()
        done.program = jax.export.export(jax.jit(partial(decode, scorer)), platforms=["tpu"])(*args)
        raise done

    monkeypatch.setattr(flax, "decode_program", lower)
    monkeypatch.setattr(devices, "_all_local_devices", lambda: None)
    with pytest.raises(Lowered) as caught:
        model.generate([[5, 6, 7]], constraint_index=RAGGED, **options)
    program = caught.value.program
    assert program.platforms == ("tpu",)
    assert "dot_general" in program.mlir_module()
    assert program.mlir_module().count("func.func public") == 1
