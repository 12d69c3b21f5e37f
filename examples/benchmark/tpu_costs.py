# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What compilers count in the programs of `tpu_programs.py`: operations, bytes and memory. Runs nothing.

XLA counts the body of a loop once, and of several branches the most expensive one. So a program is counted in parts:

- layers: with one layer and with two; every further one adds the difference, whether they are a loop or not;
- forwards: the prompt's alone, which is a program of its own; what the whole adds to that is one forward with its
  decisions, and a call has as many as it says: `speculation.target_forwards`.

The decisions of all levels are counted in every forward, as branches are; a forward takes one, or what is drafted.

Axes: B batch, P prompt, K beams, L tokens of an item.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import roofline
from tpu_programs import Bench, Program, Size, Taken

# Peaks of one chip, in the bf16 of its matrix units: cloud.google.com/tpu/docs/v5e and v6e.
CHIPS = {"v5e": roofline.Device(819e9, 197e12), "v6e": roofline.Device(1638e9, 918e12)}


@dataclass(frozen=True)
class Cost:
    """Of one program.

    Attributes:
        flops: operations.
        num_bytes: what operations read and write, as if no memory but the device's main one kept anything.
    """

    flops: float
    num_bytes: float

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """This, and some times another."""
        return Cost(self.flops + times * other.flops, self.num_bytes + times * other.num_bytes)

    @classmethod
    def of(cls, compiled: Any) -> Cost:
        """Of a compiled program, by its own analysis."""
        found = compiled.cost_analysis()
        return cls(found["flops"], found["bytes accessed"])


@dataclass(frozen=True)
class Counted:
    """A program in its parts.

    Attributes:
        prefill: of the prompts' forward.
        forward: of one more forward, and the decisions.
        temporary_bytes: memory beside arguments and results, with one layer and one more for each other.
        compile_seconds: of the whole program with two layers.
    """

    prefill: Cost
    forward: Cost
    temporary_bytes: float
    compile_seconds: float

    def call(self, forwards: int) -> Cost:
        """Of a call with so many forwards after the prompt's."""
        return self.prefill.plus(self.forward, forwards)


def count(size: Size, program: Program, *, dtype: str, devices: Sequence[Any] | None = None) -> Counted:
    """Compile a program, with few layers, and count.

    Args:
        size: of the model and the call.
        program: which.
        dtype: of the model.
        devices: what to compile for; None for what is here.
    """
    prefills, wholes, memory, seconds = [], [], [], 0.0
    for layers in (1, 2):
        taken = Bench(replace(size, shape=replace(size.shape, layers=layers)), dtype=dtype).take(program)
        began = time.perf_counter()
        whole = taken.compiled(devices)
        seconds = time.perf_counter() - began
        wholes.append(Cost.of(whole))
        memory.append(whole.memory_analysis().temp_size_in_bytes)
        prefills.append(Cost.of(_prefill(taken).compiled(devices)))
    more = size.shape.layers - 1
    prefill, all_of_it = (one.plus(two.plus(one, -1), more) for one, two in (prefills, wholes))
    temporary = memory[0] + more * (memory[1] - memory[0])
    return Counted(prefill, all_of_it.plus(prefill, -1), temporary, seconds)


def _prefill(taken: Taken) -> Taken:
    """The prompts' forward of a program, alone."""
    scorer, params, _, prompt = taken.arguments[:4]
    return Taken(jax.jit(lambda params, prompt: scorer.prefill(params, prompt)), (params, prompt))


def needed(size: Size) -> Cost:
    """What plain decoding cannot do without, by `roofline.limit`."""
    return Cost(_limit(size, roofline.Device(float("inf"), 1.0)), _limit(size, roofline.Device(1.0, float("inf"))))


def least_seconds(size: Size, device: roofline.Device) -> float:
    """The least time of plain decoding."""
    return _limit(size, device)


def _limit(size: Size, device: roofline.Device) -> float:
    how = {"batch": size.batch, "prompt": size.prompt, "beams": size.beams, "length": size.length}
    return roofline.limit(size.shape, device, **how).total
