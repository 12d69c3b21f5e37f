# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft heads on their way into models, folders and repositories, and back."""

import copy
import gc
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import huggingface_hub
import peft
import pytest
import safetensors.torch
import torch
from hub_server import HubServer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

import hf_gr
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, DraftHead, DraftHeadConfig, SemanticIds
from hf_gr.files import draft_head as head_files
from hf_gr.files.hub import Source
from hf_gr.generation.torch.heads import add_draft_head, check_tokenizer, load_draft_head, save_draft_head

JSON_FILE, TENSORS_FILE = head_files.FILES
LEVELS = [[3, 4], [7, 5, 6], [4, 9]]


def build(family: str = "qwen3", **kwargs: Any) -> Any:
    return hf_gr.enable(families.build(family, **kwargs))


def tokenizer_of(size: int = families.VOCABULARY) -> Any:
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Names, types and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def same_heads(one: DraftHead, other: DraftHead) -> bool:
    rows, others = one.placeholder_embeddings, other.placeholder_embeddings
    return (
        one.config == other.config
        and same_tensors(one.state_dict(), other.state_dict())
        and ((rows is None and others is None) or torch.equal(rows, others))
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs."""
    logging.getLogger("transformers").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("transformers").removeHandler(caplog.handler)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a head that was part of a model."""
    model = build()
    add_draft_head(model, LEVELS).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("family", "dtype", "config"),
    [
        ("qwen3", torch.bfloat16, {}),
        *((name, torch.float32, {}) for name in ("gpt2", "t5", "bart")),
        ("opt", torch.float32, {"word_embed_proj_dim": 16}),  # OPT-350m: narrower on the outside
    ],
)
def test_a_head_is_made_for_the_model(family: str, dtype: torch.dtype, config: dict[str, int]) -> None:
    model = build(family, dtype=dtype, config=config)
    head = add_draft_head(model, LEVELS)
    vocabulary, size = families.VOCABULARY, config.get("word_embed_proj_dim", 32)
    placeholders = tuple(range(vocabulary, vocabulary + 3))
    assert model.draft_head is head
    assert head.config == DraftHeadConfig(size, (2, 3, 2), placeholder_token_ids=placeholders)
    assert [head.codebook(level).tolist() for level in range(3)] == LEVELS
    assert {parameter.dtype for parameter in head.parameters()} == {dtype}
    assert model.get_input_embeddings().weight.shape == (vocabulary + 3, size)
    assert model.get_output_embeddings().weight.shape == (vocabulary + 3, size)
    assert model.config.vocab_size == vocabulary + 3
    assert not head.training
    assert torch.equal(head.placeholder_embeddings, model.get_input_embeddings().weight[vocabulary:])


def test_a_head_is_drawn_from_torchs_generator_and_nothing_is_said(said: Any, capfd: Any) -> None:
    states = []
    for seed in (1, 1, 2):
        model = build("gpt2")
        torch.manual_seed(seed)
        add_draft_head(model, LEVELS)
        states.append(model.state_dict())
    assert same_tensors(states[0], states[1])
    assert not same_tensors(states[0], states[2])
    assert (said.records, *capfd.readouterr()) == ([], "", "")


def test_a_catalogue_gives_its_codes() -> None:
    index = ConstraintIndex.from_sequences([[9, 7], [5], [9], [6, 7, 8]], eos_token_id=2)
    codes = [[5, 6, 9], [2, 7], [2, 8], [2]]
    head = add_draft_head(build(), index)
    assert [head.codebook(level).tolist() for level in range(4)] == codes
    # What was removed may come back; what was added is there.
    index.remove([1])
    index.add([[11]], [7])
    head = add_draft_head(build(), index)
    assert [head.codebook(level).tolist() for level in range(4)] == [[5, 6, 9, 11], *codes[1:]]
    one_length = ConstraintIndex.from_sequences([[9, 7], [5, 8]])
    assert add_draft_head(build(), one_length).config.codebook_sizes == (2, 2)


def test_semantic_ids_give_codes_that_no_item_has() -> None:
    ids = SemanticIds([[0, 1], [2, 0]], level_sizes=[4, 3], offset=10)
    head = add_draft_head(build(), ids)
    assert [head.codebook(level).tolist() for level in range(2)] == [[10, 11, 12, 13], [14, 15, 16]]
    tokenizer = tokenizer_of(60)
    tokenizer.add_tokens(["<a_0>", "<b_1>"])
    known = SemanticIds.from_tokenizer([[0, 1]], tokenizer, level_sizes=[2, 2])
    head = add_draft_head(build(), known, tokenizer=tokenizer)
    assert [head.codebook(level).tolist() for level in range(2)] == [[60], [61]]
    assert head.config.placeholder_token_ids == (62, 63)


@pytest.mark.parametrize(
    ("levels", "options", "message"),
    [
        ([], {}, r"codebooks is \[\], expected a ConstraintIndex, SemanticIds, a DraftHead, or the token ids"),
        ("codes", {}, r"codebooks is 'codes', expected"),
        ([256, 256], {}, r"codebooks has torch.int64 of shape \[\] on level 1, expected a list of token ids"),
        ([[3], [0.5]], {}, r"codebooks has torch.float32 of shape \[1\] on level 2"),
        ([[3], ["a"]], {}, r"codebooks has no list of token ids on level 2 \(.*\), expected one"),
        ([[3], [4, 5, 4]], {}, r"codebooks has token 4 twice on level 2, expected distinct ones"),
        ([[3], [4, -1]], {}, r"codebooks has token -1 on level 2, expected 0 to 63"),
        ([[3], [64]], {}, r"token 64 on level 2, expected 0 to 63, the model's vocabulary: .*resize_token_embeddings"),
        (SemanticIds([[0, 1], [2, -1]]), {}, r"tell the end token: pass codebooks.constraint_index\(eos_token_id="),
        (LEVELS[:2], {"placeholder_tokens": ["<a>", "<a>"]}, "placeholder_tokens=.*expected 2 distinct ones"),
        (LEVELS[:2], {"placeholder_tokens": [1, 2]}, "expected strings such as '<SP_1>'"),
        (LEVELS, {"transition": "lstm"}, "transition='lstm', expected one of"),
        (LEVELS, {"use_state": False}, "use_state=False with transition='rnn'"),
        (LEVELS, {"tokenizer": 5}, "tokenizer is a int, expected one of transformers"),
    ],
)
def test_what_is_refused_changes_nothing(levels: Any, options: dict[str, Any], message: str) -> None:
    model, tokenizer = build(), tokenizer_of()
    with pytest.raises(ValueError, match=message):
        add_draft_head(model, levels, **{"tokenizer": tokenizer} | options)
    assert not hasattr(model, "draft_head")
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0] == 64
    with pytest.raises(ValueError, match="model is a Qwen3Model, expected one with a language-modelling head"):
        add_draft_head(model.model, LEVELS)


def test_placeholders_are_special_tokens_that_survive_a_round_trip(tmp_path: Path) -> None:
    model, tokenizer = build(), tokenizer_of()
    head = add_draft_head(model, LEVELS, tokenizer=tokenizer)
    assert head.config.placeholder_tokens == ("<SP_1>", "<SP_2>", "<SP_3>")
    assert head.config.placeholder_token_ids == (64, 65, 66)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for each in (tokenizer, again):
        check_tokenizer(head, each)
        assert each("w3 <SP_1><SP_2> w4<SP_3>").input_ids == [3, 64, 65, 4, 66]
        assert each.decode([3, 64, 65, 66], skip_special_tokens=True) == "w3"
    loaded = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path)
    check_tokenizer(loaded.draft_head, again)


def test_a_tokenizer_with_room_resizes_nothing() -> None:
    model, tokenizer = build(), tokenizer_of(60)
    head = add_draft_head(model, LEVELS, tokenizer=tokenizer, placeholder_tokens=["<x>", "w11", "<y>"])
    assert head.config.placeholder_token_ids == (60, 11, 61)
    assert len(model.get_input_embeddings().weight) == 64


def test_another_head_reuses_the_placeholders() -> None:
    model, tokenizer = build(), tokenizer_of()
    before = add_draft_head(model, LEVELS)
    rows = before.placeholder_embeddings
    head = add_draft_head(model, LEVELS, transition="add")
    assert head is model.draft_head
    assert head.config.placeholder_token_ids == (64, 65, 66)
    assert torch.equal(head.placeholder_embeddings, rows)
    assert add_draft_head(model, LEVELS, tokenizer=tokenizer).config.placeholder_token_ids == (64, 65, 66)
    shorter = add_draft_head(model, LEVELS[:2])
    assert shorter.config.placeholder_token_ids == (67, 68)


def test_placeholders_that_would_be_codes_are_a_clear_error() -> None:
    model, tokenizer = build(), tokenizer_of(9)  # ids from 9 on are codes that the tokenizer does not know
    with pytest.raises(ValueError, match=r"would have id 9 for '<SP_1>', expected one that is no code: .*or give"):
        add_draft_head(model, LEVELS, tokenizer=tokenizer)
    assert len(tokenizer) == 9
    assert add_draft_head(model, LEVELS).config.placeholder_token_ids == (64, 65, 66)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"transition": "add"}, torch.float16),
        ({"transition": "none"}, torch.bfloat16),
        ({"use_placeholders": False}, torch.float32),
        ({"use_state": False, "transition": "none"}, torch.float32),
    ],
)
def test_a_head_alone_survives_bit_by_bit(options: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(dtype=dtype)
    head = add_draft_head(model, LEVELS, **options)
    head.save_pretrained(tmp_path)
    assert sorted(contents(tmp_path)) == ["README.md", TENSORS_FILE, JSON_FILE]
    state = torch.random.get_rng_state()
    loaded = DraftHead.from_pretrained(tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_heads(loaded, head)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    tokens = torch.tensor([[3, 5, 9]])
    hidden = torch.randn(1, 4, 32, dtype=dtype)
    for ours, theirs in zip(loaded(hidden, tokens), head(hidden, tokens), strict=True):
        assert torch.equal(ours, theirs)
    # Onto the same model again: as it was.
    before = model.state_dict()
    add_draft_head(model, loaded)
    assert same_tensors(before, model.state_dict())


def test_a_head_is_shared_with_its_placeholders_embeddings(saved: Path) -> None:
    head, model, tokenizer = DraftHead.from_pretrained(saved), build(seed=1), tokenizer_of()
    rows = head.placeholder_embeddings
    own = model.get_input_embeddings().weight.clone()
    with pytest.raises(ValueError, match="tokenizer has id None for '<SP_1>', expected 64, .*: load the"):
        check_tokenizer(head, tokenizer)
    model.requires_grad_(False)
    assert add_draft_head(model, head, tokenizer=tokenizer) is head is model.draft_head
    weight = model.get_input_embeddings().weight
    assert torch.equal(weight, torch.cat([own, rows]))
    assert {name.split(".")[0] for name, each in model.named_parameters() if each.requires_grad} == {"draft_head"}
    assert tokenizer.convert_tokens_to_ids(["<SP_1>", "<SP_3>"]) == [64, 66]
    # From now on the model's rows are the head's.
    with torch.no_grad():
        weight[64] = 7
    head.save_pretrained(saved)
    assert torch.equal(DraftHead.from_pretrained(saved).placeholder_embeddings, weight[64:])


def test_a_head_that_was_part_of_no_model_brings_no_embeddings_and_takes_the_dtype(tmp_path: Path) -> None:
    DraftHead(DraftHeadConfig(32, (2, 3, 2), placeholder_token_ids=(10, 11, 12)), LEVELS).save_pretrained(tmp_path)
    head, model = DraftHead.from_pretrained(tmp_path), build(dtype=torch.bfloat16)
    assert head.placeholder_embeddings is None
    before = model.get_input_embeddings().weight.clone()
    add_draft_head(model, head)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.codebook(0).dtype == torch.int64


def test_a_head_without_its_model_says_so_instead_of_losing_the_embeddings(tmp_path: Path) -> None:
    model = build()
    head = add_draft_head(model, LEVELS)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        with pytest.raises(ValueError, match=r"is gone, or this is a copy .*or model.add_draft_head\(head\) first"):
            twin.draft_head.save_pretrained(tmp_path)
        add_draft_head(twin, twin.draft_head)
        twin.draft_head.save_pretrained(tmp_path)
        assert same_heads(DraftHead.from_pretrained(tmp_path), head)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="the draft head's model is gone"):
        head.save_pretrained(tmp_path)


def test_a_head_of_another_model_is_a_clear_error(saved: Path) -> None:
    head, model = DraftHead.from_pretrained(saved), build()
    shifted = tokenizer_of(60)
    without_first = tokenizer_of(60)
    without_first.add_tokens(["<SP_2>"])
    for target, options, message in (
        (build(config={"hidden_size": 16}), {}, "has hidden_size=32, expected the model's, 16: it is another model's"),
        (build(config={"vocab_size": 8}), {}, "codebooks has token 9 on level 3, expected 0 to 7, the model's"),
        (model, {"tokenizer": shifted}, "tokenizer has id 60 for '<SP_1>', expected 64"),
        (model, {"tokenizer": without_first}, "tokenizer has id None for '<SP_1>'"),
        (model, {"transition": "add"}, "codebooks is a DraftHead and .* is given, expected none of them"),
        (model, {"use_state": False}, "codebooks is a DraftHead and .* is given"),
        (model, {"use_placeholders": False}, "codebooks is a DraftHead and .* is given"),
        (model, {"placeholder_tokens": ["<a>"]}, "codebooks is a DraftHead and .* is given"),
    ):
        with pytest.raises(ValueError, match=message):
            add_draft_head(target, head, **options)
        assert not hasattr(target, "draft_head")
    assert (len(shifted), len(model.get_input_embeddings().weight)) == (60, 64)


@pytest.mark.parametrize(
    ("family", "is_tied", "dtype"),
    [("qwen3", True, torch.float32), ("qwen3", False, torch.bfloat16), ("t5", False, torch.bfloat16)],
)
def test_a_checkpoint_survives_bit_by_bit(
    family: str, is_tied: bool, dtype: torch.dtype, tmp_path: Path, said: Any
) -> None:
    model = build(family, config={"tie_word_embeddings": is_tied}, dtype=dtype)
    add_draft_head(model, LEVELS)
    model.save_pretrained(tmp_path)
    again = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, dtype="auto")
    assert same_tensors(model.state_dict(), again.state_dict())
    assert same_heads(model.draft_head, again.draft_head)
    # Plain transformers sees a checkpoint of its own.
    assert not [name for name in safetensors.torch.load_file(tmp_path / "model.safetensors") if "draft" in name]
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    said.clear()
    plain, info = auto.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert not said.records
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("draft_head.")}
    assert same_tensors(plain.state_dict(), own)


def test_a_checkpoint_without_a_head_has_none_and_one_in_a_subfolder_is_found(tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if "draft" in path.name]
    assert not hasattr(AutoModelForGenerativeRetrieval.from_pretrained(tmp_path), "draft_head")
    assert load_draft_head(model, Source(tmp_path)) is None
    add_draft_head(model, LEVELS)
    model.save_pretrained(tmp_path / "inner")
    again = AutoModelForGenerativeRetrieval.from_pretrained(tmp_path, subfolder="inner")
    assert same_heads(model.draft_head, again.draft_head)
    model.save_pretrained(tmp_path / "worker", is_main_process=False)
    assert not (tmp_path / "worker" / TENSORS_FILE).exists()


@pytest.mark.parametrize(("gone", "left"), [(JSON_FILE, TENSORS_FILE), (TENSORS_FILE, JSON_FILE)])
def test_one_file_of_two_is_a_clear_error(gone: str, left: str, saved: Path) -> None:
    (saved / gone).unlink()
    build().save_pretrained(saved)
    with pytest.raises(ValueError, match=f"has {left} and no {gone}, expected both or neither: .*or delete {left}"):
        AutoModelForGenerativeRetrieval.from_pretrained(saved)
    with pytest.raises(ValueError, match=f"has no {gone}, expected both .* download the draft head or save it again"):
        DraftHead.from_pretrained(saved)


def test_a_head_in_the_folder_of_another_model_is_added(saved: Path) -> None:
    build(seed=1).save_pretrained(saved)
    model = AutoModelForGenerativeRetrieval.from_pretrained(saved)
    assert same_heads(model.draft_head, DraftHead.from_pretrained(saved))
    assert len(model.get_input_embeddings().weight) == 67


def test_loading_into_a_model_keeps_a_head_of_the_same_shape(tmp_path: Path) -> None:
    model, other = build(), build(seed=1)
    add_draft_head(model, LEVELS)
    head = add_draft_head(other, LEVELS)
    parameters = list(head.parameters())
    save_draft_head(model, tmp_path)
    assert load_draft_head(other, Source(tmp_path)) is head is other.draft_head
    assert [id(parameter) for parameter in head.parameters()] == [id(parameter) for parameter in parameters]
    assert same_heads(head, model.draft_head)
    of_other_codes = add_draft_head(other, [[3, 4], [5, 6, 8], [4, 9]])
    assert load_draft_head(other, Source(tmp_path)) is not of_other_codes
    assert same_heads(other.draft_head, model.draft_head)


def test_a_gathered_state_dict_is_what_is_saved(tmp_path: Path) -> None:
    model = build()
    head = add_draft_head(model, LEVELS)
    gathered = {name: tensor + 1 for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    save_draft_head(model, tmp_path, state_dict=gathered)
    loaded = DraftHead.from_pretrained(tmp_path)
    assert torch.equal(loaded.logit_heads[0].weight, head.logit_heads[0].weight + 1)
    assert torch.equal(loaded.placeholder_embeddings, head.placeholder_embeddings + 1)
    assert torch.equal(loaded.codebook(1), head.codebook(1))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT 0.21 reads it
def test_a_wrapped_model_gets_its_head_inside(tmp_path: Path) -> None:
    model = build()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    head = add_draft_head(wrapped, LEVELS)
    assert wrapped.draft_head is head is model.draft_head
    save_draft_head(wrapped, tmp_path)
    assert same_heads(DraftHead.from_pretrained(tmp_path), head)
    assert load_draft_head(wrapped, Source(tmp_path)) is head


def test_a_head_and_weights_of_two_saves_are_refused(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        model = build(seed=seed)
        add_draft_head(model, LEVELS)
        model.save_pretrained(tmp_path / name)
    AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "new")
    assert len({path.stat().st_mode for path in (tmp_path / "new").iterdir()}) == 1
    (tmp_path / "old" / "model.safetensors").replace(tmp_path / "new" / "model.safetensors")  # as a kill leaves them
    with pytest.raises(ValueError, match=r"was saved with other weights than those in model.safetensors, expected"):
        AutoModelForGenerativeRetrieval.from_pretrained(tmp_path / "new")


def test_a_save_that_fails_leaves_the_folder_as_it_was(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = contents(saved), build(seed=1)
    head = add_draft_head(model, LEVELS)
    full = safetensors.SafetensorError("No space left on device")
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="draft_head.safetensors cannot be written: No space left"):
        head.save_pretrained(saved)
    assert contents(saved) == before


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (TENSORS_FILE, lambda _: safetensors.torch.save({"a": torch.zeros(1)}), "holds no draft head, expected what"),
        (TENSORS_FILE, lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], "was altered after it"),
        (JSON_FILE, lambda _: b'{"hidden_size": 32}', "is no description of a draft head: download it"),
    ],
)
def test_damaged_files_are_clear_errors(file: str, change: Any, message: str, saved: Path) -> None:
    """Other damage, which heads and indexes refuse by the same code: tests/test_index.py."""
    (saved / file).write_bytes(change((saved / file).read_bytes()))
    with pytest.raises(ValueError, match=message):
        DraftHead.from_pretrained(saved)


def test_a_head_of_another_model_is_copied(tmp_path: Path) -> None:
    first, second = build(), build(seed=1)
    head = add_draft_head(first, LEVELS)
    rows = head.placeholder_embeddings.clone()
    copied = add_draft_head(second, head)
    assert copied is second.draft_head
    assert first.draft_head is head
    with torch.no_grad():
        second.get_input_embeddings().weight.fill_(7.0)
        copied.logit_heads[0].weight.fill_(7.0)
    assert head.placeholder_embeddings.equal(rows)
    assert not bool((head.logit_heads[0].weight == 7).any())
    del second, copied
    head.save_pretrained(tmp_path)
    assert DraftHead.from_pretrained(tmp_path).placeholder_embeddings.equal(rows)


def put(name: str, tensor: Any) -> Any:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (lambda tensors: tensors.pop("logit_heads.1.weight"), {}, "there is no logit_heads.1.weight"),
        (put("more", torch.zeros(1)), {}, "there is more, which the config does not have"),
        (put("transitions.1.bias_hh", torch.zeros(32).long()), {}, "transitions.1.bias_hh is torch.int64"),
        (put("codebook_0", torch.tensor([3, 3])), {}, r"codebooks have \(1, 3, 2\) distinct tokens"),
        (put("codebook_0", torch.tensor([3, -4])), {}, "token below 0"),
        (put("logit_heads.1.weight", torch.full((3, 32), torch.nan)), {}, "logit_heads.1.weight has NaN or infinity"),
        (put("placeholder_embeddings", torch.full((3, 32), -torch.inf)), {}, "placeholder_embeddings has NaN"),
        (put("placeholder_embeddings", torch.zeros(2, 32)), {}, r"placeholder_embeddings has shape \[2, 32\]"),
        (None, {"hidden_size": 2**20}, r"of shape \[2, 32\], expected \[2, 1048576\]"),  # before it takes 4 TiB
        (None, {"hidden_size": None}, "hidden_size=None"),
        (None, {"codebook_sizes": [2, 3]}, "distinct|placeholder_token_ids"),
        (None, {"codebook_sizes": 7}, "expected a sequence with an entry for every level"),
        (None, {"transition": "gru"}, r"transition='gru', expected one of \('rnn', 'add', 'none'\)"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_a_clear_error(
    change: Any, fields: dict[str, Any], message: str, saved: Path
) -> None:
    description, _ = head_files.load(saved)
    tensors = safetensors.torch.load_file(saved / TENSORS_FILE)
    if change is not None:
        change(tensors)
    head_files.save(safetensors.torch, saved, {**description, **fields}, tensors, card=None)  # whose digests fit
    with pytest.raises(ValueError, match=rf"safetensors holds no draft head \(.*({message}).*\): download it"):
        DraftHead.from_pretrained(saved)


def test_save_pretrained_that_pushes_uploads_the_head_also_the_second_time(hub: HubServer, tmp_path: Path) -> None:
    huggingface_hub.HfApi().create_repo("me/model")
    card = b"---\ntags:\n- mine\n---\n\n# A model\n\nMy text.\n"
    huggingface_hub.HfApi().upload_file(repo_id="me/model", path_in_repo="README.md", path_or_fileobj=card)
    for seed in range(2):
        model = build(seed=seed)
        add_draft_head(model, LEVELS)
        model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/model")
        assert same_heads(AutoModelForGenerativeRetrieval.from_pretrained("me/model").draft_head, model.draft_head)
        assert hub.files("me/model")["README.md"].count(b"- draft-head") == 1
    build().push_to_hub("me/model")
    made = huggingface_hub.ModelCard(hub.files("me/model")["README.md"].decode())
    assert made.data.tags[0] == "mine"
    assert made.text.strip() == "# A model\n\nMy text."
    build().push_to_hub("me/bare")
    assert not [name for name, data in hub.files("me/bare").items() if "draft" in name or b"draft-head" in data]
