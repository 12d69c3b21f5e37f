# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""AtSpeed's experiments on Beauty and MovieLens: tables 1 and 2, figures 3 to 6, and what each term of a loss does.

The target is the experiments' common backbone (`backbone_models.py`). A draft of a fourteenth of its size learns from
the same histories. Users of whom neither has seen anything give the teacher prompts; each method aligns a copy of the
draft with the target's answers to 3,392 of them, for 3 epochs, with equally many steps. (The paper takes 20 epochs, of
the users that the target learned from, too; 20 epochs of fewer prompts, in as many steps, are among the terms.) What
follows counts, and times nothing (`speculation.py --stages measure` does):

- table 1: AS@K, the mean number of accepted steps a user, with N = 40 and gamma = 4, strict and relaxed. Of L levels
  the last needs no logits, so at most L - 1 steps are accepted, and then one forward of the target reads the prompt
  and all drafted nodes. Relaxed answers draft nothing at level 1 (they would leave the target's further), so there it
  is L - 2. The row of random weights is the floor: levels without alternatives are accepted under any draft.
- table 2: what relaxed verification does to Recall@K, by temperature.
- figures 3 to 6: ablations, draft beams N, alignment strength alpha, draft length gamma.
- the terms: one change at a time, to the paper's losses and to ours.

Strict counts are those of `generate`, with the target's logits remembered, not computed again for every draft; each
answer is compared with plain beam search's. Methods have three seeds, of the order of prompts; each seed
counts a third of the users. Intervals are 95%, of users and of what seeds differ more than users
explain. Differences to SeqKD are paired by user.

Stages keep their results in the folder `--work` and resume from there.

    python examples/benchmark/atspeed.py             # an hour of one core
    python examples/benchmark/atspeed.py --plots     # prints again from the folder, and draws the figures
    python examples/benchmark/atspeed.py --fast      # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import speculation_counts as counts
import torch
from backbone_data import STUDIES, has_study, read_study
from backbone_models import load
from experiments import show_progress
from report import add_plots_option, print_json_line, print_table, save_plot
from speculation_counts import ASSISTANT, GAMMA, NUM_DRAFT_BEAMS, interval_cell, seeded
from speculation_models import BASE, FAST, METHODS, PLANS, RANDOM, Data, Variant, Workshop, data_of, prompts_of, slug
from transformers.utils.logging import disable_progress_bar

from hf_gr.files.cache import cache_folder

TRIE, BOTH = "trie", "SeqKD and trie"
REFERENCE = "SeqKD"
BUDGET = 256  # nodes of the trie's draft

S, R, B = METHODS["AtSpeed-S"], METHODS["AtSpeed-R"], METHODS["BeamKD"]


def changed(variant: Variant, *, data: str = "plain", share: float = 1.0, **options: Any) -> Variant:
    """A variant with other options."""
    return replace(variant, options=variant.options | options, data=data, share=share)


# One change at a time; the names are printed.
TERMS = {
    "AtSpeed-S": S,
    "AtSpeed-S, w/o DR": changed(S, density_weight=0.0),
    "AtSpeed-S, w/o CA": changed(S, data="whole", constrained=False),
    "AtSpeed-S, mean of sequences": changed(S, reduction="mean"),
    "AtSpeed-S, w/o DR, all legal tokens": changed(S, density_weight=0.0, num_tokens="all"),
    "AtSpeed-S, lambda = 0.5": changed(S, data="lambda 0.5"),
    "AtSpeed-S, 20 epochs": changed(S, share=0.15),
    "AtSpeed-R": R,
    "AtSpeed-R, w/o CA": changed(R, data="whole", constrained=False),
    "AtSpeed-R, w/o top-K": changed(R, num_sequences=1),
    "AtSpeed-R, all legal tokens": changed(R, num_tokens="all"),
    "AtSpeed-R, w/o label": changed(R, alpha=1.0),
    "SeqKD": METHODS["SeqKD"],
    "SeqKD, 20 epochs": changed(METHODS["SeqKD"], share=0.15),
    "BeamKD": B,
    "BeamKD, half label": changed(B, alpha=0.5),
    "BeamKD, w/o top-K": changed(B, num_sequences=1),
    "BeamKD, lambda = 0.5": changed(B, data="lambda 0.5"),
}


def alpha_name(method: str, alpha: float) -> str:
    """A row of figure 4c; the method's own alpha is the method."""
    return method if METHODS[method].options.get("alpha", 0.5) == alpha else f"{method}, alpha = {alpha}"


ALPHAS = {
    (method, alpha): changed(METHODS[method], alpha=alpha)
    for method, alphas in {"AtSpeed-S": (0.1, 0.3, 0.5, 0.7), "AtSpeed-R": (0.1, 0.5, 0.9)}.items()
    for alpha in alphas
}


@dataclass(frozen=True)
class Scale:
    """How much is counted."""

    users: int = 1000
    beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    relaxed_users: int = 300
    recall_users: int = 1000
    batch_size: int = 50
    seeds: int = 3
    every: int = 2  # of ablations and sweeps: one batch of users in so many
    few_beams: tuple[int, ...] = (10, 20)  # of ablations and sweeps
    draft_beams: tuple[int, ...] = (20, 30, 40, 50, 60)
    gammas: tuple[int, ...] = (1, 2, 3, 4)
    terms: dict[str, Variant] | None = None


FULL = Scale()
FAST_SCALE = Scale(
    users=12,
    beams=(1, 5),
    relaxed_users=6,
    recall_users=6,
    batch_size=3,
    seeds=1,
    few_beams=(5,),
    draft_beams=(10, 20),
    gammas=(1, 4),
    terms={
        name: TERMS[name] for name in ("AtSpeed-S", "AtSpeed-S, w/o CA", "AtSpeed-S, lambda = 0.5", "SeqKD, 20 epochs")
    },
)


# ------------------------------------------------------------------------------------------------------------ counting


class Counter:
    """Counts of one study, each made once and kept in a file.

    Args:
        shop: the models.
        data: whose users are counted.
        scale: how many.
        folder: of the counts.
    """

    def __init__(self, shop: Workshop, data: Data, scale: Scale, folder: Path) -> None:
        self.shop = shop
        self.data = data
        self.scale = scale
        self.folder = folder

    @cached_property
    def searches(self) -> counts.Searches:
        """Plain searches of the users, remembered."""
        beams = sorted({*self.scale.beams, *self.scale.few_beams})
        return counts.search_all(self.shop.target, self.data, self.batches(self.scale.users), beams)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A result from its file, or a new one."""
        file = self.folder / f"{slug(name)}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))

    def drafts(self, name: str, variant: Variant | None, seeds: int | None) -> list[tuple[str, Callable[[], Any]]]:
        """The drafts of a row: their names, and how to load them. Methods have several seeds, their changes one."""
        shop = self.shop
        if name == TRIE:
            return [(name, lambda: None)]
        if name in (BASE, RANDOM):
            return [(name, lambda: load(shop.base) if name == BASE else shop.untrained())]
        given = METHODS[name] if variant is None else variant
        numbers = range(seeds or (self.scale.seeds if name in METHODS else 1))
        return [(f"{name} {seed}", lambda seed=seed: load(shop.aligned(name, given, seed=seed))) for seed in numbers]

    def steps(
        self,
        verification: str,
        name: str,
        beams: Sequence[int],
        *,
        variant: Variant | None = None,
        seeds: int | None = None,
        every: int = 1,
        rule: str = "ours",
        **settings: Any,
    ) -> list[Steps]:
        """Accepted steps of users, for every K.

        With several seeds, each counts some of the users, and no user is counted twice.

        Args:
            verification: "strict" or "relaxed".
            name: of the row.
            beams: every K.
            variant: how its draft is aligned, if it is no method.
            seeds: how many alignments; by default all there are.
            every: one batch of users in so many.
            rule: what is drafted under strict verification.
            settings: of the draft.
        """
        what = [f"{key}={value}" for key, value in settings.items()] + [rule] * (rule != "ours")
        drafts = self.drafts(name, variant, seeds)
        count = self._relaxed if verification == "relaxed" else partial(self._strict, rule=rule)
        found: dict[int, list[tuple[list[int], list[int]]]] = {width: [] for width in beams}
        for seed, (own, make) in enumerate(drafts):
            draft = cache(make)  # loaded once it is needed
            some = slice(seed * every, None, len(drafts) * every)
            for width in beams:
                key = f"{verification} {own} {' '.join(what)} {some.start}-{some.step} K={width}"
                found[width].append(self.kept(key, partial(self._counted, count, draft, settings, width, some)))
        show_progress(f"{self.shop.study.name}: {verification}, {name} {' '.join(what)}")
        return [Steps.joined(parts) for parts in found.values()]

    @staticmethod
    def _counted(count: Callable[..., Any], draft: Callable[[], Any], *how: Any) -> Any:
        return count(draft(), *how)

    def _strict(
        self, draft: Any, settings: dict[str, Any], num_beams: int, some: slice, *, rule: str
    ) -> tuple[list[int], list[int]]:
        """Which users, and their accepted steps; the first batch is checked by the target's own forwards."""
        given = ASSISTANT | settings | ({} if draft is None else {"assistant_model": draft})
        how: dict[str, Any] = {"num_beams": num_beams, "rule": rule, "batches": some, "checked": int(num_beams == 10)}
        steps = counts.accepted_steps(self.shop.target, self.data, self.searches, given, **how)
        return [user for batch in self.batches(self.scale.users)[some] for user in batch], steps.tolist()

    def _relaxed(
        self, draft: Any, settings: dict[str, Any], num_beams: int, some: slice
    ) -> tuple[list[int], list[int]]:
        """Which users, and their accepted steps by sampling beams; every row of a batch has its own noise."""
        given = ASSISTANT | counts.OWN["relaxed"] | settings | {"assistant_model": draft}
        batches, steps = self.batches(self.scale.relaxed_users)[some], []
        for batch in batches:
            prompt = prompts_of(self.shop.target, self.data, batch)
            how: dict[str, Any] = {"num_beams": num_beams, "generator": seeded(batch[0])}
            output = counts.ask(self.shop.target, prompt, self.data.index, given, **how)
            steps += output.speculation.accepted_steps.tolist()
        return [user for batch in batches for user in batch], steps

    def batches(self, number: int) -> list[list[int]]:
        """Some users, those with prompts of similar lengths together."""
        return counts.in_batches(self.data, counts.some_users(self.data, number), self.scale.batch_size)

    def recall(self, settings: dict[str, Any], num_beams: int) -> list[int]:
        """For every user whether the test item is among K recommended."""
        hits: list[int] = []
        for batch in self.batches(self.scale.recall_users):
            prompt = prompts_of(self.shop.target, self.data, batch)
            more = {"generator": seeded(batch[0])} if settings.get("do_sample") else {}
            output = counts.ask(self.shop.target, prompt, self.data.index, settings, num_beams=num_beams, **more)
            items = self.data.index.items(output.sequences[:, prompt["input_ids"].shape[1] :])
            for place, user in enumerate(batch):
                found = {item for row in items[place * num_beams : (place + 1) * num_beams] for item in row}
                hits.append(len(found & self.data.answers[user]))
        return hits


@dataclass(frozen=True)
class Steps:
    """Accepted steps of users for one K.

    Attributes:
        users: ascending.
        values: of each.
        seeds: by which alignment each was counted.
    """

    users: np.ndarray
    values: np.ndarray
    seeds: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[tuple[list[int], list[int]]]) -> Steps:
        """Those of several seeds."""
        users = np.concatenate([users for users, _ in parts])
        order = users.argsort()
        values = np.concatenate([steps for _, steps in parts])
        seeds = np.repeat(np.arange(len(parts)), [len(users) for users, _ in parts])
        return cls(users[order], values[order], seeds[order])

    def less(self, other: Steps) -> Steps:
        """The differences of the same users."""
        assert (self.users == other.users).all()
        return replace(self, values=self.values - other.values)

    @property
    def interval(self) -> tuple[float, float, float]:
        """The mean and its 95% interval: of users, and of what seeds differ more than users explain."""
        groups = [self.values[self.seeds == seed] for seed in np.unique(self.seeds)]
        of_users = float(np.mean([group.var() for group in groups]))
        variance = of_users / len(self.values)
        if len(groups) > 1:
            apart = np.var([group.mean() for group in groups], ddof=1)
            by_chance = np.mean([of_users / len(group) for group in groups])
            variance += max(0.0, float(apart - by_chance)) / len(groups)
        mean, half = float(self.values.mean()), 1.96 * math.sqrt(variance)
        return mean, mean - half, mean + half

    def row(self, **names: Any) -> dict[str, Any]:
        """A result."""
        by_seed = [round(float(self.values[self.seeds == seed].mean()), 4) for seed in np.unique(self.seeds)]
        interval = [round(one, 4) for one in self.interval]
        return names | {"accepted_steps": interval, "by_seed": by_seed, "users": len(self.users)}


def rows_of(steps: Sequence[Steps], beams: Sequence[int], **names: Any) -> list[dict[str, Any]]:
    """A result for every K."""
    return [one.row(**names, num_beams=width) for one, width in zip(steps, beams, strict=True)]


# ------------------------------------------------------------------------------------------------------------- stages


def table_1(counter: Counter) -> list[dict[str, Any]]:
    """All methods, strict and relaxed, and differences to SeqKD, paired by user."""
    beams, rows = counter.scale.beams, []
    strict = {name: counter.steps("strict", name, beams) for name in (*METHODS, BASE, RANDOM)}
    tree: dict[str, Any] = {"drafting": "trie", "num_draft_beams": None, "draft_token_budget": BUDGET}
    others = {
        TRIE: counter.steps("strict", TRIE, beams, **tree),
        BOTH: counter.steps("strict", REFERENCE, beams, draft_token_budget=BUDGET),
    }
    for name, values in (strict | others).items():
        rows += rows_of(values, beams, verification="strict", method=name)
    for name in (*METHODS, BASE):
        if name != REFERENCE:
            pairs = zip(strict[name], strict[REFERENCE], strict=True)
            rows += rows_of([one.less(other) for one, other in pairs], beams, verification="less SeqKD", method=name)
    for name in (*METHODS, BASE, RANDOM):
        values = counter.steps("relaxed", name, beams)
        rows += rows_of(values, beams, verification="relaxed", method=name)
    # Here all beams of a draft compete at every level.
    for name in (*METHODS, BASE):
        values = counter.steps("strict", name, counter.scale.few_beams, rule="paper")
        rows += rows_of(values, counter.scale.few_beams, verification="paper's drafts", method=name)
    return rows


def table_2(counter: Counter) -> list[dict[str, Any]]:
    """Recall by temperature; 0 is beam search. The paper does not say what a bad draft does to the answers."""
    drafts = {name: make for name in ("AtSpeed-R", RANDOM) for _, make in counter.drafts(name, None, 1)}
    ways: dict[str, dict[str, Any]] = {"temperature 0: the target": {}}
    for temperature in (0.5, 1.0):
        settings = counts.OWN["relaxed"] | {"temperature": temperature}
        ways[f"temperature {temperature}: the target"] = settings
        for name, make in drafts.items():
            ways[f"temperature {temperature}: {name}"] = settings | ASSISTANT | {"assistant_model": make()}
    rows = []
    for name, settings in ways.items():
        for num_beams in (5, 10):
            hits = counter.kept(f"recall {name} K={num_beams}", lambda s=settings, k=num_beams: counter.recall(s, k))
            found = Steps(np.arange(len(hits)), np.array(hits), np.zeros(len(hits)))
            recall = [round(one, 4) for one in found.interval]
            rows.append({"method": name, "num_beams": num_beams, "recall": recall, "users": len(hits)})
        show_progress(f"{counter.shop.study.name}: {name}")
    return rows


def terms(counter: Counter) -> list[dict[str, Any]]:
    """What each term does, of the alignments of seed 0."""
    beams, rows = counter.scale.few_beams, []
    for name, variant in (counter.scale.terms or TERMS).items():
        for verification in ("strict", "relaxed"):
            values = counter.steps(verification, name, beams, variant=variant, seeds=1, every=counter.scale.every)
            rows += rows_of(values, beams, verification=verification, method=name)
    return rows


def sweeps(counter: Counter) -> list[dict[str, Any]]:
    """Figures 4 to 6: draft beams N, draft length gamma and alpha, of the alignments of seed 0."""
    scale, rows = counter.scale, []

    def add(sweep: str, value: float, method: str, name: str, variant: Variant, **settings: Any) -> None:
        verification = "relaxed" if method == "AtSpeed-R" else "strict"
        how: dict[str, Any] = {"variant": variant, "seeds": 1, "every": scale.every} | settings
        values = counter.steps(verification, name, scale.few_beams, **how)
        names = {"sweep": sweep, "value": value, "verification": verification, "method": method}
        rows.extend(rows_of(values, scale.few_beams, **names))

    for method in ("AtSpeed-S", "AtSpeed-R", "BeamKD"):
        for width in scale.draft_beams:
            add("N", width, method, method, METHODS[method], num_draft_beams=width)
        for gamma in scale.gammas:
            add("gamma", gamma, method, method, METHODS[method], num_assistant_tokens=gamma)
    for (method, alpha), variant in {} if scale.terms else ALPHAS.items():
        add("alpha", alpha, method, alpha_name(method, alpha), variant)
    return rows


# ---------------------------------------------------------------------------------------------------------- reporting


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    """All tables of one study."""
    rows = results["table 1"]
    users = {row["verification"]: row["users"] for row in rows}
    print(
        f"accepted steps (AS@K), N = {NUM_DRAFT_BEAMS}, gamma = {GAMMA}: means and 95% intervals over users and "
        f"seeds; {users['strict']:,} users, relaxed {users['relaxed']:,}"
    )
    show_rows(rows, ("verification", "method"))
    for title, name, keys in (
        ("table 2: recall under relaxed verification", "table 2", ("method",)),
        ("one change at a time (figure 3), seed 0", "terms", ("verification", "method")),
        ("figures 4 to 6, seed 0", "sweeps", ("sweep", "verification", "method", "value")),
    ):
        if name in results:
            print(title)
            show_rows(results[name], keys)


def show_rows(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
    """A table with a column for every K."""
    what = "recall" if "recall" in rows[0] else "accepted_steps"
    beams = sorted({row["num_beams"] for row in rows})
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        cell = interval_cell(row[what]) if what != "recall" else "{:.2%} ({:.2%}, {:.2%})".format(*row[what])
        cells.setdefault(tuple(str(row[key]) for key in keys), {})[row["num_beams"]] = cell
    header = [*keys, *(f"K = {width}" for width in beams)]
    print_table(header, [[*names, *(found.get(width, "") for width in beams)] for names, found in cells.items()])
    print()


def draw(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Figures 4 to 6 in one: accepted steps over N, alpha and gamma."""
    from matplotlib.figure import Figure

    rows = results["sweeps"]
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
        axes.set_xlabel({"N": "draft beams N", "gamma": "draft length", "alpha": "alpha"}[kind])
    figure.axes[0].set_ylabel("accepted steps")
    figure.axes[-1].legend(fontsize=7)
    save_plot(f"atspeed-{name}", figure)


STAGES: dict[str, Callable[[Counter], list[dict[str, Any]]]] = {
    "table 1": table_1,
    "table 2": table_2,
    "terms": terms,
    "sweeps": sweeps,
}
ON_BEAUTY_ALONE = ("terms", "sweeps")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--work", type=Path, help="where stages keep what they make; for --fast nowhere")
    parser.add_argument("--seeds", type=int, help="alignments of each method")
    parser.add_argument("--fast", action="store_true", help="tiny models, few users; skips data that are not there")
    add_plots_option(parser)
    return parser.parse_args(arguments)


def run(name: str, folder: Path, options: argparse.Namespace, work: Path | None) -> dict[str, Any]:
    """All stages of one study."""
    study = read_study(name, fast=options.fast)
    plan, scale = (FAST, FAST_SCALE) if options.fast else (PLANS[name], FULL)
    if options.seeds:
        scale = replace(scale, seeds=options.seeds)
    shop = Workshop(study, plan, folder, work)
    counter = Counter(shop, data_of(study, fast=options.fast), scale, shop.folder / "counts")
    results = {
        stage: STAGES[stage](counter) for stage in options.stages if name == "beauty" or stage not in ON_BEAUTY_ALONE
    }
    print(
        f"{name}: {len(study.index):,} items of {study.index.max_length} levels; target "
        f"{shop.target.num_parameters():,} parameters, draft {shop.untrained().num_parameters():,}; "
        f"{len(shop.teacher('plain')):,} teacher prompts, {plan.epochs} epochs of each alignment"
    )
    if "table 1" in results:
        show(results)
    if options.plots and "sweeps" in results:
        draw(name, results)
    return results


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="hf_gr_atspeed_") as nowhere:
        is_kept = options.work is not None or not options.fast
        folder = options.work or (cache_folder("experiments") / "atspeed" if is_kept else Path(nowhere))
        work = Path(nowhere) if not is_kept else options.work and options.work / "backbones"
        results = {}
        for name in options.studies:
            if options.fast and not has_study(name):
                print(f"skipped: no data of {name}")
                continue
            results[name] = run(name, folder, options, work)
    print_json_line("atspeed", torch.device("cpu"), results)


if __name__ == "__main__":
    main()
