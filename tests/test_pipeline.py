# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers.pipeline` needs nothing of ours: what it is called with reaches `generate`."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from families import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationMixin, enable

# transformers 5.17's pipeline hands a config of its own to generate, beside what it is called with.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `generation_config` together with")

WORDS = ["<pad>", *(f"<{level}_{code}>" for level in "abc" for code in range(8))]
ROWS = [[1 + a, 9 + b, 17 + (a + b) % 8] for a in range(8) for b in range(0, 8, 2)]
INDEX = ConstraintIndex.from_sequences(ROWS, item_ids=[f"item {row}" for row in range(len(ROWS))])
TEXTS = ["<a_1> <b_2> <c_3>", "<a_5>", "<a_1> <b_2> <c_3> <a_7> <b_4> <c_3>"]
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    return enable(build("qwen3"))


def expected(model: Any, tokenizer: Any, text: str, **options: Any) -> list[list[Any]]:
    """The items of `generate`."""
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    return INDEX.items(model.generate(prompt, constraint_index=INDEX, **BEAMS, **options)[:, prompt.shape[1] :])


def items_of(tokenizer: Any, records: list[dict[str, Any]]) -> list[list[Any]]:
    return INDEX.items([tokenizer(record["generated_text"])["input_ids"] for record in records])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_generation_takes_what_generate_takes(batch_size: int, model: Any, tokenizer: Any) -> None:
    recommend = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = recommend(TEXTS, constraint_index=INDEX, **BEAMS, return_full_text=False, batch_size=batch_size)
    items = [expected(model, tokenizer, text) for text in TEXTS]
    assert [items_of(tokenizer, records) for records in found] == items
    assert all(itertools.chain(*items))
    free = recommend(TEXTS[0], **BEAMS, return_full_text=False, max_new_tokens=3)
    assert not all(items_of(tokenizer, free))  # it is the catalogue that makes them items
    records = recommend(TEXTS[0], constraint_index=INDEX, **BEAMS, return_tensors=True)
    assert INDEX.items([record["generated_token_ids"][3:] for record in records]) == items[0]
    options: dict[str, Any] = {"exclude_items": [items[0][0] + items[0][2]], "drafting": "trie"}
    records = recommend(TEXTS[0], constraint_index=INDEX, **BEAMS, **options, return_full_text=False)
    assert items_of(tokenizer, records) == expected(model, tokenizer, TEXTS[0], **options) != items[0]


def test_a_checkpoint_that_names_its_catalogue_needs_no_argument(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = enable(build("qwen3"))
    for name, value in {"constraint_index": ".", **BEAMS}.items():
        setattr(saved.generation_config, name, value)
    saved.save_pretrained(tmp_path / "recommender", custom_generate=True)
    INDEX.save_pretrained(tmp_path / "recommender")
    tokenizer.save_pretrained(tmp_path / "recommender")
    items = expected(saved, tokenizer, TEXTS[0])
    loaded = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "recommender")
    # And by its name alone: its `generate` comes with it.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    by_name = {"model": str(tmp_path / "recommender"), "trust_remote_code": True}
    for how in ({"model": loaded, "tokenizer": tokenizer}, by_name):
        recommend = pipeline("text-generation", **how)
        assert isinstance(recommend.model, GRGenerationMixin) == (how is not by_name)
        assert items_of(tokenizer, recommend(TEXTS[0], return_full_text=False)) == items
