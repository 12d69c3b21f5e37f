# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server as one process: uvicorn, with an end that drains, and slow and too many clients cut. Knows no engine."""

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .defaults import MAX_CONNECTIONS
from .logs import log

try:
    import resource
except ImportError:  # Windows
    resource = None

KEEP_ALIVE = 65  # seconds; more than the 60 of common load balancers, which would otherwise meet a closing connection
HEAD_TIMEOUT = 10.0  # seconds for a request's first lines, and for what comes of it after its answer
SEND_TIMEOUT = 30.0  # seconds for a client to take what is ready for it
OTHER_FILES = 1024  # for all but connections, and for those that are accepted while others are cut
# With two workers on two cores 0.02 answered 12% more requests than Python's 0.005 (25.7 M parameters, medians of 4
# paired runs).
SWITCH_SECONDS = 0.02


def bind(host: str, port: int) -> socket.socket:
    """A socket for the server, before anything is loaded.

    Args:
        host: an address or name of this machine.
        port: 0 for any.

    Raises:
        OSError: the port is in use, or the host is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that has just ended leaves its port
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise OSError(
            f"host={host!r} and port={port} cannot be used ({error.strerror or error}), expected a free port of this "
            "machine: choose another with --port, or end the program that has it"
        ) from error
    return made


def address_of(made: socket.socket) -> str:
    """The URL of a server on this socket."""
    host, port = made.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: Any,
    made: socket.socket,
    *,
    drain_timeout: float,
    drain_delay: float = 0.0,
    max_connections: int = MAX_CONNECTIONS,
    ends_process: bool = False,
) -> BaseException | None:
    """Serve until SIGTERM or Ctrl-C; then finish what is in flight.

    Args:
        app: from `make_app`.
        made: where to listen, from `bind`.
        drain_delay: seconds after SIGTERM in which new requests are answered still, while `/readyz` already says 503,
            and every answer asks its client to close the connection: load balancers have time to go elsewhere. Ctrl-C,
            or a second signal, does not wait.
        drain_timeout: seconds for what is in flight at the end; a second Ctrl-C does not wait.
        max_connections: more clients at once are served in place of those that have sent nothing for longest; the
            process's limit of open files is raised for that, as far as the system allows.
        ends_process: a second after `drain_timeout` the process ends, with exit code 0, whatever it still computes.

    Returns:
        Why the engine did not start; None if it did.

    Raises:
        OSError: another program listens there meanwhile.
    """
    most, backlog = _room_for(max_connections)
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop's clock counts whole milliseconds, and the engine's times are the loop's
        http=partial(PatientProtocol, max_connections=most),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
        backlog=backlog,
    )
    # uvicorn raises the signal again after it has drained: an end that was asked for is a success.
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    known = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    if ends_process:  # what is imported stays: looking through it for garbage stops all requests for 0.2 s
        gc.collect()
        gc.freeze()
    try:
        last = drain_timeout + 1.0 if ends_process else None
        DrainingServer(config, app.state.server, drain_delay, last).run(sockets=[made])
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)
        sys.setswitchinterval(switch_seconds)
    return app.state.server.failure


class DrainingServer(uvicorn.Server):
    """A server that says that it will end before it stops to listen, and ends if its engine does not start."""

    _end: float | None = None  # of the delay

    def __init__(self, config: uvicorn.Config, served: Any, delay: float, last: float | None) -> None:
        super().__init__(config)
        self._served, self._delay, self._last = served, delay, last

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End: at SIGTERM after the delay, at any other signal without."""
        if sig == signal.SIGTERM and self._end is None and self._delay > 0 and self.started:
            self._end = time.monotonic() + self._delay
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop, asked ten times a second."""
        if self._end is not None or self.should_exit:
            self._served.drain()
        if self._served.failure is not None or (self._end is not None and time.monotonic() >= self._end):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, in any case in time."""
        if self._last is not None:
            threading.Thread(target=_end_process, args=(self._last,), daemon=True).start()
        await super().shutdown(sockets)


def _end_process(seconds: float) -> None:
    """End the process unless it has ended by then: Python would wait for threads that compute."""
    time.sleep(seconds)
    log("cut", seconds=seconds)
    sys.stdout.flush()
    os._exit(0)


def _room_for(connections: int) -> tuple[int, int]:
    """As many connections as the process may have files for, whose limit is raised if need be; and how many may wait.

    asyncio accepts all that wait before it looks at one of them.
    """
    files = connections + OTHER_FILES
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = files if hard == resource.RLIM_INFINITY else min(files, hard)
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    connections = min(connections, max(files - OTHER_FILES, files // 2))
    return connections, max(1, (files - connections) // 8)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with limits of clients' time and number.

    The connection of a client that does not finish a request's first lines, or does not read its answers, is aborted:
    closing it would wait for the client.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self._idle_since = max_connections, self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request, in place of a client that has sent none if there are too many."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if len(self.connections) > self._most:
            live: list[Any] = [one for one in self.connections if not one.transport.is_closing()]
            idle = [one for one in live if one.cycle is None or one.cycle.response_complete]
            if len(live) > self._most:
                min(idle, key=lambda one: (one.cycle is not None, one._idle_since)).transport.abort()
        self._expect("head", HEAD_TIMEOUT)

    def data_received(self, data: bytes) -> None:
        """Take what has come, and wait if it is the beginning of a request's first lines."""
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop("rest")
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop("head")
        elif "head" not in self._timers:
            self._expect("head", HEAD_TIMEOUT)

    def on_response_complete(self) -> None:
        """Wait for the rest of a body that nobody has read, and then for the next request."""
        self._idle_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:
            self._expect("rest", HEAD_TIMEOUT)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        for what in [*self._timers]:
            self._stop(what)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for a client that takes less than there is for it."""
        super().pause_writing()
        self._expect("reading", SEND_TIMEOUT)

    def resume_writing(self) -> None:
        """It has taken nearly all."""
        super().resume_writing()
        self._stop("reading")

    def _expect(self, what: str, seconds: float) -> None:
        self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()
