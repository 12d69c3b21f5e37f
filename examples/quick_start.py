# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Quick start: a catalogue, a model, and items from `generate`. Takes seconds and downloads nothing.

    python examples/quick_start.py

Items and weights are made up. For your own, use `AutoModelForGenerativeRetrieval.from_pretrained("me/recommender")`
for the model, and `SemanticIds.from_json` or `from_tokenizer` for the semantic IDs that it was trained with.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_gr import SemanticIds, enable


def main() -> None:
    torch.manual_seed(0)

    # 1. The catalogue: 5,000 items of 3 codes. Each code of each level is a token; tokens 0 to 2 are reserved.
    codes = torch.randint(0, 64, (5_000, 3))
    ids = SemanticIds(codes, item_ids=[f"item-{number}" for number in range(len(codes))], offset=3)
    index = ids.constraint_index()
    print(index)

    # 2. Any decoder or encoder-decoder of transformers, with its generate extended. This one is untrained.
    config = Qwen3Config(
        vocab_size=ids.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16
    )
    model = enable(Qwen3ForCausalLM(config)).eval()

    # 3. The prompt is what a user has bought; the answer is items that the user does not have.
    bought = ["item-17", "item-42", "item-7"]
    prompt = torch.tensor([ids.encode(bought)])
    out = model.generate(
        prompt,
        constraint_index=index,
        exclude_items=[bought],
        num_beams=50,
        num_return_sequences=10,
        length_penalty=0.0,  # scores are sums; by default they are divided by the length
        return_dict_in_generate=True,
        output_scores=True,
    )
    items = index.items(out.sequences[:, prompt.shape[1] :])  # for each sequence, the items that it stands for
    for rank, (names, score) in enumerate(zip(items, out.sequences_scores.tolist(), strict=True), start=1):
        print(f"{rank:2}. {', '.join(names):20} log-probability {score:.3f}")
    assert all(items), "a sequence is no item"

    # The same search without the catalogue is free to write anything.
    free = model.generate(prompt, max_new_tokens=index.max_length, num_beams=50, num_return_sequences=50)
    real = sum(bool(names) for names in index.items(free[:, prompt.shape[1] :]))
    print(f"without constraint_index: {real} of 50 beams are items; with it all are")


if __name__ == "__main__":
    main()
