# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRGenerationConfig`: what transformers' configuration lacks. Holds values; loads nothing."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import GenerationConfig

from hf_gr.catalogue.sequences import is_integer
from hf_gr.generation.internals import without_bookkeeping

DRAFTING = (None, "auto", "trie", "assistant", "head")  # each is a line in `KINDS` of either backend


@dataclass(frozen=True)
class Verification:
    """How scores become an answer."""

    # Beams are drawn, and drafted samples are accepted by the ratio of both models' probabilities.
    samples: bool = False
    by_head_alone: bool = False  # the head's own search is the answer; the model is not called after the prefill
    # Given L levels, how many of the first ones are not constrained to the catalogue.
    unchecked_levels: Callable[[int], int] = lambda num_levels: 0
    is_narrow: bool = False  # each beam keeps its `num_beams` best tokens (NEZHA, algorithm 3, line 19)


VERIFICATION = {
    "strict": Verification(),
    "relaxed": Verification(samples=True),
    "catalogue": Verification(by_head_alone=True),
    "last_level": Verification(by_head_alone=True, unchecked_levels=lambda num_levels: num_levels - 1, is_narrow=True),
    "none": Verification(by_head_alone=True, unchecked_levels=lambda num_levels: num_levels),
}
# Fields beyond transformers', with their defaults. They may also be given to `generate` as keywords.
GR_FIELDS: dict[str, Any] = {
    "constraint_index": None,
    "drafting": None,
    "verification": None,
    "num_draft_beams": None,
    "draft_token_budget": None,
    "exact": None,
    "max_nodes": None,
    "code_book": None,
    "max_per_group": None,
}
# Of these fields and of `generate`'s arguments, what transformers' own loop has not, and what to do there.
OF_OUR_LOOP = {
    "exact": "omit it",
    "max_per_group": "omit it",
    "item_bias": "omit it",
    "widths": "pass num_beams as one number",
    "seed": "use torch.manual_seed",
    "generator": "use torch.manual_seed",
}
SAVED_AS = "hf_gr"


class GRGenerationConfig(GenerationConfig):
    """A generation configuration that also names a catalogue.

    It is saved as `generation_config.json` like any other, and a checkpoint with it still loads in plain transformers.
    In the file our fields are one object, `"hf_gr"`: if they were top-level fields, plain transformers would accept
    `generate(constraint_index=...)` and ignore it, instead of refusing an unknown argument.

    Args:
        constraint_index: repository id or folder of the checkpoint's `ConstraintIndex`; `"."` is the checkpoint
            itself.
        drafting: what drafts nodes, which are scored together with the live beams, so that one forward decides
            several levels:

            - None: nothing, unless `generate` is given an `assistant_model`;
            - `"trie"`: the catalogue. Wherever the beams have at most `draft_token_budget` legal continuations, level
              by level, all of them are scored: none can be missing, so results are the same as without a draft.
              Levels without alternatives are always included. The prompt's own forward scores the first levels that
              fit.
            - `"auto"`: whichever is expected to be the fastest of no draft, the catalogue, the checkpoint's draft head
              (if it fits the catalogue) and `assistant_model` (if given); answers are the same. The first call of a
              kind times a narrow and a wide forward (eight forwards and a prefill, once); these times and the
              catalogue's widths decide what drafts, and how many nodes. `out.speculation.chosen` names it. Half of the
              levels that a model or head drafts are assumed to be accepted. Calls are of one kind if they have the
              same model and beams, and numbers of prompts within a factor of two: make one call of each kind before
              traffic. With `verification="relaxed"`, where answers depend on the draft, a given
              `assistant_model` always drafts, and a head never. With `synced_gpus` nothing is timed or drafted.
            - `"assistant"`: the draft model `assistant_model`, which searches the same catalogue with
              `num_draft_beams` beams; once the remaining levels fit the budget, the catalogue takes over. Its first
              nodes are scored in the prompt's own forward: if all are accepted, no other forward is needed. With
              relaxed verification it begins after the first level.
            - `"head"`: the checkpoint's draft head (`model.add_draft_head`), which continues from one prefill of the
              prompt and its placeholders. By default it also decides (`verification="catalogue"`, NEZHA): the model is
              not called again. With `"strict"` or `"relaxed"` it drafts like a draft model, after that prefill.

            Models that decode in transformers' loop, `synced_gpus`, and processors of transformers that keep state
            between levels (`guidance_scale`, SynthID watermarks) decode without a draft, and log that once. Prompts
            that are given as embeddings or with images, in chunks, or after a cache, are computed before anything is
            drafted. With a draft, rows advance at their own pace: logits processors and stopping criteria of your own
            must not keep state between calls.
        verification: how drafts are accepted: `"strict"`, results are the same as without a draft (AtSpeed-S);
            `"relaxed"`, sampling beams accept a drafted sample by the ratio of both models' probabilities (AtSpeed-R),
            which implies `do_sample`, and `top_k=0` unless `top_k` is set. With `drafting="head"` also, and by
            default, `"catalogue"`: the head's own constrained beam search is the answer. For comparison:
            `"last_level"`, the paper's form: beams are unconstrained, each keeps its `num_beams` best tokens, and only
            complete sequences are checked, so fewer than requested may remain; and `"none"`, where answers need not be
            items. Both need sequences of one length. By default `"strict"`, with a head `"catalogue"`.
            Strict verification is exact when sampling, too: drafts use the model's own noise (`seed`). Relaxed answers
            only approximate the model's own samples: with as many draft beams as beams, few drafts are accepted; with
            more, the answers move towards the draft model's (numbers: RESULTS.md).
        num_draft_beams: beams of the draft model or head, at least `num_beams`; by default twice as many, or as many
            if relaxed.
        draft_token_budget: the most nodes that the catalogue drafts for one forward, per row, less those that the
            draft model drafts for it (as many as beams are always allowed); by default 512, or what keeps the logits
            of all rows under 256 MB; 0 for none. If no level fits the budget, decoding is plain: `out.speculation`
            tells.
        num_assistant_tokens: transformers' own; the most levels that the draft model drafts at once. It never drafts
            beyond the end of the catalogue's sequences.
        exact: True for the best `num_return_sequences` items of the whole catalogue, proven: prefixes are scored best
            first, `num_beams` of each prompt in a forward (by default 64, or as many as keep their logits under 256
            MB), until none that is left can hold a better item. Scores are those of a beam search. Drafts only save
            forwards, as elsewhere. `out.num_proven` says how many answers are proven. With `do_sample=True` the
            items are drawn without replacement, exactly: one after the other, each with its probability among those
            that are left (Kool, van Hoof and Welling 2020, ancestral Gumbel-top-k); in that order,
            `out.perturbed_scores`. `sequences_scores` are then plain sums of log-probabilities, after `temperature`.
        max_nodes: the most prefixes that `exact=True` scores for a prompt, by default 16 times `num_beams`, or more
            for many or long sequences; then the best items found so far are the answer, and `out.num_proven` is less
            than `num_return_sequences`.
        code_book: what tokens meant when the model was trained, as some items and their tokens
            (`ConstraintIndex.code_book`); `train_recommender` sets it. A catalogue in which most of these items have
            other tokens is refused.
        max_per_group: the most items of one group in a list, for variety: `item_groups` of `generate` names the
            groups, by default the first token of each sequence. With `exact=True` this is the best such list of the
            catalogue, else the best of what the beams found: rows are missing if that is too little, so give more
            beams than results.
        forced_eos_token_id: transformers' own; used only if it is the catalogue's end token. In the longest sequences
            that token then has score 0, if `max_new_tokens` is omitted or equals their length.
        kwargs: the other arguments of `transformers.GenerationConfig`.

    Raises:
        ValueError: a value that is not listed above.

    Example:
        >>> config = GRGenerationConfig(constraint_index=".", num_beams=20, num_return_sequences=20)
        >>> GRGenerationConfig.from_dict(config.to_dict()).constraint_index
        '.'
    """

    def __init__(self, **kwargs: Any) -> None:
        saved = kwargs.pop(SAVED_AS, None)  # flat in the files of 0.1.0.dev0
        if not isinstance(saved, Mapping | None):
            raise ValueError(
                f"{SAVED_AS} is {saved!r} in a generation config, expected an object of our fields: omit it"
            )
        saved = saved or {}
        for name, default in GR_FIELDS.items():
            setattr(self, name, kwargs.pop(name, saved.get(name, default)))
        super().__init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Files have no numbers of NumPy.
        super().__setattr__(name, value.item() if isinstance(value, np.generic) else value)

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """The content of a file, with our fields in an object of their own; the arguments are transformers'."""
        content = json.loads(super().to_json_string(*args, **kwargs))
        fields = {name: content.pop(name, default) for name, default in GR_FIELDS.items()}
        given = {name: value for name, value in fields.items() if value != GR_FIELDS[name]}
        content |= {SAVED_AS: given} if given else {}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Check our fields, then transformers' own; the arguments are transformers'."""
        check_fields({name: getattr(self, name) for name in GR_FIELDS})
        beams = self.num_beams
        if getattr(
            self, "exact", None
        ):  # which may have more results than prefixes in a forward; transformers would refuse that
            self.num_beams = max(beams or 2, self.num_return_sequences or 1)
        try:
            super().validate(*args, **kwargs)
        finally:
            self.num_beams = beams


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse invalid values of our fields."""
    index = fields.get("constraint_index")
    if index is not None and not isinstance(index, str):
        raise ValueError(
            f"constraint_index={index!r} in a generation config, expected a repository id or a path: "
            "pass an index object to generate(constraint_index=...) instead"
        )
    if fields.get("drafting") not in DRAFTING:
        raise ValueError(f"drafting={fields['drafting']!r}, expected one of {DRAFTING}")
    if fields.get("verification") not in (None, *VERIFICATION):
        raise ValueError(f"verification={fields['verification']!r}, expected one of {tuple(VERIFICATION)}")
    if fields.get("exact") not in (None, False, True):
        raise ValueError(f"exact={fields['exact']!r}, expected True or False")
    book = fields.get("code_book")
    if not isinstance(book, Mapping | None) or not all(
        isinstance(text, str) for pair in (book or {}).items() for text in pair
    ):
        raise ValueError(f"code_book={book!r}, expected tokens by item id, as index.code_book() returns them")
    for name in ("num_draft_beams", "draft_token_budget", "max_nodes", "max_per_group"):
        value = fields.get(name)
        if value is not None and (not is_integer(value) or value < (name != "draft_token_budget")):
            raise ValueError(f"{name}={value!r}, expected a positive integer or None")


def set_fields(config: Any, given: Mapping[str, Any]) -> None:
    """Give a prepared config our fields: those of the call, else its own, else the defaults."""
    for name, default in GR_FIELDS.items():
        setattr(config, name, given.get(name, getattr(config, name, default)))
    by_head = config.drafting == "head" and not config.exact
    config.verification = config.verification or ("catalogue" if by_head else "strict")
    names = ("num_beams", "num_return_sequences", "num_assistant_tokens", "num_draft_beams", "draft_token_budget")
    names += ("max_nodes", "max_per_group")
    for name in names:
        if is_integer(getattr(config, name)):  # of NumPy, too
            setattr(config, name, int(getattr(config, name)))


def extend(config: GenerationConfig) -> GRGenerationConfig:
    """The same configuration with our fields, including those of its file."""
    if isinstance(config, GRGenerationConfig):
        return config
    # A plain config has our fields as attributes only if its file was flat, or a user set them.
    fields = {name: getattr(config, name) for name in GR_FIELDS if hasattr(config, name)}
    return GRGenerationConfig.from_dict(without_bookkeeping(fields | config.to_dict()))  # pyright: ignore


def code_book_of(model: Any) -> Mapping[str, str]:
    """What tokens mean to a model; empty if that is unknown."""
    return getattr(extend(model.generation_config), "code_book", None) or {}
