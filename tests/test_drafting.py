# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts through `generate`: any model, any draft, any catalogue; results are those of plain beam search."""

import copy
import functools
import itertools
import logging
from functools import cache
from typing import Any

import numpy as np
import peft
import pytest
import torch
from families import DECODERS, DETAILS, ENCODER_DECODERS, EOS, PAD, build, prompts, shared
from transformers import SynthIDTextWatermarkingConfig

from hf_gr import ConstraintIndex, enable
from hf_gr.generation import messages

SCORE_TOL = 1e-4  # fp32 sums of at most 8 log-probabilities, whose forwards differ in the order of additions
TIE_TOL = 1e-5  # what rounding explains: sequences whose scores differ by less may come in either order
BEAMS = {"num_beams": 5, "num_return_sequences": 5}
LONG_PROMPT = 9  # longer than the sliding windows


def assert_same(found: Any, expected: Any) -> None:
    """Sequences in order, with their scores; within a tie, in any order."""
    assert found.sequences.shape == expected.sequences.shape
    if getattr(expected, "sequences_scores", None) is None:
        assert found.sequences.tolist() == expected.sequences.tolist()
        return
    scores = expected.sequences_scores
    torch.testing.assert_close(found.sequences_scores, scores, atol=SCORE_TOL, rtol=0)
    for row in (found.sequences != expected.sequences).any(-1).nonzero()[:, 0].tolist():
        neighbours = [other for other in (row - 1, row + 1) if 0 <= other < len(scores)]
        gap = min(abs(float(scores[row] - scores[other])) for other in neighbours)
        assert gap < TIE_TOL, f"row {row}: {found.sequences[row].tolist()}, not {expected.sequences[row].tolist()}"


def inverted(model: Any) -> Any:
    """The same weights, but what is likely is unlikely: no draft could be worse."""
    family = type(model)

    @functools.wraps(family.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = family.forward(self, *args, **kwargs)
        outputs.logits = -outputs.logits
        return outputs

    adversary = copy.copy(model)
    adversary.__class__ = type(family.__name__, (family,), {"forward": forward})
    return adversary


@cache
def model_of(family: str) -> Any:
    return enable(build(family))


@cache
def small_llama() -> Any:
    return build("llama", seed=5, config={"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 4})


def draft_of(target: Any) -> Any:
    return build("t5", seed=5) if target.config.is_encoder_decoder else small_llama()


@cache
def rows_of(kind: str) -> tuple[list[list[int]], int | None]:
    rng = np.random.default_rng(0)
    if kind == "full":  # all sequences of 5 tokens: no level is forced, and no level is small
        return [list(row) for row in itertools.product(range(3, 8), repeat=5)], None
    if kind == "ragged":
        return [rng.integers(3, 24, size=rng.integers(1, 6)).tolist() for _ in range(900)], EOS
    shape, high = {"dense": ((600, 4), 9), "fixed": ((700, 5), 24), "sparse": ((60, 6), 50)}[kind]
    return rng.integers(3, high, size=shape).tolist(), None


@cache
def index_of(kind: str) -> ConstraintIndex:
    rows, eos = rows_of(kind)
    return ConstraintIndex.from_sequences(rows, eos_token_id=eos)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_drafts_change_nothing_in_any_family(family: str) -> None:
    target, inputs = enable(shared(family)), prompts(2, LONG_PROMPT, padded=True)
    settings = {"constraint_index": index_of("ragged"), "pad_token_id": PAD, **BEAMS, **DETAILS}
    plain = target.generate(**inputs, **settings)
    wrong = {"assistant_model": inverted(target), "draft_token_budget": 1, "num_assistant_tokens": 3}
    off = target.generate(**inputs, **settings, drafting="trie", draft_token_budget=0)
    assert_same(off, plain)
    assert off.speculation.target_forwards == plain.speculation.target_forwards
    for draft in ({"drafting": "trie", "draft_token_budget": 60}, wrong):
        drafted = target.generate(**inputs, **settings, **draft)
        assert_same(drafted, plain)
        assert drafted.speculation.drafted_steps.any()


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("trie", {"stopping_criteria": [lambda tokens, scores, **kwargs: tokens[:, -1] == 7]}),
        ("small", {"bad_words_ids": [[5], [7, 9]], "no_repeat_ngram_size": 2}),
        ("small", {"output_logits": True}),
        ("trie", {"prefix_allowed_tokens_fn": lambda batch, tokens: list(range(3, 20))}),
        ("small", {"prefill_chunk_size": 4}),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_drafts_go_with_all_that_plain_search_takes(kind: str, extra: dict[str, Any]) -> None:
    target, inputs = model_of("qwen3"), prompts(2, LONG_PROMPT)
    draft = {"drafting": "trie"} if kind == "trie" else {"assistant_model": draft_of(target)}
    options = {"constraint_index": index_of("fixed"), "pad_token_id": PAD, **BEAMS, **DETAILS, **extra}
    plain = target.generate(**inputs, **options)
    drafted = target.generate(**inputs, **options, **draft, draft_token_budget=40)
    assert_same(drafted, plain)
    assert bool(drafted.speculation.drafted_steps.any())
    for name in ("scores", "logits"):
        mine, other = getattr(drafted, name), getattr(plain, name)
        assert (mine is None) == (other is None)
        for step, theirs in zip(mine or (), other or (), strict=True):
            torch.testing.assert_close(step, theirs, atol=SCORE_TOL, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_nodes_in_the_prompts_forward_follow_positions_of_the_call(family: str) -> None:
    target, inputs = model_of(family), prompts(2, LONG_PROMPT)
    options = {"constraint_index": index_of("dense"), **BEAMS, **DETAILS}
    options["position_ids"] = 3 + 2 * torch.arange(LONG_PROMPT).expand(2, -1)
    plain = target.generate(**inputs, **options)
    drafted = target.generate(**inputs, **options, drafting="trie", draft_token_budget=200)
    assert_same(drafted, plain)
    assert drafted.speculation.target_forwards < plain.speculation.target_forwards - 1, "nothing was read so"


@pytest.mark.parametrize(
    "keeps_state",
    [{"guidance_scale": 1.7}, {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)}],
    ids=lambda extra: next(iter(extra)),
)
def test_processors_that_keep_state_see_every_level_once(
    keeps_state: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    target, inputs, index = model_of("qwen3"), prompts(2, LONG_PROMPT), index_of("fixed")
    options = {"constraint_index": [index, index.where(range(6))], "num_beams": 4, "num_return_sequences": 4}
    options |= {"pad_token_id": PAD, "do_sample": True, "seed": 5, **DETAILS, **keeps_state}
    plain = target.generate(**inputs, **options)
    drafted = target.generate(**inputs, **options, drafting="trie", draft_token_budget=30)
    assert_same(drafted, plain)
    assert "keeps state between levels: decoding without a draft" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "t5"])
def test_rows_go_on_by_themselves(family: str) -> None:
    # Budgets that some rows' subtrees fit and others' do not, and a draft that is right for some.
    target, inputs, index = model_of(family), prompts(6, LONG_PROMPT), index_of("fixed")
    views = [index.where(range(number)) for number in (700, 6, 60, 700, 2, 200)]
    options = {"num_beams": 4, "num_return_sequences": 4, "pad_token_id": PAD, **DETAILS}
    plain = target.generate(**inputs, **options, constraint_index=views)
    for draft in (
        {"drafting": "trie", "draft_token_budget": 16},
        {"assistant_model": draft_of(target), "draft_token_budget": 1, "num_draft_beams": 16},
    ):
        out = target.generate(**inputs, **options, **draft, constraint_index=views)
        assert_same(out, plain)
        rows = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(6)]
        alone = [
            target.generate(**one, **options, **draft, constraint_index=view)
            for one, view in zip(rows, views, strict=True)
        ]
        forwards = [one.speculation.target_forwards for one in alone]
        assert out.speculation.target_forwards == max(forwards) > min(forwards)
        steps = [one.speculation.accepted_steps.tolist() for one in alone]
        assert [[number] for number in out.speculation.accepted_steps.tolist()] == steps


def test_a_catalogue_like_beauty_takes_two_forwards() -> None:
    """4 codes of 256, 12,000 items, branching of 91, 72, 1.7 and 1.08 as on the real one."""
    rng = np.random.default_rng(0)
    pairs = np.stack(np.divmod(rng.choice(91 * 256, size=6539, replace=False), 256), axis=1)
    third = np.unique(
        np.concatenate([np.concatenate([pairs, pairs[rng.choice(6539, 4600)]]), rng.integers(0, 256, (11_139, 1))], 1),
        axis=0,
    )
    rows = np.concatenate([third, third[rng.choice(len(third), 900)]])
    rows = np.concatenate([rows, rng.integers(0, 256, (len(rows), 1))], axis=1) + 1 + 256 * np.arange(4)
    index = ConstraintIndex.from_sequences(rows)
    model = enable(build("qwen3", config={"vocab_size": index.max_token_id + 1}))
    options = {**prompts(1, 7), "constraint_index": index, "num_beams": 20, "num_return_sequences": 20, **DETAILS}
    plain, drafted = model.generate(**options), model.generate(**options, drafting="trie")
    assert_same(drafted, plain)
    assert (plain.speculation.target_forwards, drafted.speculation.target_forwards) == (3, 1)
    assert plain.speculation.draft_forwards == plain.speculation.drafted_nodes.sum() == 0


def test_relaxed_is_not_cut_to_fifty_candidates() -> None:
    index = ConstraintIndex.from_sequences([[token] for token in range(3, 63)])
    options = {"constraint_index": index, "num_beams": 60, "num_return_sequences": 60, "verification": "relaxed"}
    inputs = prompts(1, 6)
    found = index.items(model_of("qwen3").generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :])
    assert sorted(found) == [[item] for item in range(60)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_an_adapted_draft_takes_the_layout_of_its_base() -> None:
    target, inputs = model_of("qwen3"), prompts(3, LONG_PROMPT, padded=True)
    adapted = peft.get_peft_model(build("llama", seed=1), peft.LoraConfig(task_type="CAUSAL_LM", r=2)).eval()
    options = {"constraint_index": index_of("fixed"), "num_beams": 4, "num_return_sequences": 4, **DETAILS}
    out = target.generate(**inputs, **options, assistant_model=adapted, draft_token_budget=1)
    base = target.generate(**inputs, **options, assistant_model=build("llama", seed=1), draft_token_budget=1)
    assert_same(out, base)  # a new adapter changes nothing
    assert out.speculation.draft_forwards == base.speculation.draft_forwards
    assert out.speculation.accepted_steps.tolist() == base.speculation.accepted_steps.tolist()


def test_a_draft_model_needs_tokens() -> None:
    target, inputs = model_of("qwen3"), prompts(2, 6)
    embeds = target.get_input_embeddings()(inputs["input_ids"]).detach()
    options = {"constraint_index": index_of("fixed"), "num_beams": 4, **DETAILS}
    with pytest.raises(ValueError, match="the prompt is not given as input_ids"):
        target.generate(inputs_embeds=embeds, **options, assistant_model=small_llama())
    drafted = target.generate(inputs_embeds=embeds, **options, drafting="trie")
    assert_same(drafted, target.generate(inputs_embeds=embeds, **options))
    assert drafted.speculation.target_forwards < index_of("fixed").max_length - 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "bart"])
def test_prompts_longer_than_the_positions_of_a_draft_model_are_refused(family: str) -> None:
    # A decoder has 6 tokens behind 3 of padding, and reads all of a sequence but its last two; an encoder has 9.
    target, inputs = model_of(family), prompts(2, LONG_PROMPT, padded=family != "bart")
    inputs = {name: value[:1] for name, value in inputs.items()}
    options = {"constraint_index": index_of("fixed"), "num_beams": 4, "draft_token_budget": 1, **DETAILS}
    name = "max_position_embeddings" if family in ("opt", "bart") else "n_positions"
    fits, is_short = (build(family, config={name: limit}) for limit in (9, 8))
    assert target.generate(**inputs, **options, assistant_model=fits).speculation.draft_forwards
    with pytest.raises(ValueError, match="assistant_model has 8 positions, expected 9 for this prompt"):
        target.generate(**inputs, **options, assistant_model=is_short)


@pytest.mark.parametrize("length", [1, 2])
def test_short_catalogues_need_no_forward_after_the_prompts(length: int) -> None:
    target, inputs = model_of("qwen3"), prompts(2, 6)
    index = ConstraintIndex.from_sequences(np.random.default_rng(0).integers(3, 20, size=(60, length)))
    for draft in ({"drafting": "trie"}, {"assistant_model": small_llama(), "num_draft_beams": 20}):
        out = target.generate(**inputs, constraint_index=index, num_beams=4, **draft, **DETAILS)
        assert_same(out, target.generate(**inputs, constraint_index=index, num_beams=4, **DETAILS))
        assert out.speculation.target_forwards == 0
        assert out.speculation.drafted_steps.tolist() == [length - 1] * 2


@pytest.mark.parametrize("kind", ["trie", "small"])
@pytest.mark.parametrize("asked", [{"use_cache": False}, {"synced_gpus": True}, {"family": "bloom"}], ids=str)
def test_where_nothing_can_be_drafted_that_is_said_once(
    kind: str, asked: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    given = dict(asked)
    target, inputs = model_of(given.pop("family", "qwen3")), prompts(2, 6)
    options = {"constraint_index": index_of("fixed"), **BEAMS, **DETAILS}
    draft = {"drafting": "trie"} if kind == "trie" else {"assistant_model": small_llama()}
    plain = target.generate(**inputs, **options)
    with caplog.at_level(logging.WARNING, logger="hf_gr.generation"):
        for _ in range(2):
            assert_same(target.generate(**inputs, **options, **draft, **given), plain)
    assert sum("without a draft" in record.message for record in caplog.records) == 1
