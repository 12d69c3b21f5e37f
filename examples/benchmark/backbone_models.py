# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recommender that the papers' experiments start from, and what it is compared with. Measures nothing.

All are trained by `hf_gr.training.train_recommender` on the same histories, and the weights with the least validation
loss are kept. Each is trained once; a changed recipe trains again.

- backbone: a Qwen3 over semantic IDs;
- t5: TIGER's encoder-decoder, with as much processor time;
- items: the backbone's architecture over one token per item, as SASRec: what semantic IDs cost or bring.

`tuned` searches settings, equally many trials for each: the recipe, and others drawn from `SPACE`, the same for all; a
trial is a quarter of the training, and the least validation loss wins.
"""

import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from backbone_data import Study
from report import commit
from transformers import T5Config, T5ForConditionalGeneration, TrainerCallback, set_seed

from hf_gr import AutoModelForGenerativeRetrieval, enable
from hf_gr.files.cache import cache_folder
from hf_gr.training import small_recommender, train_recommender

CHECK_ROWS = 1000  # validation rows for the loss that picks the weights
RECIPES: dict[str, dict[str, Any]] = {
    "beauty": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {
            "num_train_epochs": 12,
            "per_device_train_batch_size": 128,
            "learning_rate": 2e-3,
        },
    },
    "movielens": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {
            "num_train_epochs": 12,
            "per_device_train_batch_size": 32,
            "learning_rate": 2e-3,
        },
    },
}
# One token per item: the vocabulary is the catalogue, so that the model is as large with half the width.
ITEMS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32}
FAST_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
T5_TRAINING = {"per_device_train_batch_size": 128, "learning_rate": 3e-3}
SPACE: dict[str, Sequence[Any]] = {
    "learning_rate": (5e-4, 1e-3, 2e-3, 4e-3),
    "weight_decay": (0.01, 0.1, 0.5),
    "hidden_size": (64, 128),
    "num_layers": (1, 2, 3),
}
TRIAL = 0.25  # of a training
NOTE = "recipe.json"
FAST: dict[str, Any] = {
    "max_items": 8,
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"max_steps": 30, "eval_steps": 15},
}


def recipe_of(study: Study, *, fast: bool = False) -> dict[str, Any]:
    """How a study's backbone is built and trained."""
    return FAST if fast else RECIPES[study.name.partition("-")[0]]


def max_items(study: Study, fast: bool = False) -> int:
    """The most items of a backbone's prompt."""
    return recipe_of(study, fast=fast)["max_items"]


def tuned(make: Callable[..., Path], trials: int) -> tuple[Path, dict[str, Any]]:
    """The folder of a model with the best of some settings, and these.

    Args:
        make: from settings and the share of a training to the folder of a model, such as `backbone_folder` of a study.
        trials: the recipe's own settings are one; with 1 nothing is searched.
    """
    draw = random.Random(0)
    drawn = [{}, *({name: draw.choice(values) for name, values in SPACE.items()} for _ in range(trials - 1))]
    losses = [min(facts(make(settings, TRIAL))["valid_losses"].values()) for settings in drawn] if trials > 1 else [0]
    best = drawn[losses.index(min(losses))]
    return make(best, 1.0), best


def changed(recipe: dict[str, Any], settings: dict[str, Any], share: float) -> dict[str, Any]:
    """A recipe with some of `SPACE` in its place, and a share of its epochs."""
    training = dict(recipe["training"])
    if share < 1 and "num_train_epochs" in training:
        training["num_train_epochs"] = share * training["num_train_epochs"]
    training |= {name: settings[name] for name in ("learning_rate", "weight_decay") if name in settings}
    model = dict(recipe["model"])
    if settings:
        names = ("d_model", "num_layers") if "d_model" in model else ("hidden_size", "num_hidden_layers")
        model |= dict(zip(names, (settings["hidden_size"], settings["num_layers"]), strict=True))
        model |= {"d_ff": 2 * settings["hidden_size"]} if "d_model" in model else {}
    return {**recipe, "model": model, "training": training}


def backbone_folder(
    study: Study,
    work: Path | None = None,
    fast: bool = False,
    settings: dict[str, Any] | None = None,
    share: float = 1.0,
) -> Path:
    """The folder of the trained backbone, with its catalogue; trained if it is not there.

    Args:
        study: the data.
        work: the folder of all experiments' models, by default `~/.cache/hf_gr/experiments`.
        fast: a tiny model, hardly trained.
        settings: of `SPACE`, in the place of the recipe's.
        share: of the training.
    """
    recipe = changed(recipe_of(study, fast=fast), settings or {}, share)
    return trained_once(f"backbone-{study.name}", study, recipe, work, lambda folder: train(study, recipe, folder))


def items_folder(
    study: Study, work: Path | None, fast: bool, settings: dict[str, Any] | None = None, share: float = 1.0
) -> Path:
    """The folder of the model with one token per item, with its own catalogue."""
    recipe = changed(FAST if fast else {**recipe_of(study), "model": ITEMS}, settings or {}, share)
    tokens = np.arange(len(study.ids))[:, None]
    return trained_once(
        f"items-{study.name}", study, recipe, work, lambda folder: train(study, recipe, folder, items=tokens)
    )


def t5_folder(
    study: Study,
    work: Path | None,
    fast: bool,
    settings: dict[str, Any] | None = None,
    share: float = 1.0,
    backbone: Path | None = None,
) -> Path:
    """The folder of TIGER's T5, trained with as much processor time as a backbone, by default that of the recipe."""
    budget = share * facts(backbone or backbone_folder(study, work, fast))["cpu_seconds"]
    sizes = {"model": FAST_T5 if fast else T5, "training": T5_TRAINING}
    how = {"max_items": recipe_of(study, fast=fast)["max_items"], "cpu_seconds": budget, **sizes}
    how = changed(how, settings or {}, share)

    def make(folder: Path) -> dict[str, Any]:
        steps = 1 if fast else round(budget / _seconds_of_a_step(study, how))
        return train(study, how, folder, model=new_t5(study, how["model"]), max_steps=max(30, steps))

    return trained_once(f"t5-{study.name}", study, how, work, make)


def make_once(folder: Path, make: Callable[[Path], Any]) -> Path:
    """Make a folder unless it is complete; one that an earlier run left half-made is made again."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)
    return folder


def show_progress(text: str) -> None:
    """To stderr: results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def facts(folder: Path) -> dict[str, Any]:
    """Recipe, parameters, steps, processor time and validation losses of a trained model."""
    return json.loads((folder / NOTE).read_text(encoding="utf-8"))


def load(folder: Path) -> Any:
    """The model, whose `generate` is ours."""
    return AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch").eval()


def train(
    study: Study, recipe: dict[str, Any], folder: Path, *, model: Any = None, items: Any = None, **further: Any
) -> dict[str, Any]:
    """Train a model on a study's histories and save it with its catalogue.

    Args:
        study: the data.
        recipe: sizes and arguments of `train_recommender`.
        folder: to save to.
        model: by default a new small recommender.
        items: by default the study's semantic IDs.
        further: more arguments of `train_recommender`.

    Returns:
        Parameters, steps, processor time, and validation losses by step.
    """
    items = study.ids if items is None else items
    if model is None:
        model = small_recommender(items, max_items=recipe["max_items"], **recipe["model"])
    watch = Watch()
    start = time.process_time()
    train_recommender(
        study.train,
        items,
        model=model,
        max_items=recipe["max_items"],
        validation=[[*row.history, row.item] for row in check_rows(study)],
        output_dir=folder,
        callbacks=[watch],
        **recipe["training"],
        **further,
    )
    return {
        "parameters": model.num_parameters(),
        "steps": watch.steps,
        "cpu_seconds": time.process_time() - start,
        "valid_losses": watch.losses,
    }


def new_t5(study: Study, size: dict[str, Any]) -> Any:
    """A T5 with random weights over the tokens of the items; padding is one more, as in the backbone."""
    set_seed(0)
    pad = study.ids.vocab_size
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": None}
    return enable(T5ForConditionalGeneration(T5Config(vocab_size=pad + 1, dropout_rate=0.1, **size, **special)))


def _seconds_of_a_step(study: Study, recipe: dict[str, Any], steps: int = 80) -> float:
    """Processor time of a step, with a tenth for validation: of a short training that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        made = train(
            study, recipe, Path(folder), model=new_t5(study, recipe["model"]), max_steps=steps, eval_steps=steps
        )
    return made["cpu_seconds"] / steps


def trained_once(
    name: str, study: Study, recipe: dict[str, Any], work: Path | None, make: Callable[[Path], dict[str, Any]]
) -> Path:
    """A folder with a trained model and the facts about it; another recipe or catalogue has another folder."""
    wanted = {"recipe": recipe, "catalogue": hashlib.sha256(study.tokens.tobytes()).hexdigest()[:16]}
    key = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:8]

    def make_and_note(folder: Path) -> None:
        measured = make(folder)
        (folder / NOTE).write_text(json.dumps({**wanted, **measured, "commit": commit()}), encoding="utf-8")

    return make_once((work or cache_folder("experiments")) / f"{name}-{key}", make_and_note)


def check_rows(study: Study) -> list[Any]:
    """Some of the validation rows, always the same; none of a user who is held out."""
    rows = [row for row in study.valid if row.user not in study.held]
    return [rows[number] for number in np.random.default_rng(0).permutation(len(rows))[:CHECK_ROWS]]


class Watch(TrainerCallback):
    """Keeps validation losses."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.losses[state.global_step] = metrics["eval_loss"]
