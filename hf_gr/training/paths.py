# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences of a catalogue as paths through its trie: the legal tokens at every position. Knows no model and no loss.

The writer of teacher data and its reader walk the same trie, so that values are stored without their tokens, once for
equal prefixes.

Axes: B batch, K sequences, L positions, S prefixes of a level (1 at level 0, else K), C children, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.torch.transition import Children, DeviceCatalogue, children, device_catalogue


@dataclass(frozen=True)
class PathLevel:
    """The prefixes of one length of a batch of sequences."""

    below: Children  # of every prefix
    is_first: Bool[Tensor, "batch prefixes"]  # whether it is a prefix, and no earlier sequence of the row has it, too
    owner: Int[Tensor, "batch prefixes"]  # the first sequence of the row with the same prefix
    chosen: Int[Tensor, "batch sequences"]  # the child with which each sequence continues; 0 if it has ended
    is_there: Bool[Tensor, "batch sequences"]  # whether it continues

    @property
    def stored(self) -> Bool[Tensor, "batch prefixes children"]:
        """The children whose log-probabilities are stored, once for equal prefixes."""
        return self.below.legal & self.is_first[..., None]

    def gather(self, log_probs: Float[Tensor, "batch prefixes vocab"]) -> Float[Tensor, "batch prefixes children"]:
        """The values of the children of every prefix; meaningless at illegal ones."""
        return log_probs.gather(-1, self.below.tokens)

    def restore(self, values: Float[Tensor, " stored"]) -> Float[Tensor, "batch prefixes children"]:
        """The inverse of `log_probs[level.stored]`, with equal prefixes filled in and 0 at illegal children."""
        stored = self.stored
        dense = torch.zeros(stored.shape, dtype=values.dtype, device=values.device).masked_scatter(stored, values)
        return dense.gather(1, self.owner[..., None].expand_as(dense))

    def of_chosen(self, dense: Float[Tensor, "batch prefixes children"]) -> Float[Tensor, "batch sequences"]:
        """The value of the child with which each sequence continues."""
        dense = dense.expand(-1, self.chosen.shape[1], -1)
        return dense.gather(-1, self.chosen[..., None])[..., 0]


def walk(paths: Int[Tensor, "batch sequences length"], catalogue: DeviceCatalogue) -> list[PathLevel]:
    """Follow sequences through the trie: one entry for every position.

    `paths` has tokens, and -1 after the end of a sequence and where there is none.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [5, 8], [6, 7]])
        >>> first, second = walk(torch.tensor([[[5, 7], [5, 8]]]), training_catalogue(index, torch.device("cpu")))
        >>> first.below.tokens.tolist(), second.below.tokens[second.stored].tolist(), second.owner.tolist()
        ([[[5, 6]]], [7, 8], [[0, 0]])
    """
    batch_size, num_paths, length = paths.shape
    states = torch.zeros((batch_size, 1), dtype=torch.long, device=paths.device)
    numbers = torch.arange(num_paths, device=paths.device)
    owner = torch.zeros_like(states)
    is_first = torch.ones_like(states, dtype=torch.bool)
    levels: list[PathLevel] = []
    for level in range(length):
        tokens = paths[..., level]
        if level:
            owner = (states[:, :, None] == states[:, None]).int().argmax(-1)
            is_first = (owner == numbers) & (tokens >= 0)
        below = children(states, catalogue, level=level)
        hit = below.legal & (below.tokens == tokens[..., None])
        chosen, is_there = hit.int().argmax(-1), hit.any(-1)
        levels.append(PathLevel(below, is_first, owner, chosen, is_there))
        beams = numbers.expand(batch_size, -1) if level else torch.zeros_like(chosen)
        states = torch.where(is_there, below.take(beams * below.shape[-1] + chosen)[1], catalogue.dead_state)
    return levels


def training_catalogue(index: ConstraintIndex | Snapshot, device: torch.device) -> DeviceCatalogue:
    """The living part of an index on a device, compact, which puts children in token order; or a compact snapshot."""
    snapshot = index if isinstance(index, Snapshot) else index.snapshot.compact()
    return device_catalogue(combine_rules([snapshot]), device)
