# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The graph on the CPU does what a CUDA graph does: what it refuses, what it replays, and what it does not see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_graph import POISON, CaptureError, CpuGraph, poison
from torch import Tensor


def captured(function: Callable[[], Tensor]) -> tuple[CpuGraph, Tensor]:
    graph = CpuGraph()
    with torch.no_grad(), graph.capture():
        result = function()
    return graph, result


def test_replays_read_what_buffers_hold_then() -> None:
    given, weights = torch.arange(3.0), torch.nn.Linear(3, 2)
    graph, result = captured(lambda: weights(given).relu().cumsum(0))
    for row in torch.eye(3):
        given.copy_(row)
        graph.replay()
        assert torch.equal(result, weights(row).relu().cumsum(0))


def test_views_and_writes_in_place_go_to_the_same_memory() -> None:
    given, buffer = torch.tensor([2, 0]), torch.zeros(4, 3)

    def run() -> Tensor:
        rows = buffer[1:]
        rows.index_fill_(0, given, 1.0)
        rows.t()[0] += 1
        torch.add(rows, 1, out=rows)
        return rows.view(-1)[3:]

    graph, result = captured(run)
    assert torch.equal(buffer, torch.zeros(4, 3)), "a capture computes nothing"
    assert result.data_ptr() == buffer[2].data_ptr()
    for places in ([2, 0], [1, 1]):
        given.copy_(torch.tensor(places))
        buffer.zero_()
        graph.replay()
        found = buffer.clone()
        buffer.zero_()
        run()
        assert torch.equal(found, buffer)
    assert torch.equal(result, buffer[2:].flatten())


def test_nothing_is_there_before_the_first_replay() -> None:
    given = torch.ones(2)
    graph, result = captured(lambda: given * 3)
    assert result.tolist() == [POISON, POISON]
    graph.replay()
    assert result.tolist() == [3.0, 3.0]
    graph.poison()
    assert result.tolist() == [POISON, POISON]
    assert given.tolist() == [1.0, 1.0], "a buffer is not the graph's memory"


def test_the_hosts_decisions_stay() -> None:
    given, numbers = torch.ones(2), [1, 2]
    graph, result = captured(lambda: given * sum(numbers))
    numbers.append(3)
    graph.replay()
    assert result.tolist() == [3.0, 3.0]


def test_a_buffer_that_is_not_copied_in_is_seen() -> None:
    static, other = torch.zeros(2), torch.tensor([5.0, 6.0])
    graph, result = captured(lambda: static + other)
    static.copy_(torch.ones(2))  # the planted error: of two inputs one is copied
    poison([other])
    graph.replay()
    assert result.tolist() == [POISON + 1, POISON + 1]


def test_a_moved_weight_is_not_followed() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    graph, result = captured(lambda: layer(torch.ones(1, 2)))
    expected = layer.weight.data.sum(1)
    layer.weight.data = torch.zeros(2, 2)
    graph.replay()
    torch.testing.assert_close(result[0], expected)


MASK = torch.tensor([True, False, True])
NUMBERS = torch.arange(3)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: NUMBERS.sum().item(),
        lambda: NUMBERS.tolist(),
        lambda: NUMBERS.numpy(),
        lambda: NUMBERS.cpu(),
        lambda: int(NUMBERS[0]),
        lambda: "some" if MASK.any() else "none",
        lambda: NUMBERS[MASK],
        lambda: NUMBERS.clone().__setitem__(MASK, NUMBERS[:2]),
        lambda: NUMBERS.nonzero(),
        lambda: NUMBERS.unique(),
        lambda: torch.equal(NUMBERS, NUMBERS),
        lambda: NUMBERS.repeat_interleave(NUMBERS),
        lambda: NUMBERS.masked_fill(MASK, NUMBERS[0]),
        lambda: torch.tensor([1, 2]),
        lambda: NUMBERS.new_tensor(3),
        lambda: NUMBERS.clone().resize_(9),
    ],
)
def test_what_a_graph_cannot_record_is_refused_with_its_line(wait: Callable[[], object]) -> None:
    graph = CpuGraph()
    with pytest.raises(CaptureError, match=r"tests/test_cpu_graph\.py:\d+: "), graph.capture():
        wait()
    with pytest.raises(CaptureError, match="empty"):
        graph.replay()


def test_the_same_without_waiting_is_recorded() -> None:
    captured(lambda: NUMBERS.repeat_interleave(NUMBERS, output_size=3))
    captured(lambda: NUMBERS.masked_fill(MASK, 4))
    captured(lambda: torch.where(MASK, NUMBERS, 0))
    captured(lambda: NUMBERS[NUMBERS])
    captured(lambda: torch.full((2,), 3.0))


def test_a_refused_capture_puts_buffers_back() -> None:
    buffer = torch.zeros(2)
    with pytest.raises(CaptureError), CpuGraph().capture():
        buffer.add_(1).sum().item()
    assert buffer.tolist() == [0.0, 0.0]


def test_poison_is_finite_in_every_dtype() -> None:
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8]
    tensors = [torch.zeros(2, dtype=dtype) for dtype in kinds]
    poison({"some": tensors, "other": torch.zeros(1, dtype=torch.bool)})
    for tensor in tensors:
        assert tensor.double().isfinite().all()
        assert (tensor > 100).all()
