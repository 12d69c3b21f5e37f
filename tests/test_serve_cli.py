# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr serve` as users run it: a process with a model, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, SemanticIds, enable
from hf_gr.commands import app as cli
from hf_gr.commands import serve as serve_module

pytest.importorskip("fastapi")
try:  # one of them comes with huggingface_hub
    import httpx2 as httpx
except ImportError:
    import httpx  # pyright: ignore[reportMissingImports]

from hf_gr.serving.app import make_app
from hf_gr.serving.catalogues import Update
from hf_gr.serving.engine import Engine
from hf_gr.serving.schemas import RecommendRequest

NUM_ITEMS, NUM_POSITIONS = 60, 32
IDS = [f"B{number:02}" for number in range(NUM_ITEMS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its catalogue in its folder, as the demo's."""
    codes = torch.randperm(8**3, generator=torch.Generator().manual_seed(0))[:NUM_ITEMS]
    ids = SemanticIds(torch.stack([codes // 64, codes // 8 % 8, codes % 8], 1), level_sizes=[8] * 3, item_ids=IDS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=ids.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=NUM_POSITIONS, pad_token_id=0, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("cache") / "demo" / "0123"
    enable(Qwen3ForCausalLM(config)).save_pretrained(folder)
    ids.constraint_index().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server; at the end, that it drains and says nothing unexpected."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "rules.json").write_text(json.dumps({"few": ["B01", "B02"]}))
    (folder / "fallback.json").write_text(json.dumps(["B05", "B06"]))
    options = ["--rules", str(folder / "rules.json"), "--fallback", str(folder / "fallback.json"), "--workers", "2"]
    options += ["--drain-delay", "0.1"]
    log = folder / "log.jsonl"
    with log.open("w") as file:  # a pipe that nobody reads would stop the server
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_gr.cli", "serve", "--port", "0", "--num-results", "3", *options],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            # The model is found where the demo leaves it.
            env=os.environ | {"HF_GR_CACHE": str(checkpoint.parents[1]), "HF_GR_ADMIN_KEY": "change"},
        )
    assert process.stdout is not None
    try:
        told = process.stdout.readline()
        assert told.startswith(f"hf-gr serve: {checkpoint} at http://127.0.0.1:"), log.read_text()
        made = told.split(" at ")[1].split(",")[0]
        for _ in range(600):
            try:
                if httpx.get(made + "/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        yield made
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert events[-2:] == ["draining", "closed"]
        assert set(events) <= {"starting", "ready", "request", "catalogue", "draining", "closed"}
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as made:
        yield made


def ask(http: httpx.Client, **body: Any) -> Any:
    return http.post("/v1/recommend", json=body).json()


def generated(checkpoint: Path, history: list[str], num_beams: int) -> tuple[list[str], list[float]]:
    """The same by `model.generate`."""
    index = ConstraintIndex.from_pretrained(checkpoint)
    model = enable(Qwen3ForCausalLM.from_pretrained(checkpoint)).eval()
    prompt = torch.tensor([[token for row in index.snapshot.sequences_of(history)[1].tolist() for token in row]])
    out = model.generate(
        prompt, constraint_index=index, num_beams=num_beams, num_return_sequences=num_beams, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return [items[0] for items in index.items(out.sequences[:, prompt.shape[1] :])], out.sequences_scores.tolist()


def test_answers_are_those_of_generate(http: httpx.Client, checkpoint: Path) -> None:
    items, scores = generated(checkpoint, ["B03", "B04"], 20)
    answer = ask(http, history=["B03", "B04"])
    assert answer["items"] == items[:3]
    assert answer["scores"] == scores[:3]  # alone in its batch: bit for bit
    rest = [item for item in items if item != items[0]]
    assert ask(http, history=["B03", "B04"], num_results=5, exclude=[items[0]])["items"] == rest[:5]
    assert set(ask(http, history=["B03", "B04"], rule="few")["items"]) == {"B01", "B02"}
    assert ask(http, history=["B03", "B04"], filter=["B01", "B09"], rule="few")["items"] == ["B01"]


def test_histories_that_are_not_as_they_should_be(http: httpx.Client) -> None:
    answer = ask(http, history=["nothing", "B03", "nobody", "B04"])
    assert answer["dropped"] == ["nothing", "nobody"]
    assert answer["items"] == ask(http, history=["B03", "B04"])["items"]
    for history in ([], ["nothing"]):
        answer = ask(http, history=history)
        assert (answer["items"], answer["scores"], answer["is_fallback"]) == (["B05", "B06"], None, True)
    answer = ask(http, history=IDS)
    assert answer["num_cut"] == NUM_ITEMS - (NUM_POSITIONS - 2) // 3
    assert answer["items"] == ask(http, history=IDS[answer["num_cut"] :])["items"]


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ({"history": ["B01"], "num_beams": 513}, "num_beams"),
        ({"history": ["B01"], "num_beams": 5, "num_results": 6}, "num_beams"),
        ({"history": ["B01"], "rule": "nowhere"}, "rule"),
        ({"history": [7]}, "history"),
        ({"history": ["B01"], "exclude": [7]}, "exclude"),
        ({"tokens": [10**6]}, "tokens"),
        ({"text": "meow"}, "text"),
        ({}, "history"),
        ({"history": ["B01"], "tokens": [1]}, "tokens"),
    ],
)
def test_bad_requests_are_told_the_argument(http: httpx.Client, body: dict[str, Any], argument: str) -> None:
    response = http.post("/v1/recommend", json=body)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert argument in error.get("argument", error["message"])


def test_bad_requests_do_not_touch_others(http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = []
    for number in range(10):
        bodies += [{"history": IDS[number : number + 3]}, {"history": [number]}, {"history": ["B01"], "rule": "no"}]
    answers = http.post("/v1/recommend", json=bodies).json()
    assert [answer["error"]["status"] for answer in answers if "error" in answer] == [422] * 20
    for number in range(10):
        alone = ask(http, history=IDS[number : number + 3])
        assert answers[3 * number]["items"] == alone["items"]
        assert answers[3 * number]["scores"] == pytest.approx(alone["scores"], abs=1e-4)


ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 7, 2**31, 2**63, 2**64, 0.5, "", "B01", "few", "\x00", "𝔅", "x" * 500, [], {}, [[]],
    [None], ["B01"], ["B01"] * 70, ["nothing"], [7], [-1], [2**40], [0, 5], {"B01": 1}, IDS,
]  # fmt: skip


def test_odd_requests_are_answered_or_refused_by_name(http: httpx.Client) -> None:
    """Also that none of them fails inside: the server's log would have it."""
    draw = random.Random(0)
    told: Counter[int] = Counter()
    names = ["history", "text", "tokens", *RecommendRequest.model_fields]
    for _ in range(60):
        bodies = [{"history": ["B01"]} | {draw.choice(names): draw.choice(ODD)} for _ in range(4)]
        bodies += [{draw.choice(names): draw.choice(ODD) for _ in range(3)}]
        for body, answer in zip(bodies, http.post("/v1/recommend", json=bodies).json(), strict=True):
            status = answer["error"]["status"] if "error" in answer else 200
            assert status in (200, 422, 503, 504), (body, answer)  # a millisecond may be too little
            assert status != 422 or len(answer["error"]["message"]) < 1000, body
            told[status] += 1
    assert told[200] > 15
    assert told[422] > 100


def test_the_catalogue_changes(http: httpx.Client, checkpoint: Path) -> None:
    headers = {"authorization": "Bearer change"}
    before = ask(http, history=["B03", "B04"])
    change = {"remove": [before["items"][0]]}
    assert http.patch("/v1/catalogue", json=change).status_code == 401
    told = http.patch("/v1/catalogue", json=change, headers=headers).json()
    after = ask(http, history=["B03", "B04"])
    assert after["catalogue_version"] == told["version"] == before["catalogue_version"] + 1
    assert after["items"][:2] == before["items"][1:]
    change = {"add": [{"item_id": "B99", "sequence": [1000, 1, 2]}]}
    response = http.patch("/v1/catalogue", json=change, headers=headers)
    assert (response.status_code, "vocabulary" in response.text) == (422, True)
    told = http.put("/v1/catalogue", json={"index": str(checkpoint)}, headers=headers).json()
    again = ask(http, history=["B03", "B04"])
    assert (again["items"], again["catalogue_version"]) == (before["items"], told["version"])


def test_updates_outlive_a_server(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serve_module, "_make_engine", lambda _, catalogue, **options: served.append(catalogue))
    monkeypatch.setattr(serve_module, "_make_app", lambda *_, **__: None)
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)
    (tmp_path / "rules.json").write_text('{"few": ["B01", "B02"]}')
    arguments = ["serve", str(checkpoint), "--port", "0", "--updates", str(tmp_path / "log")]
    for _ in range(2):
        result = CliRunner().invoke(cli.build_app(), [*arguments, "--rules", str(tmp_path / "rules.json")])
        assert result.exit_code == 0, result.output
        assert ("--index and --rules are not read" in result.output) == (len(served) == 2)
        if len(served) == 1:
            served[0].apply(Update(remove=["B01"]))
    edition = served[1].edition
    assert (edition.version, edition.index.num_items, edition.rules["few"].num_items) == (1, NUM_ITEMS - 1, 1)
    for options, told in (["--index", checkpoint], "--index and --rules are not read"), ([], ""):
        result = CliRunner().invoke(cli.build_app(), [*arguments, *map(str, options)])
        expected = f"hf-gr serve: {told}: {tmp_path}/log has a catalogue; PUT and PATCH /v1/catalogue change it\n"
        assert result.stdout.startswith(expected if told else "hf-gr serve: /"), result.output
    bare = tmp_path / "bare"
    Qwen3Config().save_pretrained(bare)
    assert "has no catalogue yet, expected --index" in fail(bare, "--port", 0, "--updates", tmp_path / "new")


def test_unknown_items_and_empty_histories_may_be_refused(checkpoint: Path) -> None:
    async def test() -> None:
        engine = Engine(str(checkpoint), str(checkpoint), unknown_items="refuse", workers=2)
        app = make_app(engine)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://me") as http,
        ):
            while not engine.is_ready:
                await asyncio.sleep(0.01)
            for history, told in ((["B01", "nothing"], "'nothing'"), ([], "fallback")):
                response = await http.post("/v1/recommend", json={"history": history})
                assert (response.status_code, told in response.text) == (422, True)
            assert (await http.post("/v1/recommend", json={"history": ["B01"]})).status_code == 200

    asyncio.run(test())


# What keeps it from starting


def fail(*arguments: Any, code: int = 2, **environment: str) -> str:
    """What is printed of an error that a user can mend: one line on stderr."""
    result = CliRunner().invoke(cli.build_app(), ["serve", *map(str, arguments)], env=environment)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("hf-gr serve: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_no_recommender_of_the_demo(tmp_path: Path) -> None:
    told = fail("--port", 0, HF_GR_CACHE=str(tmp_path))
    assert f"{tmp_path}/demo has no recommender of the demo" in told
    assert "run hf-gr demo first" in told


def test_an_address_in_use(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "_make_engine", lambda *_, **__: pytest.fail("it loads before it looks"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port={port} cannot be used (Address already in use)" in fail(checkpoint, "--port", port, code=1)
    assert "host='192.0.2.1'" in fail(checkpoint, "--host", "192.0.2.1", "--port", 0, code=1)


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        (["--rules"], '{"few": ["nothing"]}', "'nothing'"),
        (["--rules"], '{"few": "B01"}', 'expected {"europe"'),
        (["--rules"], "{", "is no JSON"),
        (["--fallback"], '{"a": ["B01"]}', 'expected a list such as ["B01"'),
        (["--option", "no_value", "--rules"], "{}", "NAME=VALUE"),
        (["--option", "max_batch=3", "--rules"], "{}", "that has no flag of its own"),
        (["--num-beams", "600", "--rules"], "{}", "num_beams=600, num_results=10, expected 2 to max_beams=512"),
        (["--api-key", "", "--rules"], "{}", "api_key is empty"),
        (["--prompt", "Which category?", "--rules"], "{}", "expected a text with {text} in it"),
        (["--suffix-tokens", "5;6", "--rules"], "{}", "suffix_tokens='5;6', expected integers such as 5,10"),
        (["--titles"], "[]", "expected a JSON object of titles"),
        (["--port", "70000", "--rules"], "{}", "port=70000, expected 0 to 65535"),
        (["--max-body", "-1", "--rules"], "{}", "max_body=-1, expected 0 or more"),
        (["--workers", "0", "--rules"], "{}", "workers=0, expected an integer, 1 or more"),
        (["--index"], "", "is a file, expected a folder"),
    ],
)
def test_wrong_options(checkpoint: Path, tmp_path: Path, options: list[str], text: str, told: str) -> None:
    (tmp_path / "file.json").write_text(text)
    assert told in fail(checkpoint, "--port", 0, *options, tmp_path / "file.json")


def test_wrong_models_catalogues_and_keys(checkpoint: Path, tmp_path: Path) -> None:
    ConstraintIndex.from_sequences([[5, 7], [5, 1000]]).save_pretrained(tmp_path / "large")
    told = fail(checkpoint, "--index", tmp_path / "large", "--port", 0)
    assert "token 1000, expected less than the vocabulary" in told
    assert "expected one of them: check the path" in fail(tmp_path / "nothing", "--port", 0)
    assert "api_key is empty" in fail(checkpoint, "--port", 0, HF_GR_API_KEY="")
    assert "admin_key is empty" in fail(checkpoint, "--port", 0, HF_GR_ADMIN_KEY="")


def test_missing_packages(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serve_module.PACKAGES, "no_such_module", "no-such-package")
    result = CliRunner().invoke(cli.build_app(), ["serve", str(checkpoint)])
    assert (result.exit_code, result.stderr) == (1, 'hf-gr serve needs no-such-package: pip install "hf-gr[serve]"\n')


@pytest.mark.parametrize(
    ("host", "keys", "read_only"),
    [
        ("127.0.0.1", [], False),
        ("localhost", [], False),
        ("::1", [], False),
        ("0.0.0.0", [], True),
        ("0.0.0.0", ["--admin-key", "change"], False),
        ("127.0.0.1", ["--api-key", "read"], True),
    ],
)
def test_who_may_change_the_catalogue(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, host: str, keys: list[str], read_only: bool
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(serve_module, "_make_engine", lambda *_, **__: None)
    monkeypatch.setattr(serve_module, "_make_app", lambda _, **options: given.update(options))
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)
    monkeypatch.setattr("hf_gr.serving.run.bind", lambda *_: socket.socket())
    result = CliRunner().invoke(cli.build_app(), ["serve", str(checkpoint), "--host", host, *keys])
    assert result.exit_code == 0, result.output
    assert given["is_read_only"] == read_only
    assert ("nobody may change the catalogue" in result.stdout) == read_only
    assert given["titles"] is None
    assert "page" not in result.stdout


def test_what_surrounds_a_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    monkeypatch.setattr(serve_module, "_make_app", lambda engine, **_: engines.append(engine))
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)
    options = ["--prefix-tokens", "1,2", "--suffix-tokens", "3", "--prompt", r"Name it:\n{text}"]
    for given in (options, []):
        result = CliRunner().invoke(cli.build_app(), ["serve", str(checkpoint), "--port", "0", *given])
        assert result.exit_code == 0, result.output
    with_options, without = engines
    readers = [engine._recommender for engine in engines]
    assert [(reader.prefix_tokens, reader.suffix_tokens) for reader in readers] == [((1, 2), (3,)), ((), ())]
    assert (with_options.prompt, "{text}" in without.prompt) == ("Name it:\n{text}", True)


def test_the_page(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(serve_module, "_make_engine", lambda *_, **__: None)
    monkeypatch.setattr(serve_module, "_make_app", lambda _, **options: given.append(options["titles"]))
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)
    (tmp_path / "titles.json").write_text('{"B01": "Ham"}')
    for options in (["--page"], ["--titles", str(tmp_path / "titles.json")]):
        result = CliRunner().invoke(cli.build_app(), ["serve", str(checkpoint), "--port", "0", *options])
        assert (result.exit_code, "/page/, documentation" in result.stdout) == (0, True), result.output
    assert given == [{}, {"B01": "Ham"}]
