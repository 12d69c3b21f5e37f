# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft heads: what they score, what `generate(drafting="head")` answers, and what it refuses."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from families import ALIBI, DECODERS, ENCODER_DECODERS, LLAMA, PAD, VOCABULARY, build, prompts
from reference import reference_beam_search, reference_head_log_probs
from test_drafting import DETAILS, LONG_PROMPT, SCORE_TOL, assert_same, index_of, rows_of

from hf_gr import ConstraintIndex, enable
from hf_gr.torch import draft_head
from hf_gr.torch.draft_head import DraftHead, DraftHeadConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": {"transition": "rnn"},
    "NEZHA-1": {"transition": "none", "use_state": False},
    "NEZHA-2": {"use_placeholders": False},
    "NEZHA-3": {"transition": "add"},
    "MTP": {"transition": "none", "use_placeholders": False},
}
FIRST_PLACEHOLDER = 54  # no code of any catalogue here
NUM_CODES = 50


def new_head(num_levels: int, *, hidden_size: int = 32, seed: int = 0, **variant: Any) -> DraftHead:
    """A random head for tokens below NUM_CODES, with weights that make scores differ."""
    torch.manual_seed(seed)
    size = num_levels if variant.get("use_placeholders", True) else 0
    config = DraftHeadConfig(
        hidden_size,
        (NUM_CODES,) * num_levels,
        placeholder_token_ids=tuple(range(FIRST_PLACEHOLDER, FIRST_PLACEHOLDER + size)),
        **variant,
    )
    # In no order, so that columns are not tokens.
    head = DraftHead(config, [torch.randperm(NUM_CODES) for _ in range(num_levels)])
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, std=0.15 if name.startswith("transitions") else 0.4)
    return head


@cache
def bare(family: str) -> Any:
    return enable(build(family))


def with_head(family: str, num_levels: int, **variant: Any) -> Any:
    model = bare(family)
    model.draft_head = new_head(num_levels, **variant)
    return model


def hidden_states(model: Any, inputs: dict[str, torch.Tensor], row: int) -> np.ndarray:
    """Of one prompt without its padding, by transformers alone: `[L + 1, H]`."""
    placeholders = torch.tensor([model.draft_head.config.placeholder_token_ids], dtype=torch.long)
    tokens = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            begun = torch.cat([torch.tensor([[model.config.decoder_start_token_id]]), placeholders], dim=1)
            outputs = model(input_ids=tokens, decoder_input_ids=begun, output_hidden_states=True)
            return outputs.decoder_hidden_states[-1][0].double().numpy()
        outputs = model(input_ids=torch.cat([tokens, placeholders], dim=1), output_hidden_states=True)
        return outputs.hidden_states[-1][0, tokens.shape[1] - 1 :].double().numpy()


def oracle(
    model: Any, inputs: dict[str, torch.Tensor], row: int, sequences: Any, num_beams: int, **options: Any
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search inside the head, one vector at a time."""
    head, hidden = model.draft_head, hidden_states(model, inputs, row)
    weights = {name: value.double().numpy() for name, value in head.state_dict().items()}
    codebooks = [head.codebook(level).tolist() for level in range(head.config.num_levels)]

    @cache
    def scores(prefix: tuple[int, ...]) -> np.ndarray:
        dense = np.full(VOCABULARY, -np.inf)
        config = head.config
        how = {"use_state": config.use_state, "use_placeholders": config.use_placeholders}
        given = reference_head_log_probs(hidden, weights, codebooks, prefix, transition=config.transition, **how)
        dense[list(given)] = list(given.values())
        return dense

    return reference_beam_search(scores, sequences, num_beams, **options)


def assert_answers(out: Any, expected: list[list[tuple[tuple[int, ...], float]]], length: int) -> None:
    """Best first, with their scores; then padding."""
    answers = out.sequences[:, -length:].unflatten(0, (len(expected), -1)).tolist()
    scores = out.sequences_scores.unflatten(0, (len(expected), -1)).tolist()
    for tokens, found, wanted in zip(answers, scores, expected, strict=True):
        assert found[: len(wanted)] == pytest.approx([score for _, score in wanted[: len(found)]], abs=SCORE_TOL)
        assert all(score == -np.inf for score in found[len(wanted) :])
        for place, (sequence, score) in enumerate(wanted[: len(found)]):
            if sum(abs(other - score) <= SCORE_TOL for _, other in wanted) == 1:
                assert tokens[place][: len(sequence)] == list(sequence)


def ask(model: Any, inputs: dict[str, torch.Tensor], kind: str, num_beams: int, **options: Any) -> Any:
    how = {"num_beams": num_beams, "num_return_sequences": num_beams, "pad_token_id": PAD, "drafting": "head"}
    return model.generate(**inputs, **({"constraint_index": index_of(kind), **how, **DETAILS} | options))


@pytest.mark.parametrize(("variant", "num_beams"), [("rnn", 900), *((name, 3) for name in VARIANTS)])
def test_the_heads_beam_search_equals_the_slow_one(variant: str, num_beams: int) -> None:
    model, inputs, calls = with_head("qwen3", 5, **VARIANTS[variant]), prompts(2, LONG_PROMPT, padded=True), []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    out = ask(model, inputs, "fixed", num_beams)
    handle.remove()
    assert len(calls) == 1
    # As many beams as sequences: an exhaustive search. Scores are divided by the length, as transformers does.
    expected = [oracle(model, inputs, row, rows_of("fixed")[0], num_beams) for row in range(2)]
    assert len(expected[0]) == min(num_beams, len(index_of("fixed")))
    assert_answers(out, expected, 5)
    assert out.speculation.target_forwards == 0
    greedy = ask(model, inputs, "fixed", 1).sequences[:, -5:].tolist()
    assert greedy == [list(oracle(model, inputs, row, rows_of("fixed")[0], 1)[0][0]) for row in range(2)]


@pytest.mark.parametrize("family", [*DECODERS, *ALIBI, *ENCODER_DECODERS])
def test_any_backbone_takes_a_head(family: str) -> None:
    model, inputs = with_head(family, 5), prompts(3, LONG_PROMPT, padded=family not in ENCODER_DECODERS)
    out = ask(model, inputs, "fixed", 6, prefill_chunk_size=4)  # which does not count
    assert_answers(out, [oracle(model, inputs, row, rows_of("fixed")[0], 6) for row in range(3)], 5)
    drafted = ask(model, inputs, "fixed", 6, verification="strict", draft_token_budget=1)
    assert_same(drafted, ask(model, inputs, "fixed", 6, drafting=None))


EXPERTS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
EXPERTS |= {"num_experts": 2, "num_experts_per_tok": 1}
LINEAR = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
OTHERS: dict[str, dict[str, Any]] = {
    # Recurrent layers, whose state cannot give the placeholders back.
    "mamba": {},
    "lfm2": {},
    "qwen3_next": LLAMA | LINEAR | EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    # transformers takes another module for their decoder.
    "llama4_text": LLAMA | {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4},
    "modernbert-decoder": {name: LLAMA[name] for name in LLAMA if name not in ("num_key_value_heads", "head_dim")}
    | {"bos_token_id": 3},
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_prefill_is_all_that_a_backbone_needs(family: str) -> None:
    model, inputs = enable(build(family, config=OTHERS[family])), prompts(2, 8)
    model.draft_head = new_head(5)
    out = ask(model, inputs, "fixed", 4)
    assert_answers(out, [oracle(model, inputs, row, rows_of("fixed")[0], 4) for row in range(2)], 5)
    # What read the placeholders, too, is no prompt's cache.
    cache = out.past_key_values
    assert cache is None or cache.get_seq_length() == 8
    assert_same(ask(model, inputs, "fixed", 4, verification="strict"), ask(model, inputs, "fixed", 4, drafting=None))


def test_ragged_catalogues_end_in_the_head() -> None:
    model, inputs = with_head("llama", 6, transition="add"), prompts(2, 7, padded=True)
    rows, eos = rows_of("ragged")
    for penalty in (0.0, 1.0):
        out = ask(model, inputs, "ragged", 8, length_penalty=penalty, early_stopping="never")
        how = {"eos_token_id": eos, "length_penalty": penalty}
        expected = [oracle(model, inputs, row, rows, 8, **how) for row in range(2)]
        assert_answers(out, expected, out.sequences.shape[1] - 7)


def test_every_row_has_its_own_rules() -> None:
    model, inputs = with_head("qwen3", 5), prompts(3, 6, padded=True)
    index, (rows, _) = index_of("fixed"), rows_of("fixed")
    living = {int(item): tuple(rows[int(item)]) for item in index.item_ids}
    rng = random.Random(0)
    views = [rng.sample(sorted(living), size) for size in (2, 40, 300)]
    excluded = [rng.sample(view, len(view) // 2) for view in views]
    own = {"constraint_index": [index.where(view) for view in views], "exclude_items": excluded}
    # A sequence goes if all of its items are excluded.
    allowed = [{living[one] for one in {*view} - {*without}} for view, without in zip(views, excluded, strict=True)]
    assert len(allowed[0]) == 1  # and nine rows of padding
    out = ask(model, inputs, "fixed", 10, **own)
    assert_answers(out, [oracle(model, inputs, row, mine, 10) for row, mine in enumerate(allowed)], 5)


def test_scores_over_the_vocabulary_are_those_over_the_codes() -> None:
    model, inputs, index = with_head("qwen3", 5), prompts(2, 6, padded=True), index_of("fixed")
    narrow = ask(model, inputs, "fixed", 7, output_scores=False)
    wide = ask(model, inputs, "fixed", 7, output_logits=True)
    assert narrow.sequences.tolist() == wide.sequences.tolist()
    assert narrow.beam_indices.tolist() == wide.beam_indices.tolist()
    assert [tuple(step.shape) for step in wide.logits] == [(14, VOCABULARY)] * 5
    assert all(bool((step.isfinite().sum(-1) <= NUM_CODES).all()) for step in wide.scores)
    # Processors see scores over the vocabulary.
    token = int(narrow.sequences[0, 6])
    banned = ask(model, inputs, "fixed", 7, bad_words_ids=[[token]])
    is_there = banned.sequences_scores.isfinite()
    assert not bool((banned.sequences[is_there, 6:] == token).any())
    assert [bool(items) for items in index.items(banned.sequences[:, 6:])] == is_there.tolist()
    assert int(is_there.sum()) > 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_items_in_any_dtype(dtype: torch.dtype) -> None:
    model, inputs, index = enable(build("qwen3", dtype=torch.bfloat16)), prompts(2, 6), index_of("fixed")
    model.draft_head = new_head(5).to(dtype)
    for num_beams in (1, 20):
        out = ask(model, inputs, "fixed", num_beams, do_sample=True, top_k=0, num_return_sequences=20)
        assert all(index.items(out.sequences[:, 6:]))
        assert len({tuple(row) for row in out.sequences.tolist()}) > 10
        assert num_beams == 1 or bool(out.sequences_scores.isfinite().all())


def test_a_prefilled_prompt_is_gone_on_from_and_left_as_it_is() -> None:
    model, inputs = with_head("qwen3", 5), prompts(2, 8)
    expected = ask(model, inputs, "fixed", 5)
    begun = model(input_ids=inputs["input_ids"][:, :5], use_cache=True).past_key_values
    found = ask(model, inputs, "fixed", 5, past_key_values=begun)
    assert_same(found, expected)
    assert begun.get_seq_length() == 5
    # What comes back is the prompt's cache, without the placeholders.
    assert found.past_key_values.get_seq_length() == 8
    assert_same(ask(model, inputs, "fixed", 5, past_key_values=found.past_key_values), expected)
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    assert ask(model, embeds, "fixed", 5).sequences.tolist() == expected.sequences[:, 8:].tolist()


def test_token_types_go_on_as_they_ended() -> None:
    model, inputs, seen = with_head("gpt2", 5), prompts(2, 3), []
    record = lambda module, arguments, given: seen.append(given["token_type_ids"].tolist())  # noqa: E731
    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    ask(model, inputs, "fixed", 2, token_type_ids=torch.tensor([[0, 0, 1], [0, 4, 5]]))
    handle.remove()
    assert seen == [[[0, 0, 1, 1, 1, 1, 1, 1], [0, 4, 5, 5, 5, 5, 5, 5]]]


def test_only_the_last_level_is_checked_in_the_papers_form() -> None:
    """Against algorithm 3, line by line."""
    model, inputs, (rows, _), num_beams = with_head("qwen3", 4), prompts(1, 6), rows_of("dense"), 12
    head, hidden = model.draft_head, hidden_states(model, inputs, 0)
    weights = {name: value.double().numpy() for name, value in head.state_dict().items()}
    codebooks = [head.codebook(level).tolist() for level in range(4)]
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(4):
        candidates = []
        for prefix, score in beams:
            given = reference_head_log_probs(hidden, weights, codebooks, prefix, transition="rnn")
            best = sorted(given, key=given.__getitem__, reverse=True)[:num_beams]
            candidates += [((*prefix, token), score + given[token]) for token in best]
        if level == 3:
            candidates = [one for one in candidates if one[0] in {tuple(row) for row in rows}]
        beams = sorted(candidates, key=lambda one: -one[1])[:num_beams]
    assert len(beams) < num_beams  # the form can lose some, and here it does
    out = ask(model, inputs, "dense", num_beams, length_penalty=0.0, verification="last_level")
    assert_answers(out, [beams], 4)
    found = index_of("dense").items(out.sequences[:, 6:])
    assert sum(map(bool, found)) == len(beams)
    # Checked level by level, nothing is lost.
    assert all(index_of("dense").items(ask(model, inputs, "dense", num_beams).sequences[:, 6:]))


def test_nothing_is_checked_without_verification() -> None:
    model, inputs = with_head("qwen3", 4), prompts(1, 6)
    out = ask(model, inputs, "dense", 9, length_penalty=0.0, verification="none")
    answers = out.sequences[:, 6:].tolist()
    assert not all(index_of("dense").items(answers))
    everything = [[*rest, token] for *rest, _ in answers for token in range(NUM_CODES)]
    assert_answers(out, [oracle(model, inputs, 0, everything, 9, length_penalty=0.0)], 4)


def test_a_good_head_saves_forwards() -> None:
    """A head that knows the answer: its codes' logits are set to what the model says after every prompt."""
    model, inputs = with_head("qwen3", 4), prompts(1, 6)
    plain, head = ask(model, inputs, "dense", 2, drafting=None), model.draft_head
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        hidden = torch.from_numpy(hidden_states(model, inputs, 0)).float()
        for level in range(4):
            tokens = plain.sequences[:, 6 + level]
            head.logit_heads[level].weight[head.columns(tokens, level=level)] = hidden[level + 1]
    how = {"verification": "strict", "draft_token_budget": 1, "num_draft_beams": 16}
    drafted = ask(model, inputs, "dense", 2, **how)
    assert_same(drafted, plain)
    assert (plain.speculation.target_forwards, drafted.speculation.target_forwards) == (3, 1)
    assert int(drafted.speculation.accepted_steps) == 2


BEYOND = ConstraintIndex.from_sequences([[3, 4, 51, 6, 7], [3, 4, 5, 6, 7]])
ENDED = ConstraintIndex.from_sequences([[3, 4, 5, 6, 7, 2]], eos_token_id=2)
SHORT = ConstraintIndex.from_sequences([[3, 4, 5, 6, 2], [3, 2]], eos_token_id=2)
UPDATED = ConstraintIndex.from_sequences([[3, 4, 5, 6, 7]])
UPDATED.add([[3, 4, 5, 6, 52]], [9])
BY_LAST = {"verification": "last_level"}
STRICT = {"verification": "strict"}


@pytest.mark.parametrize(
    ("head", "settings", "match"),
    [
        ({"hidden_size": 16}, {}, "hidden_size=16, expected the model's, 32"),
        ({"num_levels": 4}, {}, "5 levels and the draft head 4"),
        ({}, {"constraint_index": BEYOND}, "token 51 on level 3, expected one of the draft head's 50 codes"),
        ({}, {"constraint_index": UPDATED}, "token 52 on level 5"),
        ({}, prompts(1, 124), "124 tokens and the draft head's placeholders 5 more"),
        ({}, {"constraint_index": SHORT, **BY_LAST}, "verification='last_level' with sequences of several lengths"),
        ({}, {"num_draft_beams": 9}, "num_draft_beams=9 with verification='catalogue', expected None"),
        ({}, {"constraint_index": ENDED}, r"its end token is a level: model.add_draft_head\(index\)"),
        ({}, {"guidance_scale": 1.5}, "guidance_scale=1.5 with drafting='head'"),
        ({}, {"num_draft_beams": 2, **STRICT}, "num_draft_beams=2, expected at least num_beams=3"),
        ({}, {"num_assistant_tokens": 0, **STRICT}, "num_assistant_tokens=0"),
        ({"family": "bart"}, {"decoder_input_ids": torch.full((2, 60), PAD)}, "60 tokens and .* 5 more"),
        ({"family": "mistral"}, {"past_key_values": 5}, "layers that drop keys"),
        ({"vocab_size": FIRST_PLACEHOLDER}, {"input_ids": torch.tensor([[3, 4]] * 2)}, "expected less than 54"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(head: dict[str, Any], settings: dict[str, Any], match: str) -> None:
    given, size = {"family": "qwen3", "num_levels": 5, "hidden_size": 32} | head, VOCABULARY
    model = enable(build(given["family"], config={"vocab_size": head.get("vocab_size", size)}))
    model.draft_head = new_head(given["num_levels"], hidden_size=given["hidden_size"])
    inputs = prompts(2, 8)
    if "past_key_values" in settings:
        settings = {"past_key_values": model(inputs["input_ids"][:, :5], use_cache=True).past_key_values}
    if "input_ids" in settings:
        inputs = {}
    with pytest.raises(ValueError, match=match):
        model.generate(
            **({"constraint_index": index_of("fixed"), "num_beams": 3, "drafting": "head", **inputs} | settings)
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"codebook_sizes": ()},
        {"codebook_sizes": (4, 0)},
        {"hidden_size": 0},
        {"transition": "lstm"},
        {"use_state": False},
        {"use_state": False, "transition": "none", "use_placeholders": False, "placeholder_token_ids": ()},
        {"placeholder_token_ids": (5,)},
        {"placeholder_token_ids": (5, 5)},
        {"placeholder_token_ids": (5, -1)},
        {"placeholder_token_ids": (5, 6.0)},
        {"placeholder_tokens": ("<a>",)},
        {"placeholder_tokens": "<>"},
        {"codebook_sizes": 4},
        {"use_placeholders": False},
    ],
)
def test_configs_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {"hidden_size": 8, "codebook_sizes": (4, 4), "placeholder_token_ids": (5, 6)}
    DraftHeadConfig(**good)
    with pytest.raises(ValueError, match="expected"):
        DraftHeadConfig(**(good | fields))


def test_the_default_loss_is_a_mean_within_codebooks() -> None:
    head, loaded = new_head(3, hidden_size=8), new_head(3, hidden_size=8, seed=1)
    hidden, labels = torch.randn(2, 4, 8), torch.tensor([[4, 9, 17], [30, 2, draft_head.IGNORED]])
    weights = {name: value.double().numpy() for name, value in head.state_dict().items()}
    codebooks = [head.codebook(level).tolist() for level in range(3)]
    losses = []
    for row, own in zip(hidden.double().numpy(), labels.tolist(), strict=True):
        known = [token for token in own if token >= 0]
        for level, token in enumerate(known):
            given = reference_head_log_probs(row, weights, codebooks, known[:level], transition="rnn")
            losses.append(-given[token])
    loaded.load_state_dict(head.state_dict())  # which brings the codebooks
    for one in (head, loaded):
        assert float(one.loss(hidden, labels).detach()) == pytest.approx(np.mean(losses), abs=1e-5)


def test_unchecked_levels_end_in_items_where_one_child_alone_continues() -> None:
    """Two tokens name the third: what the head invents in them must not come back as an item's ending."""
    pairs = np.unique(np.random.default_rng(0).integers(3, 63, (1500, 3))[:, :2], axis=0)[:800]
    thirds = np.random.default_rng(1).integers(3, 63, len(pairs))
    index = ConstraintIndex.from_sequences(np.column_stack([pairs, thirds]))
    model = enable(build("qwen3"))
    torch.manual_seed(0)
    model.add_draft_head(index)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"num_beams": 40, "num_return_sequences": 5, "drafting": "head", "verification": "last_level"}
    found = model.generate(prompt, constraint_index=index, pad_token_id=PAD, **options)[:, 4:]
    assert all(index.items(found))
