# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of children: in pieces, by the operator, by the Triton kernel; and where each is used.

The kernel runs interpreted, and is compiled for a GPU that is not there, where Triton is installed: .ci/run does that.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import PretendCuda, values
from test_decode import CPU, make_plan

from hf_gr.core.beam import Beams
from hf_gr.torch import decode, log_probs, ops
from hf_gr.torch.children import Children, ChildrenInColumns, PlainChildren, WideChildren
from hf_gr.torch.device_trie import WideLevel
from hf_gr.torch.log_probs import rows_at_once, takes_one_pass, token_log_probs

pytestmark = pytest.mark.shapes

TRITON = pytest.mark.skipif(find_spec("triton") is None, reason='needs pip install "hf-gr[triton]"')
SCRIPT = Path(__file__).parent / "log_probs_by_triton.py"
KERNEL = Path(log_probs.__file__).parent / "log_probs_triton.py"
TOL = 1e-6  # fp32, relative to the largest logit: a sum of at most 30,000 exponentials
BATCH, BEAMS, VOCABULARY, CHILDREN = 2, 5, 23, 4


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (BATCH, BEAMS, VOCABULARY)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def kinds() -> dict[str, Children]:
    """Children as every level may give them; some are illegal."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, BEAMS, CHILDREN), generator=generator)
    legal = torch.rand(tokens.shape, generator=generator) < 0.7
    first = torch.zeros((BATCH, BEAMS), dtype=torch.long)
    plain = PlainChildren(torch.where(legal, tokens, 0), legal, tokens)
    table = WideLevel(
        start=0,
        first_token=7,
        penalties=torch.zeros((2, CHILDREN)),
        ranks=torch.zeros((2, CHILDREN), dtype=torch.int32),
        first=torch.zeros(2, dtype=torch.long),
        tokens=torch.arange(7, 7 + CHILDREN),
    )
    span = table.tokens.expand(tokens.shape)
    return {
        "plain": plain,
        "wide": WideChildren(span, table, first),
        "columns": ChildrenInColumns(tokens // 2, legal, by_token=plain),
    }


def scores(given: torch.Tensor, legal: Children) -> torch.Tensor:
    return decode.child_scores(
        given, legal, Beams.start(ops, given, batch_size=BATCH, width=BEAMS), make_plan(BATCH, BEAMS)
    )


def expected(given: torch.Tensor, legal: Children) -> torch.Tensor:
    """The whole log-softmax, in double precision."""
    return given.double().log_softmax(-1).gather(-1, legal.tokens).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 3, 9, 100])
@pytest.mark.parametrize("kind", ["plain", "wide", "columns"])
def test_pieces_of_every_size_give_the_log_softmax(
    kind: str, at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "rows_at_once", lambda *_: at_once)
    given, legal = logits(dtype), kinds()[kind]
    torch.testing.assert_close(scores(given, legal), expected(given, legal), atol=TOL, rtol=TOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "wide", "columns"])
def test_one_pass_gives_the_log_softmax(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator with the kernel of the CPU in place of Triton's: tokens, and the shape of what comes back."""
    monkeypatch.setattr(decode, "takes_one_pass", lambda rows: True)
    given, legal = logits(dtype), kinds()[kind]
    found = scores(given, legal)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(given, legal), atol=TOL, rtol=TOL)


def test_planted_scores_of_other_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "rows_at_once", lambda *_: 3)
    plain = kinds()["plain"]
    wrong = replace(plain, tokens=plain.tokens.roll(1, dims=1))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(scores(logits(), wrong), expected(logits(), plain), atol=TOL, rtol=TOL)


def test_the_operator_is_one_of_pytorchs() -> None:
    given = logits().flatten(0, 1), kinds()["plain"].tokens.flatten(0, 1)
    torch.library.opcheck(
        token_log_probs, given, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_pieces_are_sized_by_device() -> None:
    sizes = [(rows, vocab) for rows in (1, 50, 512, 4096) for vocab in (100, 13_312, 151_936, 10**8)]
    for rows, vocab in sizes:
        on_cpu, on_device = (rows_at_once(rows, vocab, torch.device(kind)) for kind in ("cpu", "cuda"))
        assert on_cpu == max(2**21 // vocab, 1)
        assert 1 <= on_device <= rows
        assert -(-rows // on_device) <= log_probs.DEVICE_PIECES
        # What is normalised together is never all of what is large.
        assert on_device * vocab <= log_probs.DEVICE_NUMBERS or on_device <= max(-(-rows // 3), 1)
    assert rows_at_once(512, 151_936, torch.device("cuda")) == 171


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: pytest -m gpu")
@pytest.mark.parametrize("pieces", [3, 40])
def test_scores_of_a_large_vocabulary_take_few_operations_and_little_memory(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 beams over 151,936 tokens on a device, without the kernel; planted: pieces of a CPU's size."""
    if pieces > 3:
        monkeypatch.setattr(decode, "rows_at_once", lambda num_rows, *_: num_rows // pieces)
    monkeypatch.setattr(decode, "takes_one_pass", lambda rows: False)
    shape = (1, 512, 151_936)
    with PretendCuda() as cuda:
        given = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        nothing = torch.zeros((1, 512, 256), dtype=torch.long, device="cuda")
        legal = PlainChildren(nothing, nothing == 0, nothing)
        beams = Beams.start(ops, torch.zeros((), device="cuda"), batch_size=1, width=512)
        log = cuda.clear()
        found = decode.child_scores(given, legal, beams, make_plan(1, 512))
    assert found.shape == (1, 512, 256)
    assert (log.number() <= 10) == (pieces == 3)
    assert not log.waits
    assert max(made.num_bytes for made in log.made) < given.numel() * 4 // 2  # less than half of them all in fp32


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: pytest -m gpu")
def test_the_operator_is_one_operation_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendCuda() as cuda:
        given, tokens = torch.randn((6, 50), device="cuda"), torch.zeros((6, 3), dtype=torch.long, device="cuda")
        log = cuda.clear()
        found = token_log_probs(given, tokens)
        assert (log.number(), log.waits) == (1, [])
    expected = values(given).log_softmax(-1).gather(-1, values(tokens))
    torch.testing.assert_close(values(found), expected, atol=TOL, rtol=TOL)


def test_a_cpu_needs_no_kernel() -> None:
    assert not takes_one_pass(logits().flatten(0, 1))


class OnCuda(torch.Tensor):
    """Answers as logits of a CUDA device do."""

    is_cuda, device = True, torch.device("cuda", 0)


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_kernel_is_tried_once_and_only_if_triton_is_there(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(log_probs, "_works", {})
    monkeypatch.setattr(log_probs, "find_spec", lambda name: object() if is_installed else None)
    monkeypatch.setattr(log_probs, "_runs_on", lambda device: not tried.append(device))
    rows = logits().flatten(0, 1).as_subclass(OnCuda)
    assert [takes_one_pass(rows), takes_one_pass(rows)] == [is_installed] * 2
    assert len(tried) == is_installed
    assert not takes_one_pass(rows.clone().requires_grad_())  # it differentiates nothing


def test_a_kernel_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(log_probs, "token_log_probs", fails)
    with caplog.at_level(logging.WARNING, "hf_gr"):
        assert not log_probs._runs_on(CPU)
    assert "does not run on cpu: Failed to find C compiler" in caplog.text

    def runs_short(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(log_probs, "token_log_probs", runs_short)
    with pytest.raises(torch.OutOfMemoryError):
        log_probs._runs_on(CPU)


def test_without_triton_the_kernel_names_its_extra() -> None:
    code = "import sys; sys.modules['triton'] = None; import hf_gr.torch.log_probs_triton"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'hf_gr.torch.log_probs_triton needs triton: pip install "hf-gr[triton]"' in done.stderr


@pytest.mark.gpu
@TRITON
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_a_gpu_equals_its_twin() -> None:
    from log_probs_by_triton import cases, error_of

    assert takes_one_pass(torch.zeros((1, 2), device="cuda"))
    errors = {}
    for name, (given, tokens) in cases().items():
        # A copy would lose its strides: what is copied is all of the memory behind it.
        moved = [torch.empty(0, dtype=each.dtype, device="cuda") for each in (given, tokens)]
        for there, here in zip(moved, (given, tokens), strict=True):
            there.set_(here.untyped_storage().cuda(), here.storage_offset(), here.shape, here.stride())
        errors[name] = error_of(log_probs, *moved)
    assert {name: error for name, error in errors.items() if not error <= TOL} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pieces_on_a_gpu_give_the_log_softmax(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "takes_one_pass", lambda rows: False)
    given = torch.randn((1, 512, 40_000), device="cuda").to(dtype)
    tokens = torch.randint(40_000, (1, 512, 32), device="cuda")
    legal = PlainChildren(tokens, tokens >= 0, tokens)
    found = decode.child_scores(given, legal, Beams.start(ops, given, batch_size=1, width=512), make_plan(1, 512))
    torch.testing.assert_close(found, expected(given, legal), atol=1e-5, rtol=TOL)


def by_triton(*arguments: str, interpret: bool = True) -> dict[str, Any] | None:
    """What the script found; None if it ended otherwise."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


@TRITON
def test_the_kernel_interpreted_equals_its_twin() -> None:
    errors = by_triton("interpret")
    assert errors is not None
    assert {name: error for name, error in errors.items() if not error <= TOL} == {}
    assert len(errors) > 12


@TRITON
def test_the_kernel_reaches_beyond_32_bits() -> None:
    errors = by_triton("far")
    assert errors is not None
    assert errors["far"] <= TOL


@TRITON
@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    [
        ("far", ".to(tl.int64)", ""),
        ("interpret", 'tl.where(new_largest == -float("inf"), 0.0, new_largest)', "new_largest"),
        ("interpret", "total * tl.exp(largest - base)", "total"),
        ("interpret", "at < vocab_size", "at <= vocab_size"),
        ("interpret", "row * logits_row_stride", "row * vocab_size"),
        ("interpret", "row * tokens_row_stride", "row * num_children"),
        ("interpret", "at * tokens_stride", "at"),
    ],
)
def test_planted_errors_in_the_kernel_are_seen(what: str, right: str, wrong: str, tmp_path: Path) -> None:
    source = KERNEL.read_text(encoding="utf-8")
    assert right in source
    planted = tmp_path / "planted.py"
    planted.write_text(source.replace(right, wrong), encoding="utf-8")
    errors = by_triton(what, str(planted))
    if what == "far" and errors is None:
        return  # it read where nothing is, and was ended for that
    assert errors is not None
    assert not max(errors.values()) <= TOL


@TRITON
def test_the_kernel_compiles_for_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = by_triton("compile", interpret=False)
    assert made is not None
    assert set(made) == {"bf16", "fp16", "fp32"}
    for facts in made.values():
        assert facts["cubin_bytes"] > 0
        assert facts["shared_bytes"] < 48 * 1024
        assert facts["loads_of_16_bytes"] > 0  # neighbouring logits are read together
