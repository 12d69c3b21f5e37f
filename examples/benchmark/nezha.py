# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA's tables: draft heads against beam search by the same backbone, on Amazon Beauty and MovieLens.

The backbone is that of `backbone_models.py`. To it are added, and trained with it (paper, algorithm 3): NEZHA's head,
MTP's independent heads, the paper's ablations 1 to 3; and once more NEZHA's head alone, whose frozen backbone verifies
what the head drafts. The control is the backbone, trained further with its own loss. All have the same budget, three
seeds each (`nezha_heads.py`). NEZHA-4 is NEZHA without verification; "last level" is the paper's form, which searches
without the catalogue and checks at the end.

Rows are users: the last item of each is to be found among ten (`nezha_lists.py`). Intervals are of 95%, over users
drawn again; "seeds" are the smallest and the largest H@10 of a seed; the shares are of beam search's H@10 and of the
control's, on the same users. Unconstrained beam search is transformers' own, which computes the prompt once a beam: on
few rows.

The last table repeats the comparison on a backbone after a tenth of its training, which often invents items.

What is trained and answered stays in the folder `--work`, under a name that tells backbone and settings, and is not
made again.

    python examples/benchmark/nezha.py          # 45 minutes of one core, after the backbones
    python examples/benchmark/nezha.py --fast   # half a minute: the method, not the numbers

`nezha_times.py` has the times (tables 1 and 3).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import STUDIES, Row, Study, has_study, read_study
from backbone_models import backbone_folder, load, max_items
from experiments import show_progress
from nezha_heads import ALONE, FURTHER, VARIANTS, HeadSettings, train_all
from nezha_lists import Lists, compare_strict, ratio, recommend, some_of, summary, write_json
from report import add_plots_option, environment, print_table, save_plot
from transformers.utils.logging import disable_progress_bar

from hf_gr.files.cache import cache_folder

BACKBONE = "backbone"
NEZHA = "nezha"


@dataclass(frozen=True)
class Method:
    """A row of a table: a model, and how it is called."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)


HEAD: dict[str, Any] = {"drafting": "head"}
CONSTRAINED = Method("constrained beam search", BACKBONE)
CONTROL = Method("constrained, trained further", FURTHER)
FREE = Method("unconstrained beam search", BACKBONE, {"is_constrained": False})
FREE_FURTHER = Method("unconstrained, trained further", FURTHER, {"is_constrained": False})
ON_FEW = "constrained, on as few rows"
STRICT = "self-speculation (strict)"
UNCHECKED = Method("NEZHA-4 (no verification)", NEZHA, HEAD | {"verification": "none"})
LAST_LEVEL = Method("NEZHA, last level (paper)", NEZHA, HEAD | {"verification": "last_level"})
HEADS = (
    Method("MTP", "mtp", HEAD),
    Method("NEZHA", NEZHA, HEAD),
    Method("NEZHA-1 (no state)", "nezha-1", HEAD),
    Method("NEZHA-2 (no placeholders)", "nezha-2", HEAD),
    Method("NEZHA-3 (add)", "nezha-3", HEAD),
    UNCHECKED,
    LAST_LEVEL,
    Method("NEZHA, head trained alone", ALONE, HEAD),
)
EARLY_HEADS = tuple(method for method in HEADS if method.model == NEZHA)


@dataclass(frozen=True)
class Width:
    """A number of beams, and on how many rows methods are compared with it: all, transformers' own, strict."""

    num_beams: int
    rows: int
    free_rows: int
    strict_rows: int


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    steps: dict[str, int]  # of training, by study
    windows: dict[str, int]  # of a step, by study: up to 20 pairs each, about 5 in Beauty
    seeds: tuple[int, ...] = (0, 1, 2)
    widths: tuple[Width, ...] = (Width(10, 8000, 300, 200), Width(50, 2000, 300, 50), Width(512, 200, 10, 5))
    early_rows: int = 1000


FULL = Scale(  # half of all windows once
    steps={"beauty": 490, "movielens": 142}, windows={"beauty": 16, "movielens": 16}
)
FAST = Scale(
    steps=dict.fromkeys(STUDIES, 4),
    windows=dict.fromkeys(STUDIES, 8),
    seeds=(0, 1),
    widths=(Width(10, 32, 8, 16), Width(12, 16, 4, 8)),
    early_rows=16,
)


@dataclass
class Comparison:
    """One backbone with all that was trained from it; answers are read from earlier runs if they are there.

    Attributes:
        study: The data.
        backbone: The folder of its backbone.
        folder: Where models and answers are.
        settings: How everything is trained.
        seeds: Of what is trained.
        models: Folders by name and seed.
        commits: Of the code that trained and answered, maybe in earlier runs.
    """

    study: Study
    backbone: Path
    folder: Path
    settings: HeadSettings
    seeds: tuple[int, ...]
    models: dict[tuple[str, int], Path] = field(default_factory=dict)
    commits: set[str] = field(default_factory=set)

    def train(self, names: Sequence[str]) -> None:
        trained = train_all(self.folder, self.backbone, self.study, self.settings, seeds=self.seeds, names=names)
        self.models = {(BACKBONE, 0): self.backbone} | trained

    def training(self) -> dict[str, Any]:
        """Mean seconds of the processor by name, and the pairs that each model learned from."""
        logs: dict[str, list[dict[str, Any]]] = {}
        for (name, _), folder in self.models.items():
            if name != BACKBONE:
                log = json.loads((folder / "training.json").read_text(encoding="utf-8"))
                logs.setdefault(name, []).append(log)
                self.commits.add(log["commit"])
        return {
            "seconds": {name: float(np.mean([log["seconds"] for log in some])) for name, some in logs.items()},
            "pairs": float(np.mean([log["pairs"] for some in logs.values() for log in some])),
        }

    def lists(self, method: Method, rows: Sequence[Row], num_beams: int) -> list[Lists]:
        """What a method recommends, by seed."""
        found = []
        for seed in [seed for name, seed in self.models if name == method.model]:
            file = self.file(method.name, seed, num_beams, len(rows))
            if not file.exists():
                start = time.process_time()
                model = load(self.models[method.model, seed])
                how = {"window": self.settings.window, "num_beams": num_beams}
                recommend(model, rows, self.study, **how, **method.settings).write(file)
                spent = time.process_time() - start
                show_progress(f"{self.study.name}, {method.name}, {num_beams} beams, seed {seed}: {spent:.0f} s")
            found.append(Lists.read(file))
            self.commits.add(found[-1].commit)
        return found

    def strict(self, rows: Sequence[Row], num_beams: int) -> tuple[list[Lists], list[dict[str, Any]]]:
        """What self-speculation recommends, by seed, and how far it is what its own model recommends."""
        lists, agreements = [], []
        for seed in self.seeds:
            file = self.file(STRICT, seed, num_beams, len(rows))
            note = file.with_name(f"agreement-{file.name}")
            if not note.exists():
                one, same = compare_strict(
                    load(self.models[ALONE, seed]),
                    rows,
                    self.study,
                    window=self.settings.window,
                    num_beams=num_beams,
                )
                one.write(file)
                write_json(note, same.means())
            lists.append(Lists.read(file))
            agreements.append(json.loads(note.read_text(encoding="utf-8")))
        return lists, agreements

    def file(self, name: str, seed: int, num_beams: int, num_rows: int) -> Path:
        plain = "".join(letter if letter.isalnum() else "_" for letter in name)
        return self.folder / "answers" / f"{plain}-{seed}-{num_beams}-{num_rows}.json"

    def table(self, width: Width, heads: Sequence[Method], *, has_strict: bool) -> dict[str, Any]:
        """All methods with one number of beams, beside beam search on the same rows."""
        rows = some_of(self.study.test, width.rows)
        few, fewest = rows[: width.free_rows], rows[: width.strict_rows]
        base = self.lists(CONSTRAINED, rows, width.num_beams)
        control = self.lists(CONTROL, rows, width.num_beams)

        def entry(name: str, lists: Sequence[Lists], rows: Sequence[Row]) -> dict[str, Any]:
            own, hits = summary(lists, rows)
            for baseline, others in (("share", base), ("of_control", control)):
                cut = [Lists(one.ranked[: len(rows)], one.valid) for one in others]
                own[baseline] = ratio(hits, summary(cut, rows)[1])
            return {"method": name, **own}

        found = [entry(CONSTRAINED.name, base, rows)]
        found.append(entry(CONTROL.name, control, rows))
        for method in (FREE, FREE_FURTHER):
            found.append(entry(method.name, self.lists(method, few, width.num_beams), few))
        found.append(entry(ON_FEW, [Lists(one.ranked[: len(few)], one.valid) for one in base], few))
        found += [entry(method.name, self.lists(method, rows, width.num_beams), rows) for method in heads]
        agreements = []
        if has_strict:
            lists, agreements = self.strict(fewest, width.num_beams)
            found.append(entry(STRICT, lists, fewest))
        return {"num_beams": width.num_beams, "methods": found, "strict": agreements}


def comparison_of(work: Path, name: str, scale: Scale, *, fast: bool, early: bool) -> Comparison:
    """The backbone of a data set, and the folder of what is trained from it later."""
    study = read_study(name, fast=fast)
    settings = HeadSettings(max_items(study, fast), scale.steps[name], scale.windows[name])
    backbone = backbone_folder(study, work=work, fast=fast, early=early)
    folder = work / f"nezha-{name}{'-early' if early else ''}-{fingerprint(backbone, settings)}"
    return Comparison(study, backbone, folder, settings, scale.seeds)


def run_study(work: Path, name: str, scale: Scale, *, fast: bool, early: bool) -> dict[str, Any]:
    """All that is measured with one data set, or only what its early backbone invents."""
    ours = comparison_of(work, name, scale, fast=fast, early=early)
    ours.train([NEZHA, FURTHER] if early else [*VARIANTS, FURTHER, ALONE])
    widths = [replace(one, rows=min(one.rows, scale.early_rows)) if early else one for one in scale.widths]
    tables = [ours.table(width, EARLY_HEADS if early else HEADS, has_strict=not early) for width in widths]
    return {
        "study": name,
        "early": early,
        "parameters": load(ours.backbone).num_parameters(),
        "settings": asdict(ours.settings),
        "all_pairs": sum(len(history) - 1 for history in ours.study.train),
        **ours.training(),
        "tables": tables,
        "commits": sorted(ours.commits),
    }


def fingerprint(backbone: Path, settings: HeadSettings) -> str:
    """Another backbone, or other settings, have another one."""
    weights = hashlib.sha256((backbone / "model.safetensors").read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([weights, asdict(settings)]).encode()).hexdigest()[:8]


def show(result: dict[str, Any]) -> None:
    settings, seconds = result["settings"], result["seconds"]
    early = ", after a tenth of its training" if result["early"] else ""
    spent = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    print(
        f"\n{result['study']}: backbone of {result['parameters'] / 1e6:.2f} M parameters{early}; each model "
        f"learned from {result['pairs']:,.0f} of {result['all_pairs']:,} pairs, in {settings['num_steps']:,} steps; "
        f"seconds of a core: {spent}"
    )
    print_table(
        [
            *("beams", "method", "rows", "H@5", "H@10", "95%", "seeds", "N@5", "N@10", "valid"),
            *("/ beam search", "95%", "/ control", "95%"),
        ],
        [
            [
                str(table["num_beams"]),
                row["method"],
                f"{row['rows']:,}",
                f"{row['H@5']:.2%}",
                f"{row['H@10']:.2%}",
                span(row["interval"]),
                span((min(row["seeds"]), max(row["seeds"]))) if len(row["seeds"]) > 1 else "",
                f"{row['N@5']:.2%}",
                f"{row['N@10']:.2%}",
                f"{row['valid']:.1%}",
                *(cell for name in ("share", "of_control") for cell in shares(row[name])),
            ]
            for table in result["tables"]
            for row in table["methods"]
        ],
    )
    strict = [(table["num_beams"], one) for table in result["tables"] for one in table["strict"]]
    if strict:
        print("\nself-speculation against the same model's own beam search, all its beams, by seed")
        print_table(
            ["beams", "rows", "not equal", "beyond rounding", "accepted steps", "forwards of a batch"],
            [
                [
                    str(num_beams),
                    f"{one['rows']:,}",
                    str(one["not_equal"]),
                    str(one["wrong"]),
                    f"{one['accepted_steps']:.2f}",
                    f"{one['forwards']:.2f}",
                ]
                for num_beams, one in strict
            ],
        )


def draw(results: Sequence[dict[str, Any]]) -> None:
    """Shares of beam search's H@10 with their intervals, by method and number of beams."""
    from matplotlib.figure import Figure

    names = [CONTROL.name, *(method.name for method in HEADS)]
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        for number, table in enumerate(result["tables"]):
            rows = {row["method"]: row for row in table["methods"]}
            shares = np.array([rows[name]["share"] for name in names])
            errors = np.abs(shares[:, 1:] - shares[:, :1]).T
            places = np.arange(len(names)) + 0.2 * (number - 1)
            panel.errorbar(shares[:, 0], places, xerr=errors, fmt="o", label=f"{table['num_beams']} beams")
        panel.axvline(1.0, color="grey", linewidth=0.8)
        panel.axvline(0.95, color="grey", linewidth=0.8, linestyle=":")
        panel.set(title=result["study"], xlabel="H@10 / that of constrained beam search")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[-1].legend()
    save_plot("nezha", figure)


def span(bounds: Sequence[float]) -> str:
    return f"{100 * bounds[0]:.2f}-{100 * bounds[1]:.2f}%"


def shares(found: Sequence[float]) -> tuple[str, str]:
    if math.isnan(found[0]):
        return "", ""
    return f"{found[0]:.0%}", f"{100 * found[1]:.0f}-{100 * found[2]:.0f}%"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES, help="the data sets")
    parser.add_argument("--seeds", type=int, help="how many; those of earlier runs are not trained again")
    parser.add_argument("--work", type=Path, help="where models and answers stay; for --fast nowhere by default")
    parser.add_argument("--fast", action="store_true", help="tiny models, few rows")
    add_plots_option(parser)
    return parser.parse_args(arguments)


def run(work: Path, studies: Sequence[str], scale: Scale, *, fast: bool, plots: bool) -> None:
    results = []
    for early in (False, True):
        for name in studies:
            results.append(run_study(work, name, scale, fast=fast, early=early))
            show(results[-1])
    if plots:
        draw([result for result in results if not result["early"]])
    # What is read from earlier runs is not of this commit.
    commits = sorted({commit for result in results for commit in result["commits"]})
    here = environment(torch.device("cpu")) | {"commit": "+".join(commits)}
    print(json.dumps({"benchmark": "nezha", "results": results, **here}))


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' progress bars, one per model read or written
    studies = [name for name in options.studies if has_study(name)]
    for name in set(options.studies) - set(studies):
        if not options.fast:
            raise SystemExit(f"no data for {name!r}: set HF_GR_DATA, or pass --studies {' '.join(studies)}")
        print(f"skipped: no data for {name!r}")
    scale = FAST if options.fast else FULL
    scale = replace(scale, seeds=tuple(range(options.seeds or len(scale.seeds))))
    if options.fast and options.work is None:
        with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as folder:
            run(Path(folder), studies, scale, fast=True, plots=options.plots)
    else:
        run(options.work or cache_folder("experiments"), studies, scale, fast=options.fast, plots=options.plots)


if __name__ == "__main__":
    main()
