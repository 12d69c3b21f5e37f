# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, as a FastAPI application around an engine. Knows no model.

    from hf_gr import Engine
    from hf_gr.serving.app import make_app

    app = make_app(Engine("me/recommender"))  # then: uvicorn my_module:app

Needs `pip install "hf-gr[serve]"`. `hf-gr serve` runs it in one process, `hf_gr.serving.ray_serve` in many.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from html import escape
from typing import Any, TypeVar

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware

    from .errors import ClientGone, Error, Errors, Refused, describe, read_message, to_json, wrong
    from .keys import check_keys, check_origins, make_checks
    from .metrics import Metrics
    from .middleware import Limits, Middleware
    from .schemas import (
        CataloguePatch,
        CataloguePut,
        CatalogueState,
        ClassifyRequest,
        ModelPut,
        RecommendRequest,
        documented,
        read_body,
        read_json,
    )
except ImportError as missing:
    raise ImportError(
        f'hf_gr.serving.app needs {missing.name}: pip install "hf-gr[serve]"', name=missing.name
    ) from missing

from hf_gr import __version__
from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.code_book import compare

from .answers import Classification, Closed, Overloaded, Recommendation, TooLate
from .catalogues import Update
from .logs import log

MOST_AT_ONCE, MOST_LISTED = 256, 4096  # requests in one call, and in all calls with several
SLICE = 4  # requests of a list that are read before others have their turn
PAUSE = 3.0  # times as long as that took, before the next ones
CHANGES_AT_ONCE, MOST_CHANGES = 4, 16  # of catalogue and model: begun, and with those that wait
DOCS_HEADERS = {"content-type": "text/html; charset=utf-8", "content-security-policy": "default-src 'none'"}
LARGE = 2**16  # bytes of a body that is read in a thread
CORS: dict[str, Any] = {  # questions, and no changes
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["authorization", "content-type", "traceparent", "x-request-id"],
    "expose_headers": ["retry-after", "x-request-id"],
}

T = TypeVar("T")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Errors, "description": description}
    for status, description in {
        401: "No key, or a wrong one.",
        413: "The body is too large.",
        422: "An argument is wrong: the error names it, its value, and the fix.",
        503: "Not ready, or too much to do: retry after `Retry-After` seconds.",
        504: "Not answered within the timeout.",
    }.items()
}
_CHANGE_ERRORS = _ERRORS | {
    403: {"model": Errors, "description": "This key must not change the catalogue, or the server is read-only."},
    507: {"model": Errors, "description": "The change has no room on disk or in memory, and is not made."},
}


def make_app(
    engine: Any,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    is_read_only: bool = False,
    is_public: bool = False,
    takes_indexes: bool = True,
    takes_models: bool = True,
    titles: Mapping[str, str] | None = None,
    origins: Sequence[str] = (),
    limits: Limits | None = None,
    drain_timeout: float | None = None,
) -> FastAPI:
    """The application: recommendations, labels, the catalogue, health, metrics.

    It starts the engine, unless that is ready, while it answers already: `/healthz` at once, `/readyz` after the
    warm-up. When it ends, it lets the engine finish what is in flight.

    Args:
        engine: an `Engine`, or any object with its methods and attributes.
        api_key: for questions, sent as `Authorization: Bearer KEY`; without one anyone may ask. Of several, separated
            by spaces, each is valid, also as `admin_key`: to change a key, begin with the new one beside the old one.
        admin_key: for changes of catalogue and model, and for questions. Without one they are read-only if there is an
            `api_key`; otherwise they can be changed, but not through a proxy, nor from another site's page.
        is_read_only: catalogue and model cannot be changed.
        is_public: changes that need no key may come from anywhere: for a demonstration behind a proxy.
        takes_indexes: `PUT /v1/catalogue` is there, which loads any index of the Hub or of this machine.
        takes_models: `PUT /v1/model` is there, if indexes are taken: it loads any model with its index.
        titles: of items by id, as strings, for the page at `/page/`; `{}` for a page with ids, None for no page.
        origins: sites whose pages in browsers may ask, such as `https://shop.example`, or `*` (CORS).
        limits: of what one client may take.
        drain_timeout: seconds for what is in flight at the end.

    Raises:
        ValueError: a key is empty, or not ASCII; an origin is none.
    """
    check_keys(api_key=api_key, admin_key=admin_key)
    check_origins(origins)
    server = Server(engine, drain_timeout)
    app = FastAPI(
        title="hf_gr",
        version=__version__,
        description="Recommendations and labels by constrained generation: every answer is an item of the catalogue.",
        lifespan=lambda app: server.lifespan(),
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = server
    to_ask, to_change = make_checks(api_key, admin_key, is_read_only=is_read_only, is_public=is_public)
    _add_questions(app, server, to_ask)
    _add_catalogue(app, server, to_ask, to_change, takes_indexes=takes_indexes, takes_models=takes_models)
    _add_health(app, server)
    if titles is not None:
        from .page import add_page

        add_page(app, engine, titles, dependencies=to_ask)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    paths = {str(getattr(route, "path", "")) for route in app.routes}
    app.add_middleware(
        Middleware,
        limits=limits or Limits(),
        paths=paths,
        on_response=server.metrics.responded,
        is_draining=lambda: server.is_draining,
    )
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, **CORS)
    return app


class Server:
    """An engine and its state between start and end."""

    def __init__(self, engine: Any, drain_timeout: float | None) -> None:
        self.engine = engine
        self.metrics = Metrics()
        self.failure: BaseException | None = None  # which kept the engine from starting
        self.is_draining = False  # it is about to end, and says so; what is asked nevertheless is answered
        self._drain_timeout = drain_timeout
        # Threads of their own, which may wait for a lock or the Hub: others need the event loop's.
        self._changing, self._num_changes = ThreadPoolExecutor(CHANGES_AT_ONCE, "hf_gr change"), 0
        self.reading, self._num_listed = asyncio.Lock(), 0  # one list at a time
        engine.observers.append(self.metrics)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start the engine in the background, and close it after the server."""
        self.loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            self.drain()
            starting.cancel()
            await asyncio.wait([starting])
            self._changing.shutdown(wait=False, cancel_futures=True)
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
        else:
            state = self.catalogue()
            log("ready", seconds=round(clock() - start, 3), catalogue_version=state.version, items=state.num_items)

    async def change(self, act: Callable[[], None]) -> None:
        """Change the catalogue or the model in a thread, to its end, whether the client waits or not."""
        if self._num_changes >= MOST_CHANGES:
            raise Overloaded(f"{MOST_CHANGES} changes of the catalogue wait already: retry later", retry_after=1.0)
        self._num_changes += 1
        future = asyncio.get_running_loop().run_in_executor(self._changing, act)
        future.add_done_callback(self._changed)
        await asyncio.shield(future)

    def _changed(self, future: asyncio.Future[None]) -> None:
        self._num_changes -= 1

    @contextmanager
    def listed(self, number: int) -> Iterator[None]:
        """Refuse a list of so many requests where lists have too many already."""
        if self._num_listed + number > MOST_LISTED:
            raise Overloaded(f"lists with {self._num_listed} requests wait already: retry later", retry_after=1.0)
        self._num_listed += number
        try:
            yield
        finally:
            self._num_listed -= number

    def catalogue(self) -> CatalogueState:
        """The catalogue as it is."""
        edition = self.engine.catalogue.edition
        return CatalogueState(
            version=edition.version,
            model_version=self.engine.model_version,
            num_items=edition.index.num_items,
            max_length=edition.index.max_length,
            rules={name: rule.num_items for name, rule in edition.rules.items()},
        )

    def sequences(self, answer: Any, before: Any) -> list[list[int] | None]:
        """The tokens of an answer's items, of the edition that it names: today's or the one before; else None."""
        for edition in (self.engine.catalogue.edition, before):
            if answer.items and edition.version == answer.catalogue_version:
                rows = edition.index.snapshot.sequences_of(answer.items)[1].tolist()
                return [[token for token in row if token >= 0] for row in rows]
        return [None] * len(answer.items)


def _add_questions(app: FastAPI, server: Server, to_ask: list[Any]) -> None:
    async def recommend(request: RecommendRequest) -> dict[str, Any]:
        given = dict(request)
        with_sequences, timeout = given.pop("sequences"), _seconds(given.pop("timeout_ms"))
        before = server.engine.catalogue.edition if with_sequences else None
        answer = await server.engine.recommend(**given, timeout=timeout)
        return vars(answer) | ({"sequences": server.sequences(answer, before)} if with_sequences else {})

    async def classify(request: ClassifyRequest) -> dict[str, Any]:
        given = dict(request)
        timeout = _seconds(given.pop("timeout_ms"))
        return vars(await server.engine.classify(**given, timeout=timeout))

    def add(path: str, kind: Any, answer: Any, ask: Callable[[Any], Coroutine[Any, Any, Any]], about: str) -> None:
        async def question(request: Request) -> Response:
            return await _answer(server, request, kind, ask)

        app.post(
            path,
            description=about,
            response_model=answer | list[answer | Errors],
            responses=_ERRORS,
            openapi_extra=documented(kind, most=MOST_AT_ONCE),
            dependencies=to_ask,
            tags=["questions"],
        )(question)

    about = "Items for one user, or for each of a list of users: an answer or an error for each, in their order."
    add("/v1/recommend", RecommendRequest, Recommendation, recommend, about)
    about = "Labels for one text, or for each of a list; the catalogue must be one of labels."
    add("/v1/classify", ClassifyRequest, Classification, classify, about)


def _add_catalogue(
    app: FastAPI,
    server: Server,
    to_ask: list[Any],
    to_change: list[Any],
    *,
    takes_indexes: bool,
    takes_models: bool,
) -> None:
    @app.get("/v1/catalogue", response_model=CatalogueState, dependencies=to_ask, tags=["catalogue"])
    async def read() -> CatalogueState:
        """Versions, size and rules."""
        return server.catalogue()

    def add(method: str, path: str, kind: Any, act: Callable[[Server, Any], None], about: str) -> None:
        async def change(request: Request) -> Response:
            body = await request.body()
            try:
                await server.change(lambda: act(server, read_body(kind, read_json(body))))
            except MemoryError as failure:
                log("no memory", level=logging.ERROR, error=failure)
                raise Refused(507, Error(message=str(failure), fix="start a server with that model")) from failure
            except OSError as failure:
                log("not written", level=logging.ERROR, error=failure)
                message = f"the change cannot be written ({failure.strerror or failure}): the catalogue is unchanged"
                fix = "tell those who run the server: its folder of updates must have room, and be writable"
                raise Refused(507, Error(message=message, fix=fix)) from failure
            state = server.catalogue()
            told = {"model_version": state.model_version, "items": state.num_items, "rules": len(state.rules)}
            log("catalogue", catalogue_version=state.version, **told)
            return _json(state.model_dump())

        app.api_route(
            path,
            methods=[method],
            description=about,
            response_model=CatalogueState,
            responses=_CHANGE_ERRORS,
            openapi_extra=documented(kind),
            dependencies=to_change,
            tags=["catalogue"],
        )(change)

    about = "Add, remove and restore items, set and delete rules: all in one step, or nothing, for later answers."
    add("PATCH", "/v1/catalogue", CataloguePatch, _update, about)
    if takes_indexes:
        about = "Another index in place of this one. Requests in flight are answered from the old one."
        add("PUT", "/v1/catalogue", CataloguePut, _put, about)
    if takes_indexes and takes_models:
        about = (
            "Another model and its catalogue in place of these, in one step, after a warm-up beside them: both need "
            "memory. Requests that came before are answered by the old pair."
        )
        add("PUT", "/v1/model", ModelPut, _swap, about)


def _add_health(app: FastAPI, server: Server) -> None:
    @app.get("/healthz", responses={503: _ERRORS[503]}, tags=["health"])
    async def healthz() -> Response:
        """The process is alive, and some worker, too: else start it anew."""
        if server.engine.is_stuck:
            raise Closed("every worker hangs: start the server anew")
        return _json({"status": "alive"})

    @app.get("/readyz", responses={503: _ERRORS[503]}, tags=["health"])
    async def readyz() -> Response:
        """Warmed up, and not draining: send requests."""
        if server.engine.is_ready and not server.is_draining and not server.engine.is_stuck:
            state = server.catalogue()
            versions = {"catalogue_version": state.version, "model_version": state.model_version}
            return _json({"status": "ready"} | versions)
        if server.failure is not None:
            raise Closed("the engine did not start: the server's log says why")
        raise Closed("the engine is not ready: it warms up, drains, or hangs")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """`/openapi.json` for people, without scripts, which would be a third party's."""
        return Response(_documentation(app.openapi()), headers=DOCS_HEADERS)

    @app.get("/metrics", response_class=Response, tags=["health"])
    async def metrics(request: Request) -> Response:
        """Queue, batches, tokens, latencies and outcomes, for Prometheus."""
        state = server.catalogue()
        server.metrics.updated(state.version, state.num_items, state.model_version)
        body, content_type = server.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _documentation(schema: Mapping[str, Any]) -> str:
    """Endpoints, and what each takes."""
    parts = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            taken = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            body = "" if taken is None else f"<pre>{escape(json.dumps(taken, indent=2))}</pre>"
            parts.append(
                f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(about.get('description', ''))}</p>{body}"
            )
    about = f"<h1>hf_gr</h1><p>{escape(schema['info']['description'])} For programs: /openapi.json</p>"
    return f"<!doctype html><title>hf_gr</title>{about}{''.join(parts)}"


def _update(server: Server, body: CataloguePatch) -> None:
    if body.code_book:
        snapshot = server.engine.catalogue.edition.index.snapshot
        compare(body.code_book, snapshot, whose="the patch", argument="the catalogue")
    server.engine.catalogue.apply(Update.from_dict(body.model_dump(exclude={"code_book"})))


def _swap(server: Server, body: ModelPut) -> None:
    given = body.model_dump()
    swap = server.engine.swap(given.pop("model"), given.pop("index"), **given)
    asyncio.run_coroutine_threadsafe(swap, server.loop).result()


def _put(server: Server, body: CataloguePut) -> None:
    try:
        index = ConstraintIndex.from_pretrained(body.index)
    except (OSError, ValueError) as failure:
        fix = f"check the name ({' '.join(str(failure).split())[:300]})"
        raise wrong("index", body.index, "a saved index", fix) from failure
    try:
        server.engine.catalogue.swap(index)
    except ValueError as failure:  # it does not fit the model, or the old one
        told = read_message(str(failure)).model_copy(update={"argument": "index", "value": body.index})
        raise Refused(422, told) from failure


async def _answer(
    server: Server, request: Request, kind: Any, ask: Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]
) -> Response:
    """Ask for one request or each of a list, as long as the client waits."""
    body = await request.body()
    given = await asyncio.to_thread(_read, kind, body) if len(body) > LARGE else _read(kind, body)
    if not isinstance(given, list):
        return _json(await _while_waiting(request, ask(given)))
    clock = asyncio.get_running_loop().time
    arrived = clock()

    async def ask_one(number: int) -> dict[str, Any]:
        try:
            one = read_body(kind, given[number], at=f"[{number}]")
            if one.timeout_ms is not None:
                one.timeout_ms -= round(1e3 * (clock() - arrived))
                if one.timeout_ms <= 0:
                    raise TooLate("the deadline passed before the request was read: raise timeout_ms")
            return await ask(one)
        except Exception as failure:
            told = describe(failure)
            if told.status == 500:
                log("failed", level=logging.ERROR, error=failure)
            return {"error": told.error.model_dump(exclude_none=True) | {"status": told.status}}

    async def ask_all() -> list[dict[str, Any]]:
        asked = []
        async with asyncio.TaskGroup() as tasks, server.reading:
            for start in range(0, len(given), SLICE):
                asked += [tasks.create_task(ask_one(number)) for number in range(len(given))[start : start + SLICE]]
                begun = clock()
                await asyncio.sleep(0)  # they are read
                await asyncio.sleep(PAUSE * (clock() - begun))  # the workers need Python as well
        return [task.result() for task in asked]

    with server.listed(len(given)):
        return _json(await _while_waiting(request, ask_all()))


def _read(kind: Any, body: bytes) -> Any:
    """A request, or a list of what may be some."""
    value = read_json(body)
    if not isinstance(value, list):
        return read_body(kind, value)
    if not 1 <= len(value) <= MOST_AT_ONCE:
        expected = f"1 to {MOST_AT_ONCE} in a list"
        raise wrong("body", f"{len(value)} requests", expected, "divide it into several calls")
    return value


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


def _seconds(timeout_ms: int | None) -> float | None:
    return None if timeout_ms is None else timeout_ms / 1000


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _http_error(request: Request, failure: Exception) -> Response:
    """The framework's own: no such path, no such method."""
    assert isinstance(failure, HTTPException)
    message = f"{request.method} {request.url.path}: {failure.detail}"
    raise Refused(
        failure.status_code, Error(message=message, fix="there is an overview at /docs"), **failure.headers or {}
    )


async def _invalid(_: Request, failure: Exception) -> Response:
    """The framework's check of arguments that it reads itself."""
    assert isinstance(failure, RequestValidationError)
    first = failure.errors()[0]
    argument, expected = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input should be ")
    raise wrong(argument, first.get("input"), expected, "see /docs")
