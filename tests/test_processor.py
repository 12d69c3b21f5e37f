# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as a processor of transformers' own loops: stateless, of one label or of several."""

import random
from typing import Any

import pytest
import torch
from families import EOS, prompts, shared
from hypothesis import given
from hypothesis import strategies as st
from reference import ReferenceTrie, reference_allowed, reference_answers

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor
from hf_gr.generation.torch import constraints

VOCABULARY = 12
LABELS = [[3], [3, 4], [3, 4, 5], [6, 3], [6, 7]]
SEPARATOR = [8, 9]
# Of tokens 3 to 6 and a separator of 5 to 8: parts of it may be in labels.
LABEL_SETS = st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=3), min_size=1, max_size=4, unique_by=tuple)
SEPARATORS = st.lists(st.integers(5, 8), min_size=1, max_size=3)


def index_of(labels: list[list[int]]) -> ConstraintIndex:
    return ConstraintIndex.from_sequences(labels, eos_token_id=EOS)


def allowed(processor: ConstraintLogitsProcessor, rows: list[list[int]], vocabulary: int = VOCABULARY) -> list:
    """The tokens that each row may continue with; a finished row keeps its end token, with a very low score."""
    scores = processor(torch.tensor(rows), torch.zeros(len(rows), vocabulary))
    return [(row > -1e20).nonzero()[:, 0].tolist() for row in scores]


def reachable(processor: ConstraintLogitsProcessor, prompt: list[int]) -> set[tuple[int, ...]]:
    """Every answer that can be sampled."""
    complete: set[tuple[int, ...]] = set()
    open_rows = [prompt]
    while open_rows:
        below = allowed(processor, open_rows)
        grown = [[*row, token] for row, tokens in zip(open_rows, below, strict=True) for token in tokens]
        assert all(below), "a row that can go no further is not complete"
        complete |= {tuple(row[len(prompt) :]) for row in grown if row[-1] == EOS}
        open_rows = [row for row in grown if row[-1] != EOS]
    return complete


@given(LABEL_SETS)
def test_reachable_outputs_are_exactly_the_sequences(labels: list[list[int]]) -> None:
    trie = ReferenceTrie(labels, eos_token_id=EOS)
    by_mask = ConstraintLogitsProcessor(index_of(labels), attention_mask=torch.ones(1, 2))
    for processor in (ConstraintLogitsProcessor(index_of(labels), 2), by_mask):
        assert reachable(processor, [9, 3]) == set(trie.sequences())


@pytest.mark.parametrize("options", [{}, {"separator": SEPARATOR}], ids=["one", "several"])
@pytest.mark.parametrize("living", [[0, 1, 2, 3, 4], [0, 2], [1], []], ids=str)
def test_three_axes_are_one_call_a_position(
    living: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tries are walked level by level: the same for rules, dead rows and complete ones."""
    processor = ConstraintLogitsProcessor(index_of(LABELS).where(living), 3, **options)
    rows = torch.tensor([[1, 1, 1, 3, 4, 8, 9, 6, 7, EOS], [1, 1, 1, 6, 3, EOS, 0, 0, 0, 0], [1, 1, 1] + [5] * 7])
    scores = torch.randn(3, 10, VOCABULARY)
    together = [processor(rows, scores[:, -size:]) for size in range(1, 11)]
    monkeypatch.setattr(constraints, "MOST_NODES", 0)
    for size, found in enumerate(together, start=1):
        for place in range(size):
            length = 10 - size + place + 1
            before = scores[:, length - 1]
            expected = before if length < 3 else processor(rows[:, :length], before)
            assert torch.equal(found[:, place], expected)


def test_without_a_length_one_generation_follows_another() -> None:
    processor = ConstraintLogitsProcessor(index_of([[3], [3, 4]]))
    for prompt in ([1, 1], [1, 1], [8, 9, 3], [1, 1, 3, 5, 6], [7]):
        assert allowed(processor, [prompt]) == [[3]]
        assert allowed(processor, [[*prompt, 3]]) == [[EOS, 4]]
        assert allowed(processor, [[*prompt, 3, 4]]) == [[EOS]]
        assert allowed(processor, [[*prompt, 3]]) == [[EOS, 4]]  # assisted generation goes back


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 2.0, "num_return_sequences": 40},
        {"do_sample": True, "top_k": 1, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.3},
        {"do_sample": True, "epsilon_cutoff": 0.2, "eta_cutoff": 0.2, "renormalize_logits": True},
        {"do_sample": True, "repetition_penalty": 3.0, "no_repeat_ngram_size": 4},
        {"num_beams": 4, "num_return_sequences": 4},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": shared("llama")},
    ],
    ids=lambda options: " ".join(options),
)
def test_it_serves_every_loop_of_transformers(options: dict[str, Any], several: bool) -> None:
    model, is_assisted = shared("qwen3"), bool(options.keys() & {"assistant_model", "prompt_lookup_num_tokens"})
    how = {"max_new_tokens": 30, "eos_token_id": EOS}
    for length, is_given in ((6, True), (9, False)):
        inputs = prompts(1 if is_assisted else 3, length, padded=not is_assisted)
        inputs["input_ids"][0, -5:] = torch.tensor([3, 4, 5, 6, 3])  # something to copy
        mask = inputs["attention_mask"] if is_given else None
        separator = SEPARATOR if several else None
        processor = ConstraintLogitsProcessor(index_of(LABELS), attention_mask=mask, separator=separator)
        torch.manual_seed(0)
        out = model.generate(**inputs, logits_processor=[processor], **how, **options)
        items = processor.items(out[:, length:])
        assert all(items)
        assert all(len(set(row)) == len(row) for row in items)
        assert all(EOS in row for row in out[:, length:].tolist())
        if is_assisted:
            plain = model.generate(**inputs, logits_processor=[processor], **how)
            assert out.tolist() == plain.tolist()


@pytest.mark.parametrize("options", [{}, {"separator": [8]}], ids=["one", "several"])
def test_items_are_those_of_each_prompts_rule(options: dict[str, Any]) -> None:
    rows = [[3, EOS, 0, 0], [3, 4, EOS, -1, 9], [3, 4, EOS, -100], [5, 7, EOS, -100, 7]]
    views = [NAMED.where(["a", "c"]), NAMED.where(["b", "c"])]
    assert ConstraintLogitsProcessor(views, 1, **options).items(rows) == [["a"], [], ["b"], ["c"]]
    excluding = ConstraintLogitsProcessor(NAMED, 1, exclude_items=[["a"], ["b"]], **options)
    assert excluding.items(rows) == [[], ["b"], [], ["c"]]
    assert excluding.items([]) == []
    assert ConstraintLogitsProcessor(NAMED, 1, **options).items(rows) == [["a"], ["b"], ["b"], ["c"]]
    with pytest.raises(ValueError, match="sequences have 3 rows for 2 rules"):
        excluding.items(rows[:3])


@pytest.mark.parametrize("several", [{}, {"separator": SEPARATOR}], ids=["one", "several"])
@pytest.mark.parametrize(
    "options", [{"suppress_tokens": [3, 5, EOS]}, {"min_new_tokens": 9, "do_sample": True}], ids=str
)
def test_what_others_forbid_is_no_way_out(options: dict[str, Any], several: dict[str, Any]) -> None:
    """Greedy search would take token 0, sampling would fail."""
    processor = ConstraintLogitsProcessor(index_of([[3], [3, 4, 5]]), 6, **several)
    inputs = prompts(3, 6)
    out = shared("qwen3").generate(
        **inputs, logits_processor=[processor], max_new_tokens=12, eos_token_id=EOS, **{"do_sample": False, **options}
    )
    assert all(processor.items(out[:, 6:]))
    assert all(EOS in row for row in out[:, 6:].tolist())


@given(LABEL_SETS, SEPARATORS, st.sampled_from([None, 1, 2, 3]))
def test_reachable_answers_are_exactly_those_of_distinct_labels(
    labels: list[list[int]], separator: list[int], max_labels: int | None
) -> None:
    def text(tokens: list[int]) -> str:
        return "".join(map(str, tokens))

    # Where a separator shows up around or inside a label, or a label continues with it where another one ends.
    around = [text([*separator[1:], *label, *separator[:-1]]) for label in labels]
    goes_on = [text(long).startswith(text([*short, separator[0]])) for long in labels for short in labels]
    if any(text(separator) in one for one in around) or any(goes_on):
        with pytest.raises(ValueError, match="expected tokens that tell where a label ends"):
            ConstraintLogitsProcessor(index_of(labels), 1, separator=separator)
        return
    processor = ConstraintLogitsProcessor(index_of(labels), 1, separator=separator, max_labels=max_labels)
    answers = reference_answers(labels, separator, eos_token_id=EOS, max_labels=max_labels)
    assert reachable(processor, [3]) == answers
    chosen = random.Random(0).choices(sorted(answers), k=5)
    for answer, items in zip(chosen, processor.items(chosen), strict=True):
        written = [labels[int(item)] for item in items]
        assert answer in reference_answers(written, separator, eos_token_id=EOS)
        assert len(set(items)) == len(items)


@given(LABEL_SETS, SEPARATORS, st.lists(st.integers(2, 8), max_size=12), st.sampled_from([None, 2]))
def test_any_tokens_have_the_oracles_continuations(
    labels: list[list[int]], separator: list[int], tokens: list[int], max_labels: int | None
) -> None:
    try:
        processor = ConstraintLogitsProcessor(index_of(labels), 1, separator=separator, max_labels=max_labels)
    except ValueError:
        return
    answers = reference_answers(labels, separator, eos_token_id=EOS, max_labels=max_labels)
    assert allowed(processor, [[1, *tokens]]) == [reference_allowed(answers, tokens)]


def test_rules_hold_for_several_labels() -> None:
    index = index_of([[3], [3, 4], [6], [8, 8]])
    index.remove([3])
    index.add([[7]], [9])
    processor = ConstraintLogitsProcessor(index, 1, separator=[8], exclude_items=[[0, 9, 77], []])
    rows = [[1, 3, 4, 8, 6], [1, 3, 4, 8, 6]]
    assert allowed(processor, rows) == [[EOS], [EOS, 8]]
    assert allowed(processor, [[1, 3], [1, 3]]) == [[4], [EOS, 4, 8]]
    assert allowed(processor, [[1, 3, 4, 8]] * 2) == [[6], [3, 6, 7]]
    index.compact()
    views = ConstraintLogitsProcessor([index.where([0]), index], 1, separator=[8])
    assert allowed(views, [[1, 3]] * 4) == [[EOS]] * 2 + [[EOS, 4, 8]] * 2
    with pytest.raises(ValueError, match="3 rows for 2 rules"):
        allowed(views, [[1]] * 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"index": [[1, 2]]}, "expected a ConstraintIndex"),
    ({"separator": [4]}, r"separator=\[4\] is also inside labels \('b'\)"),
    ({"separator": [4, 9]}, r"inside labels \('b'\) or begins there"),
    ({"separator": [7, 7]}, r"inside labels \('c'\)"),
    ({"separator": []}, r"separator=\[\], expected one token id"),
    ({"separator": [8, EOS]}, "has the end token"),
    ({"separator": ["x"]}, "expected one token id"),
    ({"separator": 8}, "separator=8, expected a list of token ids"),
    ({"separator": ";"}, "is a text, expected tokenizer="),
    ({"prompt_length": "3"}, "prompt_length='3', expected 0 or more tokens"),
    ({"prompt_length": -1}, "prompt_length=-1, expected 0 or more tokens"),
    ({"separator": [8], "max_labels": 0}, "max_labels=0, expected 1 or more"),
    ({"max_labels": 2}, "together with separator="),
    ({"prompt_length": 3, "attention_mask": torch.ones(1, 2)}, "expected one length"),
    ({"attention_mask": torch.ones(2)}, r"shape \[2\], expected the prompt's"),
    ({"prompt_length": 3}, "have 1 tokens, expected prompt_length=3"),
    ({"separator": [99]}, "index has token 99"),
    ({"index": ConstraintIndex.from_sequences([[3, 4]]), "separator": [8]}, "index has no end token"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda given: str(given)[:40])
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allowed(ConstraintLogitsProcessor(**({"index": NAMED} | options)), [[1]])


NAMED = ConstraintIndex.from_sequences([[3], [3, 4], [5, 7]], item_ids=["a", "b", "c"], eos_token_id=EOS)


def test_a_prefix_that_a_rule_forbids_ends_where_one_child_alone_continues() -> None:
    """Every first token here has one continuation: only the first level says what is dead."""
    index = ConstraintIndex.from_sequences([[3, 7, 9], [4, 8, 9], [5, 6, 9]])
    processor = ConstraintLogitsProcessor(index.where([0, 2]), 2)
    assert allowed(processor, [[1, 1, 3], [1, 1, 4]]) == [[7], []]
    assert allowed(processor, [[1, 1, 4, 8]]) == [[]]
