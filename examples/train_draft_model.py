# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a draft model for a recommender on your interactions, and count the forwards that it saves. AtSpeed.

Input: interactions, one per row, with the columns `user`, `item` and `time` (CSV, TSV, Parquet or JSON lines), and a
recommender: a folder or repository with a model and its catalogue, whose items are those of the interactions.
Without `--model` a small one is trained first, with semantic IDs made from which items follow each other.

1. The last item of every user is held out.
2. The recommender (the target) answers histories by beam search; its sequences, and its probabilities at every step,
   are the teacher data. Several processes divide them. An interrupted run continues when it is repeated.
3. A small decoder with the target's vocabulary learns to recommend, and is then aligned with the target.
4. Held-out users are answered without a draft, with the catalogue as the draft (which needs no training), with the
   draft before its alignment, after it, and with both. Answers are equal, as the target decides; its forwards and the
   time differ. On a CPU the cost of a forward grows with its tokens: fewer forwards need not save time there.

    pip install "hf-gr[demo]"
    python examples/train_draft_model.py --interactions purchases.csv --output draft
    python examples/train_draft_model.py --interactions purchases.csv --model me/recommender --output draft
    accelerate launch --multi_gpu --num_processes 4 examples/train_draft_model.py --interactions ...  # on four GPUs
    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_draft_model.py ...  # on CPUs
    python examples/train_draft_model.py --fast  # seconds, on made-up interactions: the method, not its quality

Its twin, `train_draft_head.py`, trains a part of the checkpoint that needs no second model.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainingArguments, set_seed
from transformers.utils import logging

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex
from hf_gr.training import (
    AtSpeedTrainer,
    InteractionDataset,
    TeacherDataset,
    read_histories,
    semantic_ids_from_histories,
    small_recommender,
    train_recommender,
    write_teacher_data,
)

COLUMNS = ["user", "item", "time"]
TARGET = {"hidden_size": 128, "num_hidden_layers": 2}
FAST_TARGET = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAST = {
    "base_steps": 60,
    "steps": 30,
    "users": 20,
    "max_items": 6,
    "prompts": 200,
    "num_codes": 8,
    "hidden_size": 16,
    "num_beams": 4,
}


def make_up(path: Path, rng: np.random.Generator) -> Path:
    """A file of learnable interactions: each item determines which three are likely to follow."""
    next_items = rng.integers(120, size=(120, 3))
    lines = ["user,item,time"]
    for user in range(300):
        item = int(rng.integers(120))
        for place in range(8):
            lines.append(f"u{user},i{item},{place}")
            item = int(next_items[item, rng.choice(3, p=[0.7, 0.2, 0.1])])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_data(options: argparse.Namespace) -> list[list[Any]]:
    """What every user with two items or more had, oldest first."""
    names = dict(zip(("user", "item", "time"), options.columns, strict=False))
    try:
        histories = read_histories(options.interactions, **names)
    except ValueError as error:
        if options.columns == COLUMNS and "no column 'time'" in str(error):
            say("no column 'time': rows are taken to be in order")
            options.columns = COLUMNS[:2]
            return read_data(options)
        raise SystemExit(f"{error} (--columns USER ITEM TIME)") from error
    return [history for history in histories.values() if len(history) > 1]


def train_target(options: argparse.Namespace, histories: list[list[Any]], folder: Path) -> str:
    """A small recommender in a folder."""
    ids = semantic_ids_from_histories(histories, num_codes=options.num_codes, seed=options.seed)
    size: dict[str, Any] = FAST_TARGET if options.fast else TARGET
    target = small_recommender(ids, max_items=options.max_items, seed=options.seed, **size)
    train_recommender(
        histories,
        ids,
        model=target,
        max_items=options.max_items,
        max_steps=options.base_steps,
        learning_rate=3e-3,
        output_dir=folder,
        seed=options.seed,
    )
    return str(folder)


def load_target(options: argparse.Namespace, name: str) -> tuple[Any, ConstraintIndex]:
    """The target on this process's device, and its catalogue."""
    target = AutoModelForGenerativeRetrieval.from_pretrained(name, backend="torch").eval()
    named = target.generation_config.constraint_index
    where = options.index or (name if named in (None, ".") else named)
    return target.to(PartialState().device), ConstraintIndex.from_pretrained(where)


def make_draft(options: argparse.Namespace, target: Any) -> Any:
    """A small decoder with the target's vocabulary."""
    if options.draft is not None:
        return AutoModelForGenerativeRetrieval.from_pretrained(options.draft, backend="torch")
    set_seed(options.seed)
    config = target.config.get_text_config()
    width = options.hidden_size
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=options.layers,
            num_attention_heads=max(1, width // 32),
            num_key_value_heads=max(1, width // 32),
            head_dim=min(32, width),
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )


def align(options: argparse.Namespace, draft: Any, teacher: Path, index: ConstraintIndex) -> Any:
    """The draft, aligned with the target."""
    trainer = AtSpeedTrainer(
        model=draft,
        args=TrainingArguments(
            str(options.output / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 10,
            weight_decay=0.1,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=not torch.accelerator.is_available(),
            ddp_find_unused_parameters=False,
            seed=options.seed,
        ),
        train_dataset=TeacherDataset(teacher),
        constraint_index=index,
        loss=options.loss,
    )
    trainer.remove_callback(PrinterCallback)
    result = trainer.train()
    say(
        f"aligned in {options.steps} steps, number of processes: {trainer.args.world_size}, "
        f"{result.metrics['train_runtime']:.0f} s"
    )
    return draft.eval()


@torch.no_grad()
def ask(target: Any, index: ConstraintIndex, prompts: list[np.ndarray], num_beams: int, **how: Any) -> dict[str, Any]:
    """Answers to prompts, one at a time; forwards of the target, prefill included, and milliseconds for each."""
    found: dict[str, Any] = {"sequences": [], "forwards": [], "milliseconds": []}
    for number, prompt in enumerate([prompts[0], *prompts]):
        begin = time.perf_counter()
        out = target.generate(
            torch.from_numpy(prompt)[None].to(target.device),
            constraint_index=index,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            return_dict_in_generate=True,
            **how,
        )
        sequences = out.sequences[:, len(prompt) :].tolist()
        if number:  # the first call is slower
            found["milliseconds"].append(1000 * (time.perf_counter() - begin))
            found["forwards"].append(1 + out.speculation.target_forwards)
            found["sequences"].append(sequences)
    return found


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train, count, and print the results; None in all processes but the main one."""
    histories = read_data(options)
    known = [history[:-1] for history in histories]
    if not any(len(history) > 1 for history in known):
        raise SystemExit(
            f"{options.interactions}: no user has 3 items, expected some: two to learn from, one held out"
        )
    name = options.model or train_target(options, known, options.output / "target")
    target, index = load_target(options, name)
    items = [*dict.fromkeys(item for history in known for item in history)]
    try:
        unknown = [item for item, has in zip(items, index.has_items(items).tolist(), strict=True) if not has]
    except ValueError as error:  # ids of the other type
        raise SystemExit(f"the catalogue of {name} has other item ids than {options.interactions}: {error}") from error
    if unknown:
        say(f"{len(unknown):,} of {len(items):,} items are not in the catalogue, such as {unknown[0]!r}: omitted")
        gone = set(unknown)
        items = [item for item in items if item not in gone]
        known = [[item for item in history if item not in gone] for history in known]
        known = [history for history in known if history]
        if not known:
            raise SystemExit(f"no item of {options.interactions} is in the catalogue of {name}: is it the right one?")
    row_of = {item: row for row, item in enumerate(items)}
    tokens = np.array(index.encode(items)).reshape(len(items), -1)  # semantic IDs of one length
    rows = [np.array([row_of[item] for item in history]) for history in known]

    # Every item of a history is a label once; what came before it is its prompt.
    pairs = InteractionDataset.from_histories(rows, tokens, max_items=options.max_items)
    rng = np.random.default_rng(options.seed)
    chosen = [pairs[int(number)] for number in rng.permutation(len(pairs))[: options.prompts]]
    start = time.perf_counter()
    teacher = write_teacher_data(
        target,
        [pair["input_ids"] for pair in chosen],
        index,
        options.output / "teacher",
        num_beams=options.num_beams,
        labels=[pair["labels"] for pair in chosen],
        shard_size=max(1, min(1024, len(chosen) // (4 * PartialState().num_processes))),
        progress=True,
    )
    say(f"teacher data of {len(chosen):,} prompts in {time.perf_counter() - start:.0f} s: {teacher}")

    draft = make_draft(options, target)
    if options.draft is None:
        draft = train_recommender(
            rows,
            tokens,
            model=draft,
            max_items=options.max_items,
            max_steps=options.base_steps,
            learning_rate=3e-3,
            seed=options.seed,
        )
    is_main = PartialState().is_main_process
    say(f"parameters: target {target.num_parameters():,}, draft {draft.num_parameters():,}")
    prompts = [
        tokens[rows[user][-options.max_items :]].ravel() for user in rng.permutation(len(rows))[: options.users]
    ]
    # A budget of one node keeps the catalogue from drafting beside the draft model: what remains is AtSpeed.
    both = {"assistant_model": draft.to(target.device).eval(), "num_draft_beams": 4 * options.num_beams}
    alone = both | {"drafting": "assistant", "draft_token_budget": 1}
    found: dict[str, dict[str, Any]] = {}
    if is_main:
        found["no draft"] = ask(target, index, prompts, options.num_beams, drafting=None)
        found["catalogue alone"] = ask(target, index, prompts, options.num_beams, drafting="trie")
        found["draft before alignment"] = ask(target, index, prompts, options.num_beams, **alone)
    draft = align(options, draft, teacher, index)
    if not is_main:
        return None
    found["draft, aligned"] = ask(target, index, prompts, options.num_beams, **alone)
    found["both"] = ask(target, index, prompts, options.num_beams, **both)
    plain = found["no draft"]["sequences"]
    print(f"{'':24}  forwards of the target  one user  same answers")
    table = {}
    for title, one in found.items():
        equal = np.mean([ours == theirs for ours, theirs in zip(one["sequences"], plain, strict=True)])
        row = {"forwards": float(np.mean(one["forwards"])), "milliseconds": float(np.median(one["milliseconds"]))}
        print(f"{title:24}  {row['forwards']:22.2f}  {row['milliseconds']:5.1f} ms  {equal:12.0%}")
        table[title] = row | {"same": float(equal)}
    draft.save_pretrained(options.output)
    if not options.fast:
        say(
            f"saved in {options.output}: model.generate(..., assistant_model=...), or hf-gr recommend --model {name} "
            f"--draft-model {options.output} --drafting assistant ..."
        )
    return {"users": len(prompts), "items": len(items), "prompts": len(chosen), "rows": table}


def say(text: str) -> None:
    PartialState().print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=Path, help="file with one interaction per row")
    parser.add_argument("--columns", nargs="+", default=COLUMNS, help="names of user, item and time")
    parser.add_argument("--model", help="the target: a folder or repository; by default a small one is trained first")
    parser.add_argument("--index", help="its catalogue; by default the one that it names, or beside it")
    parser.add_argument("--draft", help="a model to align, of the target's vocabulary; by default a small one is made")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("draft"),
        help="where the draft and the teacher data go; --fast keeps nothing",
    )
    parser.add_argument("--loss", choices=("beamkd", "atspeed-s", "atspeed-r", "seqkd", "sft"), default="beamkd")
    parser.add_argument("--steps", type=int, default=400, help="steps of the alignment")
    parser.add_argument("--base-steps", type=int, default=600, help="steps on histories, of a new target and a draft")
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts that the target answers")
    parser.add_argument("--num-beams", type=int, default=10, help="beams of the target's answers")
    parser.add_argument("--num-codes", type=int, default=64, help="codes per level of a new target's semantic IDs")
    parser.add_argument("--hidden-size", type=int, default=64, help="width of a new draft")
    parser.add_argument("--layers", type=int, default=1, help="layers of a new draft")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-items", type=int, default=10, help="the latest items that form a prompt")
    parser.add_argument("--users", type=int, default=100, help="users that are answered to compare")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few steps on made-up interactions")
    options = parser.parse_args(arguments)
    if not 2 <= len(options.columns) <= 3:
        parser.error("--columns takes the names of user and item, and optionally of time")
    for name in (
        "steps",
        "base_steps",
        "prompts",
        "num_beams",
        "num_codes",
        "layers",
        "max_items",
        "users",
        "batch_size",
    ):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}, expected 1 or more")
    if options.fast:
        vars(options).update(FAST)
    elif options.interactions is None:
        parser.error("--interactions is needed, or --fast")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.disable_progress_bar()
    PartialState(cpu=not torch.accelerator.is_available())  # else several processes on CPUs would not find each other
    torch.set_num_threads(1)  # a second thread hardly helps a small model, and slows it down where a core is busy
    with tempfile.TemporaryDirectory() as folder:
        if options.fast:
            shared = broadcast_object_list([folder])  # all processes need one folder
            options.output = Path(shared[0])
            options.interactions = make_up(Path(folder) / "purchases.csv", np.random.default_rng(options.seed))
        result = compare(options)
    if result is not None:
        settings = {name: getattr(options, name) for name in ("loss", "steps", "num_beams", "seed")}
        print(json.dumps({**settings, **result}))


if __name__ == "__main__":
    main()
