# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated model cards, from the texts in `card_texts`, and tags for existing ones. Knows no index and no head.

Axes: S sequences, I items.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .draft_head_config import DraftHeadConfig
from .text import shown_share


@dataclass(frozen=True)
class LevelSummary:
    """One level of the trie: the tokens at one position of the sequences."""

    level: int  # from 1
    nodes: int  # distinct prefixes of this many tokens
    mean_children: float  # nodes per inner node of the level above: the average number of choices in a step
    largest_branching: int  # the most children of one node above
    forced_share: float  # the share of the inner nodes above that have a single child, so no choice
    decided_share: float  # the share of all sequences that this many tokens tell from all others
    num_ended: int  # sequences that end here

    def cells(self) -> list[str]:
        """The fields as text, for a row of a table."""
        numbers = f"{self.nodes:,}", f"{self.mean_children:,.2f}", f"{self.largest_branching:,}"
        shares = shown_share(self.forced_share), shown_share(self.decided_share)
        return [str(self.level), *numbers, *shares, f"{self.num_ended:,}"]


@dataclass(frozen=True)
class Summary:
    """A catalogue."""

    num_sequences: int  # S
    num_items: int  # I
    num_shared_sequences: int  # sequences with several items
    num_sharing_items: int  # items on them
    most_items_of_a_sequence: int
    max_length: int  # tokens of the longest sequence, including its end token
    eos_token_id: int | None
    max_token_id: int  # a model needs a larger vocabulary
    item_id_type: str  # "string", "integer", or "row number" if no ids were given
    nbytes: int  # in total
    bytes_per_item: float
    levels: tuple[LevelSummary, ...]


def index_card(summary: Summary, name: str) -> str:
    """The card of an index, which users load by the name."""
    levels = [f"| {' | '.join(level.cells()[:6])} |" for level in summary.levels]
    text = _text("index").format(
        num_sequences=summary.num_sequences,
        num_items=summary.num_items,
        max_length=summary.max_length,
        end_token="" if summary.eos_token_id is None else f" including the end token {summary.eos_token_id}",
        megabytes=summary.nbytes / 1e6,
        name=json.dumps(name),
        levels="\n".join(levels),
        num_sharing_items=summary.num_sharing_items,
        max_token_id=summary.max_token_id,
        vocabulary=summary.max_token_id + 1,
    )
    return _card("hf_gr", ["generative-recommendation", "constrained-decoding", "hf_gr"], text)


def semantic_ids_card(num_items: int, level_sizes: Sequence[int], *, vocab_size: int, name: str) -> str:
    """The card of semantic IDs."""
    text = _text("semantic_ids").format(
        num_items=num_items, level_sizes=_listed(level_sizes), name=json.dumps(name), vocabulary=vocab_size
    )
    return _card("hf_gr", ["generative-recommendation", "semantic-ids", "hf_gr"], text)


def head_card(facts: str, name: str) -> str:
    """The card of a draft head that is shared without its model; `facts` is `head_facts`."""
    text = _text("head").format(name=json.dumps(name), facts=facts)
    return _card("hf_gr", ["generative-recommendation", "draft-head", "hf_gr"], text)


def head_facts(config: DraftHeadConfig, num_parameters: int, dtype: str) -> str:
    """What cards say of a draft head, its shape and source."""
    spelled = zip(config.placeholder_tokens, config.placeholder_token_ids, strict=True)
    placeholders = ", ".join(f"`{name}` ({token})" for name, token in spelled)
    return (
        f"Codes by level: {_listed(config.codebook_sizes)}. It has {num_parameters:,} parameters in {dtype}, a hidden "
        f"size of {config.hidden_size}, transition `{config.transition}`, {'a' if config.use_state else 'no'} state, "
        f"{f'and the placeholders {placeholders}' if placeholders else 'and no placeholders'}.\n\n"
        "Source: Wang et al., *NEZHA: A Zero-sacrifice and Hyperspeed Decoding Architecture for Generative "
        "Recommendations*, 2026."
    )


_LACKING = "It states neither the training data, nor an evaluation, nor the\nlicence: please add them."

# From the card that transformers writes for a repository without one.
_TEMPLATE_DESCRIPTION = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)


def model_tags(*, has_head: bool, custom_generate: bool) -> list[str]:
    """The tags of a checkpoint's card."""
    kinds = [*["draft-head"] * has_head, *["custom_generate"] * custom_generate]
    return ["generative-recommendation", *kinds, "hf_gr"]


def model_card(
    name: str,
    *,
    architecture: str,
    is_encoder_decoder: bool,
    catalogue: str | None,
    head: str | None = None,
    custom_generate: bool = False,
    base_model: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """The card of a checkpoint.

    `catalogue` is the index that its generation config names, `"."` for the checkpoint itself; a local folder, which
    means nothing to other readers, is omitted. `head` is `head_facts`. `tags` come before its own.
    """
    if catalogue not in (None, ".") and (Path(catalogue).is_absolute() or Path(catalogue).exists()):
        catalogue = None
    own = model_tags(has_head=head is not None, custom_generate=custom_generate)
    task = None if is_encoder_decoder else "text-generation"  # whose pipeline has no encoder-decoders
    index_name = json.dumps("..." if catalogue is None else name if catalogue == "." else catalogue)
    call = "model.generate(**inputs, {index}num_beams=20, num_return_sequences=20)"
    if catalogue is None:
        out = "out = " + call.format(index="constraint_index=index, ")
    else:
        out = f"out = {call.format(index='')}  # the checkpoint names its catalogue"
    auto = "AutoModelForSeq2SeqLM" if is_encoder_decoder else "AutoModelForCausalLM"
    own_generate = _text("custom_generate").format(auto=auto, name=json.dumps(name), out=out)
    text = _text("model").format(
        title=name.rsplit("/", 1)[-1],
        architecture=architecture,
        base="" if base_model is None else f", made from `{base_model}`",
        catalogue="a catalogue" if catalogue is None else "its catalogue",
        name=json.dumps(name),
        index_name=index_name,
        start="1" if is_encoder_decoder else 'inputs["input_ids"].shape[1]',
        custom_generate=own_generate if custom_generate else "",
        head="" if head is None else _text("head_section").format(facts=head),
        lacking=_LACKING,
    )
    return _card("transformers", [*tags, *own], text, pipeline_tag=task, base_model=base_model)


def add_measurements(text: str, measured: str) -> str:
    """A generated card, with what was measured of the model in place of what it lacks."""
    return text.replace(
        _LACKING, f"It states no licence: please add it.\n\n## Training and evaluation\n\n```\n{measured}\n```"
    )


def is_template(text: str) -> bool:
    """Whether a card is the unedited one that transformers writes for a new repository."""
    from huggingface_hub import ModelCard

    card: Any = ModelCard(text)
    template: Any = ModelCard.from_template(card.data, model_description=_TEMPLATE_DESCRIPTION)
    return card.text.strip() == template.text.strip()


def read_tags(text: str) -> list[str]:
    """The tags of a card."""
    from huggingface_hub import ModelCard

    data: Any = ModelCard(text).data
    return [data.tags] if isinstance(data.tags, str) else list(data.tags or ())


def tag_card(text: str, tags: Sequence[str]) -> str:
    """Add missing tags to a card, whoever wrote it; its text is kept, and a card that has them all is unchanged."""
    from huggingface_hub import ModelCard

    there = read_tags(text)
    if set(tags) <= set(there):
        return text
    card: Any = ModelCard(text)
    card.data.tags = list(dict.fromkeys([*there, *tags]))
    return str(card)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _text(name: str) -> str:
    """The text of a card, or of a part, with names in braces."""
    return (Path(__file__).parent / "card_texts" / f"{name}.txt").read_text(encoding="utf-8")


def _card(library: str, tags: Sequence[str], text: str, **data: Any) -> str:
    from huggingface_hub import ModelCardData

    front = ModelCardData(library_name=library, tags=list(dict.fromkeys(tags)), **data)
    return f"---\n{front.to_yaml()}\n---\n\n{text}"
