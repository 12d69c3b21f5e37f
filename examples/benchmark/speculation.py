# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Speculative beam search on Amazon Beauty: tables 1 and 2 of AtSpeed, with models that two cores can train.

A target and a draft of the same vocabulary are trained on the users' histories; each of the paper's methods then
aligns the draft with the target, for equally many steps from the same weights. Users of the test period are served one
at a time, with K items, N = 40 draft beams and gamma = 4, by

- strict verification: answers equal plain beam search's, which is checked before any time is printed;
- relaxed verification: answers are sampled, and compared with the target's own sampling beams;
- the catalogue as drafter, which is not in the paper: alone, and together with a draft model;
- an untrained draft, the draft before its alignment, and one with fewer draft beams, N = 2 K (relaxed: K).

WS@K is the median over users of baseline time / time, paired: every user goes through all rows, in an order that
rotates from user to user. The baseline is plain beam search for strict rows, the target's own sampling beams for
relaxed ones. Times are of whole calls, including the prefills of target and draft.

AS@K is the mean number of accepted steps per user. Its scale differs from the paper's: here the prefill gives level 1
exactly and is counted separately, so a draft can offer levels 2 and 3 (the last level needs no forward), and AS@K is
at most 2; in the paper the first draft includes level 1, and it is at most 3. Plain search takes 3 forwards after the
prefill, and every accepted step saves one. Levels without alternatives are accepted under any draft: the row of the
untrained draft shows how much of AS@K that is, and what 40 beams cover by chance.

What to expect here: on a CPU the cost of a forward is nearly proportional to its tokens, so scoring 80 drafted nodes
to save two forwards of K costs time, however good the draft. Where a forward costs the same for 1 and for 100 tokens,
as on a GPU with a larger target, the number of forwards is what counts.

Stages keep their results in the folder `--work` and resume from there. To redo something, remove it there, together
with what follows from it. Nothing from the periods valid and test is trained on.

    python examples/benchmark/speculation.py                  # two and a half hours on two cores
    python examples/benchmark/speculation.py --stage target   # stop after a stage
    python examples/benchmark/speculation.py --fast           # seconds: the method, not the numbers
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty_data import DEFAULT_DATA, FILES, is_there, read_items, read_users
from report import environment, print_table
from torch.utils.data import Dataset
from transformers import PrinterCallback, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.demo.evaluate import make_prompts, same_answers
from hf_gr.demo.train import HistoryWindows, TrainSettings, build_model, pad_batch
from hf_gr.training import AtSpeedTrainer, TeacherDataset, write_teacher_data

WORK = Path("~/.cache/hf_gr/speculation")
STAGES = ("target", "teacher", "drafts", "measure")
METHODS = {
    "sft": "SFT",
    "wordkd": "WordKD",
    "tvdkd": "TVDKD",
    "seqkd": "SeqKD",
    "atspeed-s": "AtSpeed-S",
    "atspeed-r": "AtSpeed-R",
}
NUM_DRAFT_BEAMS, GAMMA = 40, 4
TRIE_BUDGET = 256
# A budget of one node keeps the catalogue from drafting: what remains is AtSpeed.
ASSISTANT = {
    "drafting": "assistant",
    "num_draft_beams": NUM_DRAFT_BEAMS,
    "num_assistant_tokens": GAMMA,
    "draft_token_budget": 1,
}
RANDOM = "random weights"
BASELINES = {"strict": "plain beam search", "relaxed": "the target's own sampling beams"}


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    target: TrainSettings
    draft: TrainSettings
    teacher_prompts: int | None
    align_steps: int  # of every method
    users: int  # timed and counted
    recall_users: int | None
    num_beams: tuple[int, ...]
    recall_beams: tuple[int, ...]
    batch_size: int = 64


TARGET = TrainSettings(
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=6,
    window=20,
    num_steps=1800,
    learning_rate=1e-3,
    max_seconds=math.inf,
)
DRAFT = TrainSettings(window=20, num_steps=1500, learning_rate=3e-3, max_seconds=math.inf)
TINY = TrainSettings(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, window=20, num_steps=20)
FULL = Scale(
    target=TARGET,
    draft=DRAFT,
    teacher_prompts=None,
    align_steps=700,
    users=120,
    recall_users=None,
    num_beams=(1, 3, 5, 10, 20),
    recall_beams=(5, 10),
)
FAST = Scale(
    target=TINY,
    draft=replace(TINY, hidden_size=16, num_steps=5),
    teacher_prompts=64,
    align_steps=3,
    users=3,
    recall_users=16,
    num_beams=(1, 5),
    recall_beams=(5,),
    batch_size=16,
)


@dataclass(frozen=True)
class Data:
    """The catalogue, training data and prompts: items are numbered from 0, histories oldest first."""

    tokens: np.ndarray  # [N, L]
    index: ConstraintIndex
    histories: list[np.ndarray]  # train
    prompts: list[np.ndarray]  # train and valid of the users with test items
    answers: list[set[int]]  # their test items


@dataclass
class Row:
    """One way to generate: the arguments of `generate`, and the results."""

    verification: str
    name: str
    settings: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    target_forwards: list[int] = field(default_factory=list)
    draft_forwards: list[int] = field(default_factory=list)
    accepted_steps: list[int] = field(default_factory=list)
    not_equal: int = 0  # users whose sequences differ from plain beam search's, order included
    wrong: int = 0  # those that rounding does not explain


def read_data(data: Path, window: int) -> Data:
    item_ids, codes = read_items(data)
    if item_ids != list(range(len(codes))):
        raise SystemExit(f"the items of {data / 'items.tsv'} are not numbered 0, 1, 2, ...: number them as their rows")
    users = read_users(data)
    ids = SemanticIds(codes, level_sizes=[256] * codes.shape[1])
    asked = [user for user in users if user["test"] and user["train"] + user["valid"]]
    return Data(
        tokens=ids.token_sequences(),
        index=ids.constraint_index(),
        histories=[np.array(user["train"]) for user in users if user["train"]],
        prompts=[np.array(user["train"] + user["valid"])[-(window - 1) :] for user in asked],
        answers=[set(user["test"]) for user in asked],
    )


# ---------------------------------------------------------------------------------------------------------- training


class Rows(Dataset):
    """Windows under the name by which transformers groups them by length: similar lengths need less padding."""

    def __init__(self, windows: HistoryWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.windows[number]}


class Log(TrainerCallback):
    """Prints the loss and the time so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            passed = time.perf_counter() - self.start
            show_progress(f"{self.name}, step {state.global_step}: loss {float(logs['loss']):.3f}, {passed:.0f} s")


def training_arguments(folder: Path, *, num_steps: int, learning_rate: float) -> TrainingArguments:
    """As in the paper, section A.3, apart from the numbers of steps and AdamW's second beta."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=64,
        train_sampling_strategy="group_by_length",
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, num_steps // 5),
        weight_decay=0.1,
        adam_beta2=0.98,
        logging_steps=max(1, num_steps // 40),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        seed=0,
    )


def run_trainer(trainer: Trainer, name: str) -> None:
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Log(name))
    trainer.train()
    trainer.model.eval().save_pretrained(trainer.args.output_dir)


def train_on_histories(folder: Path, data: Data, settings: TrainSettings, name: str) -> None:
    """What `hf_gr.demo.train.train_model` does, in batches of similar lengths: three times faster here."""
    vocab_size = int(data.tokens.max()) + 2
    model = build_model(vocab_size, data.tokens.shape[1], settings, seed=0)
    show_progress(f"{name}: {model.num_parameters() / 1e6:.2f} M parameters, {settings.num_steps:,} steps")
    windows = HistoryWindows(data.histories, data.tokens, window=settings.window, seed=0)
    trainer = Trainer(
        model=model,
        args=training_arguments(folder, num_steps=settings.num_steps, learning_rate=settings.learning_rate),
        train_dataset=Rows(windows),
        data_collator=lambda rows: pad_batch([row["input_ids"] for row in rows], pad_token_id=vocab_size - 1),
    )
    run_trainer(trainer, name)


def write_teacher(folder: Path, data: Data, target: Any, scale: Scale) -> Path:
    """Every history without its last item as a prompt, that item as its label. Resumes in an existing folder."""
    histories = [history for history in data.histories if len(history) > 1][: scale.teacher_prompts]
    prompts = [data.tokens[history[-scale.target.window : -1]].ravel().tolist() for history in histories]
    labels = [data.tokens[history[-1]].tolist() for history in histories]
    start = time.perf_counter()
    write_teacher_data(
        target, prompts, data.index, folder, num_beams=10, labels=labels, full_vocabulary=True, progress=True
    )
    show_progress(f"teacher: {len(prompts):,} prompts, {time.perf_counter() - start:.0f} s")
    return folder


def align(folder: Path, data: Data, base: Path, teacher: Path, method: str, scale: Scale) -> None:
    trainer = AtSpeedTrainer(
        model=Qwen3ForCausalLM.from_pretrained(base),
        args=training_arguments(folder, num_steps=scale.align_steps, learning_rate=1e-3),
        train_dataset=TeacherDataset(teacher),
        constraint_index=data.index,
        loss=method,
        alpha=0.5,
    )
    run_trainer(trainer, METHODS[method])


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is complete; one that an earlier run left half-made is made again."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(folder)
    return folder


def load(folder: Path) -> Any:
    return enable(Qwen3ForCausalLM.from_pretrained(folder).eval())


# --------------------------------------------------------------------------------------------------------- measuring


def make_rows(drafts: dict[str, Any]) -> list[Row]:
    """All ways to compare: the baseline of a verification is the first of its rows."""
    trie = {"drafting": "trie", "draft_token_budget": TRIE_BUDGET}
    both = ASSISTANT | {"draft_token_budget": TRIE_BUDGET}
    narrow = ASSISTANT | {"num_draft_beams": None}  # the default: twice the beams, or as many if relaxed
    best, best_relaxed = METHODS["atspeed-s"], METHODS["atspeed-r"]
    rows = [Row("strict", BASELINES["strict"], {})]
    rows += [Row("strict", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [
        Row("strict", f"{best}, N = 2 K", narrow | {"assistant_model": drafts[best]}),
        Row("strict", "trie alone", trie),
        Row("strict", "trie where it pays (auto)", {"drafting": "auto"}),
        Row("strict", f"{best} and trie", both | {"assistant_model": drafts[best]}),
        Row("relaxed", BASELINES["relaxed"], {}),
    ]
    rows += [Row("relaxed", name, ASSISTANT | {"assistant_model": draft}) for name, draft in drafts.items()]
    rows += [Row("relaxed", f"{best_relaxed}, N = K", narrow | {"assistant_model": drafts[best_relaxed]})]
    for row in rows:
        if row.verification == "relaxed":
            row.settings = row.settings | {"verification": "relaxed", "temperature": 1.0}
    return rows


def ask(
    target: Any,
    prompt: dict[str, torch.Tensor],
    index: ConstraintIndex,
    row: Row,
    *,
    num_beams: int,
    seed: int = 0,
    output_scores: bool = False,
) -> Any:
    """One call. A relaxed one draws from its own seed."""
    settings = dict(row.settings)
    if row.verification == "relaxed":
        settings["generator"] = torch.Generator(target.device).manual_seed(seed)
    return target.generate(
        **prompt,
        **settings,
        constraint_index=index,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
        output_scores=output_scores,
    )


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
            output = ask(target, prompt, index, row, num_beams=num_beams, seed=abs(number))
            output.sequences = output.sequences.cpu()  # only now is a GPU done
            seconds = time.perf_counter() - start
            outputs[id(row)] = output
            if not is_warm_up:
                row.seconds.append(seconds)
                count(row, output, num_plain_forwards=index.max_length - 1)
        if not is_warm_up:
            check(target, prompt, index, rows, outputs, num_beams)


def count(row: Row, output: Any, *, num_plain_forwards: int) -> None:
    drafted = getattr(output, "speculation", None)
    row.target_forwards.append(drafted.target_forwards if drafted else num_plain_forwards)
    row.draft_forwards.append(drafted.draft_forwards if drafted else 0)
    row.accepted_steps.append(int(drafted.accepted_steps.sum()) if drafted else 0)


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
            pair = (ask(target, prompt, index, r, num_beams=num_beams, output_scores=True) for r in (rows[0], row))
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
            "target_forwards": statistics.mean(row.target_forwards),
            "draft_forwards": statistics.mean(row.draft_forwards),
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
        output = ask(target, prompt, data.index, row, num_beams=num_beams, seed=start)
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
        for name in (METHODS["atspeed-r"], RANDOM):
            drafted = settings | ASSISTANT | {"assistant_model": drafts[name]}
            yield Row("relaxed", f"temperature {temperature}: {name}", drafted)


def prompts_of(model: Any, data: Data, users: Sequence[int]) -> dict[str, torch.Tensor]:
    return make_prompts(
        [data.prompts[user] for user in users],
        data.tokens,
        num_films=max(len(data.prompts[user]) for user in users),
        pad_token_id=model.config.pad_token_id,
        device=model.device,
    )


def measure_all(target: Any, drafts: dict[str, Any], data: Data, scale: Scale) -> dict[str, Any]:
    order = np.random.default_rng(0).permutation(len(data.prompts))[: scale.users]
    prompts = [prompts_of(target, data, [user]) for user in order]
    prefill = prefill_seconds(target, prompts)
    results: dict[str, Any] = {
        "users": len(prompts),
        "prompt_tokens": statistics.mean(prompt["input_ids"].shape[1] for prompt in prompts),
        "target_parameters": target.num_parameters(),
        "draft_parameters": drafts[METHODS["atspeed-s"]].num_parameters(),
        "num_draft_beams": NUM_DRAFT_BEAMS,
        "gamma": GAMMA,
        "prefill_seconds": statistics.median(prefill),
        "rows": [],
        "recall": [],
    }
    for num_beams in scale.num_beams:
        rows = make_rows(drafts)
        measure(target, prompts, data.index, rows, num_beams)
        results["rows"] += summarize(rows, num_beams, prefill)
        show_progress(f"K = {num_beams}: done")
    for num_beams in scale.recall_beams:
        for row in recall_rows(drafts):
            results["recall"].append(recall(target, data, row, num_beams=num_beams, num_users=scale.recall_users))
            show_progress(f"recall@{num_beams}, {row.name}: done")
    return results


# ---------------------------------------------------------------------------------------------------------- reporting


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    print("forwards of a user after the prefills: target, draft")
    table(("target", "target_forwards", ".2f"), ("draft", "draft_forwards", ".2f"))
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
    parser.add_argument("--users", type=int, help="how many to measure")
    parser.add_argument("--device", default="cpu", help="to measure on; training is on the CPU")
    parser.add_argument("--fast", action="store_true", help="tiny models, few users; skipped without the data")
    return parser.parse_args(arguments)


def run(work: Path, data: Data, scale: Scale, options: argparse.Namespace) -> None:
    stages = STAGES[: STAGES.index(options.stage) + 1]
    target = load(make_once(work / "target", lambda folder: train_on_histories(folder, data, scale.target, "target")))
    if "teacher" in stages:
        teacher = write_teacher(work / "teacher", data, target, scale)
    drafts = {}
    if "drafts" in stages:
        base = make_once(work / "base", lambda folder: train_on_histories(folder, data, scale.draft, "draft"))
        folders = {
            name: make_once(
                work / method, lambda folder, method=method: align(folder, data, base, teacher, method, scale)
            )
            for method, name in METHODS.items()
        }
        drafts = {name: load(folder) for name, folder in folders.items()}
        drafts["before alignment"] = load(base)
        drafts[RANDOM] = enable(make_random(data, scale))
    if "measure" in stages:
        file = work / "measure.json"
        if file.exists():
            line = file.read_text(encoding="utf-8")
        else:
            for model in (target, *drafts.values()):
                model.to(options.device)
            result = measure_all(target, drafts, data, scale)
            line = json.dumps({"benchmark": "speculation", **result, **environment(torch.device(options.device))})
        show(json.loads(line))
        print(line)
        file.write_text(line, encoding="utf-8")


def make_random(data: Data, scale: Scale) -> Any:
    return build_model(int(data.tokens.max()) + 2, data.tokens.shape[1], scale.draft, seed=1).eval()


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not is_there(options.data, fast=options.fast):
        return
    torch.set_num_threads(1)  # a second thread hardly helps such small models, and costs a lot where a core is busy
    disable_progress_bar()  # transformers' progress bars, one per model read or written
    scale = FAST if options.fast else FULL
    if options.users:
        scale = replace(scale, users=options.users)
    data = read_data(options.data, scale.target.window)
    if options.fast and options.work is None:
        with tempfile.TemporaryDirectory(prefix="hf_gr_speculation_") as folder:
            run(Path(folder), data, scale, options)
    else:
        run((options.work or WORK).expanduser(), data, scale, options)


if __name__ == "__main__":
    main()
