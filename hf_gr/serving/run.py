# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server as one process: uvicorn, with an end that drains and slow clients that are cut. Knows no engine."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

KEEP_ALIVE = 65  # seconds; more than the 60 of common load balancers, which would otherwise meet a closing connection
HEAD_TIMEOUT = 10.0  # seconds for a request's first lines
SEND_TIMEOUT = 30.0  # seconds for a client to take what is ready for it
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


def run(app: Any, made: socket.socket, *, drain_timeout: float, drain_delay: float = 0.0) -> BaseException | None:
    """Serve until SIGTERM or Ctrl-C; then finish what is in flight.

    Args:
        app: from `make_app`.
        made: where to listen, from `bind`.
        drain_delay: seconds after SIGTERM in which new requests are answered still, while `/readyz` already says 503,
            and every answer asks its client to close the connection: load balancers have time to go elsewhere. Ctrl-C,
            or a second signal, does not wait.
        drain_timeout: seconds for what is in flight at the end; a second Ctrl-C does not wait.

    Returns:
        Why the engine did not start; None if it did.

    Raises:
        OSError: another program listens there meanwhile.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop's clock counts whole milliseconds, and the engine's times are the loop's
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
    # uvicorn raises the signal again after it has drained: an end that was asked for is a success.
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    known = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        DrainingServer(config, app.state.server, drain_delay).run(sockets=[made])
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)
        sys.setswitchinterval(switch_seconds)
    return app.state.server.failure


class DrainingServer(uvicorn.Server):
    """A server that says that it will end before it stops to listen, and ends if its engine does not start."""

    _end: float | None = None  # of the delay

    def __init__(self, config: uvicorn.Config, served: Any, delay: float) -> None:
        super().__init__(config)
        self._served, self._delay = served, delay

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


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with time limits for clients.

    The connection of a client that does not finish a request's first lines, or does not read its answers, is aborted:
    closing it would wait for the client.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._expect("head", HEAD_TIMEOUT)

    def data_received(self, data: bytes) -> None:
        """Take what has come, and wait if it is the beginning of a request's first lines."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop("head")
        elif "head" not in self._timers:
            self._expect("head", HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop("head")
        self._stop("reading")
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
