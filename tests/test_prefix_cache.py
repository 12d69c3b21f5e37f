# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers with cached prefixes against those without: families, drafts, rules, eviction, threads, new weights."""

import dataclasses
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os.path import commonprefix
from types import SimpleNamespace
from typing import Any

import families
import numpy as np
import pytest
import torch
from families import PAD, VOCABULARY, build, shared
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from hf_gr import ConstraintIndex, enable
from hf_gr.answering.prefix_cache import BLOCK, PrefixCache, prefix_cache
from hf_gr.answering.recommender import Answer, Recommender
from hf_gr.answering.requests import Request
from hf_gr.generation import messages
from hf_gr.generation.torch.caches import cache_of

SCORE_TOL = 1e-4  # fp32: sums of 3 log-probabilities after prompts in pieces, in batches of other sizes and paddings
draw = np.random.default_rng(0)
ROWS = np.unique(draw.integers(3, VOCABULARY, size=(120, 3)), axis=0)
INDEX = ConstraintIndex.from_sequences(draw.permutation(ROWS), item_ids=range(100, 100 + len(ROWS)))
INSTRUCTION = draw.integers(3, VOCABULARY, size=9).tolist()
BYTES = 2 * 2 * 2 * 8 * 4  # of a token of qwen3: layers, keys and values, heads, width, bytes


@pytest.fixture(autouse=True)
def _says_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SAID", set())


def cache_all(model: Any, **options: Any) -> PrefixCache:
    """A cache that knows prefixes to the token."""
    cache = prefix_cache(model, {}, block=1, **options)
    assert cache is not None
    return cache


def make_decoder(model: Any, cache: PrefixCache | None = None, **options: Any) -> Recommender:
    return Recommender(model, INDEX, num_results=5, num_beams=6, options=options, prefix_cache=cache)


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
            batch.append(Request(tokens, exclude=exclude, allowed=allowed))
        yield batch


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.items == theirs.items
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=SCORE_TOL, rtol=0)


def assert_as_without(model: Any, cache: PrefixCache, *, num_batches: int = 6, **options: Any) -> int:
    """The tokens that were not computed again."""
    plain, caching = make_decoder(model, **options), make_decoder(model, cache, **options)
    num_cached = 0

    def count(out: Any, of_batch: int) -> None:
        nonlocal num_cached
        num_cached += of_batch

    for batch in visits(num_batches):
        assert_same(caching.answer(batch, count), plain.answer(batch))
        assert all(cache.num_missing(request.tokens) == 1 for request in batch)
    return num_cached


@pytest.mark.parametrize("family", sorted(families.DECODERS))
def test_answers_are_those_without(family: str) -> None:
    """Also of layers with windows that have passed tokens: gemma3_text and mistral see three."""
    model = enable(shared(family))
    assert assert_as_without(model, cache_all(model), num_batches=8) > 100


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "options",
    [
        {"drafting": "trie"},
        {"assistant_model": "another"},
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
    if options.get("drafting") in ("head", "auto"):
        model.add_draft_head(INDEX)
    if "assistant_model" in options:
        options = {"assistant_model": build("qwen3", seed=1)}
    assert assert_as_without(model, cache_all(model), **options) > 0


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(SEQUENCES, SEQUENCES, st.integers(1, 3), st.integers(1, 12))
def test_what_is_cached_is_the_longest_common_prefix(
    seen: list[list[int]], asked: list[list[int]], block: int, capacity: int
) -> None:
    """Against a plain list of all sequences; with little memory, of what was used last."""
    for num_bytes in (10**6, 16 * capacity):
        cache = PrefixCache(shared("qwen3"), num_bytes=num_bytes, block=block)
        for number, tokens in enumerate(seen, start=1):
            keys = torch.tensor(tokens).view(1, 1, -1, 1)  # of one layer: the tokens themselves
            out = SimpleNamespace(past_key_values=cache_of([(keys, keys)]))
            cache.keep([tokens], cache.begin([tokens]), out)
            most = min(num_bytes // 16, len(tokens)) // block * block
            assert len(cache._find(tokens)) * block == most
            assert cache.num_bytes <= num_bytes
            if num_bytes == 10**6:  # every prefix is cached once
                starts = {tuple(one[:at]) for one in seen[:number] for at in range(block, len(one) + 1, block)}
                assert cache.num_bytes == 16 * block * len(starts)
        for tokens in asked + seen:
            path = cache._find(tokens)
            found = [token for one in path for token in one.planes[0].flatten().tolist()]
            assert found == tokens[: len(found)]
            if num_bytes == 10**6:
                common = max(len(commonprefix([tokens, one])) for one in seen)
                assert len(found) == common // block * block


def test_the_least_recently_used_goes_first_and_never_what_others_begin_with() -> None:
    model = enable(shared("qwen3"))
    cache = cache_all(model, num_bytes=10 * BYTES)
    prompts = [[*INSTRUCTION[:3], token, *INSTRUCTION[4:6]] for token in (3, 4, 5)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        make_decoder(model, cache).answer([Request(prompt)])
    assert [cache.num_missing(prompt) for prompt in prompts] == [1, 2, 1]
    assert cache.num_bytes == cache.capacity


def test_threads_catalogues_and_numbers_of_beams_share_what_is_cached() -> None:
    """Whole blocks, of which some are forgotten meanwhile."""
    model = enable(shared("qwen3"))
    cache = prefix_cache(model, {}, num_bytes=100 * BYTES)
    other = ConstraintIndex.from_sequences(ROWS[::2], item_ids=range(100, 100 + len(ROWS), 2))
    plain = [make_decoder(model), dataclasses.replace(make_decoder(model), index=other, num_beams=9)]
    batches = [(batch, plain[number % 2]) for number, batch in enumerate(visits(16))]
    expected = [decoder.answer(batch) for batch, decoder in batches]

    def work(start: int) -> None:
        for number in range(len(batches)):
            batch, decoder = batches[at := (start + number) % len(batches)]
            assert_same(dataclasses.replace(decoder, prefix_cache=cache).answer(batch), expected[at])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (0, 5, 11)))
    assert cache is not None
    assert cache.num_bytes % (BLOCK * BYTES) == 0
    assert BLOCK * BYTES <= cache.num_bytes <= 100 * BYTES


def load_others(model: Any) -> None:
    model.load_state_dict(build("qwen3", seed=1).state_dict())


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    model.zero_grad()


def test_other_weights_forget_everything() -> None:
    model = enable(build("qwen3"))
    cache = cache_all(model)
    for change in (load_others, train_a_step, lambda model: model.to(torch.float64)):
        assert_as_without(model, cache, num_batches=3)
        change(model)
    assert_as_without(model, cache, num_batches=3)


def test_what_a_call_computed_before_a_change_is_not_kept() -> None:
    model = enable(build("qwen3"))
    for change in (load_others, None):
        cache = cache_all(model)
        tokens = [INSTRUCTION + items_of(1)]
        reuse = cache.begin(tokens)
        out = model.generate(torch.tensor(tokens), constraint_index=INDEX, num_beams=2, return_dict_in_generate=True)
        cache.clear() if change is None else change(model)  # what writes to `parameter.data` calls clear
        cache.begin([[3, 4]])  # another thread has noticed
        cache.keep(tokens, reuse, out)
        assert cache.num_bytes == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # inside PEFT
def test_adapters_that_come_and_go_forget_everything() -> None:
    adapted = get_peft_model(build("qwen3"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.add_adapter("other", LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    model = enable(adapted)
    cache = cache_all(model)
    for name in ("default", "other", "default"):
        adapted.set_adapter(name, inference_mode=True)
        assert_as_without(model, cache, num_batches=3)
        with adapted.disable_adapter():
            assert_as_without(model, cache, num_batches=3)


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "config", "options", "reason"),
    [
        ("t5", {}, {}, "has an encoder"),
        ("mamba", {}, {}, "is of no family with tested prefix caches"),
        ("llama", {"rope_parameters": ROPE}, {}, "depend on the length of the prompt"),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 64}, {}, "computes other keys if"),
        ("llama", {"is_causal": False}, {}, "computes other keys if"),
        ("qwen3", {}, {"token_type_ids": 1, "do_sample": True}, "token_type_ids: every prompt is"),
        ("qwen3", {}, {"generation_config": GenerationConfig(use_cache=False)}, "use_cache: every prompt is"),
    ],
)
def test_where_no_prefix_is_known_to_have_the_same_keys(
    family: str, config: dict[str, Any], options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = enable(build(family, config=config))
    with caplog.at_level(logging.WARNING):
        assert [prefix_cache(model, options) for _ in range(2)] == [None, None]
    (record,) = [one for one in caplog.records if one.name.startswith("hf_gr")]
    assert reason in record.getMessage()


def test_padding_is_never_cached() -> None:
    model = enable(shared("qwen3"))
    harmless = {"do_sample": True, "drafting": "trie", "assistant_model": None, "length_penalty": 0.0}
    assert prefix_cache(model, harmless, num_bytes=0) is None
    cache = prefix_cache(model, harmless, block=1)
    assert cache is not None
    make_decoder(model, cache).answer([Request(items_of(1)), Request(INSTRUCTION + items_of(2))])
    assert cache.num_missing([PAD] * 9 + items_of(1)) == 12
    assert cache.num_missing(items_of(1)) == 1
