# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The noise of candidates, a hash of a prompt's seed and the candidate's tokens: that of `hf_gr.torch.noise`.

JAX has 64-bit integers only where a process wants them everywhere: here they are pairs of 32 bits, high half first.

Axes: B batch, K beams, C children.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from hf_gr.core.beam import Beams

from .arrays import HostOrDevice
from .transition import Children

# Streams, as in `hf_gr.torch.noise`; the target's own is 0.
DRAFTS, PASSES = 1, 2

GOLDEN = 0x9E3779B97F4A7C15
LARGEST = 1 - 2.0**-24  # below 1 in fp32
HALF = 2**16 - 1

Bits = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noise:
    """The source of all random draws of a call."""

    seeds: UInt32[HostOrDevice, "batch 2"]  # of every prompt, in halves

    @classmethod
    def of(cls, seeds: npt.NDArray[np.int64]) -> Noise:
        """The noise of prompts with seeds `[B]`."""
        bits = seeds.view(np.uint64)
        return cls(np.stack([bits >> np.uint64(32), bits & np.uint64(2**32 - 1)], axis=-1).astype(np.uint32))

    def stream(self, number: int) -> Noise:
        """Noise for another purpose, independent of this one; `number` is at least 1."""
        high, low = jnp.asarray(self.seeds).T
        return Noise(jnp.stack(_fold((high, low), jnp.int32(number)), axis=-1))

    def gumbel(
        self, beams: Beams, candidates: Children, *, paths: Int[Array, "batch beams"] | None = None
    ) -> Float[Array, "batch beams children"]:
        """Gumbel noise: the k largest of `scores + noise` are k draws without replacement from `softmax(scores)`.

        Equal prefixes of different `paths`, which do not compete, get different noise.
        """
        return _gumbel(self.uniform(beams, candidates, paths=paths))

    def gumbel_below(
        self,
        sequences: Int[Array, "batch prefixes length"],  # anything after the tokens of each
        depths: Int[Array, "batch prefixes"],
        tokens: Int[Array, "batch prefixes branches"],
    ) -> Float[Array, "batch prefixes branches"]:
        """Gumbel noise of what follows prefixes of several lengths: the same as theirs in `gumbel`."""
        return _gumbel(_uniform(self._of_prefixes(sequences, depths=depths), tokens))

    def uniform(
        self, beams: Beams, candidates: Children, *, paths: Int[Array, "batch beams"] | None = None
    ) -> Float[Array, "batch beams children"]:
        """Noise between 0 and 1, never 0 or 1; the arguments are those of `gumbel`."""
        return _uniform(self._of_prefixes(beams.sequences, paths=paths), candidates.tokens)

    def _of_prefixes(
        self,
        sequences: Int[Array, "batch beams length"],
        *,
        paths: Int[Array, "batch beams"] | None = None,
        depths: Int[Array, "batch beams"] | None = None,  # None for all columns
    ) -> Bits:
        """64 bits for every prefix, `[B, K]`."""
        batch_size, num_beams, length = sequences.shape
        numbers = [jnp.zeros((1, batch_size, num_beams), jnp.int32), jnp.moveaxis(sequences, -1, 0)]
        if paths is not None:  # tokens are not negative: no path is mistaken for one
            numbers.insert(1, -2 - paths[None])
        halves = jnp.broadcast_to(jnp.asarray(self.seeds).T[..., None], (2, batch_size, num_beams))
        number = jnp.concatenate(numbers)
        is_there = jnp.ones((len(number), 1, 1), dtype=bool)
        if depths is not None:
            is_there = jnp.arange(-1, length, dtype=jnp.int32)[:, None, None] < depths

        def fold(bits: Bits, step: tuple[Array, Array]) -> tuple[Bits, None]:
            return jax.tree.map(partial(jnp.where, step[1]), _fold(bits, step[0]), bits), None

        # A loop is compiled once, however long the prefixes are.
        return lax.scan(fold, tuple(halves), (number, is_there))[0]


def _gumbel(uniform: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    # Precise where it is large, which is where it decides: a small exponential variable has a small `uniform`.
    return -jnp.log(-jnp.log1p(-uniform))


def _uniform(prefixes: Bits, tokens: Int[Array, "batch beams children"]) -> Float[Array, "batch beams children"]:
    """The noise of candidates, by the bits of their prefixes."""
    high, low = (half[..., None] for half in prefixes)
    bits = low + tokens.astype(jnp.uint32) * (high | np.uint32(1))
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x735A2D97)
    return _to_uniform(bits ^ (bits >> np.uint32(15)))


def _fold(bits: Bits, number: Int[Array, "..."]) -> Bits:
    """Output `number`, counted from 0, of SplitMix64 that begins with `bits`."""
    steps = number + 1
    high, low = _times((lax.shift_right_arithmetic(steps, 31).astype(jnp.uint32), steps.astype(jnp.uint32)), GOLDEN)
    low = low + bits[1]
    bits = high + bits[0] + (low < bits[1]).astype(jnp.uint32), low
    bits = _times(_xor_shifted(bits, 30), 0xBF58476D1CE4E5B9)
    bits = _times(_xor_shifted(bits, 27), 0x94D049BB133111EB)
    return _xor_shifted(bits, 31)


def _times(bits: Bits, factor: int) -> Bits:
    """The lower 64 bits of a product."""
    (high, low), (factor_high, factor_low) = bits, map(np.uint32, divmod(factor, 2**32))
    # The upper half of `low * factor_low`, by 16 bits.
    least, most, half = low & HALF, low >> 16, np.uint32(factor_low & HALF)
    first = least * half
    second = most * half + (first >> 16)
    third = least * (factor_low >> 16) + (second & HALF)
    carried = most * (factor_low >> 16) + (second >> 16) + (third >> 16)
    return carried + high * factor_low + low * factor_high, low * factor_low


def _xor_shifted(bits: Bits, shift: int) -> Bits:
    """`bits ^ (bits >>> shift)`, for shifts below 32."""
    high, low = bits
    return high ^ (high >> shift), low ^ ((low >> shift) | (high << (32 - shift)))


def _to_uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, LARGEST)
