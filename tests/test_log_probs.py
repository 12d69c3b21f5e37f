# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of children: in pieces, and by the function that CUDA gets compiled."""

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from table_scorers import make_plan

from hf_gr.core.beam import Beams
from hf_gr.torch import decode, log_probs, ops
from hf_gr.torch.log_probs import token_log_probs
from hf_gr.torch.transition import Children

pytestmark = pytest.mark.shapes

TOL = 1e-6  # fp32, relative to the largest logit: a sum of at most 30,000 exponentials
VOCABULARY = 23


def expected(given: torch.Tensor, legal: Children) -> torch.Tensor:
    """The whole log-softmax, in double precision."""
    return given.double().log_softmax(-1).gather(-1, legal.tokens).float()


@pytest.fixture
def no_compiler() -> Iterator[None]:
    log_probs._compiled.cache_clear()
    yield
    log_probs._compiled.cache_clear()
    log_probs.NOT_COMPILED.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_pieces_of_every_size_give_the_log_softmax(
    at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "rows_at_once", lambda *_: at_once)
    draw = torch.Generator().manual_seed(0)
    given = (torch.randn((2, 5, VOCABULARY), generator=draw) * 3).to(dtype)
    tokens = torch.randint(VOCABULARY, (2, 5, 4), generator=draw)
    legal = Children(tokens, torch.rand(tokens.shape, generator=draw) < 0.7, tokens)
    found = decode.child_scores(given, legal, Beams.start(ops, given, batch_size=2, width=5), make_plan(2, 5))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(given, legal), atol=TOL, rtol=TOL)


def test_pieces_are_gone_before_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, made, log_softmax = [], [], torch.Tensor.log_softmax

    def counted(rows: torch.Tensor, dim: int) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        found = log_softmax(rows, dim)
        made.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(log_probs, "rows_at_once", lambda *_: 3)
    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    given, tokens = torch.randn(8, 70), torch.randint(70, (8, 64))
    assert torch.equal(token_log_probs(given, tokens), log_softmax(given, -1).gather(-1, tokens))
    assert alive == [0, 0, 0]


@pytest.mark.usefixtures("no_compiler")
def test_where_a_compiled_call_fails_pieces_are_left(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    def compile_(function: Any, **_: Any) -> Any:
        def fails(*_: Any) -> Any:
            raise errors[0]

        tried.append(function)
        return fails

    errors, tried = [torch.OutOfMemoryError("no memory")], []
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(log_probs, "rows_at_once", lambda *_: 3)
    given, tokens = torch.randn((8, VOCABULARY)), torch.randint(VOCABULARY, (8, 2))
    with pytest.raises(torch.OutOfMemoryError):
        token_log_probs(given.as_subclass(OnCuda), tokens)
    errors[0] = RuntimeError("Failed to find C compiler")
    with caplog.at_level(logging.WARNING, "hf_gr"):
        for _ in range(2):
            found = token_log_probs(given.as_subclass(OnCuda), tokens)
    assert "torch.compile fails on cpu: Failed to find C compiler" in caplog.text
    assert tried == [log_probs._log_probs]
    assert caplog.text.count("torch.compile fails") == 1
    assert torch.equal(found.as_subclass(torch.Tensor), given.log_softmax(-1).gather(-1, tokens))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_gives_the_log_softmax(dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiles:
        monkeypatch.setattr(log_probs, "NOT_COMPILED", {torch.device("cuda", torch.cuda.current_device())})
    given = torch.randn((1, 512, 40_000), device="cuda").to(dtype)
    tokens = torch.randint(40_000, (1, 512, 32), device="cuda")
    legal = Children(tokens, tokens >= 0, tokens)
    found = decode.child_scores(given, legal, Beams.start(ops, given, batch_size=1, width=512), make_plan(1, 512))
    torch.testing.assert_close(found, expected(given, legal), atol=1e-5, rtol=TOL)
