# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server as a process, over sockets, with an engine without a model."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving_fake import httpx

PROGRAM = """
import gc, json, resource, sys, threading, time
from serving_fake import FakeEngine
from hf_gr.serving import logs, run
from hf_gr.serving.app import make_app
from hf_gr.serving.middleware import Limits

class Told(FakeEngine):
    async def close(self, **options):
        await super().close(**options)
        if "hangs" in sys.argv:
            threading.Thread(target=time.sleep, args=(60,)).start()
        told = {"cancelled": self.num_cancelled, "asked": len(self.asked), "switches": sys.getswitchinterval()}
        print(json.dumps(told), flush=True)

engine = Told()
engine.start_error = RuntimeError("no memory") if "fails" in sys.argv else None
run.HEAD_TIMEOUT = run.SEND_TIMEOUT = 0.5
logs.configure()
if "few" in sys.argv:
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, 64))
made = run.bind("127.0.0.1", 0)
print(run.address_of(made), flush=True)
before = sys.getswitchinterval()
app = make_app(engine, limits=Limits(body_timeout=0.5))
delay = float((sys.argv + ["0"])[1])
failure = run.run(app, made, drain_timeout=0.5 if "hangs" in sys.argv else 5, drain_delay=delay, ends_process=True)
assert sys.getswitchinterval() == before and gc.get_freeze_count() > 10_000
sys.exit(0 if failure is None else 1)
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop the server when it is full
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=Path(__file__).parent,  # where the fake engine is
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.address = "127.0.0.1", int(self.url.rpartition(":")[2])

    def wait_until_ready(self) -> None:
        for _ in range(200):
            with suppress(httpx.TransportError):
                if httpx.get(self.url + "/readyz").status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(self.read_log())

    def read_log(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def end(self) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
        """Its exit code, what it printed, and its log, in which nothing failed."""
        out, _ = self.process.communicate(timeout=20)
        log = self.read_log()
        assert "Traceback" not in log
        return self.process.returncode, json.loads(out), [json.loads(line) for line in log.splitlines()]


HEALTHZ = b"GET /healthz HTTP/1.1\r\nhost: here\r\n\r\n"


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    made = Process(*arguments)
    try:
        if "fails" not in arguments:
            made.wait_until_ready()
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
        made.log.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with process() as made:
        yield made


def read_all(connection: socket.socket) -> bytes:
    parts = b""
    connection.settimeout(10)
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts += part
    return parts


def start_of(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: here", *headers, "", ""]).encode()


def slow(**fields: int) -> bytes:
    """A request that takes its time."""
    body = json.dumps({"history": ["slow"], **fields}).encode()
    return start_of("/v1/recommend", f"content-length: {len(body)}") + body


@pytest.mark.parametrize(
    ("delay", "signals"),
    [("60", [signal.SIGINT]), ("60", [signal.SIGTERM, signal.SIGTERM])],  # cut the delay
)
def test_who_goes_is_not_computed_for_and_who_waits_is(delay: str, signals: list[int]) -> None:
    with process(delay) as made:
        for _ in range(3):
            with socket.create_connection(made.address) as connection:
                connection.sendall(slow())
                time.sleep(0.1)
        with socket.create_connection(made.address) as connection, socket.create_connection(made.address):
            connection.sendall(slow(timeout_ms=1500))
            time.sleep(0.3)
            for number in signals:
                made.process.send_signal(number)
                time.sleep(0.15)
            time.sleep(0.15)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(made.address)
            answer = read_all(connection)
        code, told, log = made.end()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"items":["B01","B02"]' in answer
    assert (code, told) == (0, {"cancelled": 3, "asked": 4, "switches": pytest.approx(0.02)})
    assert [line["event"] for line in log][-3:] == ["draining", "request", "closed"]
    asked = [line["status"] for line in log if line.get("path") == "/v1/recommend"]
    assert asked == [499, 499, 499, 200]


def test_no_client_that_keeps_its_connection_loses_a_request() -> None:
    """Clients that go when a load balancer would: all that they have sent is answered."""
    with process("1.5") as made:
        is_ready = True
        answers: list[tuple[float, int, str | None]] = []
        lost: list[Exception] = []

        def ask() -> None:
            connection = http.client.HTTPConnection(*made.address, timeout=10)
            try:
                while is_ready:
                    connection.request("POST", "/v1/recommend", b'{"history": ["B01"]}')
                    answer = connection.getresponse()
                    answer.read()
                    answers.append((time.monotonic(), answer.status, answer.headers["connection"]))
                    time.sleep(0.01)
            except Exception as error:
                lost.append(error)

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        time.sleep(0.3)
        start = time.monotonic()
        made.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        ready = httpx.get(made.url + "/readyz")
        assert (ready.status_code, ready.headers["connection"]) == (503, "close")
        time.sleep(0.5)  # until the load balancer has looked
        is_ready = False
        for client in clients:
            client.join()
        assert made.end()[0] == 0
    assert lost == []
    assert {status for _, status, _ in answers} == {200}
    assert {word for moment, _, word in answers if moment < start} == {None}
    assert {word for moment, _, word in answers if moment > start + 0.3} == {"close"}
    assert 1.4 < time.monotonic() - start < 4


def test_an_engine_that_does_not_start_ends_the_process() -> None:
    with process("0", "fails") as made:
        code, _, log = made.end()
    (failed,) = [line for line in log if line["event"] == "not started"]
    assert (code, failed["error"]["message"]) == (1, "no memory")


def test_a_process_ends_whatever_it_computes() -> None:
    with process("0", "hangs") as made:
        start = time.monotonic()
        made.process.send_signal(signal.SIGTERM)
        code, _, log = made.end()
    assert (code, log[-1]["event"], time.monotonic() - start < 5) == (0, "cut", True)


def test_idle_clients_make_room() -> None:
    """As many as the process has files let nobody else in, and filled the log."""
    with process("0", "few") as made, ExitStack() as opened:
        busy, *idle = [opened.enter_context(socket.create_connection(made.address)) for _ in range(2)]
        busy.sendall(slow(timeout_ms=400))
        time.sleep(0.05)
        for _ in range(60):
            idle.append(opened.enter_context(socket.create_connection(made.address)))
            time.sleep(0.01)  # else connecting waits for the system's second try
        assert httpx.get(made.url + "/healthz").status_code == 200
        assert read_all(idle[0]) == b""
        for connection in (idle[-1], busy):
            connection.sendall(HEALTHZ)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert made.read_log().count("\n") < 10


def test_slow_clients_are_cut(server: Process) -> None:
    connections = [socket.create_connection(server.address) for _ in range(5)]
    silent, slow_head, slow_body, second, unread = connections
    start = time.monotonic()
    slow_body.sendall(start_of("/v1/recommend", "content-length: 20") + b"{")
    second.sendall(HEALTHZ)
    unread.sendall(HEALTHZ[:-2] + b"content-length: 500\r\n\r\n")
    for byte in b"POST /v1/reco":
        slow_head.sendall(bytes([byte]))
        unread.sendall(b"x")
        time.sleep(0.03)
    with suppress(ConnectionError):  # it goes on with a body that nobody reads
        for _ in range(50):
            unread.sendall(b"x")
            time.sleep(0.01)
        pytest.fail("it was not cut")
    assert [read_all(silent), read_all(slow_head)] == [b"", b""]
    assert read_all(slow_body).startswith(b"HTTP/1.1 408")
    time.sleep(0.3)  # longer than the head may take: idle is no crime
    second.sendall(HEALTHZ)
    time.sleep(0.2)
    second.sendall(b"GET /heal")
    assert read_all(second).count(b"HTTP/1.1 200") == 2
    assert time.monotonic() - start < 4
    for connection in connections:
        connection.close()


def test_a_client_that_does_not_read_is_cut(server: Process) -> None:
    """Its connection, and the answers in it, would stay for as long as it likes."""
    asked = 300
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: here\r\n\r\n" * asked)
        time.sleep(2.0)
        assert 0 < read_all(connection).count(b"HTTP/1.1 200") < asked
    assert httpx.get(server.url + "/healthz").status_code == 200
