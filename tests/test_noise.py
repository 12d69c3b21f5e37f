# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The noise of samples, against plain integers; and the seeds of a call."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from reference import reference_gumbel, reference_uniform

from hf_gr.core.beam import Beams, paths_of
from hf_gr.flax import noise as in_flax
from hf_gr.flax import ops as flax_ops
from hf_gr.flax.transition import Children as FlaxChildren
from hf_gr.generation.seeds import row_seeds
from hf_gr.torch import noise as noise_module
from hf_gr.torch import ops
from hf_gr.torch.noise import DRAFTS, PASSES, Noise
from hf_gr.torch.transition import Children

pytestmark = pytest.mark.shapes

NOISE_TOL = 2e-6  # fp32: two logarithms


def test_an_integer_is_the_first_prompts_seed_and_splitmix_gives_the_others() -> None:
    # The outputs that the authors of SplitMix64 publish for this seed, counted from 0.
    published = {1: 3203168211198807973, 4: 16408922859458223821}
    seeds = row_seeds(1234567, 5).tolist()
    assert seeds[0] == 1234567
    assert {number: seeds[number] for number in published} == {n: output >> 1 for n, output in published.items()}
    assert row_seeds(1234567, 2).tolist() == seeds[:2]
    assert len(set(row_seeds(7, 10_000).tolist())) == 10_000


@pytest.mark.parametrize("given", [np.array([7, 8], np.uint8), torch.tensor([-1, 2**63 - 1]), range(7, 9)], ids=str)
def test_integers_are_the_prompts_own(given: Any) -> None:
    assert row_seeds(given, 2).tolist() == [int(seed) for seed in given]
    assert row_seeds(given[1], 1).tolist() == [int(given[1])]
    assert row_seeds(given[0], 3)[1:].min() >= 0


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (7.0, "seed=7.0, expected an integer"),
        ({7, 8}, "seed={8, 7}, expected an integer"),
        ([True, 8], r"seed\[0\]=True, expected an integer"),
        ([7, 8, 9], "seed has 3 entries, expected 2, one for each prompt"),
        ([0, -(2**63) - 1], r"seed\[1\]=-9223372036854775809, expected"),
        (np.array([2**63, 0], np.uint64), r"seed\[0\]=9223372036854775808, expected"),
        (torch.tensor([1.0, 2.0]), r"seed is \[2\] of float32, expected integers"),
        (np.zeros((2, 1), int), r"seed is \[2, 1\] of int64, expected integers"),
    ],
    ids=str,
)
def test_bad_seeds_are_refused(seed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_seeds(seed, 2)


def noise(
    seeds: Any, sequences: Any, tokens: Any, *, kind: str = "uniform", stream: int = 0, independent: bool = False
) -> torch.Tensor:
    """`[B, K, C]`."""
    made, sequences, tokens = (torch.as_tensor(given) for given in (seeds, sequences, tokens))
    made = Noise(made).stream(stream) if stream else Noise(made)
    none = torch.zeros(sequences.shape[:2])
    beams = Beams(ops, sequences, sequences, none, none.long())
    children = Children(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens))
    return getattr(made, kind)(beams, children, paths=paths_of(beams) if independent else None)


def noise_in_flax(
    seeds: Any, sequences: Any, tokens: Any, *, kind: str = "uniform", stream: int = 0, independent: bool = False
) -> Any:
    made, none = in_flax.Noise.of(np.array(seeds)), jnp.zeros(sequences.shape[:2], jnp.int32)
    made = made.stream(stream) if stream else made
    beams = Beams(flax_ops, *[jnp.asarray(sequences, jnp.int32)] * 2, none * 0.0, none)
    children = FlaxChildren(jnp.asarray(tokens, jnp.int32), none)
    return getattr(made, kind)(beams, children, paths=paths_of(beams) if independent else None)


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("stream", [0, DRAFTS, PASSES])
@pytest.mark.parametrize("independent", [False, True])
def test_noise_is_that_of_plain_integers_and_in_flax_to_the_bit(independent: bool, stream: int, length: int) -> None:
    rng = np.random.default_rng([length, stream])
    seeds = [0, 7, -1, 2**63 - 1, -(2**63)]
    sequences = rng.integers(0, 2**31, size=(5, 3, length))
    tokens = np.concatenate([rng.integers(0, 2**31, size=(5, 3, 6)), np.zeros((5, 3, 1), int)], axis=-1)
    found = noise(seeds, sequences, tokens, stream=stream, independent=independent)
    loud = noise(seeds, sequences, tokens, kind="gumbel", stream=stream, independent=independent)
    assert np.array_equal(noise_in_flax(seeds, sequences, tokens, stream=stream, independent=independent), found)
    of_flax = noise_in_flax(seeds, sequences, tokens, kind="gumbel", stream=stream, independent=independent)
    np.testing.assert_allclose(of_flax, loud, atol=NOISE_TOL, rtol=NOISE_TOL)
    for place in np.ndindex(*tokens.shape):
        row, path = place[:2]
        who = (seeds[row], sequences[row, path].tolist(), int(tokens[place]))
        how = {"path": path if independent else None, "stream": stream}
        assert float(found[place]) == pytest.approx(reference_uniform(*who, **how), rel=NOISE_TOL)
        assert float(loud[place]) == pytest.approx(reference_gumbel(*who, **how), rel=NOISE_TOL, abs=NOISE_TOL)


def test_the_largest_and_the_smallest_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[[0, 1, -1, -(2**31), 2**31 - 1]]]).int()
    uniform = noise_module._to_uniform(extremes)
    assert uniform.flatten().tolist() == pytest.approx([2.0**-33, 1.5 * 2.0**-32, 1 - 2.0**-24, 0.5, 0.5], rel=1e-6)
    assert 0 < float(uniform.min()) <= float(uniform.max()) < 1
    monkeypatch.setattr(noise_module, "_to_uniform", lambda bits: uniform.clone())
    loud = noise([0], torch.zeros((1, 1, 0)).long(), torch.zeros((1, 1, 5)).long(), kind="gumbel")
    assert bool(loud.isfinite().all())
    assert float(loud.max()) == pytest.approx(22.87, abs=0.01)
    assert float(loud.min()) == pytest.approx(-2.81, abs=0.01)
    assert in_flax._to_uniform(jnp.array([0, 2**32 - 1], jnp.uint32)).tolist() == [2.0**-33, 1 - 2.0**-24]


def test_tokens_are_not_written_to() -> None:
    tokens = torch.arange(6).int().view(1, 1, 6)
    noise([7], torch.zeros((1, 1, 2)).long(), tokens)
    assert tokens.flatten().tolist() == list(range(6))
