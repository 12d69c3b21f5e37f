# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The options of one call that both backends have, and what it counts. Decides nothing.

Axes: B batch, K beams, R returned sequences a row.
"""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Int

from .ops import Array


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of a compiled program, not of its arguments."""
    return field(metadata={"static": True}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one call; names and meanings are transformers'."""

    num_beams: int = static()  # K; 1 decodes every path on its own (greedy, or sampling)
    num_return_sequences: int = static()  # R
    widths: tuple[int, ...] | None = static(default=None)  # beams by level, the last of them for all that follow
    num_kept: int = static()  # candidates kept a level: K, plus spares to replace beams that end here
    do_sample: bool = static()
    early_stopping: bool | str = static()
    forces_end: bool = static(default=False)  # the longest sequences' last token is certain: `forced_eos_token_id`
    output_scores: bool = static(default=False)
    output_logits: bool = static(default=False)
    # Leave the loop once nothing can change; off where several processes must run equally many forwards.
    exit_early: bool = static(default=True)
    # Sampling beams accept drafted samples by relaxed verification; they compete even if there is only one.
    is_relaxed: bool = static(default=False)
    # Whether no item scores better than a prefix of it that was cut, so that answers can be proven (`decide.proven`).
    certifies: bool = static(default=False)
    max_nodes: int = static(default=0)  # of `exact=True`, the most prefixes that a row scores; 0 for beams
    tolerance: float | None = static(default=None)  # of a search for the most probable items (`next_prefixes`)
    max_per_group: int | None = static(default=None)  # sequences of one group in a list
    length_penalty: Any = 1.0  # in Flax this and the following may change from call to call without a new program
    max_new_tokens: Any = 0  # the longest sequence that the heuristic of `early_stopping="never"` assumes
    fill_token_id: Any = -1  # what follows the end of a sequence
    missing_token_id: Any = -1  # fills a row without a sequence; another if such a row were one of the catalogue

    @property
    def is_beam_search(self) -> bool:
        """Whether the paths of a row compete."""
        return self.num_beams > 1 or self.is_relaxed

    @property
    def width(self) -> int:
        """Paths a row."""
        return max(self.num_beams, self.num_return_sequences)

    def beams_at(self, level: int) -> int:
        """The beams that a level leaves."""
        return self.num_beams if self.widths is None else self.widths[min(level, len(self.widths) - 1)]

    @property
    def keeps_steps(self) -> bool:
        """Whether scores or logits of every level are outputs."""
        return self.output_scores or self.output_logits

    @property
    def has_criteria(self) -> bool:
        """Whether functions of a user's may end sequences before the catalogue does."""
        raise NotImplementedError

    def meets_criteria(self, sequences: Any, *, max_length: int) -> Any:
        """Which sequences, `[B, M, T]`, such functions end: `[B, M]`."""
        raise NotImplementedError

    def ends_together(self, *, is_ragged: bool) -> bool:
        """Whether all sequences are complete with the last level, and none before; `is_ragged` is the catalogue's."""
        return self.is_beam_search and not (is_ragged or self.do_sample or self.has_criteria)


@dataclass(frozen=True)
class Speculation:
    """Counts of what one call scored ahead and accepted.

    Attributes:
        target_forwards: forwards of the model after the prefill; the same for all rows that are decided together.
        draft_forwards: forwards of the draft model after its prefill.
        drafted_nodes: nodes scored ahead, by row.
        accepted_nodes: those of them that became beams.
        drafted_steps: levels drafted, by row; a level may be drafted several times.
        accepted_steps: levels of a draft whose beams had all been drafted, up to the first level where one had not
            (the paper's "accept steps").
        num_nodes: with `exact=True`, the prefixes scored after the prompt that were not drafted, by row; else None.
        chosen: the draft that `drafting="auto"` has taken: "none", "trie", "head" or "assistant"; None without "auto".
    """

    target_forwards: int | Array
    draft_forwards: int | Array
    drafted_nodes: Int[Array, " batch"]
    accepted_nodes: Int[Array, " batch"]
    drafted_steps: Int[Array, " batch"]
    accepted_steps: Int[Array, " batch"]
    num_nodes: Int[Array, " batch"] | None = None
    chosen: str | None = static(default=None)
