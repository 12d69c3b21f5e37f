# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Captured decodes: captured with one prompt and replayed with others, they answer as an eager decode does.

A CUDA graph on the CPU stands for a device's (`cpu_graphs`); buffers are poisoned before every call, and so is all
that programs share. The same calls run uncaptured, which is what a CPU does.
"""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from cpu_graph import poison
from cpu_graphs import CpuGraphs, capture, poison_buffers
from families import EOS, build, prompts

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import captured
from hf_gr.generation.torch.model_state import state_of
from hf_gr.torch.graphs import Uncaptured

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
    "greedy": {},
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "top_k": 0, **BEAMS},
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
    messages_: list[str] = []
    monkeypatch.setattr(captured, "say_once", messages_.append)
    return messages_


def assert_same(expected: Any, found: Any, *, atol: float = SCORE_TOL) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("sequences_scores", "beam_indices"):
        if (value := getattr(expected, name, None)) is not None:
            torch.testing.assert_close(getattr(found, name), value, atol=atol, rtol=0)


def both(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """The eager answer and the captured one, from poisoned buffers."""
    expected = model.generate(**inputs, **DETAILS, **options)
    poison_buffers(model)
    assert_same(expected, model.generate(**inputs, **DETAILS, **STATIC, **options))


def seeded(options: dict[str, Any], seed: int) -> dict[str, Any]:
    return options | ({"seed": seed} if options.get("do_sample") else {})


def replay_all(model: Any, graphs: CpuGraphs, index: ConstraintIndex, options: dict[str, Any]) -> None:
    """One capture, then prompts of other lengths in the same bucket."""
    capture(model, prompts(2, 9, padded=True), constraint_index=index, **seeded(options, 0))
    for number, length in enumerate((12, 16, 5, 9)):
        inputs = prompts(2, length, padded=length != 12, seed=length)
        if length == 12:
            del inputs["attention_mask"]
        both(model, inputs, constraint_index=index, **seeded(options, number))
    assert (graphs.num_captures, graphs.num_replays) == (1, 5)


# Proof 3: captured with one prompt, replayed with others


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_capture_answers_prompts_of_other_lengths(options: dict[str, Any], graphs: CpuGraphs) -> None:
    replay_all(enable(build("qwen3")), graphs, new_index(), options)


@pytest.mark.parametrize("attention", [None, "eager"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "gemma3_text", "gpt2", "mistral", "phi3"])
def test_one_capture_answers_in_every_kind_of_layer(family: str, attention: str | None, graphs: CpuGraphs) -> None:
    how = {} if attention is None else {"attn_implementation": attention}
    replay_all(enable(build(family, **how)), graphs, new_index(), BEAMS)


@pytest.mark.parametrize("name", ["beams", "greedy", "sampled beams", "few of many"])
def test_sequences_of_several_lengths_are_captured(name: str, graphs: CpuGraphs) -> None:
    index = ConstraintIndex.from_sequences(RAGGED, eos_token_id=EOS)
    replay_all(enable(build("qwen3")), graphs, index, OPTIONS[name])


def test_exclusions_rules_and_updates_change_between_replays(graphs: CpuGraphs, said: list[str]) -> None:
    model, index, generator = enable(build("qwen3")), new_index(), np.random.default_rng(1)
    inputs = prompts(2, 9, padded=True)
    capture(model, inputs, constraint_index=index, exclude_items=[IDS[:7], IDS[9:12]], **BEAMS)
    for number in (0, 1, 3, 5, 8):  # no more than there is room for
        excluded = [generator.choice(IDS, max(number - row, 0), replace=False).tolist() for row in range(2)]
        both(model, inputs, constraint_index=index, exclude_items=excluded, **BEAMS)
    both(model, inputs, constraint_index=index, **BEAMS)
    assert (graphs.num_captures, graphs.num_replays, said) == (1, 7, [])

    def views() -> list[ConstraintIndex]:
        return [index.where(generator.choice(IDS, 50, replace=False).tolist()) for _ in range(2)]

    rules = views()
    model.generate(**inputs, constraint_index=rules, **BEAMS)
    capture(model, inputs, constraint_index=rules, **BEAMS)
    for _ in range(3):
        both(model, inputs, constraint_index=views(), **BEAMS)
    index.remove(IDS[:3])
    model.generate(**inputs, constraint_index=index, **BEAMS)
    capture(model, inputs, constraint_index=index, **BEAMS)
    for number in range(1, 4):  # removals
        index.remove(IDS[3 * number : 3 * number + 3])
        both(model, inputs, constraint_index=index, **BEAMS)
    assert (graphs.num_captures, said) == (3, [])
    assert graphs.num_replays == 7 + 4 + 4
    index.add([[3, 3, 3, 3], [4, 4, 4, 4]], item_ids=["new", "newer"])  # other shapes: eager, until captured again
    both(model, inputs, constraint_index=index, **BEAMS)
    both(model, inputs, constraint_index=index, exclude_items=[IDS[30:60], []], **BEAMS)
    assert graphs.num_replays == 7 + 4 + 4
    assert "a call that model.warm_up has not captured" in said[0]


def test_programs_of_a_catalogue_that_is_gone_are_dropped(graphs: CpuGraphs) -> None:
    model, inputs = enable(build("qwen3")), prompts(2, 9)
    for size in (40, 300, 150):
        index = ConstraintIndex.from_sequences(ROWS[:size])
        capture(model, inputs, constraint_index=index, **BEAMS)
        both(model, inputs, constraint_index=index, **BEAMS)
        assert len(captured.PROGRAMS[model]) == 1
        del index
    assert (graphs.num_captures, graphs.num_replays) == (3, 6)


def test_programs_go_with_their_model(graphs: CpuGraphs) -> None:
    model = enable(build("qwen3"))
    program = ref(capture(model, prompts(2, 9), constraint_index=new_index(), **BEAMS))
    assert program() is not None
    del model
    gc.collect()
    assert program() is None


@pytest.mark.parametrize("variant", [{}, {"use_placeholders": False}, {"transition": "add"}])
def test_a_head_that_decides_alone_is_captured(variant: dict[str, Any], graphs: CpuGraphs) -> None:
    index = new_index()
    model = enable(build("qwen3"))
    torch.manual_seed(0)
    model.add_draft_head(index, **variant)
    for parameter in model.draft_head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    capture(model, prompts(2, 9, padded=True), constraint_index=index, drafting="head", **BEAMS)
    for length in (9, 30, 5, 12):  # hidden states have no length
        inputs = prompts(2, length, padded=True)
        both(model, inputs, constraint_index=index, drafting="head", **BEAMS)
    assert (graphs.num_captures, graphs.num_replays) == (1, 5)


def test_the_catalogues_draft_is_captured(graphs: CpuGraphs, said: list[str]) -> None:
    """Widths are fixed, and the host reads once whether all nodes fitted."""
    model, index = enable(build("qwen3")), new_index()
    options = {"constraint_index": index, "drafting": "trie", **BEAMS}
    capture(model, prompts(2, 9, padded=True), **options)
    for number, length in enumerate((9, 12, 16, 5, 9)):
        both(model, prompts(2, length, padded=True, seed=number), **options)
    found = model.generate(**prompts(2, 9, padded=True), **DETAILS, **STATIC, **options)
    plain = model.generate(**prompts(2, 9, padded=True), constraint_index=index, **DETAILS, **BEAMS)
    assert_same(plain, found)
    assert found.speculation.target_forwards < plain.speculation.target_forwards
    assert (found.speculation.accepted_steps > 0).all()
    assert graphs.num_captures == 1
    assert said == []


def test_a_draft_that_does_not_fit_is_no_answer(graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is decoded eagerly then."""
    monkeypatch.setattr(captured, "fixed_widths", lambda *args, **kwargs: ((), (3,), (3,), ()))
    model, index = enable(build("qwen3")), new_index()
    inputs = prompts(2, 9, padded=True)
    capture(model, inputs, constraint_index=index, drafting="trie", **BEAMS)
    both(model, inputs, constraint_index=index, drafting="trie", **BEAMS)
    out = model.generate(**inputs, constraint_index=index, drafting="trie", **DETAILS, **STATIC, **BEAMS)
    assert graphs.num_replays == 3
    assert out.speculation.drafted_nodes.sum() > 6


@pytest.mark.parametrize("drafting", ["head", "assistant"])
def test_drafts_are_left_out_of_a_captured_decode(
    drafting: str, graphs: CpuGraphs, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    options: dict[str, Any] = {"drafting": drafting, "verification": "strict", **BEAMS}
    if drafting == "head":
        model.add_draft_head(index)
    if drafting == "assistant":
        options["assistant_model"] = build("llama", seed=1)
    expected = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS)
    capture(model, inputs, constraint_index=index, **options)
    for length in (9, 12, 14):
        both(model, prompts(2, length, padded=True), constraint_index=index, **options)
    found = model.generate(**inputs, constraint_index=index, **DETAILS, **STATIC, **options)
    assert_same(expected, found)
    assert found.speculation.drafted_nodes.sum() == 0
    assert (graphs.num_captures, graphs.num_replays) == (1, 5)
    assert all("without a draft" in message for message in said)
    assert caplog.messages == []


def test_on_a_cpu_the_same_code_runs_uncaptured() -> None:
    model, index = enable(build("qwen3")), new_index()
    program = capture(model, prompts(2, 9, padded=True), constraint_index=index, **BEAMS)
    assert isinstance(program.captured.backend, Uncaptured)
    for length in (12, 5):
        both(model, prompts(2, length, padded=True), constraint_index=index, **BEAMS)


def test_the_prompts_cache_is_that_of_an_eager_call(graphs: CpuGraphs) -> None:
    model, inputs, index = enable(build("qwen3")), prompts(2, 9, padded=True), new_index()
    expected = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS).past_key_values
    capture(model, inputs, constraint_index=index, **BEAMS)
    for _ in range(2):
        found = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS, **STATIC).past_key_values
        for ours, theirs in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=0, rtol=0)
    both(model, inputs, constraint_index=index, past_key_values=expected, **BEAMS)
    assert graphs.num_replays == 4


# Planted: a buffer that is not copied in


@pytest.mark.parametrize("rules", ["views", "exclusions"])
def test_every_buffer_that_is_not_copied_in_is_noticed(rules: str, graphs: CpuGraphs) -> None:
    model, inputs = enable(build("qwen3")), prompts(2, 12, padded=True)
    # Nodes of every level have several children, so that some are hidden and others not.
    sizes = (8, 4, 4, 2)  # more below the root than there are beams
    rows = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), axis=-1).reshape(-1, 4) + 3
    index = ConstraintIndex.from_sequences(rows, item_ids=[f"item {number}" for number in range(len(rows))])
    # So hot that seeds decide.
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 9.0, "seed": 1, **BEAMS}
    options["constraint_index"] = index
    if rules == "views":
        options["constraint_index"] = [index.where(IDS[:50]), index.where(IDS[100:200])]
    else:
        numbers = range(len(rows))
        wide = [n for n in numbers if n < 64 or (n < 160 and n // 16 % 2 == 0) or (n >= 160 and n // 4 % 2 == 0)]
        options["exclude_items"] = [IDS[:256:2], [f"item {number}" for number in wide]]
    expected = model.generate(**inputs, **DETAILS, **options)
    whole = capture(model, inputs, **options)
    program = whole.captured
    both(model, inputs, **options)
    right, unread = program.fill, []
    for number, buffer in enumerate(program.buffers):

        def fill(given: Any, buffer: torch.Tensor = buffer) -> None:
            right(given)
            poison(buffer)

        program.fill = fill
        try:
            assert_same(expected, model.generate(**inputs, **DETAILS, **STATIC, **options))
        except (AssertionError, IndexError, RuntimeError):
            continue
        unread.append(number)
    # The prompts' tokens, of which only the number counts; and the root, which nothing hides.
    shapes = [buffer.shape if buffer.dtype == torch.long else () for buffer in program.buffers]
    is_prompt = [number for number, shape in enumerate(shapes) if shape == (2, 1)]
    of_hidden = [number for number, shape in enumerate(shapes) if shape == (2, whole.most_hidden)]
    assert set(unread) <= {*is_prompt, *of_hidden[:1]}
    assert len(program.buffers) > 8


def test_nothing_of_a_longer_prompt_is_read(graphs: CpuGraphs) -> None:
    """Not even what is no number: a masked NaN would still spread."""
    model, index = enable(build("qwen3")), new_index()
    with torch.no_grad():
        model.get_input_embeddings().weight[60:] = torch.nan
    inputs = prompts(2, 9, padded=True)
    capture(model, inputs | {"input_ids": inputs["input_ids"].clamp(max=59)}, constraint_index=index, **BEAMS)
    for length in (16, 12, 15, 7):
        inputs = prompts(2, length, seed=length)
        broken = inputs | {"input_ids": inputs["input_ids"].index_fill(1, torch.arange(3), 61)}
        whole = inputs | {"input_ids": inputs["input_ids"].clamp(max=59)}
        out = model.generate(**broken, constraint_index=index, **DETAILS, **BEAMS, **STATIC)
        assert not out.sequences_scores.isfinite().any()
        shorter = {name: value[:, 3:] for name, value in whole.items()}
        found = model.generate(**shorter, constraint_index=index, **DETAILS, **BEAMS, **STATIC)
        assert_same(model.generate(**shorter, constraint_index=index, **DETAILS, **BEAMS), found)
    assert graphs.num_captures == 1


def test_in_inference_mode_and_after_it(graphs: CpuGraphs) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9, padded=True)
    excluded = [IDS[:5], IDS[9:13]]
    for number in range(4):
        with torch.inference_mode(number % 2 == 0):
            if not number:
                capture(model, inputs, constraint_index=index, exclude_items=excluded, **BEAMS)
            both(model, inputs, constraint_index=index, exclude_items=excluded, **BEAMS)
        with torch.inference_mode(number % 2 == 1):
            both(model, inputs, constraint_index=index, **BEAMS)
    assert (graphs.num_captures, graphs.num_replays) == (1, 9)


# Bad input: what changes between calls is never answered from before


def test_weights_that_change_are_read_anew(graphs: CpuGraphs) -> None:
    model, other, index = enable(build("qwen3")), build("qwen3", seed=1), new_index()
    inputs, answers = prompts(2, 9, padded=True), []

    def ask() -> int:
        """Programs that answer; the answer is right in any case."""
        before = graphs.num_replays
        both(model, inputs, constraint_index=index, **BEAMS)
        out = model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS)
        answers.append(out.sequences_scores)
        return graphs.num_replays - before

    capture(model, inputs, constraint_index=index, **BEAMS)
    assert ask() == 1
    model.load_state_dict(other.state_dict())  # in place: the program still reads the right numbers
    assert ask() == 1
    model.load_state_dict(build("qwen3", seed=2).state_dict(), assign=True)
    assert ask() == 0
    capture(model, inputs, constraint_index=index, **BEAMS)
    assert ask() == 1
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    assert ask() == 0
    capture(model, inputs, constraint_index=index, **BEAMS)
    model.model.layers[0].self_attn.scaling *= 2.0  # what a module does, without any weight
    assert ask() == 0
    model.set_attn_implementation("eager")
    assert ask() == 0
    different = [answers[0], answers[1], answers[2], answers[4], answers[5]]
    assert all(not torch.equal(one, two) for one, two in zip(different, different[1:], strict=False))


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


def test_planted_a_key_without_the_state_answers_from_before(
    graphs: CpuGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "state_of", lambda model: ((), None))
    with pytest.raises(AssertionError):
        test_weights_that_change_are_read_anew(graphs)


def test_adapters_are_switched_on_and_off(graphs: CpuGraphs) -> None:
    peft: Any = pytest.importorskip("peft")
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
    for _ in range(2):
        for switch in (
            lambda: model.set_adapter("one"),
            lambda: model.set_adapter("two"),
            lambda: model.set_adapter(["one", "two"]),
            model.disable_adapters,
            model.enable_adapters,
        ):
            switch()
            capture(model, inputs, constraint_index=index, **BEAMS)
            both(model, inputs, constraint_index=index, **BEAMS)
            scores.append(model.generate(**inputs, constraint_index=index, **DETAILS, **BEAMS).sequences_scores)
    assert all(not torch.equal(one, two) for one, two in zip(scores[:4], scores[1:4], strict=False))
    assert graphs.num_captures == 4  # of as many states, each of which came back


def test_a_head_is_replaced(graphs: CpuGraphs) -> None:
    model, index, inputs = enable(build("qwen3")), new_index(), prompts(2, 9)
    for seed in range(3):
        torch.manual_seed(seed)
        model.add_draft_head(index, **({} if seed != 1 else {"use_state": False, "transition": "none"}))
        capture(model, inputs, constraint_index=index, drafting="head", **BEAMS)
        both(model, inputs, constraint_index=index, drafting="head", **BEAMS)
        del model.draft_head


def test_two_threads_with_one_model(graphs: CpuGraphs) -> None:
    model, index = enable(build("qwen3")), new_index()
    given = [prompts(2, 5 + number, seed=number) for number in range(8)]
    expected = [model.generate(**one, constraint_index=index, **DETAILS, **BEAMS) for one in given]
    capture(model, given[0], constraint_index=index, **BEAMS)
    problems: list[Exception] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 24):
                found = model.generate(**given[number % 8], constraint_index=index, **DETAILS, **BEAMS, **STATIC)
                assert_same(expected[number % 8], found)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert graphs.num_replays == 1 + 3 * 24


def test_a_bucket_is_no_larger_than_the_models_positions(graphs: CpuGraphs) -> None:
    model, index = enable(build("gpt2", config={"n_positions": 21})), new_index()
    program = capture(model, prompts(2, 17), constraint_index=index, **BEAMS)
    both(model, prompts(2, 17), constraint_index=index, **BEAMS)
    assert program.longest == 17
    assert graphs.num_replays == 2


def test_buckets_grow_by_a_quarter_at_most() -> None:
    buckets = sorted({captured.bucket_of(length) for length in range(1, 5000)})
    assert buckets[0] == captured.SMALLEST_BUCKET
    assert max(large / small for small, large in zip(buckets, buckets[1:], strict=False)) <= 1.25
    assert all(captured.bucket_of(length) >= length for length in range(1, 5000))
    assert captured.bucket_of(90, most=92) == 92
    assert captured.bucket_of(95, most=92) == 95  # a prompt beyond the positions is the model's own problem


@pytest.mark.parametrize(
    ("why", "options"),
    {
        "logits processors": {"repetition_penalty": 1.5, **BEAMS},
        "output_scores": {**BEAMS, "_step_scores": True},
        "auto": {"drafting": "auto", **BEAMS},
        "synced_gpus": {"synced_gpus": True, **BEAMS},
        "stopping": {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)], **BEAMS},
    }.items(),
)
def test_what_is_not_captured_is_answered_as_ever(
    why: str, options: dict[str, Any], graphs: CpuGraphs, said: list[str]
) -> None:
    model, inputs, index = enable(build("qwen3")), prompts(2, 9, padded=True), new_index()
    expected = model.generate(**inputs, constraint_index=index, **(DETAILS | options))
    for _ in range(3):
        found = model.generate(**inputs, constraint_index=index, **STATIC, **(DETAILS | options))
        assert_same(expected, found)
    assert graphs.num_captures == 0
    assert all("decoding without graphs" in message and why in message for message in said)
    assert len(said) == 3
    with pytest.raises(ValueError, match=why):
        capture(model, inputs, constraint_index=index, **(DETAILS | options))


def test_models_that_are_not_captured(graphs: CpuGraphs, said: list[str]) -> None:
    index, inputs = new_index(), prompts(2, 9, padded=True)

    def twice(model: Any, why: str) -> None:
        for _ in range(2):
            both(model, inputs, constraint_index=index, **BEAMS)
        assert why in said[-1]

    twice(enable(build("t5")), "an encoder-decoder")
    model = enable(build("qwen3"))
    handle = model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    twice(model, "forward hooks")
    handle.remove()
    model.train()
    twice(model, "training mode")
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both(model, inputs, constraint_index=index, **BEAMS)
    assert "autocast" in said[-1]
    assert graphs.num_captures == 0


def test_a_model_that_the_host_waits_for_cannot_be_captured(graphs: CpuGraphs) -> None:
    """The sparse layers of some models ask which experts have tokens."""
    model, inputs, index = enable(build("qwen3")), prompts(2, 9), new_index()
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: own(hidden) * float(hidden.isfinite().all())
    with pytest.raises(RuntimeError, match="makes the host wait"):
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


# Captures ahead


def test_a_warm_up_captures_what_is_to_come(graphs: CpuGraphs, said: list[str]) -> None:
    model, index = enable(build("qwen3")), new_index()
    options: dict[str, Any] = {"num_return_sequences": 4, "length_penalty": 0.5}
    found = model.warm_up(index, batch_sizes=[1, 2], prompt_lengths=[9, 30, 12], num_beams=4, **options)
    assert [(one.batch_size, one.prompt_length, one.num_beams) for one in found] == [
        (1, 16, 4),
        (1, 32, 4),
        (2, 16, 4),
        (2, 32, 4),
    ]
    assert all(one.num_bytes > 0 for one in found)
    assert all(one.seconds > 0 for one in found)
    for batch_size, length in ((1, 5), (2, 13), (1, 29), (2, 32)):
        both(model, prompts(batch_size, length, padded=True), constraint_index=index, num_beams=4, **options)
    assert (graphs.num_captures, said) == (4, [])
    again = model.warm_up(index, batch_sizes=2, prompt_lengths=16, num_beams=4, **options)
    assert again == found[2:3]
    model.add_draft_head(index)
    (one,) = model.warm_up(index, prompt_lengths=[9, 90], num_beams=[4], drafting="head")
    assert one.prompt_length is None


def test_a_warm_up_with_a_rule_captures_what_its_later_calls_use(graphs: CpuGraphs) -> None:
    model = enable(build("qwen3"))
    rows = np.random.default_rng(0).integers(4, 60, (3000, 3))
    view = ConstraintIndex.from_sequences(rows).where(np.arange(3000) % 3 > 0)
    model.warm_up(view, prompt_lengths=16, num_beams=4)
    inputs = prompts(1, 13)
    for _ in range(2):
        model.generate(**inputs, constraint_index=view, num_beams=4, cache_implementation="static")
    assert (graphs.num_captures, graphs.num_replays) == (1, 3)


def test_a_warm_up_refuses_what_is_not_captured() -> None:
    model, index = enable(build("gpt2")), new_index()
    how: dict[str, Any] = {"prompt_lengths": 9, "num_beams": 4}
    wrong: dict[str, dict[str, Any]] = {
        "prompt_lengths=0, expected a positive integer": {"prompt_lengths": 0},
        "prompt_lengths has 125, expected at most 124: the model has 128 positions": {"prompt_lengths": [9, 125]},
        "num_beams=\\[\\], expected a positive integer": {"num_beams": []},
        "batch_sizes='2', expected": {"batch_sizes": "2"},
        "batch_sizes=True, expected": {"batch_sizes": True},
        "prompt_lengths=1.5, expected": {"prompt_lengths": 1.5},
        "num_beams=None, expected": {"num_beams": None},
        "warm_up with logits processors": {"repetition_penalty": 1.5},
        "warm_up with drafting='auto'": {"drafting": "auto"},
        "cache_implementation='dynamic', expected 'static'": {"cache_implementation": "dynamic"},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            model.warm_up(index, **(how | options))
    with pytest.raises(ValueError, match="constraint_index is missing"):
        model.warm_up(**how)
    with pytest.raises(ValueError, match="an encoder-decoder"):
        enable(build("t5")).warm_up(index, **how)
