# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Quick start in Flax, for TPUs: JAX loads a checkpoint that PyTorch saved, and both take the same call.

    pip install "hf-gr[flax]"    # on a TPU: "hf-gr[tpu]"
    python examples/flax_quick_start.py

Items and weights are made up; nothing is downloaded. Several devices share the users.
"""

import argparse
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_gr import AutoModelForGenerativeRetrieval, SemanticIds


def main(*, fast: bool) -> None:
    if find_spec("jax") is None or find_spec("flax") is None:
        print('skipped: this example needs JAX and Flax: pip install "hf-gr[flax]"')
        return
    import jax

    # 1. A catalogue, and an ordinary transformers checkpoint, saved by PyTorch.
    random = np.random.default_rng(0)
    codes = random.integers(0, 64, size=(500 if fast else 5_000, 3))
    ids = SemanticIds(codes, item_ids=[f"item-{number}" for number in range(len(codes))], offset=3)
    index = ids.constraint_index()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=ids.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16
    )
    config.initializer_range = 0.1
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)

        # 2. Loaded twice. Where JAX has a TPU, backend="auto", the default, is Flax.
        theirs = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch")
        model = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax")
        print(f"{len(jax.local_devices())} x {jax.devices()[0].device_kind}, parameters {model.dtype}")

        # 3. The same call; it returns JAX arrays. The first call compiles a program for this shape.
        bought = [["item-17", "item-42", "item-7"], ["item-3", "item-99", "item-8"]]
        prompts = np.array([ids.encode(of_user) for of_user in bought])
        options = {"num_beams": 20, "num_return_sequences": 5, "pad_token_id": 0}
        for call in ("first", "second"):
            start = time.perf_counter()
            out = model.generate(prompts, constraint_index=index, exclude_items=bought, **options)
            print(f"{call} call: {1000 * (time.perf_counter() - start):.1f} ms")
        found = index.items(np.asarray(out)[:, prompts.shape[1] :])
        for user in range(len(prompts)):
            print(f"user {user}:", ", ".join(names[0] for names in found[5 * user : 5 * user + 5]))
        assert all(found), "a sequence is no item"
        same = theirs.generate(torch.tensor(prompts), constraint_index=index, exclude_items=bought, **options)
        print("PyTorch gives the same:", same.tolist() == out.tolist())

        # 4. And back: transformers loads what Flax saves.
        model.save_pretrained(Path(folder, "saved"))
        again = Qwen3ForCausalLM.from_pretrained(Path(folder, "saved"))
        equal = all(map(torch.equal, again.parameters(), theirs.parameters()))
        print("saved by Flax, loaded by PyTorch, bit by bit the same:", equal)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a small catalogue, as CI runs it")
    main(fast=parser.parse_args(sys.argv[1:]).fast)
