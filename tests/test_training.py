# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Teacher data, packed forwards and the trainer, against plain forwards of the models and the losses' twins."""

import doctest
import importlib
import pickle
import pkgutil
from itertools import islice
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import reference
import torch
from torch.utils.data import Subset
from transformers import TrainingArguments

import hf_gr
from hf_gr import ConstraintIndex
from hf_gr.training import AtSpeedTrainer, TeacherDataset, packing, score_paths, write_teacher_data
from hf_gr.training.packing import pad_prompts
from hf_gr.training.paths import training_catalogue, walk
from hf_gr.training.teacher_dataset import TeacherCollator

CPU = torch.device("cpu")
LOGIT_TOL = 2e-4  # fp32; logits of these models reach 50
HALF_TOL = 2e-2  # fp16 holds log-probabilities of up to 32 to within 1/64
LOSS_TOL = 2e-2  # of means of such log-probabilities
K = 4

# Some sequences end early, prefixes are shared, and one root child has a single sequence.
RAGGED = [[3, 10], [3, 10, 20], [3, 11, 21], [4, 12], [4, 10, 22], [4, 10, 23], [5, 13, 24], [3, 12], [6]]


def fixed_catalogue(seed: int = 0) -> ConstraintIndex:
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.integers(3, 9, 40), rng.integers(10, 20, 40), rng.integers(20, 30, 40)], axis=1)
    return ConstraintIndex.from_sequences(np.unique(rows, axis=0))


def ragged_catalogue() -> ConstraintIndex:
    return ConstraintIndex.from_sequences(RAGGED, eos_token_id=families.EOS)


def make_prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, families.VOCABULARY, rng.integers(1, 9)).tolist() for _ in range(number)]


def make_labels(index: ConstraintIndex, number: int, seed: int = 0) -> list[list[int]]:
    known = list(index)
    return [known[at] for at in np.random.default_rng(seed).integers(0, len(known), number)]


def target_model(family: str = "qwen3") -> Any:
    return hf_gr.enable(families.build(family))


def draft_model(seed: int = 1, family: str = "qwen3") -> Any:
    return families.build(family, seed=seed, config={"num_hidden_layers": 1, "n_layer": 1})


def write(
    directory: Path, index: ConstraintIndex, *, number: int = 20, model: Any = None, **options: Any
) -> TeacherDataset:
    given = {"num_beams": K, "labels": make_labels(index, number), "batch_size": 4}
    given |= {"shard_size": 8} | options
    write_teacher_data(model or target_model(), make_prompts(number), index, directory, **given)
    return TeacherDataset(directory)


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    given = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    given |= {"per_device_train_batch_size": 5, "learning_rate": 3e-3, "logging_strategy": "no"}
    return TrainingArguments(str(directory / "out"), **(given | options))


def trainer(
    directory: Path, data: Any, index: ConstraintIndex, *, model: Any = None, **options: Any
) -> AtSpeedTrainer:
    ours = {name: options.pop(name) for name in ("loss", "alpha", "eval_dataset") if name in options}
    return AtSpeedTrainer(
        model=model or draft_model(),
        args=arguments(directory, **options),
        train_dataset=data,
        constraint_index=index,
        **ours,
    )


@torch.no_grad()
def plain_log_probs(model: Any, prompt: Any, sequence: Any) -> np.ndarray:
    """`[len(sequence), V]` log-probabilities of one prompt and one sequence, alone and without padding."""
    tokens = torch.tensor([[*map(int, prompt), *map(int, sequence)]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).numpy()


@pytest.mark.parametrize("family", [*families.DECODERS, *families.ALIBI])
def test_packed_logits_equal_plain_forwards(family: str) -> None:
    model = families.shared(family)
    prompts = make_prompts(5, seed=3)
    input_ids, mask = pad_prompts(prompts, pad_token_id=families.PAD)
    paths = torch.randint(3, families.VOCABULARY, (5, 3, 4), generator=torch.Generator().manual_seed(0))
    paths[1, 2, 2:] = paths[3, 1] = -1
    with torch.no_grad():
        scores = score_paths(model, input_ids, mask, paths)
    assert scores.first.isfinite().all()
    assert scores.rest.isfinite().all()
    for row, prompt in enumerate(prompts):
        for number, path in enumerate(paths[row].tolist()):
            path = [token for token in path if token >= 0]
            if path:
                found = torch.cat([scores.first[row], scores.rest[row, number]])[: len(path)]
                expected = plain_log_probs(model, prompt, path)
                assert np.abs(found.double().log_softmax(-1).numpy() - expected).max() < LOGIT_TOL


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_gradients_equal_those_of_rows(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("qwen3", attn_implementation=implementation)
    input_ids, mask = pad_prompts(make_prompts(4), pad_token_id=families.PAD)
    paths = torch.randint(3, families.VOCABULARY, (4, 3, 3), generator=torch.Generator().manual_seed(0))
    gradients = []
    for is_packed in (True, False):
        monkeypatch.setattr(packing, "takes_tree", lambda model, is_packed=is_packed: is_packed)
        model.zero_grad()
        scores = score_paths(model, input_ids, mask, paths).log_softmax()
        scores.of_tokens(paths).mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert gradients[0].isfinite().all()
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * gradients[1].abs().max()  # fp32


def updated_catalogue() -> ConstraintIndex:
    index = fixed_catalogue()
    index.add([[3, 30, 31], [9, 30, 32]], [1000, 1001])
    index.remove([0, 1, 2])
    return index


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> TeacherDataset:
    return write(tmp_path_factory.mktemp("fixed"), fixed_catalogue())


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> TeacherDataset:
    return write(tmp_path_factory.mktemp("ragged"), ragged_catalogue(), number=6)


@pytest.mark.parametrize(
    ("family", "make_index", "num_beams"),
    [
        *((family, fixed_catalogue, K) for family in ("qwen3", "mistral", "bloom")),
        *(("qwen3", ragged_catalogue, num_beams) for num_beams in (1, 3, 16)),
        ("gpt2", updated_catalogue, K),
    ],
)
def test_teacher_data_is_the_search_and_plain_forwards(
    family: str, make_index: Any, num_beams: int, tmp_path: Path
) -> None:
    """Every prompt's own search, and log-probabilities of all legal tokens; drafts and samples are off."""
    number, index, model = 6, make_index(), target_model(family)
    asked = target_model(family).train()
    asked.generation_config.update(drafting="trie", do_sample=True)
    data = write(tmp_path, index, model=asked, number=number, num_beams=num_beams)
    assert asked.training
    assert len(data) == number
    for entry, prompt in zip(data, make_prompts(number), strict=True):  # pyright: ignore[reportArgumentType]
        assert entry["input_ids"].tolist() == prompt
        how: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams}
        out = model.generate(torch.tensor([prompt]), constraint_index=index, do_sample=False, **how)
        found = [[token for token in row if token >= 0] for row in entry["sequences"].tolist()]
        whole = [row for row in found if row]
        assert len(whole) == min(num_beams, len(index))
        assert all(row in index for row in whole)
        assert whole == [row[: len(ours)] for row, ours in zip(out[:, len(prompt) :].tolist(), whole, strict=False)]
        walked = walk(torch.tensor(entry["sequences"]).long()[None], training_catalogue(index, CPU))
        values = np.split(entry["log_probs"], np.cumsum(entry["level_sizes"])[:-1])
        dense = [level.restore(torch.tensor(flat).float()) for level, flat in zip(walked, values, strict=True)]
        for place, row in enumerate(whole):
            plain = plain_log_probs(model, prompt, row)
            assert entry["scores"][place] == pytest.approx(plain[range(len(row)), row].sum(), abs=1e-3)
            for at, log_probs in enumerate(plain):
                legal = walked[at].below.legal[0, place if at else 0]
                tokens = walked[at].below.tokens[0, place if at else 0][legal].tolist()
                assert sorted(tokens) == index.allowed_next_tokens(row[:at])
                assert np.abs(dense[at][0, place if at else 0][legal].numpy() - log_probs[tokens]).max() < HALF_TOL
        assert (entry["scores"][len(whole) :] == -np.inf).all()
        assert index.eos_token_id in (None, entry["label"][-1])
    rebuilt = ConstraintIndex.from_sequences(list(index), eos_token_id=index.eos_token_id)
    trainer(tmp_path, data, rebuilt)  # the same catalogue, built otherwise


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    index, model = fixed_catalogue(), target_model()
    whole = write(tmp_path / "whole", index, model=model)
    prompts, labels = make_prompts(20), make_labels(index, 20)
    options = {"num_beams": K, "batch_size": 4, "shard_size": 8}

    def broken() -> Any:
        yield from prompts[:11]
        raise RuntimeError("the power went")

    part = tmp_path / "part"
    with pytest.raises(RuntimeError, match="power"):
        write_teacher_data(model, broken(), index, part, labels=labels, **options)
    assert [path.name for path in sorted(part.glob("*.parquet"))] == ["teacher-00000.parquet"]
    with pytest.raises(ValueError, match=r"1 shards and no teacher_data.json"):
        TeacherDataset(part)
    written = sorted(part.glob("*.parquet"))[0].stat().st_mtime_ns
    calls: list[int] = []
    generate = model.generate
    model.generate = lambda **kwargs: calls.append(len(kwargs["input_ids"])) or generate(**kwargs)
    write_teacher_data(model, iter(prompts), index, part, labels=labels, **options)
    assert sum(calls) == 12
    assert sorted(part.glob("*.parquet"))[0].stat().st_mtime_ns == written
    resumed = TeacherDataset(part)
    for one, other in zip(whole, resumed, strict=True):  # pyright: ignore
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
    calls.clear()
    write_teacher_data(model, prompts, index, part, labels=labels, **options)
    assert not calls
    write_teacher_data(model, make_prompts(22), index, part, labels=make_labels(index, 22), **options)
    assert sum(calls) == 6  # the last shard, which was not full
    assert len(TeacherDataset(part)) == 22


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_beams": 3}, "num_beams=4, expected 3"),
        ({"labels": make_labels(fixed_catalogue(), 20, seed=1)}, "other prompts or labels"),
        ({"number": 16}, "3 shards, expected 2"),
        ({"model": hf_gr.enable(families.build("qwen3", seed=9))}, "model="),
        ({"index": fixed_catalogue(1)}, "index="),
    ],
)
def test_data_of_other_settings_is_refused(fixed: TeacherDataset, how: dict[str, Any], message: str) -> None:
    given = {"index": fixed_catalogue(), "labels": make_labels(fixed_catalogue(), how.get("number", 20))} | how
    with pytest.raises(ValueError, match=message):
        write(fixed.directory, given.pop("index"), **given)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompts": [[]]}, r"prompts\[0\] has shape \[0\]"),
        ({"prompts": [[3], [99]]}, r"prompts\[1\] has tokens from 99 to 99, expected 0 to 63"),
        ({"prompts": [[0.5]]}, "integers"),
        ({"prompts": []}, "prompts is empty"),
        ({"labels": []}, "labels has 0 entries, expected 1"),
        ({"prompts": iter([[3], [4]]), "labels": [[3]]}, "differ in number, from 1 on"),
        ({"prompts": iter([[3]]), "labels": [[3], [4]]}, "differ in number, from 1 on"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"model": families.build("qwen3")}, "GRGenerationMixin"),
        ({"model": target_model("t5")}, "expected a decoder"),
        (
            {"index": ConstraintIndex.from_sequences([[99]])},
            "index has token 99, expected less than the vocabulary, 64",
        ),
    ],
)
def test_arguments_are_checked_at_the_door(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"model": target_model(), "prompts": [[3]], "index": fixed_catalogue(), "num_beams": K} | how
    with pytest.raises(ValueError, match=message):
        write_teacher_data(directory=tmp_path, **given)


def test_a_dataset_is_mapped_pickled_and_made_anew(tmp_path: Path) -> None:
    index, model = fixed_catalogue(), target_model()
    data = write(tmp_path, index, model=model)
    entry = data[9]["log_probs"]
    assert not entry.flags.owndata
    assert not entry.flags.writeable
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again[-1]["sequences"], data[19]["sequences"])
    assert data.lengths.tolist() == [len(prompt) for prompt in make_prompts(20)]
    assert data.max_token_id == max(map(max, [*make_prompts(20), *make_labels(index, 20)]))
    with pytest.raises(IndexError):
        data[20]
    write(tmp_path, index, model=model, number=21)
    assert len(list((tmp_path / "arrow").glob("*.arrow"))) == 3
    (tmp_path / "teacher-00002.parquet").unlink()
    with pytest.raises(ValueError, match="2 shards, expected 3"):
        TeacherDataset(tmp_path)
    with pytest.raises(ValueError, match="no teacher data"):
        TeacherDataset(tmp_path / "nowhere")


def test_batches_hold_what_was_asked_for(ragged: TeacherDataset) -> None:
    rows = list(islice(ragged, 5))  # pyright: ignore
    batch = TeacherCollator(7)(rows)
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["input_ids"][0, -len(rows[0]["input_ids"]) :].tolist() == rows[0]["input_ids"].tolist()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 7).all()
    sizes = np.sum([row["level_sizes"] for row in rows], axis=0)
    assert [len(level) for level in batch["log_probs"]] == sizes.tolist()
    assert ((batch["labels"] >= 0).sum(-1)).tolist() == [len(row["label"]) for row in rows]


@pytest.mark.parametrize(
    ("loss", "family", "options"),
    [
        *((loss, "qwen3", {}) for loss in ("atspeed-s", "atspeed-r", "beamkd", "sft", "seqkd")),
        ("beamkd", "bloom", {}),
        ("beamkd", "qwen3", {"alpha": 0.3}),
        ("seqkd", "bloom", {"alpha": 0.3}),
        ("seqkd", "qwen3", {"alpha": 1.0}),
    ],
)
def test_the_trainers_loss_is_the_twins(
    loss: str, family: str, options: dict[str, Any], ragged: TeacherDataset, tmp_path: Path
) -> None:
    index, draft, entries = ragged_catalogue(), draft_model(family=family), list(ragged)  # pyright: ignore
    made = trainer(tmp_path, ragged, index, model=draft, loss=loss, **options)

    def along(model: Any, rows: Any) -> Any:
        return [
            [plain_log_probs(model, entry["input_ids"], row) for row in of_prompt]
            for entry, of_prompt in zip(entries, rows, strict=True)
        ]

    labels = [[entry["label"].tolist()] for entry in entries]
    sequences = [[row[row >= 0].tolist() for row in entry["sequences"] if row[0] >= 0] for entry in entries]
    drafted, of_labels = along(draft, sequences), along(draft, labels)
    alpha = options.get("alpha", {"beamkd": 1.0, "sft": 0.0}.get(loss, 0.5))
    expected = (1 - alpha) * reference.reference_seqkd(of_labels, labels)
    if loss == "seqkd" and not options:  # the label is one more sequence
        pairs = ((drafted, of_labels), (sequences, labels))
        both = [[[*rows, *label] for rows, label in zip(*pair, strict=True)] for pair in pairs]
        expected = reference.reference_seqkd(*both)
    elif loss == "seqkd":
        expected += alpha * reference.reference_seqkd(drafted, sequences)
    elif loss != "sft":
        legal = [[[index.allowed_next_tokens(row[:t]) for t in range(len(row))] for row in rows] for rows in sequences]
        align = getattr(reference, f"reference_align_{'f' if loss == 'beamkd' else loss[-1]}")
        how = {} if loss == "beamkd" else {"num_tokens": K}
        expected += alpha * align(drafted, along(target_model(), sequences), legal, sequences, **how)
    found = made.compute_loss(draft, made.data_collator(entries)).item()
    assert abs(found - expected) < LOSS_TOL * max(1, abs(expected))


def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(fixed: TeacherDataset, tmp_path: Path) -> None:
    index = fixed_catalogue()
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"train_sampling_strategy": "group_by_length"}
    whole = trainer(tmp_path, fixed, index, **options)
    whole.train()
    resumed = trainer(tmp_path, fixed, index, model=draft_model(seed=5), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):  # pyright: ignore
        assert torch.equal(one, other)


def test_training_lowers_the_loss_of_data_without_labels(tmp_path: Path) -> None:
    """Which a pure alignment does not need."""
    index = fixed_catalogue()
    data = write(tmp_path, index, labels=None)
    with pytest.raises(ValueError, match="no labels.*alpha=1"):
        trainer(tmp_path, data, index, loss="atspeed-s")
    options: dict[str, Any] = {"max_steps": 20, "train_sampling_strategy": "group_by_length"}
    made = trainer(tmp_path, Subset(data, range(19)), index, eval_dataset=data, **options)
    before = made.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] < 0.9 * before


def test_mixed_precision_trains_and_users_arguments_stay_as_they_are(fixed: TeacherDataset, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, bf16=True)
    made = AtSpeedTrainer(model=draft_model(), args=args, train_dataset=fixed, constraint_index=fixed_catalogue())
    assert np.isfinite(made.train().training_loss)
    assert args.remove_unused_columns
    assert made.num_tokens == K


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"loss": "kl"}, "loss='kl', expected one of 'atspeed-r'"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"loss": "sft", "alpha": 0.5}, "alpha=0.5 with loss='sft', which ignores it"),
        ({"index": fixed_catalogue(1)}, "constraint_index is not the catalogue of train_dataset"),
        ({"data": [1, 2]}, "train_dataset is a list, expected a dataset of type TeacherDataset"),
        ({"vocab_size": 25}, "constraint_index has token .*vocabulary, 25"),
        ({"vocab_size": 40}, "train_dataset has token .*vocabulary, 40"),
        ({"model": families.shared("t5")}, "expected a decoder"),
    ],
)
def test_the_trainer_checks_at_the_door(
    how: dict[str, Any], message: str, fixed: TeacherDataset, tmp_path: Path
) -> None:
    given = {"data": fixed, "index": fixed_catalogue()} | how
    if "vocab_size" in how:
        given["model"] = families.build("qwen3", config={"vocab_size": given.pop("vocab_size")})
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **given)


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(hf_gr.training.__path__)])
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"hf_gr.training.{name}")).failed == 0


def test_a_catalogue_first_used_by_inference_serves_training() -> None:
    """What is kept on the device is no tensor of inference."""
    index = ConstraintIndex.from_sequences([[3, 4], [5, 6], [9, 6]])
    with torch.inference_mode():
        training_catalogue(index, torch.device("cpu"))
    catalogue = training_catalogue(index, torch.device("cpu"))
    level = next(iter(walk(torch.tensor([[[3, 4], [9, 6]]]), catalogue)))
    weights = torch.randn(*level.below.legal.shape[:2], 12, requires_grad=True)
    level.gather(weights.log_softmax(-1)).masked_fill(~level.below.legal, 0).sum().backward()
    assert weights.grad is not None
