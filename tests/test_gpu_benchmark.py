# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`examples/benchmark/gpu.py` is tried here, so that it runs on the day a GPU is at hand.

It runs on a CPU and on the pretend device, goes on where it was stopped, and gives no time to a wrong answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import PretendCuda, as_one_operation
from transformers import Qwen3ForCausalLM

from hf_gr.generation.torch import captured, mixin
from hf_gr.torch import log_probs, top_keys

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmark"
ONE_MODEL = ["--fast", "--models", "Qwen3-1.7B", "--repeats", "1"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, which computes on a CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = import_module("gpu")
    monkeypatch.setattr(module, "has_cuda", lambda: False)
    return module


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("roofline")


def rows_of(printed: str) -> list[dict[str, Any]]:
    return json.loads(printed.splitlines()[-1])["rows"]


def test_every_part_is_measured_and_kept(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "gpu.jsonl"
    gpu.main([*ONE_MODEL, "--out", str(out)])
    rows = rows_of(capsys.readouterr().out)
    assert {row["part"] for row in rows} == set(gpu.PARTS)
    assert not any("wrong" in row or "out_of_memory" in row for row in rows)
    timed = [row for row in rows if row["part"] == "times"]
    ways = {(row["attention"], row["mode"]) for row in timed}
    assert ways == {(gpu.IN_PARTS, gpu.PREFILL)} | {
        (attention, mode) for attention in (gpu.IN_PARTS, gpu.BY_MASK) for mode in (gpu.EAGER, gpu.CAPTURED)
    }
    assert all(row["ms"] > row["least_ms"] > 0 for row in timed)
    assert all(row["graph_bytes"] > 0 for row in timed if row["mode"] == gpu.CAPTURED)

    # What stopped after some rows goes on with the others.
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == len(rows)
    out.write_text("".join(lines[:-2]), encoding="utf-8")
    measured: list[Any] = []
    run_row = gpu.run_row
    monkeypatch.setattr(gpu, "run_row", lambda key, work: measured.append(key) or run_row(key, work))
    gpu.main([*ONE_MODEL, "--out", str(out)])
    assert [key["part"] for key in measured] == ["scores", "tests"]
    assert rows_of(capsys.readouterr().out)[:-2] == rows[:-2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: run the script")
def test_it_is_rehearsed_on_the_pretend_device(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the script forgets to put on the device, or reads by NumPy, ends the run here."""
    peaks = {name: lambda device=None: 7 * 2**20 for name in ("max_memory_allocated", "memory_allocated")}
    for name, function in peaks.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a pretend device")
    monkeypatch.setattr(gpu, "has_cuda", lambda: True)
    monkeypatch.setattr(log_probs, "_compiled", lambda device: as_one_operation(log_probs._log_probs))
    with PretendCuda():
        parts = ["parity", "times", "selection", "scores"]
        gpu.main([*ONE_MODEL, "--device", "cuda", "--parts", *parts, "--settings", "2,20,6"])
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert {row["part"] for row in rows} == set(parts)
    assert not any("wrong" in row or "out_of_memory" in row for row in rows)
    timed = [row for row in rows if row["part"] == "times"]
    assert all(row["peak_bytes"] == 7 * 2**20 and row["bytes_above_model"] == 0 for row in timed)
    assert json.loads(printed.splitlines()[-1])["hardware"]["device"] == "a pretend device"


def test_a_row_without_memory_says_so_and_the_next_one_follows(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, calls = gpu.measure, []

    def short(call: Any, device: Any) -> Any:
        calls.append(call)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB.\nmore words")
        return measure(call, device)

    monkeypatch.setattr(gpu, "measure", short)
    gpu.main([*ONE_MODEL, "--parts", "times", "--settings", "1,16,4"])
    printed = capsys.readouterr().out
    first, *others = rows_of(printed)
    assert first["out_of_memory"] == "CUDA out of memory. Tried to allocate 40.00 GiB."
    assert all("ms" in row for row in others)
    assert re.search(r"prefill, shared keys +out_of_memory", printed)


def wrong(gpu: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Why rows are wrong; the run ends with an error then."""
    with pytest.raises(SystemExit, match="rows with wrong answers"):
        gpu.main([*ONE_MODEL, *arguments])
    rows = rows_of(capsys.readouterr().out)
    assert not any("ms" in row for row in rows if "wrong" in row)
    return [row["wrong"] for row in rows if "wrong" in row]


def test_planted_answers_of_a_graph_are_seen(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = mixin.decode_captured

    def stale(*arguments: Any) -> Any:
        decoded = right(*arguments)
        return decoded and replace(decoded, sequences=decoded.sequences.roll(1, dims=0))

    monkeypatch.setattr(mixin, "decode_captured", stale)
    reasons = wrong(gpu, capsys, "--parts", "times", "--settings", "1,16,4")
    assert len(reasons) == 2
    assert all(reason.startswith("captured call 1 against plain decoding") for reason in reasons)


def test_calls_that_are_not_captured_are_seen(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = mixin.decode_captured
    monkeypatch.setattr(
        mixin, "decode_captured", lambda *given: right(*given) if captured._FOUND.get() is not None else None
    )
    reasons = wrong(gpu, capsys, "--parts", "times", "--settings", "1,16,4")
    assert all("has been decoded eagerly" in reason for reason in reasons)


def test_a_planted_selection_is_seen(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top_keys, "top_keys", lambda keys, number: keys.topk(number, largest=False))
    assert wrong(gpu, capsys, "--parts", "selection") == ["two stages do not find the best"]


def test_a_device_that_is_not_there_is_refused(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cuda, but torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-1.7B"])
def test_the_roofline_counts_the_models_weights(name: str, gpu: Any, roofline: Any) -> None:
    shape = roofline.QWEN3[name]
    config = gpu.config_of(shape)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    matrices = {name: value.numel() for name, value in model.named_parameters() if value.ndim == 2}
    head = matrices.pop("model.embed_tokens.weight")
    assert (shape.weights, shape.head) == (sum(matrices.values()), head)
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert shape.key_bytes == keys


def test_the_roofline_is_that_of_the_design(roofline: Any) -> None:
    """An H100, prompts of 1,000 tokens; it leaves out the attention and the logits of a prefill."""
    h100 = roofline.Device(3.35e12, 800e12)
    expected = {("Qwen3-0.6B", 4): (0.42, 0.49, 0.96), ("Qwen3-1.7B", 3): (1.09, 1.21, 2.40)}
    for (name, length), levels in expected.items():
        for beams, level in zip((128, 256, 512), levels, strict=True):
            found = roofline.limit(roofline.QWEN3[name], h100, batch=1, prompt=1000, beams=beams, length=length)
            assert found.levels[-1] * 1e3 == pytest.approx(level, abs=0.02)
            assert len(found.levels) == length - 1
            assert found.total == pytest.approx(found.prefill + sum(found.levels))
    small = {"batch": 1, "prompt": 1000, "beams": 128, "length": 4}
    base = roofline.limit(roofline.QWEN3["Qwen3-0.6B"], h100, **small)
    for more in ({"batch": 8}, {"prompt": 4000}, {"beams": 4096}, {"length": 5}):
        assert roofline.limit(roofline.QWEN3["Qwen3-0.6B"], h100, **(small | more)).total > base.total
    slow = roofline.Device(3.35e11, 80e12)
    assert roofline.limit(roofline.QWEN3["Qwen3-0.6B"], slow, **small).total == pytest.approx(10 * base.total)
