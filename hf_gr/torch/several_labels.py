# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Several labels in one answer, each at most once. Knows no model; a state is found from the tokens alone.

A used label is dead, and so is any prefix with nothing else alive under it: a node is alive while more labels are
alive below it than were used there. Rows are at different depths, so the trie is read without levels.

Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", whose processor lets a label repeat; the counts
are ours. Axes: X rows of T tokens, M labels of an answer, D tokens of a label, C children, U rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core.beam import Beams

from .children import Children
from .device_trie import DeviceTrie, on_device
from .transfers import to_device


@dataclass(frozen=True)
class LivingLabels:
    """How many labels are alive below each node of their trie; the node after its last stands for no prefix.

    Attributes:
        trie: the trie, read without levels.
        counts: by rule and node.
        eos_token_id: the end token.
    """

    trie: DeviceTrie
    counts: Int[Tensor, "rules nodes"]
    eos_token_id: int

    @property
    def nowhere(self) -> int:
        """The node that stands for no prefix."""
        return self.trie.num_nodes

    @property
    def max_length(self) -> int:
        """Tokens of the longest label, its end token included."""
        return len(self.trie.branching)


@dataclass(frozen=True)
class Answers:
    """The progress of answers.

    Attributes:
        node: the prefix of the label that is being written; no prefix for what cannot continue.
        used: by label of the answer, the leaf of each that is complete; no prefix for none.
        paths: by label and depth: the nodes of those.
        depth: tokens of the label that is being written.
        num_used: complete labels.
        in_separator: tokens of a separator that has begun and is not complete.
    """

    node: Int[Tensor, " rows"]
    used: Int[Tensor, "rows labels"]
    paths: Int[Tensor, "rows labels depths"]
    depth: Int[Tensor, " rows"]
    num_used: Int[Tensor, " rows"]
    in_separator: Int[Tensor, " rows"]


def living_labels(snapshots: Sequence[Snapshot], device: torch.device) -> LivingLabels:
    """Count what is alive for each snapshot in the trie that they share."""
    trie, eos_token_id = snapshots[0].trie, snapshots[0].eos_token_id
    assert eos_token_id is not None
    starts = trie.level_starts
    counts = np.zeros((len(snapshots), starts[-1] + 1), dtype=np.int64)
    leaves = np.arange(trie.num_sequences)
    for rule, snapshot in enumerate(snapshots):
        living = leaves if snapshot.alive is None else np.flatnonzero(snapshot.alive.leaf_flags())
        for level in range(trie.max_length, 0, -1):
            here = living[(living >= trie.leaf_starts[level - 1]) & (living < trie.leaf_starts[level])]
            counts[rule, trie.leaf_nodes(level, here) + starts[level]] += 1
            nodes = np.arange(starts[level + 1] - starts[level])
            parents = trie.fanouts[level - 1].parents(nodes) + starts[level - 1]
            np.add.at(counts[rule], parents, counts[rule, starts[level] : starts[level + 1]])
    return LivingLabels(on_device(trie, device), to_device(counts, device), eos_token_id)


def read_answers(
    tokens: Int[Tensor, "rows length"],
    living: LivingLabels,
    rules: Int[Tensor, " rows"],
    *,
    separator: Sequence[int],
    max_labels: int | None,
) -> Answers:
    """Split answers. Tokens below 0 are padding; `check_separator` ensured that there is only one way.

    All labels of all answers are walked at once: the time does not grow with the number of labels.
    """
    num_rows, length = tokens.shape
    size, device = len(separator), tokens.device
    parts = to_device(separator, device)
    given = tokens >= 0
    if length < size:
        tokens = torch.nn.functional.pad(tokens, (0, size - length), value=-1)
        length, given = size, tokens >= 0
    # Where separators begin: a token belongs to the label after all of those that ended before it.
    begins = torch.nn.functional.pad((tokens.unfold(1, size, 1) == parts).all(-1), (0, size - 1))
    begun = begins.cumsum(1)
    ended = torch.nn.functional.pad(begun, (size, 0))[:, :length]
    places = torch.arange(length, device=device)
    starts = torch.where(begins, places + size, 0).cummax(1).values
    starts = torch.nn.functional.pad(starts, (size, 0))[:, :length]
    num_complete = begun[:, -1]

    num_labels = length // (size + 1) + 1  # the most that so many tokens can hold
    width = living.max_length + size - 1  # a label, and a separator that has begun
    offsets = places - starts
    is_label = given & (begun == ended)
    fits = (offsets < width) & (ended < num_labels)
    slots = torch.where(is_label & fits, ended * width + offsets, num_labels * width)
    labels = torch.full((num_rows, num_labels * width + 1), -1, dtype=torch.long, device=device)
    labels = labels.scatter(1, slots, tokens)[:, :-1].view(num_rows, num_labels, width)
    fine = (fits | ~is_label).all(1)

    node = torch.zeros((num_rows, num_labels), dtype=torch.long, device=device)
    depth = torch.zeros_like(node)
    walking = torch.ones_like(node, dtype=torch.bool)
    paths = [node]
    for level in range(living.max_length):
        below = living.trie.follow(node, labels[..., level])
        walking = walking & (living.counts[rules[:, None], below] > 0)  # 0 for no prefix, too
        node = torch.where(walking, below, node)
        depth = depth + walking
        paths.append(node)
    rest = (labels >= 0).sum(-1) - depth
    leaf = living.trie.follow(node, torch.full_like(node, living.eos_token_id))

    # What is left of the last label is the beginning of a separator.
    number = torch.arange(num_labels, device=device)
    is_last = number == num_complete[:, None]
    expected = torch.nn.functional.pad(parts, (0, 1), value=-1)
    at = torch.arange(size, device=device)
    left = labels.gather(-1, (depth[..., None] + at).clamp(max=width - 1))
    is_beginning = ((left == expected[:-1]) | (at >= rest[..., None])).all(-1) & (rest < size)
    is_used = (number < num_complete[:, None]) | (is_last & (rest > 0))
    is_alive = (leaf != living.nowhere) & (living.counts[rules[:, None], leaf] > 0)
    fine &= (~is_used | (is_alive & torch.where(is_last, is_beginning, rest == 0))).all(1)
    used = torch.where(is_used, leaf, living.nowhere)
    num_used = is_used.sum(1)
    in_order = used.sort(1).values
    fine &= ((in_order[:, 1:] != in_order[:, :-1]) | (in_order[:, 1:] == living.nowhere)).all(1)
    most = living.counts[rules, 0] if max_labels is None else living.counts[rules, 0].clamp(max=max_labels)
    fine &= (num_used == 0) | (num_used < most)
    fine &= (num_complete < num_labels) & (tokens != living.eos_token_id).all(1)

    last = num_complete.clamp(max=num_labels - 1)[:, None]
    # Its leaf stands at the end of a used label's path.
    all_paths = torch.stack([*paths, node], dim=-1)
    ends = torch.where(is_used, leaf, all_paths.gather(-1, depth[..., None] + 1)[..., 0])
    all_paths = all_paths.scatter(-1, depth[..., None] + 1, ends[..., None])
    return Answers(
        node=torch.where(fine, node.gather(1, last)[:, 0], living.nowhere),
        used=used,
        paths=all_paths,
        depth=depth.gather(1, last)[:, 0],
        num_used=num_used,
        in_separator=rest.gather(1, last)[:, 0] * fine,
    )


def allowed_tokens(
    answers: Answers,
    living: LivingLabels,
    rules: Int[Tensor, " rows"],
    vocab_size: int,
    *,
    separator: Sequence[int],
    max_labels: int | None,
) -> Bool[Tensor, "rows vocab"]:
    """The tokens by which answers may continue; none for those that are finished or invalid."""
    tokens, legal = next_tokens(answers, living, rules, separator=separator, max_labels=max_labels)
    allowed = torch.zeros((len(tokens), vocab_size + 1), dtype=torch.bool, device=tokens.device)
    return allowed.scatter(1, torch.where(legal, tokens, vocab_size), True)[:, :-1]


def next_tokens(
    answers: Answers,
    living: LivingLabels,
    rules: Int[Tensor, " rows"],
    *,
    separator: Sequence[int],
    max_labels: int | None,
) -> tuple[Int[Tensor, "rows children"], Bool[Tensor, "rows children"]]:
    """Tokens, and whether answers may continue by them: those of labels, then those of the separator.

    A legal token is there once: where a label may end, no label continues with the separator's first token.
    """
    node, device = answers.node, answers.node.device
    flat, most_children = living.trie.flat, max(living.trie.branching)
    first, end = flat.first_child[node], flat.first_child[node + 1]
    child = first[:, None] + torch.arange(most_children, device=device)
    is_child = child < end[:, None]
    child = child.clamp(max=living.nowhere)
    left = torch.nn.functional.pad(living.counts[rules[:, None], child] * is_child, (0, 1))
    # Used labels below this node count against the child on their way; in the last column, against none.
    depth = (answers.depth + 1)[:, None, None].expand(-1, answers.used.shape[1], 1)
    on_the_way = answers.paths.gather(2, depth)[..., 0]
    counts = (answers.used != living.nowhere) & (on_the_way >= first[:, None]) & (on_the_way < end[:, None])
    slots = torch.where(counts, on_the_way - first[:, None], most_children)
    left = left.scatter_add(1, slots, torch.full_like(slots, -1))[:, :-1]
    legal = is_child & (left > 0) & (answers.in_separator == 0)[:, None]

    tokens = torch.where(legal, flat.tokens[child], 0).long()
    most = living.counts[rules, 0] if max_labels is None else living.counts[rules, 0].clamp(max=max_labels)
    may_end = (legal & (tokens == living.eos_token_id)).any(1)
    places = torch.arange(len(separator), device=device)
    goes_on = (places > 0) & (answers.in_separator[:, None] == places) & (node != living.nowhere)[:, None]
    begins = (places == 0) & (may_end & (answers.num_used + 1 < most))[:, None]
    parts = to_device(separator, device).expand(len(node), -1)
    return torch.cat([tokens, parts], dim=1), torch.cat([legal, goes_on | begins], dim=1)


# The states of beams: an answer is found from its tokens alone.
GOES_ON, IS_COMPLETE, IS_DEAD = range(3)


@dataclass(frozen=True)
class AnswerChildren(Children):
    """What may follow each beam of answers.

    Attributes:
        tokens: see `Children`.
        legal: see `Children`.
        eos_token_id: the token that completes an answer.
    """

    tokens: Int[Tensor, "batch beams children"]
    legal: Bool[Tensor, "batch beams children"]
    eos_token_id: int

    def take(
        self, beams: Int[Tensor, "batch chosen"], children: Int[Tensor, "batch chosen"]
    ) -> tuple[Int[Tensor, "batch chosen"], Int[Tensor, "batch chosen"]]:
        """See `Children.take`."""
        tokens = self._take_tokens(beams, children)
        return tokens, (tokens == self.eos_token_id).long()


@dataclass(frozen=True)
class AnswerCatalogue:
    """Answers of several labels as what may be generated for a batch: it stands where a `DeviceCatalogue` does.

    Attributes:
        living: the labels.
        rules: of each request.
        separator: its tokens.
        max_labels: the most labels of an answer; None for as many as there are.
        max_length: the most tokens of an answer.
    """

    living: LivingLabels
    rules: Int[Tensor, " batch"]
    separator: tuple[int, ...]
    max_labels: int | None
    max_length: int

    is_ragged = True
    dead_state = IS_DEAD

    @property
    def device(self) -> torch.device:
        """Where its arrays are."""
        return self.rules.device

    @property
    def has_leaves(self) -> tuple[bool, ...]:
        """By level: whether an answer can end there."""
        return (True,) * self.max_length

    def children(self, beams: Beams, *, level: int) -> AnswerChildren:
        """What may follow the tokens of every beam."""
        states, sequences = beams.states, beams.sequences
        rules = self.rules.repeat_interleave(states.shape[1])
        how: dict[str, Any] = {"separator": self.separator, "max_labels": self.max_labels}
        answers = read_answers(sequences.flatten(0, 1), self.living, rules, **how)
        tokens, legal = next_tokens(answers, self.living, rules, **how)
        legal = legal.view(*states.shape, -1) & (states == GOES_ON)[..., None]
        return AnswerChildren(tokens.view(legal.shape), legal, self.living.eos_token_id)

    def is_leaf(self, states: Int[Tensor, "batch beams"], *, level: int) -> Bool[Tensor, "batch beams"]:
        """Whether an answer has ended: also one that has as many tokens as it may have."""
        return (states != GOES_ON) | (level == self.max_length)
