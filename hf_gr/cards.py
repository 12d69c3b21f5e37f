# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated model cards. Knows what a card says, not how its subject works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .catalogue.summary import summarise

if TYPE_CHECKING:
    from pathlib import Path

    from .catalogue import ConstraintIndex
    from .torch.draft_head import DraftHead

_INDEX_CARD = """\
---
library_name: hf_gr
tags:
- generative-recommendation
- constrained-decoding
- hf_gr
---

# Constraint index

The catalogue of a generative recommender: {num_sequences:,} token sequences for {num_items:,} items, up to
{max_length} tokens each{end_token}, {megabytes:.1f} MB. A model that generates with it answers with items of this
catalogue only.

```python
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex

index = ConstraintIndex.from_pretrained({name})
model = AutoModelForGenerativeRetrieval.from_pretrained("...")  # the model that the catalogue's tokens were made for
out = model.generate(**inputs, constraint_index=index, num_beams=20, num_return_sequences=20)
items = index.items(out[:, inputs["input_ids"].shape[1]:])
```

## Levels

| level | nodes | mean children | most children |
|---|---|---|---|
{levels}

The largest token is {max_token_id}: the model needs a vocabulary of at least {vocabulary} tokens.
"""


_MODEL_CARD = """\
---
library_name: transformers
tags:
- generative-recommendation
- hf_gr
---

# Generative recommender

An ordinary checkpoint of transformers, saved by hf_gr from JAX. Both of hf_gr's backends load it: `"flax"` for TPUs,
`"torch"` for GPUs and CPUs.

```python
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex

model = AutoModelForGenerativeRetrieval.from_pretrained({name})
index = ConstraintIndex.from_pretrained("...")  # the catalogue
out = model.generate(**inputs, constraint_index=index, num_beams=20, num_return_sequences=20)
```
"""


def index_card(index: ConstraintIndex, name: str) -> str:
    """The card of an index.

    Args:
        index: its subject.
        name: what users load it by, such as its repository id.
    """
    levels = [
        f"| {level.level} | {level.nodes:,} | {level.mean_children:.2f} | {level.largest_branching:,} |"
        for level in summarise(index.snapshot).levels
    ]
    return _INDEX_CARD.format(
        num_sequences=len(index),
        num_items=index.num_items,
        max_length=index.max_length,
        end_token="" if index.eos_token_id is None else f" including the end token {index.eos_token_id}",
        megabytes=index.nbytes / 1e6,
        name=json.dumps(name),
        levels="\n".join(levels),
        max_token_id=index.max_token_id,
        vocabulary=index.max_token_id + 1,
    )


_HEAD_CARD = """\
---
library_name: hf_gr
tags:
- generative-recommendation
- draft-head
- hf_gr
---

# Draft head

The draft head of a generative recommender (NEZHA): it reads the hidden states of one prefill and decodes semantic IDs
by itself, without another call of the model. It serves the model that it was trained on, and no other.

```python
from transformers import AutoTokenizer
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, DraftHead

model = AutoModelForGenerativeRetrieval.from_pretrained("...")  # the model that the head was trained on
tokenizer = AutoTokenizer.from_pretrained("...")  # leave it away where prompts are token ids
model.add_draft_head(DraftHead.from_pretrained({name}), tokenizer=tokenizer)

{usage}
```

{facts}
"""

_HEAD_SECTION = """\
{heading}

With hf_gr this model recommends after a single prefill (NEZHA): a draft head reads its hidden states and decodes
semantic IDs by itself. Without hf_gr it is an ordinary checkpoint of transformers.

```python
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex

model = AutoModelForGenerativeRetrieval.from_pretrained({name})

{usage}
```

{facts}
"""

_HEAD_HEADING = "## Draft head"

_HEAD_USAGE = """\
index = ConstraintIndex.from_pretrained("...")  # the catalogue
out = model.generate(**inputs, constraint_index=index, drafting="head", num_beams=20, num_return_sequences=20)
items = index.items(out[:, inputs["input_ids"].shape[1]:])  # of a decoder; out[:, 1:] of an encoder-decoder\
"""

_HEAD_FACTS = """\
It has {num_levels} levels, {parameters:,} parameters in {dtype} and a hidden size of {hidden_size}; {settings}.

| level | codes | {placeholders}
|---|---|{line}
{levels}

Source: Wang et al., *NEZHA: A Zero-sacrifice and Hyperspeed Decoding Architecture for Generative Recommendations*,
2026.\
"""


def model_card(name: str) -> str:
    """The card of a checkpoint that was saved from JAX.

    Args:
        name: what users load it by, such as its repository id.
    """
    return _MODEL_CARD.format(name=json.dumps(name))


def head_card(head: DraftHead, name: str) -> str:
    """The card of a draft head that is shared alone.

    Args:
        head: its subject.
        name: what users load it by, such as its repository id.
    """
    return _HEAD_CARD.format(name=json.dumps(name), usage=_HEAD_USAGE, facts=_head_facts(head))


def tag_card(path: Path, head: DraftHead, name: str) -> None:
    """Have the card of a checkpoint tell of its draft head: a section and tags, unless it has them.

    Args:
        path: the card, which may have been written by anybody.
        head: the checkpoint's head.
        name: what users load the checkpoint by, such as its repository id.
    """
    from huggingface_hub import ModelCard

    card = ModelCard.load(path)
    data: Any = card.data
    data.tags = list(dict.fromkeys([*(data.tags or ()), "generative-recommendation", "draft-head", "hf_gr"]))
    if _HEAD_HEADING not in card.text.splitlines():
        facts = _head_facts(head)
        section = _HEAD_SECTION.format(heading=_HEAD_HEADING, name=json.dumps(name), usage=_HEAD_USAGE, facts=facts)
        card.text = f"{card.text.rstrip()}\n\n{section}"
    card.save(path)


def _head_facts(head: DraftHead) -> str:
    """Shape and source."""
    config, weight = head.config, head.logit_heads[0].weight
    rows = [f"| {level} | {size:,} |" for level, size in enumerate(config.codebook_sizes, start=1)]
    if config.use_placeholders:
        spelled = zip(config.placeholder_tokens, config.placeholder_token_ids, strict=True)
        rows = [f"{row} `{name}` | {token} |" for row, (name, token) in zip(rows, spelled, strict=True)]
    return _HEAD_FACTS.format(
        num_levels=config.num_levels,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        dtype=str(weight.dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        settings=(
            f"transition `{config.transition}`, {'with' if config.use_state else 'without'} a state, "
            f"{'with' if config.use_placeholders else 'without'} placeholders"
        ),
        placeholders="placeholder | its id |" if config.use_placeholders else "",
        line="---|---|" if config.use_placeholders else "",
        levels="\n".join(rows),
    )
