# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Noise in Flax: bit for bit that of PyTorch, which is that of plain integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_noise import noise as of_torch

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from hf_gr.core.beam import Beams, paths_of  # noqa: E402
from hf_gr.flax import noise as noise_module  # noqa: E402
from hf_gr.flax import ops  # noqa: E402
from hf_gr.flax.noise import Noise  # noqa: E402
from hf_gr.flax.transition import Children  # noqa: E402
from hf_gr.torch import noise as torch_noise  # noqa: E402

NOISE_TOL = 2e-6  # fp32: two logarithms
SEEDS = np.array([0, 7, -1, 2**63 - 1, -(2**63)])


def both(*, length: int, independent: bool, stream: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """The noise of random candidates in Flax and in PyTorch: uniform and Gumbel."""
    rng = np.random.default_rng(length)
    sequences = rng.integers(0, 2**31 - 1, size=(len(SEEDS), 3, length))
    tokens = rng.integers(0, 2**31 - 1, size=(len(SEEDS), 3, 40))
    nothing = np.zeros(sequences.shape[:2], np.int32)
    beams = Beams(ops, jnp.asarray(sequences, jnp.int32), jnp.asarray(sequences, jnp.int32), nothing * 0.0, nothing)
    children = Children(jnp.asarray(tokens, jnp.int32), jnp.asarray(nothing))

    @jax.jit
    def ours(noise: Noise) -> Any:
        paths = paths_of(beams) if independent else None
        noise = noise.stream(stream) if stream else noise
        return [getattr(noise, kind)(beams, children, paths=paths) for kind in ("uniform", "gumbel")]

    how = {"stream": stream, "independent": independent}
    theirs = [of_torch(SEEDS, sequences, tokens, kind=kind, **how).numpy() for kind in ("uniform", "gumbel")]
    return list(zip(map(np.asarray, ours(Noise.of(SEEDS))), theirs, strict=True))


@pytest.mark.parametrize(("length", "independent"), [(0, False), (3, False), (2, True)])
def test_noise_is_that_of_the_other_side(length: int, independent: bool) -> None:
    uniform, gumbel = both(length=length, independent=independent)
    assert np.array_equal(*uniform)
    np.testing.assert_allclose(*gumbel, atol=NOISE_TOL, rtol=NOISE_TOL)


def test_streams_are_those_of_the_other_side() -> None:
    assert (noise_module.DRAFTS, noise_module.PASSES) == (torch_noise.DRAFTS, torch_noise.PASSES)
    found = [both(length=2, independent=False, stream=number)[0] for number in (0, 1, 2)]
    for uniform, expected in found:
        assert np.array_equal(uniform, expected)
    assert len({uniform.tobytes() for uniform, _ in found}) == 3
    outside = np.asarray(Noise.of(SEEDS).stream(1).seeds)  # not in a program
    theirs = torch_noise.Noise(torch.from_numpy(SEEDS)).stream(1).seeds.numpy().view(np.uint64)
    assert np.array_equal(outside, np.stack([theirs >> 32, theirs & (2**32 - 1)], axis=1))


def test_the_largest_and_the_smallest_noise_is_finite() -> None:
    uniform = noise_module._to_uniform(jnp.asarray([0, 2**32 - 1], jnp.uint32))
    assert uniform.tolist() == [2.0**-33, 1 - 2.0**-24]
