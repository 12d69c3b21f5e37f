# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The noise of candidates, a hash of a prompt's seed and the candidate's tokens. Knows no generator, no trie.

A candidate's noise is always the same: for the target and its draft, in a batch and alone, before and after an update
of the catalogue, in PyTorch and Flax. `reference_gumbel` of `tests/reference.py` is the same in plain integers.

A prefix has 64 bits: those of the prefix before it seed SplitMix64, of which its last token picks an output. A
candidate has 32: both halves of those of its prefix, and its token, through an affine map and a mixer. That is cheaper
than a stream of draws; threefry (20 rounds) would cost 15 times as much on prefixes, and 5 times as much on
candidates.

Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators (figure 17, with Stafford's mix 13);
for the mixer, https://github.com/skeeto/hash-prospector/issues/19 (bias 0.107).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.core.beam import Beams

from .transition import Children

# Streams; the target's own is 0. A sample drawn by a relaxed draft, and whether it passes, must not depend on each
# other, or on what the target draws instead.
DRAFTS, PASSES = 1, 2

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
LARGEST = 1 - 2.0**-24  # below 1 in fp32


@dataclass(frozen=True)
class Noise:
    """The source of all random draws of a call: the seeds of every prompt."""

    seeds: Int[Tensor, " batch"]

    def stream(self, number: int) -> Noise:
        """Noise for another purpose, independent of this one; `number` is at least 1."""
        return Noise(_fold(self.seeds, torch.full_like(self.seeds, number)))

    def gumbel(
        self, beams: Beams, candidates: Children, *, paths: Int[Tensor, "batch beams"] | None = None
    ) -> Float[Tensor, "batch beams children"]:
        """Gumbel noise: the k largest of `scores + noise` are k draws without replacement from `softmax(scores)`.

        Equal prefixes whose `paths` have different numbers get different noise: such paths do not compete.
        """
        return _gumbel(self.uniform(beams, candidates, paths=paths))

    def gumbel_below(
        self,
        sequences: Int[Tensor, "batch prefixes length"],  # anything after the tokens of each
        depths: Int[Tensor, "batch prefixes"],
        tokens: Int[Tensor, "batch prefixes branches"],
    ) -> Float[Tensor, "batch prefixes branches"]:
        """Gumbel noise of what follows prefixes of several lengths: the same as theirs in `gumbel`."""
        return _gumbel(_uniform(self._of_prefixes(sequences, depths=depths), tokens))

    def uniform(
        self, beams: Beams, candidates: Children, *, paths: Int[Tensor, "batch beams"] | None = None
    ) -> Float[Tensor, "batch beams children"]:
        """Noise between 0 and 1, never 0 or 1; the arguments are those of `gumbel`."""
        return _uniform(self._of_prefixes(beams.sequences, paths=paths), candidates.tokens)

    def _of_prefixes(
        self,
        sequences: Int[Tensor, "batch beams length"],
        *,
        paths: Int[Tensor, "batch beams"] | None = None,
        depths: Int[Tensor, "batch beams"] | None = None,  # None for all columns
    ) -> Int[Tensor, "batch beams"]:
        """64 bits for every prefix."""
        bits = _fold(self.seeds, torch.zeros_like(self.seeds))[:, None].expand(sequences.shape[:2])
        if paths is not None:  # tokens are not negative: no path is mistaken for one
            bits = _fold(bits, -2 - paths)
        for place, tokens in enumerate(sequences.unbind(dim=-1)):
            bits = _fold(bits, tokens) if depths is None else torch.where(depths > place, _fold(bits, tokens), bits)
        return bits


def _gumbel(uniform: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    # Precise where it is large, which is where it decides: a small exponential variable has a small `uniform`.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _uniform(
    prefixes: Int[Tensor, "batch beams"], tokens: Int[Tensor, "batch beams children"]
) -> Float[Tensor, "batch beams children"]:
    """The noise of candidates, by the bits of their prefixes."""
    prefixes = prefixes[..., None]
    bits = torch.addcmul(prefixes.int(), tokens.int(), (prefixes >> 32).int() | 1)
    bits = _xor_shifted(bits, 16) * 0x21F0AAAD
    bits = _xor_shifted(bits, 15) * 0x735A2D97
    return _to_uniform(_xor_shifted(bits, 15))


def _fold(bits: Int[Tensor, "*shape"], number: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Output `number`, counted from 0, of SplitMix64 that begins with `bits`."""
    bits = bits + (number + 1) * GOLDEN
    bits = _xor_shifted(bits, 30) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = _xor_shifted(bits, 27) * (0x94D049BB133111EB - 2**64)
    return _xor_shifted(bits, 31)


def _to_uniform(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return bits.view(torch.uint32).float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST)


def _xor_shifted(bits: Int[Tensor, "*shape"], shift: int) -> Int[Tensor, "*shape"]:
    """`bits ^ (bits >>> shift)`: torch shifts copies of the sign in."""
    return bits ^ ((bits >> shift) & (2 ** (torch.iinfo(bits.dtype).bits - shift) - 1))
