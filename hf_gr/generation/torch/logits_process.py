# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as an ordinary logits processor, for any other loop of transformers. Knows no beams.

Axes: R rows of T tokens; S scored positions of each; V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EtaLogitsWarper,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    TopHLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.labels import check_is_tokenizer, encode_continuations
from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.sequences import LARGEST_TOKEN, is_integer, to_host
from hf_gr.generation.checks import check_processor, check_scores_of_rules, check_tokens_of_catalogue
from hf_gr.generation.named_catalogues import batch_rules

from .constraints import NEARLY_IMPOSSIBLE, Constraint, OneSequence, SeveralLabels

WITH_STATE = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


class ConstraintLogitsProcessor(LogitsProcessor):
    """Keeps the tokens that continue a sequence of the catalogue, and drops all others to `-inf`.

    `generate(constraint_index=...)` is faster and needs no processor; this one is for models and loops that it does
    not support. A row that is complete, or is not a prefix of the catalogue, keeps one token: the end token (token 0
    without one), with a very low finite score, so that samplers still find a distribution and beams never prefer it.
    Legal tokens get that score where other processors (`min_new_tokens`, `suppress_tokens`) forbid all of them.

    With `prompt_length` or `attention_mask` a call depends on its arguments alone: one instance serves any number of
    generations at a time, in any order. Without either, it remembers the prompt of the first call; a call that does
    not continue from there, at most one token further than the previous call, begins a new generation. Generations
    then run one at a time: greedy, sampled, with beams or assisted. A new prompt that extends the last one, but not
    beyond where its answer ended (as a next turn of a conversation may), is mistaken for a continuation. Pass the
    length in that case, with several threads, and on a device that must not synchronise to compare prompts.

    With `separator` an answer is several labels, each at most once: the separator may replace a label's end token
    while another label is left. `items` splits such answers. Labels of `from_labels` include the space before them, so
    that `","` writes "Sports, Science".

    Where a row has fewer sequences than beams, transformers fills it with copies that have that very low score
    (`generate(constraint_index=...)` gives padding rows of score `-inf`).

    Args:
        index: the catalogue as it is now, or a list of one for each prompt (views of one index); several rows per
            prompt count as its paths.
        prompt_length: tokens before the generated ones, padding included: `inputs["input_ids"].shape[1]`; of an
            encoder-decoder, those of the decoder's prompt, usually 1.
        exclude_items: item ids for each prompt, as in `generate`.
        attention_mask: the prompt's, `[prompts, length]`, instead of `prompt_length`; not for encoder-decoders.
        separator: token ids, or a text with `tokenizer`; None for one label. The index needs an end token.
        max_labels: the most labels of one answer; None for as many as there are.
        tokenizer: reads `separator`; must be the one that the index was built with.

    Raises:
        ValueError: as `generate` for `constraint_index` and `exclude_items`; a separator that is also inside a label;
            a tokenizer other than the index's.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
        >>> scores = ConstraintLogitsProcessor(index)(torch.tensor([[1, 2]]), torch.zeros(1, 8))
        >>> scores.isfinite().nonzero()[:, 1].tolist()
        [5, 6]

    Source: STATIC, section 4; several labels: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy".
    """

    separator: tuple[int, ...] | None = None
    max_labels: int | None = None

    def __init__(
        self,
        index: ConstraintIndex | Sequence[ConstraintIndex],
        prompt_length: int | None = None,
        *,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        attention_mask: Tensor | None = None,
        separator: Sequence[int] | str | None = None,
        max_labels: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.prompt_length = check_processor(index, prompt_length, attention_mask)
        if tokenizer is not None:
            check_is_tokenizer(tokenizer)
            for one in [index] if isinstance(index, ConstraintIndex) else index:
                one.check_tokenizer(tokenizer)
        rules = batch_rules(index, exclude_items)
        self.constraint: Constraint = OneSequence(rules)
        if separator is not None:
            self.constraint = several = read_several(rules, separator, max_labels, tokenizer)
            self.separator = several.separator
        elif max_labels is not None:
            raise ValueError(f"max_labels={max_labels}, expected 1 or more, together with separator=")
        self.max_labels = max_labels
        self._prompt: Tensor | None = None  # of the last generation, and how far it came; unused with prompt_length
        self._longest = 0

    @property
    def rules(self) -> BatchRules:
        """The catalogue of every prompt."""
        return self.constraint.rules

    @classmethod
    def _of(cls, constraint: Constraint) -> ConstraintLogitsProcessor:
        processor = cls.__new__(cls)
        processor.constraint, processor.prompt_length = constraint, None
        processor._prompt, processor._longest = None, 0
        return processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask scores by the tokens before them.

        Args:
            input_ids: `[R, T]` tokens, the prompt included.
            scores: `[R, V]` after them; or `[R, S, V]`, the last S of T positions, each after its token. Those
                inside the prompt stay as they are.
        """
        constraint = self.constraint
        check_tokens_of_catalogue(constraint, scores.shape[-1], name="index")
        num_rows, length = input_ids.shape
        num_prompts = constraint.rules.num_rows or num_rows
        check_scores_of_rules(num_rows, num_prompts)
        positions = scores if scores.dim() == 3 else scores[:, None]
        first = length - positions.shape[1] + 1  # tokens before the first scores
        start = self._find_start(input_ids, first) if self.prompt_length is None else self.prompt_length
        if length < start:
            raise ValueError(
                f"input_ids have {length} tokens, expected prompt_length={start} or more: is it another prompt's?"
            )
        generated = input_ids[:, start:].to(scores.device)
        inside = min(max(start - first, 0), positions.shape[1])
        masked = constraint.mask(generated, positions[:, inside:], num_prompts)
        masked = torch.cat([positions[:, :inside], masked], dim=1) if inside else masked
        return masked if scores.dim() == 3 else masked[:, 0]

    def items(self, sequences: Any) -> list[list[ItemId]]:
        """The items of generated answers: those of all their labels, in the order of the answer.

        Args:
            sequences: `[rows, T]` tokens or token lists, the prompt cut off, padding allowed (also -1 and -100); with
                a rule for each prompt, as many rows of each as of the others.

        Returns:
            A list for each row. An answer of several labels that a length limit cut off, before its end token, has
            none: its truncated last label may be another label.

        Raises:
            ValueError: tokens that are not integers, or a wrong number of rows.
        """
        return self.constraint.items(sequences)

    def _find_start(self, input_ids: Tensor, first: int) -> int:
        """The length of the prompt that a call continues: the last one's, or all tokens."""
        prompt = self._prompt
        if (
            prompt is None
            or not prompt.shape[1] <= first <= self._longest + 1
            or len(prompt) != len(input_ids)
            or prompt.device != input_ids.device
            or not torch.equal(prompt, input_ids[:, : prompt.shape[1]])
        ):
            self._prompt = prompt = input_ids[:, :first].clone()
        self._longest = input_ids.shape[1]
        return prompt.shape[1]


class OfLiving(LogitsProcessor):
    """Applies a processor only to possible tokens, in rows that have some: dead paths stay dead."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process `[R, V]` scores."""
        is_possible = scores > NEARLY_IMPOSSIBLE
        is_dead = ~is_possible.any(dim=-1, keepdim=True)
        return torch.where(is_possible, self.inner(input_ids, scores.masked_fill(is_dead, 0.0)), scores)


def keep_dead(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The same processors; those that take a softmax as a distribution do not see dead paths, which have none."""
    of_living = (LogitNormalization, EtaLogitsWarper, TopHLogitsWarper, SynthIDTextWatermarkLogitsProcessor)
    return LogitsProcessorList(OfLiving(one) if isinstance(one, of_living) else one for one in processors)


def keeper_of_state(processors: Iterable[Any]) -> LogitsProcessor | None:
    """The first of transformers' processors that expects one call a level, with all rows; None if there is none."""
    own = (one.inner if isinstance(one, OfLiving) else one for one in processors)
    return next((one for one in own if isinstance(one, WITH_STATE)), None)


def read_several(rules: BatchRules, separator: Any, max_labels: Any, tokenizer: Any) -> SeveralLabels:
    """The constraint of answers of several labels; `tokenizer` reads a separator that is a text."""
    tokens = _read_separator(separator, tokenizer, rules.shared.eos_token_id)
    if max_labels is not None and (not is_integer(max_labels) or max_labels < 1):
        raise ValueError(f"max_labels={max_labels}, expected 1 or more, together with separator=")
    return SeveralLabels(rules, tokens, max_labels)


def _read_separator(separator: Sequence[int] | str, tokenizer: Any, eos_token_id: int | None) -> tuple[int, ...]:
    """The tokens of a separator."""
    if eos_token_id is None:
        raise ValueError(
            "index has no end token, expected one for several labels: ConstraintIndex.from_labels gives it, or "
            "from_sequences(..., eos_token_id=)"
        )
    if isinstance(separator, str):
        if tokenizer is None:
            raise ValueError(f"separator={separator!r} is a text, expected tokenizer= with it, or token ids")
        separator = encode_continuations(tokenizer, [separator])[0] if separator else []
    host: Any = to_host(separator)
    if not isinstance(host, Iterable) or getattr(host, "ndim", 1) == 0:
        raise ValueError(f"separator={separator!r}, expected a list of token ids, or a text")
    tokens: list[Any] = list(host)
    if not tokens or not all(is_integer(token) and 0 <= token <= LARGEST_TOKEN for token in tokens):
        raise ValueError(f"separator={tokens}, expected one token id or more, or a text")
    if eos_token_id in tokens:
        raise ValueError(f"separator={tokens} has the end token {eos_token_id}, expected it after the last label only")
    return tuple(int(token) for token in tokens)
