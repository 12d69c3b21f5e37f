# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captured decodes: captured with one prompt and replayed with others, they answer as an eager decode does.

A CUDA graph on the CPU stands for a device's (`cpu_graphs`); buffers are poisoned before every call, and so is all
that programs share. The same calls run uncaptured, which is what a CPU does.
"""

import gc
import random
import warnings
from typing import Any
from weakref import ref

import numpy as np
import peft
import pytest
import torch
from cpu_graphs import CpuGraphs, capture, poison_buffers
from families import EOS, build, prompts
from random_catalogues import random_index, random_rows

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured
from hf_gr.generation.torch.captured import state_of
from hf_gr.torch.graphs import CannotCapture, Uncaptured

SCORE_TOL = 1e-5  # fp32 sums of 4 log-probabilities: a bucket's masked keys are added in another order
STATIC = {"cache_implementation": "static"}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "_step_scores": False}
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
ROWS = np.random.default_rng(0).integers(3, 24, size=(300, 4))
IDS = [f"item {number}" for number in range(len(ROWS))]
RAGGED = [row[: 1 + number % 4].tolist() for number, row in enumerate(ROWS)]
# Each a call's own options, and what changes from call to call.
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": BEAMS,
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "few of many": {"num_beams": 6, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "warped": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7, "min_p": 0.01, **BEAMS},
}


def new_index(**kwargs: Any) -> ConstraintIndex:
    return ConstraintIndex.from_sequences(ROWS, item_ids=IDS, **kwargs)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> CpuGraphs:
    """Graphs on the CPU."""
    return CpuGraphs.installed(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said, each once."""
    messages: list[str] = []
    monkeypatch.setattr(captured, "say_once", messages.append)
    return messages


def assert_same(expected: Any, found: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("sequences_scores", "beam_indices"):
        if (value := getattr(expected, name, None)) is not None:
            torch.testing.assert_close(getattr(found, name), value, atol=SCORE_TOL, rtol=0)


def both(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """The captured answer, from poisoned buffers, which is the eager one."""
    expected = model.generate(**inputs, **DETAILS, **options)
    poison_buffers(model)
    assert_same(expected, found := model.generate(**inputs, **DETAILS, **STATIC, **options))
    return found


def replay_all(model: Any, graphs: CpuGraphs, index: ConstraintIndex, options: dict[str, Any]) -> None:
    """One capture, then prompts of other lengths in the same bucket."""

    def seeded(seed: int) -> dict[str, Any]:
        return {"constraint_index": index, **options, **({"seed": seed} if options.get("do_sample") else {})}

    capture(model, prompts(2, 9, padded=True), **seeded(0))
    for number, length in enumerate((12, 16, 5)):
        inputs = prompts(2, length, padded=length != 12, seed=length)
        if length == 12:
            del inputs["attention_mask"]
        both(model, inputs, **seeded(number))
    assert (graphs.num_captures, graphs.num_replays) == (1, 4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("ragged", [False, True])
def test_one_capture_answers_prompts_of_other_lengths(options: Any, ragged: bool, graphs: CpuGraphs) -> None:
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS) if ragged else new_index()
    replay_all(enable(build("qwen3")), graphs, index, options)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("deepseek_v3", None), ("gemma2", "eager"), ("gemma3_text", None), ("gpt2", "eager"), ("mistral", None)],
)
def test_one_capture_answers_in_every_kind_of_layer(family: str, attention: str | None, graphs: CpuGraphs) -> None:
    replay_all(enable(build(family, attn_implementation=attention)), graphs, new_index(), BEAMS)


def test_exclusions_rules_and_updates_change_between_replays(graphs: CpuGraphs, said: list[str]) -> None:
    model, index, generator = enable(build("qwen3")), new_index(), np.random.default_rng(1)
    inputs = prompts(2, 9, padded=True)
    capture(model, inputs, constraint_index=index, exclude_items=[IDS[:7], IDS[9:12]], **BEAMS)
    for number in (0, 3, 8):  # no more than there is room for
        excluded = [generator.choice(IDS, max(number - row, 0), replace=False).tolist() for row in range(2)]
        both(model, inputs, constraint_index=index, exclude_items=excluded, **BEAMS)
    both(model, inputs, constraint_index=index, **BEAMS)
    assert (graphs.num_captures, graphs.num_replays, said) == (1, 5, [])

    def views() -> list[ConstraintIndex]:
        return [index.where(generator.choice(IDS, 50, replace=False).tolist()) for _ in range(2)]

    capture(model, inputs, constraint_index=views(), **BEAMS)
    for _ in range(2):
        both(model, inputs, constraint_index=views(), **BEAMS)
    index.remove(IDS[:3])
    capture(model, inputs, constraint_index=index, **BEAMS)
    for number in range(1, 3):  # removals
        index.remove(IDS[3 * number : 3 * number + 3])
        both(model, inputs, constraint_index=index, **BEAMS)
    assert (graphs.num_captures, graphs.num_replays, said) == (3, 11, [])
    both(model, inputs, constraint_index=index, exclude_items=[IDS[30:60], []], **BEAMS)  # eager: there is no room
    index.add([[3, 3, 3, 3], [4, 4, 4, 4]], item_ids=["new", "newer"])  # other shapes: eager, until captured again
    both(model, inputs, constraint_index=index, **BEAMS)
    assert graphs.num_replays == 11
    assert "a call that model.warm_up has not captured" in said[0]


def test_programs_of_a_catalogue_that_is_gone_are_dropped(graphs: CpuGraphs) -> None:
    model, inputs = enable(build("qwen3")), prompts(2, 9)
    for size in (40, 300):
        index = ConstraintIndex.from_sequences(ROWS[:size])
        capture(model, inputs, constraint_index=index, **BEAMS)
        both(model, inputs, constraint_index=index, **BEAMS)
        assert len(captured.PROGRAMS[model]) == 1
        del index
    assert (graphs.num_captures, graphs.num_replays) == (2, 4)


@pytest.mark.parametrize("variant", [{}, {"use_placeholders": False, "transition": "add"}])
def test_a_head_that_decides_alone_is_captured(variant: dict[str, Any], graphs: CpuGraphs) -> None:
    model, index = enable(build("qwen3")), new_index()
    torch.manual_seed(0)
    model.add_draft_head(index, **variant)
    for parameter in model.draft_head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    capture(model, prompts(2, 9, padded=True), constraint_index=index, drafting="head", **BEAMS)
    for length in (30, 5):  # hidden states have no length
        both(model, prompts(2, length, padded=True), constraint_index=index, drafting="head", **BEAMS)
    assert (graphs.num_captures, graphs.num_replays) == (1, 3)
    del model.draft_head
    model.add_draft_head(index, use_state=False, transition="none")  # another one
    both(model, prompts(2, 9), constraint_index=index, drafting="head", **BEAMS)


def test_the_catalogues_draft_is_captured(graphs: CpuGraphs, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths are fixed, and the host reads once whether all nodes fitted; where not, the call is decoded eagerly."""
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    options = {"constraint_index": index, "drafting": "trie", **BEAMS}
    capture(model, inputs, **options)
    for number, length in enumerate((12, 5)):
        both(model, prompts(2, length, padded=True, seed=number), **options)
    found = both(model, inputs, **options).speculation
    plain = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS).speculation
    assert found.target_forwards < plain.target_forwards
    assert (found.accepted_steps > 0).all()
    assert (graphs.num_captures, graphs.num_replays, said) == (1, 4, [])
    captured.PROGRAMS.clear()
    monkeypatch.setattr(captured, "fixed_widths", lambda *args, **kwargs: ((), (3,), (3,), ()))
    capture(model, inputs, **options)
    assert both(model, inputs, **options).speculation.drafted_nodes.sum() > 6
    assert graphs.num_replays == 6


@pytest.mark.parametrize("drafting", ["head", "assistant"])
def test_drafts_are_left_out_of_a_captured_decode(drafting: str, graphs: CpuGraphs, said: list[str]) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    options: dict[str, Any] = {"drafting": drafting, "verification": "strict", **BEAMS}
    if drafting == "head":
        model.add_draft_head(index)
    else:
        options["assistant_model"] = build("llama", seed=1)
    capture(model, inputs, constraint_index=index, **options)
    found = both(model, inputs, constraint_index=index, **options)
    assert found.speculation.drafted_nodes.sum() == 0
    assert (graphs.num_captures, graphs.num_replays) == (1, 2)
    assert all("without a draft" in message for message in said)


def test_on_a_cpu_the_same_code_runs_uncaptured() -> None:
    model, index = enable(build("qwen3")), new_index()
    program = ref(capture(model, prompts(2, 9, padded=True), constraint_index=index, **BEAMS))
    assert isinstance(program().captured.backend, Uncaptured)  # pyright: ignore
    for length in (12, 5):
        both(model, prompts(2, length, padded=True), constraint_index=index, **BEAMS)
    del model  # a program goes with its model
    gc.collect()
    assert program() is None


def test_the_prompts_cache_is_that_of_an_eager_call(graphs: CpuGraphs) -> None:
    model, inputs, index = enable(build("qwen3")), prompts(2, 9, padded=True), new_index()
    expected = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS).past_key_values
    capture(model, inputs, constraint_index=index, **BEAMS)
    found = both(model, inputs, constraint_index=index, **BEAMS).past_key_values
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=0, rtol=0)
    both(model, inputs, constraint_index=index, past_key_values=expected, **BEAMS)
    assert graphs.num_replays == 3


class Calls:
    """Random calls of one model, which sees catalogues and weights come, change and go.

    It computes in fp64, so that a bucket's rounding does not decide between beams.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = enable(build("gemma3_text")).double()
        self.indexes = [random_index(self.random, ragged=ragged) for ragged in (False, True)]
        self.model.add_draft_head(self.indexes[0])

    def change(self) -> None:
        """Now and then: an update, another catalogue, other weights, in place or elsewhere."""
        draw, number = self.random.random(), self.random.randrange(2)
        index = self.indexes[number]
        if draw < 0.03:
            index.add(random_rows(self.random, 1, ragged=False), [10**6 + self.random.randrange(10**6)])
        elif draw < 0.06 and index.num_items > 20:
            index.remove(self.random.sample(list(index.item_ids), 2))
        elif draw < 0.065:
            self.indexes[number] = random_index(self.random, ragged=bool(number))
        elif draw < 0.08:
            weights = {name: tensor.flip(0) for name, tensor in self.model.state_dict().items() if "norm" in name}
            self.model.load_state_dict(weights, strict=False, assign=draw < 0.07)

    def draw(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A prompt and options: one of some shapes that come often, or any."""
        draw = self.random
        shape = random.Random(draw.randrange(8) if draw.random() < 0.9 else draw.random())
        chance, batch_size = shape.random, shape.choice((1, 2, 3))
        length, is_padded = shape.choice((5, 13, 17, 25)) + draw.randrange(4), draw.random() < 0.5
        inputs = prompts(batch_size, length, padded=is_padded, seed=draw.randrange(10**6))
        number, beams = shape.choice((0, 0, 1)), shape.choice((1, 4, 4, 4, 5))
        index, ids = self.indexes[number], list(self.indexes[number].item_ids)
        options: dict[str, Any] = {"num_beams": beams, "constraint_index": index}
        options["num_return_sequences"] = beams if chance() < 0.8 else 1
        if chance() < 0.3:
            options |= {"do_sample": True, "top_k": 0, "seed": draw.randrange(100)}
        if chance() < 0.2:
            options["exclude_items"] = [draw.sample(ids, draw.choice((3, 4))) for _ in range(batch_size)]
        if chance() < 0.2:
            options["constraint_index"] = [index.where(draw.sample(ids, len(ids) // 2)) for _ in range(batch_size)]
        if number == 0 and chance() < 0.2 and beams > 1 and not options.get("do_sample"):
            options["drafting"] = "head"
        return inputs, options


@pytest.mark.parametrize(("count", "seed"), [(30, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_calls_in_random_shapes(count: int, seed: int, graphs: CpuGraphs) -> None:
    calls, refused = Calls(seed), 0
    for number in range(count):
        calls.change()
        inputs, options = calls.draw()
        try:
            expected = calls.model.generate(**inputs, **options, **DETAILS)
        except ValueError:  # of a head that does not know the changed catalogue's tokens
            refused += 1
            continue
        poison_buffers(calls.model)
        if calls.random.random() < 0.3:
            capture(calls.model, inputs, **options, **DETAILS)
        found = calls.model.generate(**inputs, **options, **DETAILS, **STATIC)
        assert found.sequences.tolist() == expected.sequences.tolist(), (number, seed)
        if options["num_beams"] > 1:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)
    assert refused <= count / 10
    assert graphs.num_replays > 1.5 * graphs.num_captures > 4


def test_nothing_of_a_longer_prompt_is_read(graphs: CpuGraphs) -> None:
    """Not even what is no number: a masked NaN would still spread."""
    model, index = enable(build("qwen3")), new_index()
    with torch.no_grad():
        model.get_input_embeddings().weight[60:] = torch.nan
    inputs = prompts(2, 9, padded=True)
    capture(model, inputs | {"input_ids": inputs["input_ids"].clamp(max=59)}, constraint_index=index, **BEAMS)
    for length in (16, 12, 15):
        inputs = prompts(2, length, seed=length)
        broken = inputs | {"input_ids": inputs["input_ids"].index_fill(1, torch.arange(3), 61)}
        out = model.generate(**broken, constraint_index=index, **DETAILS, **BEAMS, **STATIC)
        assert not out.sequences_scores.isfinite().any()
        shorter = {name: value[:, 3:].clamp(max=59) for name, value in inputs.items()}
        found = model.generate(**shorter, constraint_index=index, **DETAILS, **BEAMS, **STATIC)
        assert_same(model.generate(**shorter, constraint_index=index, **DETAILS, **BEAMS), found)
    assert graphs.num_captures == 1


def test_in_inference_mode_and_after_it(graphs: CpuGraphs) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    options = {"constraint_index": index, "exclude_items": [IDS[:5], IDS[9:13]], **BEAMS}
    for is_on in (True, False, True):
        with torch.inference_mode(is_on):
            if not graphs.num_captures:
                capture(model, inputs, **options)
            both(model, inputs, **options)
    assert (graphs.num_captures, graphs.num_replays) == (1, 4)


def test_weights_that_change_are_read_anew(graphs: CpuGraphs) -> None:
    model, index, inputs, answers = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True), []

    def ask() -> int:
        """Programs that answer; the answer is right in any case."""
        before = graphs.num_replays
        answers.append(both(model, inputs, constraint_index=index, **BEAMS).sequences_scores)
        return graphs.num_replays - before

    capture(model, inputs, constraint_index=index, **BEAMS)
    assert ask() == 1
    # In place: the program still reads the right numbers.
    model.load_state_dict(build("qwen3", seed=1).state_dict())
    assert ask() == 1
    model.load_state_dict(build("qwen3", seed=2).state_dict(), assign=True)
    assert ask() == 0
    capture(model, inputs, constraint_index=index, **BEAMS)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    assert ask() == 0
    capture(model, inputs, constraint_index=index, **BEAMS)
    model.model.layers[0].self_attn.scaling *= 2.0  # what a module does, without any weight
    assert ask() == 0
    assert all(not torch.equal(one, two) for one, two in zip(answers, answers[1:], strict=False))
    model.set_attn_implementation("eager")
    assert ask() == 0


def test_weights_that_wrap_others_have_the_addresses_of_those() -> None:
    """Quantised and distributed ones have none of their own."""
    two_tensor: Any = pytest.importorskip("torch.testing._internal.two_tensor")
    model = torch.nn.Linear(3, 3, bias=False)
    model.weight = torch.nn.Parameter(two_tensor.TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    model.config = build("qwen3").config
    before = state_of(model)
    assert state_of(model) == before
    model.weight.a = torch.ones(3, 3)
    assert state_of(model) != before


def test_adapters_are_switched_on_and_off(graphs: CpuGraphs) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of several adapters
        for name in ("one", "two"):
            model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), name)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.eval()
    scores = []
    for adapters in ("one", ["one", "two"], "one", None, "one"):
        model.disable_adapters() if adapters is None else (model.enable_adapters(), model.set_adapter(adapters))
        capture(model, inputs, constraint_index=index, **BEAMS)
        scores.append(both(model, inputs, constraint_index=index, **BEAMS).sequences_scores)
    assert all(not torch.equal(one, two) for one, two in zip(scores, scores[1:], strict=False))
    assert graphs.num_captures == 3  # of as many states, one of which came back


def test_a_bucket_ends_where_positions_do(graphs: CpuGraphs) -> None:
    model, index = enable(build("gpt2", config={"n_positions": 21})), new_index()
    assert capture(model, prompts(2, 17), constraint_index=index, **BEAMS).longest == 17


@pytest.mark.parametrize(
    ("why", "options"),
    {
        "logits processors": {"repetition_penalty": 1.5},
        "output_scores": {"_step_scores": True},
        "auto": {"drafting": "auto"},
        "synced_gpus": {"synced_gpus": True},
        "stopping": {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
        "an encoder-decoder": {"family": "t5"},
        "forward hooks": {"hook": True},
        "training mode": {"train": True},
        "autocast": {"autocast": True},
    }.items(),
)
def test_what_is_not_captured_is_answered_as_ever(
    why: str, options: dict[str, Any], graphs: CpuGraphs, said: list[str]
) -> None:
    options = DETAILS | BEAMS | options
    model, inputs = enable(build(options.pop("family", "qwen3"))), prompts(2, 9, padded=True)
    options |= {"constraint_index": new_index()}
    if options.pop("hook", False):
        model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    model.train(options.pop("train", False))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.pop("autocast", False)):
        expected = model.generate(**inputs, **options)
        for _ in range(2):
            assert_same(expected, model.generate(**inputs, **STATIC, **options))
        assert all("decoding without graphs" in message and why in message for message in said)
        assert len(said) == 2
        with pytest.raises(ValueError, match=why):
            capture(model, inputs, **options)
    assert graphs.num_captures == 0


def test_a_model_that_the_host_waits_for_cannot_be_captured(graphs: CpuGraphs) -> None:
    """The sparse layers of some models ask which experts have tokens."""
    model, inputs, index = enable(build("qwen3")), prompts(2, 9), new_index()
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * float(hidden.isfinite().all())
    with pytest.raises(CannotCapture, match="the host waits"):
        capture(model, inputs, constraint_index=index, **BEAMS)
    both(model, inputs, constraint_index=index, **BEAMS)
    assert graphs.num_captures == 0


def test_other_kinds_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, index = enable(build("qwen3")), prompts(2, 9), new_index()
    told: list[str] = []
    monkeypatch.setattr("hf_gr.generation.torch.call.say_once", told.append)
    for kind in ("dynamic", "offloaded", "quantized"):
        model.generate(**inputs, constraint_index=index, cache_implementation=kind, **BEAMS)
    assert ["'offloaded'" in told[0], "'quantized'" in told[1], len(told)] == [True, True, 2]
    for kind in ("x", 5):
        with pytest.raises(ValueError, match="cache_implementation.*static"):
            model.generate(**inputs, constraint_index=index, cache_implementation=kind, **BEAMS)


def test_a_warm_up_captures_what_is_to_come(graphs: CpuGraphs, said: list[str]) -> None:
    model = enable(build("qwen3"))
    options: dict[str, Any] = {"num_return_sequences": 4, "length_penalty": 0.5}
    index = new_index().where(IDS[::2])
    found = model.warm_up(index, batch_sizes=[1, 2], prompt_lengths=np.array([9, 30, 12]), num_beams=4, **options)
    shapes = [(one.batch_size, one.prompt_length, one.num_beams) for one in found]
    assert shapes == [(1, 16, 4), (1, 32, 4), (2, 16, 4), (2, 32, 4)]
    assert all(one.num_bytes > 0 and one.seconds > 0 for one in found)
    for batch_size, length in ((1, 5), (2, 32)):
        both(model, prompts(batch_size, length, padded=True), constraint_index=index, num_beams=4, **options)
    assert (graphs.num_captures, said) == (4, [])
    again = model.warm_up(index, batch_sizes=2, prompt_lengths=np.array(16), num_beams=4, **options)
    assert again == found[2:3]
    model.add_draft_head(index)
    (one,) = model.warm_up(index, prompt_lengths=[9, 90], num_beams=[4], drafting="head")
    assert one.prompt_length is None


@pytest.mark.parametrize(
    ("message", "options"),
    {
        "prompt_lengths=0, expected a positive integer": {"prompt_lengths": 0},
        "prompt_lengths has 125, expected at most 124: the model has 128 positions": {"prompt_lengths": [9, 125]},
        "num_beams=\\[\\], expected a positive integer": {"num_beams": []},
        "batch_sizes='2', expected": {"batch_sizes": "2"},
        "batch_sizes=True, expected": {"batch_sizes": True},
        "warm_up with logits processors": {"repetition_penalty": 1.5},
        "cache_implementation='dynamic', expected 'static'": {"cache_implementation": "dynamic"},
        "constraint_index is missing": {"constraint_index": None},
    }.items(),
)
def test_a_warm_up_refuses_what_is_not_captured(message: str, options: dict[str, Any]) -> None:
    how: dict[str, Any] = {"constraint_index": new_index(), "prompt_lengths": 9, "num_beams": 4}
    with pytest.raises(ValueError, match=message):
        enable(build("gpt2")).warm_up(**(how | options))
