# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What every request over HTTP passes first: limits of size, time and number, an id, a line of the log; and errors.

Knows no engine. In plain ASGI, so that a body too large is never read, whatever framework stands inside.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from .errors import CLIENT_GONE, ClientGone, Error, Refused, describe
from .logs import log, request_id

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ID = re.compile(rb"[\w.:-]{1,64}")
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


@dataclass
class Middleware:
    """The ASGI application around another one, which answers what that raises.

    Attributes:
        app: the one inside.
        limits: of clients.
        paths: those that are counted by name.
        on_response: hears path and status of every answer.
        is_draining: whether the server is about to end: then every answer asks its client to close the connection.
    """

    app: App
    limits: Limits = field(default_factory=Limits)
    paths: Collection[str] = ()
    on_response: Callable[[str, int], None] = lambda path, status: None
    is_draining: Callable[[], bool] = lambda: False
    num_open: int = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = Visit(scope, receive, send, self.limits, self.is_draining)
        is_quiet = visit.path in _QUIET
        path = visit.path if visit.path in self.paths else "other"  # anything else may name a user
        known = request_id.set(visit.id)
        self.num_open += 1
        try:
            if self.num_open > self.limits.max_open and not is_quiet:
                message = f"{self.limits.max_open} requests are in flight"
                error = Error(message=message, fix="retry later", retry_after=1)
                raise Refused(503, error, **{"retry-after": "1", "connection": "close"})
            visit.check_length()
            await self.app(scope, visit.receive, visit.send)
        except Exception as failure:
            told = describe(failure)
            if told.status == 500:
                log("failed", level=logging.ERROR, error=failure)
            if not visit.status:
                await refuse(visit.send, told)
        finally:
            self.num_open -= 1
            status = visit.status or CLIENT_GONE
            self.on_response(path, status)
            log(
                "request",
                level=logging.DEBUG if is_quiet else logging.INFO,
                method=scope["method"],
                path=path,
                status=status,
                ms=round(1000 * (time.perf_counter() - visit.start), 2),
            )
            request_id.reset(known)


class Visit:
    """One request on its way through the middleware."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        limits: Limits,
        is_draining: Callable[[], bool],
    ) -> None:
        self.start = time.perf_counter()
        self.path: str = scope["path"]
        self.status = 0
        self._receive, self._send, self._limits = receive, send, limits
        self._is_draining = is_draining
        self._headers = dict(scope["headers"])
        self._most = limits.max_update if self.path == "/v1/catalogue" else limits.max_body
        self._read = 0
        self._has_body = False
        given = self._headers.get(b"x-request-id", b"")
        self.id = given.decode("ascii") if _ID.fullmatch(given) else uuid4().hex

    def check_length(self) -> None:
        """Refuse a body that says itself that it is too large."""
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        """The next message of the client's; parts of a body within the limits."""
        if self._has_body:  # what comes now is that the client has gone
            return await self._receive()
        left = self.start + self._limits.body_timeout - time.perf_counter()
        try:
            async with asyncio.timeout(left):
                message = await self._receive()
        except TimeoutError:
            message = f"the body was not there after {self._limits.body_timeout:g} seconds"
            raise Refused(408, Error(message=message, fix="send it faster"), connection="close") from None
        if message["type"] != "http.request":
            raise ClientGone
        self._read += len(message.get("body", b""))
        if self._read > self._most:
            raise self._too_large()
        self._has_body = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if self._is_draining() and (b"connection", b"close") not in headers:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    def _too_large(self) -> Refused:
        expected, fix = f"at most {self._most:,} bytes", "divide it into several requests"
        message = f"the body is too large, expected {expected}: {fix}"
        error = Error(message=message, argument="body", expected=expected, fix=fix)
        return Refused(413, error, connection="close")


async def refuse(send: Send, told: Refused) -> None:
    """Answer with an error."""
    headers = {"content-type": "application/json", "content-length": str(len(told.body))} | told.headers
    start = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": told.status, "headers": start})
    await send({"type": "http.response.body", "body": told.body})
