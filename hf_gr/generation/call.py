# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate`, for both backends: read and checked before any work; and the items of its answer.

Knows NumPy alone; decodes nothing.

Axes: B batch, P prompt, Q first tokens of an encoder-decoder's sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hf_gr.catalogue.generated import items_of_batch
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.item_values import ItemBias, ItemGroups
from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.sequences import to_host

from .checks import (
    check_code_book,
    check_config,
    check_exact,
    check_lengths,
    check_tokens_of_catalogue,
    check_values,
    read_widths,
)
from .configuration import GR_FIELDS, VERIFICATION, set_fields
from .defaults import exact_sizes, limit_to_nodes
from .drafts import BaseDraft, drafts_of
from .messages import say_once
from .models import first_of, inferred_padding
from .named_catalogues import batch_rules, resolve_index
from .seeds import row_seeds

# Which transformers compares before we see them.
NUMBERS = "num_return_sequences max_new_tokens min_new_tokens min_length num_assistant_tokens temperature".split()


@dataclass(frozen=True)
class Prompt:
    """The prompts of a call."""

    # What the model, or its encoder, reads: `[B, P]` tokens, in Flax in NumPy; in PyTorch also embeddings, images,
    # ..., and None if the model makes its own.
    inputs: Any
    mask: npt.NDArray[np.bool_] | None  # `[B, P]`, on the host: which are tokens; None for no padding
    num_rows: int
    length: int  # tokens before the generated ones, by which `max_length` counts
    is_tokens: bool = True
    start: npt.NDArray[np.int32] | None = None  # `[B, Q]`, the first tokens of an encoder-decoder's sequences in Flax


@dataclass(frozen=True)
class BaseCall(ABC):
    """A checked call: from here on, only the model can fail."""

    kinds: ClassVar[Mapping[str | None, type[BaseDraft]]]  # of drafts, by what `drafting` calls them

    model: Any
    config: Any  # prepared, with our fields
    model_kwargs: dict[str, Any]  # the arguments that are not fields of the config
    prompt: Prompt
    rules: BatchRules  # the catalogue of every prompt
    drafts: dict[str | None, Any]  # by name, the simplest first: one, or what `drafting="auto"` chooses from
    seeds: npt.NDArray[np.int64] | None  # of the prompts' samples, if given
    step_scores: bool  # whether `output_scores` asks for more than `sequences_scores`
    is_limited: bool  # whether the call itself limits the length of an answer

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: Any,
        kwargs: dict[str, Any],
        *,
        indexes: Any,
        exclude_items: Any,
        item_bias: Any,
        item_groups: Any,
        assistant: Any,
        seed: Any,
        max_lengths: Mapping[str, int] = MappingProxyType({}),
        several: bool = False,
    ) -> Any:
        """Read and check the arguments of `generate` that both backends have.

        `kwargs` are fields of the config, ours among them, and arguments of the model; `indexes` the catalogue or
        catalogues, or their names; `max_lengths`, by what else sets a limit, the length of prompt and answer;
        `several`, whether an answer may have several sequences.
        """
        for name in NUMBERS:
            if isinstance(kwargs.get(name), str):
                raise ValueError(f"{name}={kwargs[name]!r}, expected a number and not a text")
        fields = {name: kwargs.pop(name) for name in GR_FIELDS if name in kwargs}
        configs = generation_config, model.generation_config
        if first_of("verification", fields, *configs) == "relaxed":
            if kwargs.setdefault("do_sample", True) is False:
                raise ValueError("do_sample=False with verification='relaxed', expected True: it samples beams")
            if first_of("top_k", kwargs, *configs) is None:
                kwargs["top_k"] = 0  # transformers' default, 50, could leave fewer candidates than beams
        nodes_at_once, widths = None, None
        if getattr(kwargs.get("num_beams"), "ndim", 0):  # an array
            kwargs["num_beams"] = kwargs["num_beams"].tolist()
        if isinstance(kwargs.get("num_beams"), list | tuple):
            widths = read_widths(kwargs["num_beams"], first_of("num_return_sequences", kwargs, *configs) or 1)
            kwargs["num_beams"] = max(widths)
        if first_of("exact", fields, *configs):
            if first_of("do_sample", kwargs, *configs) and first_of("top_k", kwargs, *configs) is None:
                kwargs["top_k"] = 0  # transformers' default, 50, would hide items
            nodes_at_once = first_of("num_beams", kwargs, *configs)
            # transformers would refuse more results than beams.
            kwargs["num_beams"] = max(first_of("num_return_sequences", kwargs, *configs) or 1, nodes_at_once or 2, 2)
        # The call's own only: a checkpoint's lengths predate its catalogue.
        max_new_tokens = kwargs.get("max_new_tokens", getattr(generation_config, "max_new_tokens", None))
        max_length = kwargs.get("max_length", getattr(generation_config, "max_length", None))
        step_scores = kwargs.pop("_step_scores", True)
        config, model_kwargs = cls.prepare_config(model, generation_config, kwargs)
        set_fields(config, fields)
        check_config(config)
        if config.exact or config.max_nodes:
            check_exact(config, nodes_at_once, fields)
        if item_bias is not None or item_groups is not None or config.max_per_group:
            check_values(config, has_bias=item_bias is not None, has_groups=item_groups is not None)
        config.widths = widths
        if widths is not None and (config.exact or config.verification != "strict"):
            raise ValueError("num_beams is a list, expected a number with exact=True and draft heads: pass a number")
        indexes = resolve_index(model, indexes, may_be_list=True)
        prompt = cls.read_prompt(model, inputs, config, model_kwargs)
        rules = batch_rules(indexes, exclude_items, num_prompts=prompt.num_rows)
        penalty = 0.0 if config.do_sample else float(config.length_penalty)  # samples have plain sums
        if item_bias is not None:
            bias = item_bias
            if not isinstance(bias, ItemBias):
                bias = ItemBias.read(item_bias, rules.snapshots, length_penalty=penalty)
            rules = replace(rules, bias=bias)
        if config.max_per_group:
            groups = item_groups
            if not isinstance(groups, ItemGroups):
                groups = ItemGroups.read(item_groups, rules.snapshots)
            rules = replace(rules, groups=groups)
        catalogue = rules.shared
        check_tokens_of_catalogue(catalogue, cls.vocabulary_of(model), name="constraint_index")
        check_code_book(first_of("code_book", fields, *configs), catalogue)
        room = check_lengths(
            config, catalogue, max_new_tokens, max_length, prompt_length=prompt.length, others=max_lengths
        )
        config.max_new_tokens, config.max_length = room or catalogue.max_length, None
        if config.exact:
            size = {"vocab_size": cls.vocabulary_of(model), "max_length": catalogue.max_length}
            size["num_results"] = config.num_return_sequences
            sizes = exact_sizes(nodes_at_once, config.max_nodes, batch_size=prompt.num_rows, **size)
            config.num_beams, config.max_nodes = sizes
            if config.max_nodes < (steps := catalogue.max_length - 1):
                raise ValueError(
                    f"max_nodes={config.max_nodes}, expected at least {steps}, the prefixes of one sequence: omit it"
                )
        if not (several or VERIFICATION[config.verification].unchecked_levels(2)):
            limit_to_nodes(config, catalogue)
        end, forced = catalogue.eos_token_id, np.ravel(to_host(config.forced_eos_token_id))
        is_forced = end is not None and end in forced and config.max_new_tokens == catalogue.max_length
        # A catalogue without these tokens could never begin or end with them.
        config.forced_bos_token_id, config.forced_eos_token_id = None, end if is_forced else None
        drafts = drafts_of(cls.kinds, model, config, assistant, prompt, catalogue, fields, model_kwargs)
        seeds = None if seed is None else row_seeds(seed, prompt.num_rows)
        return cls(model, config, model_kwargs, prompt, rules, drafts, seeds, step_scores, room is not None)

    def with_values(
        self, ops: Any, found: dict[str, Any], *, missing_token: Any, put: Callable[[Any], Any] = lambda array: array
    ) -> dict[str, Any]:
        """What a search found, `[B, K, ...]` by name: biases added, and only the best rows of which each fits.

        `num_proven` is then of those. `put` moves an array from the host to where the others are.
        """
        rules, config = self.rules, self.config
        if rules.groups is not None and not config.exact:
            at_most, number = config.max_per_group, config.num_return_sequences
            fit = rules.groups.fitting(rules.shared, to_host(found["sequences"]), at_most, number)
            places, fits = map(put, fit)
            if found.get("num_proven") is not None:
                found["num_proven"] = (fits & (places < found["num_proven"][:, None])).sum(-1)
            fills = {"sequences": missing_token, "beam_indices": -1, "scores": -np.inf}
            for name, fill in fills.items():
                if name in found:
                    rows = ops.along(found[name], places)
                    found[name] = ops.fill(rows, ~fits[..., None] if rows.ndim > 2 else ~fits, fill)
        for name in ("scores", "perturbed_scores"):
            if rules.bias is not None and found.get(name) is not None:
                found[name] = found[name] + rules.bias.largest
        return found

    @staticmethod
    @abstractmethod
    def prepare_config(model: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The config of a call by transformers' rules, and the arguments that are not fields of it."""

    @staticmethod
    @abstractmethod
    def read_prompt(model: Any, inputs: Any, config: Any, model_kwargs: dict[str, Any]) -> Prompt:
        """Find the prompts among the arguments of a call by transformers' rules, and check them."""

    @staticmethod
    @abstractmethod
    def vocabulary_of(model: Any) -> int:
        """How many tokens a model can write."""


def read_tokens(given: Any, name: str, vocabulary: int | None) -> npt.NDArray[Any]:
    """`[B, P]` tokens that a model has embeddings for, on the host."""
    host = to_array(given, name)
    if host.ndim != 2 or host.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {list(host.shape)} of {host.dtype}, expected integers [batch, length]: pad, stack and "
            "unsqueeze first"
        )
    check_some_tokens(*host.shape)
    least, most = int(host.min()), int(host.max())
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        raise ValueError(
            f"{name} has token {least if least < 0 else most}, expected 0 to less than {vocabulary}: "
            "is it another model's prompt, or a label such as -100?"
        )
    return host


def read_mask(
    given: Any,
    config: Any,
    *,
    tokens: npt.NDArray[Any] | None,  # from which padding can be inferred
    shape: tuple[int | None, int | None],  # of the prompts; None for what is not known
    is_encoder_decoder: bool,  # an encoder takes padding on any side, and none is inferred
    may_be_longer: bool = False,  # tokens in a cache need not be given again
) -> npt.NDArray[np.bool_] | None:
    """Which tokens are no padding, as given, or as transformers infers it; None if nothing is known to be padding."""
    if given is not None:
        host = to_array(given, "attention_mask")
        width = host.shape[-1] if host.ndim else 0
        num_rows, length = shape[0] or len(host), width if shape[1] is None else shape[1]
        fits = host.ndim == 2 and len(host) == num_rows
        if not (fits and (width == length or (may_be_longer and width > length))):
            raise ValueError(
                f"attention_mask is {list(host.shape)}, expected {[num_rows, length]} as the prompt: a row for "
                "every prompt, an entry for every token"
            )
        if len(strange := host[(host != 0) & (host != 1)]):
            raise ValueError(f"attention_mask has {strange[0]}, expected 0 at padding and 1 at all other tokens")
        mask = host != 0
    else:
        padding = None if is_encoder_decoder or tokens is None else inferred_padding(config)
        if padding is None:
            return None
        mask = tokens != padding
    for row in np.flatnonzero(~mask.any(-1))[:1]:
        raise ValueError(f"prompt {row} is all padding, expected at least one token: begin it with bos_token_id")
    for row in np.flatnonzero(~mask[:, -1:].all(-1))[:1]:
        if not is_encoder_decoder:
            raise ValueError(
                f"prompt {row} ends with padding, expected padding on the left: set tokenizer.padding_side='left'"
            )
    return mask


def check_some_tokens(num_rows: int, length: int) -> None:
    """Refuse a batch without prompts, and prompts without tokens."""
    if num_rows == 0:
        raise ValueError("the batch has 0 prompts, expected at least one: omit such a call")
    if length == 0:
        raise ValueError("the prompt has no token, expected at least one: begin it with bos_token_id")


def to_array(values: Any, name: str) -> npt.NDArray[Any]:
    """An array of the host; refuses nested lists of several lengths."""
    host = to_host(values, name)
    try:
        return np.asarray(host)
    except ValueError as error:
        raise ValueError(f"{name} is ragged, expected an array [batch, length]: pad it on the left") from error


class WithItems:
    """Adds `item_ids` to an output object of transformers' kind."""

    # The catalogue of the call, or what reads its answers; and the tokens before the generated ones.
    _answered: tuple[BatchRules | Callable[[Any], list[list[ItemId]]], int] | None = None
    _item_ids: list[list[ItemId]] | None = None

    @property
    def item_ids(self) -> list[list[ItemId]] | None:
        """For every row of `sequences`, the items that it stands for; None where no catalogue was given.

        Like `index.items` of the generated tokens, with the call's views and `exclude_items`, in the catalogue as it
        was at the call. Computed on first use, which waits for the device; a padding row has none.
        """
        if self._answered is not None:
            rules, start = self._answered
            sequences: Any = getattr(self, "sequences")  # noqa: B009 # a field of the other base class
            rows = to_host(sequences)[:, start:]
            self._item_ids = items_of_batch(rules, rows) if isinstance(rules, BatchRules) else rules(rows)
            if not any(self._item_ids) and isinstance(rules, BatchRules) and rules.excluded_ids is None:
                if all(snapshot.num_items for snapshot in rules.snapshots):
                    say_once("no prompt of a batch has an answer, though its catalogue has items: are the logits NaN?")
            self._answered = None
        return self._item_ids

    def __reduce__(self) -> Any:
        """Copies have the items, not the catalogue."""
        _ = self.item_ids
        return super().__reduce__()


def with_items(output: Any, rules: BatchRules | Callable[[Any], list[list[ItemId]]], start: int) -> Any:
    """An output that knows its items: those of its sequences from position `start` on."""
    output._answered = rules, start
    return output
