# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Best-first search: the best items of a whole catalogue, and how many of them are proven. Knows no model.

A prefix is at least as probable as every item below it: terms of a score are log-probabilities, which are never
positive. So prefixes are scored best first, some of every row in one forward, and a row is done once no prefix that is
left can hold a better item than the worst of those to return. What was left, or never fitted, bounds what was missed.

Axes: B batch, N prefixes, M of them scored in one forward, C children, L tokens of the longest sequence, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float, Int

from .beam import DEAD, margin, num_above
from .ops import Array

ROOT, ILLEGAL = -2, -1  # stand for tokens where noise is drawn: for the beginning, and for all that are illegal


@dataclass(frozen=True)
class Prefixes:
    """Some prefixes or complete sequences of every row; a key of `-inf` stands for none.

    Facts are one array, which is gathered at once: the trie node, the number of tokens, those tokens with room for the
    longest sequence, and the slots where the keys of all shorter prefixes of it are, the longest last.
    """

    ops: Any  # of the backend that made the arrays
    keys: Float[Array, "batch prefixes"]  # what no item below one exceeds; of an item its own, by which they rank
    scores: Float[Array, "batch prefixes"]  # sums of log-probabilities
    facts: Int[Array, "batch prefixes facts"]
    max_length: int  # L

    @classmethod
    def none(cls, ops: Any, like: Array, *, batch_size: int, number: int, max_length: int, no_slot: int) -> Prefixes:
        """No prefixes; each is the root, of score 0."""
        shape = batch_size, number
        slots = ops.full((*shape, max(max_length - 1, 0)), no_slot, like)
        facts = ops.concat([ops.full((*shape, 2 + max_length), 0, like), slots], -1)
        return cls(ops, ops.full(shape, DEAD, like), ops.full(shape, 0.0, like), facts, max_length)

    @property
    def states(self) -> Int[Array, "batch prefixes"]:
        """Trie nodes."""
        return self.facts[..., 0]

    @property
    def depths(self) -> Int[Array, "batch prefixes"]:
        """Tokens of each."""
        return self.facts[..., 1]

    @property
    def sequences(self) -> Int[Array, "batch prefixes length"]:
        """The tokens; anything after them."""
        return self.facts[..., 2 : 2 + self.max_length]

    @property
    def slots(self) -> Int[Array, "batch prefixes slots"]:
        """Where the keys of shorter prefixes are."""
        return self.facts[..., 2 + self.max_length :]

    def with_states(self, states: Int[Array, "batch prefixes"]) -> Prefixes:
        """The same under other nodes."""
        return replace(self, facts=self.ops.concat([states[..., None], self.facts[..., 1:]], -1))

    def with_slots(self, slots: Int[Array, "batch prefixes slots"]) -> Prefixes:
        """The same with other slots."""
        return replace(self, facts=self.ops.concat([self.facts[..., : 2 + self.max_length], slots], -1))

    def take(self, places: Int[Array, "batch taken"]) -> Prefixes:
        """These prefixes of every row."""
        keys, scores, facts = (self.ops.along(value, places) for value in (self.keys, self.scores, self.facts))
        return replace(self, keys=keys, scores=scores, facts=facts)


@dataclass(frozen=True)
class Below:
    """All children of the prefixes of a forward, padded to C."""

    parents: Prefixes  # with the slots of their own keys, too
    children: Any  # `Candidates` of which some columns can be taken, `of`
    scores: Float[Array, "batch prefixes children"]  # cumulative; anything where there is no child
    inner: Float[Array, "batch prefixes children"]  # keys of those with children of their own, `-inf` elsewhere
    ended: Float[Array, "batch prefixes children"]  # keys of complete sequences, `-inf` elsewhere

    def take(self, places: Int[Array, "batch taken"], keys: Float[Array, "batch taken"]) -> Prefixes:
        """The children at places among all of a row, under these keys."""
        parents, num_children = self.parents, self.scores.shape[-1]
        ops, above = parents.ops, places if num_children == 1 else places // num_children
        tokens, states = self.children.take(places)
        facts = ops.along(parents.facts, above)
        depths, sequences = facts[..., 1:2], facts[..., 2 : 2 + parents.max_length]
        is_next = ops.arange(parents.max_length, depths) == depths
        sequences = ops.where(is_next, ops.expand(tokens[..., None], sequences.shape), sequences)
        facts = [states[..., None], depths + 1, sequences, facts[..., 2 + parents.max_length :]]
        scores = ops.along(self.scores.reshape(len(keys), -1), places)
        return replace(parents, keys=keys, scores=scores, facts=ops.concat(facts, -1))

    def of(self, columns: slice) -> Below:
        """Some of the children."""
        arrays = {name: getattr(self, name)[..., columns] for name in ("scores", "inner", "ended")}
        return replace(self, children=self.children.of(columns), **arrays)

    def without(self, places: Int[Array, "batch taken"], flags: Bool[Array, "batch taken"]) -> Below:
        """The same, where inner children at some places, of those with a flag, are no candidates."""
        ops, (batch_size, *shape) = self.parents.ops, self.inner.shape
        keys = ops.pad(self.inner.reshape(batch_size, -1), 1, DEAD)
        places = ops.where(flags, places, ops.full(places.shape, keys.shape[1] - 1, places))
        return replace(self, inner=ops.put(keys, places, DEAD)[:, :-1].reshape(batch_size, *shape))


@dataclass(frozen=True)
class Groups:
    """The group of every sequence, and how many of one a list may have."""

    of: Int[Array, " nodes"]  # that of all sequences below a node, negative if there are several
    most: int


def perturbed(
    nodes: Prefixes,
    tokens: Int[Array, "batch prefixes children"],
    steps: Float[Array, "batch prefixes children"],
    noise: Any,
    *,
    is_whole: bool,
) -> Float[Array, "batch prefixes children"]:
    """Children's scores with Gumbel noise, given that the largest of all branches is the prefix's own key.

    The keys of all items are then independent Gumbel variables around their scores: the k largest are k items drawn
    without replacement. Unless the children are all (`is_whole`), what is illegal is one more branch, so that items
    are drawn among themselves.

    Source: Kool, van Hoof and Welling 2020, Ancestral Gumbel-top-k sampling for sampling without replacement, JMLR 21
    (section 3.2, appendix B.3).
    """
    ops, keys = nodes.ops, nodes.keys[..., None]
    others = (1.0 - ops.exp(steps).sum(-1)[..., None]).clip(0.0)
    others = ops.full(others.shape, DEAD, others) if is_whole else ops.log(others)
    raw = nodes.scores[..., None] + ops.concat([steps, others], -1)
    raw = raw + noise.gumbel_below(nodes.sequences, nodes.depths, ops.pad(tokens, 1, ILLEGAL))
    largest = ops.pick(raw, ops.argmax(raw))[..., None]
    below = keys - raw + ops.log(1.0 - ops.exp(raw - largest))
    return (keys - below.clip(0.0) - ops.log(1.0 + ops.exp(-abs(below))))[..., :-1]


def ranked(
    nodes: Prefixes,
    children: Any,  # all of theirs
    steps: Float[Array, "batch prefixes children"],  # the terms of these
    ends: Bool[Array, "batch prefixes children"],  # whether a sequence ends with each
    *,
    length_penalty: Any,
    noise: Any,  # of samples; else None
    is_whole: bool,  # see `perturbed`
) -> Below:
    """Children with their keys: scores divided by the penalty of a length, or with noise."""
    ops, scores = nodes.ops, nodes.scores[..., None] + steps
    is_there = children.legal & (nodes.keys > DEAD)[..., None] & (scores > DEAD)
    if noise is None:
        lengths = nodes.depths[..., None] + 1.0
        # No item below a prefix has fewer tokens than one more, or more than the longest.
        longest = ops.full(lengths.shape, float(nodes.max_length), lengths)
        bounds = ops.where(ops.full((), 0.0, lengths) <= length_penalty, longest, lengths + 1.0)
        inner, ended = (scores / by**length_penalty for by in (bounds, lengths))
    else:
        steps = ops.fill(steps, ~children.legal, DEAD)
        inner = ended = perturbed(nodes, children.tokens, steps, noise, is_whole=is_whole)
    inner, ended = ops.fill(inner, ~is_there | ends, DEAD), ops.fill(ended, ~(is_there & ends), DEAD)
    return Below(nodes, children, scores, inner, ended)


def drawn_root(root: Prefixes, noise: Any) -> Prefixes:
    """The empty prefix of samples: its key is the largest of all."""
    tokens = root.ops.full((*root.keys.shape, 1), ROOT, root.keys)
    return replace(root, keys=noise.gumbel_below(root.sequences, root.depths, tokens)[..., 0])


def next_prefixes(
    waiting: Prefixes,
    found: Prefixes,
    *,
    number: int,
    left: Int[Array, "batch 1"],
    max_nodes: int,
    max_length: int,
    tolerance: float | None = None,
    at_least: int = 1,
) -> tuple[Int[Array, "batch number"], Bool[Array, "batch number"]]:
    """The places of the best prefixes that may hold an item worth finding, best first; and which there are.

    `left` is how many of `max_nodes` a row may still score; those that could not be completed by so many are not
    scored, so that the work ends like a search with as many beams as there are items to return, or fewer if need be.

    With a `tolerance`, where room for all items is in `found`, a row is done once what is left is together at most so
    many times as probable as what was found, `at_least` so many items; with 0 once nothing is left.
    """
    ops, worst = waiting.ops, found.keys[:, -1:]
    is_needed = waiting.keys >= worst - margin(worst, max_length)  # or the worst could not be proven
    at_end = min(max(number, found.keys.shape[1]), max_nodes // max(max_length - 1, 1))  # of each length
    is_needed = is_needed & (waiting.depths >= max_length - 1 - (left - number) // at_end)
    keys, places = ops.topk(ops.fill(waiting.keys, ~is_needed, DEAD), number)
    flags = (keys > DEAD) & (ops.arange(number, places) < left)
    if tolerance:
        most = ops.largest(ops.concat([waiting.keys, found.keys], 1))
        masses, of_waiting, of_found = (ops.exp(some - most) for some in (keys, waiting.keys, found.keys))
        mass = of_waiting.sum(-1)[:, None] - masses.cumsum(-1) + masses  # of each and all after it
        is_missed = mass > tolerance * of_found.sum(-1)[:, None]
        flags = flags & (is_missed | (found.keys[:, at_least - 1 : at_least] == DEAD))
    return places, flags


def taken_out(waiting: Prefixes, places: Int[Array, "batch number"], flags: Bool[Array, "batch number"]) -> Prefixes:
    """The prefixes that wait without those at some places that have a flag."""
    ops = waiting.ops
    keys = ops.pad(waiting.keys, 1, DEAD)
    places = ops.where(flags, places, ops.full(places.shape, keys.shape[1] - 1, places))
    return replace(waiting, keys=ops.put(keys, places, DEAD)[:, :-1])


def with_best(
    waiting: Prefixes, below: Below, lost: Float[Array, "batch 1"]
) -> tuple[Prefixes, Float[Array, "batch 1"]]:
    """The best of those that wait and of inner children, as many as before; and the best key that was ever lost."""
    ops, number = waiting.ops, waiting.keys.shape[1]
    keys, places = ops.topk(ops.concat([waiting.keys, below.inner.reshape(len(lost), -1)], 1), number + 1)
    lost = ops.largest(ops.concat([lost, keys[:, number:]], 1))
    return _merged(waiting, below, places[:, :number], keys[:, :number]), lost


def with_broken(lost: Float[Array, "batch 1"], below: Below) -> Float[Array, "batch 1"]:
    """The best key that was ever lost, also of prefixes below which the model's scores are no numbers."""
    ops, first = below.parents.ops, below.scores[..., 0]
    is_sound = (first == first) | ~below.children.legal.any(-1)
    return ops.largest(ops.concat([lost, ops.fill(below.parents.keys, is_sound, DEAD)], 1))


def with_ended(found: Prefixes, below: Below, groups: Groups | None = None) -> Prefixes:
    """The best of the sequences found and of complete children; equal ones in the order of their nodes."""
    ops, ended = found.ops, below.ended
    flat = ended.reshape(len(ended), -1)
    states = below.children.take(ops.expand(ops.arange(flat.shape[1], found.states), flat.shape))[1]
    keys, states = ops.concat([found.keys, flat], 1), ops.concat([found.states, states], 1)
    if groups is not None:
        keys = ops.fill(keys, _too_many(ops, keys, states, groups), DEAD)
    keys, places = ops.topk_in_order(keys, states, found.keys.shape[1])
    return _merged(found, below, places, keys)


def _too_many(
    ops: Any, keys: Float[Array, "batch sequences"], states: Int[Array, "batch sequences"], groups: Groups
) -> Bool[Array, "batch sequences"]:
    """The sequences that are not among the best of their group, as many as a list may have.

    Whatever is chosen in order of score, if there is still room for its group, is the best list (a matroid): so a
    sequence that did not fit once never will.
    """
    order = ops.topk_in_order(keys, states, keys.shape[1])[1]
    by_group = ops.argsort(ops.along(groups.of[states], order))
    order = ops.along(order, by_group)
    sorted_groups, number = ops.along(groups.of[states], order), min(groups.most, keys.shape[1])
    is_behind = sorted_groups[:, number:] == sorted_groups[:, : keys.shape[1] - number]
    is_behind = ops.concat([ops.full((len(keys), number), False, keys), is_behind], 1)
    return ops.along(is_behind, ops.argsort(order))


def without_full(waiting: Prefixes, found: Prefixes, groups: Groups | None) -> Prefixes:
    """The prefixes that wait without those below which no item fits: so many better ones of their group are found."""
    if groups is None:
        return waiting
    ops, of_waiting, of_found = waiting.ops, groups.of[waiting.states], groups.of[found.states]
    least = (found.keys - margin(found.keys, found.max_length))[:, None]
    is_full = ((of_waiting[..., None] == of_found[:, None]) & (least >= waiting.keys[..., None])).sum(-1)
    return replace(waiting, keys=ops.fill(waiting.keys, (is_full >= groups.most) & (of_waiting >= 0), DEAD))


def _merged(
    prefixes: Prefixes, below: Below, places: Int[Array, "batch _"], keys: Float[Array, "batch _"]
) -> Prefixes:
    """What is at places among prefixes, and after them all children."""
    ops, number, last = prefixes.ops, prefixes.keys.shape[1], below.scores.shape[1] * below.scores.shape[2] - 1
    new = below.take((places - number).clip(0, last), keys)
    old, is_new = prefixes.take(places.clip(0, number - 1)), places >= number
    scores, facts = ops.where(is_new, new.scores, old.scores), ops.where(is_new[..., None], new.facts, old.facts)
    return replace(prefixes, keys=keys, scores=scores, facts=facts)


def num_proven(
    found: Prefixes, waiting: Prefixes, lost: Float[Array, "batch 1"], *, max_length: int
) -> Int[Array, " batch"]:
    """How many of a row's first sequences have larger keys than anything that was left or lost."""
    ops = found.ops
    bound = ops.largest(ops.concat([waiting.keys, lost], 1))
    return num_above(found.keys, bound, max_length)
