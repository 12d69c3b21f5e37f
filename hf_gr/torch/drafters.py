# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts nodes to score ahead: those below the live beams, by the catalogue and by a draft model. Decides nothing.

Axes: B batch, K beams, N nodes of a level, C children.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_gr.core import beam
from hf_gr.core.beam import Beams, paths_of
from hf_gr.core.decide import draft_best, draw

from .noise import DRAFTS
from .scorers import Scorer
from .scores import child_scores
from .speculation import Frontier, Part
from .transition import Children, DeviceCatalogue, children
from .tree import Nodes


def nodes_of(beams: Beams) -> list[Nodes]:
    """All tokens of every beam as nodes, one chain a beam: what a scorer over the prompt still has to read."""
    own = torch.arange(beams.scores.shape[1], device=beams.scores.device).expand(beams.scores.shape)
    first, *others = beams.sequences.unbind(dim=-1)
    return [Nodes(first, torch.zeros_like(own), beams.states), *(Nodes(one, own, beams.states) for one in others)]


def open_children(legal: Children, catalogue: DeviceCatalogue, *, depth: int) -> Bool[Tensor, "batch above children"]:
    """Which children have children of their own: those after which logits are needed."""
    if not catalogue.has_leaves[depth - 1]:
        return legal.legal
    return legal.legal & ~catalogue.is_leaf(legal.states.flatten(1), level=depth).view(legal.shape)


@dataclass(eq=False)
class Assistant:
    """A draft model, which searches the catalogue to predict the target's beams.

    It starts from the target's beams and their scores: only later tokens are guessed.
    """

    new_scorer: Callable[[], Scorer]
    num_beams: int  # N
    num_steps: int  # AtSpeed's gamma
    first_level: int = 0  # where it can begin: below the prompt, or after the first level
    num_forwards: int = field(default=0, init=False)

    def draft(self, frontier: Frontier, whole: Sequence[int] = ()) -> Iterator[Nodes]:
        """The nodes, level by level; each forward runs when its level is requested.

        `whole` says for the first levels how many nodes they have, where all of them are wanted.
        """
        beams, level = frontier.beams, frontier.level
        scorer = self.new_scorer()
        logits = scorer.begin()[0]
        if level:
            logits = self._score(scorer, nodes_of(beams), depth=1)
        search = DraftSearch(frontier, scorer)
        nodes, first = None, beams.scores.shape[1] * max(level - 1, 0)  # of the beams among all nodes of the forward
        for depth, number in enumerate([*whole, *[self.num_beams] * self.num_steps], start=level + 1):
            if nodes is not None:
                logits, first = self._score(scorer, [nodes], depth=depth - 1), 0
            logits = logits.expand(-1, search.nodes.scores.shape[1], -1)
            nodes = search.step(logits, depth=depth, number=number)
            yield nodes  # to be verified, whole levels, too: a processor may have ruled out some of the draft's
            above = nodes.parents + first if depth > 1 else torch.zeros_like(nodes.parents)  # of the root
            nodes = replace(nodes, parents=above)

    def _score(self, scorer: Scorer, levels: Sequence[Nodes], *, depth: int) -> Float[Tensor, "batch nodes vocab"]:
        before = scorer.num_forwards
        logits = scorer.score(levels, depth=depth)[-1]
        self.num_forwards += scorer.num_forwards - before
        return logits


class DraftSearch:
    """A search by a draft model's scores, one level after the other, from a frontier on.

    If relaxed, it draws samples without replacement (AtSpeed, section 3.2); else it finds the best nodes of a level
    (equation 1), with the target's own noise if it samples.
    """

    def __init__(self, frontier: Frontier, scorer: Scorer) -> None:
        plan = frontier.plan
        self.plan = replace(plan, stopping_criteria=None, processor_width=plan.width)
        self.catalogue, self.scorer = frontier.catalogue, scorer
        self.nodes = replace(frontier.beams, lost=None)  # of the last level
        self.paths = paths_of(self.nodes)
        self.behind = torch.zeros_like(self.nodes.scores)  # how far each is below its path's own choice
        self.dead = torch.full((), beam.DEAD, device=self.behind.device)

    def step(self, logits: Float[Tensor, "batch nodes vocab"], *, depth: int, number: int) -> Nodes:
        """The `number` nodes of the next level, of `depth` tokens, given the logits after those of the last one."""
        plan, catalogue, above = self.plan, self.catalogue, self.nodes
        legal = children(above.states, catalogue, level=depth - 1)
        own = child_scores(logits, legal, above, plan, self.scorer.columns)
        own = catalogue.biased(own, above.states, legal)
        scores = torch.where(legal.legal, above.scores[..., None] + own, self.dead)
        if plan.is_relaxed:
            assert plan.noise is not None
            how = {"noise": plan.noise.stream(DRAFTS), "dead_state": catalogue.dead_state}
            self.nodes, log_probs = draw(above, legal, scores, number=number, **how)
            return Nodes(self.nodes.tokens, self.nodes.parents, self.nodes.states, log_probs=log_probs)
        self.nodes, self.paths, self.behind = draft_best(
            above,
            self.paths,
            self.behind,
            legal,
            scores,
            open_children(legal, catalogue, depth=depth),
            plan,
            number=min(number, scores[0].numel()),
            dead_state=catalogue.dead_state,
            noise=plan.noise,
        )
        return Nodes(self.nodes.tokens, self.nodes.parents, self.nodes.states)


@dataclass(eq=False)
class TreeDrafter:
    """Drafts the whole legal subtree below the beams once it fits; a draft model narrows it until then.

    The catalogue's draft holds all legal continuations, so it is never rejected and its levels are decided together.
    """

    budget: int  # nodes per forward and row, in addition to the live beams; as many as beams are always allowed
    assistant: Assistant | None = None

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return 0 if self.assistant is None else self.assistant.num_forwards

    def draft(self, frontier: Frontier) -> list[Part]:
        """See `Drafter.draft`."""
        rest, fits = self._subtree(frontier.legal, [], frontier)
        flags = frontier.rows.flags
        if len(set(compress(fits, flags))) > 1:  # what rows could have alone does not depend on others
            return [part for some in (fits, [not fit for fit in fits]) for part in self.draft(frontier.where(some))]
        if self.assistant is None or fits[flags.index(True)] or frontier.level < self.assistant.first_level:
            return [(frontier, rest)]
        drafted: list[Nodes] = []
        # Samples are verified by probabilities that nodes of whole levels would not have.
        whole = [] if frontier.plan.is_relaxed else [nodes.tokens.shape[1] for nodes in rest]
        for guess in self.assistant.draft(frontier, whole):
            drafted.append(guess)
            if len(drafted) <= len(whole):
                continue
            legal = children(guess.states, frontier.catalogue, level=frontier.level + len(drafted))
            rest, fits = self._subtree(legal, drafted, frontier)
            if all(fits):
                break
        return [(frontier, [*drafted, *rest])]

    def _subtree(
        self, legal: Children, drafted: Sequence[Nodes], frontier: Frontier
    ) -> tuple[list[Nodes], list[bool]]:
        """The legal nodes below the drafted ones, level by level while they fit; and for which rows those are all."""
        level, catalogue = frontier.level, frontier.catalogue
        rest: list[Nodes] = []
        used = [sum(nodes.tokens.shape[1] for nodes in drafted)] * len(frontier.rows.flags)
        # Nothing follows the last level's tokens: they need no logits.
        for depth in range(level + 1 + len(drafted), catalogue.max_length):
            if rest:
                legal = children(rest[-1].states, catalogue, level=depth - 1)
            wanted = open_children(legal, catalogue, depth=depth).flatten(1)
            counts = wanted.sum(dim=-1).tolist()  # synchronises: the shape of the next forward depends on it
            # As many nodes as beams cost no more here than in the forward that they save.
            least = frontier.plan.width
            fits = [count <= max(self.budget - before, least) for count, before in zip(counts, used, strict=True)]
            if not all(fits):
                return rest, fits
            if not any(counts):
                break
            rest.append(_all_children(legal, wanted, width=max(counts), dead_state=catalogue.dead_state))
            used = [count + before for count, before in zip(counts, used, strict=True)]
        return rest, [True] * len(used)


@dataclass(eq=False)
class FixedTree:
    """Drafts the whole legal subtree within widths fixed ahead, for programs whose shapes stay. Serves one call."""

    widths: Sequence[Sequence[int]]  # nodes of each level that is scored together with beams, by level of these
    # Whether all nodes of each row fitted so far, on the device; where they did not, the answer is none.
    fits: Tensor | None = field(default=None, init=False)  # None before the first draft
    num_forwards = 0

    def draft(self, frontier: Frontier) -> list[Part]:
        """See `Drafter.draft`."""
        level, catalogue, legal = frontier.level, frontier.catalogue, frontier.legal
        rest: list[Nodes] = []
        for depth, width in enumerate(self.widths[level], start=level + 1):
            if rest:
                legal = children(rest[-1].states, catalogue, level=depth - 1)
            wanted = open_children(legal, catalogue, depth=depth).flatten(1)
            fits = wanted.sum(dim=-1) <= width
            self.fits = fits if self.fits is None else self.fits & fits
            rest.append(_all_children(legal, wanted, width=width, dead_state=catalogue.dead_state))
        return [(frontier, rest)]


def _all_children(
    legal: Children, wanted: Bool[Tensor, "batch children_of_all"], *, width: int, dead_state: int
) -> Nodes:
    """The wanted ones of all children, the first `width` of a row."""
    chosen, is_there = first_places(wanted, width)
    tokens, states = legal.take(chosen)
    return Nodes(tokens, chosen // legal.shape[-1], torch.where(is_there, states, dead_state), is_complete=True)


def first_places(
    wanted: Bool[Tensor, "batch places"], width: int
) -> tuple[Int[Tensor, "batch width"], Bool[Tensor, "batch width"]]:
    """The first `width` wanted places of every row, padded with others; and which are no padding."""
    places = torch.arange(wanted.shape[1], device=wanted.device).expand(wanted.shape)
    # Unwanted ones, and those that are too many, all go to an extra column, which is dropped.
    columns = torch.where(wanted, wanted.cumsum(dim=-1) - 1, width).clamp(max=width)
    chosen = torch.zeros((len(wanted), width + 1), dtype=torch.long, device=wanted.device)
    chosen = chosen.scatter(1, columns, places)[:, :-1]
    return chosen, torch.arange(width, device=wanted.device) < wanted.sum(dim=-1, keepdim=True)
