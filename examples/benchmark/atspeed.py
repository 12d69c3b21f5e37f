# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""AtSpeed's experiments on Beauty and MovieLens: tables 1 and 2, figures 3 to 6, and what each term of a loss does.

The target is the experiments' common backbone (`backbone_models.py`). A draft of a fourteenth of its size learns from
the same histories. Users of whom neither has seen anything give the teacher prompts; each method aligns a copy of the
draft with the target's answers to them, for 3 epochs of all prompts, with equally many steps. (The paper takes 20
epochs, also of users that the target learned from; four rows of `terms` take 20.) What follows counts, and times
nothing (`speculation.py --stages measure` does):

- `alpha` (figures 4c and 5b): the weight of the alignment, on validation rows of users whom no other stage asks. The
  best of each method, by accepted steps at K = 10, has rows of its own in table 1, "tuned"; MovieLens takes Beauty's.
- `table 1`: AS@K, the mean number of accepted steps a user, with N = 40 and gamma = 4, strict and relaxed. Of L levels
  the last needs no logits, so at most L - 1 steps are accepted, and then one forward of the target reads the prompt
  and all drafted nodes. Relaxed answers draft nothing at level 1 (they would leave the target's further), so there it
  is L - 2. The row of random weights is the floor: levels without alternatives are accepted under any draft.
- `table 2`: what relaxed verification does to Recall@K, by temperature.
- `terms` (figure 3): one change at a time, and its difference to the unchanged method.
- `sweeps` (figures 4 and 6): draft beams N and draft length gamma.

Strict counts are those of `generate`, with the target's logits remembered, not computed again for every draft; each
answer is compared with plain beam search's. Rows of table 1 have three seeds, of the draft's weights, its training and
the order of teacher prompts; the rest has seed 0. Intervals are 95%: over users, and over seeds by Student's t.
Differences are paired by user and seed.

Results are kept in the folder `--work` under names that tell how they were made, and a run resumes from there.

    python examples/benchmark/atspeed.py             # about an hour of one core
    python examples/benchmark/atspeed.py --plots     # prints again from the folder, and draws the figures
    python examples/benchmark/atspeed.py --fast      # a minute: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import speculation_counts as counts
import torch
from atspeed_counts import STUDENT, TRIE, Counter, Scale, Steps, differences, rows_of
from report import add_plots_option, commit, environment, print_table, save_plot
from speculation_counts import ASSISTANT, GAMMA, NUM_DRAFT_BEAMS, interval_cell
from speculation_models import BASE, METHODS, RANDOM, Variant, Workshop, add_options, data_of, workshops
from transformers.utils.logging import disable_progress_bar

BOTH = "SeqKD and trie"
REFERENCE = "SeqKD"
BUDGET = 256  # nodes of the trie's draft

S, R, B = METHODS["AtSpeed-S"], METHODS["AtSpeed-R"], METHODS["BeamKD"]


def changed(
    variant: Variant, *, data: str = "plain", share: float = 1.0, epochs: int | None = None, **options: Any
) -> Variant:
    """A variant with other options."""
    return replace(variant, options=variant.options | options, data=data, share=share, epochs=epochs)


# One change at a time; the names are printed, and begin with that of the method.
TERMS = {
    "AtSpeed-S": S,
    "AtSpeed-S, w/o DR": changed(S, density_weight=0.0),
    "AtSpeed-S, w/o CA": changed(S, data="whole", constrained=False),
    "AtSpeed-S, mean of sequences": changed(S, reduction="mean"),
    "AtSpeed-S, all legal tokens": changed(S, num_tokens="all"),
    "AtSpeed-S, w/o DR, all legal tokens": changed(S, density_weight=0.0, num_tokens="all"),
    "AtSpeed-S, lambda = 0.5": changed(S, data="lambda 0.5"),
    "AtSpeed-S, lambda = 0": changed(S, data="lambda 0"),
    "AtSpeed-S, 20 epochs": changed(S, epochs=20),
    "AtSpeed-R": R,
    "AtSpeed-R, w/o CA": changed(R, data="whole", constrained=False),
    "AtSpeed-R, w/o top-K": changed(R, num_sequences=1),
    "AtSpeed-R, all legal tokens": changed(R, num_tokens="all"),
    "AtSpeed-R, target's top tokens": changed(R, top_of="target"),
    "AtSpeed-R, 20 epochs": changed(R, epochs=20),
    "SeqKD": METHODS["SeqKD"],
    "SeqKD, 20 epochs": changed(METHODS["SeqKD"], epochs=20),
    "SeqKD, 20 epochs of fewer prompts": changed(METHODS["SeqKD"], epochs=20, share=0.15),
    "BeamKD": B,
    "BeamKD, w/o top-K": changed(B, num_sequences=1),
    "BeamKD, lambda = 0.5": changed(B, data="lambda 0.5"),
    "BeamKD, 20 beams": changed(B, data="20 beams"),
    "BeamKD, 20 epochs": changed(B, epochs=20),
}
# What is tried for `alpha`; 1 learns from the target alone.
ALPHAS = {
    method: {alpha: changed(METHODS[method], alpha=alpha) for alpha in (0.1, 0.3, 0.5, 0.7, 1.0)}
    for method in ("SeqKD", "AtSpeed-S", "AtSpeed-R", "BeamKD")
}


FULL = Scale()
FAST_SCALE = Scale(
    users=12,
    beams=(1, 5),
    relaxed_users=6,
    valid_users=6,
    batch_size=3,
    seeds=2,
    few_beams=(5,),
    draft_beams=(10, 20),
    gammas=(1, 4),
    terms=("AtSpeed-S", "AtSpeed-S, w/o CA", "AtSpeed-S, lambda = 0.5"),
    alphas=(0.5, 1.0),
)


@dataclass(frozen=True)
class Bench:
    """One study: counters of test rows and of validation rows, and what was chosen on the latter."""

    test: Counter
    valid: Counter
    tuned: dict[str, Variant]

    @property
    def scale(self) -> Scale:
        """How much is counted."""
        return self.test.scale


# ------------------------------------------------------------------------------------------------------------- stages


def alpha(bench: Bench) -> list[dict[str, Any]]:
    """Every alpha of every method on validation rows; AtSpeed-R's by relaxed verification, as in the paper."""
    beams, rows = bench.scale.few_beams, []
    for method, variants in ALPHAS.items():
        verification = "relaxed" if method == "AtSpeed-R" else "strict"
        for value in bench.scale.alphas:
            name = f"{method}, alpha = {value}"
            steps = bench.valid.steps(verification, name, beams, variant=variants[value], seeds=1)
            rows += rows_of(steps, beams, verification=verification, method=method, sweep="alpha", value=value)
    return rows


def best_alphas(rows: Sequence[dict[str, Any]]) -> dict[str, Variant]:
    """The alpha that accepts most at the first K, by method."""
    width = rows[0]["num_beams"]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["num_beams"] == width:
            best[row["method"]] = max(best.get(row["method"], row), row, key=lambda one: one["accepted_steps"][0])
    return {f"{method}, tuned: {row['value']}": ALPHAS[method][row["value"]] for method, row in best.items()}


def table_1(bench: Bench) -> list[dict[str, Any]]:
    """All methods, strict and relaxed, and differences to SeqKD."""
    count, beams, rows = bench.test.steps, bench.scale.beams, []
    variants: dict[str, Variant | None] = {**METHODS, **bench.tuned, BASE: None, RANDOM: None}
    strict = {name: count("strict", name, beams, variant=variant) for name, variant in variants.items()}
    tree: dict[str, Any] = {"drafting": "trie", "num_draft_beams": None, "draft_token_budget": BUDGET}
    others = {
        TRIE: count("strict", TRIE, beams, **tree),
        BOTH: count("strict", REFERENCE, beams, draft_token_budget=BUDGET),
    }
    for name, steps in (strict | others).items():
        rows += rows_of(steps, beams, verification="strict", method=name)
    for name, steps in strict.items():
        if name not in (REFERENCE, RANDOM):
            rows += rows_of(differences(steps, strict[REFERENCE]), beams, verification="less SeqKD", method=name)
    for name, variant in variants.items():
        rows += rows_of(count("relaxed", name, beams, variant=variant), beams, verification="relaxed", method=name)
    return rows


def table_2(bench: Bench) -> list[dict[str, Any]]:
    """Recall by temperature; 0 is beam search. The paper does not say what a bad draft does to the answers."""
    drafts = {name: bench.test.drafts(name, None, 1)[0] for name in ("AtSpeed-R", RANDOM)}
    ways: dict[str, tuple[dict[str, Any], Any]] = {"temperature 0: the target": ({}, None)}
    for temperature in (0.5, 1.0):
        settings = counts.OWN["relaxed"] | {"temperature": temperature}
        ways[f"temperature {temperature}: the target"] = (settings, None)
        for name, draft in drafts.items():
            ways[f"temperature {temperature}: {name}"] = (settings | ASSISTANT, draft)
    rows, users = [], [user for batch in bench.test.batches(bench.test.users) for user in batch]
    for (name, (settings, draft)), num_beams in product(ways.items(), (5, 10)):

        def hits(settings: dict[str, Any] = settings, draft: Any = draft, num_beams: int = num_beams) -> list[int]:
            more = {} if draft is None else {"assistant_model": draft[1]()}
            return bench.test.recall(settings | more, num_beams)

        what = None if draft is None else draft[0]
        found = bench.test.kept(f"recall {name} {num_beams}", [settings, what, users, num_beams], hits)
        recall = [round(one, 4) for one in Steps(np.array([found])).interval]
        rows.append({"method": name, "num_beams": num_beams, "recall": recall, "users": len(found)})
    return rows


def terms(bench: Bench) -> list[dict[str, Any]]:
    """What each term does; and the difference to the method without the change."""
    beams, rows = bench.scale.few_beams, []
    for verification in ("strict", "relaxed"):
        found: dict[str, list[Steps]] = {}
        for name in bench.scale.terms or TERMS:
            how: dict[str, Any] = {"variant": TERMS[name], "seeds": 1, "every": bench.scale.every}
            found[name] = bench.test.steps(verification, name, beams, **how)
            rows += rows_of(found[name], beams, verification=verification, method=name)
        for name, steps in found.items():
            method, _, change = name.partition(", ")
            if change:
                difference = differences(steps, found[method])
                rows += rows_of(difference, beams, verification=f"{verification}, change", method=name)
    return rows


def sweeps(bench: Bench) -> list[dict[str, Any]]:
    """Draft beams N and draft length gamma."""
    scale, rows = bench.scale, []
    ways = [("N", "num_draft_beams", scale.draft_beams), ("gamma", "num_assistant_tokens", scale.gammas)]
    for (sweep, setting, values), method in product(ways, ("AtSpeed-S", "AtSpeed-R", "BeamKD")):
        verification = "relaxed" if method == "AtSpeed-R" else "strict"
        for value in values:
            how: dict[str, Any] = {"seeds": 1, "every": scale.every, setting: value}
            steps = bench.test.steps(verification, method, scale.few_beams, **how)
            names = {"sweep": sweep, "value": value, "verification": verification, "method": method}
            rows += rows_of(steps, scale.few_beams, **names)
    return rows


# ---------------------------------------------------------------------------------------------------------- reporting

STEPS = f"accepted steps, N = {NUM_DRAFT_BEAMS}, gamma = {GAMMA}"
TITLES = {
    "alpha": (f"{STEPS}; validation rows (figures 4c and 5b)", ("verification", "method", "value")),
    "table 1": (f"{STEPS} (AS@K)", ("verification", "method")),
    "table 2": ("test items recommended under relaxed verification", ("method",)),
    "terms": (f"{STEPS}; one change at a time (figure 3)", ("verification", "method")),
    "sweeps": ("accepted steps (figures 4 and 6)", ("sweep", "verification", "method", "value")),
}
STAGES: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "alpha": alpha,
    "table 1": table_1,
    "table 2": table_2,
    "terms": terms,
    "sweeps": sweeps,
}
ON_BEAUTY_ALONE = ("alpha", "terms", "sweeps")


def show(stage: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table with a column for every K."""
    title, keys = TITLES[stage]
    numbers = sorted({row["users"] for row in rows}, reverse=True)
    print(f"{stage}: {title}; means and 95% intervals; users: {', '.join(f'{number:,}' for number in numbers)}")
    beams = sorted({row["num_beams"] for row in rows})
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        if "recall" in row:
            cell = "{:.2%} ({:.2%}, {:.2%})".format(*row["recall"])
        else:
            cell = interval_cell(row["accepted_steps"])
        cells.setdefault(tuple(str(row[key]) for key in keys), {})[row["num_beams"]] = cell
    header = [*keys, *(f"K = {width}" for width in beams)]
    print_table(header, [[*names, *(found.get(width, "") for width in beams)] for names, found in cells.items()])
    print()


def draw(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Figures 4 to 6 in one: accepted steps over N, gamma and alpha."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row["sweep"] for row in rows))
    figure = Figure(figsize=(4 * len(kinds), 3))
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        lines: dict[tuple[str, int], list[tuple[float, list[float]]]] = {}
        for row in rows:
            if row["sweep"] == kind:
                lines.setdefault((row["method"], row["num_beams"]), []).append((row["value"], row["accepted_steps"]))
        for (method, width), points in lines.items():
            values, steps = zip(*sorted(points), strict=True)
            middle, low, high = np.array(steps).T
            axes.plot(values, middle, marker="o", label=f"{method}, K = {width}")
            axes.fill_between(values, low, high, alpha=0.15)
        axes.set_xlabel({"N": "draft beams N", "gamma": "draft length", "alpha": "alpha, validation rows"}[kind])
        axes.legend(fontsize=6)
    figure.axes[0].set_ylabel("accepted steps")
    save_plot(f"atspeed-{name}", figure)


def make_bench(shop: Workshop, scale: Scale, tuned: dict[str, Variant]) -> Bench:
    """Test rows; and validation rows of users who are not among those."""
    fast, folder = shop.plan.is_fast, shop.folder / "counts"
    data = data_of(shop.study, fast=fast)
    asked = {data.users[row] for row in counts.some_users(data, scale.users)}
    valid = data_of(shop.study, fast=fast, rows=shop.study.valid, without=asked)
    return Bench(
        Counter(shop, data, scale, scale.users, folder), Counter(shop, valid, scale, scale.valid_users, folder), tuned
    )


def run(
    shop: Workshop, scale: Scale, options: argparse.Namespace, tuned: dict[str, Variant]
) -> tuple[dict[str, Any], dict[str, Variant], set[str]]:
    """All stages of one study: results, the alphas chosen, and the commits that made them."""
    name, bench = shop.study.name, make_bench(shop, scale, tuned)
    wanted = [stage for stage in STAGES if stage in options.stages]
    results: dict[str, list[dict[str, Any]]] = {}
    print(
        f"{name}: {len(shop.study.index):,} items of {shop.study.index.max_length} levels; target "
        f"{shop.target.num_parameters():,} parameters, draft {shop.untrained(0).num_parameters():,}; "
        f"{len(shop.teacher()):,} teacher prompts, {shop.plan.epochs} epochs"
    )
    if name == "beauty" and {"alpha", "table 1"} & {*wanted}:
        rows = alpha(bench)
        bench = replace(bench, tuned=best_alphas(rows))
    for stage in wanted:
        if name == "beauty" or stage not in ON_BEAUTY_ALONE:
            results[stage] = STAGES[stage](bench)
            show(stage, results[stage])
    drawn = [row for rows in results.values() for row in rows if "sweep" in row]
    if options.plots and drawn:
        draw(name, drawn)
    return results, bench.tuned, shop.commits | bench.test.commits | bench.valid.commits


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--seeds", type=int, choices=(1, *STUDENT), help="drafts of each row of table 1")
    add_plots_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()
    scale = FAST_SCALE if options.fast else FULL
    scale = replace(scale, seeds=options.seeds or scale.seeds)
    results: dict[str, Any] = {}
    tuned: dict[str, Variant] = {}
    commits: set[str] = set()
    with workshops(options) as shops:
        for shop in shops:
            results[shop.study.name], tuned, made_by = run(shop, scale, options, tuned)
            commits |= made_by
    made = environment(torch.device("cpu")) | {"commit": " ".join(sorted(commits)) or commit()}
    print(json.dumps({"benchmark": "atspeed", **results, **made}), flush=True)


if __name__ == "__main__":
    main()
