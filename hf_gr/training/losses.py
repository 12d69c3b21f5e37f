# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses of draft models: pure functions of log-probabilities. Knows no model and no trie.

q is the draft model, p the target, K the beams of the target's search, y_1 ... y_K its sequences, best first. All
log-probabilities are over the whole vocabulary, nothing renormalised, unless a loss says otherwise. Source: AtSpeed
(sections 3 and 4.1). Each has a slow twin in `tests/reference.py`.

`levels` has one entry a position, `mask` says which tokens exist. What is masked (padding, missing sequences, illegal
children) does not affect a loss, whatever finite number it holds, and its gradient is 0.

Axes: B batch, K sequences, L positions, S prefixes of a level (1 at level 0, else K), C children, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class LevelLogProbs:
    """Both models after the prefixes of one length, over the children of each."""

    draft: Float[Tensor, "batch prefixes children"]  # log q; carries the gradient
    target: Float[Tensor, "batch prefixes children"]  # log p
    legal: Bool[Tensor, "batch prefixes children"]  # whether the child exists; the others mean nothing


def seqkd(
    log_probs: Float[Tensor, "batch sequences length"], mask: Bool[Tensor, "batch sequences length"]
) -> Float[Tensor, ""]:
    """Cross entropy on the label and equally on the target's K sequences; on the label alone L_Rec, the paper's SFT.

        -1/|D| sum_(x, y) in D  1/|y| sum_t log q(y_t | x, y_<t)

    The label and the target's sequences come in any order; a sequence without tokens does not count.

    Example:
        >>> seqkd(torch.tensor([[[-1.0, -3.0], [-4.0, -4.0]]]), torch.ones(1, 2, 2, dtype=torch.bool)).item()
        3.0

    Source: AtSpeed, section 4.1 (SFT; SeqKD: Kim and Rush, 2016).
    """
    return _mean(-log_probs, mask)


def align_s(
    levels: Sequence[LevelLogProbs],
    threshold: Float[Tensor, "batch length"],
    mask: Bool[Tensor, "batch sequences length"],
    *,
    num_tokens: int | None,
) -> Float[Tensor, ""]:
    """The alignment for strict verification: reverse KL over the draft's best legal tokens, and density.

        1/(B K) sum_(x, Y) sum_y 1/|y| sum_t [  sum_(v in V_c) q(v | c_<t) log(q(v | c_<t) / p(v | c_<t))
                                              - sum_(v in V_c) q(v | c_<t) log(q(v | c_<t) / p(y_K))      ]

    V_c are the `num_tokens` legal tokens that q finds likeliest, p(y_K) = p(y_K,t | y_K,<t). Together the two terms
    are sum q log(p(y_K) / p(v)), which is what is computed: linear in q, negative above the threshold, and least where
    all of q is on p's best token.

    Eq. 4 sums over the K sequences, eq. 8 takes their mean. Here both are means, so that `alpha` weighs the same: the
    sum with alpha is the mean with K alpha / (K alpha + 1 - alpha), times a constant.

    `threshold` is log p(y_K) (`kth_log_probs`), `num_tokens` the size of V_c, None for all legal tokens.

    Source: AtSpeed, equation 4.
    """
    terms = []
    for level, pair in enumerate(levels):
        draft, target, is_token = _best_of_draft(pair, num_tokens)
        probs = draft.exp() * is_token
        terms.append((probs * (threshold[:, level, None, None] - target)).sum(-1).expand(-1, mask.shape[1]))
    return _mean(torch.stack(terms, dim=-1), mask)


def align_r(
    levels: Sequence[LevelLogProbs],
    mask: Bool[Tensor, "batch sequences length"],
    *,
    num_tokens: int | None,
) -> Float[Tensor, ""]:
    """The alignment for relaxed verification: total variation over the best legal tokens.

        1/(B K) sum_(x, y) 1/|y| sum_t 1/2 sum_(v in V_c) |p'(v | x, y_<t) - q'(v | x, y_<t)|

    p' and q' are p and q over V_c, renormalised there. The paper says "top-K valid tokens", "similar to AtSpeed-S",
    whose V_c is ConstrainedTopK(q): these are the draft's. Its code compares all legal tokens: `num_tokens=None`.

    Source: AtSpeed, equation 8.
    """
    terms = []
    for pair in levels:
        draft, target, is_token = _best_of_draft(pair, num_tokens)
        # Where nothing is legal, both are uniform over missing children, and masked out again.
        truncated = [values.masked_fill(~is_token, LOWEST).softmax(-1) * is_token for values in (draft, target)]
        terms.append(0.5 * (truncated[0] - truncated[1]).abs().sum(-1).expand(-1, mask.shape[1]))
    return _mean(torch.stack(terms, dim=-1), mask)


def align_f(levels: Sequence[LevelLogProbs], mask: Bool[Tensor, "batch sequences length"]) -> Float[Tensor, ""]:
    """Forward divergence over all legal tokens, along the target's sequences: an alignment that the paper lacks.

        1/(B K) sum_(x, y) 1/|y| sum_t sum_(v legal) p(v | x, y_<t) log(p(v | x, y_<t) / q(v | x, y_<t))

    A draft is right if the target's K sequences are among its N: it must know all that the target finds likely, and
    may be wrong about the rest. This divergence asks for that; those of `align_s` and `align_r` let a draft forget
    what it finds unlikely. Nothing is renormalised, so that probability on illegal tokens costs, too; where the target
    has some there, the value may be negative.

    Source: ours; DistillSpec (Zhou et al., 2024) compares divergences for a single sequence.
    """
    terms = []
    for pair in levels:
        draft, target, is_token = _best_of_draft(pair, None)
        probs = target.exp() * is_token
        terms.append((probs * (target - draft)).sum(-1).expand(-1, mask.shape[1]))
    return _mean(torch.stack(terms, dim=-1), mask)


def kth_log_probs(
    log_probs: Float[Tensor, "batch sequences length"], mask: Bool[Tensor, "batch sequences length"]
) -> Float[Tensor, "batch length"]:
    """log p(y_K,t | y_K,<t): at each position, of the target's last sequence that has a token there.

    With K sequences of one length, best first, that is y_K; with fewer, the worst of them; 0 if there is none.

    Example:
        >>> log_probs = torch.tensor([[[-1.0, -2.0], [-3.0, 0.0]]])
        >>> kth_log_probs(log_probs, torch.tensor([[[True, True], [True, False]]])).tolist()
        [[-3.0, -2.0]]
    """
    numbers = torch.arange(mask.shape[1], device=mask.device)[:, None]
    last = torch.where(mask, numbers, 0).amax(1, keepdim=True)
    return (log_probs * mask).gather(1, last)[:, 0]


LOWEST = -1e4  # stands for log 0; its exponential is 0 in every precision


def _best_of_draft(pair: LevelLogProbs, num_tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log q, log p and whether the token exists, for q's likeliest legal tokens; finite everywhere."""
    draft = pair.draft.clamp(min=LOWEST).masked_fill(~pair.legal, LOWEST)
    target = pair.target.clamp(min=LOWEST).masked_fill(~pair.legal, LOWEST)
    if num_tokens is None or num_tokens >= draft.shape[-1]:
        return draft, target, pair.legal
    # Illegal tokens come last, even after legal ones of probability 0.
    chosen = draft.detach().masked_fill(~pair.legal, -torch.inf).topk(num_tokens, sorted=False).indices
    return draft.gather(-1, chosen), target.gather(-1, chosen), pair.legal.gather(-1, chosen)


def _mean(
    values: Float[Tensor, "batch sequences length"], mask: Bool[Tensor, "batch sequences length"]
) -> Float[Tensor, ""]:
    """The mean over positions, then over all sequences that have any."""
    lengths = mask.sum(-1)
    means = torch.where(mask, values, 0.0).sum(-1) / lengths.clamp(min=1)
    return means.sum() / (lengths > 0).sum().clamp(min=1)
