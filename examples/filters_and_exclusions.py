# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Limit what a user is recommended: per-row filters and exclusions, and a catalogue that changes.

    python examples/filters_and_exclusions.py    # seconds; a made-up shop, a model with random weights

Rules and removals rebuild nothing; additions compile the index anew, beside the calls that read it. Rules apply before
a beam is spent: a row gets as many items as its rule allows, not the remains of a longer list.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_gr import ConstraintIndex, enable

SHOP = [  # semantic ID, item, price, where it is sold
    ([3, 10, 20], "black tea", 4, {"EU", "US"}),
    ([3, 10, 21], "green tea", 5, {"EU", "US"}),
    ([3, 11, 20], "mint tea", 3, {"EU"}),
    ([4, 10, 20], "espresso", 9, {"EU", "US"}),
    ([4, 10, 21], "ristretto", 11, {"US"}),
    ([4, 10, 21], "decaf ristretto", 11, {"US"}),  # two items may share a semantic ID
    ([5, 12, 22], "cocoa", 6, {"EU"}),
    ([5, 12, 23], "chai", 7, {"US"}),
]
K = 6  # sequences per list
SEQUENCES, ITEMS, PRICES, REGIONS = (list(column) for column in zip(*SHOP, strict=True))


def recommend(model: Any, rules: list[ConstraintIndex], exclude: list[list[str]] | None = None) -> list[list[str]]:
    """For every row the items of up to K sequences, best first; a rule is a view of the catalogue, or all of it."""
    prompts = torch.tensor([[1, 2]]).expand(len(rules), -1)  # histories go here, padded on the left
    how = {"num_beams": K, "num_return_sequences": K, "pad_token_id": 0}
    out = model.generate(prompts, constraint_index=rules, exclude_items=exclude, **how)
    answers = []
    for row, rule in enumerate(rules):
        # A sequence that several items share is generated while any of them is allowed. The row's own rule and
        # exclusions say which of them it stands for.
        own = None if exclude is None else [exclude[row]]
        found = rule.items(out[K * row : K * (row + 1), prompts.shape[1] :], exclude_items=own)
        answers.append([item for items in found for item in items])
    return answers


def show(what: str, rows: list[list[str]]) -> None:
    print(what)
    for number, row in enumerate(rows):
        print(f"  row {number}: {'; '.join(row) or '(nothing is left)'}")


def main() -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    model = enable(Qwen3ForCausalLM(Qwen3Config(vocab_size=24, **size))).eval()
    index = ConstraintIndex.from_sequences(SEQUENCES, item_ids=ITEMS)

    # One rule per row: a mask over `index.item_ids`, or a list of items. Make views once and keep them.
    europe = index.where(["EU" in regions for regions in REGIONS])
    cheap = index.where(torch.tensor(PRICES) <= 5)
    coffee = index.where(["espresso", "ristretto", "decaf ristretto"])
    rules = [index, europe, cheap, coffee]
    rows = recommend(model, rules)
    show("all; sold in the EU; up to 5; coffee", rows)
    assert all("EU" in REGIONS[ITEMS.index(item)] for item in rows[1])
    assert all(PRICES[ITEMS.index(item)] <= 5 for item in rows[2])
    assert sorted(rows[3]) == ["decaf ristretto", "espresso", "ristretto"]

    # On top of the rules, what each user already has.
    bought = [["espresso", "black tea"], [], ["black tea", "green tea", "mint tea"], ["ristretto"]]
    rows = recommend(model, rules, exclude=bought)
    show("the same without what they have: two items; nothing; all that are left; one of a shared semantic ID", rows)
    assert not any(set(row) & set(has) for row, has in zip(rows, bought, strict=True))
    assert (rows[2], sorted(rows[3])) == ([], ["decaf ristretto", "espresso"])

    # The catalogue changes while it serves, and the next call sees it.
    (before,) = recommend(model, [index])
    index.remove([before[0]])
    index.add([[5, 13, 22], [3, 11, 21]], item_ids=["oat milk", "rooibos"])
    (after,) = recommend(model, [index])
    show(f"all, before and after {before[0]!r} went and two came", [before, after])
    assert before[0] not in after
    new = index.where(["oat milk", "rooibos"])  # a view does not see later updates: take views again after them
    assert sorted(recommend(model, [new])[0]) == ["oat milk", "rooibos"]

    # Another thread may change it, too. A call sees one state of the catalogue; `copy.copy` keeps that state for
    # several calls.
    stop = threading.Event()

    def restock() -> None:
        while not stop.wait(0.001):
            index.remove(["cocoa"])
            index.add([[5, 12, 22]], item_ids=["cocoa"])

    thread = threading.Thread(target=restock)
    thread.start()
    try:
        for _ in range(20):
            now = copy.copy(index)
            assert all(now.has_items(recommend(model, [now])[0])), "an item that is not in the catalogue"
    finally:
        stop.set()
        thread.join()
    index.compact()  # from time to time: merges the updates into new arrays
    print(f"20 calls, while another thread restocked: no call saw half an update. Now: {index}")


if __name__ == "__main__":
    main()
