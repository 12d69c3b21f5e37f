# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts nodes to score ahead: those below the live beams, by the catalogue and by a draft model. Decides nothing.

Axes: B batch, K beams, N nodes of a level, C children.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from . import beam
from .beam import Beams
from .children import Children
from .decode import DecodePlan, child_scores, in_columns
from .scorers import Scorer
from .transition import DeviceCatalogue, children, is_leaf
from .tree import Nodes


def nodes_of(beams: Beams) -> list[Nodes]:
    """All tokens of every beam as nodes, one chain a beam: what a scorer over the prompt still has to read."""
    own = torch.arange(beams.scores.shape[1], device=beams.scores.device).expand(beams.scores.shape)
    return [Nodes(tokens, own, beams.states) for tokens in beams.sequences.unbind(dim=-1)]


def open_children(legal: Children, catalogue: DeviceCatalogue, *, depth: int) -> Bool[Tensor, "batch above children"]:
    """Which children have children of their own: those after which logits are needed."""
    if not catalogue.has_leaves[depth - 1]:
        return legal.legal
    batch_size, num_above, num_children = legal.legal.shape
    places = torch.arange(num_above * num_children, device=legal.legal.device).expand(batch_size, -1)
    parents = places // num_children
    states = legal.take(parents, places - parents * num_children)[1]
    return legal.legal & ~is_leaf(states, catalogue, level=depth).view(legal.legal.shape)


class Assistant:
    """A draft model, whose beam search of width N over the same catalogue proposes nodes.

    It continues from the target's beams and their scores: only what follows is guessed.

    Args:
        new_scorer: makes a scorer over the prompt; called for every draft.
        plan: the search: N beams, the best or sampled.
        num_steps: levels of a draft (AtSpeed's gamma).

    Source: AtSpeed, equation 1.
    """

    def __init__(self, new_scorer: Callable[[], Scorer], plan: DecodePlan, *, num_steps: int) -> None:
        self.new_scorer = new_scorer
        self.plan = plan
        self.num_steps = num_steps
        self.num_forwards = 0

    def draft(self, beams: Beams, legal: Children, catalogue: DeviceCatalogue, *, level: int) -> Iterator[Nodes]:
        """The nodes, level by level; each forward runs when its level is requested.

        Args:
            beams: the target's beams, with scores that compete.
            legal: their children.
            catalogue: the catalogue.
            level: tokens of each beam.
        """
        plan, scorer = self.plan, self.new_scorer()
        dead = torch.tensor(beam.DEAD, device=beams.scores.device)
        pending, first = nodes_of(beams), 1
        for depth in range(level + 1, level + 1 + self.num_steps):
            logits = self._score(scorer, pending, depth=first)
            # Samples are drawn from all children. Among the best, one that ends would displace one that continues.
            may = legal.legal if plan.do_sample else open_children(legal, catalogue, depth=depth)
            own = child_scores(logits, in_columns(legal, scorer, level=depth - 1), beams, plan)
            scores = torch.where(may, beams.scores[..., None] + own, dead)
            beams = beam.select(
                beams,
                legal,
                scores,
                num_kept=plan.num_kept,
                dead_state=catalogue.dead_state,
                do_sample=plan.do_sample,
                generator=plan.generator,
            )
            nodes = Nodes(beams.tokens, beams.parents, beams.states)
            if plan.do_sample:
                total = scores.flatten(1).logsumexp(dim=-1)[:, None, None]
                nodes = replace(nodes, log_probs=torch.where(total > beam.DEAD, scores - total, dead))
            yield nodes
            legal = children(beams.states, catalogue, level=depth)
            pending, first = [nodes], depth

    def _score(self, scorer: Scorer, levels: Sequence[Nodes], *, depth: int) -> Float[Tensor, "batch nodes vocab"]:
        before = scorer.num_forwards
        logits = scorer.score(levels, depth=depth)[-1]
        self.num_forwards += scorer.num_forwards - before
        return logits


class TreeDrafter:
    """Drafts the whole legal subtree below the beams once it fits; a draft model narrows it until then.

    The catalogue's draft holds all legal continuations, so it is never rejected and its levels are decided together.

    Args:
        catalogue: the legal sequences of each row.
        budget: nodes besides the live beams that one forward may score, per row; as many as there are beams are
            always allowed.
        merges: by level of the beams, how many levels below them are worth their nodes; None for all.
        worth: nodes that cost as much as a forward of the live beams: what each level may cost on average.
        assistant: the draft model, if there is one.
        from_zero: whether beams do not compete, so that their scores mean nothing to the assistant.
    """

    def __init__(
        self,
        catalogue: DeviceCatalogue,
        *,
        budget: int,
        merges: Sequence[int] | None = None,
        worth: float = math.inf,
        assistant: Assistant | None = None,
        from_zero: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self.budget = budget
        self.merges = merges
        self.worth = worth
        self.assistant = assistant
        self.from_zero = from_zero

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft model so far."""
        return 0 if self.assistant is None else self.assistant.num_forwards

    def draft(self, beams: Beams, legal: Children, *, level: int) -> list[Nodes]:
        """See `Drafter.draft`."""
        guesses = self._guesses(beams, legal, level=level)
        drafted: list[Nodes] = []
        while True:
            rest, reaches_end = self._subtree(legal, drafted, level=level, num_beams=beams.scores.shape[1])
            guess = None if reaches_end else next(guesses, None)
            if guess is None:
                return [*drafted, *rest]
            drafted.append(guess)
            legal = children(guess.states, self.catalogue, level=level + len(drafted))

    def _subtree(
        self, legal: Children, drafted: Sequence[Nodes], *, level: int, num_beams: int
    ) -> tuple[list[Nodes], bool]:
        """The legal nodes below the drafted ones, level by level while they fit; and whether those are all."""
        planned = math.inf if self.merges is None or self.assistant is not None else self.merges[level]
        rest: list[Nodes] = []
        used = sum(nodes.tokens.shape[1] for nodes in drafted)
        # Nothing follows the last level's tokens: they need no logits.
        for depth in range(level + 1 + len(drafted), self.catalogue.max_length):
            if rest:
                legal = children(rest[-1].states, self.catalogue, level=depth - 1)
            room = min(self.budget, self.worth * (len(drafted) + len(rest) + 1)) - used if len(rest) < planned else 0
            # As many nodes as beams cost no more here than in the forward that they save.
            nodes = self._all_children(legal, room=max(room, num_beams), depth=depth)
            if nodes is None:
                return rest, False
            if not nodes.tokens.shape[1]:
                break
            rest.append(nodes)
            used += nodes.tokens.shape[1]
        return rest, True

    def _guesses(self, beams: Beams, legal: Children, *, level: int) -> Iterator[Nodes]:
        if self.assistant is None:
            return iter(())
        if self.from_zero:
            beams = replace(beams, scores=torch.where(beams.scores > beam.DEAD, 0.0, beams.scores))
        return self.assistant.draft(beams, legal, self.catalogue, level=level)

    def _all_children(self, legal: Children, *, room: int | float, depth: int) -> Nodes | None:
        """All children with children of their own, possibly none; None if there are too many."""
        batch_size, num_above, num_children = legal.legal.shape
        wanted = open_children(legal, self.catalogue, depth=depth).flatten(1)
        places = torch.arange(num_above * num_children, device=wanted.device).expand(batch_size, -1)
        counts = wanted.sum(dim=-1, keepdim=True)
        width = int(counts.max())  # synchronises: the shape of the next forward depends on it
        if width > room:
            return None
        # Unwanted children all go to an extra column, which is dropped.
        columns = torch.where(wanted, wanted.cumsum(dim=-1) - 1, width)
        chosen = torch.zeros((batch_size, width + 1), dtype=torch.long, device=wanted.device)
        chosen = chosen.scatter(1, columns, places)[:, :-1]
        parents = chosen // num_children
        tokens, states = legal.take(parents, chosen - parents * num_children)
        is_there = torch.arange(width, device=wanted.device) < counts
        return Nodes(tokens, parents, torch.where(is_there, states, self.catalogue.dead_state), is_complete=True)
