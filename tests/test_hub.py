# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Indexes, draft heads and checkpoints to a Hub and back: the real client, over HTTP, to a Hub on loopback."""

import json
import re
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from hub_server import HubServer
from huggingface_hub import HfApi, constants
from typer.testing import CliRunner

import hf_gr
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationConfig
from hf_gr.catalogue.storage import ARRAYS_FILE, JSON_FILE
from hf_gr.commands import app as cli
from hf_gr.files import draft_head as head_storage
from hf_gr.files.hub import Source
from hf_gr.generation.torch.heads import add_draft_head, load_draft_head

ROWS, ITEMS = [[5, 7, 9], [5, 7, 8], [6, 6, 8]], ["ham", "jam", "yam"]
OTHER_ROWS, OTHER_ITEMS = [[7, 9, 3], [8, 4, 4], [8, 4, 5]], ["tea", "pie", "bun"]
HEAD_FILES = [*head_storage.FILES]
COMMIT = re.compile("/commit/([0-9a-f]{40})$")
PUSHED = ["README.md", JSON_FILE, ARRAYS_FILE]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits between attempts; the seconds that somebody would have."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def make_index(rows: Any = ROWS, items: Any = ITEMS) -> ConstraintIndex:
    return ConstraintIndex.from_sequences(rows, item_ids=items)


def other_index() -> ConstraintIndex:
    return make_index(OTHER_ROWS, OTHER_ITEMS)


def same(one: ConstraintIndex, other: ConstraintIndex) -> bool:
    return list(one) == list(other) and one.items(list(one)) == other.items(list(one))


def cached(folder: Path) -> list[str]:
    """The names of all files in a cache that hold anything of a repository."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and "models--" in str(path))


def test_an_index_goes_to_the_hub_and_back(hub: HubServer, tmp_path: Path) -> None:
    address = make_index().push_to_hub("catalogue", commit_message="hello")  # the Hub puts the user's name before it
    assert COMMIT.search(address)[1] == hub.commit("me/catalogue")  # pyright: ignore
    repository = hub.repositories["me/catalogue"]
    commit = repository.commits[hub.commit("me/catalogue")]
    assert (commit.title, len(repository.commits), repository.private) == ("hello", 2, False)
    assert {path: file.is_large for path, file in commit.files.items()} == {
        name: name == ARRAYS_FILE for name in PUSHED
    }
    make_index().save_pretrained(tmp_path / "catalogue")
    for name in (JSON_FILE, ARRAYS_FILE):
        assert hub.files("me/catalogue")[name] == (tmp_path / "catalogue" / name).read_bytes()
    text = hub.files("me/catalogue")["README.md"].decode()
    assert 'index = ConstraintIndex.from_pretrained("me/catalogue")\n' in text
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    # The same again is no commit.
    assert make_index().push_to_hub("me/catalogue") == address
    assert len(hub.asked("PUT", "^/objects/")) == len(hub.asked("POST", "/commit/")) == 1
    mine = b"---\nlicense: mit\n---\nMine.\n"
    HfApi().upload_file(path_or_fileobj=mine, path_in_repo="README.md", repo_id="me/catalogue")
    other_index().push_to_hub("me/catalogue")
    assert hub.files("me/catalogue")["README.md"] == mine
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), other_index())


def test_branches_tags_and_commits_are_revisions(hub: HubServer) -> None:
    first = COMMIT.search(make_index().push_to_hub("me/catalogue"))
    assert first is not None
    HfApi().create_tag("me/catalogue", tag="v1")
    other_index().push_to_hub("me/catalogue", revision="season/next")
    load = ConstraintIndex.from_pretrained
    for revision in (None, "main", "v1", first[1]):
        assert same(load("me/catalogue", revision=revision), make_index())
    for revision in ("season/next", hub.commit("me/catalogue", "season/next")):
        assert same(load("me/catalogue", revision=revision), other_index())
    with pytest.raises(ValueError, match=r"'me/catalogue' is no folder here, and the Hub gives no .*revision="):
        load("me/catalogue", revision="v2")


def test_a_pull_request_is_made_and_pushed_to_again(hub: HubServer) -> None:
    make_index().push_to_hub("me/catalogue")
    third = make_index([[3, 3, 3]], ["egg"])
    for index, where in ((other_index(), {"create_pr": True}), (third, {"revision": "refs/pr/1"})):
        index.push_to_hub("me/catalogue", **where)
        assert same(ConstraintIndex.from_pretrained("me/catalogue", revision="refs/pr/1"), index)
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    assert list(hub.repositories["me/catalogue"].names) == ["main", "refs/pr/1"]


def test_subfolder_and_cache_dir_are_where_they_say(hub: HubServer, tmp_path: Path) -> None:
    make_index().push_to_hub("me/catalogue")
    other_index().save_pretrained(tmp_path / "other")
    HfApi().upload_folder(repo_id="me/catalogue", folder_path=tmp_path / "other", path_in_repo="eu/de")
    where = {"cache_dir": tmp_path / "cache"}
    assert same(ConstraintIndex.from_pretrained("me/catalogue", subfolder="eu/de", **where), other_index())
    assert same(ConstraintIndex.from_pretrained("me/catalogue", **where), make_index())
    with pytest.raises(ValueError, match=r"the Hub gives no constraint_index.json .*subfolder="):
        ConstraintIndex.from_pretrained("me/catalogue", subfolder="eu/fr", **where)
    assert cached(tmp_path / "cache") != []
    assert cached(tmp_path / "home") == []


def test_a_private_repository_is_for_its_owner(hub: HubServer) -> None:
    make_index().push_to_hub("me/catalogue", private=True)
    assert hub.repositories["me/catalogue"].private
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    for refused, expected in (
        (False, "check the name, revision= and subfolder=, and token= if it is private"),
        ("hf_" + "0" * 34, "the Hub refuses .*check token=, which may be wrong, expired"),
    ):
        with pytest.raises(ValueError, match=expected) as caught:
            ConstraintIndex.from_pretrained("me/catalogue", token=refused, cache_dir="empty")
        assert not refused or str(refused) not in str(caught.value)
        assert cached(Path("empty")) == []
    hub.fail("HEAD", "/resolve/", status=403)
    with pytest.raises(ValueError, match=r"the Hub refuses constraint_index.json of 'me/catalogue' .*check token="):
        ConstraintIndex.from_pretrained("me/catalogue", token=hub.token, cache_dir="empty")


@pytest.mark.parametrize(
    ("method", "pattern", "fault"),
    [
        ("HEAD", f"{ARRAYS_FILE}$", {"loses_answer": True}),
        ("GET", f"{JSON_FILE}$", {"status": 503}),
        ("GET", "^/objects/", {"after": 100}),
    ],
)
def test_a_download_that_fails_leaves_nothing_half_loaded(
    method: str, pattern: str, fault: dict[str, Any], hub: HubServer, waits: list[float], tmp_path: Path
) -> None:
    make_index().push_to_hub("me/catalogue")
    hub.fail(method, pattern, times=99, **fault)
    with pytest.raises(ConnectionError, match=r"of 'me/catalogue' did not arrive .*nothing of it is kept: try again"):
        ConstraintIndex.from_pretrained("me/catalogue")
    assert not [name for name in cached(tmp_path / "home") if name.endswith((".incomplete", ".safetensors"))]
    hub.recover()
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())


def test_both_files_are_of_one_commit_whatever_is_pushed_meanwhile(hub: HubServer) -> None:
    make_index().push_to_hub("me/catalogue")
    hub.fail("GET", f"{JSON_FILE}$", action=lambda: other_index().push_to_hub("me/catalogue"))
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), other_index())


def test_what_is_cached_needs_no_hub(hub: HubServer, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    make_index().push_to_hub("me/catalogue")
    with pytest.raises(ValueError, match=r"is not in the cache.*download it with a connection"):
        ConstraintIndex.from_pretrained("me/catalogue", local_files_only=True)
    ConstraintIndex.from_pretrained("me/catalogue")
    other_index().push_to_hub("me/catalogue")
    before = len(hub.requests)
    assert same(ConstraintIndex.from_pretrained("me/catalogue", local_files_only=True), make_index())
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    assert len(hub.requests) == before
    hub.fail("HEAD", "", status=503, times=99)
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())


UPLOAD_FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "upload": ("PUT", "^/objects/", {"status": 503}),
    "upload cut": ("PUT", "^/objects/", {"after": 100}),
    "commit cut": ("POST", "/commit/", {"after": 100}),
}


@pytest.mark.parametrize("name", UPLOAD_FAULTS)
def test_an_upload_that_fails_leaves_the_repository_as_before(
    name: str, hub: HubServer, waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    make_index().push_to_hub("me/catalogue")
    before, files = hub.commit("me/catalogue"), hub.files("me/catalogue")
    method, pattern, fault = UPLOAD_FAULTS[name]
    hub.fail(method, pattern, times=99, **fault)
    said = "is unchanged: .*safetensors.*: push again" if "upload" in name else r"the Hub did not take me/catalogue \("
    with pytest.raises(ConnectionError, match=said):
        other_index().push_to_hub("me/catalogue")
    assert (hub.commit("me/catalogue"), hub.files("me/catalogue")) == (before, files)
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), make_index())
    assert list((tmp_path / "tmp").iterdir()) == []
    hub.recover()
    uploads = len(hub.asked("PUT", "^/objects/"))
    other_index().push_to_hub("me/catalogue")
    assert same(ConstraintIndex.from_pretrained("me/catalogue"), other_index())
    # What has arrived is not uploaded again.
    assert len(hub.asked("PUT", "^/objects/")) - uploads == ("upload" in name)


def test_a_push_offline_says_what_is_off() -> None:
    with pytest.raises(ConnectionError, match="did not take me/catalogue: unset HF_HUB_OFFLINE, which is on"):
        make_index().push_to_hub("me/catalogue")


def test_an_index_that_cannot_be_saved_makes_no_repository(hub: HubServer) -> None:
    index = make_index()
    with pytest.raises(ValueError, match="no item is alive"):
        index.where(np.zeros(3, dtype=bool)).push_to_hub("me/catalogue")
    assert hub.requests == []


def make_model(*, with_head: bool = True, catalogue: str | None = None, seed: int = 0) -> Any:
    model = hf_gr.enable(families.build("qwen3", seed=seed))
    model.generation_config = GRGenerationConfig.from_dict(
        {**model.generation_config.to_dict(), "constraint_index": catalogue, "num_beams": 2, "num_return_sequences": 2}
    )
    if with_head:
        add_draft_head(model, [sorted({*level}) for level in zip(*ROWS, *OTHER_ROWS, strict=True)])
    return model


def same_weights(one: Any, other: Any) -> bool:
    """Of two modules, to the bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def answers(model: Any, index: ConstraintIndex, **options: Any) -> set[str]:
    """The items that a model gives by the catalogue that it names."""
    prompt = torch.tensor([[3, 5, 4]])
    out = model.generate(prompt, **options)
    return {item for items in index.items(out[:, prompt.shape[1] :]) for item in items}


def load(repo_id: str = "me/recommender", **options: Any) -> Any:
    return AutoModelForGenerativeRetrieval.from_pretrained(repo_id, **options)


def test_a_checkpoint_carries_its_draft_head_and_its_catalogue(hub: HubServer) -> None:
    model = make_model(catalogue=".")
    model.push_to_hub("me/recommender", private=True)
    make_index().push_to_hub("me/recommender")
    HfApi().create_tag("me/recommender", tag="v1")
    newer = make_model(catalogue=".", seed=1)
    newer.push_to_hub("me/recommender")
    other_index().push_to_hub("me/recommender")
    files = hub.files("me/recommender")
    assert {"model.safetensors", "config.json", "generation_config.json", *HEAD_FILES, *PUSHED} <= files.keys()
    assert json.loads(files["generation_config.json"])["hf_gr"] == {"constraint_index": "."}
    for revision, pushed, index in (("v1", model, make_index()), (None, newer, other_index())):
        loaded = load(revision=revision)
        assert isinstance(loaded.generation_config, GRGenerationConfig)
        assert same_weights(loaded, pushed)
        assert loaded.draft_head.config == pushed.draft_head.config
        assert answers(loaded, index) == answers(pushed, index, constraint_index=index) != set()
        assert answers(loaded, index, drafting="head") != set()


def test_a_checkpoint_and_its_catalogue_may_be_in_a_subfolder(hub: HubServer, tmp_path: Path) -> None:
    model = make_model(catalogue=".")
    model.save_pretrained(tmp_path / "checkpoint")
    make_index().save_pretrained(tmp_path / "checkpoint")
    HfApi().create_repo("me/recommender")
    HfApi().upload_folder(repo_id="me/recommender", folder_path=tmp_path / "checkpoint", path_in_repo="eu/de")
    loaded = load(subfolder="eu/de")
    assert same_weights(loaded, model)
    assert answers(loaded, make_index()) != set()


def test_a_checkpoint_is_of_one_commit_whatever_is_pushed_meanwhile(hub: HubServer) -> None:
    model = make_model(catalogue=".")
    model.push_to_hub("me/recommender")
    make_index().push_to_hub("me/recommender")

    def push_another() -> None:
        make_model(catalogue=".", seed=1).push_to_hub("me/recommender")
        other_index().push_to_hub("me/recommender")

    hub.fail("GET", "/resolve/.*/config.json$", action=push_another)
    loaded = load()
    assert same_weights(loaded, model)
    assert answers(loaded, make_index()) != set()
    assert not same_weights(load(), model)


@pytest.mark.parametrize(
    ("name", "fault"), [(HEAD_FILES[0], {"status": 503}), (HEAD_FILES[1], {"loses_answer": True})]
)
def test_a_model_is_not_loaded_without_the_draft_head_that_failed(
    name: str, fault: dict[str, Any], hub: HubServer, waits: list[float]
) -> None:
    model = make_model()
    model.push_to_hub("me/recommender")
    hub.fail("HEAD", f"/{name}$", times=99, **fault)
    with pytest.raises(ConnectionError, match=f"{name} of 'me/recommender' did not arrive"):
        load()
    hub.recover()
    assert same_weights(load(), model)
    assert same_weights(load(local_files_only=True), model)


def test_a_model_without_a_draft_head_needs_no_hub_once_it_is_cached(hub: HubServer, waits: list[float]) -> None:
    make_model(with_head=False).push_to_hub("me/recommender")
    assert not hasattr(load(), "draft_head")
    asked = len(hub.asked("HEAD", "draft_head"))
    assert asked == len(HEAD_FILES)
    load()
    assert len(hub.asked("HEAD", "draft_head")) == asked  # a commit never changes
    for method in ("HEAD", "GET"):
        hub.fail(method, "", status=503, times=99)
    assert not hasattr(load(), "draft_head")


def test_a_draft_head_that_was_pushed_later_is_found(hub: HubServer) -> None:
    make_model(with_head=False).push_to_hub("me/recommender")
    model = load()
    assert load_draft_head(model, Source("me/recommender", revision="main")) is None
    pushed = make_model()
    pushed.push_to_hub("me/recommender")
    assert same_weights(load_draft_head(model, Source("me/recommender", revision="main")), pushed.draft_head)
    assert same_weights(load(), pushed)


def test_a_catalogue_that_a_model_names_is_loaded_as_the_model_was(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_index().push_to_hub("me/catalogue", private=True)
    make_model(with_head=False, catalogue="me/catalogue").push_to_hub("me/recommender", private=True)
    HfApi().create_tag("me/recommender", tag="v1")
    monkeypatch.delenv("HF_TOKEN")
    model = load(token=hub.token, cache_dir=tmp_path / "cache", revision="v1")  # which the catalogue does not have
    assert answers(model, make_index()) != set()
    assert not {ARRAYS_FILE, "model.safetensors"} & {*cached(tmp_path / "home")}
    before = len(hub.requests)
    assert answers(load(cache_dir=tmp_path / "cache", local_files_only=True, revision="v1"), make_index()) != set()
    assert len(hub.requests) == before
    model.save_pretrained(tmp_path / "saved")
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(hub.token.encode() in data for data in kept)


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.build_app(), [*map(str, arguments)])


def test_the_commands_push_and_read(hub: HubServer, tmp_path: Path) -> None:
    """What recommend reads of the Hub: tests/test_loading.py."""
    make_index().save_pretrained(tmp_path / "catalogue")
    pushed = command("index", "push", tmp_path / "catalogue", "me/catalogue", "--private", "--revision", "next")
    assert pushed.exit_code == 0, pushed.output
    assert COMMIT.search(pushed.stdout.strip())[1] == hub.commit("me/catalogue", "next")  # pyright: ignore
    make_model(with_head=False).push_to_hub("me/recommender")
    for arguments in (("show", "--json"), ("check", "--model", "me/recommender")):
        result = command("index", arguments[0], "me/catalogue", "--revision", "next", *arguments[1:])
        assert result.exit_code == 0, result.output
    missing = command("index", "show", "me/catalogue")
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
