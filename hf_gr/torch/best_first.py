# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop of `exact=True`: prefixes are scored best first until the best items are proven. Knows no model.

A forward scores the best prefixes of every row, whatever their lengths, and with a drafter nodes below them. After
each, the host asks how many prefixes the next one has; nothing else synchronises.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.core import best_first as core
from hf_gr.core.beam import DEAD, Beams, Finished, margin
from hf_gr.core.best_first import Below, Prefixes
from hf_gr.core.decide import best
from hf_gr.core.plan import Speculation

from . import ops
from .decode import COUNTS, Decoded
from .drafters import TreeDrafter, first_places
from .log_probs import token_log_probs
from .scorers import TreeScorer
from .scores import DecodePlan, renormalized
from .speculation import Frontier, Rows, joined
from .transition import Children, DeviceCatalogue, children
from .tree import NO_SLOT, Nodes, Tree


def best_first(
    scorer: TreeScorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: TreeDrafter | None = None
) -> Decoded:
    """The best R sequences of the catalogue for each request, best first, then padding; this uses the scorer up.

    The result depends neither on the number of prefixes of a forward (`num_beams`) nor on a drafter, unless the work
    ends at `max_nodes`: then it is the best that was found.
    """
    return _BestFirst(scorer, catalogue, plan, drafter).result()


@dataclass(frozen=True)
class Masses:
    """The most probable sequences of each request, and the prefixes of all others; keys are log-probabilities."""

    found: Prefixes  # best first, with room for all sequences
    left: Prefixes
    num_scored: Int[Tensor, " batch"]
    is_broken: Bool[Tensor, " batch"]  # where logits are not numbers


def best_masses(
    scorer: TreeScorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: TreeDrafter | None = None
) -> Masses:
    """All sequences but those that are together as improbable as `plan.tolerance` says; this uses the scorer up.

    At least `num_return_sequences` are found, if `max_nodes` suffice; `num_kept` is how many the catalogue has. With
    tolerance 0 the search ends when so many are proven to be the best.
    """
    return _BestFirst(scorer, catalogue, plan, drafter).masses()


@dataclass(frozen=True)
class _Family:
    """The children of some nodes, of several levels one after the other: a node has children in one of those."""

    children: Children
    ends: Bool[Tensor, "batch nodes children"]  # whether a sequence ends with each
    levels: range  # of the nodes
    sizes: tuple[int, ...]  # children by level

    @property
    def inner(self) -> Bool[Tensor, "batch nodes children"]:
        """Which have children of their own."""
        return self.children.legal & ~self.ends

    def columns(self, first: int, after: int) -> slice:
        """The children of nodes of some levels."""
        number_before = [sum(self.sizes[: max(level - self.levels.start, 0)]) for level in (first, after)]
        return slice(*number_before)


@dataclass(frozen=True)
class _Draft:
    """Nodes below those of the part before."""

    nodes: Nodes
    places: Int[Tensor, "batch nodes"]  # among all children of a row
    is_there: Bool[Tensor, "batch nodes"]  # else padding


FEW = 8  # children of a node below which all is drafted; more would fill forwards with what is never needed


class _BestFirst:
    """Serves one call; the arguments are those of `best_first`."""

    def __init__(
        self, scorer: TreeScorer, catalogue: DeviceCatalogue, plan: DecodePlan, drafter: TreeDrafter | None
    ) -> None:
        self.scorer, self.catalogue, self.plan, self.drafter = scorer, catalogue, plan, drafter
        self.length, self.dead_state = catalogue.max_length, catalogue.dead_state
        # More could never be scored: all of these are better. A smaller pool lost items of wide catalogues. Where all
        # sequences are to be found, they are as many, for no prefix that waits is the beginning of another.
        most = (plan.max_nodes, plan.num_return_sequences)
        if plan.tolerance is not None:
            most = plan.num_kept, plan.num_kept if plan.tolerance else plan.num_return_sequences
        self.waiting, self.found = map(self._none, most)
        self.lost = self.waiting.keys[:, :1]  # the best key that did not fit
        assert catalogue.groups is None or plan.max_per_group is not None
        self.groups = None if catalogue.groups is None else core.Groups(catalogue.groups, plan.max_per_group or 0)
        nothing = torch.zeros(len(plan.prompt), dtype=torch.long, device=catalogue.device)
        self.counts: dict[str, Tensor] = dict.fromkeys((*COUNTS, "num_nodes"), nothing)

    def run(self) -> None:
        """Score until all rows are done."""
        self._begin()
        while self.length > 1 and self._advance():
            pass

    def masses(self) -> Masses:
        """What was found by then, and what is left."""
        self.run()
        num_scored = self.counts["num_nodes"] + self.counts["drafted_nodes"]
        return Masses(self.found, self.waiting, num_scored, self.lost[:, 0] > DEAD)

    def result(self) -> Decoded:
        """The best sequences by then."""
        self.run()
        plan, found = self.plan, self.found
        columns = torch.arange(self.length, device=found.depths.device)
        is_token = (columns < found.depths[..., None]) & (found.keys > DEAD)[..., None]
        finished = Finished(ops, found.sequences, is_token.long() - 1, found.keys, found.keys[:, :1] > DEAD)
        sequences, scores, paths = best(finished, plan)
        draft_forwards = 0 if self.drafter is None else self.drafter.num_forwards
        counts: dict[str, Any] = self.counts
        return Decoded(
            sequences.flatten(0, 1),
            (scores if plan.noise is None else torch.where(scores > DEAD, found.scores, scores)).flatten(),
            paths.flatten(0, 1),
            perturbed_scores=None if plan.noise is None else scores.flatten(),
            step_scores=None,
            step_logits=None,
            num_proven=core.num_proven(found, self.waiting, self.lost, max_length=self.length),
            speculation=Speculation(self.scorer.num_forwards, draft_forwards, **counts),
            may_be_shorter=self.catalogue.is_ragged,
        )

    def _begin(self) -> None:
        """Score the prompt, and what is drafted below it."""
        plan, root = self.plan, self._none(1)
        families, drafts = [self._family(root.states, range(1))], []
        if self.drafter is not None and self.scorer.takes_prompt:
            rows = Rows((True,) * len(plan.prompt), self.catalogue.device)
            beams = Beams.start(ops, plan.prompt, batch_size=len(plan.prompt), width=1)
            frontier = Frontier(rows, 0, beams, torch.zeros_like(beams.states), self.catalogue, plan)
            for level, nodes in enumerate(joined(self.drafter.draft(frontier))[1:], start=1):
                above = families[-1].children.states
                is_there = nodes.states != self.dead_state
                # Children of one node are consecutive.
                places = nodes.parents * above.shape[-1] + nodes.states - above[..., 0].gather(1, nodes.parents)
                drafts.append(_Draft(nodes, places.masked_fill(~is_there, 0), is_there))
                families.append(self._family(nodes.states, range(level, level + 1)))
        logits = self.scorer.begin([draft.nodes for draft in drafts])
        root = replace(root, keys=root.scores) if plan.noise is None else core.drawn_root(root, plan.noise)
        self._decide(root, families, drafts, logits)

    def _advance(self) -> bool:
        """One more forward; false if no row needs one."""
        plan, tree = self.plan, self.scorer.tree
        levels, width = range(1, self.length), min(plan.num_beams, plan.max_nodes // (self.length - 1))
        if not plan.exit_early and self.scorer.num_forwards * width >= plan.max_nodes:
            return False
        left = (plan.max_nodes - self.counts["num_nodes"])[:, None]
        how: dict[str, Any] = {"number": width, "left": left, "max_nodes": plan.max_nodes, "max_length": self.length}
        how |= {"tolerance": plan.tolerance, "at_least": plan.num_return_sequences}
        places, flags = core.next_prefixes(self.waiting, self.found, **how)
        depths = torch.where(flags, self.waiting.depths.gather(1, places), 1)
        if plan.exit_early:
            least = torch.where(flags, depths, self.length).min()
            # Synchronises: the shape of the forward depends on it.
            width, *bounds = torch.stack([flags.sum(-1).max(), least, depths.max() + 1]).tolist()
            levels = range(*bounds)
        if not width:
            return False
        self._count(num_nodes=flags.sum(-1))
        places, flags = places[:, :width], flags[:, :width]
        picked, depths = self.waiting.take(places), depths[:, :width]
        states = picked.states.masked_fill(~flags, self.dead_state)
        self.waiting = core.taken_out(self.waiting, places, flags)
        families, drafts = self._drafted(self._family(states, levels))

        own = torch.arange(tree.num_slots, tree.num_slots + width, device=places.device)
        above = picked.slots[..., self.length - levels.stop + 1 :]
        ancestry = torch.cat([above, own.expand(len(places), -1)[..., None]], dim=-1)
        trees = [Tree(ancestry, tree.num_slots + width, is_level=False)]
        tokens, of_nodes = [picked.sequences.gather(2, depths[..., None] - 1)[..., 0].masked_fill(~flags, 0)], [depths]
        for draft in drafts:
            trees.append(trees[-1].grow(draft.nodes.parents, depth=trees[-1].depth + 1, is_level=False))
            tokens.append(draft.nodes.tokens)
            of_nodes.append(of_nodes[-1].gather(1, draft.nodes.parents) + 1)
        logits = self.scorer.read(torch.cat(tokens, dim=1), Tree.joined(trees), torch.cat(of_nodes, dim=1))
        self._decide(picked, families, drafts, logits.split([part.shape[1] for part in tokens], dim=1))
        return True

    def _drafted(self, family: _Family) -> tuple[list[_Family], list[_Draft]]:
        """What is scored together with some nodes: all that is below those of a row, level by level while it fits."""
        families, drafts, used = [family], list[_Draft](), self.counts["num_nodes"] * 0
        while self.drafter is not None and families[-1].levels.start + 1 < self.length:
            above = families[-1]
            wanted = (above.inner & (above.inner.sum(-1, keepdim=True) <= FEW)).flatten(1)
            used = used + wanted.sum(-1)
            wanted = wanted & (used <= self.drafter.budget)[:, None]
            width = int(wanted.sum(-1).max())  # synchronises, as above
            if not width:
                break
            places, is_there = first_places(wanted, width)
            tokens, states = above.children.take(places)
            tokens, states = tokens.masked_fill(~is_there, 0), states.masked_fill(~is_there, self.dead_state)
            drafts.append(_Draft(Nodes(tokens, places // above.inner.shape[-1], states), places, is_there))
            families.append(
                self._family(states, range(above.levels.start + 1, min(above.levels.stop + 1, self.length)))
            )
        return families, drafts

    def _decide(
        self, nodes: Prefixes, families: Sequence[_Family], drafts: Sequence[_Draft], logits: Sequence[Tensor]
    ) -> None:
        """Rank the children of all nodes of a forward: of prefixes, then of what was drafted below them."""
        ancestry = self.scorer.tree.ancestry
        trails = F.pad(ancestry, (self.length - 1 - ancestry.shape[-1], 0), value=NO_SLOT)
        worst = self.found.keys[:, -1:]
        least = worst - margin(worst, self.length)
        parts = trails.split([part.shape[1] for part in logits], dim=1)
        for number, (family, of_nodes, trail) in enumerate(zip(families, logits, parts, strict=True)):
            below = self._below(nodes.with_slots(trail), family, of_nodes)
            if number < len(drafts):
                draft = drafts[number]
                keys = below.inner.flatten(1).gather(1, draft.places).masked_fill(~draft.is_there, DEAD)
                nodes = below.take(draft.places, keys).with_states(draft.nodes.states)
                below = below.without(draft.places, draft.is_there)
                needed = ((keys >= least) & draft.is_there).sum(-1)
                self._count(drafted_nodes=draft.is_there.sum(-1), accepted_nodes=needed)
                self._count(drafted_steps=draft.is_there.any(-1), accepted_steps=needed > 0)
            self.lost = core.with_broken(self.lost, below)
            leaves = [level for level in family.levels if self.catalogue.has_leaves[level]]
            if family.levels.start + 1 < self.length:
                of_inner = below.of(family.columns(family.levels.start, self.length - 1))
                self.waiting, self.lost = core.with_best(self.waiting, of_inner, self.lost)
            if leaves:
                ended = below.of(family.columns(leaves[0], self.length))
                self.found = core.with_ended(self.found, ended, self.groups)
                self.waiting = core.without_full(self.waiting, self.found, self.groups)

    def _below(self, nodes: Prefixes, family: _Family, logits: Float[Tensor, "batch nodes vocab"]) -> Below:
        """The children of some nodes, with their scores and keys."""
        plan, legal = self.plan, family.children
        logits = logits if plan.temperature == 1.0 else logits.float() / plan.temperature
        of, columns = legal.tokens, self.scorer.columns
        of = of if columns is None else columns(of, level=family.levels.start)
        scores = renormalized(logits, of, legal) if plan.renormalizes else token_log_probs(logits, of)
        if plan.tolerance is not None:  # a prefix without a score would be neither found nor left
            is_broken = (scores.isnan() & legal.legal & (nodes.keys > DEAD)[..., None]).flatten(1).any(1)
            self.lost = self.lost.masked_fill(is_broken[:, None], 0.0)
        if plan.forces_end and self.length - 1 in family.levels:
            scores[..., scores.shape[-1] - family.sizes[-1] :] = 0.0  # only the end token is left
        steps = self.catalogue.biased(scores, nodes.states, legal)
        how: dict[str, Any] = {"length_penalty": float(plan.length_penalty), "noise": plan.noise}
        is_whole = plan.renormalizes and self.catalogue.bias is None
        return core.ranked(nodes, legal, steps, family.ends, is_whole=is_whole, **how)

    def _family(self, states: Int[Tensor, "batch nodes"], levels: range) -> _Family:
        """The children of nodes of these levels."""
        found = [children(states, self.catalogue, level=level) for level in levels]
        ends = [
            self.catalogue.is_leaf(legal.states.flatten(1), level=level + 1).view(legal.shape)
            if self.catalogue.has_leaves[level]
            else torch.zeros_like(legal.legal)
            for level, legal in zip(levels, found, strict=True)
        ]
        names = ("tokens", "legal", "states")
        every = Children(*(torch.cat([getattr(legal, name) for legal in found], dim=-1) for name in names))
        return _Family(every, torch.cat(ends, dim=-1), levels, tuple(legal.shape[-1] for legal in found))

    def _none(self, number: int) -> Prefixes:
        how = {"batch_size": len(self.plan.prompt), "max_length": self.length, "no_slot": NO_SLOT}
        return Prefixes.none(ops, self.plan.prompt, number=number, **how)

    def _count(self, **more: Tensor) -> None:
        for name, number in more.items():
            self.counts[name] = self.counts[name] + number
