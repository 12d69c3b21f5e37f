# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a draft head on interactions, and compare its hits with those of beam search. NEZHA, algorithm 3.

Input:

- interactions, one per row, with the columns `user`, `item` and optionally `time`, by which a user's rows are sorted
  (without it they must be in order): CSV, TSV, Parquet or JSON lines;
- semantic IDs: a table with the item in its first column and one column of codes per level after it, or a JSON file of
  any recipe that `SemanticIds.from_json` reads. All have the same number of levels.

The last item of every user is held out. The model is a checkpoint that knows the codes' tokens or, without `--model`,
a small Qwen3 that is first trained on the same histories. Beam search by the model runs before the head's training,
which also trains the model unless it is `--head-only`: so the hits do not compare the two ways of decoding.
`benchmark/nezha.py` does. The catalogue is saved beside the model, under the items' own ids.

    pip install "hf-gr[tables]"
    python examples/train_draft_head.py --interactions ratings.csv --items semantic_ids.tsv --output recommender
    accelerate launch --num_processes 4 examples/train_draft_head.py --interactions ...   # the same on four GPUs
    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_draft_head.py ...  # or on CPUs
    python examples/train_draft_head.py --fast  # seconds, on made-up interactions: the method, not its quality
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from accelerate import PartialState
from benchmark.report import print_json_line, print_table
from transformers import AutoTokenizer, PrinterCallback, TrainingArguments

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds, enable
from hf_gr.demo.train import TrainSettings, train_model
from hf_gr.files.draft_head_config import Transition
from hf_gr.training import DraftHeadTrainer, InteractionDataset
from hf_gr.training.packing import pad_prompts

LIST_LENGTH = 10
SUFFIXES = {".csv": ",", ".tsv": "\t"}  # and their separators
# A clock would end the training of several processes at different steps.
SETTINGS = {"num_steps": 1200, "learning_rate": 3e-3, "max_seconds": float("inf")}
FAST_SETTINGS = SETTINGS | {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
FAST = {"steps": 150, "base_steps": 150, "users": 100, "max_items": 6}


def read_columns(path: Path, *, as_text: Sequence[str] = ()) -> Any:
    """An Arrow table; ids in text files keep their spelling."""
    from pyarrow import csv, json, parquet, string

    import hf_gr.files.tables  # noqa: F401, says what to install if pyarrow is missing

    suffix = path.suffix.lower()
    try:
        if suffix in SUFFIXES:
            return csv.read_csv(
                path,
                parse_options=csv.ParseOptions(delimiter=SUFFIXES[suffix]),
                convert_options=csv.ConvertOptions(column_types={name: string() for name in as_text}),
            )
        if suffix in (".parquet", ".pq"):
            return parquet.read_table(path)
        if suffix in (".jsonl", ".ndjson"):
            return json.read_json(path)
    except (OSError, ValueError) as error:  # pyarrow's own are among them
        raise SystemExit(f"{path}: {error}") from error
    raise SystemExit(f"{path}: expected .csv, .tsv, .parquet or .jsonl")


def read_items(path: Path) -> tuple[list[str], np.ndarray]:
    """Items and their codes, `[N, L]`."""
    if path.suffix.lower() == ".json":
        ids = SemanticIds.from_json(path)
        items, codes = ids.item_ids, ids.codes
    else:
        table = read_columns(path)
        first, *levels = table.column_names
        items = read_columns(path, as_text=[first]).column(first).to_pylist()
        codes = np.stack([table.column(level).to_numpy() for level in levels], axis=1) if levels else np.zeros((0, 0))
    if codes.dtype.kind not in "iu" or (codes < 0).any():
        raise SystemExit(f"{path}: expected each item followed by its codes, integers from 0, equally many for all")
    if len(set(items)) < len(items):
        raise SystemExit(
            f"{path}: {len(items) - len(set(items))} items are there more than once, expected one row each"
        )
    return [str(item) for item in items], codes


def read_histories(path: Path, columns: Sequence[str], items: Sequence[str]) -> list[np.ndarray]:
    """The rows of `items` that every user had, oldest first."""
    user, item, *times = columns
    table = read_columns(path, as_text=[user, item])
    if user not in table.column_names or item not in table.column_names:
        raise SystemExit(
            f"{path} has columns {table.column_names}, expected {user!r} and {item!r}: name them by --columns"
        )
    row_of = {name: row for row, name in enumerate(items)}
    rows = np.array([row_of.get(str(name), -1) for name in table.column(item).to_pylist()])
    users = np.unique(np.array([str(name) for name in table.column(user).to_pylist()]), return_inverse=True)[1]
    order = np.argsort(users, kind="stable")
    if times and times[0] in table.column_names:
        order = np.lexsort((table.column(times[0]).to_numpy(), users))
    unknown = rows[order] < 0
    if unknown.any():
        say(f"{unknown.sum():,} of {len(rows):,} interactions are with items that have no semantic ID: left out")
    order = order[~unknown]
    return np.split(rows[order], np.flatnonzero(np.diff(users[order])) + 1)


def make_up(folder: Path, rng: np.random.Generator) -> tuple[Path, Path]:
    """Files of learnable interactions: each item determines which three are likely to follow."""
    num_items, num_users = 120, 400
    codes = np.stack([np.arange(num_items) // 20, np.arange(num_items) // 4 % 5, np.arange(num_items) % 4], axis=1)
    next_items = rng.integers(num_items, size=(num_items, 3))
    lines = ["user,item,time"]
    for user in range(num_users):
        item = int(rng.integers(num_items))
        for place in range(8):
            lines.append(f"u{user},i{item},{place}")
            item = int(next_items[item, rng.choice(3, p=[0.7, 0.2, 0.1])])
    interactions, items = folder / "interactions.csv", folder / "items.tsv"
    interactions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [f"i{item}\t" + "\t".join(map(str, row)) for item, row in enumerate(codes.tolist())]
    items.write_text("\n".join(["item\tlevel_1\tlevel_2\tlevel_3", *rows]) + "\n", encoding="utf-8")
    return interactions, items


def load_model(options: argparse.Namespace, codes: np.ndarray, histories: list[np.ndarray]) -> tuple[Any, Any, Any]:
    """The model, the semantic IDs as its tokens, and its tokenizer if it has one."""
    if options.model is not None:
        model = AutoModelForGenerativeRetrieval.from_pretrained(options.model)
        if not (options.model / "tokenizer_config.json").is_file():
            return model, SemanticIds(codes, offset=options.offset), None
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return model, SemanticIds.from_tokenizer(codes, tokenizer), tokenizer
    ids = SemanticIds(codes, offset=options.offset)
    settings: dict[str, Any] = (FAST_SETTINGS if options.fast else SETTINGS) | {"num_steps": options.base_steps}
    settings |= {"window": options.max_items + 1}
    start = time.perf_counter()
    model = train_model(histories, ids.token_sequences(), TrainSettings(**settings), seed=options.seed)
    seconds = time.perf_counter() - start
    say(f"the model has {model.num_parameters() / 1e6:.2f} M parameters, and was trained for {seconds:.0f} s")
    return enable(model), ids, None


def train_head(model: Any, ids: SemanticIds, tokenizer: Any, histories: list[np.ndarray], options: Any) -> Any:
    """Give the model a head and train it; returns the trainer."""
    torch.manual_seed(options.seed)  # the same head weights in all processes
    model.add_draft_head(ids, tokenizer=tokenizer, transition=options.transition)
    data = InteractionDataset.from_histories(histories, ids.token_sequences(), max_items=options.max_items)
    trainer = DraftHeadTrainer(
        model=model,
        args=TrainingArguments(
            str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.steps // 100,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=not torch.cuda.is_available(),
            seed=options.seed,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        train_backbone=not options.head_only,
    )
    trainer.remove_callback(PrinterCallback)
    result = trainer.train()
    say(
        f"the head was trained for {options.steps} steps on {len(data):,} pairs "
        f"({'alone' if options.head_only else 'with the model'}), "
        f"number of processes: {trainer.args.world_size}, {result.metrics['train_runtime']:.0f} s"
    )
    trainer.save_model()
    return trainer


@torch.no_grad()
def ask(
    model: Any,
    index: ConstraintIndex,
    prompts: list[np.ndarray],
    targets: np.ndarray,
    batch_size: int,
    **settings: Any,
) -> dict[str, float]:
    """Recall of the first items over all prompts, and the time of a call."""
    model.eval()
    hits, seconds = 0, []
    for start in range(0, len(prompts), batch_size):
        pad = model.config.pad_token_id
        input_ids, mask = pad_prompts(prompts[start : start + batch_size], pad_token_id=0 if pad is None else pad)
        if model.config.is_encoder_decoder:  # padded on the right
            order = mask.argsort(dim=1, descending=True, stable=True)
            input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
        batch = {"input_ids": input_ids.to(model.device), "attention_mask": mask.to(model.device)}
        options = {
            "constraint_index": index,
            "num_beams": LIST_LENGTH,
            "num_return_sequences": LIST_LENGTH,
            **settings,
        }
        if not seconds:
            model.generate(**batch, **options)  # the first call is slower
        begin = time.perf_counter()
        sequences = model.generate(**batch, **options).cpu()
        seconds.append(time.perf_counter() - begin)
        found = index.items(sequences[:, 1 if model.config.is_encoder_decoder else input_ids.shape[1] :])
        for row, target in enumerate(targets[start : start + batch_size].tolist()):
            ranked = [item for items in found[row * LIST_LENGTH : (row + 1) * LIST_LENGTH] for item in items]
            hits += target in ranked[:LIST_LENGTH]
    return {f"recall@{LIST_LENGTH}": hits / len(prompts), "milliseconds": 1000 * float(np.median(seconds))}


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train, decode both ways, and print the results; None in all processes but the main one."""
    items, codes = read_items(options.items)
    histories = read_histories(options.interactions, options.columns, items)
    known = [history[:-1] for history in histories if len(history) > 1]
    if not any(len(history) > 1 for history in known):
        raise SystemExit(
            f"{options.interactions}: no user has 3 items, expected some: two to learn from, one held out"
        )
    rng = np.random.default_rng(options.seed)
    users = rng.permutation(len(known))[: options.users]
    targets = np.array([history[-1] for history in histories if len(history) > 1])[users]
    say(f"{len(histories):,} users and {len(items):,} items; {len(users):,} users are asked for")
    model, ids, tokenizer = load_model(options, codes, known)
    tokens = ids.token_sequences()
    index = ConstraintIndex.from_sequences(tokens)  # items are their rows
    prompts = [tokens[known[user][-options.max_items :]].ravel() for user in users]
    is_main = PartialState().is_main_process
    rows = {}
    if is_main:
        rows["beam search by the model"] = ask(model, index, prompts, targets, options.batch_size)
    trainer = train_head(model, ids, tokenizer, known, options)
    if not is_main:
        return None
    rows["draft head"] = ask(trainer.model, index, prompts, targets, options.batch_size, drafting="head")
    print_table(
        ["", f"Recall@{LIST_LENGTH}", f"{options.batch_size} users"],
        [[name, f"{row[f'recall@{LIST_LENGTH}']:.1%}", f"{row['milliseconds']:.1f} ms"] for name, row in rows.items()],
    )
    ConstraintIndex.from_sequences(tokens, item_ids=items).save_pretrained(options.output)
    if not options.fast:
        say(f"saved in {options.output}: AutoModelForGenerativeRetrieval.from_pretrained and ConstraintIndex load it")
    return {"users": len(users), "items": len(items), "parameters": model.num_parameters(), "rows": rows}


def say(text: str) -> None:
    PartialState().print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=Path, help="file with one interaction per row")
    parser.add_argument("--items", type=Path, help="file with the items' semantic IDs")
    parser.add_argument("--columns", nargs="+", default=["user", "item", "time"], help="names of user, item and time")
    parser.add_argument(
        "--model",
        type=Path,
        help="folder of a checkpoint, whose head is replaced if it has one; by default a small model is trained first",
    )
    parser.add_argument("--offset", type=int, default=0, help="first code token of a model without a tokenizer")
    parser.add_argument(
        "--output", type=Path, default=Path("recommender"), help="where the checkpoint goes; --fast keeps nothing"
    )
    parser.add_argument("--head-only", action="store_true", help="of the model, train only the placeholders")
    parser.add_argument("--transition", choices=get_args(Transition), default="rnn")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the head's training")
    parser.add_argument(
        "--base-steps", type=int, default=SETTINGS["num_steps"], help="steps of the model's training, without --model"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the paper has 1e-5 for models of 1 B")
    parser.add_argument("--max-items", type=int, default=10, help="the latest items that form a prompt")
    parser.add_argument("--users", type=int, default=1000, help="users to recommend for")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few steps on made-up interactions")
    options = parser.parse_args(arguments)
    if not 2 <= len(options.columns) <= 3:
        parser.error("--columns takes the names of user and item, and optionally of time")
    if options.model is not None and not options.model.is_dir():
        parser.error(f"--model {options.model} is no folder")
    for name in ("max_items", "steps", "users", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}, expected 1 or more")
    if options.fast:
        vars(options).update(FAST)
    elif options.interactions is None or options.items is None:
        parser.error("--interactions and --items are needed, or --fast")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)  # a second thread hardly helps a small model, and slows it down where a core is busy
    with tempfile.TemporaryDirectory() as folder:
        if options.fast:
            options.interactions, options.items = make_up(Path(folder), np.random.default_rng(options.seed))
            options.output = Path(folder) / "recommender"
        result = compare(options)
    if result is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings = {name: getattr(options, name) for name in ("steps", "head_only", "transition", "seed")}
        print_json_line("train_draft_head", device, {**settings, **result})


if __name__ == "__main__":
    main()
