# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Our attention inside transformers' models, whatever attention they were loaded with."""

from typing import Any

import numpy as np
import pytest
import torch
from families import DECODERS, LLAMA, PAD, build, prompts
from test_parity import allowed_by
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.internals import hands_on_arguments
from hf_gr.generation.torch import attention, layouts
from hf_gr.generation.torch.attention import ARGUMENT
from hf_gr.torch.tree import Tree
from hf_gr.torch.tree_attention import TreeAttention

SCORE_TOL = 1e-4  # fp32 sums of at most 4 log-probabilities
INDEX = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 24, size=(400, 4)))
OPTIONS = {"num_beams": 6, "num_return_sequences": 6, "return_dict_in_generate": True, "output_scores": True}
NAME = "two_dimensional"  # transformers loads a kernel for any name with "flash"


class LikeFlash:
    """Attention that takes no masks of four dimensions, as FlashAttention: the prompt's padding, windows, no tree."""

    def __init__(self) -> None:
        self.widths: list[int] = []  # query tokens of every call

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None or attention_mask.ndim == 2
        self.widths.append(query.shape[2])
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        behind = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2] - torch.arange(key.shape[2])
        seen = (behind >= 0) if sliding_window is None else (behind >= 0) & (behind < sliding_window)
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, -key.shape[2] :].bool() | (behind == 0)
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> LikeFlash:
    """Such an attention, registered by its name for this test."""
    made = LikeFlash()
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, made)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, flash_attention_mask)
    return made


def load(family: str, **kwargs: Any) -> Any:
    model = build(family, **kwargs)
    model.set_attn_implementation(NAME)
    return model


def best(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    return enable(model).generate(**inputs, constraint_index=INDEX, **OPTIONS, **kwargs)


def same(one: Any, other: Any) -> bool:
    torch.testing.assert_close(one.sequences_scores, other.sequences_scores, atol=SCORE_TOL, rtol=0)
    return one.sequences.tolist() == other.sequences.tolist()


def registered_sdpa() -> Any:
    plain = AttentionInterface()["sdpa"]
    return getattr(plain, ARGUMENT, plain)


@pytest.mark.parametrize("family", [name for name in DECODERS if hands_on_arguments(build(name))])
def test_any_registered_attention_keeps_the_tree(family: str, flash: LikeFlash) -> None:
    model, inputs = load(family), prompts(3, 9, padded=True)
    assert layouts.takes_tree(model)
    ours = best(model, inputs)
    assert set(flash.widths) == {9}, "it computes prompts, and no nodes"
    theirs = GenerationMixin.generate(
        model,
        **inputs,
        prefix_allowed_tokens_fn=allowed_by(INDEX, 9),
        max_new_tokens=4,
        pad_token_id=PAD,
        eos_token_id=None,
        **OPTIONS,
    )
    assert same(ours, theirs)


@pytest.mark.parametrize("drafting", ["trie", "head", "assistant"])
def test_drafts_attend_in_two_parts_too(drafting: str, flash: LikeFlash) -> None:
    """Nodes of several levels, and rows of different depths; the prompt cannot be read with them."""
    model, inputs = load("gemma3_text"), prompts(4, 9, padded=True)
    if drafting == "head":
        enable(model).add_draft_head(INDEX)
    expected = best(model, inputs)
    options = {"drafting": drafting, "verification": "strict"} if drafting != "assistant" else {}
    options |= {"assistant_model": build("llama", seed=1)} if drafting == "assistant" else {}
    assert same(best(model, inputs, **options), expected)
    assert all(width in (9, 9 + 4, 10, 1, 2, 3, 4) for width in flash.widths)  # prompts, with the head's placeholders


def test_other_models_and_other_calls_are_left_alone() -> None:
    model, other, inputs = build("qwen3"), build("qwen3", seed=1), prompts(2, 9)
    before = other(**inputs).logits
    best(model, inputs)
    wrapped = AttentionInterface()["sdpa"]
    assert hasattr(wrapped, ARGUMENT)
    best(other, inputs)
    assert AttentionInterface()["sdpa"] is wrapped, "wrapped once"
    assert torch.equal(other(**inputs).logits, before)
    assert torch.equal(model(**inputs).logits, build("qwen3")(**inputs).logits)


def test_a_model_that_swallows_the_argument_attends_by_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is not listed, whose module has an attention function of its own."""
    model, inputs, plain = build("stablelm"), prompts(2, 9, padded=True), registered_sdpa()
    expected, own = best(build("stablelm"), inputs), AttentionInterface()

    def swallows(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(ARGUMENT, None)
        return plain(*args, **kwargs)

    own["sdpa"] = swallows
    module = __import__(type(model).__module__, fromlist=["ALL_ATTENTION_FUNCTIONS"])
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("stablelm has attention of its own in this transformers")
    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", own)
    assert layouts.layout_of(model) != "parts"
    assert layouts.takes_tree(model)
    assert same(best(model, inputs), expected)


@pytest.mark.parametrize("given", [{"s_aux": torch.ones(1)}, {"position_bias": torch.ones(1)}, {"dropout": 0.5}])
def test_what_ours_does_not_know_is_no_silent_difference(given: dict[str, Any]) -> None:
    states = torch.ones(1, 1, 1, 4)
    with pytest.raises(TypeError, match="expected none of it"):
        attention._wrapped(lambda *_: None)(None, states, states, states, None, **{ARGUMENT: object()}, **given)


def test_a_users_function_before_the_registered_one_is_given_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ignore the argument, and nodes would see one another."""
    model, inputs, plain = build("qwen3"), prompts(2, 9), registered_sdpa()
    expected, called = best(model, inputs), []

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(args[1].shape[2])
        return plain(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    assert same(best(model, inputs), expected)
    assert set(called) == {9}, "it computes prompts, and no nodes"


def test_families_that_keep_to_masks(caplog: pytest.LogCaptureFixture) -> None:
    """Falcon takes no argument, and only masks know Phi-MoE's windows; each is said once."""
    config = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    config |= {"sliding_window": 16, "num_local_experts": 2}
    for family, given in (("falcon", None), ("phimoe", config)):
        model, inputs = build(family, config=given), prompts(2, 40)
        assert layouts.layout_of(model) != "parts"
        assert same(best(model, inputs), best(build(family, config=given, attn_implementation="eager"), inputs))
    said = [record.message for record in caplog.records if "attend by a mask" in record.message]
    assert len(said) == len(set(said))


def test_training_mode_keeps_its_dropout() -> None:
    model = build("qwen3").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    one, other = (best(model, prompts(2, 9)).sequences_scores for _ in range(2))
    assert not torch.equal(one, other)


def test_sdpa_has_no_softcap() -> None:
    """transformers before 5.23 loads Gemma 2 with it, and leaves the softcap out."""
    query, key, value = torch.randn(3, 1, 2, 4, 8).mul(9).unbind()
    tree = TreeAttention(Tree(torch.arange(4)[None, :, None], 4), torch.zeros((1, 0), dtype=torch.bool), 1)
    given = (None, query, key, value, None)
    expected = attention._wrapped(lambda *_: None)(*given, **{ARGUMENT: tree})[0]
    found = attention._wrapped(lambda *_: None, takes_softcap=False)(*given, **{ARGUMENT: tree}, softcap=2.0)[0]
    assert torch.equal(found, expected)
