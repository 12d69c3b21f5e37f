# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, as a FastAPI application around an engine. Knows no model.

    from hf_gr import Engine
    from hf_gr.serving.app import make_app

    app = make_app(Engine("me/recommender"))  # then: uvicorn my_module:app

Needs `pip install "hf-gr[serve]"`. `hf-gr serve` runs it in one process, `hf_gr.serving.ray_serve` in many.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

try:
    from fastapi import Depends, FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
    from starlette.exceptions import HTTPException

    from .metrics import Metrics
    from .schemas import (
        CataloguePatch,
        CataloguePut,
        CatalogueState,
        ClassifyAnswer,
        ClassifyRequest,
        Error,
        Errors,
        RecommendAnswer,
        RecommendRequest,
        make_error,
        read_body,
        read_json,
        to_classify_answer,
        to_json,
        to_recommend_answer,
    )
except ImportError as missing:
    raise ImportError(
        f'hf_gr.serving.app needs {missing.name}: pip install "hf-gr[serve]"', name=missing.name
    ) from missing

from hf_gr import __version__
from hf_gr.catalogue import ConstraintIndex

from .answers import Closed
from .catalogues import Update
from .door import Door, Limits
from .errors import ClientGone, Failure, InvalidBody, Refused, describe, read_message
from .logs import log
from .observer import Observers

MOST_AT_ONCE = 256  # requests in one call
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_PORTS = {"http": 80, "https": 443}

T = TypeVar("T")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Errors, "description": description}
    for status, description in {
        401: "No key, or a wrong one.",
        413: "The body is too large.",
        422: "An argument is wrong: the error names it, its value, and the fix.",
        503: "Not ready, or too much to do: come again after the header Retry-After.",
        504: "Not answered within the timeout.",
    }.items()
}


def make_app(
    engine: Any,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    is_read_only: bool = False,
    is_public: bool = False,
    takes_indexes: bool = True,
    titles: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    drain_timeout: float | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The application: recommendations, labels, the catalogue, health, metrics.

    It starts the engine, unless that is ready, while it answers already: `/healthz` at once, `/readyz` after the
    warm-up. When it ends, it lets the engine finish what is under way.

    Args:
        engine: an `Engine`, or any object with its methods.
        api_key: for questions, sent as `Authorization: Bearer KEY`; without one anybody may ask.
        admin_key: for changes of the catalogue, and for questions; without one nobody may change it if there is an
            `api_key`; otherwise anybody may who asks neither through a proxy nor from another site's page.
        is_read_only: nobody may change the catalogue.
        is_public: where no key is needed for changes, they may come from everywhere: of a demonstration, behind a
            proxy.
        takes_indexes: `PUT /v1/catalogue` is there, which loads any index of the Hub or of this machine.
        titles: of items by id, as strings, for the page at `/page/`; `{}` for a page with ids, None for no page.
        limits: of what one client may take.
        drain_timeout: seconds for what is under way at the end.
        on_failure: hears of an error that keeps the engine from starting.

    Raises:
        ValueError: a key is empty, or not ASCII.
    """
    check_keys(api_key=api_key, admin_key=admin_key)
    server = Server(engine, drain_timeout, on_failure)
    app = FastAPI(
        title="hf_gr",
        version=__version__,
        description="Recommendations and labels by constrained generation: every answer is an item of the catalogue.",
        lifespan=lambda app: server.lifespan(),
        redoc_url=None,
    )
    app.state.server = server
    keys = Keys(api_key, admin_key, is_read_only=is_read_only, is_public=is_public)
    _add_questions(app, server, keys)
    _add_catalogue(app, server, keys, takes_indexes=takes_indexes)
    _add_health(app, server)
    if titles is not None:
        from .page import add_page

        add_page(app, engine, titles, dependencies=keys.to_ask)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Refused, _refused)
    paths = {str(getattr(route, "path", "")) for route in app.routes}
    app.add_middleware(
        Door,
        limits=limits or Limits(),
        paths=paths,
        on_response=server.metrics.responded,
        is_draining=lambda: server.is_draining,
    )
    return app


def check_keys(**keys: str | None) -> None:
    """Refuse keys that HTTP cannot carry, and empty ones: a secret that got lost must not open the server.

    Raises:
        ValueError: names the key, and not its value.
    """
    for name, key in keys.items():
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(f"{name} is empty or not ASCII, expected a secret: openssl rand -hex 32 makes one")


class Server:
    """An engine and its state between start and end.

    Attributes:
        is_draining: it is about to end, and says so; what is asked nevertheless is answered.
    """

    def __init__(
        self, engine: Any, drain_timeout: float | None, on_failure: Callable[[BaseException], None] | None
    ) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self.is_draining = False
        self._drain_timeout = drain_timeout
        self._on_failure = on_failure
        known = getattr(engine, "observer", None)
        engine.observer = self.metrics if known is None else Observers(known, self.metrics)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start the engine beside the server, and close it after the server."""
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self.drain()
            starting.cancel()
            await asyncio.wait([starting])
            await self.engine.close(timeout=self._drain_timeout)
            log("closed")

    def drain(self) -> None:
        """Say that the end is near: `/readyz` by 503, every answer by `Connection: close`."""
        if not self.is_draining:
            self.is_draining = True
            log("draining", waiting=getattr(self.engine, "num_waiting", 0))

    async def _start(self) -> None:
        if self.engine.is_ready:
            return
        log("starting")
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            await self.engine.start()
        except Exception as failure:
            self.failure = failure
            log("not started", level=logging.ERROR, error=failure)
            if self._on_failure is not None:
                self._on_failure(failure)
        else:
            state = self.catalogue()
            log("ready", seconds=round(clock() - start, 3), catalogue_version=state.version, items=state.num_items)

    def catalogue(self) -> CatalogueState:
        """The catalogue as it is."""
        edition = self.engine.catalogue.edition
        return CatalogueState(
            version=edition.version,
            num_items=edition.index.num_items,
            max_length=edition.index.max_length,
            rules={name: rule.num_items for name, rule in edition.rules.items()},
        )

    def sequences(self, items: list[Any]) -> list[list[int] | None]:
        """The tokens of items, None for one that is gone."""
        if not items:
            return []
        known, rows = self.engine.catalogue.edition.index.snapshot.sequences_of(items)
        return [
            [token for token in row if token >= 0] if is_known else None
            for is_known, row in zip(known.tolist(), rows.tolist(), strict=True)
        ]


class Keys:
    """Who may ask, and who may change the catalogue."""

    def __init__(self, api_key: str | None, admin_key: str | None, *, is_read_only: bool, is_public: bool) -> None:
        self._api_key, self._admin_key = api_key, admin_key
        self._is_read_only = is_read_only or (admin_key is None and api_key is not None)
        self._bearer = HTTPBearer(auto_error=False, description="Authorization: Bearer KEY")
        self.to_ask = self._make(self._check_ask, needed=api_key is not None)
        if admin_key is None and not self._is_read_only:
            self.to_change = [] if is_public else [Depends(_check_way)]
        else:
            self.to_change = self._make(self._check_change, needed=True)

    def _make(self, check: Callable[[str | None], None], *, needed: bool) -> list[Any]:
        """The dependencies of an endpoint: none where anybody may."""
        given: Any = Depends(self._bearer)  # annotations of a local variable are not resolved

        async def with_key(credentials: HTTPAuthorizationCredentials | None = given) -> None:
            check(None if credentials is None else credentials.credentials)

        return [Depends(with_key)] if needed else []

    def _check_ask(self, key: str | None) -> None:
        if not (_is_same(key, self._api_key) or _is_same(key, self._admin_key)):
            raise _wrong_key(key, "the server's key")

    def _check_change(self, key: str | None) -> None:
        if self._is_read_only:
            fix = "start the server with an admin key (hf-gr serve: $HF_GR_ADMIN_KEY)"
            raise Refused(403, Error(message="this server lets nobody change the catalogue", fix=fix))
        if _is_same(key, self._admin_key):
            return
        if _is_same(key, self._api_key):
            message = "this key is for questions, expected the one for changes of the catalogue"
            raise Refused(403, Error(message=message, argument="Authorization", fix="send the admin key"))
        raise _wrong_key(key, "the key for changes of the catalogue")


async def _check_way(request: Request) -> None:
    """Refuse a change without a key from afar: through a proxy, or from another site's page in a browser here."""
    headers = request.headers
    found = next((name for name in _PROXY_HEADERS if name in headers), None)
    if found is None and "origin" in headers and not _is_own(headers["origin"], request):
        found = "origin"
    if found is not None:
        message = f"without an admin key nobody may change the catalogue through a proxy or from another site: {found}"
        fix = "start the server with an admin key (hf-gr serve: $HF_GR_ADMIN_KEY), and send it"
        raise Refused(403, Error(message=message, argument=found, fix=fix))


def _is_own(origin: str, request: Request) -> bool:
    """Whether a page is this server's: of its host and port, and not of a name that was turned to this machine."""
    try:
        page = urlsplit(origin)
        asked = urlsplit(f"{page.scheme}://{request.headers.get('host', '')}")
        default = _PORTS.get(page.scheme)
        is_same = (page.hostname, page.port or default) == (asked.hostname, asked.port or default)
    except ValueError:
        return False
    here = (request.scope.get("server") or ("",))[0]
    return is_same and page.hostname is not None and (is_loopback(page.hostname) or not is_loopback(here))


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches a server at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_same(given: str | None, key: str | None) -> bool:
    """Compare in a time that tells nothing of the key."""
    return given is not None and key is not None and hmac.compare_digest(given.encode(), key.encode())


def _wrong_key(given: str | None, expected: str) -> Refused:
    message = f"{'no key' if given is None else 'a wrong key'}, expected {expected}"
    error = Error(message=message, argument="Authorization", expected=expected, fix="send Authorization: Bearer KEY")
    return Refused(401, error, **{"www-authenticate": "Bearer"})


def _add_questions(app: FastAPI, server: Server, keys: Keys) -> None:
    async def ask(request: RecommendRequest) -> dict[str, Any]:
        given = dict(request)
        with_sequences, timeout_ms = given.pop("sequences"), given.pop("timeout_ms")
        timeout = None if timeout_ms is None else timeout_ms / 1000
        answer = await server.engine.recommend(**given, timeout=timeout)
        return to_recommend_answer(answer, server.sequences(answer.items) if with_sequences else None)

    async def name(request: ClassifyRequest) -> dict[str, Any]:
        timeout = None if request.timeout_ms is None else request.timeout_ms / 1000
        return to_classify_answer(
            await server.engine.classify(text=request.text, num_labels=request.num_labels, timeout=timeout)
        )

    @app.post(
        "/v1/recommend",
        response_model=RecommendAnswer | list[RecommendAnswer | Errors],
        responses=_ERRORS,
        openapi_extra=_body_of(RecommendRequest),
        dependencies=keys.to_ask,
        tags=["questions"],
    )
    async def recommend(request: Request) -> Response:
        """Items for one user, or for each of a list of users: an answer or an error for each, in their order."""
        return await _answer(request, RecommendRequest, ask)

    @app.post(
        "/v1/classify",
        response_model=ClassifyAnswer | list[ClassifyAnswer | Errors],
        responses=_ERRORS,
        openapi_extra=_body_of(ClassifyRequest),
        dependencies=keys.to_ask,
        tags=["questions"],
    )
    async def classify(request: Request) -> Response:
        """Labels for one text, or for each of a list; the catalogue must be one of labels."""
        return await _answer(request, ClassifyRequest, name)


def _add_catalogue(app: FastAPI, server: Server, keys: Keys, *, takes_indexes: bool) -> None:
    errors = dict(_ERRORS)
    errors[403] = {"model": Errors, "description": "This key must not change the catalogue, or nobody may."}
    errors[507] = {"model": Errors, "description": "The change cannot be written, and is not made."}

    @app.get("/v1/catalogue", response_model=CatalogueState, dependencies=keys.to_ask, tags=["catalogue"])
    async def read() -> CatalogueState:
        """Version, size and rules."""
        return server.catalogue()

    async def change(request: Request, kind: Any, act: Callable[[Any], Any]) -> Response:
        body = await request.body()
        # In a thread, since it may be large, and to its end, whether the client waits or not.
        try:
            await asyncio.shield(asyncio.to_thread(lambda: act(read_body(kind, read_json(body)))))
        except OSError as failure:
            log("not written", level=logging.ERROR, error=failure)
            message = f"the change cannot be written ({failure.strerror or failure}): the catalogue is unchanged"
            fix = "tell those who run the server: its folder of updates must have room, and be writable"
            raise Refused(507, Error(message=message, fix=fix)) from failure
        state = server.catalogue()
        log("catalogue", catalogue_version=state.version, items=state.num_items, rules=len(state.rules))
        return _json(state.model_dump())

    @app.patch(
        "/v1/catalogue",
        response_model=CatalogueState,
        responses=errors,
        openapi_extra=_body_of(CataloguePatch, many=False),
        dependencies=keys.to_change,
        tags=["catalogue"],
    )
    async def update(request: Request) -> Response:
        """Add and remove items, set and delete rules: all in one step, or nothing. Later answers know of it."""
        return await _or_error(change(request, CataloguePatch, lambda body: _apply(server.engine, body)))

    if not takes_indexes:
        return

    @app.put(
        "/v1/catalogue",
        response_model=CatalogueState,
        responses=errors,
        openapi_extra=_body_of(CataloguePut, many=False),
        dependencies=keys.to_change,
        tags=["catalogue"],
    )
    async def swap(request: Request) -> Response:
        """Another index in place of this one. Requests under way are answered from the old one."""
        return await _or_error(change(request, CataloguePut, lambda body: _swap(server.engine, body.index)))


def _add_health(app: FastAPI, server: Server) -> None:
    @app.get("/healthz", tags=["health"])
    async def healthz() -> Response:
        """The process is alive."""
        return _json({"status": "alive"})

    @app.get("/readyz", responses={503: _ERRORS[503]}, tags=["health"])
    async def readyz() -> Response:
        """Warmed up, and not draining: send requests."""
        if server.engine.is_ready and not server.is_draining:
            return _json({"status": "ready", "catalogue_version": server.engine.catalogue.edition.version})
        why = "the engine is not ready: it warms up, or drains"
        if server.failure is not None:
            why = "the engine did not start: the server's log says why"
        return _failed(describe(Closed(why)))

    @app.get("/metrics", response_class=Response, tags=["health"])
    async def metrics(request: Request) -> Response:
        """Queue, batches, tokens, latencies and outcomes, for Prometheus."""
        state = server.catalogue()
        server.metrics.updated(state.version, state.num_items)
        body, content_type = server.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _apply(engine: Any, body: CataloguePatch) -> None:
    engine.catalogue.apply(Update(add=[dict(item) for item in body.add], remove=body.remove, rules=body.rules))


def _swap(engine: Any, name: str) -> None:
    try:
        index = ConstraintIndex.from_pretrained(name)
    except (OSError, ValueError) as failure:
        error = make_error("index", name, "a saved index", f"check the name ({' '.join(str(failure).split())[:300]})")
        raise InvalidBody(error) from failure
    try:
        engine.catalogue.swap(index)
    except ValueError as failure:  # it does not fit the model, or the old one
        told = read_message(str(failure)).model_copy(update={"argument": "index", "value": name})
        raise InvalidBody(told) from failure


async def _answer(request: Request, kind: Any, ask: Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]) -> Response:
    """Ask for one request or each of a list, as long as the client waits."""

    async def ask_all() -> Response:
        body = read_json(await request.body())
        if not isinstance(body, list):
            return _json(await _while_waiting(request, ask(read_body(kind, body))))
        if not 1 <= len(body) <= MOST_AT_ONCE:
            error = make_error(
                "body", f"{len(body)} requests", f"1 to {MOST_AT_ONCE} in a list", "divide it into several calls"
            )
            raise InvalidBody(error)

        async def ask_one(number: int, value: Any) -> dict[str, Any]:
            try:
                return await ask(read_body(kind, value, at=f"[{number}]"))
            except Exception as failure:
                told = _describe(failure)
                error = told.error.model_copy(update={"status": told.status})
                return {"error": error.model_dump(exclude_none=True)}

        answers = asyncio.gather(*(ask_one(number, value) for number, value in enumerate(body)))
        return _json(await _while_waiting(request, answers))

    return await _or_error(ask_all())


async def _while_waiting(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled when the client goes."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


async def _or_error(work: Awaitable[Response]) -> Response:
    """A response, also to what fails."""
    try:
        return await work
    except Exception as failure:
        return _failed(_describe(failure))


def _describe(failure: Exception) -> Failure:
    told = describe(failure)
    if told.status == 500:
        log("failed", level=logging.ERROR, error=failure)
    return told


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _failed(failure: Failure) -> Response:
    body = to_json(Errors(error=failure.error).model_dump(exclude_none=True))
    return Response(body, failure.status, failure.headers, "application/json")


async def _refused(_: Request, failure: Exception) -> Response:
    return _failed(describe(failure))


async def _http_error(request: Request, failure: Exception) -> Response:
    """The framework's own: no such path, no such method."""
    assert isinstance(failure, HTTPException)
    fix = "there is an overview at /docs"
    error = Error(message=f"{request.method} {request.url.path}: {failure.detail}", fix=fix)
    return _failed(Failure(failure.status_code, error, dict(failure.headers or {})))


async def _invalid(_: Request, failure: Exception) -> Response:
    """The framework's check of arguments that it reads itself."""
    assert isinstance(failure, RequestValidationError)
    first = failure.errors()[0]
    error = make_error(
        ".".join(map(str, first["loc"])),
        first.get("input"),
        first["msg"].removeprefix("Input should be "),
        "see /docs",
    )
    return _failed(Failure(422, error, {}))


def _body_of(kind: Any, *, many: bool = True) -> dict[str, Any]:
    """The documentation of a body, which the endpoint reads itself."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    if definitions:  # one level deep
        text = to_json(schema).decode()
        for name, definition in definitions.items():
            text = text.replace(f'{{"$ref":"#/$defs/{name}"}}', to_json(definition).decode())
        schema = read_json(text.encode())
    if many:
        schema = {"oneOf": [schema, {"type": "array", "items": schema, "minItems": 1, "maxItems": MOST_AT_ONCE}]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
