# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Speculative beam search on Amazon Beauty and MovieLens: what drafts save, and tables 1 and 2 of AtSpeed.

A target and a draft of the same vocabulary are trained on the users' histories; on Beauty each of the paper's methods
then aligns the draft with the target, for equally many steps from the same weights. The stages after that:

- `count`: forwards of target and draft, prefills included, and accepted steps for 1,000 users (MovieLens has 671), one
  at a time, K items, N draft beams, old drafts beside new ones. Old: nothing is drafted in the prefill, and all N
  beams of a draft compete at every level. New: the draft keeps the K beams that the target would keep by its scores,
  and N - K likely misses. The target's logits are remembered, not computed again for every draft; the counts of some
  users are compared with those of its own forwards.
- `batch`: the target's work for eight users in one batch, over that for the eight alone.
- `sample`: sampling beams with strict and with relaxed verification, beside the target's own from the same seeds.
  The draft of these three is SeqKD's where it was trained, else the draft before alignment.
- `measure`: time, on Beauty. Users are served one at a time, with N = 40 and gamma = 4, by strict verification, whose
  answers must equal plain beam search's before any time is printed; by relaxed verification; by the catalogue as
  drafter, which is not in the paper; and by whichever `drafting="auto"` chooses.

AS@K is the mean number of accepted steps per user, on the paper's scale: of 4 levels the last needs no logits, so at
most 3 steps are accepted, and then a single forward of the target reads the prompt and all drafted nodes. Plain search
takes 4 forwards in all, and every accepted step saves one. Levels without alternatives are accepted under any draft:
the row of the untrained draft shows how much of AS@K that is, and what 40 beams cover by chance.

WS@K is the median over users of baseline time / time, paired: every user goes through all rows, in an order that
rotates from user to user. The baseline is plain beam search for strict rows, the target's own sampling beams for
relaxed ones. Times are of whole calls, including the prefills of target and draft.

What to expect here: on a CPU the cost of a forward is nearly proportional to its tokens, so scoring 80 drafted nodes
to save two forwards of K costs time, however good the draft. Where a forward costs the same for 1 and for 100 tokens,
as on a GPU with a larger target, the number of forwards is what counts.

Stages keep their results in the folder `--work` and resume from there. To redo something, remove it there, together
with what follows from it. Nothing from the test items is trained on (on Beauty nothing of the period valid, either).

    python examples/benchmark/speculation.py                  # hours on two cores
    python examples/benchmark/speculation.py --stage sample   # stop after a stage
    python examples/benchmark/speculation.py --small --methods seqkd --stage sample    # a few hours
    python examples/benchmark/speculation.py --fast           # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import speculation_counts as counts
import torch
from beauty_data import DEFAULT_DATA, FILES, is_there
from experiments import make_once, show_progress
from report import environment, print_table
from speculation_counts import ASSISTANT, GAMMA, NUM_DRAFT_BEAMS, Counting, ask, seeded, some_users
from speculation_models import (
    BASE,
    BEAUTY,
    METHODS,
    MOVIELENS,
    SMALL_BEAUTY,
    TINY_BEAUTY,
    TINY_MOVIELENS,
    WINDOW,
    Data,
    Training,
    align,
    load,
    make_random,
    prompts_of,
    read_beauty,
    read_movielens,
    train_on_histories,
    write_teacher,
)
from transformers.utils.logging import disable_progress_bar

from hf_gr import ConstraintIndex
from hf_gr.demo.evaluate import same_answers

WORK = Path("~/.cache/hf_gr/speculation")
CATALOGUES = ("beauty", "movielens")
STAGES = ("target", "teacher", "drafts", "count", "batch", "sample", "measure")
PREFERRED = {"strict": ("atspeed-s", "seqkd"), "relaxed": ("atspeed-r", "seqkd")}  # the paper's, if trained
TRIE_BUDGET = 256
RANDOM = "random weights"
BASELINES = {"strict": "plain beam search", "relaxed": "the target's own sampling beams"}


@dataclass(frozen=True)
class Timing:
    """How much `measure` measures; None for all users."""

    users: int = 120
    num_beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    recall_users: int | None = None
    recall_beams: tuple[int, ...] = (5, 10)


@dataclass(frozen=True)
class Plan:
    """How much of everything, for one catalogue; without timing there is no stage `measure`."""

    training: Training
    counting: Counting
    timing: Timing | None = None


FULL = {
    "beauty": Plan(BEAUTY, Counting(), Timing()),
    "movielens": Plan(MOVIELENS, Counting()),
}
FAST = {
    "beauty": Plan(TINY_BEAUTY, counts.FAST, Timing(users=3, num_beams=(1, 5), recall_users=16, recall_beams=(5,))),
    "movielens": Plan(TINY_MOVIELENS, counts.FAST),
}


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
    both = ASSISTANT | {"draft_token_budget": TRIE_BUDGET}
    narrow = ASSISTANT | {"num_draft_beams": None}  # the default: twice the beams, or as many if relaxed
    best, best_relaxed = (preferred(drafts, verification) for verification in BASELINES)
    rows = [Row("strict", BASELINES["strict"], {})]
    rows += [Row("strict", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [
        Row("strict", f"{best}, N = 2 K", narrow | {"assistant_model": drafts[best]}),
        Row("strict", "trie alone", trie),
        Row("strict", "trie where it pays (auto)", {"drafting": "auto"}),
        Row("strict", f"{best} and trie", both | {"assistant_model": drafts[best]}),
        Row("strict", f"{best} or trie where it pays (auto)", {"drafting": "auto", "assistant_model": drafts[best]}),
        Row("relaxed", BASELINES["relaxed"], {}),
    ]
    rows += [Row("relaxed", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [Row("relaxed", f"{best_relaxed}, N = K", narrow | {"assistant_model": drafts[best_relaxed]})]
    for row in rows:
        if row.verification == "relaxed":
            row.settings = row.settings | {"verification": "relaxed", "temperature": 1.0}
    return rows


def preferred(drafts: dict[str, Any], verification: str) -> str:
    """The draft of rows with one draft alone."""
    return next((METHODS[method] for method in PREFERRED[verification] if METHODS[method] in drafts), BASE)


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

    One prompt of every length does so twice, first to warm up: `drafting="auto"` measures the machine once per length.
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


def recall(
    target: Any, data: Data, row: Row, *, num_beams: int, num_users: int | None, batch_size: int = 32
) -> dict[str, Any]:
    """The mean share of a user's test items among K recommended, with its standard error."""
    order = sorted(range(len(data.prompts))[:num_users], key=lambda user: len(data.prompts[user]))
    shares = []
    for start in range(0, len(order), batch_size):
        users = order[start : start + batch_size]
        prompt = prompts_of(target, data, users)
        output = ask_for(target, prompt, data.index, row, num_beams=num_beams, seed=start)
        found = data.index.items(output.sequences[:, prompt["input_ids"].shape[1] :].cpu())
        for place, user in enumerate(users):
            items = {item for items in found[place * num_beams : (place + 1) * num_beams] for item in items}
            shares.append(len(items & data.answers[user]) / len(data.answers[user]))
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    return {
        "num_beams": num_beams,
        "method": row.name,
        "recall": statistics.mean(shares),
        "standard_error": error,
        "users": len(shares),
    }


def recall_rows(drafts: dict[str, Any]) -> Iterator[Row]:
    """Table 2: a temperature of 0 is beam search. The paper does not say what a bad draft does to the answers."""
    yield Row("strict", "temperature 0: plain beam search", {})
    for temperature in (0.5, 1.0):
        settings = {"verification": "relaxed", "temperature": temperature}
        yield Row("relaxed", f"temperature {temperature}: {BASELINES['relaxed']}", settings)
        for name in (preferred(drafts, "relaxed"), RANDOM):
            drafted = settings | ASSISTANT | {"assistant_model": drafts[name]}
            yield Row("relaxed", f"temperature {temperature}: {name}", drafted)


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
        "recall": [],
    }
    for num_beams in timing.num_beams:
        rows = make_rows(drafts)
        measure(target, prompts, data.index, rows, num_beams)
        results["rows"] += summarize(rows, num_beams, prefill)
        show_progress(f"K = {num_beams}: done")
    for num_beams in timing.recall_beams:
        for row in recall_rows(drafts):
            results["recall"].append(recall(target, data, row, num_beams=num_beams, num_users=timing.recall_users))
            show_progress(f"recall@{num_beams}, {row.name}: done")
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
    print(f"share of the test items that is recommended, {result['recall'][0]['users']:,} users, with standard errors")
    found = {(row["method"], row["num_beams"]): row for row in result["recall"]}
    recall_widths = sorted({width for _, width in found})
    print_table(
        ["", *(f"Recall@{width}" for width in recall_widths)],
        [
            [method, *(recall_cell(found[method, width]) for width in recall_widths)]
            for method in dict.fromkeys(method for method, _ in found)
        ],
    )


def recall_cell(row: dict[str, Any]) -> str:
    return f"{row['recall']:.2%} +- {row['standard_error']:.2%}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--work", type=Path, help=f"where stages keep what they make; {WORK}, for --fast nowhere")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last one to run")
    parser.add_argument("--catalogues", nargs="+", choices=CATALOGUES, default=CATALOGUES)
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="alignments of the draft; all")
    parser.add_argument(
        "--small", action="store_true", help="a third of Beauty's target, trained in a third of the time"
    )
    parser.add_argument("--users", type=int, help="how many to time")
    parser.add_argument("--count-users", type=int, help="how many to count")
    parser.add_argument("--device", default="cpu", help="to time on; all else is on the CPU")
    parser.add_argument("--fast", action="store_true", help="tiny models, few users; skipped without the data")
    return parser.parse_args(arguments)


def plan_of(catalogue: str, options: argparse.Namespace) -> Plan:
    plan = (FAST if options.fast else FULL)[catalogue]
    training, counting, timing = plan.training, plan.counting, plan.timing
    if options.small and training is BEAUTY:
        training = SMALL_BEAUTY
    if training.methods and options.methods is not None:
        training = replace(training, methods=tuple(options.methods))
    if options.count_users:
        counting = replace(counting, users=options.count_users)
    if timing and options.users:
        timing = replace(timing, users=options.users)
    return Plan(training, counting, timing)


def run(work: Path, catalogue: str, data: Data, plan: Plan, options: argparse.Namespace) -> None:
    """All stages of one catalogue."""
    stages, training = STAGES[: STAGES.index(options.stage) + 1], plan.training
    target = load(make_once(work / "target", lambda part: train_on_histories(part, data, training.target, "target")))
    if "teacher" in stages and training.methods:
        teacher = write_teacher(work / "teacher", data, target, training)
    if "drafts" not in stages:
        return
    base = make_once(work / "base", lambda folder: train_on_histories(folder, data, training.draft, "draft"))
    drafts = {
        METHODS[method]: load(
            make_once(
                work / method, lambda folder, method=method: align(folder, data, base, teacher, method, training)
            )
        )
        for method in training.methods
    }
    drafts[BASE] = load(base)
    name = METHODS["seqkd"] if METHODS["seqkd"] in drafts else BASE  # what drafts best in AtSpeed's tables
    given = target, drafts[name], data, plan.counting
    tables: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        "count": (partial(counts.count, *given), counts.show_counts),
        "batch": (partial(counts.batch, *given), counts.show_batches),
        "sample": (partial(counts.sample, *given), counts.show_samples),
    }
    if plan.timing:
        drafts[RANDOM] = make_random(data, training)
        tables["measure"] = (partial(measure_all, target, drafts, data, plan.timing, options.device), show)
    for stage, (compute, show_table) in tables.items():
        if stage in stages:
            file = work / f"{stage}.json"
            if not file.exists():
                device = torch.device(options.device if stage == "measure" else "cpu")
                names = {"benchmark": "speculation", "stage": stage, "catalogue": catalogue, "draft": name}
                file.write_text(json.dumps(names | compute() | environment(device)), encoding="utf-8")
            line = file.read_text(encoding="utf-8")
            print(f"{catalogue}, {stage}" + (f", draft: {name}" if stage != "measure" else ""))
            show_table(json.loads(line))
            print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if "beauty" in options.catalogues and not is_there(options.data, fast=options.fast):
        return
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' progress bars, one per model read or written
    with tempfile.TemporaryDirectory(prefix="hf_gr_speculation_") as folder:
        nowhere = options.fast and options.work is None
        own = WORK.with_name("speculation-small") if options.small else WORK
        work = Path(folder) if nowhere else (options.work or own).expanduser()
        for catalogue in options.catalogues:
            is_beauty = catalogue == "beauty"
            data = read_beauty(options.data, WINDOW) if is_beauty else read_movielens(WINDOW, fast=options.fast)
            run(work if is_beauty else work / catalogue, catalogue, data, plan_of(catalogue, options), options)


if __name__ == "__main__":
    main()
