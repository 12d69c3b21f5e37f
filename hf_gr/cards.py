# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated model cards. Knows what a card says, not how its subject works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .catalogue.summary import summarise

if TYPE_CHECKING:
    from .catalogue import ConstraintIndex

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
