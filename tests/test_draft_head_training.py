# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Training of draft heads: the loss against a literal twin, who learns and how fast, resuming, several processes."""

from __future__ import annotations

import doctest
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from transformers import TrainingArguments

import hf_gr
from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.generation.torch.heads import save_draft_head
from hf_gr.torch.draft_head import DraftHead, DraftHeadConfig
from hf_gr.training import DraftHeadCollator, DraftHeadTrainer, InteractionDataset, interactions
from hf_gr.training import draft_head_trainer as trainer_module

ROOT = Path(__file__).resolve().parents[1]
LOSS_TOL = 1e-5  # fp32, means of a few dozen terms
STEP_TOL = 1e-5  # fp32: two processes add up gradients in another order
CODEBOOKS = [[3, 4, 5, 6], [10, 11, 12], [20, 21, 22, 23, 24]]


def model_of(family: str = "qwen3", seed: int = 0, *, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """A tiny model with an untrained head."""
    model = hf_gr.enable(families.build(family, seed=seed, config={"num_hidden_layers": 1} | (config or {})))
    model.add_draft_head(options.pop("codebooks", CODEBOOKS), **options)
    return model


def make_data(number: int = 24, *, seed: int = 0, ragged: bool = False) -> InteractionDataset:
    """Random prompts, whose labels follow from their last token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 60, rng.integers(1, 9)).tolist() for _ in range(number)]
    labels = [[codes[prompt[-1] % len(codes)] for codes in CODEBOOKS] for prompt in prompts]
    if ragged:
        labels = [label[: 1 + row % 3] for row, label in enumerate(labels)]
    return InteractionDataset(prompts, labels)


def trainer(directory: Path, model: Any, data: Any = None, **options: Any) -> DraftHeadTrainer:
    ours = ("train_backbone", "embedding_lr", "transition_lr", "logit_lr", "eval_dataset")
    given = {name: options.pop(name) for name in ours if name in options}
    arguments = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    arguments |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_strategy": "no"}
    return DraftHeadTrainer(
        model=model,
        args=TrainingArguments(str(directory / "out"), **(arguments | options)),
        train_dataset=make_data() if data is None else data,
        **given,
    )


# The dataset


def test_every_item_with_others_before_it_is_an_entry() -> None:
    tokens = [[3, 10], [4, 11, 20], [5, -1, -1], [6, 12]]
    tokens = [row + [-1] * (3 - len(row)) for row in tokens]
    histories = [[0, 1, 2], [], [3], [2, 3, 0, 1]]
    data = InteractionDataset.from_histories(histories, tokens, max_items=2, prefix_tokens=[50], eos_token_id=2)
    expected = []
    for history in histories:
        for place in range(1, len(history)):
            prompt = [token for item in history[max(0, place - 2) : place] for token in tokens[item] if token >= 0]
            expected.append(([50, *prompt], [token for token in tokens[history[place]] if token >= 0] + [2]))
    found = [tuple(values.tolist() for values in data[number].values()) for number in range(len(data))]
    assert found == expected
    assert data.lengths.tolist() == [len(prompt) for prompt, _ in expected]
    assert data.max_token_id == 50
    assert len(InteractionDataset.from_histories(histories, tokens, max_items=3, min_items=2)) == 3
    assert [*data[-1]["input_ids"]] == expected[-1][0]
    assert [*pickle.loads(pickle.dumps(data))[0]["labels"]] == expected[0][1]
    with pytest.raises(IndexError):
        data[len(data)]
    first = InteractionDataset.from_histories(histories, tokens, max_items=2, min_items=0, prefix_tokens=[50])
    assert first[0]["input_ids"].tolist() == [50]


def test_histories_are_of_the_items_ids() -> None:
    ids = SemanticIds([[0, 1], [2, 0]], item_ids=["ham", "jam"], offset=3)
    data = InteractionDataset.from_histories([["jam", "ham"]], ids, max_items=5)
    assert {name: values.tolist() for name, values in data[0].items()} == {"input_ids": [5, 6], "labels": [3, 7]}
    numbers = SemanticIds([[0, 1], [2, 0]], item_ids=[17, 23])
    assert len(InteractionDataset.from_histories([np.array([17, 23, 17])], numbers, max_items=5)) == 2
    for history in (["jam", "yam"], ["jam", ["ham"]]):
        with pytest.raises(ValueError, match=r"histories\[1\] has item .*no semantic ID"):
            InteractionDataset.from_histories([["ham", "jam"], history], ids, max_items=5)


def test_prompts_are_not_copied() -> None:
    history = np.arange(2000) % 100
    data = InteractionDataset.from_histories([history], np.arange(100)[:, None], max_items=2000)
    assert len(data) == 1999
    assert len(pickle.dumps(data)) < 100_000  # all prompts are 2 million tokens


def test_bad_data_is_named() -> None:
    items = [[3, 10], [4, 11]]
    for build, message in [
        (lambda: InteractionDataset([], []), "prompts is empty"),
        (lambda: InteractionDataset([[3], []], [[3], [3]]), r"prompts\[1\] is empty"),
        (lambda: InteractionDataset([[3]], [[3], [4]]), "prompts has 1 entries and labels 2"),
        (lambda: InteractionDataset([[3], [0.5]], [[3], [4]]), r"prompts\[1\] has shape \[1\] and dtype float64"),
        (lambda: InteractionDataset([[3], [4, -1]], [[3], [4]]), r"prompts\[1\] has a token below 0"),
        (lambda: InteractionDataset([[3]], [["a"]]), "labels: .*expected an integer"),
        (lambda: InteractionDataset([[3], [3]], [[3, 4], [-1, 4]]), r"labels\[1\] is \[-1, 4\]"),
        (
            lambda: InteractionDataset.from_histories([[0, 1], [0, 2]], items, max_items=3),
            r"histories\[1\] has item 2",
        ),
        (lambda: InteractionDataset.from_histories([[0], [1]], items, max_items=3), "no history of 2 items or more"),
        (lambda: InteractionDataset.from_histories([[0, 1]], items, max_items=1, min_items=2), "min_items=2, exp"),
        (lambda: InteractionDataset.from_histories([[0, 1]], items, max_items=0), "max_items=0, expected 1 or more"),
        (
            lambda: InteractionDataset.from_histories([[0, 1]], ConstraintIndex.from_sequences(items), max_items=1),
            "items is a ConstraintIndex, expected SemanticIds",
        ),
        (lambda: InteractionDataset.from_histories([[0, 1]], items, max_items=1, min_items=0), "prefix_tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()


# The loss


def slow_loss(model: Any, data: InteractionDataset) -> float:
    """Equation 6 as a mean: one prompt at a time, one level at a time, codes found by searching."""
    head, losses = model.draft_head, []
    weights = {name: values.detach().double() for name, values in head.state_dict().items()}
    for entry in (data[number] for number in range(len(data))):
        placeholders = list(head.config.placeholder_token_ids)
        prompt = torch.tensor([entry["input_ids"].tolist()])
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                start = model.generation_config.decoder_start_token_id
                out = model(
                    input_ids=prompt,
                    decoder_input_ids=torch.tensor([[start, *placeholders]]),
                    output_hidden_states=True,
                )
                hidden = out.decoder_hidden_states[-1][0]
            else:
                tokens = torch.cat([prompt, torch.tensor([placeholders], dtype=torch.long)], dim=1)
                hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0]
        hidden = hidden[len(hidden) - len(placeholders) - 1 :].double()
        state = hidden[0]
        for level, token in enumerate(entry["labels"].tolist()):
            logits = weights[f"logit_heads.{level}.weight"] @ (hidden[level + 1] + state)
            code = CODEBOOKS[level].index(token)
            losses.append(float(-logits.log_softmax(-1)[code]))
            if level < 2:
                cell = {
                    name.rpartition(".")[2]: values
                    for name, values in weights.items()
                    if f"transitions.{level}" in name
                }
                embedded = weights[f"embeddings.{level}.weight"][code]
                state = cell["weight_ih"] @ embedded + cell["bias_ih"] + cell["weight_hh"] @ state + cell["bias_hh"]
                state = state.tanh()
    return float(np.mean(losses))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "bloom", "t5", "bart"])
def test_the_loss_is_the_twins(family: str, ragged: bool, tmp_path: Path) -> None:
    model, data = model_of(family), make_data(6, ragged=ragged)
    made = trainer(tmp_path, model, data)
    loss = made.compute_loss(model, made.data_collator([data[number] for number in range(6)])).item()
    expected = slow_loss(model, data)
    assert abs(loss - expected) < LOSS_TOL * max(1, expected)


def test_a_planted_error_in_the_batch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactions, "positions_of", lambda mask: torch.arange(mask.shape[1]).flip(0).expand_as(mask))
    with pytest.raises(AssertionError):
        test_the_loss_is_the_twins("qwen3", False, tmp_path)


def test_eval_loss_is_the_same_loss(tmp_path: Path) -> None:
    data = make_data(8)
    made = trainer(tmp_path, model_of(), data, eval_dataset={"a": data}, per_device_eval_batch_size=4)
    assert abs(made.evaluate()["eval_a_loss"] - slow_loss(made.model, data)) < 10 * LOSS_TOL


# Who learns, and how fast


def groups_of(made: DraftHeadTrainer) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by name, of all that the optimizer has."""
    names = {id(parameter): name for name, parameter in made.model.named_parameters()}  # pyright: ignore
    return {
        names[id(parameter)]: (group["initial_lr"], group["weight_decay"])
        for group in made.optimizer.param_groups  # pyright: ignore
        for parameter in group["params"]
    }


def test_learning_rates_are_multiples(tmp_path: Path) -> None:
    model = model_of(config={"tie_word_embeddings": False})
    made = trainer(tmp_path, model, max_steps=1, weight_decay=0.1, logit_lr=2.0)
    made.train()
    found = groups_of(made)
    assert set(found) == {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    for name, (rate, decay) in found.items():
        factor = {"logit_heads": 2, "embeddings": 100, "transitions": 10}.get(
            name.split(".")[1] if name.startswith("draft_head") else "", 1
        )
        assert rate == pytest.approx(1e-3 * factor), name
        assert decay == (0 if "bias" in name or "norm" in name else 0.1), name


def test_an_optimizer_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.draft_head.parameters(), lr=0.1)
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    made = DraftHeadTrainer(model=model, args=args, train_dataset=make_data(), optimizers=(optimizer, None))
    made.train()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_a_head_alone_leaves_the_model_as_it_is(family: str, tied: bool, tmp_path: Path) -> None:
    model = model_of(family, config={"tie_word_embeddings": tied})
    model.lm_head.weight.requires_grad_(False)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    trainer(tmp_path, model, train_backbone=False, max_steps=3, weight_decay=0.1).train()
    rows = list(model.draft_head.config.placeholder_token_ids)
    embedding = model.get_input_embeddings().weight
    for name, values in model.state_dict().items():
        is_embedding = values.data_ptr() == embedding.data_ptr()
        if name.startswith("draft_head") and "codebook" not in name:
            assert not torch.equal(values, before[name]), name
        elif is_embedding:
            others = torch.ones(len(values), dtype=torch.bool)
            others[rows] = False
            assert torch.equal(values[others], before[name][others]), name
            assert (values[rows] != before[name][rows]).any(dim=-1).all(), name
        else:
            assert torch.equal(values, before[name]), name
    assert asked == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert not embedding._backward_hooks


def test_without_the_mask_other_rows_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_rows_of", lambda gradient, rows: gradient)
    with pytest.raises(AssertionError):
        test_a_head_alone_leaves_the_model_as_it_is("qwen3", True, tmp_path)


def test_a_head_without_placeholders_trains_alone(tmp_path: Path) -> None:
    model = model_of(use_placeholders=False)
    before = {name: values.clone() for name, values in model.model.state_dict().items()}
    trainer(tmp_path, model, train_backbone=False, max_steps=2).train()
    assert all(torch.equal(values, before[name]) for name, values in model.model.state_dict().items())


def test_after_the_head_alone_the_model_can_be_trained_too(tmp_path: Path) -> None:
    model = model_of()
    trainer(tmp_path, model, train_backbone=False, max_steps=1).train()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    trainer(tmp_path, model, max_steps=1).train()
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)


# Training


OPTIONS = [
    {},
    {"transition": "add"},
    {"use_placeholders": False},
    {"transition": "none", "use_state": False},
    {"transition": "none", "use_placeholders": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_lowers_the_loss(options: dict[str, Any], tmp_path: Path) -> None:
    made = trainer(
        tmp_path, model_of(**options), Subset(make_data(), range(20)), eval_dataset=make_data(), max_steps=40,
        train_sampling_strategy="group_by_length", embedding_lr=10.0, learning_rate=3e-3,
    )  # fmt: skip
    before = made.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] < before - 0.5


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_train(family: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, model_of(family), eval_dataset=make_data(), max_steps=40, learning_rate=3e-3)
    before = made.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] < before - 0.5


def test_mixed_precision_and_checkpointed_activations_train(tmp_path: Path) -> None:
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second until transformers 5.17 or later
    checkpointing = next(name for name in names if hasattr(TrainingArguments, name))
    options = {"bf16": True, checkpointing: True, "gradient_accumulation_steps": 2}
    for train_backbone in (True, False):
        result = trainer(tmp_path, model_of(), max_steps=2, train_backbone=train_backbone, **options).train()
        assert np.isfinite(result.training_loss)


def test_a_model_in_half_precision_trains(tmp_path: Path) -> None:
    model = model_of().bfloat16()
    result = trainer(tmp_path, model, max_steps=2).train()
    assert np.isfinite(result.training_loss)


@pytest.mark.parametrize("family", ["qwen3", "t5"])
@pytest.mark.parametrize("train_backbone", [False, True])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(
    family: str, train_backbone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    options |= {"max_steps": 6, "train_backbone": train_backbone}
    whole = trainer(tmp_path, model_of(family), **options)
    whole.train()
    other = model_of(family)
    if train_backbone:
        other = model_of(family, seed=5)
    torch.nn.init.zeros_(other.draft_head.logit_heads[0].weight)
    resumed = trainer(tmp_path, other, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    for (name, one), (_, two) in zip(whole.model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert "draft_head" not in caplog.text


def test_the_best_checkpoint_is_loaded_with_its_head(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, model_of(), eval_dataset=make_data(), max_steps=4, learning_rate=1.0, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, greater_is_better=True,
    )  # fmt: skip
    made.train()
    best = Path(made.state.best_model_checkpoint)  # pyright: ignore
    assert best.name != "checkpoint-4"  # the highest loss is not the last
    loaded = hf_gr.AutoModelForGenerativeRetrieval.from_pretrained(best)
    for (name, one), (_, two) in zip(made.model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert abs(made.evaluate()["eval_loss"] - made.state.best_metric) < LOSS_TOL  # pyright: ignore


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_an_adapter_trains_with_the_head_and_resumes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def wrapped() -> Any:
        model = model_of()
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))

    torch.manual_seed(0)
    one = wrapped()
    embedding = one.get_base_model().get_input_embeddings().weight
    before, rows = embedding.clone(), list(one.get_base_model().draft_head.config.placeholder_token_ids)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(tmp_path, one, **options).train()
    kept = [row for row in range(len(embedding)) if row not in rows]
    assert torch.equal(embedding[kept], before[kept])
    assert not torch.equal(embedding[rows], before[rows])
    two = wrapped()
    trainer(tmp_path, two, **options).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for (name, first), (_, second) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_an_adapter_inside_the_head_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def wrapped(**options: Any) -> Any:
        return peft.get_peft_model(model_of(), peft.LoraConfig(task_type="CAUSAL_LM", **options))

    everywhere = wrapped(target_modules="all-linear")
    for model in (everywhere, wrapped(target_modules=["q_proj"], modules_to_save=["draft_head"])):
        with pytest.raises(ValueError, match=r"model.draft_head has layers of an adapter .*exclude_modules"):
            trainer(tmp_path, model)
    with pytest.raises(ValueError, match=r"model.draft_head has layers of an adapter"):
        save_draft_head(everywhere, tmp_path / "head")
    # What the message says helps.
    trainer(tmp_path, wrapped(target_modules="all-linear", exclude_modules=r"draft_head\..*"))


PROCESS = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
from transformers import set_seed
import test_draft_head_training as tests
size, out, alone = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "alone"
torch.set_num_threads(1)
config = {{"tie_word_embeddings": False}}
made = tests.trainer(
    out, tests.model_of(config=config), tests.make_data(), max_steps=3, per_device_train_batch_size=8 // size,
    train_backbone=not alone, optim="sgd", learning_rate=0.1, embedding_lr=1.0, eval_dataset=tests.make_data(),
)
made.train()
loss = made.evaluate()["eval_loss"]
if made.is_world_process_zero():
    torch.save({{**made.model.state_dict(), "loss": torch.tensor(loss)}}, out / f"of_{{size}}.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["joint", "alone"])
def test_two_processes_train_like_one(part: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESS.format(tests=str(Path(__file__).parent)))
    for size in (1, 2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(size):
            env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
            if size > 1:
                env |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
                env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            command = [sys.executable, str(script), str(size), str(tmp_path), part]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        try:
            for process in processes:
                _, errors = process.communicate(timeout=300)
                assert process.returncode == 0, errors[-3000:]
        finally:
            for process in processes:  # one that failed leaves the other waiting
                process.kill()
                process.communicate()
    one, two = (torch.load(tmp_path / f"of_{size}.pt") for size in (1, 2))
    start = model_of(config={"tie_word_embeddings": False}).state_dict()
    moved = max((one[name] - start[name]).abs().max() for name in start if one[name].is_floating_point())
    assert moved > 100 * STEP_TOL
    for name, values in one.items():
        assert torch.allclose(values, two[name], rtol=0, atol=STEP_TOL), name


# At the door


def test_the_trainer_checks_at_the_door(tmp_path: Path) -> None:
    model = model_of()
    plain = hf_gr.enable(families.build("qwen3"))
    long = InteractionDataset([[3], [3] * 126], labels=[[3, 10, 20]] * 2)
    for options, message in [
        ({"model": plain}, "model has no draft head.*add_draft_head"),
        ({"model": families.build("qwen3")}, "Qwen3ForCausalLM, expected one with GRGenerationMixin"),
        ({"model": None}, "NoneType, expected one with GRGenerationMixin"),
        ({"data": [1, 2]}, "train_dataset is a list, expected an InteractionDataset"),
        (
            {"eval_dataset": {"x": Subset([1], [0])}},
            r"eval_dataset\['x'\] is a Subset, expected an InteractionDataset",
        ),
        (
            {"data": InteractionDataset([[3], [4]], labels=[[3, 10, 20], [4, 13, 20]])},
            "train_dataset: the label of entry 1 has token 13 at level 1, expected one of the 3 codes",
        ),
        (
            {"data": InteractionDataset([[3]], labels=[[3, 10, 20, 30]])},
            "the label of entry 0 has token 30 at level 3, expected no more levels",
        ),
        ({"data": InteractionDataset([[99]], labels=[[3, 10, 20]])}, "token 99, expected less than 67"),
        ({"data": long}, "entry 1 of train_dataset has a prompt of 126 tokens and 3 placeholders.*at most 128"),
        ({"embedding_lr": -1.0}, "embedding_lr=-1.0"),
        ({"logit_lr": float("inf")}, "logit_lr=inf"),
        ({"ddp_find_unused_parameters": True}, "ddp_find_unused_parameters=True, expected False"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, **({"model": model} | options))
    trainer(tmp_path, model, Subset(long, [0]))
    trainer(tmp_path, model_of("t5"), long)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs in one process, FSDP or DeepSpeed, expected a process a GPU"):
        trainer(tmp_path, model_of())


def test_a_checkpoint_of_another_head_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tmp_path, model_of(transition="add"), **options).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    with pytest.raises(ValueError, match="checkpoint-1 has no draft head like the model's"):
        trainer(tmp_path, model_of(), **options).train(resume_from_checkpoint=str(checkpoint))
    for name in ("draft_head_config.json", "draft_head.safetensors"):
        (checkpoint / name).unlink()
    with pytest.raises(ValueError, match="checkpoint-1 has no draft head like the model's"):
        trainer(tmp_path, model_of(), **options).train(resume_from_checkpoint=str(checkpoint))


def test_a_starting_token_is_needed(tmp_path: Path) -> None:
    model = model_of("t5")
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id is None"):
        trainer(tmp_path, model)


def test_users_arguments_stay_as_they_are(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    DraftHeadTrainer(model=model_of(), args=args, train_dataset=make_data())
    assert args.remove_unused_columns
    assert args.ddp_find_unused_parameters is None


def test_batches_of_encoder_decoders_are_padded_on_the_right() -> None:
    config = DraftHeadConfig(hidden_size=8, codebook_sizes=(2, 3), placeholder_token_ids=(8, 9))
    data = InteractionDataset([[5, 6], [7]], labels=[[0, 2], [1, -1]])
    head = DraftHead(config, [[0, 1], [2, 3, 4]])
    batch = DraftHeadCollator(head, pad_token_id=1, decoder_start_token_id=3)([data[0], data[1]])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6], [7, 1]],
        "attention_mask": [[1, 1], [1, 0]],
        "decoder_input_ids": [[3, 8, 9], [3, 8, 9]],
        "labels": [[0, 2], [1, -100]],
    }


@pytest.mark.parametrize("module", [interactions, trainer_module])
def test_examples_run(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted
