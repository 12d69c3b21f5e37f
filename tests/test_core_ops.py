# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Each backend's operations against NumPy's, which say what they mean."""

from collections.abc import Callable
from inspect import getmembers, isfunction
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hf_gr.core import ops
from hf_gr.flax import ops as flax_ops
from hf_gr.torch import ops as torch_ops

RNG = np.random.default_rng(0)
VALUES = RNG.permutation(24).reshape(2, 3, 4).astype(np.float32) - 9.0
KEYS = RNG.permutation(24).reshape(3, 8).astype(np.float32)
FLAGS = RNG.random((3, 8)) < 0.4
PLACES = RNG.permuted(np.tile(np.arange(8), (3, 1)), axis=1)[:, :5]
ORDER = RNG.permuted(np.tile(np.arange(8), (3, 1)), axis=1)
DEAD = np.where(FLAGS, KEYS, np.float32(-np.inf))
CASES: dict[str, list[tuple[Any, ...]]] = {
    "full": [((2, 3), 7, KEYS), ((2, 0), -np.inf, KEYS), ((2,), True, KEYS)],
    "arange": [(5, KEYS)],
    "expand": [(np.arange(3), (2, 3)), (KEYS[:, :1], (3, 4))],
    "where": [(FLAGS, KEYS, -KEYS), (FLAGS[..., None], KEYS[..., None], VALUES[:1, :1, :1])],
    "fill": [(KEYS, FLAGS, -np.inf), (PLACES, FLAGS[:, :5], 9)],
    "along": [
        (KEYS, PLACES),
        (VALUES, PLACES[:2] % 3),
        (VALUES[..., :0], PLACES[:2] % 3),
        (VALUES > 0, PLACES[:2] % 3),
    ],
    "pick": [(VALUES, PLACES[:2, :3] % 4)],
    "concat": [([KEYS, DEAD], 1), ([VALUES, VALUES], -1)],
    "pad": [(KEYS, 2, 0.5), (PLACES, 1, -1), (VALUES, 0, 0.0)],
    "topk": [(KEYS, 1), (KEYS, 8)],
    "topk_in_order": [(np.round(KEYS / 9), ORDER, 3), (np.where(FLAGS, KEYS * 0, DEAD), ORDER, 8)],
    "argmax": [(KEYS,), (FLAGS,), (VALUES,)],
    "argsort": [(FLAGS,), (FLAGS.cumsum(1) % 3,)],
    "put": [(KEYS, PLACES, -np.inf)],
    "smallest": [(KEYS,), (DEAD,)],
    "largest": [(KEYS,), (DEAD,)],
    "log_softmax": [(KEYS,), (DEAD,)],
    "exp": [(DEAD,)],
    "log": [(np.abs(KEYS),), (np.zeros(3, np.float32),)],
}


@pytest.mark.parametrize(
    ("module", "to_array"), [(torch_ops, torch.from_numpy), (flax_ops, jnp.asarray)], ids=["torch", "flax"]
)
@pytest.mark.parametrize("name", CASES)
def test_operations_mean_what_numpys_do(module: ModuleType, to_array: Callable[[Any], Any], name: str) -> None:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        return to_array(value.copy()) if isinstance(value, np.ndarray) else value

    for case in CASES[name]:
        expected, found = getattr(ops, name)(*case), getattr(module, name)(*map(moved, case))
        for mine, other in zip(expected, found, strict=True) if "topk" in name else [(expected, np.asarray(found))]:
            assert np.asarray(other).dtype.kind == mine.dtype.kind
            assert np.asarray(other).shape == mine.shape
            np.testing.assert_allclose(np.asarray(other), mine, rtol=1e-6, atol=1e-6)


def test_every_operation_is_tested() -> None:
    assert set(CASES) == {name for name, _ in getmembers(ops, isfunction)}
