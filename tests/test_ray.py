# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Replicas on Ray Serve behind HAProxy: an answer as by `generate`, one catalogue, and one may be killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build

from hf_gr import ConstraintIndex, enable
from hf_gr.serving.catalogues import LiveCatalogue
from hf_gr.serving.update_log import UpdateLog

pytest.importorskip("ray", reason='needs pip install "hf-gr[ray]"')
httpx = pytest.importorskip("httpx")
psutil = pytest.importorskip("psutil")
yaml = pytest.importorskip("yaml")

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_serve" / "serve.yaml"
ROWS = [[a, b, c] for a in range(4, 9) for b in range(10, 15) for c in range(20, 24)]
IDS = [f"B{number:02}" for number in range(len(ROWS))]
HISTORY = ["B03", "B07", "B40"]
ADMIN = "secret"
CLIENTS = 4
NEW_MODEL = """
import json, sys
import ray
from ray import serve
from hf_gr.serving.ray_serve import Recommender
ray.init(address="auto")
recommender = Recommender.options(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
serve.run(recommender.bind(json.loads(sys.argv[1])), name="recommender", route_prefix="/")
"""
START_SECONDS = 150  # of Ray on a busy machine of two cores; 40 on an idle one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and a catalogue."""
    folder = tmp_path_factory.mktemp("ray")
    for name, family in (("model", "qwen3"), ("other", "llama")):
        build(family).save_pretrained(folder / name)
    ConstraintIndex.from_sequences(ROWS, item_ids=IDS).save_pretrained(folder / "index")
    return folder


def example(folder: Path, port: int) -> dict[str, Any]:
    """The YAML of the examples, with a model of ours."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    engine = {"num_beams": 4, "num_results": 3, "timeout": 20.0, "key_cache_bytes": 0}
    (one,) = config["applications"]
    one["runtime_env"]["env_vars"] = {"HF_GR_ADMIN_KEY": ADMIN}
    one["args"] |= {"engine": engine, "constraint_index": f"{folder}/index"}
    one["args"] |= {"model": f"{folder}/model", "updates": f"{folder}/log"}
    one["deployments"][0]["ray_actor_options"] = {"num_cpus": 0.5}
    return config


@dataclass
class Cluster:
    """Where it listens, and its first process."""

    url: str
    pid: int
    environment: dict[str, str]

    def replicas(self) -> set[int]:
        """The processes of the application."""
        found: set[int] = set()
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                if " ".join(process.cmdline()).startswith("ray::ServeReplica:recommender"):
                    found.add(process.pid)
        return found


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    """`serve run` on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "serve.yaml").write_text(yaml.safe_dump(example(folder, port)))
    home = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets are short
    settings = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": home}
    settings["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    environment = {**os.environ, **settings}
    command = [str(Path(sys.executable).parent / "serve"), "run", str(folder / "serve.yaml")]
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, cwd=folder, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        made = Cluster(f"http://127.0.0.1:{port}", process.pid, environment)
        while not (is_ready(made.url) and len(made.replicas()) == 2):
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.5)
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def change(url: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.patch(f"{url}/v1/catalogue", json=fields, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(url: str) -> Any:
    return httpx.post(f"{url}/v1/recommend", json={"history": HISTORY}, timeout=60)


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on:DeprecationWarning")  # Ray's own
def test_arguments_are_checked_before_anything_starts() -> None:
    from hf_gr.serving.ray_serve import build

    with pytest.raises(ValueError, match="args={}, expected a model in it"):
        build({})
    with pytest.raises(ValueError, match="args has 'indx', expected some of model, constraint_index"):
        build({"model": "m", "indx": "i"})


@pytest.mark.slow
def test_an_update_is_known_to_all_replicas_when_it_is_answered(cluster: Cluster) -> None:
    for _ in range(5):
        gone = ask(cluster.url).json()["items"][0]
        version = change(cluster.url, remove=[gone])["version"]
        answers = [ask(cluster.url).json() for _ in range(8)]
        assert {answer["catalogue_version"] for answer in answers} == {version}
        assert not any(gone in answer["items"] for answer in answers)


@pytest.mark.slow
def test_a_killed_replica_fails_its_own_requests_alone(cluster: Cluster) -> None:
    """kill -9 under load: the rest is answered meanwhile, and the new replica has every update."""
    before = change(cluster.url, remove=["B50"])["version"]
    old = cluster.replicas()
    assert len(old) == 2
    load = Load(cluster.url)
    time.sleep(1)
    killed = time.monotonic()
    os.kill(min(old), signal.SIGKILL)
    after = change(cluster.url, remove=["B51"])["version"]  # while the other one is alone
    told = time.monotonic()
    wait_until(lambda: len(cluster.replicas() - {min(old)}) == 2)
    time.sleep(3)
    load.end()
    failed = [start for start, outcome in load.outcomes if not isinstance(outcome, int)]
    assert after == before + 1
    assert len(load.outcomes) > 20
    assert len(failed) <= CLIENTS  # at most one of each client was under way in that replica
    assert all(start <= killed for start in failed)
    assert {outcome for start, outcome in load.outcomes if start > told and isinstance(outcome, int)} == {after}
    # The new replica alone: what it knows, it has from the log.
    new = cluster.replicas() - old
    os.kill(max(old), signal.SIGKILL)
    wait_until(lambda: cluster.replicas() & old == set())
    answers = []
    while len(answers) < 5:
        answer = ask(cluster.url)
        answers += [answer.json()["catalogue_version"]] if answer.status_code == 200 else []
        time.sleep(0.1)
    assert new <= cluster.replicas()
    assert set(answers) == {after}


@pytest.mark.slow
def test_a_new_model_comes_without_an_interruption(cluster: Cluster, folder: Path) -> None:
    """Replicas are replaced one after the other; the catalogue stays."""
    state = httpx.get(f"{cluster.url}/v1/catalogue", timeout=60).json()
    old, load = cluster.replicas(), Load(cluster.url)
    (args,) = (one["args"] for one in example(folder, 0)["applications"] if one["name"] == "recommender")
    command = [sys.executable, "-c", NEW_MODEL, json.dumps(args | {"model": f"{folder}/other"})]
    done = subprocess.run(command, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    wait_until(lambda: not cluster.replicas() & old)
    load.end()
    assert {outcome for _, outcome in load.outcomes} == {state["version"]}
    assert httpx.get(f"{cluster.url}/v1/catalogue", timeout=60).json() == state
    # Alone in its batch, bit for bit, through HAProxy and JSON.
    index = LiveCatalogue(log=UpdateLog(folder / "log")).edition.index
    tokens = torch.tensor([[token for item in HISTORY for token in ROWS[IDS.index(item)]]])
    how: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a replica here: the last digits depend on that
    out = enable(build("llama")).generate(tokens, constraint_index=index, output_scores=True, **how)
    torch.set_num_threads(threads)
    answer = ask(cluster.url).json()
    items = [item for row in index.items(out.sequences[:, tokens.shape[1] :]) for item in row]
    assert (answer["items"], answer["scores"]) == (items[:3], out.sequences_scores.tolist()[:3])


class Load:
    """Clients that ask one after the other, and what became of it: versions, or what failed."""

    def __init__(self, url: str) -> None:
        self.outcomes: list[tuple[float, Any]] = []
        self._url, self._done = url, threading.Event()
        self._clients = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for client in self._clients:
            client.start()

    def end(self) -> None:
        """Wait for the last answers."""
        self._done.set()
        for client in self._clients:
            client.join()

    def _ask(self) -> None:
        while not self._done.is_set():
            start = time.monotonic()
            try:
                answer = ask(self._url)
                told = answer.json()["catalogue_version"] if answer.status_code == 200 else f"{answer.status_code}"
            except httpx.HTTPError as error:
                told = type(error).__name__
            self.outcomes.append((start, told))


def wait_until(is_so: Any, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
