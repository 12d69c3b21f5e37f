# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA's times: where a call spends them (paper, table 1), and how long calls take (table 3). Judges no answers.

Two models: the backbone of Beauty with the heads of `nezha.py`, and its prompts; and a larger one with random weights,
on which times do not depend, and prompts of 256 tokens. One user a call. All methods take turns, in an order
that rotates; every time is the median, every ratio the median of ratios within a turn.

- prepare: until the first forward begins; transformers reads arguments and makes caches and processors;
- prefill: the first forward. Unconstrained beam search is transformers' own, which computes the prompt once a beam;
- verify: with the catalogue, all that it does level by level (also in beam search, where it is the constraint); in the
  paper's code equations 4 and 5, which `nezha_paper.py` has, sorted integers and a binary search after the last level;
- decode: all else.

"paper's code" is that search without `generate` around it; before it is timed, its answers are compared with those of
`verification="last_level"` and "none".

    python examples/benchmark/nezha_times.py         # 3 minutes, once nezha.py has trained the heads
    python examples/benchmark/nezha_times.py --fast  # some seconds
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from backbone_data import Row, Study, has_study
from backbone_models import load
from nezha import (
    BACKBONE,
    CONSTRAINED,
    FAST,
    FREE,
    FULL,
    HEADS,
    LAST_LEVEL,
    NEZHA,
    STRICT,
    UNCHECKED,
    Method,
    comparison_of,
)
from nezha_heads import ALONE, VARIANTS
from nezha_lists import ask, prompts_of, some_of
from nezha_paper import ValidIds, read_prompt, search
from report import print_json_line, print_table
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from hf_gr.files.cache import cache_folder
from hf_gr.torch import decode, drafters, speculation
from hf_gr.torch.children import Children
from hf_gr.torch.transition import DeviceCatalogue
from hf_gr.training import small_recommender

BARE = "bare prefill"
PAPER, PAPER_UNCHECKED = "paper's code, equations 4 and 5", "paper's code, no verification"
SCORE_TOL = 1e-4  # fp32: sums of L log-probabilities in another order
LONG = 256  # tokens of the larger model's prompts


@dataclass(frozen=True)
class Parts:
    """Seconds of one call."""

    prepare: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    verify: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Bench:
    """Models by name over one catalogue, prompts of one user each, and what to time with them."""

    title: str
    models: dict[str, Any]
    study: Study
    prompts: list[dict[str, Tensor]]
    methods: tuple[Method, ...]


@contextmanager
def timed_constraint() -> Iterator[list[float]]:
    """Seconds of all that the catalogue does in a decoding: children, and the states of chosen ones.

    Looking up chosen tokens, which no search can do without, happens in the same function and counts as well.
    """
    seconds: list[float] = []
    is_inside = False

    def timed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # its caller is timed
                return real(*args, **kwargs)
            is_inside, start = True, time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)
                is_inside = False

        return call

    places: list[tuple[Any, str]] = [
        (DeviceCatalogue, "is_leaf"),
        (speculation, "children"),
        (decode, "in_columns"),
        *((drafters, name) for name in ("children", "open_children")),
        (Children, "take"),
    ]
    real = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), function in zip(places, real, strict=True):
            setattr(owner, name, timed(function))
        yield seconds
    finally:
        for (owner, name), function in zip(places, real, strict=True):
            setattr(owner, name, function)


@contextmanager
def timed_forwards(model: Any) -> Iterator[list[tuple[float, float]]]:
    """When forwards begin and end; the first reads the prompt."""
    starts: list[float] = []
    spans: list[tuple[float, float]] = []
    handles = [
        model.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())),
        model.register_forward_hook(lambda *_: spans.append((starts[-1], time.perf_counter()))),
    ]
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def time_generate(model: Any, prompt: dict[str, Tensor], bench: Bench, method: Method, num_beams: int) -> Parts:
    """A call of `generate`."""
    with timed_forwards(model) as spans, timed_constraint() as looks:
        start = time.perf_counter()
        ask(model, prompt, bench.study, num_beams=num_beams, **method.settings)
        end = time.perf_counter()
    began, read = spans[0]
    # Without verification the codes of a level are listed, not checked.
    verify = 0.0 if method.name == UNCHECKED.name else sum(looks)
    return Parts(began - start, read - began, end - read - verify, verify)


def time_paper(model: Any, prompt: dict[str, Tensor], num_beams: int, valid: ValidIds | None) -> Parts:
    """The paper's search, called directly."""
    start = time.perf_counter()
    hidden = read_prompt(model, prompt)
    read = time.perf_counter()
    found = search(model.draft_head, hidden, num_beams=num_beams, valid=valid)
    end = time.perf_counter()
    return Parts(0.0, read - start, end - read - found.verify_seconds, found.verify_seconds)


@torch.inference_mode()
def time_prefill(model: Any, prompt: dict[str, Tensor]) -> Parts:
    """One forward over the prompt with a cache."""
    positions = (prompt["attention_mask"].cumsum(1) - 1).clamp(min=0)
    start = time.perf_counter()
    cache = DynamicCache(config=model.config)
    model(**prompt, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Parts(prefill=time.perf_counter() - start)


def check_paper(bench: Bench, valid: ValidIds, num_beams: int) -> None:
    """Exit unless the paper's search finds what `generate` finds in the paper's form, and without verification."""
    model, prompt = bench.models[NEZHA], bench.prompts[0]
    hidden = read_prompt(model, prompt)
    for method, chosen in ((LAST_LEVEL, valid), (UNCHECKED, None)):
        found = search(model.draft_head, hidden, num_beams=num_beams, valid=chosen)
        details = {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 0.0}
        theirs = ask(model, prompt, bench.study, num_beams=num_beams, **method.settings, **details)
        if not torch.allclose(found.scores[0], theirs.sequences_scores, rtol=0, atol=SCORE_TOL):
            raise SystemExit(f"MISMATCH at {num_beams} beams: the paper's search and {method.name!r} differ in scores")


def time_all(bench: Bench, num_beams: int) -> dict[str, Any]:
    """Medians by method, and ratios to the bare prefill and to beam search."""
    head = bench.models[NEZHA].draft_head
    valid = ValidIds.of(bench.study.tokens, head)
    check_paper(bench, valid, num_beams)

    def call(method: Method) -> Callable[[dict[str, Tensor]], Parts]:
        return lambda prompt: time_generate(bench.models[method.model], prompt, bench, method, num_beams)

    calls: dict[str, Callable[[dict[str, Tensor]], Parts]] = {
        BARE: lambda prompt: time_prefill(bench.models[BACKBONE], prompt)
    }
    calls |= {method.name: call(method) for method in bench.methods}
    calls[PAPER] = lambda prompt: time_paper(bench.models[NEZHA], prompt, num_beams, valid)
    calls[PAPER_UNCHECKED] = lambda prompt: time_paper(bench.models[NEZHA], prompt, num_beams, None)
    names, spent = list(calls), {name: [] for name in calls}
    for turn, prompt in enumerate([bench.prompts[0], *bench.prompts], -1):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            parts = calls[name](prompt)
            if turn >= 0:  # the first one warms up
                spent[name].append(parts)

    def paired(above: Sequence[float], below: Sequence[float]) -> float:
        return statistics.median(one / other for one, other in zip(above, below, strict=True))

    totals = {name: [one.total for one in parts] for name, parts in spent.items()}
    after = {name: [one.decode + one.verify for one in parts] for name, parts in spent.items()}
    return {
        "num_beams": num_beams,
        "turns": len(bench.prompts),
        "methods": {
            name: {
                **{
                    part: statistics.median(getattr(one, part) for one in parts)
                    for part in ("prepare", "prefill", "decode", "verify", "total")
                },
                "by_prefill": paired(totals[name], totals[BARE]),
                "faster": paired(totals[CONSTRAINED.name], totals[name]),
                "decodes_faster": None if name == BARE else paired(after[CONSTRAINED.name], after[name]),
            }
            for name, parts in spent.items()
        },
    }


def trained_bench(work: Path, *, fast: bool) -> Bench:
    """The backbone of Beauty, with the heads of `nezha.py`'s first seed."""
    scale = FAST if fast else FULL
    ours = comparison_of(work, "beauty", replace(scale, seeds=(0,)), fast=fast, early=False)
    ours.train([*VARIANTS, ALONE])
    models = {name: load(folder) for (name, _), folder in ours.models.items()}
    rows = some_of(ours.study.test, 2 if fast else 20)
    prompts = [prompts_of([row], ours.study, ours.settings.window, models[BACKBONE]) for row in rows]
    tokens = statistics.mean(prompt["input_ids"].shape[1] for prompt in prompts)
    size = models[BACKBONE].num_parameters() / 1e6
    strict = Method(STRICT, ALONE, {"drafting": "head", "verification": "strict"})
    methods = (CONSTRAINED, FREE, *HEADS, strict)
    return Bench(f"{size:.2f} M parameters, prompts of {tokens:.0f} tokens", models, ours.study, prompts, methods)


def large_bench(study: Study, *, fast: bool) -> Bench:
    """A larger model with random weights; methods whose time depends on what was learned are left out."""
    sizes = (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        if fast
        else {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    )
    length = study.tokens.shape[1]
    num_items = (32 if fast else LONG) // length
    model = small_recommender(study.ids, max_items=num_items, **sizes).eval()
    size = model.num_parameters() / 1e6
    torch.manual_seed(0)
    model.add_draft_head(study.ids)
    model.eval()
    generator = torch.Generator().manual_seed(0)
    items = torch.randint(len(study.tokens), (2 if fast else 7, num_items), generator=generator).numpy()
    prompts = [prompts_of([Row(row, 0, 0)], study, num_items, model) for row in items]
    methods = tuple(method for method in (CONSTRAINED, *HEADS) if method.model in (BACKBONE, NEZHA))
    title = f"{size:.1f} M parameters with random weights, prompts of {num_items * length} tokens"
    return Bench(title, {BACKBONE: model, NEZHA: model}, study, prompts, methods)


def show(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}; {result['num_beams']} beams, {result['turns']} turns; milliseconds of a call")
    print_table(
        [
            "method",
            "",
            *("prepare", "prefill", "decode", "verify", "call", "verify, share", "call / bare prefill"),
            *("faster", "decodes faster"),
        ],
        [
            [
                name,
                "",
                *(f"{1e3 * row[part]:.2f}" for part in ("prepare", "prefill", "decode", "verify", "total")),
                f"{row['verify'] / row['total']:.1%}",
                f"{row['by_prefill']:.2f}",
                f"{row['faster']:.2f}",
                "" if row["decodes_faster"] is None else f"{row['decodes_faster']:.1f}",
            ]
            for name, row in result["methods"].items()
        ],
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where nezha.py keeps its models; for --fast nowhere by default")
    parser.add_argument("--fast", action="store_true", help="tiny models, few calls")
    return parser.parse_args(arguments)


def run(work: Path, *, fast: bool) -> None:
    trained = trained_bench(work, fast=fast)
    results = []
    for bench in (trained, large_bench(trained.study, fast=fast)):
        for num_beams in (4, 12) if fast else (10, 50, 512):
            found = time_all(bench, num_beams)
            show(bench.title, found)
            results.append({"model": bench.title, **found})
    print_json_line("nezha_times", torch.device("cpu"), {"results": results})


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    if not has_study("beauty"):
        if not options.fast:
            raise SystemExit("no data for 'beauty': set HF_GR_DATA to the folder that holds beauty/")
        print("skipped: no data for 'beauty'")
    elif options.fast and options.work is None:
        with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as folder:
            run(Path(folder), fast=True)
    else:
        run(options.work or cache_folder("experiments"), fast=options.fast)


if __name__ == "__main__":
    main()
