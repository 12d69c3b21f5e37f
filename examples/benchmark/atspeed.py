# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""AtSpeed's tables 1 and 2 on Beauty and MovieLens: accepted steps of drafts, and recall under relaxed verification.

The target is the experiments' common backbone (`backbone_models.py`). A draft of a fourteenth of its size learns from
the same histories. Users of whom neither has seen anything give the teacher prompts; each method aligns a copy of the
draft with the target's answers to them, for 3 epochs of all prompts, with equally many steps; some also a draft with
random weights. (The paper takes 20 epochs, also of users that the target learned from.)

- `table 1`: AS@K, the mean number of accepted steps a user, with N = 40 and gamma = 4, strict and relaxed. Of L levels
  the last needs no logits, so at most L - 1 steps are accepted. Relaxed answers draft nothing at level 1, so there it
  is L - 2. The row of random weights is the floor: levels without alternatives are accepted under any draft.
- `table 2`: what relaxed verification does to Recall@K, by temperature.

Strict answers are compared with plain beam search's. Rows of table 1 have three seeds, of the draft's weights, its
training and the order of teacher prompts. Intervals are 95%: over users, and over seeds by Student's t. Models are
kept in the folder `--work` under names that tell how they were made.

    python examples/benchmark/atspeed.py             # some hours of one core
    python examples/benchmark/atspeed.py --fast      # a minute: the method, not the numbers

Axes: seeds, users.
"""

import argparse
import hashlib
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import STUDIES, Study, has_study, read_study
from backbone_models import backbone_folder, load, make_once, max_items, show_progress
from report import print_json_line, print_table
from torch import Tensor
from transformers import TrainingArguments
from transformers.utils.logging import disable_progress_bar

from hf_gr.files.cache import cache_folder
from hf_gr.training import (
    AtSpeedTrainer,
    TeacherDataset,
    score_paths,
    small_recommender,
    train_recommender,
    write_teacher_data,
)
from hf_gr.training.packing import pad_prompts

BASE, RANDOM, TRIE, BOTH = "before alignment", "random weights", "trie", "SeqKD and trie"
NUM_DRAFT_BEAMS, GAMMA = 40, 4
# A budget of one node keeps the catalogue from drafting: what remains is AtSpeed.
ASSISTANT: dict[str, Any] = {
    "drafting": "assistant",
    "num_draft_beams": NUM_DRAFT_BEAMS,
    "num_assistant_tokens": GAMMA,
    "draft_token_budget": 1,
}
BUDGET = 256  # nodes of the trie's draft
RELAXED: dict[str, Any] = {"do_sample": True, "top_k": 0, "verification": "relaxed"}
NUM_BEAMS = 20  # sequences of a teacher prompt, and tokens that alignments compare: the authors' code has 20
PROMPTS_SEED = 0  # of the order of teacher prompts: never a run's
# The paper's (section A.3), with a share of the steps for warm-up in the place of 200.
ALIGNMENT: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "train_sampling_strategy": "group_by_length",
}
WARMUP_SHARE = 0.1
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # 97.5% quantiles of Student's t, by the number of seeds


@dataclass(frozen=True)
class Method:
    """How a draft is aligned.

    Attributes:
        loss: of `AtSpeedTrainer`.
        options: of the loss.
        compares: of `DistanceTrainer`, "WordKD", "TVDKD" or "released", with `alpha` for its weight.
        start: which draft it begins with.
    """

    loss: str
    options: dict[str, Any] = field(default_factory=dict)
    compares: str | None = None
    alpha: float = 1.0
    start: str = BASE


# Equation 4 sums over K sequences, and ours takes their mean: with alpha 0.5, the same loss times a constant.
SUMMED = {"alpha": NUM_BEAMS / (NUM_BEAMS + 1)}
LOSSES: dict[str, Method] = {
    "SFT": Method("sft"),
    "WordKD": Method("sft", compares="WordKD"),
    "TVDKD": Method("sft", compares="TVDKD"),
    "SeqKD": Method("seqkd"),
    "AtSpeed-S": Method("atspeed-s", SUMMED),
    "AtSpeed-S, mean of sequences": Method("atspeed-s", {"alpha": 0.5}),
    "AtSpeed-S, released, 0.5": Method("sft", compares="released", alpha=0.5),
    "AtSpeed-S, released, 0.7": Method("sft", compares="released", alpha=0.7),
    "AtSpeed-R": Method("atspeed-r", {"alpha": 0.5}),
    "BeamKD": Method("beamkd", {"alpha": 1.0}),  # ours
}
NEW = ("SeqKD", "AtSpeed-S", "AtSpeed-S, released, 0.7", "AtSpeed-R", "BeamKD")  # also of drafts that know nothing
METHODS = LOSSES | {f"{name}, from random weights": replace(LOSSES[name], start=RANDOM) for name in NEW}


@dataclass(frozen=True)
class Plan:
    """How large the draft is, how long it trains, how much teacher data an alignment sees, and what is counted."""

    draft: dict[str, int] = field(
        default_factory=lambda: {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    )
    draft_steps: int = 1500
    prompts: int = 6784
    epochs: int = 3
    align_batch: int = 64
    users: int = 1000
    relaxed_users: int = 300
    user_batch: int = 50
    beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    seeds: int = 3


FAST: dict[str, Any] = {
    "draft": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "draft_steps": 5,
    "prompts": 32,
    "epochs": 2,
    "align_batch": 8,
    "users": 6,
    "relaxed_users": 6,
    "user_batch": 3,
    "beams": (5,),
    "seeds": 1,
}


class DistanceTrainer(AtSpeedTrainer):
    """Losses at the label's positions alone: WordKD, TVDKD, and what AtSpeed's authors released for AtSpeed-S.

    WordKD is KL(p || q) over the whole vocabulary, TVDKD total variation. "released" is, with both distributions over
    the tokens of a level and q's `NUM_BEAMS` likeliest, sum q log(q / p) + p_K H(q), where p_K is p of the last of
    them; it is added to the cross entropy, with weights `alpha` and 1 - `alpha`. (Equation 4 has -sum q log(q / p_K),
    the legal tokens of each prefix, and the target's sequences. The script that came with the code sharpens both
    distributions once more; its defaults, taken here, do not.)
    """

    target: Any
    method: Method
    is_of_level: Tensor  # `[L, V]`

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        labels = inputs["labels"].clamp(min=-1)[:, None]

        def log_probs(of: Any) -> Tensor:
            scores = score_paths(of, inputs["input_ids"], inputs["attention_mask"], labels).log_softmax()
            return torch.cat([scores.first, scores.rest[:, 0]], dim=1)

        q = log_probs(model)
        with torch.no_grad():
            p = log_probs(self.target)
        is_token = labels[:, 0] >= 0
        own = q.gather(-1, labels[:, 0].clamp(min=0)[..., None])[..., 0]
        if self.method.compares == "WordKD":
            distances = (p.exp() * (p - q)).sum(-1)
        elif self.method.compares == "TVDKD":
            distances = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
        else:
            q, p = (some.masked_fill(~self.is_of_level, -1e9).log_softmax(-1) for some in (q, p))
            q, best = q.topk(NUM_BEAMS)
            p = p.gather(-1, best)
            distances = (q.exp() * (q - p)).sum(-1) - p[..., -1].exp() * (q.exp() * q).sum(-1)
        distances = self.method.alpha * distances - (1 - self.method.alpha) * own
        return ((distances * is_token).sum(-1) / is_token.sum(-1)).mean()


class Workshop:
    """The models, teacher data and users of one study; models are made when they are needed, and kept in a folder."""

    def __init__(self, study: Study, plan: Plan, folder: Path, *, fast: bool) -> None:
        self.study, self.plan = study, plan
        self.length = max_items(study, fast)
        backbone = backbone_folder(study, folder / "backbones" if fast else None, fast=fast)
        weights = hashlib.sha256((backbone / "model.safetensors").read_bytes()).hexdigest()
        made_from = [weights, plan.draft, plan.draft_steps, plan.prompts, plan.epochs, plan.align_batch, NUM_BEAMS]
        made_from += [ALIGNMENT]
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:8]
        self.folder = folder / f"{study.name}-{key}"
        self.target = load(backbone)
        # Of all users but those whose histories are teacher prompts.
        taught = {tuple(history) for history in study.align}
        rows = [row for row in study.test if tuple(row.history[:-1]) not in taught]
        self.rows = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))[: plan.users]]

    def draft(self, name: str, seed: int) -> Any:
        """A draft with random weights, one that was trained on the backbone's histories, or that one aligned."""
        if name == RANDOM:
            return small_recommender(self.study.ids, max_items=self.length, seed=seed, **self.plan.draft).eval()
        if name == BASE:
            return load(make_once(self.folder / f"draft-{seed}", lambda part: self._train(part, seed)))
        return load(make_once(self.folder / f"{name.lower()}-{seed}", lambda part: self._align(part, name, seed)))

    def _train(self, part: Path, seed: int) -> None:
        how: dict[str, Any] = {"max_items": self.length, "max_steps": self.plan.draft_steps, "seed": seed}
        model = self.draft(RANDOM, seed)
        train_recommender(self.study.train, self.study.ids, model=model, output_dir=part, progress=False, **how)

    def _align(self, part: Path, name: str, seed: int) -> None:
        method = METHODS[name]
        steps = -(-len(self.teacher) // self.plan.align_batch) * self.plan.epochs
        args = TrainingArguments(
            output_dir=str(part),
            max_steps=steps,
            per_device_train_batch_size=self.plan.align_batch,
            warmup_steps=int(WARMUP_SHARE * steps),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
            **ALIGNMENT,
        )
        how: dict[str, Any] = {"constraint_index": self.study.index, "loss": method.loss, **method.options}
        kind = DistanceTrainer if method.compares else AtSpeedTrainer
        trainer: Any = kind(model=self.draft(method.start, seed), args=args, train_dataset=self.teacher, **how)
        trainer.target, trainer.method = self.target, method
        trainer.is_of_level = torch.zeros(self.study.tokens.shape[1], self.target.config.vocab_size, dtype=torch.bool)
        trainer.is_of_level[np.arange(self.study.tokens.shape[1]), self.study.tokens] = True
        trainer.train()
        trainer.model.eval().save_pretrained(part)
        show_progress(f"{self.study.name}: {name}, seed {seed}")

    @cached_property
    def teacher(self) -> TeacherDataset:
        """The target's answers to beginnings of two or more items of the held-out histories."""
        study = self.study
        places = [(history, end) for history in study.align for end in range(2, len(history))]
        order = np.random.default_rng(PROMPTS_SEED).permutation(len(places))[: self.plan.prompts].tolist()
        chosen = [places[place] for place in order]
        prompts = [study.tokens[history[max(0, end - self.length) : end]].ravel().tolist() for history, end in chosen]
        labels = [study.tokens[history[end]].tolist() for history, end in chosen]
        folder = self.folder / "teacher"
        how: dict[str, Any] = {"labels": labels, "num_beams": NUM_BEAMS, "batch_size": 64}
        write_teacher_data(self.target, prompts, study.index, folder, **how)
        return TeacherDataset(folder)

    def batches(self, number: int) -> list[list[int]]:
        """Some rows, those with prompts of similar lengths together."""
        order = sorted(range(min(number, len(self.rows))), key=lambda row: len(self.rows[row].history))
        return [order[start : start + self.plan.user_batch] for start in range(0, len(order), self.plan.user_batch)]

    def ask(self, batch: Sequence[int], num_beams: int, settings: dict[str, Any]) -> tuple[Any, Tensor]:
        """What the target answers to a batch of rows, and the answers' tokens."""
        prompts = [self.study.tokens[self.rows[row].history[-self.length :]].ravel() for row in batch]
        ids, mask = pad_prompts(prompts, pad_token_id=self.target.config.pad_token_id, side="left")
        prompt = {"input_ids": ids, "attention_mask": mask}
        seed = {"seed": batch[0]} if settings.get("do_sample") else {}
        widths = {"num_beams": num_beams, "num_return_sequences": num_beams}
        how = {"constraint_index": self.study.index, "return_dict_in_generate": True}
        out = self.target.generate(**prompt, **settings, **seed, **widths, **how)
        return out, out.sequences[:, prompt["input_ids"].shape[1] :]


def interval(values: np.ndarray) -> list[float]:
    """The mean of `[seeds, users]` and its 95% interval."""
    num_seeds, num_users = values.shape
    variance = 1.96**2 * float(values.mean(0).var()) / num_users
    if num_seeds > 1:
        variance += STUDENT[num_seeds] ** 2 * float(values.mean(1).var(ddof=1)) / num_seeds
    mean, half = float(values.mean()), math.sqrt(variance)
    return [round(mean, 4), round(mean - half, 4), round(mean + half, 4)]


def accepted(shop: Workshop, verification: str, settings: dict[str, Any], plain: dict[Any, Tensor]) -> list[list[int]]:
    """Accepted steps of users, for every K; `plain` has the answers that strict ones must equal."""
    is_strict = verification == "strict"
    found = []
    for num_beams in shop.plan.beams:
        steps: list[int] = []
        for batch in shop.batches(shop.plan.users if is_strict else shop.plan.relaxed_users):
            out, tokens = shop.ask(batch, num_beams, settings if is_strict else RELAXED | settings)
            if is_strict and not torch.equal(tokens, plain[num_beams, batch[0]]):
                raise SystemExit(f"{settings}, K = {num_beams}: another answer than plain beam search's")
            steps += out.speculation.accepted_steps.tolist()
        found.append(steps)
    return found


def table_1(shop: Workshop) -> list[dict[str, Any]]:
    """All methods, strict and relaxed; differences to SeqKD are paired by user and seed."""
    plan, batches = shop.plan, shop.batches(shop.plan.users)
    plain = {(width, batch[0]): shop.ask(batch, width, {})[1] for width in plan.beams for batch in batches}
    trie: dict[str, Any] = {"drafting": "trie", "draft_token_budget": BUDGET}
    rows = []
    for verification in ("strict", "relaxed"):
        counts: dict[str, np.ndarray] = {}
        names = [*METHODS, BASE, RANDOM, BOTH] if verification == "strict" else [*NEW, BASE, RANDOM]
        for name in names:
            found = []
            for seed in range(plan.seeds):
                settings = ASSISTANT | {"assistant_model": shop.draft("SeqKD" if name == BOTH else name, seed)}
                settings |= {"draft_token_budget": BUDGET} if name == BOTH else {}
                found.append(accepted(shop, verification, settings, plain))
            counts[name] = np.array(found)  # [seeds, K, users]
            show_progress(f"{shop.study.name}: {verification}, {name}")
        if verification == "strict":
            counts[TRIE] = np.array([accepted(shop, verification, trie, plain)])
        for name, values in counts.items():
            steps = {width: interval(values[:, at]) for at, width in enumerate(plan.beams)}
            less = {width: interval(values[:, at] - counts["SeqKD"][:, at]) for at, width in enumerate(plan.beams)}
            rows.append({"verification": verification, "method": name, "accepted_steps": steps, "less_seqkd": less})
    return rows


def table_2(shop: Workshop) -> list[dict[str, Any]]:
    """Recall by temperature; 0 is beam search. The paper does not say what a bad draft does to the answers."""
    ways: dict[str, dict[str, Any]] = {"temperature 0: the target": {}}
    for temperature in (0.5, 1.0):
        own = RELAXED | {"temperature": temperature}
        ways[f"temperature {temperature}: the target"] = own
        for name in ("AtSpeed-R", RANDOM):
            ways[f"temperature {temperature}: {name}"] = own | ASSISTANT | {"assistant_model": shop.draft(name, 0)}
    rows = []
    for name, settings in ways.items():
        recall: dict[int, list[float]] = {}
        for num_beams in (5, 10):
            hits = []
            for batch in shop.batches(shop.plan.users):
                items = shop.study.index.items(shop.ask(batch, num_beams, settings)[1])
                for place, row in enumerate(batch):
                    own_items = items[place * num_beams : (place + 1) * num_beams]
                    hits.append(any(shop.rows[row].item in found for found in own_items))
            recall[num_beams] = interval(np.array([hits], dtype=float))
        rows.append({"method": name, "recall": recall})
    return rows


def show(title: str, keys: Sequence[str], rows: Sequence[dict[str, Any]], figure: str, form: str) -> None:
    beams = list(rows[0][figure])
    cells = [[*(row[key] for key in keys), *(form.format(*row[figure][width]) for width in beams)] for row in rows]
    print(f"\n{title}; means and 95% intervals")
    print_table([*keys, *(f"K = {width}" for width in beams)], cells)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--seeds", type=int, choices=(1, *STUDENT), help="drafts of each row of table 1")
    parser.add_argument("--work", type=Path, help="where models are kept; for --fast nowhere")
    parser.add_argument("--fast", action="store_true", help="tiny models, few users; skips data that are not there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hf_gr_atspeed_") as nowhere:
        folder = options.work or (Path(nowhere) if options.fast else cache_folder("experiments") / "atspeed")
        for name in options.studies:
            if options.fast and not has_study(name):
                print(f"skipped: no data of {name}")
                continue
            sizes = FAST if options.fast else {"prompts": 6784 if name == "beauty" else 2000}
            plan = Plan(**sizes | ({"seeds": options.seeds} if options.seeds else {}))
            shop = Workshop(read_study(name, fast=options.fast), plan, folder, fast=options.fast)
            print(
                f"{name}: {len(shop.study.index):,} items of {shop.study.index.max_length} levels; target "
                f"{shop.target.num_parameters():,} parameters, draft {shop.draft(RANDOM, 0).num_parameters():,}; "
                f"{len(shop.teacher):,} teacher prompts, {plan.epochs} epochs; {len(shop.rows):,} users"
            )
            rows = {"table 1": table_1(shop), "table 2": table_2(shop)}
            steps = f"accepted steps, N = {NUM_DRAFT_BEAMS}, gamma = {GAMMA} (AS@K)"
            show(steps, ("verification", "method"), rows["table 1"], "accepted_steps", "{:.2f} ({:.2f}, {:.2f})")
            show("test items recommended", ("method",), rows["table 2"], "recall", "{:.2%} ({:.2%}, {:.2%})")
            results[name] = {"plan": asdict(plan), **rows}
    print_json_line("atspeed", torch.device("cpu"), results)


if __name__ == "__main__":
    main()
