# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What keeps a lowered program off a TPU, or slows it down there."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.mlir import ir

# Custom calls that the TPU's compiler knows; all others are code of a CPU or GPU, or of the host.
CUSTOM_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
TO_HOSTS = {"stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"}
WIDE = {"f64", "i64", "ui64", "complex<f64>"}


def what_a_tpu_lacks(exported: Any) -> set[str]:
    """By operation, empty for a program as it should be.

    Args:
        exported: from `jax.export`.
    """
    found: set[str] = set()

    def look(operation: Any) -> Any:
        name = operation.name
        if name in TO_HOSTS:
            found.add(name)
        if name == "stablehlo.custom_call":
            found.update({str(operation.attributes["call_target_name"].value)} - CUSTOM_CALLS)
        for result in operation.results:
            kind = result.type
            if not isinstance(kind, ir.RankedTensorType):
                continue
            if not kind.has_static_shape:
                found.add(f"{name} of unknown size")
            if str(kind.element_type) in WIDE:
                found.add(f"{name} of 64 bits")
        return ir.WalkResult.ADVANCE

    with jax.interpreters.mlir.make_ir_context():
        ir.Module.parse(exported.mlir_module()).operation.walk(look)
    return found
