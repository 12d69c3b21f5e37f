# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers with kept keys against those without: families, drafts, rules, eviction, threads, new weights."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import PAD, VOCABULARY, build, shared
from peft import LoraConfig, get_peft_model

from hf_gr import ConstraintIndex, enable
from hf_gr.answering import kept, kept_keys
from hf_gr.answering.decoding import Answer, Decoder
from hf_gr.answering.keeping import keep_computed
from hf_gr.answering.kept import Kept, fits_options
from hf_gr.answering.kept_encodings import KeptEncodings
from hf_gr.answering.kept_keys import KeptKeys
from hf_gr.answering.requests import Request
from hf_gr.generation import messages

SCORE_TOL = 1e-4  # fp32: sums of 3 log-probabilities after prompts in pieces, in batches of other sizes and paddings
DECODERS = sorted({**families.DECODERS, "xglm": {}})
FORGETFUL = ("mamba", "lfm2")  # keep a state of all that they have read
draw = np.random.default_rng(0)
ROWS = np.unique(draw.integers(3, VOCABULARY, size=(120, 3)), axis=0)
INDEX = ConstraintIndex.from_sequences(draw.permutation(ROWS), item_ids=range(100, 100 + len(ROWS)))
INSTRUCTION = draw.integers(3, VOCABULARY, size=9).tolist()


@pytest.fixture(autouse=True)
def _says_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SAID", set())


def keep_all(model: Any, **options: Any) -> Any:
    """A store that uses even a single known token."""
    keys = keep_computed(model, least_tokens=1, **options)
    assert keys is not None
    return keys


def make_decoder(model: Any, keys: Kept | None = None, **options: Any) -> Decoder:
    return Decoder(model, INDEX, top_k=5, num_beams=6, token_budget=10**6, options=options, keys=keys)


def items_of(number: int) -> list[int]:
    """The tokens of an item."""
    return ROWS[number % len(ROWS)].tolist()


def visits(num_batches: int, *, seed: int = 0, longest: int = 8) -> Iterator[list[Request]]:
    """Batches of users, some of whom return with a longer history, some with rules and exclusions of their own."""
    random = np.random.default_rng(seed)
    histories: list[list[int]] = [[int(random.integers(len(ROWS)))] for _ in range(6)]
    for _ in range(num_batches):
        batch = []
        for user in random.permutation(len(histories))[: random.integers(1, 5)].tolist():
            grown = random.integers(0, 3)  # none: the same prompt again
            histories[user] = [*histories[user], *random.integers(0, len(ROWS), size=grown).tolist()][-longest:]
            tokens = INSTRUCTION + [token for item in histories[user] for token in items_of(item)]
            exclude = tuple(int(one) for one in random.integers(100, 100 + len(ROWS), size=3))
            allowed = tuple(range(100, 100 + len(ROWS), 2)) if user % 3 == 0 else None
            batch.append(Request(user, tokens, exclude=exclude, allowed=allowed))
        yield batch


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.items == theirs.items
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=SCORE_TOL, rtol=0)


def assert_as_without(model: Any, keys: Kept, *, num_batches: int = 6, **options: Any) -> int:
    """The tokens that were not computed again."""
    plain, keeping_ = make_decoder(model, **options), make_decoder(model, keys, **options)
    num_kept, begin = 0, keys.begin

    def counted(batch: Any) -> Any:
        nonlocal num_kept
        reuse = begin(batch)
        num_kept += reuse.num_kept_tokens
        return reuse

    keys.begin = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        for batch in visits(num_batches):
            assert_same(keeping_.answer(batch), plain.answer(batch))
            if isinstance(keys, KeptKeys):
                assert all(keys.num_missing(request.tokens) == 1 for request in batch)
    finally:
        del keys.begin
    return num_kept


@pytest.mark.parametrize("family", DECODERS)
def test_answers_are_those_without(family: str) -> None:
    model = enable(shared(family))
    keys = keep_all(model)
    assert isinstance(keys, KeptKeys)
    assert assert_as_without(model, keys) > 9 * 3  # the instruction, and more


@pytest.mark.parametrize("family", ["t5", "bart", "m2m_100"])
def test_an_encoder_reads_a_prompt_once(family: str) -> None:
    model = enable(shared(family))
    keys = keep_computed(model)
    assert isinstance(keys, KeptEncodings)
    num_read, encoder = 0, model.get_encoder()

    def count(module: Any, arguments: Any, given: dict[str, Any], output: Any) -> None:
        nonlocal num_read
        num_read += len(output[0])

    plain = [make_decoder(model).answer(batch) for batch in visits(8)]
    with encoder.register_forward_hook(count, with_kwargs=True):
        for batch, expected in zip(visits(8), plain, strict=True):
            assert_same(make_decoder(model, keys).answer(batch), expected)
            assert not any(keys.num_missing(request.tokens) for request in batch)
    prompts = [tuple(request.tokens) for batch in visits(8) for request in batch]
    assert num_read == len(set(prompts)) < len(prompts)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_windows_that_have_passed_tokens_lose_nothing(family: str) -> None:
    assert families.DECODERS[family]["sliding_window"] == 3
    model = enable(shared(family))
    keys = keep_all(model)
    assert assert_as_without(model, keys, num_batches=8) > 100


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "options",
    [
        {"drafting": "trie"},
        {"drafting": "head", "verification": "strict"},
        {"drafting": "head"},
        {"drafting": "auto"},
        {"do_sample": True, "seed": 7},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"renormalize_logits": True, "prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_options_of_generate_change_nothing(options: dict[str, Any], attention: str) -> None:
    model = enable(build("qwen3", attn_implementation=attention))
    torch.manual_seed(0)
    model.add_draft_head(INDEX)
    keys = keep_all(model)
    assert assert_as_without(model, keys, **options) > 0


def test_a_draft_model_changes_nothing() -> None:
    model = enable(shared("llama"))
    keys = keep_all(model)
    assert assert_as_without(model, keys, assistant_model=build("llama", seed=1)) > 0


def test_a_wrong_token_of_a_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(shared("qwen3"))
    keys = keep_all(model)
    joined = kept_keys._joined

    def wrong(*arguments: Any) -> Any:
        planes = joined(*arguments)
        planes[0][:, :, :, -1] = planes[0][:, :, :, -2]
        return planes

    monkeypatch.setattr(kept_keys, "_joined", wrong)
    with pytest.raises(AssertionError):
        assert_as_without(model, keys)


def test_one_instruction_is_read_once_for_all() -> None:
    model = enable(shared("qwen3"))
    keys = keep_all(model)
    assert isinstance(keys, KeptKeys)
    first, second = (INSTRUCTION + items_of(number) for number in (0, 1))
    assert (ROWS[0] == ROWS[1]).tolist()[:2] == [True, False]
    assert keys.num_missing(first) == len(first)
    make_decoder(model, keys).answer([Request(0, first)])
    assert keys.num_missing(second) == 2  # they share the first token of their items, too
    reuse = keys.begin([second, INSTRUCTION + [*items_of(5), 3, 4]])
    # The second has five unknown tokens, which takes the last one of the first's instruction along.
    assert reuse.arguments["past_key_values"].get_seq_length() == len(INSTRUCTION)
    assert reuse.num_kept_tokens == len(INSTRUCTION) + len(second) - 5
    assert keys.num_bytes == 2 * 2 * 2 * 8 * 4 * len(first)  # layers, keys and values, heads, width, bytes, tokens


def test_few_known_tokens_are_read_again() -> None:
    model = enable(shared("qwen3"))
    keys: Any = keep_computed(model, least_tokens=10)
    make_decoder(model, keys).answer([Request(0, INSTRUCTION + items_of(0))])
    assert keys.num_missing(INSTRUCTION + items_of(50)) == 12
    assert keys.begin([INSTRUCTION + items_of(50)]).arguments == {}
    assert keys.num_missing(INSTRUCTION + items_of(0) + items_of(1)) == 3


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_what_is_kept_stays_within_its_bytes(family: str) -> None:
    model = enable(shared(family))
    num_bytes = 40 * 2 * 2 * 2 * 8 * 4  # 40 tokens of qwen3
    keys = keep_all(model, num_bytes=num_bytes)
    plain, keeping_ = make_decoder(model), make_decoder(model, keys)
    held = []
    for batch in visits(12):
        assert_same(keeping_.answer(batch), plain.answer(batch))
        held.append(keys.num_bytes)
    assert 0 < max(held) <= num_bytes
    assert any(keys.num_missing(request.tokens) > 1 for batch in visits(12) for request in batch)


def test_of_a_prompt_that_exceeds_the_store_the_first_tokens_are_kept() -> None:
    model = enable(shared("qwen3"))
    keys = keep_all(model, num_bytes=10 * 2 * 2 * 2 * 8 * 4)
    for last in (items_of(2), items_of(30)):
        request = Request(0, INSTRUCTION + items_of(1) + last)
        assert_same(make_decoder(model, keys).answer([request]), make_decoder(model).answer([request]))
        assert keys.num_missing(request.tokens) == len(request.tokens) - 10
        assert keys.num_bytes == keys.capacity


@pytest.mark.parametrize("family", ["qwen3", "t5"])
def test_threads_share_what_is_kept(family: str) -> None:
    model = enable(shared(family))
    keys = keep_all(model, num_bytes=2**17)
    given = [batch for seed in range(3) for batch in visits(6, seed=seed)]
    expected = [make_decoder(model).answer(batch) for batch in given]
    keeping_ = make_decoder(model, keys)
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for number in range(len(given)):
                at = (start + number) % len(given)
                assert_same(keeping_.answer(given[at]), expected[at])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_catalogues_and_numbers_of_beams_share_what_is_kept() -> None:
    model = enable(shared("qwen3"))
    keys = keep_computed(model)
    other = ConstraintIndex.from_sequences(ROWS[::2], item_ids=[f"item-{number}" for number in range(len(ROWS[::2]))])
    requests = [Request(0, INSTRUCTION + items_of(1) + items_of(2) + items_of(number)) for number in range(4)]
    for request, index, num_beams in zip(requests, (INDEX, other, INDEX, other), (2, 9, 5, 6), strict=True):
        decoder = dataclasses.replace(make_decoder(model), index=index, num_beams=num_beams, top_k=min(num_beams, 5))
        assert_same(dataclasses.replace(decoder, keys=keys).answer([request]), decoder.answer([request]))
    assert keys is not None
    assert keys.num_missing(requests[0].tokens) == 1


# Weights that change


def load_others(model: Any) -> None:
    model.load_state_dict(build("qwen3", seed=1).state_dict())


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    model.zero_grad()


def change_dtype(model: Any) -> None:
    model.to(torch.float32 if model.dtype == torch.float64 else torch.float64)


def write_to_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


@pytest.mark.parametrize("change", [load_others, train_a_step, change_dtype])
def test_other_weights_forget_everything(change: Any) -> None:
    model = enable(build("qwen3"))
    keys = keep_all(model)
    for _ in range(2):
        assert_as_without(model, keys, num_batches=3)
        change(model)
    reuse = keys.begin([next(visits(1))[0].tokens])
    assert (reuse.arguments, keys.num_bytes) == ({}, 0)


def test_weights_that_are_written_to_in_place_need_a_word() -> None:
    model = enable(build("qwen3"))
    keys = keep_all(model)
    assert_as_without(model, keys, num_batches=3)
    write_to_data(model)
    with pytest.raises(AssertionError):
        assert_as_without(model, keys, num_batches=3)
    keys.clear()
    assert keys.num_bytes == 0
    assert_as_without(model, keys, num_batches=3)


def test_what_a_call_computed_before_a_change_is_not_kept() -> None:
    model = enable(build("qwen3"))
    for change in (load_others, None):
        keys = keep_all(model)
        tokens = [INSTRUCTION + items_of(1)]
        reuse = keys.begin(tokens)
        out = model.generate(torch.tensor(tokens), constraint_index=INDEX, num_beams=2, return_dict_in_generate=True)
        keys.clear() if change is None else change(model)
        keys.begin([[3, 4]])  # another thread has noticed
        keys.keep(tokens, reuse, out)
        assert keys.num_bytes == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_adapters_that_come_and_go_forget_everything() -> None:
    adapted = get_peft_model(build("qwen3"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.add_adapter("other", LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    model = enable(adapted)
    keys = keep_all(model)
    assert_as_without(model, keys, num_batches=3)
    with adapted.disable_adapter():
        assert_as_without(model, keys, num_batches=3)
    adapted.set_adapter("other", inference_mode=True)
    assert_as_without(model, keys, num_batches=3)
    adapted.set_adapter("default", inference_mode=True)
    assert_as_without(model, keys, num_batches=3)


# Where nothing can be kept


@pytest.mark.parametrize("family", FORGETFUL)
def test_recurrent_states_are_not_kept(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = enable(build(family))
    with caplog.at_level(logging.WARNING):
        assert keep_computed(model) is None
        assert keep_computed(model) is None
    assert [record.getMessage().split(" has layers of")[0] for record in caplog.records] == [type(model).__name__]


def test_rotary_angles_that_depend_on_the_length_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    assert keep_computed(enable(build("llama", config={"rope_parameters": rope}))) is None
    assert "depend on the length of the prompt" in caplog.text


def test_a_model_whose_tokens_see_later_ones_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    model = enable(build("gemma3_text", config={"use_bidirectional_attention": True, "sliding_window": 64}))
    assert keep_computed(model) is None
    assert "computes other keys if later tokens are others" in caplog.text


def test_no_memory_is_no_store() -> None:
    assert keep_computed(enable(shared("qwen3")), num_bytes=0) is None


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"token_type_ids": torch.ones(1, 3)},
        {"generation_config": kept.GenerationConfig(use_cache=False)},
    ],
    ids=str,
)
def test_options_of_another_loop_or_another_prompt_keep_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert not fits_options(options)
    assert "every prompt is computed from its first token on" in caplog.text
    assert fits_options({"do_sample": True, "drafting": "trie", "assistant_model": None, "length_penalty": 0.0})


def test_such_options_answer_as_without() -> None:
    model = enable(shared("qwen3"))
    keys = keep_all(model)
    assert assert_as_without_keeping(model, keys, use_cache=False) == 0


def assert_as_without_keeping(model: Any, keys: Kept, **options: Any) -> int:
    plain, keeping_ = make_decoder(model, **options), make_decoder(model, keys, **options)
    for batch in visits(2):
        assert_same(keeping_.answer(batch), plain.answer(batch))
    return keys.num_bytes


def test_padding_is_never_kept() -> None:
    model = enable(shared("qwen3"))
    keys = keep_all(model)
    assert isinstance(keys, KeptKeys)
    make_decoder(model, keys).answer([Request(0, items_of(1)), Request(1, INSTRUCTION + items_of(2))])
    assert keys.num_missing([PAD] * 9 + items_of(1)) == 12
    assert keys.num_missing(items_of(1)) == 1
    assert kept.LEAST_TOKENS > 1
