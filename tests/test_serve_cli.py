# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr serve` as users run it: a process with a model, asked over HTTP; and what its options do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import build
from serving_fake import FakeEngine, httpx
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from hf_gr import ConstraintIndex, enable
from hf_gr.commands import app as cli
from hf_gr.commands import serve as serve_module
from hf_gr.serving.app import make_app
from hf_gr.serving.catalogues import Update
from hf_gr.serving.update_log import UpdateLog

DEPLOY = Path(__file__).parent.parent / "examples" / "deploy"
NUM_ITEMS = 60
IDS = [f"B{number:02}" for number in range(NUM_ITEMS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its catalogue in its folder, as the demo's."""
    folder = tmp_path_factory.mktemp("cache") / "demo" / "0123"
    enable(build("qwen3")).save_pretrained(folder)
    rows = [[3 + n % 8, 11 + n // 8, 20 + n % 5] for n in range(NUM_ITEMS)]
    ConstraintIndex.from_sequences(rows, item_ids=IDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def http(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server; at the end, that it drains and says nothing unexpected."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "rules.json").write_text(json.dumps({"few": ["B01", "B02"]}))
    (folder / "fallback.json").write_text(json.dumps(["B05", "B06"]))
    options = ["--rules", str(folder / "rules.json"), "--fallback", str(folder / "fallback.json"), "--workers", "2"]
    log = folder / "log.jsonl"
    with log.open("w") as file:  # a pipe that nobody reads would stop the server
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_gr.cli", "serve", "--port=0", "--num-results=3", "--drain-delay=0.1", *options],
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
        with httpx.Client(base_url=told.split(" at ")[1].split(",")[0], timeout=30) as made:
            deadline = time.monotonic() + 60
            while not is_ready(made):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield made
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert events[-2:] == ["draining", "closed"]
        assert set(events) <= {"starting", "ready", "request", "catalogue", "message", "draining", "closed"}
    finally:
        process.kill()
        process.communicate()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def ask(http: httpx.Client, **body: Any) -> Any:
    return http.post("/v1/recommend", json=body).json()


def test_answers_are_those_of_generate(http: httpx.Client, checkpoint: Path) -> None:
    index, history = ConstraintIndex.from_pretrained(checkpoint), ["B03", "B04"]
    model, prompt = enable(Qwen3ForCausalLM.from_pretrained(checkpoint)).eval(), torch.tensor([index.encode(history)])
    how: dict[str, Any] = {"num_beams": 20, "num_return_sequences": 20, "output_scores": True}
    out = model.generate(prompt, constraint_index=index, return_dict_in_generate=True, **how)
    items = [items[0] for items in index.items(out.sequences[:, prompt.shape[1] :])]
    answer = ask(http, history=history)
    assert answer["items"] == items[:3]
    assert answer["scores"] == out.sequences_scores.tolist()[:3]  # alone in its batch: bit for bit
    assert ask(http, history=history, num_results=5, exclude=[items[0]])["items"] == items[1:6]
    assert ask(http, history=history, filter=["B01", "B09"], rule="few")["items"] == ["B01"]
    answer = ask(http, history=["nothing"])
    assert (answer["items"], answer["scores"], answer["is_fallback"]) == (["B05", "B06"], None, True)
    change, key = {"add": [{"item_id": "B99", "sequence": [1000, 1, 2]}]}, {"authorization": "Bearer change"}
    told = http.patch("/v1/catalogue", json=change, headers=key)
    assert (told.status_code, "vocabulary" in told.text) == (422, True)


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or later tests would log to streams of these, which are closed."""
    monkeypatch.setattr("hf_gr.serving.logs.configure", lambda **_: None)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the engine and the application of each server would be made of."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr("hf_gr.serving.engine.Engine", lambda _, **how: made.append(how))
    monkeypatch.setattr("hf_gr.serving.app.make_app", lambda _, **how: made[-1].update(how))
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)
    return made


def serve(*arguments: Any) -> str:
    """What it prints, with any free port."""
    result = CliRunner().invoke(cli.build_app(), ["serve", "--port", "0", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_updates_outlive_a_server(checkpoint: Path, tmp_path: Path, served: list[dict[str, Any]]) -> None:
    (tmp_path / "rules.json").write_text('{"few": ["B01", "B02"]}')
    arguments = [checkpoint, "--updates", tmp_path / "log"]
    assert "not read" not in serve(*arguments, "--rules", tmp_path / "rules.json")
    served[0]["constraint_index"].apply(Update(remove=["B01"]))
    for options in (["--rules", tmp_path / "rules.json"], ["--index", checkpoint]):
        told = f"hf-gr serve: --index and --rules are not read: {tmp_path}/log has a catalogue; PUT and PATCH /v1/cat"
        assert serve(*arguments, *options).startswith(told)
    assert serve(*arguments).startswith("hf-gr serve: /")
    live = served[1]["constraint_index"]
    edition = live.edition
    assert (edition.version, edition.index.num_items, edition.rules["few"].num_items) == (1, NUM_ITEMS - 1, 1)
    assert serve("--updates", tmp_path / "log").startswith(f"hf-gr serve: {checkpoint} at ")  # as it began
    live.swap(edition.index, model="me/new@v2", check=lambda index: None)
    assert f"{tmp_path}/log has the catalogue of me/new@v2: to serve that, omit MODEL" in serve(*arguments)
    assert serve("--updates", tmp_path / "log").startswith("hf-gr serve: me/new at ")
    assert (served[-1]["revision"], served[-1]["constraint_index"].edition.model) == ("v2", "me/new@v2")


@pytest.mark.parametrize(
    ("host", "keys", "read_only"),
    [
        ("127.0.0.1", [], False),
        ("::1", [], False),
        ("0.0.0.0", [], True),
        ("0.0.0.0", ["--admin-key", "change"], False),
        ("127.0.0.1", ["--api-key", "read"], True),
    ],
)
def test_who_may_change_the_catalogue(
    checkpoint: Path, served: Any, monkeypatch: pytest.MonkeyPatch, host: str, keys: list[str], read_only: bool
) -> None:
    monkeypatch.setattr("hf_gr.serving.run.bind", lambda *_: socket.socket())
    told = serve(checkpoint, "--host", host, *keys)
    assert served[0]["is_read_only"] == ("the catalogue is read-only" in told) == read_only


def test_options_come_where_they_belong(checkpoint: Path, tmp_path: Path, served: list[dict[str, Any]]) -> None:
    (tmp_path / "titles.json").write_text('{"B01": "Ham"}')
    around = [
        "--body-timeout",
        "3",
        "--allow-origin",
        "https://a.example",
        "--prefix-tokens",
        "1,2",
        "--suffix-tokens",
        "3",
        "--prompt",
        r"Name it:\n{text}",
        "--attributes",
        "items.csv",
    ]
    for options, page in (
        ([*around, "--unknown-items", "refuse"], None),
        (["--page"], {}),
        (["--titles", tmp_path / "titles.json"], {"B01": "Ham"}),
    ):
        told = serve(checkpoint, *options)
        assert (served[-1]["titles"], "/page/, documentation" in told) == (page, page is not None)
    assert (served[0]["prefix_tokens"], served[0]["suffix_tokens"]) == ([1, 2], [3])
    assert (served[0]["prompt"], served[0]["unknown_items"]) == ("Name it:\n{text}", "refuse")
    assert served[0]["attributes"] == Path("items.csv")
    assert "prompt" not in served[1]  # the engine's own
    assert (served[0]["limits"].body_timeout, served[0]["origins"]) == (3.0, ["https://a.example"])


def test_files_for_containers_start_servers_that_there_are(
    checkpoint: Path, tmp_path: Path, served: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their commands as they are, but for paths; their probes; their secrets."""
    monkeypatch.setattr("hf_gr.serving.run.bind", lambda *_: socket.socket())
    (entry,) = re.findall("ENTRYPOINT (.*)", (DEPLOY / "Containerfile").read_text())
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["recommender"]
    deployment, service, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for command in (compose["command"], container["args"]):
        moved = {"/recommender": str(checkpoint), "/updates": str(tmp_path / "updates")}
        words = [*json.loads(entry)[2:], *(moved.get(word, word) for word in command)]
        told = CliRunner().invoke(cli.build_app(), ["serve", *words], env={"HF_GR_API_KEY": "old new"})
        assert (told.exit_code, served[-1]["cores"], served[-1]["api_key"]) == (0, 4, "old new"), told.output
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths <= {str(getattr(route, "path", "")) for route in make_app(FakeEngine()).routes}
    assert set(compose["environment"]) == {"HF_GR_API_KEY", "HF_GR_ADMIN_KEY"} >= {container["env"][0]["name"]}
    delay, default = command[command.index("--drain-delay") + 1], signature(serve_module.serve).parameters
    assert pod["terminationGracePeriodSeconds"] > float(delay) + default["drain_timeout"].default + 1
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == {"app": "hf-gr"}


def fail(*arguments: Any, code: int = 2, **environment: str) -> str:
    """What is printed of an error that a user can mend: one line on stderr."""
    result = CliRunner().invoke(cli.build_app(), ["serve", *map(str, arguments)], env=environment)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("hf-gr serve")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        (["--rules"], '{"few": ["nothing"]}', "'nothing'"),
        (["--rules"], '{"few": "B01"}', 'expected {"europe"'),
        (["--rules"], "{", "is no JSON"),
        (["--fallback"], '{"a": ["B01"]}', 'expected a list such as ["B01"'),
        (["--option", "no_value", "--rules"], "{}", "NAME=VALUE"),
        (["--option", "max_batch=3", "--rules"], "{}", "that has no flag of its own"),
        (["--prompt", "Which category?", "--rules"], "{}", "expected a text with {text} in it"),
        (["--suffix-tokens", "5;6", "--rules"], "{}", "--suffix-tokens '5;6', expected integers such as 5,10"),
        (["--max-update", "0", "--rules"], "{}", "--max-update 0, expected more than 0"),
        (["--allow-origin", "shop.example", "--rules"], "{}", "expected a scheme and a host, such as https://"),
        (["--titles"], "[]", "expected a JSON object of titles"),
        (["--port", "70000", "--rules"], "{}", "--port 70000, expected 0 to 65535"),
        (["--workers", "0", "--rules"], "{}", "--workers 0, expected an integer, 1 or more"),
        (["--index"], "", "is a file, expected a folder"),
    ],
)
def test_wrong_options(checkpoint: Path, tmp_path: Path, options: list[str], text: str, told: str) -> None:
    (tmp_path / "file.json").write_text(text)
    assert told in fail(checkpoint, "--port", 0, *options, tmp_path / "file.json")


def test_wrong_models_catalogues_keys_and_addresses(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_gr.serving.run.run", lambda *_, **__: None)  # what is not refused ends, too
    ConstraintIndex.from_sequences([[5, 7], [5, 1000]]).save_pretrained(tmp_path / "large")
    Qwen3Config().save_pretrained(tmp_path / "bare")
    told = fail(checkpoint, "--index", tmp_path / "large", "--port", 0)
    assert "token 1000, expected less than the vocabulary" in told
    assert "expected one of them: check the path" in fail(tmp_path / "nothing", "--port", 0)
    told = fail(tmp_path / "bare", "--port", 0, "--updates", tmp_path / "new")
    assert "has no catalogue yet, expected --index" in told
    told = fail("--port", 0, HF_GR_CACHE=str(tmp_path))
    assert f"{tmp_path}/demo has no recommender of the demo" in told
    assert "run hf-gr demo first" in told
    monkeypatch.setattr("hf_gr.serving.update_log.LOCK_SECONDS", 0.0)
    with UpdateLog(tmp_path / "new").writing():
        told = fail(checkpoint, "--port", 0, "--updates", tmp_path / "new", code=1)
    assert "hf-gr serve: another process has held " in told
    assert "api_key is empty" in fail(checkpoint, "--port", 0, HF_GR_API_KEY="")
    assert "admin_key is empty" in fail(checkpoint, "--port", 0, HF_GR_ADMIN_KEY="")
    monkeypatch.setattr("hf_gr.serving.engine.Engine", lambda *_, **__: pytest.fail("it loads before it looks"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port} cannot be used (Address already in use)" in fail(checkpoint, "--port", port, code=1)
    assert "--host '192.0.2.1'" in fail(checkpoint, "--host", "192.0.2.1", "--port", 0, code=1)
    monkeypatch.setitem(serve_module.PACKAGES, "no_such_module", "no-such-package")
    told = CliRunner().invoke(cli.build_app(), ["serve", str(checkpoint)])  # Python itself prints it, to stderr
    assert (told.exit_code, told.output) == (1, 'hf-gr serve needs no-such-package: pip install "hf-gr[serve]"\n')
