# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards: those of the folder model_cards, and generated ones. Their YAML is read, their Python is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
import yaml
from data_sets import BEAUTY, needs_beauty
from huggingface_hub.errors import EntryNotFoundError
from label_tokenizers import tokenizer_of
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.pipelines import get_supported_tasks

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.catalogue.summary import summarise
from hf_gr.files import cards
from hf_gr.generation.torch import checkpoints
from hf_gr.generation.torch.heads import add_draft_head

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "model_cards"
WRITTEN = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
# What the Hub takes for `license`, of those that cards here have.
LICENSES = {"apache-2.0", "unknown"}
ROWS = [[3, 10, 20], [3, 11, 20], [4, 10, 21], [5, 12, 22]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table's rows, headings left out."""
    found = re.findall(r"((?:^\|.*\|\n)+)", text, flags=re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]] for table in found
    ]


def check_metadata(text: str) -> Any:
    """What `ModelCard.validate` asks the Hub for, as far as it can be told without one: types, and known names."""
    card = huggingface_hub.ModelCard(text)
    data: Any = card.data
    assert yaml.safe_load(text.split("---\n")[1]) == {**data.to_dict()}
    known = set(huggingface_hub.ModelCardData().__dict__) - {"eval_results"}
    assert set(data.to_dict()) <= known
    assert data.library_name in ("hf_gr", "transformers")
    assert data.tags == list(dict.fromkeys(data.tags))
    assert all(isinstance(tag, str) and re.fullmatch("[a-z0-9_-]+", tag) for tag in data.tags)
    assert data.license in {None, *LICENSES}
    assert data.pipeline_tag in {None, *get_supported_tasks()}
    assert data.base_model is None or re.fullmatch(r"[\w.-]+/[\w.-]+", data.base_model)
    return card


def decoder(vocab_size: int = 32, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    made = Qwen3Config(vocab_size=vocab_size, max_position_embeddings=512, **sizes, **heads, **(ends | config))
    return enable(Qwen3ForCausalLM(made).eval())


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return enable(
        T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, eos_token_id=1, **sizes)).eval()
    )


def run(text: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a card's Python, its blocks in one namespace; `...` is whatever the test has put there."""
    namespace = {"__name__": "card"} if namespace is None else namespace
    for block in blocks(text, "python"):
        exec(compile(block, "card", "exec"), namespace)
    return namespace


# Those of model_cards


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with stand-ins for what the cards' commands make in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = tmp_path / ".cache" / "hf_gr"
    rows = torch.randint(256, (60, 4), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [
        "item_id\tlevel_1\tlevel_2\tlevel_3\tlevel_4",
        *("\t".join(map(str, [i, *row])) for i, row in enumerate(rows)),
    ]
    (tmp_path / "items.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ids = SemanticIds(torch.tensor(rows), level_sizes=[256] * 4)
    backbone = decoder(ids.vocab_size + 1)
    aligned = "experiments/atspeed/beauty-01234567/aligned/beamkd-1-01234567"
    for path in ("experiments/backbone-beauty-texts-01234567", "experiments/backbone-beauty-01234567", aligned):
        backbone.save_pretrained(made / path)
    ids.constraint_index().save_pretrained(made / "experiments" / "backbone-beauty-01234567")
    add_draft_head(backbone, ids)
    backbone.save_pretrained(made / "experiments" / "nezha-beauty-0123abcd" / "nezha-0")
    tokenizer = tokenizer_of("bpe")
    decoder(len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(made / "smollm2")
    tokenizer.save_pretrained(made / "smollm2")
    return tmp_path


def test_there_are_cards_and_the_list_has_them_all() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(WRITTEN) >= 4
    assert sorted(re.findall(r"\]\((\w[^)/]*\.md)\)", text)) == WRITTEN


@pytest.mark.parametrize("name", WRITTEN)
def test_written_metadata_is_valid(name: str) -> None:
    card = check_metadata((FOLDER / name).read_text(encoding="utf-8"))
    assert card.data.license is not None
    assert huggingface_hub.ModelCard.load(FOLDER / name).data.to_dict() == card.data.to_dict()


@pytest.mark.parametrize("name", WRITTEN)
def test_written_python_runs(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert blocks(text, "python")
    run(text)
    printed = capsys.readouterr().out.splitlines()
    for expected in re.findall(r"^print\(.*# -> (.*)$", text, flags=re.MULTILINE):
        assert expected in printed


@pytest.mark.parametrize("name", WRITTEN)
def test_commands_and_links_are_there(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    commands = re.findall(r"python (examples/[\w/]+\.py)((?: --?[\w-]+)*)", text)
    assert commands
    for script, options in commands:
        source = (ROOT / script).read_text(encoding="utf-8")
        source += (ROOT / "examples" / "benchmark" / "report.py").read_text(encoding="utf-8")  # options of several
        for option in options.split():
            assert f'"{option}"' in source, option
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).exists(), target


@needs_beauty
def test_the_levels_of_beauty_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "beauty-catalogue.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("items.tsv").write_bytes((BEAUTY / "items.tsv").read_bytes())
    exec(blocks(text, "python")[0], {})
    generated = Path("beauty-catalogue", "README.md").read_text(encoding="utf-8")
    assert tables(generated)[0] == tables(text)[0]
    assert "12,023 token sequences for 12,035 items" in generated
    assert "21 items share 9 sequences" in generated
    assert "21 items share 9 of the 12,023 sequences" in text


# Those that are generated


def card_of(index: ConstraintIndex, name: str = "me/catalogue") -> str:
    snapshot = index.snapshot.compact()
    num_codes = [len(tokens) for tokens in snapshot.items.trie.codebooks]
    text = cards.index_card(summarise(snapshot), num_codes, name)
    check_metadata(text)
    return text


def test_an_index_card_has_its_levels() -> None:
    text = card_of(ConstraintIndex.from_sequences([*ROWS, [5, 12, 22]], item_ids=["a", "b", "c", "d", "e"]))
    assert tables(text) == [
        [
            ["1", "3", "3.00", "3", "3", "0%", "50%"],
            ["2", "4", "1.33", "2", "3", "67%", "100%"],
            ["3", "4", "1.00", "1", "3", "100%", "100%"],
        ]
    ]
    assert "Item ids are strings. 2 items share 1 sequences, at most 2 one of them." in text
    assert "a vocabulary of at least 23 tokens" in text


def test_an_index_card_counts_what_is_left_after_updates() -> None:
    index = ConstraintIndex.from_sequences(ROWS, eos_token_id=1)
    index.remove([3])
    text = card_of(index)
    assert tables(text)[0][0][:2] == ["1", "2"]
    assert "3 token sequences for 3 items, up to\n4 tokens each including the end token 1" in text


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_shares_read_all_or_nothing_only_where_they_are(share: float) -> None:
    assert (cards._percent(share) in ("0%", "100%")) == (share in (0, 1))


def test_an_index_cards_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    index = ConstraintIndex.from_sequences(torch.cartesian_prod(torch.arange(3, 9), torch.arange(9, 15)))
    index.save_pretrained("catalogue")
    decoder().save_pretrained("model")
    text = Path("catalogue", "README.md").read_text(encoding="utf-8").replace('"..."', '"model"')
    inputs = {"input_ids": torch.tensor([[3, 10]])}
    assert len(run(text, {"inputs": inputs})["items"]) == 20


def test_a_head_cards_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of("bpe")
    model = decoder(len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    index = ConstraintIndex.from_sequences(torch.cartesian_prod(torch.arange(3, 9), torch.arange(9, 15)))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    index.save_pretrained("catalogue")
    add_draft_head(model, index, tokenizer=tokenizer).save_pretrained("head")
    text = Path("head", "README.md").read_text(encoding="utf-8")
    check_metadata(text)
    code = text.replace('ConstraintIndex.from_pretrained("...")', 'ConstraintIndex.from_pretrained("catalogue")')
    made = run(code.replace('"..."', '"model"'), {"inputs": tokenizer("ab", return_tensors="pt")})
    assert len(made["items"]) == 20


@pytest.mark.parametrize("kind", ["decoder", "t5", "head", "plain catalogue"])
def test_a_checkpoints_python_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = t5() if kind == "t5" else decoder()
    index = ConstraintIndex.from_sequences(torch.cartesian_prod(torch.arange(3, 9), torch.arange(9, 15)))
    if kind == "head":
        add_draft_head(model, index)
    model.generation_config.constraint_index = None if kind == "plain catalogue" else "."
    model.save_pretrained("recommender", custom_generate=True)
    index.save_pretrained("recommender")
    text = Path("recommender", "README.md").read_text(encoding="utf-8")
    card = check_metadata(text)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == (None if kind == "t5" else "text-generation")  # whose pipeline cannot load it
    assert ("draft-head" in card.data.tags) == (kind == "head") == ("## Draft head" in text)
    assert "custom_generate" in card.data.tags
    made = run(text.replace('"..."', '"recommender"'), {"inputs": {"input_ids": torch.tensor([[3, 10]])}})
    assert len(made["items"]) == 20
    assert all(made["items"])


def test_what_has_nothing_of_ours_gets_no_card(tmp_path: Path) -> None:
    decoder().save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_card_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    decoder().save_pretrained(tmp_path, custom_generate=True)
    ConstraintIndex.from_sequences(ROWS).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


# Those on the Hub


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> str:
    """The card that transformers makes for a repository that has none."""

    def load(*_: Any, **__: Any) -> Any:
        error = EntryNotFoundError.__new__(EntryNotFoundError)
        Exception.__init__(error, "404 Client Error")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.ModelCard, "load", load)
        return str(transformers.utils.hub.create_and_tag_model_card("me/recommender", tags=["films"]))


def test_the_template_of_transformers_is_known(template: str) -> None:
    assert cards.is_template(template)
    assert not cards.is_template(template.replace("[More Information Needed]", "Films of 1998.", 1))
    assert not cards.is_template("# My model\n")


def test_a_new_repository_gets_our_card(template: str, tmp_path: Path) -> None:
    model = decoder()
    model.generation_config.constraint_index = "."
    (tmp_path / "README.md").write_text(template, encoding="utf-8")
    checkpoints.prepare_upload(model, tmp_path, "me/recommender", {}, custom_generate=True)
    card = check_metadata((tmp_path / "README.md").read_text(encoding="utf-8"))
    assert card.data.tags == ["films", "generative-recommendation", "custom_generate", "hf_gr"]
    assert "[More Information Needed]" not in card.text
    assert 'ConstraintIndex.from_pretrained("me/recommender")' in card.text


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: mit\nlibrary_name: keras\nmine: [1, 2]\ntags:\n- films\n---\n\n# Mine\n\n*Words* {x}\n",
        "---\nlicense: mit\ntags: films\n---\n# Mine\n",
        "# No front matter\n\n---\n\nA rule above.\n",
    ],
)
def test_somebodys_card_gets_tags_and_nothing_else(card: str, tmp_path: Path) -> None:
    model = decoder()
    model.generation_config.constraint_index = "."
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    for _ in range(2):
        checkpoints.prepare_upload(model, tmp_path, "me/recommender", {})
    before, after = huggingface_hub.ModelCard(card), huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert after.text.strip() == before.text.strip()
    there: Any = before.data.tags or []
    own = [there] if isinstance(there, str) else there
    assert after.data.to_dict() == {
        **before.data.to_dict(),
        "tags": [*own, "generative-recommendation", "hf_gr"],
    }


def test_a_card_that_has_the_tags_is_not_touched() -> None:
    card = "---\n# a comment\ntags: [hf_gr,  generative-recommendation]\n---\n\n\n\n# Mine   \n"
    assert cards.tag_card(card, ["generative-recommendation", "hf_gr"]) == card


def test_a_base_model_is_named_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def cached(name: str, file: str) -> str | None:
        asked.append((name, file))
        return "somewhere" if name == "you/base" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    model = decoder()
    for name, named in {"you/base": True, "you/gone": False, "": False, "me/recommender": False}.items():
        model.config._name_or_path = name
        text = checkpoints._card(model, "me/recommender", custom_generate=True)
        card = check_metadata(text)
        assert (card.data.base_model == "you/base") == named
        assert ("made from `you/base`" in text) == named
    Path("you/base").mkdir(parents=True)  # a folder of this machine
    model.config._name_or_path = "you/base"
    assert check_metadata(checkpoints._card(model, "me/recommender", custom_generate=True)).data.base_model is None


def test_a_folder_of_this_machine_is_not_told(tmp_path: Path) -> None:
    model = decoder()
    model.generation_config.constraint_index = str(tmp_path)
    model.save_pretrained(tmp_path / "recommender")
    text = (tmp_path / "recommender" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert 'ConstraintIndex.from_pretrained("...")' in text


def test_plain_transformers_loads_a_checkpoint_with_a_card(tmp_path: Path) -> None:
    decoder().save_pretrained(tmp_path, custom_generate=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 32
