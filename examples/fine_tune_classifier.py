# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a language model to name the category of a text, and measure it before and after on texts held out.

Input: a table of texts with their labels (CSV, Parquet or JSON lines), and a causal language model with its tokenizer.
The model learns to write the label's tokens, as the index has them, and the end token after the prompt; the prompt's
own tokens do not count. So what is trained is what `classify` scores. Labels may be paths, such as "Billing > Refund":
accuracy and F1 are then by level.

Without `--model` a tiny one is trained from scratch, with a tokenizer of bytes: it shows the steps, not quality.
Without `--table` the texts are made-up tickets.

    pip install "hf-gr[cli,tables]" accelerate
    python examples/fine_tune_classifier.py --table tickets.csv --text body --label category \
        --model me/llm --output out
    python examples/fine_tune_classifier.py --fast  # seconds

The folder it writes has the model, its tokenizer and the index:

    hf-gr classify --model out --index out --input tickets.csv --text body --output ranked.parquet
"""

import argparse
import random
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_gr import ConstraintIndex, classify

PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"  # the default of `classify`
TICKETS = {
    "Billing > Refund": ("I was charged twice, please return my money", "refund the last invoice"),
    "Billing > Invoice": ("the invoice has a wrong address", "please send the invoice of May again"),
    "Account > Password": ("I forgot my password", "the link to reset the password does not work"),
    "Account > Delete": ("please delete my account and all data", "close this account"),
    "Delivery": ("the parcel has not arrived", "where is my parcel"),
}


def made_up_tickets(number: int, seed: int) -> list[tuple[str, str]]:
    """Texts of a few words in a random frame, with their labels."""
    draw = random.Random(seed)
    frames = ("Hello, {}. Thanks!", "{}!", "Hi, {}, it is urgent.", "Order {number}: {}.")
    found: list[tuple[str, str]] = []
    for _ in range(number):
        label = draw.choice(sorted(TICKETS))
        text = draw.choice(frames).format(draw.choice(TICKETS[label]), number=draw.randrange(10_000))
        found.append((text, label))
    return found


def read_pairs(table: Path, text: str, label: str) -> list[tuple[str, str]]:
    """Texts with their labels, from a table."""
    import pandas as pd

    readers: dict[str, Any] = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    frame = readers.get(table.suffix, lambda path: pd.read_json(path, lines=True))(table)
    frame = frame[[text, label]].dropna().astype(str)
    return list(zip(frame[text], frame[label], strict=True))


def tiny_model(seed: int) -> tuple[Any, Any]:
    """A stand-in for a language model: random weights, and a tokenizer of single bytes."""
    alphabet = {letter: number for number, letter in enumerate(["</s>", *pre_tokenizers.ByteLevel.alphabet()])}
    letters = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")


class LabelledTexts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Prompts that end with their label; the loss is on the label's tokens alone.

    Args:
        pairs: texts and labels.
        tokenizer: the model's.
        index: of all labels: what it has for a label is what is learned.
        max_tokens: of a prompt; longer ones lose the end of their text.
    """

    def __init__(
        self, pairs: Sequence[tuple[str, str]], tokenizer: Any, index: ConstraintIndex, max_tokens: int
    ) -> None:
        before, after = PROMPT.split("{text}")
        head = tokenizer(before)["input_ids"]
        tail = tokenizer(after, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id]
        head = head[:-1] if head[-1:] == end else head
        self.rows: list[dict[str, list[int]]] = []
        for text, label in pairs:
            body = tokenizer(text, add_special_tokens=False)["input_ids"][: max_tokens - len(head) - len(tail)]
            prompt, answer = [*head, *body, *tail], [*index.encode([label]), *end]
            self.rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return self.rows[number]


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows with padding on the right, which a causal model never sees."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


def report(name: str, model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], index: ConstraintIndex) -> None:
    """Print accuracy and F1 by level."""
    texts, labels = zip(*pairs, strict=True)
    ranked = classify(model, tokenizer, texts, index, prompt=PROMPT, hierarchy=" > ", batch_size=32)
    for level in ranked.metrics(labels):
        print(
            f"{name}, level {level.level}: accuracy {level.accuracy:.1%}, macro F1 {level.macro_f1:.3f} "
            f"({level.num_texts} texts, {level.num_classes} classes)",
            flush=True,
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="default: made-up tickets")
    parser.add_argument("--text", default="text", help="the column of texts")
    parser.add_argument("--label", default="label", help="the column of labels")
    parser.add_argument("--model", help="a folder or repository; default: a tiny one from scratch")
    parser.add_argument("--output", type=Path, help="folder of the result; default: a temporary one")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the texts to measure on")
    parser.add_argument("--epochs", type=float, default=None, help="default: 3; 12 for the tiny model")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 2e-5; 5e-3 for the tiny model")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    logging.disable_progress_bar()
    if options.table is None:
        pairs = made_up_tickets(400 if options.fast else 2000, options.seed)
    else:
        pairs = read_pairs(options.table, options.text, options.label)
    random.Random(options.seed).shuffle(pairs)
    number = max(int(options.held_out * len(pairs)), 1)
    held_out, rest = pairs[:number], pairs[number:]
    is_tiny = options.model is None
    if is_tiny:
        model, tokenizer = tiny_model(options.seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    index = ConstraintIndex.from_labels(sorted({label for _, label in pairs}), tokenizer)
    report("before", model, tokenizer, held_out, index)
    with tempfile.TemporaryDirectory() as scratch:
        output = options.output or Path(scratch, "classifier")
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                num_train_epochs=options.epochs or (12 if is_tiny else 3),
                per_device_train_batch_size=options.batch_size,
                learning_rate=options.learning_rate or (5e-3 if is_tiny else 2e-5),
                lr_scheduler_type="linear",
                warmup_steps=10,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_steps=10_000,
                seed=options.seed,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=LabelledTexts(rest, tokenizer, index, options.max_tokens),
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        report("after", model, tokenizer, held_out, index)
        for part in (model, tokenizer, index):
            part.save_pretrained(output)
        if options.output is not None:
            place = shlex.quote(str(output))
            print(f"hf-gr classify --model {place} --index {place} --input TEXTS.csv --output ranked.parquet")


if __name__ == "__main__":
    main()
