# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recommender that all experiments with the papers' methods start from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from backbone_data import Study

from hf_gr import AutoModelForGenerativeRetrieval
from hf_gr.files.atomic import replaced_folder
from hf_gr.files.cache import cache_folder
from hf_gr.training import small_recommender, train_recommender

RECIPES: dict[str, dict[str, Any]] = {
    "beauty": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {"max_seconds": 240, "learning_rate": 2e-3, "max_steps": 4000},
    },
    "movielens": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {"max_seconds": 240, "learning_rate": 2e-3, "max_steps": 4000},
    },
}
FAST = {
    "max_items": 8,
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"max_steps": 30},
}


def max_items(study: Study, fast: bool = False) -> int:
    """The most items of a backbone's prompt."""
    return (FAST if fast else RECIPES[study.name])["max_items"]


def backbone_folder(study: Study, work: Path | None = None, fast: bool = False, early: bool = False) -> Path:
    """The folder of the trained backbone, with its catalogue; trained if it is not there.

    Args:
        study: the data.
        work: the folder of all experiments' models, by default `~/.cache/hf_gr/experiments`.
        fast: a tiny model, hardly trained.
        early: the weights after a tenth of the training, which invent items where the catalogue is not given.
    """
    recipe = FAST if fast else RECIPES[study.name]
    name = f"backbone-{study.name}{'-fast' if fast else ''}"
    folder = (work or cache_folder("experiments")) / name
    note = folder / "recipe.json"
    if not note.is_file() or json.loads(note.read_text(encoding="utf-8")) != recipe:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replaced_folder(folder) as unfinished:
            train(study, recipe, unfinished)
            (unfinished / note.name).write_text(json.dumps(recipe), encoding="utf-8")
    return folder / "early" if early else folder


def train(study: Study, recipe: dict[str, Any], folder: Path) -> None:
    """Train a backbone and save it."""
    how, limits = recipe["model"], dict(recipe["training"])
    model = small_recommender(study.ids, max_items=recipe["max_items"], **how)
    seconds = limits.pop("max_seconds", None)
    for part, share in ((folder / "early", 0.1), (folder, 1.0)):
        model = small_recommender(study.ids, max_items=recipe["max_items"], **how)
        train_recommender(
            study.train,
            study.ids,
            model=model,
            max_items=recipe["max_items"],
            output_dir=part,
            max_seconds=None if seconds is None else seconds * share,
            **limits,
        )


def load(folder: Path) -> Any:
    """The model, whose `generate` is ours."""
    return AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="torch").eval()
