# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and a catalogue of another code book: refused by all that bring the two together."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from typer.testing import CliRunner

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds, evaluate, recommend
from hf_gr.commands.app import build_app
from hf_gr.generation import messages
from hf_gr.serving.catalogues import LiveCatalogue
from hf_gr.serving.engine import Engine
from hf_gr.serving.update_log import UpdateLog
from hf_gr.training import (
    AtSpeedTrainer,
    DraftHeadTrainer,
    InteractionDataset,
    TeacherDataset,
    small_recommender,
    train_recommender,
    write_teacher_data,
)

NAMES = [f"item-{number:02}" for number in range(40)]
CODES = [[number // 7, number % 7] for number in range(40)]
IDS = SemanticIds(CODES, item_ids=NAMES, level_sizes=(6, 7))
# Of the same shape and items, as codes that are made again.
OTHERS = SemanticIds([[5 - first, second] for first, second in CODES], item_ids=NAMES, level_sizes=(6, 7))
INDEX, OTHER = IDS.constraint_index(), OTHERS.constraint_index()
HISTORY = NAMES[:3]
ARGS: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}


def model_that_learned(ids: SemanticIds) -> Any:
    model = small_recommender(ids, hidden_size=8)
    model.generation_config.code_book = ids.code_book()
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained recommender and its catalogue; an index of another code book; a log of updates that begins with it."""
    made = tmp_path_factory.mktemp("recommender")
    how = {"model": small_recommender(IDS, hidden_size=8), "max_steps": 1, "use_cpu": True, "progress": False}
    train_recommender([HISTORY], IDS, output_dir=made / "model", **how)
    OTHER.save_pretrained(made / "other")
    LiveCatalogue(OTHER, log=UpdateLog(made / "log"))
    return made


def generate(model: Any, index: ConstraintIndex, **how: Any) -> Any:
    return model.generate(torch.tensor([IDS.encode(HISTORY)]), constraint_index=index, num_beams=2, **how)


def train_head(model: Any, ids: SemanticIds, folder: Path) -> None:
    data = InteractionDataset.from_histories([ids.item_ids[:3]], ids, max_items=2)
    DraftHeadTrainer(model=model, args=TrainingArguments(str(folder), **ARGS), train_dataset=data)


def train_draft(draft: Any, folder: Path) -> Any:
    data = write_teacher_data(model_that_learned(IDS), [[1]], INDEX, folder / "data", num_beams=2)
    args = TrainingArguments(str(folder), **ARGS)
    AtSpeedTrainer(model=draft, args=args, train_dataset=TeacherDataset(data), constraint_index=INDEX)
    return draft


def with_head(model: Any, ids: SemanticIds) -> Any:
    model.add_draft_head(small_recommender(ids, hidden_size=8).add_draft_head(ids, use_placeholders=False))
    return model


REFUSING: dict[str, Callable[[Any, Path], Any]] = {
    "generate": lambda model, folder: generate(model, OTHER),
    "a draft model": lambda model, folder: generate(model, INDEX, assistant_model=model_that_learned(OTHERS)),
    "a draft head": lambda model, folder: generate(with_head(model, OTHERS), INDEX, drafting="head"),
    "a new head": lambda model, folder: model.add_draft_head(OTHERS),
    "recommend": lambda model, folder: recommend(model, [HISTORY], constraint_index=OTHER),
    "evaluate": lambda model, folder: evaluate(model, [HISTORY], constraint_index=OTHER, history="history"),
    "Engine": lambda model, folder: Engine(model, constraint_index=OTHER),
    "Engine, swap": lambda model, folder: Engine(model, constraint_index=INDEX).catalogue.swap(OTHER),
    "train_recommender": lambda model, folder: train_recommender([HISTORY], OTHERS, model=model),
    "DraftHeadTrainer": lambda model, folder: train_head(with_head(model, IDS), OTHERS, folder),
    "DraftHeadTrainer, the head": lambda model, folder: train_head(with_head(model, OTHERS), IDS, folder),
    "AtSpeedTrainer": lambda model, folder: train_draft(model_that_learned(OTHERS), folder),
}


@pytest.mark.parametrize("refusing", REFUSING)
def test_another_code_book_is_refused(refusing: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"item 'item-00' has tokens .* of 32 compared items differ\).* another code"):
        REFUSING[refusing](model_that_learned(IDS), tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "index check {0}/other --model {0}/model",
        "serve {0}/model --port 0 --index {0}/other",
        "serve {0}/model --port 0 --updates {0}/log",
    ],
)
def test_commands_refuse_another_code_book(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_gr.serving.logs.configure", lambda **_: None)  # its handlers would outlive the test
    result = CliRunner().invoke(build_app(), command.format(folder).split())
    assert result.exit_code == 2
    assert "another code book" in " ".join(result.stderr.split())


def test_the_same_code_book_with_other_items_is_fine(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForGenerativeRetrieval.from_pretrained(folder / "model")
    assert model.generation_config.code_book == IDS.code_book() == INDEX.code_book()
    assert (
        CliRunner().invoke(build_app(), ["index", "check", f"{folder}/model", "--model", f"{folder}/model"]).exit_code
        == 0
    )
    index = IDS.constraint_index()
    index.add([[5, 12]], ["new"])
    index.remove(NAMES[20:])
    rebuilt = SemanticIds(CODES[10:], item_ids=NAMES[10:], level_sizes=(6, 7))
    for one in (index, index.where(NAMES[:3]), rebuilt.constraint_index()):
        generate(model, one)
        index.compact()
    train_head(with_head(model, IDS), rebuilt, folder / "head")
    assert not caplog.text
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.save_pretrained(folder / "copy")
    assert len(ConstraintIndex.from_pretrained(folder / "copy")) == len(INDEX)  # the catalogue comes along
    draft = train_draft(plain, folder / "draft")  # a plain model learns which tokens mean what, too
    draft.save_pretrained(folder / "draft")
    again = AutoModelForGenerativeRetrieval.from_pretrained(folder / "draft")
    with pytest.raises(ValueError, match=r"assistant_model learned 0 6 .* another code book"):
        generate(model_that_learned(OTHERS), OTHER, assistant_model=again)


def test_what_cannot_be_told_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SAID", set[str]())
    replaced = SemanticIds([[5, 6], *CODES[1:]], item_ids=NAMES, level_sizes=(6, 7)).constraint_index()
    unknown = ConstraintIndex.from_sequences([[1, 7]], item_ids=["new"])
    model = small_recommender(IDS, hidden_size=8).eval()
    for index, message in (
        (INDEX, "the model has no code book, .* set model.generation_config.code_book = index.code_book"),
        (unknown, "constraint_index has none of the 32 items of the code book of the model"),
        (replaced, r"item 'item-00' has tokens 5 12 .*, and the model learned 0 6 \(1 of 32 compared items differ\)"),
    ):
        caplog.clear()
        generate(model, index)
        generate(model, index)
        assert len(caplog.messages) == 1
        assert re.search(message, caplog.text)
        model.generation_config.code_book = IDS.code_book()
