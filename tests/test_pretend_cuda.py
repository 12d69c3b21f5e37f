# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Every mode on the pretend CUDA device: the CPU's answers, no mixed devices, and the host waits only where listed.

A decode of a fixed-length catalogue waits for nothing after its prefill. Before it the device has nothing to do, so
that a wait costs little there; after it the answer is wanted anyway.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import test_gpu
import torch
from families import EOS, PAD, build, prompts
from label_tokenizers import tokenizer_of
from pretend_cuda import CUDA, DeviceMismatch, HostWaits, Log, PretendCuda, on_device, values
from test_classify import LABELS, TEXTS, model_of
from test_gpu import INDEX, RAGGED, ROWS
from transformers import LogitsProcessorList

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, classify, enable
from hf_gr.generation.torch import mixin
from hf_gr.torch.ops import to_device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: pytest -m gpu")

SCORE_TOL = 1e-5  # fp32 sums of 4 log-probabilities; the device attends by another kernel
BEAMS = {"num_beams": 6, "num_return_sequences": 6}
GREEDY = {"num_beams": 1, "num_return_sequences": 1}
SAMPLED = {"do_sample": True, "top_k": 0, "seed": [3, 4]}


def updated() -> ConstraintIndex:
    index = ConstraintIndex.from_sequences(ROWS)
    index.add(ROWS[:20, ::-1].copy(), item_ids=range(1000, 1020))
    index.remove([3, 4])
    return index


# Where the host may wait. Before the prefill, of any call; transformers' own code prepares a call, and looks at masks.
BEFORE = {("hf_gr.catalogue.sequences", "to_host"), ("hf_gr.generation.torch.scorers", "make_scorer")}
THEIRS = "transformers."
LEAVES_EARLY = {("hf_gr.torch.decode", "_decide")}
SIZE_OF_DRAFT = {("hf_gr.torch.drafters", "_subtree")}
IS_ACCEPTED = {("hf_gr.torch.decode", "decide")}
LENGTH = {("hf_gr.torch.decode", "cropped")}
# A draft model has a prefill of its own, within the loop.
PREFILL_OF_DRAFT = {
    ("hf_gr.generation.torch.scorers", "make_scorer"),
    *(("transformers.masking_utils", name) for name in ("_ignore_causal_mask_sdpa", "fast_all")),
}


@dataclass(frozen=True)
class Mode:
    """A kind of call, and where it may wait: in the loop, and after it."""

    options: dict[str, Any]
    family: str = "qwen3"
    assistant: str | None = None
    in_decode: set[tuple[str, str]] = field(default_factory=set)
    after: set[tuple[str, str]] = field(default_factory=set)


MODES = {
    "beams": Mode(BEAMS),
    "greedy": Mode(GREEDY),
    "samples": Mode(SAMPLED | {"num_beams": 1, "num_return_sequences": 3}),
    "exclusions": Mode(BEAMS | {"exclude_items": [[0, 1, 2], [5]]}),
    "rules": Mode(BEAMS | {"constraint_index": test_gpu.VIEWS}),
    "updates": Mode(BEAMS | {"constraint_index": updated()}),
    "ragged, synced": Mode(BEAMS | {"constraint_index": RAGGED, "synced_gpus": True}, after=LENGTH),
    "warped samples": Mode(SAMPLED | BEAMS | {"top_k": 5, "temperature": 0.7}),
    "processed": Mode(BEAMS | {"renormalize_logits": True, "repetition_penalty": 1.3}),
    "logits of steps": Mode(BEAMS | {"output_logits": True}),
    "a head alone": Mode(BEAMS | {"drafting": "head"}),
    **{name: Mode(BEAMS, family=name) for name in ("gemma2", "gemma3_text", "bart", "t5")},
    "ragged, greedy": Mode(GREEDY | {"constraint_index": RAGGED}, in_decode=LEAVES_EARLY, after=LENGTH),
    "trie": Mode(
        BEAMS | {"drafting": "trie", "draft_token_budget": 512, "constraint_index": RAGGED},
        in_decode=SIZE_OF_DRAFT | LEAVES_EARLY,
        after=LENGTH,
    ),
    "assistant": Mode(BEAMS, assistant="llama", in_decode=SIZE_OF_DRAFT | IS_ACCEPTED | PREFILL_OF_DRAFT),
    "relaxed": Mode(
        BEAMS | SAMPLED | {"verification": "relaxed"}, assistant="llama", in_decode=SIZE_OF_DRAFT | PREFILL_OF_DRAFT
    ),
    "head, verified": Mode(
        BEAMS | {"drafting": "head", "verification": "strict"}, in_decode=SIZE_OF_DRAFT | IS_ACCEPTED
    ),
    "auto": Mode(BEAMS | {"drafting": "auto"}, in_decode=SIZE_OF_DRAFT),
}


@pytest.fixture
def cuda() -> Iterator[PretendCuda]:
    with PretendCuda() as cuda:
        yield cuda


def ask(model: Any, assistant: Any, inputs: dict[str, Any], mode: Mode) -> Any:
    options = {"constraint_index": INDEX, "return_dict_in_generate": True, "pad_token_id": PAD} | mode.options
    options |= {} if options.get("output_logits") else {"output_scores": True, "_step_scores": False}
    return model.generate(**inputs, **options, **({} if assistant is None else {"assistant_model": assistant}))


def apart(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count within the prefill, in the loop, and after it under these names."""
    decode = mixin.decode

    def counted(scorer: Any, *args: Any) -> Any:
        begin = scorer.begin

        def prefill(levels: Any = ()) -> Any:
            with cuda.within("prefill"):
                return begin(levels)

        scorer.begin = prefill
        with cuda.within("decode"):
            decoded = decode(scorer, *args)
        cuda.region = "after"
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


def check(mode: Mode, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> Log:
    """The CPU's answer and the device's, whose second call finds the catalogue there; waits only where it may."""
    inputs = prompts(2, 9, padded=True)
    model, assistant = enable(build(mode.family)), None if mode.assistant is None else build(mode.assistant, seed=1)
    if mode.options.get("drafting") == "head":
        torch.manual_seed(0)
        model.add_draft_head(INDEX)
    expected = ask(model, assistant, inputs, mode)
    model, assistant = model.cuda(), None if assistant is None else assistant.cuda()
    inputs = on_device(inputs)
    ask(model, assistant, inputs, mode)
    apart(cuda, monkeypatch)
    log = cuda.clear()
    found = ask(model, assistant, inputs, mode)
    assert_same(found, expected)
    waits = {(wait.region, wait.line.module, wait.line.function) for wait in log.waits}
    allowed = {None: BEFORE, "prefill": mode.in_decode, "decode": mode.in_decode, "after": mode.after}
    wrong = {
        (region, *place)
        for region, *place in waits
        if tuple(place) not in allowed[region] and not (region in (None, "prefill") and place[0].startswith(THEIRS))
    }
    assert not wrong
    return log


@pytest.mark.parametrize("name", MODES)
def test_a_device_answers_as_a_cpu_and_is_waited_for_only_where_listed(
    name: str, cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = check(MODES[name], cuda, monkeypatch)
    assert log.operations["decode"] > 0
    assert not {made.dtype for made in log.made} & {torch.float64, torch.complex64}  # a device is slow in these


def test_the_device_is_one() -> None:
    with PretendCuda() as cuda:
        there = torch.arange(4, device="cuda")
        assert torch.equal(values(there.flip(0)), torch.tensor([3, 2, 1, 0]))
        assert (there.device, there.cpu().device.type, there.is_cuda) == (CUDA, "cpu", True)
        assert (there + torch.tensor(1)).tolist() == [1, 2, 3, 4]  # a number, wherever it is
        assert [wait.why for wait in cuda.log.waits] == ["from the device: [4]", "tolist"]
        for mixed in (lambda: there * torch.arange(4), lambda: torch.stack([there[0], torch.tensor(1)])):
            with pytest.raises(DeviceMismatch, match="aten.(mul|stack)"):
                mixed()
        with pytest.raises(TypeError, match="cuda:0 device type tensor to numpy"):
            np.asarray(there)
        cuda.clear()
        found = to_device(np.arange(3), CUDA), to_device([4, 5], CUDA), to_device((), CUDA)
        assert [values(each).tolist() for each in found] == [[0, 1, 2], [4, 5], []]
        assert not cuda.log.waits, "numbers of the host join the queue"
        torch.from_numpy(np.arange(3)).to(CUDA, non_blocking=True)  # not from pinned memory
        assert len(cuda.log.waits) == 1
        torch.cuda.set_sync_debug_mode("error")
        for wait in (
            lambda: bool(there.any()),
            lambda: there[there > 1],
            lambda: there.masked_fill(there > 1, there[0]),
        ):
            with pytest.raises(HostWaits, match=r"test_pretend_cuda:\d+: "):
                wait()
        view = there[1:]
        view += 1
        assert values(there).tolist() == [0, 2, 3, 4]
    with pytest.raises((NotImplementedError, AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert torch.cuda.get_sync_debug_mode.__module__ == "torch.cuda"


def test_what_does_not_change_is_moved_once(cuda: PretendCuda) -> None:
    index = updated()
    mode = Mode(BEAMS | {"constraint_index": index.where(np.arange(len(index)) % 2 == 0)})
    model, inputs = enable(build("qwen3")).cuda(), on_device(prompts(2, 9))
    made: list[list[Any]] = []
    for _ in range(2):
        log = cuda.clear()
        ask(model, None, inputs, mode)
        made.append([one for one in log.made if one.line.function == "to_device"])
    assert made[0]
    assert not made[1]


@pytest.mark.parametrize("how", [{"score": "pmi"}, {"max_tree_nodes": 9}], ids=["exact", "bounded"])
def test_labels_are_ranked_alike(how: dict[str, Any], cuda: PretendCuda) -> None:
    index = ConstraintIndex.from_labels(LABELS, tokenizer_of("bpe"))
    model = model_of("llama")
    expected = classify(model, tokenizer_of("bpe"), TEXTS, index, top_k=3, **how)
    found = classify(copy.deepcopy(model).cuda(), tokenizer_of("bpe"), TEXTS, index, top_k=3, **how)
    for ours, theirs in zip(found, expected, strict=True):
        assert [label for label, _ in ours] == [label for label, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], rel=1e-4)


def test_several_labels_and_transformers_own_loop(cuda: PretendCuda) -> None:
    index = ConstraintIndex.from_sequences([[3, 4, EOS], [3, 5, EOS], [6, EOS]], eos_token_id=EOS)
    inputs, model = prompts(2, 9, padded=True), enable(build("qwen3"))
    on_cuda, there = copy.deepcopy(model).cuda(), on_device(inputs)
    for how in (BEAMS, GREEDY):
        mode = Mode(how | {"use_cache": False})
        assert_same(ask(on_cuda, None, there, mode), ask(model, None, inputs, mode))

    def ask_for_labels(model: Any, inputs: dict[str, Any]) -> Any:
        several = ConstraintLogitsProcessor(index, 9, separator=[7, 8])
        how = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
        return model.generate(**inputs, logits_processor=LogitsProcessorList([several]), **how)

    expected = ask_for_labels(model, inputs).tolist()
    assert values(ask_for_labels(on_cuda, there)).tolist() == expected


def test_the_gpu_tests_are_rehearsed(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("beams", "samples"):
        with monkeypatch.context() as patch:
            test_gpu.test_cuda_is_never_waited_for("qwen3", mode, patch)
    test_gpu.test_cuda_equals_cpu("qwen3")
    for options in list(test_gpu.EXACT.values())[3::3]:
        with monkeypatch.context() as patch:
            test_gpu.test_cuda_proves_as_the_cpu("qwen3", options, patch)
    test_gpu.test_cuda_drafts_change_nothing("qwen3", "trie")
    # Programs that would be graphs are filled and run on the device.
    test_gpu.test_cuda_graphs_equal_eager("gemma3_text", BEAMS, RAGGED, test_gpu.watched(monkeypatch))
