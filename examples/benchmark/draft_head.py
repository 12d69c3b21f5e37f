# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft head against the model's own constrained beam search: whole calls, the prefill alone, and what follows it.

Weights are random: times do not depend on them, except for how many steps of a strict draft are accepted. Before any
time is printed, the head's answers are compared with those of its slow twin, and those of self-speculation with plain
beam search.

- bare prefill: one forward over the prompt, with a cache and the last token's logits;
- beam search: `generate(constraint_index=...)`, one prefill and L - 1 forwards of K tokens;
- head: `generate(..., drafting="head")`, one prefill of prompt and placeholders, and the head's own search;
- head, strict: the head drafts, the model verifies.

"decode" is everything after the prefill, which ends with the model's first forward over its layers.

    python examples/benchmark/draft_head.py         # 23 M parameters, a few minutes
    python examples/benchmark/draft_head.py --fast  # a tiny model, a few seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import DEFAULT_DATA
from generate import CODES, FAST, Setting, make_catalogue, make_model, make_prompt
from generate import Bench as GenerateBench
from report import print_json_line, print_table
from transformers import DynamicCache

from hf_gr import ConstraintIndex, enable

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from reference import reference_beam_search, reference_head_log_probs  # noqa: E402

SETTINGS = ("1,64,50", "1,256,10", "1,256,50", "4,256,50", "1,512,128")
FAST_SETTINGS = ("1,16,8", "2,16,20")
PREFILL, BEAMS, HEAD, STRICT = "bare prefill", "beam search", "head", "head, strict"
SCORE_TOL = 1e-3  # fp32, relative: sums of L log-probabilities, each through all layers of the model


@contextmanager
def timed_decode(model: Any) -> Iterator[list[float]]:
    """Seconds between the end of the first forward and that of this block; none without a forward."""
    read: list[float] = []
    seconds: list[float] = []

    def first(*_: Any) -> None:
        if not read:
            synchronize(model.device)
            read.append(time.perf_counter())

    hook = model.base_model.register_forward_hook(first)
    try:
        yield seconds
    finally:
        hook.remove()
        seconds += [time.perf_counter() - end for end in read]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_bench(options: argparse.Namespace) -> GenerateBench:
    torch.manual_seed(options.seed)
    rows = make_catalogue(options)
    model = enable(make_model(options))
    index = ConstraintIndex.from_sequences(rows)
    # Includes codes that no item of a random catalogue has.
    head = model.add_draft_head(
        [list(range(1 + CODES * level, 1 + CODES * (level + 1))) for level in range(rows.shape[1])]
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return GenerateBench(model, model, index, rows, {})


def calls_of(bench: GenerateBench, setting: Setting, seed: int) -> dict[str, Callable[[], Any]]:
    prompt = make_prompt(bench, setting, seed)
    options = {"constraint_index": bench.index, "num_beams": setting.beams, "num_return_sequences": setting.beams}
    options |= {"return_dict_in_generate": True, "do_sample": False, "length_penalty": 0.0}

    @torch.no_grad()
    def prefill() -> Any:
        cache = DynamicCache(config=bench.plain.config)
        return bench.plain(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def generate(**extra: Any) -> Callable[..., Any]:
        return lambda **more: bench.enabled.generate(**prompt, **options, **extra, **more)

    return {
        PREFILL: prefill,
        BEAMS: generate(),
        HEAD: generate(drafting="head"),
        STRICT: generate(drafting="head", verification="strict"),
    }


def check(bench: GenerateBench, setting: Setting, calls: dict[str, Callable[..., Any]], seed: int) -> None:
    """Exit unless the head's first row equals its slow twin's, and the strict row plain beam search's."""
    found, model = calls[HEAD](output_scores=True), bench.enabled
    head, prompt = model.draft_head, make_prompt(bench, setting, seed)["input_ids"][:1]
    placeholders = torch.tensor([head.config.placeholder_token_ids], device=prompt.device)
    with torch.no_grad():
        states = model(input_ids=torch.cat([prompt, placeholders], dim=1), output_hidden_states=True)
    hidden = states.hidden_states[-1][0, setting.prompt - 1 :].double().cpu().numpy()
    weights = {name: value.double().cpu().numpy() for name, value in head.state_dict().items()}
    codebooks = [head.codebook(level).tolist() for level in range(head.config.num_levels)]

    def scores(prefix: tuple[int, ...]) -> np.ndarray:
        given = reference_head_log_probs(hidden, weights, codebooks, prefix, transition="rnn")
        dense = np.full(model.config.vocab_size, -np.inf)
        dense[list(given)] = list(given.values())
        return dense

    wanted = reference_beam_search(scores, bench.rows.tolist(), setting.beams, length_penalty=0.0)
    ours = found.sequences_scores[: setting.beams].tolist()
    if not np.allclose(ours, [score for _, score in wanted], rtol=SCORE_TOL, atol=SCORE_TOL):
        raise SystemExit(f"MISMATCH at ({setting}): the head's scores are not those of its slow twin")
    if not all(bench.index.items(found.sequences[:, setting.prompt :])):
        raise SystemExit(f"MISMATCH at ({setting}): the head answers with sequences that are not items")
    plain, strict = (calls[name](output_scores=True).sequences_scores for name in (BEAMS, STRICT))
    if not torch.allclose(plain, strict, rtol=SCORE_TOL, atol=SCORE_TOL):
        raise SystemExit(f"MISMATCH at ({setting}): self-speculation does not give the scores of plain beam search")


def run_setting(bench: GenerateBench, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    calls = calls_of(bench, setting, options.seed)
    if bench.plain.dtype is torch.float32:
        check(bench, setting, calls, options.seed)
    whole: dict[str, list[float]] = {name: [] for name in calls}
    behind: dict[str, list[float]] = {name: [] for name in calls}
    forwards = {name: calls[name]().speculation.target_forwards for name in (BEAMS, HEAD, STRICT)}
    for _ in range(options.repeats):
        for name, call in calls.items():
            synchronize(bench.device)
            start = time.perf_counter()
            with timed_decode(bench.enabled) as seconds:
                call()
                synchronize(bench.device)
                whole[name].append(time.perf_counter() - start)
            behind[name] += seconds if name != PREFILL else []
    return {
        "setting": str(setting),
        "seconds": {name: statistics.median(times) for name, times in whole.items()},
        "decode_seconds": {name: statistics.median(times) for name, times in behind.items() if times},
        "forwards_behind_the_prefill": forwards,
        # Paired: each repetition's ratio, then their median.
        "call_per_prefill": paired(whole[HEAD], whole[PREFILL]),
        "decode_ratio": paired(behind[BEAMS], behind[HEAD]),
        "call_ratio": paired(whole[BEAMS], whole[HEAD]),
        "strict_ratio": paired(whole[BEAMS], whole[STRICT]),
    }


def paired(above: list[float], below: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", type=Setting.parse, help="batch,prompt,beams")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--catalogue", choices=("random", "beauty"), default="random")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="with items.tsv, for --catalogue beauty")
    parser.add_argument("--items", type=int, default=12_000)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tiny model, some seconds")
    options = parser.parse_args(arguments)
    if options.fast:
        for name, value in FAST.items():
            setattr(options, name, value)
    defaults = FAST_SETTINGS if options.fast else SETTINGS
    options.settings = options.settings or [Setting.parse(text) for text in defaults]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    bench = make_bench(options)
    parameters, head = bench.plain.num_parameters(), sum(one.numel() for one in bench.plain.draft_head.parameters())
    print(
        f"{(parameters - head) / 1e6:.1f} M parameters and {head / 1e6:.1f} M of the head, {options.dtype}, "
        f"{len(bench.index):,} items of {bench.length} tokens"
    )
    results = []
    for setting in options.settings:
        found = run_setting(bench, setting, options)
        print(f"\nbatch, prompt, beams: {setting}")
        rows = []
        for name, seconds in found["seconds"].items():
            decode = found["decode_seconds"].get(name)
            rows.append(
                (
                    name,
                    str(found["forwards_behind_the_prefill"].get(name, 0)),
                    f"{seconds * 1e3:.1f} ms",
                    "" if decode is None else f"{decode * 1e3:.1f} ms",
                )
            )
        print_table(("", "forwards", "call", "decode"), rows)
        print(
            f"the head's call takes {found['call_per_prefill']:.2f} times the bare prefill; it decodes "
            f"{found['decode_ratio']:.1f} times as fast as the model, and calls are {found['call_ratio']:.2f} times "
            f"as fast; self-speculation {found['strict_ratio']:.2f} times",
            flush=True,
        )
        results.append(found)
    print_json_line("draft_head", bench.device, {"parameters": parameters - head, "results": results})


if __name__ == "__main__":
    main()
