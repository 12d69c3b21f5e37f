# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Signs that codes of semantic IDs were compiled as token ids: everything runs then, but every answer is wrong."""

from itertools import pairwise

import numpy as np

from .snapshot import Snapshot

FAR_BELOW = 0.5  # of a vocabulary: code tokens are its last ones, or nearly
FIRST_CODES = 1  # codes begin at 0, at 1 in some recipes
WHY = (
    "if these are codes of semantic IDs, compile them as codes (SemanticIds in Python, --codes with --offset or "
    "--tokenizer in hf-gr index build): a model would read them as other tokens, and no answer would be right"
)


def doubts_of(snapshot: Snapshot, *, vocabulary: int | None = None) -> list[str]:
    """Why tokens look like codes; empty if they do not, as the tokens of labels."""
    if snapshot.tokenizer is not None:
        return []
    doubts: list[str] = []
    ends = [] if snapshot.eos_token_id is None else [snapshot.eos_token_id]
    levels = [np.setdiff1d(tokens, ends) for tokens in snapshot.trie.codebooks]
    levels = [tokens for tokens in levels if len(tokens)]
    begin_alike = len(levels) > 1 and all(tokens[0] <= FIRST_CODES for tokens in levels)
    if begin_alike and all(np.intersect1d(one, other).size for one, other in pairwise(levels)):
        first = ", ".join(str(tokens[0]) for tokens in levels)
        doubts.append(
            f"the tokens look like codes: those of every level begin at {first}, and levels share some; {WHY}"
        )
    if vocabulary is not None and snapshot.max_token_id + 1 < FAR_BELOW * vocabulary:
        doubts.append(
            f"the largest token, {snapshot.max_token_id:,}, is far below the model's vocabulary of {vocabulary:,}: "
            f"was it trained with another offset or its tokenizer's tokens?{'' if doubts else f' Or, {WHY}'}"
        )
    return doubts
