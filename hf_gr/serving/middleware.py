# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What every request over HTTP passes first: limits of size, time and number, an id, a line of the log; and errors.

Knows no engine. In plain ASGI, so that a body too large is never read.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from .answers import Overloaded
from .errors import CLIENT_GONE, ClientGone, Error, Refused, describe
from .logs import log, served

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ID = re.compile(rb"[\w.:-]{1,64}")
# https://www.w3.org/TR/trace-context
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
CLOSE = (b"connection", b"close")
_QUIET = ("/healthz", "/readyz", "/metrics")  # asked every few seconds, by machines


@dataclass(frozen=True)
class Limits:
    """What one client may take.

    Attributes:
        max_body: bytes of a request.
        max_update: bytes of a change of the catalogue.
        body_timeout: seconds until a body is there.
        max_open: requests in flight at once; health and metrics are answered beyond it.
    """

    max_body: int = 2**20
    max_update: int = 2**26
    body_timeout: float = 10.0
    max_open: int = 4096

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}, expected more than 0")


class Middleware:
    """The ASGI application around another one, which answers what that raises."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        paths: Collection[str],
        on_response: Callable[[str, int], None],
        is_draining: Callable[[], bool],
    ) -> None:
        self._app, self._limits, self._num_open = app, limits, 0
        self._paths = paths  # those that are counted by name; anything else may name a user
        self._on_response, self._is_draining = on_response, is_draining

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, headers = time.perf_counter(), 0, dict(scope["headers"])
        is_quiet, path = scope["path"] in _QUIET, scope["path"] if scope["path"] in self._paths else "other"
        given = headers.get(b"x-request-id", b"")
        number = given.decode("ascii") if _ID.fullmatch(given) else uuid4().hex
        body = Body(receive, self._limits, scope["path"])

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, own = message["status"], [*message.get("headers", ()), (b"x-request-id", number.encode())]
                if self._is_draining() and CLOSE not in own:
                    own.append(CLOSE)
                message["headers"] = own
            await send(message)

        trace = _TRACE.fullmatch(headers.get(b"traceparent", b""))
        known = served.set({"id": number} | ({} if trace is None else {"trace_id": trace[1].decode()}))
        self._num_open += 1
        try:
            if self._num_open > self._limits.max_open and not is_quiet:
                raise Overloaded(f"{self._limits.max_open} requests are in flight", retry_after=1.0)
            body.check_length(headers.get(b"content-length", b"0"))
            # The server sends no body after HEAD.
            await self._app(dict(scope, method="GET") if scope["method"] == "HEAD" else scope, body.receive, answer)
        except Exception as failure:
            told = describe(failure)
            if told.status == 500:
                log("failed", level=logging.ERROR, error=failure)
            if not status:
                await Response(told.body, told.status, told.headers, "application/json")(scope, receive, answer)
        finally:
            self._num_open -= 1
            status = status or CLIENT_GONE
            self._on_response(path, status)
            level, took = logging.DEBUG if is_quiet else logging.INFO, round(1000 * (time.perf_counter() - start), 2)
            log("request", level=level, method=scope["method"], path=path, status=status, ms=took)
            served.reset(known)


class Body:
    """What a client sends, within the limits of size and time."""

    def __init__(self, receive: Receive, limits: Limits, path: str) -> None:
        self._receive, self._seconds = receive, limits.body_timeout
        self._end = time.perf_counter() + limits.body_timeout
        self._most = limits.max_update if path == "/v1/catalogue" else limits.max_body
        self._read, self._is_there = 0, False

    def check_length(self, length: bytes) -> None:
        """Refuse a body that says itself that it is too large."""
        if not length.isdigit() or int(length[:20]) > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        """The client's next message."""
        if self._is_there:  # what comes now is that the client has gone
            return await self._receive()
        try:
            async with asyncio.timeout(self._end - time.perf_counter()):
                message = await self._receive()
        except TimeoutError:
            error = Error(message=f"the body was not there after {self._seconds:g} seconds", fix="send it faster")
            raise Refused(408, error, connection="close") from None
        if message["type"] != "http.request":
            raise ClientGone
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            raise self._too_large()
        self._is_there = not message.get("more_body", False)
        return message

    def _too_large(self) -> Refused:
        expected, fix = f"at most {self._most:,} bytes", "divide it into several requests"
        message = f"the body is too large, expected {expected}: {fix}"
        error = Error(message=message, argument="body", expected=expected, fix=fix)
        return Refused(413, error, connection="close")
