# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a call on a GPU, beside the least that the device could take: `roofline.py`, by what it reaches.

Models of Qwen3's shapes with random weights, whose scores are made to differ as a trained model's do; a million random
items; prompts of 1,000 tokens. Contenders take turns, medians of wall-clock seconds until the device is idle:

- transformers: its beam search without any catalogue, which copies the prompt's keys for every beam (512 beams need
  more than 80 GB);
- eager: `generate(constraint_index=...)`;
- graphs: the same with `cache_implementation="static"` after `warm_up`;
- exact: the best ten items of the catalogue, 64 prefixes a forward, without and with drafts of the trie.

    python examples/benchmark/gpu.py            # four minutes, on a GPU of 80 GB
    python examples/benchmark/gpu.py --fast     # seconds, on any machine: the method, not the numbers
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table
from roofline import QWEN3, Device, Shape, limit
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from hf_gr import ConstraintIndex, enable

# model, tokens of an item, prompts, beams
SETTINGS = [("Qwen3-0.6B", 4, 1, 128), ("Qwen3-0.6B", 4, 1, 512), ("Qwen3-0.6B", 4, 8, 128), ("Qwen3-1.7B", 3, 1, 256)]
CODES = 256  # of a level
SHARPNESS = 8.0  # of the last norm's weights: random ones make scores of all items alike


def reached(device: torch.device, size: int) -> Device:
    """What the device reaches: a copy, counting bytes read and written, and a product of matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = torch.empty(64 * size * size, device=device, dtype=torch.int8).random_()
    product = statistics.median(seconds(lambda: a @ b, device) for _ in range(9))
    copy = statistics.median(seconds(copied.clone, device) for _ in range(9))
    return Device(bandwidth=2 * copied.nbytes / copy, flops=2 * size**3 / product)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Until the device is idle again."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def make_model(shape: Shape, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    model.model.norm.weight.data.mul_(SHARPNESS)
    return enable(model)


def measure(setting: tuple[str, int, int, int], shape: Shape, limits: Device, options: Any) -> dict[str, Any]:
    name, length, batch, beams = setting
    device, random = torch.device(options.device), np.random.default_rng(0)
    codes = np.unique(random.integers(CODES, size=(options.items, length)), axis=0)
    rows = codes + 1 + CODES * np.arange(length)
    index, model = ConstraintIndex.from_sequences(rows), make_model(shape, device)
    prompt = torch.from_numpy(rows[random.integers(len(rows), size=(batch, options.prompt // length))])
    given = {"input_ids": prompt.reshape(batch, -1).to(device)}
    width = given["input_ids"].shape[1]
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    beam: dict[str, Any] = {"num_beams": beams, "num_return_sequences": 10}
    ours, static = {**given, "constraint_index": index}, {"cache_implementation": "static"}
    exact = {"exact": True, "num_return_sequences": 10, "return_dict_in_generate": True}
    model.warm_up(index, batch_sizes=batch, prompt_lengths=width, **beam)
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: model.generate(**ours, **beam),
        "graphs": lambda: model.generate(**ours, **beam, **static),
        "exact": lambda: model.generate(**ours, **exact),
        "exact, drafts": lambda: model.generate(**ours, **exact, drafting="trie"),
        "transformers": lambda: model.generate(**given, **beam, max_new_tokens=length, do_sample=False),
    }
    found: dict[str, Any] = {}
    for call in list(calls):  # warms up, too
        try:
            found[call] = calls[call]()
        except torch.OutOfMemoryError:
            del calls[call]
            torch.cuda.empty_cache()
    eager, graphs = (set(map(tuple, found[call].tolist())) for call in ("eager", "graphs"))
    alike = len(eager & graphs) / len(eager)  # in bfloat16 sums in another order choose other beams
    times: dict[str, list[float]] = {call: [] for call in calls}
    for number in range(options.repeats):
        for call in calls if number % 2 else reversed(calls):
            times[call].append(1e3 * seconds(calls[call], device))
    least = limit(shape, limits, batch=batch, prompt=width, beams=beams, length=length)
    medians = {call: statistics.median(values) for call, values in times.items()}
    counts = {call: found[call].speculation.target_forwards for call in ("exact", "exact, drafts")}
    proven = int(found["exact"].num_proven.min())
    known = {"forwards": counts, "proven": proven, "alike": alike}
    shown = f"{name}, {length} tokens an item, batch {batch}"
    return {"setting": shown, "beams": beams, "least": 1e3 * least.total, **medians, **known}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--fast", action="store_true", help="a tiny model and one setting, on a CPU, too")
    options = parser.parse_args(arguments)
    device, shapes, settings = torch.device(options.device), QWEN3, SETTINGS
    if options.fast:
        tiny = replace(QWEN3["Qwen3-0.6B"], layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=32)
        shapes, settings = {"tiny": replace(tiny, vocab=2048)}, [("tiny", 3, 2, 16)]
        options.items, options.prompt, options.repeats = 2000, 30, 2
    limits = reached(device, 256 if options.fast else 8192)
    print(f"{limits.bandwidth / 1e12:.2f} TB/s, {limits.flops / 1e12:.0f} TFLOP/s in bfloat16", flush=True)
    results = [measure(setting, shapes[setting[0]], limits, options) for setting in settings]
    names = ("least", "transformers", "eager", "graphs", "exact", "exact, drafts")
    table = [
        [
            one["setting"],
            str(one["beams"]),
            *(f"{one[name]:.2f}" if name in one else "no memory" for name in names),
            "{} and {}".format(*(1 + number for number in one["forwards"].values())),
            f"{one['proven']} of 10",
            f"{one['alike']:.0%}",
        ]
        for one in results
    ]
    print_table(["a call, ms", "beams", *names, "exact's forwards", "proven", "graphs alike"], table)
    print_json_line("gpu", device, {"limits": vars(limits), "results": results})


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
