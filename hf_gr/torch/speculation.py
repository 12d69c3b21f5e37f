# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits for the live beams: looked up if scored ahead, else from a forward that scores ahead. Knows no trie.

A batch decides one level at a time: if one row has a beam on a node that was not drafted, all rows take part in the
next forward and in the next draft.

Axes: B batch, K beams, N nodes of a level, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .beam import DEAD, Beams
from .children import Children
from .scorers import Scorer
from .tree import Nodes
from .verifiers import locate


@dataclass(frozen=True)
class Speculation:
    """What one call scored ahead, and what was accepted.

    Attributes:
        target_forwards: forwards of the model after the prefill; the same for all rows of a batch.
        draft_forwards: forwards of the draft model after its prefill.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row; a level may be drafted several times.
        accepted_steps: levels of a draft whose beams had all been drafted, up to the first level where one had not
            (the paper's "accept steps").
    """

    target_forwards: int
    draft_forwards: int
    drafted_nodes: Int[Tensor, " batch"]
    accepted_nodes: Int[Tensor, " batch"]
    drafted_steps: Int[Tensor, " batch"]
    accepted_steps: Int[Tensor, " batch"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes nodes below the live beams.

    Attributes:
        num_forwards: forwards of a draft model so far.
    """

    @property
    def num_forwards(self) -> int: ...  # noqa: D102

    def draft(self, beams: Beams, legal: Children, *, level: int) -> list[Nodes]:
        """Nodes of consecutive levels, the first below the beams; none if nothing is worth scoring ahead.

        Args:
            beams: the live beams.
            legal: their children.
            level: tokens of each beam.
        """
        ...


class Lookahead:
    """A scorer and the logits it has computed ahead. Serves one call.

    Args:
        scorer: the model, prefilled.
        drafter: proposes nodes; None for no draft.
        dead_state: the state of nodes that are padding.
    """

    def __init__(self, scorer: Scorer, drafter: Drafter | None, *, dead_state: int) -> None:
        self.scorer = scorer
        self.drafter = drafter
        self.dead_state = dead_state
        self.ahead: list[tuple[Nodes, Float[Tensor, "batch _ vocab"]]] = []
        # Of the beams among the nodes scored on their level; None if each beam is its own node.
        self.places: Int[Tensor, "batch beams"] | None = None
        nothing = torch.zeros(len(scorer.prompt_logits), dtype=torch.long, device=scorer.prompt_logits.device)
        self.drafted_nodes = self.accepted_nodes = self.drafted_steps = self.accepted_steps = nothing
        self.all_accepted = nothing.bool()  # rows all of whose drafted steps since the last forward were accepted

    def logits(self, beams: Beams, legal: Children, *, level: int) -> Float[Tensor, "batch beams vocab"]:
        """The logits after every beam.

        Args:
            beams: the live beams.
            legal: their children, below which more may be drafted.
            level: tokens of each beam.
        """
        if level == 0:
            return self.scorer.prompt_logits.expand(-1, beams.scores.shape[1], -1)
        if self.drafter is None:
            return self.scorer.score([Nodes(beams.tokens, beams.parents, beams.states)], depth=level)[0]
        parents = beams.parents if self.places is None else self.places.gather(1, beams.parents)
        if self.ahead:
            (nodes, logits), *self.ahead = self.ahead
            self.places, found = locate(beams, nodes)
            self.all_accepted = self.all_accepted & found
            self.accepted_steps = self.accepted_steps + self.all_accepted
            self.accepted_nodes = self.accepted_nodes + self._num_used(beams, nodes) * self.all_accepted
            # Only a draft that may lack a node needs this check, which synchronises.
            if nodes.is_complete or bool(found.all()):
                return logits.gather(1, self.places[..., None].expand(-1, -1, logits.shape[-1]))
        live = Nodes(beams.tokens, parents, beams.states)
        drafted = self.drafter.draft(beams, legal, level=level)
        logits, *below = self.scorer.score([live, *drafted], depth=level)
        self.ahead, self.places = list(zip(drafted, below, strict=True)), None
        self.all_accepted = torch.ones_like(self.all_accepted)
        for nodes in drafted:
            self.drafted_steps = self.drafted_steps + 1
            self.drafted_nodes = self.drafted_nodes + (nodes.states != self.dead_state).sum(dim=-1)
        return logits

    def _num_used(self, beams: Beams, nodes: Nodes) -> Int[Tensor, " batch"]:
        """How many nodes have a beam; paths of a row that do not compete may share a node."""
        assert self.places is not None
        batch_size, num_nodes = nodes.states.shape
        columns = torch.where(beams.scores > DEAD, self.places, num_nodes)
        hit = torch.zeros((batch_size, num_nodes + 1), dtype=torch.long, device=columns.device)
        return hit.scatter(1, columns, 1)[:, :-1].sum(dim=-1)

    @property
    def samples(self) -> Nodes | None:
        """The nodes one level below the beams, if they were drawn with known probabilities."""
        return self.ahead[0][0] if self.ahead and self.ahead[0][0].log_probs is not None else None

    @property
    def speculation(self) -> Speculation:
        """What happened so far."""
        return Speculation(
            target_forwards=self.scorer.num_forwards,
            draft_forwards=0 if self.drafter is None else self.drafter.num_forwards,
            drafted_nodes=self.drafted_nodes,
            accepted_nodes=self.accepted_nodes,
            drafted_steps=self.drafted_steps,
            accepted_steps=self.accepted_steps,
        )
