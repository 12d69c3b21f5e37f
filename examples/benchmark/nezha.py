# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""NEZHA's tables: draft heads against beam search by the same backbone, on Amazon Beauty and MovieLens.

The backbone is that of `backbone_models.py`. To it are added, and trained with it (paper, algorithm 3): NEZHA's head,
MTP's independent heads, the paper's ablations 1 to 3; and once more NEZHA's head alone, whose frozen backbone verifies
what the head drafts. The control is the backbone, trained further with its own loss for as many steps. NEZHA-4 is
NEZHA without verification; "last level" is the paper's form, which searches without the catalogue and checks at the
end.

Logit heads and embeddings start as the backbone's rows of the same codes, and learn three times as fast as the
backbone; the paper trains heads together with a language model that knows no item yet, 100 and 10 times as fast.

Rows are users: the last item of each is to be found among ten, and items of the history are not left out. A sequence
that is no item keeps its place. Intervals are of 95%, over users drawn again; "seeds" are the smallest and the largest
H@10 of a seed; the shares are of the control's H@10, on the same users. Unconstrained beam search is transformers'
own, which computes the prompt once a beam: on few rows. `drafting.py` has the times.

    python examples/benchmark/nezha.py              # hours of one core, after the backbones; models are kept
    python examples/benchmark/nezha.py --factor 4   # four times the steps
    python examples/benchmark/nezha.py --fast       # half a minute: the method, not the numbers

Axes: S seeds, R rows.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import STUDIES, Row, Study, has_study, read_study
from backbone_models import backbone_folder, load, make_once, max_items, show_progress
from report import print_json_line, print_table
from torch.utils.data import Subset
from transformers import TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_gr.demo.compare import same_answers
from hf_gr.files.cache import cache_folder
from hf_gr.training import DraftHeadTrainer, InteractionDataset, train_recommender
from hf_gr.training.packing import pad_prompts

BACKBONE, FURTHER, ALONE = "backbone", "backbone-further", "nezha-alone"
# Arguments of `add_draft_head`: NEZHA, the independent heads of MTP, and the ablations of the paper's section 4.3.
VARIANTS: dict[str, dict[str, Any]] = {
    "nezha": {},
    "mtp": {"use_placeholders": False, "transition": "none"},
    "nezha-1": {"use_state": False, "transition": "none"},
    "nezha-2": {"use_placeholders": False},
    "nezha-3": {"transition": "add"},
    ALONE: {},
}
HEAD: dict[str, Any] = {"drafting": "head"}
LIST_LENGTH, NO_ITEM = 10, -1
NODES = 4096  # beams of a batch at most: beyond that a CPU gains nothing
RESAMPLES = 1000
PAIRS_AT_ONCE = 80  # of a step of training
RATES = {"embedding_lr": 3.0, "transition_lr": 3.0, "logit_lr": 3.0}


@dataclass(frozen=True)
class Method:
    """A row of a table: a model, and how it is called."""

    name: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)


CONTROL = Method("constrained, trained further", FURTHER)
FREE = Method("unconstrained beam search", BACKBONE, {"is_constrained": False})
METHODS = (
    CONTROL,
    Method("constrained beam search", BACKBONE),
    Method("MTP", "mtp", HEAD),
    Method("NEZHA", "nezha", HEAD),
    Method("NEZHA-1 (no state)", "nezha-1", HEAD),
    Method("NEZHA-2 (no placeholders)", "nezha-2", HEAD),
    Method("NEZHA-3 (add)", "nezha-3", HEAD),
    Method("NEZHA-4 (no verification)", "nezha", HEAD | {"verification": "none"}),
    Method("NEZHA, last level (paper)", "nezha", HEAD | {"verification": "last_level"}),
    Method("NEZHA, head trained alone", ALONE, HEAD),
)


@dataclass(frozen=True)
class Scale:
    """How much of everything; widths are beams, rows, rows of transformers' own, rows of strict verification."""

    steps: dict[str, int]  # of training, by study
    seeds: tuple[int, ...] = (0, 1, 2)
    widths: tuple[tuple[int, int, int, int], ...] = ((10, 8000, 300, 200), (50, 2000, 300, 50), (512, 200, 10, 5))


FULL = Scale(steps={"beauty": 490, "movielens": 142})  # half of all pairs of Beauty once
FAST = Scale(steps=dict.fromkeys(STUDIES, 4), seeds=(0,), widths=((10, 32, 8, 16),))


class Bench:
    """One backbone with all that was trained from it, kept in a folder whose name tells backbone and steps."""

    def __init__(self, study: Study, backbone: Path, work: Path, steps: int, *, fast: bool) -> None:
        self.study, self.backbone, self.steps, self.window = study, backbone, steps, max_items(study, fast)
        weights = hashlib.sha256((backbone / "model.safetensors").read_bytes()).hexdigest()
        key = hashlib.sha256(json.dumps([weights, steps, PAIRS_AT_ONCE, RATES]).encode()).hexdigest()[:8]
        self.folder = work / f"nezha-{study.name}-{key}"

    def model(self, name: str, seed: int) -> Any:
        """The backbone, one trained further, or one with a head; trained if it is not there."""
        if name == BACKBONE:
            return load(self.backbone)
        return load(make_once(self.folder / f"{name}-{seed}", lambda part: self._train(part, name, seed)))

    def _train(self, part: Path, name: str, seed: int) -> None:
        study, model = self.study, load(self.backbone)
        how: dict[str, Any] = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
        if name == FURTHER:
            how |= {"max_steps": self.steps, "per_device_train_batch_size": 16, "max_items": self.window, "seed": seed}
            train_recommender(study.train, study.ids, model=model, output_dir=part, progress=False, **how)
            return
        set_seed(seed)
        model.add_draft_head(study.ids, **VARIANTS[name])
        start_from_backbone(model)
        pairs = InteractionDataset.from_histories(study.train, study.tokens, max_items=self.window)
        chosen = np.random.default_rng(seed).permutation(len(pairs))[: self.steps * PAIRS_AT_ONCE]
        args = TrainingArguments(
            str(part),
            max_steps=self.steps,
            per_device_train_batch_size=PAIRS_AT_ONCE,
            warmup_steps=min(100, self.steps // 5),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            **how,
        )
        data = Subset(pairs, chosen.tolist())
        trainer = DraftHeadTrainer(model, args, train_dataset=data, train_backbone=name != ALONE, **RATES)
        trainer.train()
        model.eval().save_pretrained(part)
        show_progress(f"{study.name}: {name}, seed {seed}")

    def batches(self, rows: Sequence[Row], size: int) -> list[list[int]]:
        """Row numbers, grouped by prompts of similar length."""
        order = sorted(range(len(rows)), key=lambda number: min(len(rows[number].history), self.window))
        return [order[start : start + size] for start in range(0, len(order), size)]

    def ask(
        self, model: Any, rows: Sequence[Row], num_beams: int, *, is_constrained: bool = True, **settings: Any
    ) -> Any:
        """One call; all beams are returned, and the prompt's width."""
        prompts = [self.study.tokens[row.history[-self.window :]].ravel() for row in rows]
        ids, mask = pad_prompts(prompts, pad_token_id=model.config.pad_token_id, side="left")
        prompt = {"input_ids": ids, "attention_mask": mask}
        catalogue: dict[str, Any] = {"constraint_index": self.study.index}
        if not is_constrained:  # False: a backbone has its catalogue beside it, and would take that
            catalogue = {"constraint_index": False, "max_new_tokens": self.study.index.max_length}
        width = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
        return model.generate(**prompt, **catalogue, **width, **settings), prompt["input_ids"].shape[1]

    def lists(self, method: Method, rows: Sequence[Row], num_beams: int, seed: int) -> tuple[list[list[int]], float]:
        """Ten items a row, and the share of all beams that are items."""
        model, ranked, num_valid = self.model(method.model, seed), [[] for _ in rows], 0
        # transformers computes the prompt once a beam: more memory and more time.
        size = max(1, min(64, NODES // num_beams // (1 if method.settings.get("is_constrained", True) else 4)))
        for numbers in self.batches(rows, size):
            sequences, length = self.ask(model, [rows[number] for number in numbers], num_beams, **method.settings)
            found = self.study.index.items(sequences[:, length:])
            num_valid += sum(map(bool, found))
            for place, number in enumerate(numbers):
                best = found[place * num_beams : place * num_beams + min(LIST_LENGTH, num_beams)]
                ranked[number] = [item for items in best for item in items or [NO_ITEM]][:LIST_LENGTH]
        return ranked, num_valid / (len(rows) * num_beams)

    def strict(self, rows: Sequence[Row], num_beams: int, seed: int) -> dict[str, float]:
        """Self-speculation beside the same model's own beam search, all beams of every row."""
        model, wrong, accepted, forwards = self.model(ALONE, seed), 0, [], []
        for numbers in self.batches(rows, max(1, min(16, NODES // num_beams))):
            batch = [rows[number] for number in numbers]
            details = {"return_dict_in_generate": True, "output_scores": True}
            plain, _ = self.ask(model, batch, num_beams, **details)
            strict, _ = self.ask(model, batch, num_beams, **details, **HEAD, verification="strict")
            wrong += 0 if same_answers(plain, strict, num_beams=num_beams) else len(batch)
            accepted += strict.speculation.accepted_steps.tolist()
            forwards.append(strict.speculation.target_forwards)
        return {"rows": len(rows), "wrong": wrong, "accepted": float(np.mean(accepted)), "forwards": np.mean(forwards)}


def start_from_backbone(model: Any) -> None:
    """The best first guess any head can get: what the backbone itself predicts at the prompt's last token."""
    head = model.draft_head
    with torch.no_grad():
        for level in range(head.config.num_levels):
            codes = head.codebook(level)
            head.logit_heads[level].weight.copy_(model.get_output_embeddings().weight[codes])
            if level < len(head.embeddings):
                head.embeddings[level].weight.copy_(model.get_input_embeddings().weight[codes])


def hits_of(ranked: Sequence[Sequence[int]], rows: Sequence[Row], cutoff: int) -> np.ndarray:
    """Whether each row's item is in its list, `[R]`."""
    return np.array([row.item in items[:cutoff] for items, row in zip(ranked, rows, strict=True)], dtype=float)


def interval(ours: np.ndarray, theirs: np.ndarray | None = None) -> tuple[float, float]:
    """A 95% interval of a mean over rows, or of the ratio of two means over the same rows: rows are resampled."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    found = ours[drawn].mean(axis=1)
    if theirs is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = found / theirs[drawn].mean(axis=1)
        found = found[np.isfinite(found)]
    low, high = np.percentile(found, [2.5, 97.5]) if len(found) else (math.nan, math.nan)
    return float(low), float(high)


def table(bench: Bench, scale: Scale) -> list[dict[str, Any]]:
    """All methods by width, beside the control on the same rows."""
    study, found = bench.study, []
    order = np.random.default_rng(1).permutation(len(study.test))
    for num_beams, count, few, fewest in scale.widths:
        rows = [study.test[number] for number in order[:count]]
        control = np.zeros(0)
        for method in (*METHODS, FREE):
            some = rows[:few] if method is FREE else rows
            seeds = (0,) if method.model == BACKBONE else scale.seeds
            lists = [bench.lists(method, some, num_beams, seed) for seed in seeds]
            by_seed = np.array([hits_of(ranked, some, 10) for ranked, _ in lists])
            hits = by_seed.mean(axis=0)
            control = hits if method is CONTROL else control
            share = float(hits.mean() / control[: len(some)].mean()) if control[: len(some)].any() else math.nan
            row: dict[str, Any] = {"num_beams": num_beams, "method": method.name, "rows": len(some)}
            row |= {"H@5": float(np.mean([hits_of(ranked, some, 5) for ranked, _ in lists]))}
            row |= {"H@10": float(hits.mean()), "interval": interval(hits), "seeds": by_seed.mean(axis=1).tolist()}
            row |= {"valid": float(np.mean([valid for _, valid in lists]))}
            row |= {"of_control": (share, *interval(hits, control[: len(some)]))}
            found.append(row)
            show_progress(f"{study.name}: {method.name}, {num_beams} beams")
        strict = [bench.strict(rows[:fewest], num_beams, seed) for seed in scale.seeds]
        found.append({"num_beams": num_beams, "method": "self-speculation (strict)", "strict": strict})
    return found


def span(bounds: Sequence[float]) -> str:
    return f"{100 * min(bounds):.2f}-{100 * max(bounds):.2f}%"


def show(name: str, bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    size = load(bench.backbone).num_parameters() / 1e6
    print(f"\n{name}: backbone of {size:.2f} M parameters; {bench.steps:,} steps of {PAIRS_AT_ONCE} pairs")
    cells = [
        [
            str(row["num_beams"]),
            row["method"],
            f"{row['rows']:,}",
            f"{row['H@5']:.2%}",
            f"{row['H@10']:.2%}",
            span(row["interval"]),
            span(row["seeds"]) if len(row["seeds"]) > 1 else "",
            f"{row['valid']:.1%}",
            f"{row['of_control'][0]:.0%}",
            span(row["of_control"][1:]),
        ]
        for row in rows
        if "H@10" in row
    ]
    print_table(["beams", "method", "rows", "H@5", "H@10", "95%", "seeds", "valid", "/ control", "95%"], cells)
    print("\nself-speculation against the same model's own beam search, by seed")
    cells = [
        [
            str(row["num_beams"]),
            f"{one['rows']:,}",
            str(one["wrong"]),
            f"{one['accepted']:.2f}",
            f"{one['forwards']:.2f}",
        ]
        for row in rows
        for one in row.get("strict", ())
    ]
    print_table(["beams", "rows", "other answers", "accepted steps", "forwards of a batch"], cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--factor", type=int, default=1, help="times the steps of training")
    parser.add_argument("--work", type=Path, help="where models are kept; for --fast nowhere")
    parser.add_argument("--fast", action="store_true", help="tiny models, few rows; skips data that are not there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps models this small
    disable_progress_bar()
    scale, results = FAST if options.fast else FULL, {}
    with tempfile.TemporaryDirectory(prefix="hf_gr_nezha_") as nowhere:
        work = options.work or (Path(nowhere) if options.fast else cache_folder("experiments"))
        for name in options.studies:
            if not has_study(name):
                print(f"skipped: no data of {name}")
                continue
            study = read_study(name, fast=options.fast)
            backbone = backbone_folder(study, work, fast=options.fast)
            bench = Bench(study, backbone, work, options.factor * scale.steps[name], fast=options.fast)
            results[name] = table(bench, scale)
            show(name, bench, results[name])
    print_json_line("nezha", torch.device("cpu"), {"factor": options.factor, "results": results})


if __name__ == "__main__":
    main()
