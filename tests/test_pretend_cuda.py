# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every mode on the pretend CUDA device: the CPU's answers, no mixed devices, and the host waits only where listed.

A decode of a fixed-length catalogue waits for nothing after its prefill. Before it the device has nothing to do, so
that a wait costs little there; after it the answer is wanted anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import test_gpu
import torch
from cpu_graph import CpuGraph
from cpu_graphs import CpuGraphs, poison_buffers
from families import EOS, PAD, build, prompts
from label_tokenizers import tokenizer_of
from pretend_cuda import CUDA, DeviceMismatch, HostWaits, Log, PretendCuda, on_device, values
from test_classify import LABELS, TEXTS, model_of
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, classify, enable
from hf_gr.core import beam
from hf_gr.generation.torch import captured, mixin
from hf_gr.torch import decode as decoding
from hf_gr.torch.transfers import to_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: pytest -m gpu")

SCORE_TOL = 1e-5  # fp32 sums of 4 log-probabilities; the device attends by another kernel
RNG = np.random.default_rng(0)
ROWS = RNG.integers(3, 24, size=(300, 4))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences(
    [[*row, EOS] for row in {tuple(row[: 2 + number % 3].tolist()) for number, row in enumerate(ROWS)}],
    eos_token_id=EOS,
)
VIEWS = [INDEX.where(np.arange(len(INDEX)) % step == 0) for step in (2, 3)]
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
GREEDY = {"num_beams": 1, "num_return_sequences": 1}
TRIE = {"drafting": "trie", "draft_token_budget": 512}
SAMPLED = {"do_sample": True, "top_k": 0, "seed": [3, 4]}


def updated() -> ConstraintIndex:
    index = ConstraintIndex.from_sequences(ROWS)
    index.add(RNG.integers(3, 24, size=(20, 4)), item_ids=range(1000, 1020))
    index.remove([3, 4])
    return index


# Where the host may wait, by file and function. Before the prefill, of any call:
BEFORE = {
    ("hf_gr/catalogue/sequences.py", "to_host"),  # of tokens and their mask
    ("hf_gr/generation/torch/scorers.py", "make_scorer"),  # is the prompt padded?
}
# In transformers' own code, which prepares a call, and looks at masks in a prefill.
THEIRS = ("transformers/generation/utils.py", "transformers/masking_utils.py", "transformers/cache_utils.py")
LEAVES_EARLY = {("hf_gr/torch/decode.py", "_decide")}
SIZE_OF_DRAFT = {("hf_gr/torch/drafters.py", "_subtree")}
IS_ACCEPTED = {("hf_gr/torch/decode.py", "decide")}
LENGTH = {("hf_gr/torch/decode.py", "cropped")}
# A draft model has a prefill of its own, within the loop.
PREFILL_OF_DRAFT = {
    ("hf_gr/generation/torch/scorers.py", "make_scorer"),
    *((THEIRS[1], name) for name in ("_ignore_causal_mask_sdpa", "fast_all")),
}


@dataclass(frozen=True)
class Mode:
    """A kind of call, and where it may wait: in the loop, and after it."""

    options: dict[str, Any]
    family: str = "qwen3"
    assistant: str | None = None
    in_decode: set[tuple[str, str]] = field(default_factory=set)
    after: set[tuple[str, str]] = field(default_factory=set)


FIXED = {
    "beams": Mode(BEAMS),
    "greedy": Mode(GREEDY),
    "samples": Mode(SAMPLED | {"num_beams": 1, "num_return_sequences": 3}),
    "beam samples": Mode(SAMPLED | BEAMS),
    "exclusions": Mode(BEAMS | {"exclude_items": [[0, 1, 2], [5]]}),
    "a rule": Mode(BEAMS | {"constraint_index": VIEWS[0]}),
    "rules": Mode(BEAMS | {"constraint_index": VIEWS}),
    "updates": Mode(BEAMS | {"constraint_index": updated()}),
    "ragged, synced": Mode(BEAMS | {"constraint_index": RAGGED, "synced_gpus": True}, after=LENGTH),
    "processors": Mode(SAMPLED | BEAMS | {"top_k": 5, "temperature": 0.7}),
    "repetition": Mode(BEAMS | {"repetition_penalty": 1.3}),
    "renormalised": Mode(BEAMS | {"renormalize_logits": True}),
    "logits of steps": Mode(BEAMS | {"output_logits": True}),
    "a head alone": Mode(BEAMS | {"drafting": "head"}),
    "static": Mode(BEAMS | {"cache_implementation": "static"}),
    **{name: Mode(BEAMS, family=name) for name in ("gpt2", "gemma2", "gemma3_text", "deepseek_v3", "t5")},
}
OTHERS = {
    "ragged": Mode(BEAMS | {"constraint_index": RAGGED}, in_decode=LEAVES_EARLY, after=LENGTH),
    "ragged, greedy": Mode(GREEDY | {"constraint_index": RAGGED}, in_decode=LEAVES_EARLY, after=LENGTH),
    "trie": Mode(BEAMS | TRIE, in_decode=SIZE_OF_DRAFT),
    "ragged trie": Mode(
        BEAMS | TRIE | {"constraint_index": RAGGED},
        in_decode=SIZE_OF_DRAFT | LEAVES_EARLY,
        after=LENGTH,
    ),
    "assistant": Mode(
        BEAMS,
        assistant="llama",
        in_decode=SIZE_OF_DRAFT | IS_ACCEPTED | PREFILL_OF_DRAFT,
    ),
    "relaxed": Mode(
        BEAMS | SAMPLED | {"verification": "relaxed"}, assistant="llama", in_decode=SIZE_OF_DRAFT | PREFILL_OF_DRAFT
    ),
    "head, verified": Mode(
        BEAMS | {"drafting": "head", "verification": "strict"}, in_decode=SIZE_OF_DRAFT | IS_ACCEPTED
    ),
    "auto": Mode(BEAMS | {"drafting": "auto"}, in_decode=SIZE_OF_DRAFT),
}
MODES = FIXED | OTHERS


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as cuda:
        yield cuda


def models_of(mode: Mode) -> tuple[Any, Any]:
    model = enable(build(mode.family))
    if mode.options.get("drafting") == "head":
        torch.manual_seed(0)
        model.add_draft_head(INDEX)
    return model, None if mode.assistant is None else build(mode.assistant, seed=1)


def ask(model: Any, assistant: Any, inputs: dict[str, Any], mode: Mode) -> Any:
    options = {"constraint_index": INDEX, "return_dict_in_generate": True, "pad_token_id": PAD} | mode.options
    options |= {} if options.get("output_logits") else {"output_scores": True, "_step_scores": False}
    return model.generate(**inputs, **options, **({} if assistant is None else {"assistant_model": assistant}))


def apart(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch, around: Callable[..., Any] | None = None) -> None:
    """Count before, within and after the loop, and within the prefill, under these names."""
    decode = mixin.decode

    def counted(scorer: Any, *args: Any) -> Any:
        begin = scorer.begin

        def prefill(levels: Any = ()) -> Any:
            with cuda.within("prefill"):
                return begin(levels)

        scorer.begin = prefill
        with cuda.within("decode"):
            decoded = decode(scorer, *args) if around is None else around(decode, scorer, *args)
        cuda.begin("after")
        return decoded

    monkeypatch.setattr(mixin, "decode", counted)


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.device == CUDA
    assert values(found.sequences).tolist() == expected.sequences.tolist()
    for name in ("sequences_scores", "logits"):
        ours, theirs = (getattr(out, name, None) for out in (found, expected))
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(values(ours), theirs, atol=SCORE_TOL, rtol=0)


def assert_waits(log: Log, mode: Mode) -> None:
    """Only where the mode says."""
    found: dict[str | None, set[tuple[str, str]]] = {}
    for wait in log.waits:
        found.setdefault(wait.region, set()).add((wait.line.path, wait.line.function))
    assert {each for each in found.get(None, set()) if each[0] not in THEIRS} <= BEFORE
    assert {each for each in found.get("prefill", set()) if each[0] not in THEIRS} <= mode.in_decode
    assert found.get("decode", set()) <= mode.in_decode
    assert found.get("after", set()) <= mode.after


def check(mode: Mode, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any] | None = None) -> Log:
    """The CPU's answer and the device's, whose second call finds the catalogue there."""
    inputs = prompts(2, 9, padded=True) if inputs is None else inputs
    model, assistant = models_of(mode)
    expected = ask(model, assistant, inputs, mode)
    model, assistant = copy.deepcopy(model).cuda(), None if assistant is None else assistant.cuda()
    inputs = on_device(inputs)
    ask(model, assistant, inputs, mode)
    apart(cuda, monkeypatch)
    log = cuda.clear()
    cuda.begin(None)
    found = ask(model, assistant, inputs, mode)
    cuda.begin(None)
    assert_same(found, expected)
    assert_waits(log, mode)
    return log


@pytest.mark.parametrize("name", MODES)
def test_a_device_answers_as_a_cpu_and_is_waited_for_only_where_listed(
    name: str, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = check(MODES[name], cuda, monkeypatch)
    assert log.number("decode") + log.number(None) > 0
    if name in FIXED:
        assert not MODES[name].in_decode
    # A device is slow in these.
    assert not {dtype for _, dtype in log.dtypes} & {torch.float64, torch.complex64}


@pytest.mark.parametrize("name", ["beams", "samples", "updates", "ragged, synced", "gemma3_text", "t5"])
def test_a_decode_without_drafts_is_one_graph(name: str, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it launches can be recorded, and a replay gives the answer."""
    launches = []

    def recorded(decode: Any, scorer: Any, *args: Any) -> Any:
        prefilled = scorer.begin()
        scorer.begin = lambda levels=(): prefilled
        graph = CpuGraph("cuda")
        with graph.capture():
            decoded = decode(scorer, *args)
        launches.append(graph.launches)
        graph.replay()
        return decoded

    mode, inputs = MODES[name], prompts(2, 9, padded=True)
    model, _ = models_of(mode)
    expected = ask(model, None, inputs, mode)
    model.cuda()
    apart(cuda, monkeypatch, recorded)
    assert_same(ask(model, None, on_device(inputs), mode), expected)
    assert launches


def test_captured_decodes_answer_alike(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture serves prompts of other lengths, rules and exclusions; what shares its memory was somewhere else."""
    graphs = CpuGraphs.installed(monkeypatch, device="cuda")
    model, static = enable(build("qwen3")), {"cache_implementation": "static"}
    on_cuda = copy.deepcopy(model).cuda()
    for number, length in enumerate((9, 12, 16, 10)):
        inputs = prompts(2, length, padded=True, seed=number)
        mode = Mode(BEAMS | {"constraint_index": [VIEWS[number % 2]] * 2, "exclude_items": [[number * 6], []]})
        if not number:
            for view in (*VIEWS, *VIEWS):  # a rule's second use makes its tables
                rules = {"constraint_index": [view] * 2}
                ask(on_cuda, None, on_device(inputs), replace(mode, options=mode.options | rules))
            with captured.capturing():
                ask(on_cuda, None, on_device(inputs), replace(mode, options=mode.options | static))
        poison_buffers(on_cuda)
        found = ask(on_cuda, None, on_device(inputs), replace(mode, options=mode.options | static))
        assert_same(found, ask(model, None, inputs, mode))
    assert (graphs.num_captures, graphs.num_replays) == (1, 5)


def forget_the_device(scores: Any) -> Any:
    return scores + torch.zeros(scores.shape)


def read_a_value(scores: Any) -> Any:
    return scores if scores.max().item() < torch.inf else scores


def copy_a_number(scores: Any) -> Any:
    return torch.where(scores < torch.inf, scores, torch.tensor(beam.DEAD, device=scores.device))


def select_by_a_mask(scores: Any) -> Any:
    return scores.flatten()[scores.flatten() <= torch.inf].view(scores.shape)


def answer_otherwise_there(scores: Any) -> Any:
    return -scores if scores.device == CUDA else scores


@pytest.mark.parametrize(
    ("error", "red"),
    [
        (forget_the_device, pytest.raises(DeviceMismatch, match=r"tests/test_pretend_cuda\.py:\d+: aten.add")),
        (read_a_value, pytest.raises(AssertionError, match="read_a_value")),
        (copy_a_number, pytest.raises(AssertionError, match="copy_a_number")),
        (select_by_a_mask, pytest.raises(AssertionError, match="select_by_a_mask")),
        (answer_otherwise_there, pytest.raises(AssertionError)),
    ],
)
def test_a_planted_error_is_seen(error: Any, red: Any, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = decoding.child_scores
    monkeypatch.setattr(decoding, "child_scores", lambda *args, **kwargs: error(scores(*args, **kwargs)))
    with red:
        check(FIXED["beams"], cuda, monkeypatch)


def test_the_device_is_one() -> None:
    with PretendCuda() as cuda:
        there = torch.arange(4, device="cuda")
        assert torch.equal(values(there.flip(0)), torch.tensor([3, 2, 1, 0]))
        assert (there.device, there.cpu().device.type, there.is_cuda) == (CUDA, "cpu", True)
        assert (there + torch.tensor(1)).tolist() == [1, 2, 3, 4]  # a number, wherever it is
        assert [wait.why for wait in cuda.log.waits] == ["from the device: [4]", "tolist"]
        with pytest.raises(DeviceMismatch, match="aten.mul"):
            there * torch.arange(4)
        with pytest.raises(DeviceMismatch, match="aten.stack"):
            torch.stack([there[0], torch.tensor(1)])
        with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
            np.asarray(there)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(HostWaits, match=r"test_pretend_cuda\.py:\d+: _local_scalar_dense"):
            bool(there.any())
        view = there[1:]
        view += 1
        assert values(there).tolist() == [0, 2, 3, 4]
    with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert torch.cuda.get_sync_debug_mode.__module__ == "torch.cuda"


def test_numbers_of_the_host_join_the_queue(cuda: PretendCuda) -> None:
    found = to_device(np.arange(3), CUDA), to_device([4, 5], CUDA), to_device((), CUDA)
    assert values(found)[1].tolist() == [4, 5]
    assert [each.dtype for each in found] == [torch.int64] * 3
    assert not cuda.log.waits
    torch.from_numpy(np.arange(3)).to(CUDA)
    torch.from_numpy(np.arange(3)).to(CUDA, non_blocking=True)  # not from pinned memory
    assert len(cuda.log.waits) == 2


def test_what_does_not_change_is_moved_once(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    index = updated()
    mode = Mode(BEAMS | {"constraint_index": index.where(np.arange(len(index)) % 2 == 0)})
    model, inputs = enable(build("qwen3")).cuda(), on_device(prompts(2, 9))
    made: list[list[Any]] = []
    for _ in range(2):
        log = cuda.clear()
        ask(model, None, inputs, mode)
        made.append([one for one in log.made if one.line.path == "hf_gr/torch/transfers.py"])
    assert made[0]
    assert not made[1]


@pytest.mark.parametrize("beams", [{}, {"max_tree_nodes": 0, "num_beams": 4}], ids=["exhaustive", "beams"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_labels_are_ranked_alike(family: str, beams: dict[str, Any], cuda: PretendCuda) -> None:
    index = ConstraintIndex.from_labels(LABELS, tokenizer_of("bpe"))
    model, how = model_of(family), {"top_k": 3, **beams}
    expected = classify(model, tokenizer_of("bpe"), TEXTS, index, **how)
    found = classify(copy.deepcopy(model).cuda(), tokenizer_of("bpe"), TEXTS, index, **how)
    for ours, theirs in zip(found, expected, strict=True):
        assert [label for label, _ in ours] == [label for label, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], rel=1e-4)


def test_several_labels_and_transformers_own_loop(cuda: PretendCuda) -> None:
    index = ConstraintIndex.from_sequences([[3, 4, EOS], [3, 5, EOS], [6, EOS]], eos_token_id=EOS)
    inputs = prompts(2, 9, padded=True)
    model = build("qwen3")

    def ask_for_labels(model: Any, inputs: dict[str, Any]) -> Any:
        several = ConstraintLogitsProcessor(index, 9, separator=[7, 8])
        how = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
        return model.generate(**inputs, logits_processor=LogitsProcessorList([several]), **how)

    expected = ask_for_labels(model, inputs).tolist()
    assert values(ask_for_labels(copy.deepcopy(model).cuda(), on_device(inputs))).tolist() == expected


@pytest.mark.parametrize("how", [BEAMS, GREEDY], ids=str)
def test_a_call_without_a_cache_answers_alike(how: dict[str, Any], cuda: PretendCuda) -> None:
    model, inputs, mode = enable(build("qwen3")), prompts(2, 9, padded=True), Mode(how | {"use_cache": False})
    expected = ask(model, None, inputs, mode)
    assert_same(ask(copy.deepcopy(model).cuda(), None, on_device(inputs), mode), expected)


@pytest.mark.parametrize("mode", test_gpu.NEVER_WAITS)
def test_the_gpu_tests_are_rehearsed(mode: str, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    test_gpu.test_cuda_is_never_waited_for("qwen3", mode, monkeypatch)


def test_other_gpu_tests_are_rehearsed(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    test_gpu.test_cuda_equals_cpu("qwen3")
    test_gpu.test_cuda_samples_are_the_cpus(6)
    test_gpu.test_cuda_drafts_change_nothing("qwen3", "trie")
    test_gpu.test_cuda_a_planted_wait_is_seen(monkeypatch)
