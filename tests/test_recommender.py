# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From a table of purchases to a recommender: histories, semantic IDs, windows, training, what is saved."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import train_as_rank
from transformers import T5Config, T5ForConditionalGeneration, TrainerCallback

import hf_gr
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, SemanticIds
from hf_gr.training import (
    item_codes,
    read_histories,
    semantic_ids_from_features,
    semantic_ids_from_histories,
    small_recommender,
    train_recommender,
)
from hf_gr.training.item_codes import residual_kmeans
from hf_gr.training.windows import HistoryWindows, LastItems, pad_batch

ROWS = [("b", "007", "2026-01-03"), ("a", "7", "2026-01-02"), ("a", "8", "2026-01-01"), ("b", "9", "2026-01-01")]
NAMES = [f"item-{number}" for number in range(12)]
IDS = SemanticIds([[number // 4, number % 4] for number in range(12)], item_ids=NAMES, offset=3)
# Each item is followed by the next: learnable in a few steps.
CHAINS = [[NAMES[(start + step) % 12] for step in range(6)] for start in range(12)]
QUICK: dict[str, Any] = {"max_items": 3, "max_steps": 60, "per_device_train_batch_size": 16, "use_cpu": True}


def tables_of(rows: list[tuple[Any, ...]], folder: Path) -> list[Any]:
    """In memory, where cells have types, and as CSV, where all is text; other kinds: tests/test_tables.py."""
    names = ("user", "item", "time")
    (folder / "rows.csv").write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    return [{name: [row[at] for row in rows] for at, name in enumerate(names)}, folder / "rows.csv"]


def test_histories_are_in_the_order_of_time_or_of_rows(tmp_path: Path) -> None:
    for table in tables_of(ROWS, tmp_path):
        assert read_histories(table, time="time") == {"b": ["9", "007"], "a": ["8", "7"]}
        assert read_histories(table) == {"b": ["007", "9"], "a": ["7", "8"]}


def test_ids_are_of_the_kind_of_the_catalogue(tmp_path: Path) -> None:
    for table in tables_of([("a", 1, 2), ("a", 0, 1), ("b", 1, 1)], tmp_path):
        assert list(read_histories(table, time="time").values()) == [[0, 1], [1]]
        assert list(read_histories(table, items=SemanticIds([[0], [1]])).values()) == [[1, 0], [1]]
        texts = SemanticIds([[0], [1]], item_ids=["0", "1"])
        assert list(read_histories(table, items=texts).values()) == [["1", "0"], ["1"]]
        known = SemanticIds([[0]])
        assert list(read_histories(table, items=known, unknown_items="drop").values()) == [[0]]
        with pytest.raises(ValueError, match="2 of 3 rows have items without a semantic ID"):
            read_histories(table, items=known)


@pytest.mark.parametrize(
    ("table", "how", "message"),
    [
        ({"user": [1], "item": [2]}, {"item": "what"}, "has no column 'what', expected .*: name it with item="),
        ({"user": [1], "item": [None]}, {}, "column 'item', row 0 is None, expected a value"),
        ({"user": [], "item": []}, {}, "has no row"),
        (
            {"user": [1] * 2, "item": [2] * 2, "t": ["2026-01-01", "noon"]},
            {"time": "t"},
            "is 'noon' in row 1, expected num",
        ),
        ([[1, 2]], {}, r"interactions is \[\[1, 2\]\], expected files, or a table"),
        ({"user": [1], "item": [2]}, {"unknown_items": "skip"}, "expected 'refuse' or 'drop'"),
    ],
)
def test_tables_that_cannot_be_read(table: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_histories(table, **how)


def test_equal_features_differ_in_the_last_code_only() -> None:
    codes, _ = residual_kmeans(np.array([[0.0], [0.0], [5.0], [0.0]]), num_levels=2, num_codes=2)
    assert sorted(codes[[0, 1, 3], 2].tolist()) == [0, 1, 2]
    assert len(set(codes[[0, 1, 3], 0].tolist())) == 1


def test_items_that_are_bought_together_have_ids_that_begin_alike() -> None:
    groups = [[f"{group}{number}" for number in range(8)] for group in "ab"]
    draw = np.random.default_rng(0)
    shopping = [draw.permutation(groups[user % 2]).tolist() for user in range(40)]
    ids = semantic_ids_from_histories(shopping, num_levels=1, num_codes=2, offset=3)
    assert sorted(ids.item_ids) == sorted(groups[0] + groups[1])
    first = [{ids.codes_of(item)[0] for item in group} for group in groups]
    assert [len(codes) for codes in first] == [1, 1]
    assert first[0] != first[1]


def test_histories_are_lists_of_numpy_integers_too() -> None:
    ids = SemanticIds([[0, 1], [1, 0], [2, 0]], item_ids=[7, 8, 9])
    assert HistoryWindows([[*np.array([7, 9])]], ids, window=2, seed=0)[0]["input_ids"].tolist() == [0, 4, 2, 3]


def test_windows_are_pieces_of_the_history_and_others_in_every_epoch() -> None:
    tokens = np.arange(20).reshape(10, 2)
    windows = HistoryWindows([np.arange(10), np.arange(3)], tokens, window=4, seed=0)
    assert len(windows) == 4
    assert windows.lengths.tolist() == [8, 8, 8, 6]
    pieces = []
    for epoch in range(100):
        windows.set_epoch(epoch)
        pieces.append(windows[0]["input_ids"].reshape(-1, 2)[:, 0] // 2)
        assert windows[0]["input_ids"].tolist() == windows[0]["input_ids"].tolist()
    assert {len(piece) for piece in pieces} == {4}
    assert {int(piece[0]) for piece in pieces} == set(range(7))
    assert windows[3]["input_ids"].tolist() == [0, 1, 2, 3, 4, 5]


def test_validation_asks_for_last_items_only_and_padding_is_neither_seen_nor_predicted() -> None:
    asked = LastItems([[0, 1, 2], [1], [2, 0]], [[1, 2], [3, 4], [5, 6]], window=2)
    batch = pad_batch([asked[0], {"input_ids": np.array([1])}], pad_token_id=4)  # also where padding is a real token
    assert len(asked) == 2
    assert asked.lengths.tolist() == [4, 4]
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6], [1, 4, 4, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 5, 6], [1, -100, -100, -100]]


class Watch(TrainerCallback):
    """Losses of validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def next_items(model: Any, **how: Any) -> list[list[list[Any]]]:
    prompts = torch.tensor([IDS.encode(chain[:3]) for chain in CHAINS])
    out = model.generate(prompts, num_beams=2, **how)
    return ConstraintIndex.items(IDS.constraint_index(), out[:, prompts.shape[1] :])


def test_a_recommender_learns_and_its_folder_is_all_that_is_needed(tmp_path: Path) -> None:
    model = train_recommender(CHAINS, IDS, output_dir=tmp_path / "made", **QUICK)
    assert not model.training
    found = next_items(model)  # the generation config names the catalogue
    assert sum(items == [chain[3]] for items, chain in zip(found, CHAINS, strict=True)) >= 10
    loaded = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "made")
    assert next_items(loaded) == found
    assert not list((tmp_path / "made").glob("*.bin"))  # nothing pickled
    users = tmp_path / "users.jsonl"
    users.write_text('{"bought": ["item-1", "item-2"]}\n')
    made = hf_gr.recommend(tmp_path / "made", users, tmp_path / "recs.parquet", history="bought", top_k=3)
    assert made.num_rows == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_an_adapter_is_trained_and_merged(tmp_path: Path) -> None:
    model = small_recommender(IDS, max_items=3, hidden_size=8)
    frozen = model.model.embed_tokens.weight.clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    trained = train_recommender(CHAINS, IDS, model=adapted, output_dir=tmp_path / "made", **QUICK | {"max_steps": 2})
    assert torch.equal(trained.model.embed_tokens.weight, frozen)
    assert next_items(AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "made")) == next_items(trained)
    model = small_recommender(IDS, max_items=3, hidden_size=8)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="model has an adapter that cannot be merged"):
        train_recommender(CHAINS, IDS, model=model, **QUICK)


def test_training_goes_on_from_a_model_and_from_a_checkpoint_as_if_never_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = QUICK | {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = train_recommender(CHAINS, IDS, output_dir=tmp_path / "run", **how)
    again = train_recommender(
        CHAINS, IDS, output_dir=tmp_path / "run", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"), **how
    )
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    (tmp_path / "run" / "checkpoint-6" / "trainer_state.json").unlink()  # as a kill during the save leaves it
    resumed = train_recommender(CHAINS, IDS, output_dir=tmp_path / "run", resume_from_checkpoint=True, **how)
    assert "checkpoint-6 is of an interrupted save" in caplog.text
    assert torch.equal(resumed.lm_head.weight, again.lm_head.weight)
    with pytest.raises(ValueError, match="has a finished recommender, expected none: pass overwrite=True"):
        train_recommender(CHAINS, IDS, output_dir=tmp_path / "run", **how)
    assert SemanticIds.from_pretrained(tmp_path / "run").item_ids == NAMES
    more = train_recommender(CHAINS, IDS, model=whole, **QUICK | {"max_steps": 1})
    assert more is whole


def test_epochs_take_the_place_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr(HistoryWindows, "set_epoch", lambda self, epoch: begun.append(epoch))
    how = {name: value for name, value in QUICK.items() if name != "max_steps"}
    train_recommender(
        CHAINS, IDS, num_train_epochs=2, validation=CHAINS, callbacks=[watch := Watch()], eval_steps=1, **how
    )
    assert len(watch.losses) == 4  # 24 windows in batches of 16, twice
    assert begun[-1] >= 1


def test_the_weights_of_the_least_validation_loss_are_returned() -> None:
    # What is asked for contradicts what is trained on: the more is learned, the worse.
    how: dict[str, Any] = QUICK | {"max_steps": 40, "eval_steps": 5, "learning_rate": 0.02}
    backwards = [chain[::-1] for chain in CHAINS]
    model = train_recommender(CHAINS, IDS, validation=backwards, patience=2, callbacks=[watch := Watch()], **how)
    losses = watch.losses
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 8  # two more, and no further
    found = pad_batch(list(LastItems(backwards, IDS, window=4)), pad_token_id=model.config.pad_token_id)
    with torch.no_grad():
        assert model(**found).loss.item() == pytest.approx(losses[best], abs=1e-5)
    assert losses[-1] > losses[best] + 0.01


def test_an_encoder_decoder_learns_to_write_what_follows_a_part_of_a_history() -> None:
    size = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 4, "num_layers": 1, "dropout_rate": 0.0}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=IDS.vocab_size, **size, **special))
    how: dict[str, Any] = QUICK | {"max_steps": 80, "learning_rate": 0.02, "warmup_steps": 10, "eval_steps": 0.25}
    train_recommender(CHAINS, IDS, model=model, validation=CHAINS, **how)
    prompts = torch.tensor([IDS.encode(chain[:3]) for chain in CHAINS])
    out = model.generate(prompts, constraint_index=IDS.constraint_index(), num_beams=2)
    found = IDS.constraint_index().items(out[:, 1:])
    assert sum(items == [chain[3]] for items, chain in zip(found, CHAINS, strict=True)) >= 10


def test_windows_of_an_encoder_decoder_are_cut_at_every_place() -> None:
    windows = HistoryWindows([np.arange(8), np.arange(1)], np.arange(8)[:, None], window=8, seed=0, splits=True)
    assert len(windows) == 1  # a single item has nothing before it
    cuts = set()
    for epoch in range(100):
        windows.set_epoch(epoch)
        row = windows[0]
        seen, came = row["input_ids"].tolist(), row["labels"].tolist()
        assert seen + came == list(range(len(seen + came)))
        assert len(came) == min(5, 8 - len(seen))
        cuts.add(len(seen))
    assert cuts == set(range(1, 8))


@pytest.mark.parametrize(
    ("often", "num_losses"),
    [({"eval_steps": 5}, 2), ({"eval_strategy": "epoch", "per_device_train_batch_size": 12}, 4)],
)
def test_the_last_weights_are_validated_too(often: dict[str, Any], num_losses: int) -> None:
    train_recommender(CHAINS, IDS, validation=CHAINS, callbacks=[watch := Watch()], **QUICK | {"max_steps": 7} | often)
    assert len(watch.losses) == num_losses


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_items": 0}, "max_items=0"),
        ({"patience": 0, "validation": CHAINS}, "patience=0"),
        ({"patience": 2.5, "validation": CHAINS}, "patience=2.5"),
        ({"patience": 3}, "patience=3 without validation="),
        ({"validation": [["item-0"]]}, "validation has no history of two items"),
        ({"validation": [["item-0", "soap"]]}, "validation.0. has item 'soap'"),
        ({"max_step": 3}, "max_step=3, expected an argument of train_recommender"),
        ({"histories": []}, "histories is empty"),
        ({"histories": [[], []]}, "histories has no item"),
        ({"histories": [["item-0", "soap"]]}, "histories.0. has item 'soap', which has no semantic ID"),
        ({"items": IDS.constraint_index()}, "items is a ConstraintIndex"),
        ({"items": SemanticIds([[0, 1], [0, 1, 2]], item_ids=NAMES[:2]), "histories": [NAMES[:2]]}, "row 0 has fewer"),
        ({"histories": ["item-0", "item-1"]}, r"histories\[0\] is 'item-0', expected a list of items"),
        ({"histories": {"ann": ["item-0", float("nan")]}}, r"histories\[0\] has item nan, expected texts or integers"),
        (
            {
                "model": T5ForConditionalGeneration(
                    T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
                )
            },
            "decoder_start_token_id is None",
        ),
        ({"fp16": True, "use_cpu": True}, "fp16=True without a GPU, expected bf16=True"),
        ({"resume_from_checkpoint": True, "output_dir": "none-here"}, "none-here has no whole checkpoint, expected"),
        ({"model": small_recommender(SemanticIds([[0, 1]]), hidden_size=8)}, "model has embeddings of 4 tokens"),
        ({"model": small_recommender(IDS, max_items=1, hidden_size=8), "max_items": 9}, "max_items=9 needs 20 posi"),
    ],
)
def test_bad_arguments_of_training_are_refused_before_any_work(how: dict[str, Any], message: str) -> None:
    given = {"histories": CHAINS, "items": IDS, "max_steps": 1} | how
    with pytest.raises(ValueError, match=message):
        train_recommender(given.pop("histories"), given.pop("items"), **given)


def test_bad_arguments_of_what_comes_before_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for call, message in (
        (lambda: semantic_ids_from_features([1.0, 2.0]), r"features has shape \[2\]"),
        (lambda: semantic_ids_from_features([[1.0]], num_codes=0), "num_codes=0"),
        (lambda: semantic_ids_from_histories([["a"], ["a"]]), "histories has 1 items"),
        (
            lambda: semantic_ids_from_histories({"ann": ["a", "b", None]}),
            r"histories\[0\] has item None, expected tex",
        ),
        (lambda: small_recommender(IDS, hidden_size=10), "hidden_size=10, expected a multiple of num_attention_head"),
        (lambda: small_recommender(IDS, num_hidden_layers=0), "num_hidden_layers=0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert small_recommender(IDS.token_sequences(), hidden_size=8).config.vocab_size == IDS.vocab_size + 1
    monkeypatch.setattr(item_codes, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hf-gr\[demo\]"):
        semantic_ids_from_features([[1.0]])


def train_in_two(folder: Path, way: str, trainer: str) -> tuple[list[dict[str, Any]], str]:
    """What each of two processes tells (`train_as_rank.py`), and what they write to stderr."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    program = [str(Path(__file__).with_name("train_as_rank.py")), way, trainer, str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([*launch, *program], capture_output=True, text=True, check=False, timeout=300, env=env)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"is_fsdp"')], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "ways"),
    [("recommender", ["ddp", "fsdp"]), ("atspeed", ["ddp", "fsdp"]), ("head", ["ddp"]), ("head alone", ["ddp"])],
)
def test_two_processes_train_the_model_of_one_whole_or_in_pieces(
    trainer: str, ways: list[str], tmp_path: Path
) -> None:
    """Two processes with half a batch each, with copies (DDP) and with pieces (FSDP2): the model of one process."""
    alone = train_as_rank.train("alone", trainer, tmp_path / "alone")
    load = AutoModelForGenerativeRetrieval.from_pretrained
    expected = load(tmp_path / "alone").state_dict()
    for way in ways:
        told, problems = train_in_two(tmp_path / way, way, trainer)
        assert [one["is_fsdp"] for one in told] == [way == "fsdp"] * 2, problems[-3000:]
        assert all(one["loss"] == pytest.approx(alone["loss"], abs=1e-4) for one in told)
        found = load(tmp_path / way).state_dict()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_fsdp_that_would_be_left_out_in_silence_is_refused(tmp_path: Path) -> None:
    said, problems = train_in_two(tmp_path, "fsdp-as-it-is", "recommender")
    assert said == []
    assert "in 2 processes on cpu, expected none: Accelerate shards models over accelerators only" in problems
