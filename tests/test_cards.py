# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Model cards: those of the folder model_cards, and generated ones. Their YAML is read, their Python is run."""

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from data_sets import BEAUTY, needs_beauty
from families import VOCABULARY, build
from huggingface_hub.errors import EntryNotFoundError
from label_tokenizers import tokenizer_of
from transformers.pipelines import get_supported_tasks

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.catalogue.summary import summarise
from hf_gr.files import cards
from hf_gr.generation.torch import checkpoints
from hf_gr.generation.torch.heads import add_draft_head

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "model_cards"
WRITTEN = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
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
    assert data.library_name in ("hf_gr", "transformers")
    assert data.tags == list(dict.fromkeys(data.tags))
    assert all(isinstance(tag, str) and re.fullmatch("[a-z0-9_-]+", tag) for tag in data.tags)
    assert data.license in {None, "apache-2.0", "unknown"}
    assert data.pipeline_tag in {None, *get_supported_tasks()}
    assert data.base_model is None or re.fullmatch(r"[\w.-]+/[\w.-]+", data.base_model)
    return card


def decoder(vocab_size: int = VOCABULARY, **config: Any) -> Any:
    sizes = {"vocab_size": vocab_size, "num_hidden_layers": 1, "max_position_embeddings": 512}
    return enable(build("qwen3", config=sizes | config))


def run(text: str, **namespace: Any) -> dict[str, Any]:
    """Run a card's Python, its blocks in one namespace; `...` is whatever the test has put there."""
    namespace |= {"__name__": "card"}
    for block in blocks(text, "python"):
        exec(compile(block, "card", "exec"), namespace)
    return namespace


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


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_card_is_valid_and_its_python_runs(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert f"]({name})" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert check_metadata(text).data.license is not None
    assert blocks(text, "python")
    run(text)
    printed = capsys.readouterr().out.splitlines()
    assert set(re.findall(r"^print\(.*# -> (.*)$", text, flags=re.MULTILINE)) <= set(printed)
    commands = re.findall(r"python (examples/[\w/]+\.py)((?: --?[\w-]+)*)", text)
    assert commands
    for script, options in commands:
        source = (ROOT / script).read_text(encoding="utf-8")
        source += (ROOT / "examples" / "benchmark" / "report.py").read_text(encoding="utf-8")  # options of several
        assert all(f'"{option}"' in source for option in options.split())
    assert all((FOLDER / target).exists() for target in re.findall(r"\]\(([^)#:]+)\)", text))


@needs_beauty
def test_the_levels_of_beauty_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "beauty-catalogue.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("items.tsv").write_bytes((BEAUTY / "items.tsv").read_bytes())
    exec(blocks(text, "python")[0], {})
    generated = Path("beauty-catalogue", "README.md").read_text(encoding="utf-8")
    assert tables(generated)[0] == tables(text)[0]
    assert "12,023 token sequences for 12,035 items" in generated
    assert "Of all items,\n21 share a sequence." in generated
    assert "21 items share 9 of the 12,023 sequences" in text


def test_an_index_card_counts_what_is_left_after_updates() -> None:
    index = ConstraintIndex.from_sequences([*ROWS, [5, 12, 22]], item_ids=["a", "b", "c", "d", "e"])
    text = cards.index_card(summarise(index.snapshot), "me/catalogue")
    check_metadata(text)
    assert tables(text)[0][1] == ["2", "4", "1.33", "2", "66.7%", "100.0%"]
    assert "Of all items,\n2 share a sequence." in text
    assert "a vocabulary of at least 23 tokens" in text
    index.remove(["d", "e"])
    text = cards.index_card(summarise(index.snapshot), "me/catalogue")
    assert tables(text)[0][0][:2] == ["1", "2"]
    assert "3 token sequences for 3 items, up to\n3 tokens each" in text


def test_the_python_of_an_indexs_and_of_a_heads_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of("bpe")
    model = decoder(len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    index = ConstraintIndex.from_sequences(torch.cartesian_prod(torch.arange(3, 9), torch.arange(9, 15)))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    index.save_pretrained("catalogue")
    add_draft_head(model, index, tokenizer=tokenizer).save_pretrained("head")
    for folder in ("catalogue", "head"):
        text = Path(folder, "README.md").read_text(encoding="utf-8")
        check_metadata(text)
        code = text.replace('ConstraintIndex.from_pretrained("...")', 'ConstraintIndex.from_pretrained("catalogue")')
        made = run(code.replace('"..."', '"model"'), inputs=tokenizer("ab", return_tensors="pt"))
        assert len(made["items"]) == 20
    assert "and the placeholders `<SP_1>` (" in text
    assert "hidden size of 32, transition `rnn`, a state" in text


@pytest.mark.parametrize("kind", ["decoder", "t5", "head", "plain catalogue"])
def test_a_checkpoints_python_runs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model = enable(build("t5")) if kind == "t5" else decoder()
    index = ConstraintIndex.from_sequences(torch.cartesian_prod(torch.arange(3, 9), torch.arange(9, 15)))
    if kind == "head":
        add_draft_head(model, index)
    model.generation_config.constraint_index = None if kind == "plain catalogue" else "."
    model.save_pretrained("recommender", custom_generate=True)
    card = Path("recommender", "README.md").read_text(encoding="utf-8")
    index.save_pretrained("recommender")
    text = Path("recommender", "README.md").read_text(encoding="utf-8")
    assert text == card  # the first one stays
    card = check_metadata(text)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == (None if kind == "t5" else "text-generation")  # whose pipeline cannot load it
    assert ("draft-head" in card.data.tags) == (kind == "head") == ("## Draft head" in text)
    assert "custom_generate" in card.data.tags
    made = run(text.replace('"..."', '"recommender"'))
    assert len(made["items"]) == 20
    assert all(made["items"])


def test_a_new_repository_gets_our_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the one that transformers makes."""

    def load(*_: Any, **__: Any) -> Any:
        raise EntryNotFoundError.__new__(EntryNotFoundError)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.ModelCard, "load", load)
        template = str(transformers.utils.hub.create_and_tag_model_card("me/recommender", tags=["films"]))
    assert not cards.is_template(template.replace("[More Information Needed]", "Films of 1998.", 1))
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
        "---\n# a comment\ntags: [generative-recommendation,  hf_gr]\n---\n\n\n# Mine   \n",
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
    tags = list(dict.fromkeys([*own, "generative-recommendation", "hf_gr"]))
    assert after.data.to_dict() == {**before.data.to_dict(), "tags": tags}
    if own == tags:
        assert (tmp_path / "README.md").read_text(encoding="utf-8") == card


def test_a_base_model_is_named_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = {"you/base": "somewhere", "you/folder": "somewhere"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: there.get(name))
    Path("you/folder").mkdir(parents=True)
    model = decoder()
    for name in ("you/base", "you/gone", "", "me/recommender", "you/folder"):
        model.config._name_or_path = name
        text = checkpoints._card(model, "me/recommender", custom_generate=True)
        expected = "you/base" if name == "you/base" else None
        assert check_metadata(text).data.base_model == expected
        assert ("made from `you/base`" in text) == (expected is not None)


def test_a_folder_of_this_machine_is_not_told(tmp_path: Path) -> None:
    model = decoder()
    model.generation_config.constraint_index = str(tmp_path)
    text = checkpoints._card(model, "me/recommender", custom_generate=False)
    assert str(tmp_path) not in text
    assert 'ConstraintIndex.from_pretrained("...")' in text
