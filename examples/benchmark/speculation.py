# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Speculative beam search on Amazon Beauty and MovieLens: accepted steps by width, work of batches, samples, and time.

Target and drafts are those of `atspeed.py`, which compares the drafts; here it is the search that is measured. Stages:

- `count`: accepted steps of 1,000 users for every width of SeqKD's draft and for the trie.
- `batch`: the target's work for eight users in one batch, over that for the eight alone.
- `sample`: sampling beams with strict and with relaxed verification, beside the target's own from the same seeds.
- `measure`: time, on Beauty. Users are served one at a time, with N = 40 and gamma = 4, by strict verification, whose
  answers must equal plain beam search's before any time is printed; by relaxed verification; by the catalogue as
  drafter, which is not in the paper; and by whichever `drafting="auto"` chooses.

WS@K is the median over users of baseline time / time, paired: every user goes through all rows, in an order that
rotates from user to user. The baseline is plain beam search for strict rows, the target's own sampling beams for
relaxed ones. Times are of whole calls, including the prefills of target and draft.

What to expect here: on a CPU the cost of a forward is nearly proportional to its tokens, so scoring 80 drafted nodes
to save two forwards of K costs time, however good the draft. Where a forward costs the same for 1 and for 100 tokens,
as on a GPU with a larger target, the number of forwards is what counts.

Stages keep their results in the folder `--work` and resume from there. To redo something, remove it there, together
with what follows from it.

    python examples/benchmark/speculation.py                  # a quarter of an hour, after atspeed.py
    python examples/benchmark/speculation.py --stages measure
    python examples/benchmark/speculation.py --fast           # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import speculation_counts as counts
import speculation_samples as samples
import torch
from backbone_models import load
from experiments import show_progress
from report import environment, print_table
from speculation_counts import ASSISTANT, GAMMA, NUM_DRAFT_BEAMS, Counting, ask, seeded, some_users
from speculation_models import (
    BASE,
    METHODS,
    RANDOM,
    Data,
    Workshop,
    add_options,
    data_of,
    digest,
    prompts_of,
    workshops,
)
from transformers.utils.logging import disable_progress_bar

from hf_gr import ConstraintIndex
from hf_gr.demo.evaluate import same_answers
from hf_gr.files.atomic import replaced_file

STAGES = ("count", "batch", "sample", "measure")
TIMED = ("SFT", "SeqKD", "AtSpeed-S", "AtSpeed-R", "BeamKD")
BEST = "BeamKD"  # of rows with one draft alone
TRIE_BUDGET = 256
BASELINES = {"strict": "plain beam search", "relaxed": "the target's own sampling beams"}


@dataclass(frozen=True)
class Timing:
    """How much `measure` measures."""

    users: int = 60
    num_beams: tuple[int, ...] = (1, 3, 5, 10, 20)


FAST_TIMING = Timing(users=3, num_beams=(1, 5))


# --------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Row:
    """One way to generate: the arguments of `generate`, and the results."""

    verification: str
    name: str
    settings: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    accepted_steps: list[int] = field(default_factory=list)
    not_equal: int = 0  # users whose sequences differ from plain beam search's, order included
    wrong: int = 0  # those that rounding does not explain


def make_rows(drafts: dict[str, Any]) -> list[Row]:
    """All ways to compare: the baseline of a verification is the first of its rows."""
    trie = {"drafting": "trie", "draft_token_budget": TRIE_BUDGET}
    best = {"assistant_model": drafts[BEST]}
    narrow = ASSISTANT | best | {"num_draft_beams": None}  # the default: twice the beams, or as many if relaxed
    both = ASSISTANT | best | {"draft_token_budget": TRIE_BUDGET}
    rows = [Row("strict", BASELINES["strict"], {})]
    rows += [Row("strict", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [
        Row("strict", f"{BEST}, N = 2 K", narrow),
        Row("strict", "trie alone", trie),
        Row("strict", "trie where it pays (auto)", {"drafting": "auto"}),
        Row("strict", f"{BEST} and trie", both),
        Row("relaxed", BASELINES["relaxed"], {}),
    ]
    rows += [Row("relaxed", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [Row("relaxed", f"{BEST}, N = K", narrow)]
    for row in rows:
        if row.verification == "relaxed":
            row.settings = row.settings | {"verification": "relaxed", "temperature": 1.0}
    return rows


def ask_for(
    target: Any, prompt: dict[str, torch.Tensor], index: ConstraintIndex, row: Row, *, seed: int = 0, **more: Any
) -> Any:
    """One call. A relaxed one draws from its own seed."""
    if row.verification == "relaxed":
        more["generator"] = seeded(seed, target.device)
    return ask(target, prompt, index, row.settings, **more)


def measure(
    target: Any,
    prompts: Sequence[dict[str, torch.Tensor]],
    index: ConstraintIndex,
    rows: Sequence[Row],
    num_beams: int,
) -> None:
    """Fill in the rows: every prompt goes through all of them.

    One prompt of every length does so twice, first to warm up: `drafting="auto"` times forwards once.
    """
    warm_up = {prompt["input_ids"].shape[1]: prompt for prompt in prompts}.values()
    for number, prompt in enumerate([*warm_up, *prompts], -len(warm_up)):
        is_warm_up = number < 0
        shift = number % len(rows)
        outputs = {}
        for row in (*rows[shift:], *rows[:shift]):
            start = time.perf_counter()
            output = ask_for(target, prompt, index, row, num_beams=num_beams, seed=abs(number))
            output.sequences = output.sequences.cpu()  # only now is a GPU done
            seconds = time.perf_counter() - start
            outputs[id(row)] = output
            if not is_warm_up:
                row.seconds.append(seconds)
                drafted = getattr(output, "speculation", None)
                row.accepted_steps.append(int(drafted.accepted_steps.sum()) if drafted else 0)
        if not is_warm_up:
            check(target, prompt, index, rows, outputs, num_beams)


def check(
    target: Any,
    prompt: dict[str, torch.Tensor],
    index: ConstraintIndex,
    rows: Sequence[Row],
    outputs: dict[int, Any],
    num_beams: int,
) -> None:
    """Compare the strict rows' answers with plain beam search's; where they differ, look at the scores."""
    plain = outputs[id(rows[0])]
    for row in rows:
        if row.verification == "strict" and not torch.equal(outputs[id(row)].sequences, plain.sequences):
            pair = (ask_for(target, prompt, index, r, num_beams=num_beams, output_scores=True) for r in (rows[0], row))
            row.not_equal += 1
            # One beam comes without a score, and nothing in it can swap places.
            row.wrong += num_beams == 1 or not same_answers(*pair, num_beams=num_beams)


def prefill_seconds(target: Any, prompts: Sequence[dict[str, torch.Tensor]]) -> list[float]:
    """What every row pays before drafting; rows with a draft model also pay its prefill."""
    seconds = []
    with torch.inference_mode():
        for prompt in [prompts[0], *prompts]:
            start = time.perf_counter()
            target(**prompt, use_cache=True, logits_to_keep=1).logits.cpu()
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def summarize(rows: Sequence[Row], num_beams: int, prefill: Sequence[float]) -> Iterator[dict[str, Any]]:
    baselines = {row.verification: row for row in reversed(rows)}
    for row in rows:
        pairs = list(zip(baselines[row.verification].seconds, row.seconds, strict=True))
        yield {
            "num_beams": num_beams,
            "verification": row.verification,
            "method": row.name,
            "speedup": statistics.median(plain / ours for plain, ours in pairs),
            "milliseconds": 1e3 * statistics.median(row.seconds),
            "prefill_share": statistics.median(p / ours for p, ours in zip(prefill, row.seconds, strict=True)),
            "accepted_steps": statistics.mean(row.accepted_steps),
            "not_equal": row.not_equal,
            "wrong": row.wrong,
        }


def measure_all(
    target: Any, drafts: dict[str, Any], data: Data, timing: Timing, device: str = "cpu"
) -> dict[str, Any]:
    for model in (target, *drafts.values()):
        model.to(device)
    prompts = [prompts_of(target, data, [user]) for user in some_users(data, timing.users)]
    prefill = prefill_seconds(target, prompts)
    results: dict[str, Any] = {
        "users": len(prompts),
        "prompt_tokens": statistics.mean(prompt["input_ids"].shape[1] for prompt in prompts),
        "target_parameters": target.num_parameters(),
        "draft_parameters": drafts[BASE].num_parameters(),
        "num_draft_beams": NUM_DRAFT_BEAMS,
        "gamma": GAMMA,
        "prefill_seconds": statistics.median(prefill),
        "rows": [],
    }
    for num_beams in timing.num_beams:
        rows = make_rows(drafts)
        measure(target, prompts, data.index, rows, num_beams)
        results["rows"] += summarize(rows, num_beams, prefill)
        show_progress(f"K = {num_beams}: done")
    return results


# ---------------------------------------------------------------------------------------------------------- reporting


def show(result: dict[str, Any]) -> None:
    """All tables; no time if an answer is wrong."""
    rows = {(row["verification"], row["method"], row["num_beams"]): row for row in result["rows"]}
    widths = sorted({row["num_beams"] for row in result["rows"]})
    names = list(dict.fromkeys((verification, method) for verification, method, _ in rows))
    wrong = sum(row["wrong"] for row in result["rows"])
    strict = sum(row["verification"] == "strict" for row in result["rows"]) - len(widths)  # without the baseline
    sizes = [f"{name} {result[f'{name}_parameters'] / 1e6:.2f} M" for name in ("target", "draft")]
    swapped = sum(row["not_equal"] for row in result["rows"]) - wrong
    print(
        f"parameters: {', '.join(sizes)}; N = {result['num_draft_beams']}, gamma = {result['gamma']}\n"
        f"{result['users']} users one at a time, {result['prompt_tokens']:.0f} tokens of prompt on average, which the "
        f"target prefills in {1e3 * result['prefill_seconds']:.1f} ms\n"
        f"strict answers of {strict * result['users']:,} that are not plain beam search's: {wrong}; the same within "
        f"rounding, no more: {swapped}\n",
        flush=True,
    )
    if wrong:
        where = ", ".join(f"{row['method']} at K = {row['num_beams']}" for row in result["rows"] if row["wrong"])
        raise SystemExit(f"strict verification changed answers, no time is worth reporting: {where}")

    def table(*columns: tuple[str, str, str]) -> None:
        print_table(
            ["verification", "draft", *(f"{title}@{width}" for title, _, _ in columns for width in widths)],
            [
                [*name, *(format(rows[*name, width][key], form) for _, key, form in columns for width in widths)]
                for name in names
            ],
        )
        print()

    table(("WS", "speedup", ".2f"), ("AS", "accepted_steps", ".2f"))
    print("milliseconds of a user, and the share of it that is the target's prefill")
    table(("ms", "milliseconds", ".1f"), ("prefill", "prefill_share", ".0%"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--users", type=int, help="how many to time")
    parser.add_argument("--count-users", type=int, help="how many to count")
    parser.add_argument("--device", default="cpu", help="to time on; all else is on the CPU")
    return parser.parse_args(arguments)


def run(shop: Workshop, options: argparse.Namespace) -> None:
    """All stages of one study."""
    name, data = shop.study.name, data_of(shop.study, fast=options.fast)
    counting, timing = (counts.FAST, FAST_TIMING) if options.fast else (Counting(), Timing())
    counting = replace(counting, users=options.count_users or counting.users)
    timing = replace(timing, users=options.users or timing.users)

    def count(stage: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        draft = load(shop.aligned("SeqKD", METHODS["SeqKD"], seed=0))
        return stage(shop.target, draft, data, counting)

    # What computes a stage, what shows it, and what the result depends on.
    tables: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None], Any]] = {
        "count": (partial(count, counts.count), counts.show_counts, counting),
        "batch": (partial(count, samples.batch), samples.show_batches, counting),
        "sample": (partial(count, samples.sample), samples.show_samples, counting),
        "measure": (partial(measure_drafts, shop, data, timing, options.device), show, (timing, options.device)),
    }
    for stage, (compute, show_table, how) in tables.items():
        if stage not in options.stages or (stage == "measure" and name != "beauty"):
            continue
        file = shop.folder / f"{stage}-{digest(str(how), ASSISTANT, str(METHODS))}.json"
        if not file.exists():
            device = torch.device(options.device if stage == "measure" else "cpu")
            names = {"benchmark": "speculation", "stage": stage, "study": name}
            with replaced_file(file) as handle:
                handle.write(json.dumps(names | compute() | environment(device)).encode())
        line = file.read_text(encoding="utf-8")
        print(f"{name}, {stage}" + (", draft: SeqKD" if stage != "measure" else ""))
        show_table(json.loads(line))
        print(line, flush=True)


def measure_drafts(shop: Workshop, data: Data, timing: Timing, device: str) -> dict[str, Any]:
    """Times of the drafts that are worth timing, and of one that knows nothing."""
    drafts = {name: load(shop.aligned(name, METHODS[name], seed=0)) for name in TIMED}
    drafts |= {BASE: load(shop.base(0)), RANDOM: shop.untrained(0)}
    return measure_all(shop.target, drafts, data, timing, device)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' progress bars, one per model read or written
    with workshops(options) as shops:
        for shop in shops:
            shop.folder.mkdir(parents=True, exist_ok=True)
            run(shop, options)


if __name__ == "__main__":
    main()
