# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Train a draft head on interactions, and compare its hits with those of beam search. NEZHA, algorithm 3.

Input:

- interactions, one per row, with the columns `user`, `item` and optionally `time`, by which a user's rows are sorted
  (without it they must be in order): CSV, TSV, Parquet or JSON lines;
- semantic IDs, if there are any: a table with the item in its first column and one column of codes per level after
  it, or a JSON file of any recipe that `SemanticIds.from_json` reads, all of the same number of levels. Without them,
  IDs are made from which items users had one after the other (`hf_gr.training.semantic_ids_from_histories`).

The last item of every user is held out. The model is a checkpoint that knows the codes' tokens or, without `--model`,
a small Qwen3 that is first trained on the same histories. Beam search by the model runs before the head's training,
which also trains the model unless it is `--head-only`: so the hits do not compare the two ways of decoding.
`examples/benchmark/nezha.py` does. The catalogue is saved beside the model, under the items' own ids.

    pip install "hf-gr[demo]"
    python examples/train_draft_head.py --interactions ratings.csv --output recommender
    python examples/train_draft_head.py --interactions ratings.csv --items semantic_ids.tsv --output recommender
    accelerate launch --num_processes 4 examples/train_draft_head.py --interactions ...   # the same on four GPUs
    python -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_draft_head.py ...  # or on CPUs
    python examples/train_draft_head.py --fast  # seconds, on made-up interactions: the method, not its quality
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoTokenizer, PrinterCallback, TrainingArguments
from transformers.utils import logging

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds
from hf_gr.files.draft_head_config import Transition
from hf_gr.training import (
    DraftHeadTrainer,
    InteractionDataset,
    read_histories,
    semantic_ids_from_histories,
    small_recommender,
    train_recommender,
)
from hf_gr.training.packing import pad_prompts

LIST_LENGTH = 10
COLUMNS = ["user", "item", "time"]
FAST_SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAST = {"steps": 150, "base_steps": 150, "users": 100, "max_items": 6}


def read_items(path: Path) -> SemanticIds:
    """Items and their codes."""
    if path.suffix.lower() == ".json":
        return SemanticIds.from_json(path, offset=0)  # the codes alone; --offset and --tokenizer follow
    from pyarrow import csv, parquet, string

    if path.suffix.lower() in (".parquet", ".pq"):
        table = parquet.read_table(path)
    else:
        parse = csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        first = csv.read_csv(path, parse_options=parse).column_names[0]
        as_text = csv.ConvertOptions(column_types={first: string()})  # ids keep their spelling
        table = csv.read_csv(path, parse_options=parse, convert_options=as_text)
    item, *levels = table.column_names
    codes = np.stack([table.column(level).to_numpy() for level in levels], axis=1) if levels else np.zeros((0, 0))
    if codes.dtype.kind not in "iu" or (codes < 0).any():
        raise SystemExit(f"{path}: expected each item followed by its codes, integers from 0, equally many for all")
    return SemanticIds(codes, item_ids=[str(name) for name in table.column(item).to_pylist()])


def read_data(options: argparse.Namespace) -> tuple[SemanticIds, list[list[Any]]]:
    """Semantic IDs, and what every user with two items or more had, oldest first."""
    ids = None if options.items is None else read_items(options.items)
    names = dict(zip(("user", "item", "time"), options.columns, strict=False))
    try:
        histories = read_histories(options.interactions, items=ids, unknown_items=options.unknown_items, **names)
    except ValueError as error:
        if options.columns == COLUMNS and "no column 'time'" in str(error):
            say("no column 'time': rows are taken to be in order")
            options.columns = COLUMNS[:2]
        elif "without a semantic ID" in str(error):
            say(f"{error}: they are omitted")
            options.unknown_items = "drop"
        else:
            raise SystemExit(f"{error} (--columns USER ITEM TIME)") from error
        return read_data(options)
    rows = [history for history in histories.values() if len(history) > 1]
    if not any(len(history) > 2 for history in rows):
        raise SystemExit(
            f"{options.interactions}: no user has 3 items, expected some: two to learn from, one held out"
        )
    if ids is None:
        ids = semantic_ids_from_histories([history[:-1] for history in rows], num_codes=options.num_codes)
        known = set(ids.item_ids)
        say(f"semantic IDs from who bought what after what: {len(ids):,} items, codes by level {ids.level_sizes}")
        rows = [[item for item in history if item in known] for history in rows]
        rows = [history for history in rows if len(history) > 1]
    return ids, rows


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


def load_model(options: argparse.Namespace, ids: SemanticIds, histories: list[list[Any]]) -> tuple[Any, Any, Any]:
    """The model, the semantic IDs as its tokens, and its tokenizer if it has one."""
    if options.model is not None:
        model = AutoModelForGenerativeRetrieval.from_pretrained(options.model)
        if not (options.model / "tokenizer_config.json").is_file():
            return model, SemanticIds(ids.codes, item_ids=ids.item_ids, offset=options.offset), None
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        return model, SemanticIds.from_tokenizer(ids.codes, tokenizer, item_ids=ids.item_ids), tokenizer
    ids = SemanticIds(ids.codes, item_ids=ids.item_ids, offset=options.offset)
    size = FAST_SIZE if options.fast else {}
    model = small_recommender(ids, max_items=options.max_items, seed=options.seed, **size)
    start = time.perf_counter()
    model = train_recommender(
        histories,
        ids,
        model=model,
        max_items=options.max_items,
        max_steps=options.base_steps,
        learning_rate=3e-3,
        seed=options.seed,
    )
    seconds = time.perf_counter() - start
    say(f"the model has {model.num_parameters() / 1e6:.2f} M parameters, and was trained for {seconds:.0f} s")
    return model, ids, None


def train_head(model: Any, ids: SemanticIds, tokenizer: Any, histories: list[list[Any]], options: Any) -> Any:
    """Give the model a head and train it; returns the trainer."""
    torch.manual_seed(options.seed)  # the same head weights in all processes
    model.add_draft_head(ids, tokenizer=tokenizer, transition=options.transition)
    data = InteractionDataset.from_histories(histories, ids, max_items=options.max_items)
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
            use_cpu=not torch.accelerator.is_available(),
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
    targets: list[Any],
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
        for row, target in enumerate(targets[start : start + batch_size]):
            ranked = [item for items in found[row * LIST_LENGTH : (row + 1) * LIST_LENGTH] for item in items]
            hits += target in ranked[:LIST_LENGTH]
    return {f"recall@{LIST_LENGTH}": hits / len(prompts), "milliseconds": 1000 * float(np.median(seconds))}


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Train, decode both ways, and print the results; None in all processes but the main one."""
    ids, histories = read_data(options)
    rng = np.random.default_rng(options.seed)
    asked = [histories[user] for user in rng.permutation(len(histories))[: options.users]]
    say(f"{len(histories):,} users and {len(ids):,} items; {len(asked):,} users are asked for")
    known = [history[:-1] for history in histories]
    model, ids, tokenizer = load_model(options, ids, known)
    index = ids.constraint_index()
    prompts = [ids.encode(history[:-1][-options.max_items :]) for history in asked]
    targets = [history[-1] for history in asked]
    is_main = PartialState().is_main_process
    rows = {}
    if is_main:
        rows["beam search by the model"] = ask(model, index, prompts, targets, options.batch_size)
    trainer = train_head(model, ids, tokenizer, known, options)
    if not is_main:
        return None
    rows["draft head"] = ask(trainer.model, index, prompts, targets, options.batch_size, drafting="head")
    print(f"{'':24}  Recall@{LIST_LENGTH}  {options.batch_size} users")
    for name, row in rows.items():
        print(f"{name:24}  {row[f'recall@{LIST_LENGTH}']:9.1%}  {row['milliseconds']:6.1f} ms")
    trained = trainer.model
    trained.generation_config.constraint_index = "."  # the checkpoint names its catalogue: itself
    trained.generation_config.drafting = "head"
    trained.generation_config.save_pretrained(options.output)
    index.save_pretrained(options.output)
    if not options.fast:
        say(f"saved in {options.output}: hf-gr serve {options.output} answers by the head")
    return {"users": len(asked), "items": len(ids), "parameters": model.num_parameters(), "rows": rows}


def say(text: str) -> None:
    PartialState().print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interactions", type=Path, help="file with one interaction per row")
    parser.add_argument(
        "--items", type=Path, help="file with the items' semantic IDs; by default they are made from the interactions"
    )
    parser.add_argument("--num-codes", type=int, default=64, help="codes per level of IDs that are made")
    parser.add_argument("--columns", nargs="+", default=COLUMNS, help="names of user, item and time")
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
    parser.add_argument("--base-steps", type=int, default=1200, help="steps of the model's training, without --model")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the paper has 1e-5 for models of 1 B")
    parser.add_argument("--max-items", type=int, default=10, help="the latest items that form a prompt")
    parser.add_argument("--users", type=int, default=1000, help="users to recommend for")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="few steps on made-up interactions")
    parser.set_defaults(unknown_items="refuse")  # until the first one is met, and told of
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
    elif options.interactions is None:
        parser.error("--interactions is needed, or --fast")
    elif options.model is not None and options.items is None:
        parser.error("--model needs --items: the semantic IDs that it was trained with")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.disable_progress_bar()
    PartialState(cpu=not torch.accelerator.is_available())  # else several processes on CPUs would not find each other
    torch.set_num_threads(1)  # a second thread hardly helps a small model, and slows it down where a core is busy
    with tempfile.TemporaryDirectory() as folder:
        if options.fast:
            options.interactions, options.items = make_up(Path(folder), np.random.default_rng(options.seed))
            options.output = Path(folder) / "recommender"
        result = compare(options)
    if result is not None:
        settings = {name: getattr(options, name) for name in ("steps", "head_only", "transition", "seed")}
        print(json.dumps({**settings, **result}))


if __name__ == "__main__":
    main()
