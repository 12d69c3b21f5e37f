# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Training of draft heads: the loss against a literal twin, who learns and how fast, resuming, adapters."""

import pickle
from pathlib import Path
from typing import Any

import families
import numpy as np
import peft
import pytest
import torch
from reference import reference_head_log_probs
from test_draft_head import hidden_states
from torch.utils.data import Subset
from transformers import TrainingArguments

import hf_gr
from hf_gr import ConstraintIndex, SemanticIds
from hf_gr.generation.torch.heads import save_draft_head
from hf_gr.training import DraftHeadTrainer, InteractionDataset

LOSS_TOL = 1e-5  # fp32, means of a few dozen terms
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
    ours = ("train_backbone", "embedding_lr", "transition_lr", "logit_lr", "eval_dataset", "optimizers")
    given = {name: options.pop(name) for name in ours if name in options}
    arguments = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 0}
    arguments |= {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_strategy": "no"}
    return DraftHeadTrainer(
        model=model,
        args=TrainingArguments(str(directory / "out"), **(arguments | options)),
        train_dataset=make_data() if data is None else data,
        **given,
    )


def test_every_item_with_others_before_it_is_an_entry() -> None:
    tokens = [[3, 10, -1], [4, 11, 20], [5, -1, -1], [6, 12, -1]]
    histories = [[0, 1, 2], [], [3], [2, 3, 0, 1]]
    data = InteractionDataset.from_histories(histories, tokens, max_items=2, eos_token_id=2)
    expected = []
    for history in histories:
        for place in range(1, len(history)):
            prompt = [token for item in history[max(0, place - 2) : place] for token in tokens[item] if token >= 0]
            expected.append((prompt, [token for token in tokens[history[place]] if token >= 0] + [2]))
    found = [tuple(values.tolist() for values in data[number].values()) for number in range(len(data))]
    assert found == expected
    assert data.lengths.tolist() == [len(prompt) for prompt, _ in expected]
    assert data.max_token_id == 20
    assert [*data[-1]["input_ids"]] == expected[-1][0]
    assert [*pickle.loads(pickle.dumps(data))[0]["labels"]] == expected[0][1]
    with pytest.raises(IndexError):
        data[len(data)]


def test_histories_are_of_the_items_ids() -> None:
    ids = SemanticIds([[0, 1], [2, 0]], item_ids=["ham", "jam"], offset=3)
    data = InteractionDataset.from_histories([["jam", "ham"]], ids, max_items=5)
    assert {name: values.tolist() for name, values in data[0].items()} == {"input_ids": [5, 6], "labels": [3, 7]}
    numbers = SemanticIds([[0, 1], [2, 0]], item_ids=[17, 23])
    assert len(InteractionDataset.from_histories([np.array([17, 23, 17])], numbers, max_items=5)) == 2
    for item, message in (("yam", "'yam', which has no semantic ID"), (["ham"], r"\['ham'\], expected texts")):
        with pytest.raises(ValueError, match=rf"histories\[1\] has item {message}"):
            InteractionDataset.from_histories([["ham", "jam"], ["jam", item]], ids, max_items=5)


def test_prompts_are_not_copied() -> None:
    history = np.arange(2000) % 100
    data = InteractionDataset.from_histories([history], np.arange(100)[:, None], max_items=2000)
    assert len(data) == 1999
    assert len(pickle.dumps(data)) < 100_000  # all prompts are 2 million tokens


ITEMS = [[3, 10], [4, 11]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [], "labels": []}, "prompts is empty"),
        ({"prompts": [[3], []], "labels": [[3], [3]]}, r"prompts\[1\] is empty"),
        ({"prompts": [[3]], "labels": [[3], [4]]}, "prompts has 1 entries and labels 2"),
        ({"prompts": [[3], [0.5]], "labels": [[3], [4]]}, r"prompts\[1\] has shape \[1\] and dtype float64"),
        ({"prompts": [[3], [4, -1]], "labels": [[3], [4]]}, r"prompts\[1\] has a token below 0"),
        ({"prompts": [[3]], "labels": [["a"]]}, "labels: .*expected an integer"),
        ({"prompts": [[3], [3]], "labels": [[3, 4], [-1, 4]]}, r"labels\[1\] is \[-1, 4\]"),
        ({"histories": [[0, 1], [0, 2]]}, r"histories\[1\] has item 2"),
        ({"histories": [[0], [1]]}, "no history of 2 items or more"),
        ({"max_items": 0}, "max_items=0, expected 1 or more"),
        ({"items": ConstraintIndex.from_sequences(ITEMS)}, "items is a ConstraintIndex, expected SemanticIds"),
    ],
)
def test_bad_data_is_named(given: dict[str, Any], message: str) -> None:
    make: Any = InteractionDataset
    if "prompts" not in given:
        make, given = make.from_histories, {"histories": [[0, 1]], "items": ITEMS, "max_items": 3} | given
    with pytest.raises(ValueError, match=message):
        make(**given)


def slow_loss(model: Any, data: InteractionDataset) -> float:
    """Equation 6 as a mean: one prompt at a time, one level at a time."""
    weights = {name: values.double().numpy() for name, values in model.draft_head.state_dict().items()}
    losses = []
    for entry in (data[number] for number in range(len(data))):
        prompt = torch.from_numpy(entry["input_ids"])[None]
        hidden = hidden_states(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, 0)
        label = entry["labels"].tolist()
        for level, token in enumerate(label):
            known = reference_head_log_probs(hidden, weights, CODEBOOKS, label[:level], transition="rnn")
            losses.append(-known[token])
    return float(np.mean(losses))


@pytest.mark.parametrize(
    ("family", "ragged"),
    [("qwen3", False), ("qwen3", True), ("gpt2", True), ("bloom", True), ("t5", True), ("bart", False)],
)
def test_the_loss_is_the_twins(family: str, ragged: bool, tmp_path: Path) -> None:
    model, data = model_of(family), make_data(6, ragged=ragged)
    made = trainer(tmp_path, model, data)
    loss = made.compute_loss(model, made.data_collator([data[number] for number in range(6)])).item()
    expected = slow_loss(model, data)
    assert abs(loss - expected) < LOSS_TOL * max(1, expected)


def test_learning_rates_are_multiples(tmp_path: Path) -> None:
    model = model_of(config={"tie_word_embeddings": False})
    made = trainer(tmp_path, model, max_steps=1, weight_decay=0.1, logit_lr=2.0)
    made.train()
    found = {id(parameter): group for group in made.optimizer.param_groups for parameter in group["params"]}  # pyright: ignore
    assert id(model.lm_head.weight) not in found
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight":
            part = name.split(".")[1] if name.startswith("draft_head") else ""
            factor = {"logit_heads": 2, "embeddings": 100, "transitions": 10}.get(part, 1)
            assert found[id(parameter)]["initial_lr"] == pytest.approx(1e-3 * factor), name
            assert found[id(parameter)]["weight_decay"] == (0 if "bias" in name or "norm" in name else 0.1), name


def test_an_optimizer_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.draft_head.parameters(), lr=0.1)
    trainer(tmp_path, model, optimizers=(optimizer, None), max_steps=1).train()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("qwen3", True), ("t5", True)])
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


def test_a_head_without_placeholders_trains_alone_and_then_the_model_too(tmp_path: Path) -> None:
    model = model_of(use_placeholders=False)
    before = {name: values.clone() for name, values in model.model.state_dict().items()}
    trainer(tmp_path, model, train_backbone=False, max_steps=1).train()
    assert all(torch.equal(values, before[name]) for name, values in model.model.state_dict().items())
    trainer(tmp_path, model, max_steps=1).train()
    assert not torch.equal(before["layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"transition": "add"}),
        ("qwen3", {"transition": "none", "use_state": False}),
        ("t5", {}),
    ],
)
def test_training_lowers_the_loss(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = trainer(
        tmp_path, model_of(family, **options), Subset(make_data(), range(20)), eval_dataset={"all": make_data()},
        max_steps=25, train_sampling_strategy="group_by_length", embedding_lr=10.0, learning_rate=5e-3,
    )  # fmt: skip
    before = made.evaluate()["eval_all_loss"]
    if not options:
        assert abs(before - slow_loss(made.model, make_data())) < 10 * LOSS_TOL
    made.train()
    assert made.evaluate()["eval_all_loss"] < before - 0.4


@pytest.mark.parametrize("train_backbone", [True, False])
def test_mixed_and_half_precision_and_checkpointed_activations_train(train_backbone: bool, tmp_path: Path) -> None:
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second until transformers 5.17 or later
    checkpointing = next(name for name in names if hasattr(TrainingArguments, name))
    options = {"bf16": train_backbone, checkpointing: True, "gradient_accumulation_steps": 2}
    model = model_of() if train_backbone else model_of().bfloat16()
    result = trainer(tmp_path, model, max_steps=1, train_backbone=train_backbone, **options).train()
    assert np.isfinite(result.training_loss)


@pytest.mark.parametrize(("family", "train_backbone"), [("qwen3", True), ("t5", False)])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(
    family: str, train_backbone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"max_steps": 4, "train_backbone": train_backbone}
    whole = trainer(tmp_path, model_of(family), **options)
    whole.train()
    other = model_of(family, seed=5 if train_backbone else 0)
    torch.nn.init.zeros_(other.draft_head.logit_heads[0].weight)
    resumed = trainer(tmp_path, other, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.state.global_step == 4
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


LONG = InteractionDataset([[3], [3] * 126], labels=[[3, 10, 20]] * 2)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": hf_gr.enable(families.build("qwen3"))}, "model has no draft head.*add_draft_head"),
        ({"model": families.build("qwen3")}, "Qwen3ForCausalLM, expected one with GRGenerationMixin"),
        ({"model": None}, "NoneType, expected one with GRGenerationMixin"),
        ({"data": [1, 2]}, "train_dataset is a list, expected a dataset of type InteractionDataset"),
        ({"eval_dataset": {"x": Subset([1], [0])}}, r"eval_dataset\['x'\] is a Subset, expected a dataset of type"),
        (
            {"data": InteractionDataset([[3], [4]], labels=[[3, 10, 20], [4, 13, 20]])},
            "train_dataset: the label of entry 1 has token 13 at level 1, expected one of the 3 codes",
        ),
        (
            {"data": InteractionDataset([[3]], labels=[[3, 10, 20, 30]])},
            "the label of entry 0 has token 30 at level 3, expected no more levels",
        ),
        (
            {"data": InteractionDataset([[99]], labels=[[3, 10, 20]])},
            "token 99, expected less than the vocabulary, 67",
        ),
        ({"data": LONG}, "entry 1 of train_dataset has a prompt of 126 tokens and 3 placeholders.*at most 128"),
        ({"embedding_lr": -1.0}, "embedding_lr=-1.0"),
        ({"logit_lr": float("inf")}, "logit_lr=inf"),
        ({"ddp_find_unused_parameters": True}, "ddp_find_unused_parameters=True, expected False"),
    ],
)
def test_the_trainer_checks_at_the_door(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **({"model": model_of()} | how))


def test_the_longest_prompts_and_users_arguments_are_taken_as_they_are(tmp_path: Path) -> None:
    trainer(tmp_path, model_of(), Subset(LONG, [0]))
    trainer(tmp_path, model_of("t5"), LONG)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    DraftHeadTrainer(model=model_of(), args=args, train_dataset=make_data())
    assert args.remove_unused_columns
    assert args.ddp_find_unused_parameters is None


def test_several_gpus_in_one_process_and_a_missing_start_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("t5")
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id is None"):
        trainer(tmp_path, model)
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
