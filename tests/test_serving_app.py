# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP, with an engine without a model."""

import asyncio
import errno
import io
import json
import logging
import os
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_fake import FakeEngine, Log, httpx, in_loop

from hf_gr import ConstraintIndex
from hf_gr.serving import app as app_module
from hf_gr.serving import logs
from hf_gr.serving.app import MOST_AT_ONCE, MOST_CHANGES, MOST_LISTED, make_app
from hf_gr.serving.errors import Refused, read_message
from hf_gr.serving.middleware import Limits
from hf_gr.serving.schemas import CataloguePatch, RecommendRequest, read_body


@asynccontextmanager
async def client(engine: Any = None, *, is_ready: bool = True, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process."""
    engine = FakeEngine() if engine is None else engine
    app = make_app(engine, **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://hf-gr") as made,
    ):
        while is_ready and not engine.is_ready:
            await asyncio.sleep(0)
        yield made


async def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response with this status, which is JSON."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    return response.json()["error"]


def ask(**body: Any) -> dict[str, Any]:
    return {"url": "/v1/recommend", "json": body}


@in_loop
async def test_requests_and_answers() -> None:
    engine = FakeEngine()
    asked: dict[str, Any] = {"history": ["B01"], "num_results": 3, "num_beams": 20, "exclude": ["B02"], "seed": 7}
    asked |= {"filter": ["B01", "B03"], "rule": "europe"}
    async with client(engine) as http:
        response = await http.post(**ask(**asked, timeout_ms=200))
        assert response.status_code == 200
        assert response.json() == {
            "items": ["B01", "B03", "B04"], "scores": [-0.5] * 3, "catalogue_version": 3, "dropped": [], "num_cut": 0,
            "is_fallback": False, "seconds": {"total": 0.011, "queued": 0.001, "computed": 0.01}, "batch_size": 1,
            "model_version": "old", "num_proven": None, "similar_to": [],
        }  # fmt: skip
        assert engine.asked == [
            {"text": None, "tokens": None, "exact": None, "max_per_group": None, "timeout": 0.2, **asked}
        ]
        # In a list each has its answer or its error.
        bodies = [{"history": ["B01"], "sequences": True}, {"history": ["unknown"]}, {"histroy": []}, 7]
        answers = (await http.post("/v1/recommend", json=[*bodies, {"history": ["full"]}])).json()
        assert (answers[0]["items"], answers[0]["sequences"]) == (["B01", "B02"], [[5, 7], [5, 8]])
        assert "sequences" not in engine.asked[1]
        told = [(one["error"]["status"], one["error"].get("argument")) for one in answers[1:]]
        assert told == [(422, "history[0]"), (422, "[2].histroy"), (422, "[3]"), (503, None)]
        assert answers[4]["error"]["retry_after"] == 2.5
        labels = (await http.post("/v1/classify", json=[{"text": "meow", "num_labels": 1}, {"text": 7}])).json()
        assert (labels[0]["labels"], labels[0]["probabilities"]) == (["cat"], [0.75])
        assert labels[1]["error"]["argument"] == "[1].text"
        given = {"score": "renormalized", "threshold": None, "hierarchy": None, "timeout": None}
        assert {"text": "meow", "num_labels": 1, **given} in engine.asked
        assert (labels[0]["method"], labels[0]["mass_left"]) == ("exact", 0.0)
        assert (await http.post("/v1/classify", json={"text": "meow"})).json()["labels"] == ["cat", "dog"]
        number = len(engine.asked)
        for bodies in [[], [{"history": ["B01"]}] * (MOST_AT_ONCE + 1)]:
            error = await error_of(await http.post("/v1/recommend", json=bodies), 422)
            assert error["expected"] == f"1 to {MOST_AT_ONCE} in a list"
        assert len(engine.asked) == number


WRONG_QUESTIONS: list[tuple[bytes, str, str]] = [
    (b"{", "body", "JSON"),
    (b'{"seed": NaN}', "body", "JSON"),
    (b'{"text": "\xff"}', "body", "JSON"),
    (b'{"text": "\\ud800"}', "body", "JSON"),
    (b"[" * 100_000, "body", "JSON"),
    (b"null", "body", "object"),
    (b'{"histroy": ["B01"]}', "histroy", "no such argument"),
    (b'{"history": "B01"}', "history", "list"),
    (b'{"history": ["B01", 1.5]}', "history[1]", "item id"),
    (b'{"history": [true]}', "history[0]", "item id"),
    (b'{"history": ["B01"], "num_beams": 0}', "num_beams", "greater than or equal to 1"),
    (b'{"history": ["B01"], "num_beams": 1e400}', "num_beams", "integer"),
    (b'{"history": ["B01"], "num_beams": 1' + b"0" * 4000 + b"}", "num_beams", "less than"),
    (b'{"tokens": [1, "2"]}', "tokens[1]", "integer"),
    (b'{"history": ["B01"], "exact": 1}', "exact", "boolean"),
    (b'{"history": ["B01"], "exclude": null}', "exclude", "list"),
]
WRONG_CHANGES: list[tuple[Any, str, str]] = [
    ({"remove": ["B01", "nothing"]}, "remove", "'nothing'"),
    ({"add": [{"item_id": "B98"}]}, "add[0].sequence", "a value"),
    ({"add": [{"item_id": "B98", "sequence": []}]}, "add[0].sequence", "expected one item or more: "),
    ({"add": [{"item_id": "B98", "sequence": [2**70]}]}, "", "add: "),
    ({"remove": ["B01"], "rules": {"europe": ["B01"]}}, "rules['europe']", "'B01'"),
    ({"rules": {"europe": [1.5]}}, "rules.europe[0]", "item id"),
    ({"idempotency_key": "a b"}, "idempotency_key", "match pattern"),
    ({"delete": ["B01"]}, "delete", "no such argument: omit it;"),
    ([], "body", "object"),
]


@in_loop
async def test_a_wrong_body_names_the_argument_and_changes_nothing() -> None:
    engine = FakeEngine()
    before = engine.catalogue.edition
    async with client(engine) as http:
        for body, argument, expected in WRONG_QUESTIONS:
            error = await error_of(await http.post("/v1/recommend", content=body), 422)
            assert (error["argument"], expected in error["expected"], bool(error["fix"])) == (argument, True, True), (
                body
            )
            assert len(error["message"]) < 700
        for change, argument, told in WRONG_CHANGES:
            error = await error_of(await http.patch("/v1/catalogue", json=change), 422)
            assert (error.get("argument", ""), told in error["message"]) == (argument, True), change
        assert "/docs" in (await error_of(await http.get("/v2"), 404))["fix"]
        await error_of(await http.get("/v1/recommend"), 405)
    assert not engine.asked
    assert engine.catalogue.edition is before


NULLS = [None] * 200_000
KEYS = {f"key {number}": 0 for number in range(70_000)}


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        ({"history": NULLS}, "history[0]"),
        ({"tokens": NULLS}, "tokens[0]"),
        ({"add": NULLS}, "add[0]"),
        ({"add": [{"item_id": 5, "sequence": NULLS}]}, "add[0].sequence[0]"),
        ({"rules": {"x": NULLS}}, "rules.x[0]"),
        (KEYS, "key 0"),
        ({"history": KEYS}, "history"),
    ],
)
def test_a_body_is_read_to_its_first_error(body: Any, argument: str) -> None:
    """A megabyte of errors was 1.7 s and 735 MB."""
    tracemalloc.start()
    with pytest.raises(Refused) as refused:
        read_body(CataloguePatch if {"add", "rules"} & set(body) else RecommendRequest, body)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()
    assert (refused.value.error.argument, len(refused.value.body) < 2000) == (argument, True)


@in_loop
async def test_a_large_body_is_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, read = [], app_module.read_json
    monkeypatch.setattr(app_module, "read_json", lambda body: threads.append(threading.current_thread()) or read(body))
    async with client() as http:
        for history in (["B01"], ["B01"] * 20_000):
            assert (await http.post(**ask(history=history))).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@in_loop
async def test_errors_of_the_engine() -> None:
    expected: dict[str, tuple[int, dict[str, Any]]] = {
        "unknown": (422, {"argument": "history[0]", "value": "unknown", "expected": "an item of the catalogue"}),
        "full": (503, {"message": "1,024 requests wait", "retry_after": 2.5}),
        "late": (504, {"argument": "timeout_ms"}),
        "broken": (500, {"message": "the model's scores are not numbers"}),
        "bug": (500, {"message": "the server failed on this request"}),
    }
    async with client() as http:
        for first, (status, fields) in expected.items():
            response = await http.post(**ask(history=[first]))
            error = await error_of(response, status)
            assert fields.items() <= error.items()
            assert error["fix"]
            assert response.headers.get("retry-after") == ("3" if status == 503 else None)
    assert read_message("not our form").model_dump(exclude_none=True) == {"message": "not our form"}
    told = read_message("""history has "it's, expected: x", expected items of the catalogue: omit it""")
    assert (told.value, told.expected, told.fix) == ("it's, expected: x", "items of the catalogue", "omit it")


async def parts(taken: list[int]) -> AsyncIterator[bytes]:
    """A body of 100 parts, and those that were taken."""
    for number in range(100):
        taken.append(number)
        yield b" " * 2**20


@in_loop
async def test_a_large_body_is_not_read() -> None:
    engine, chunked, told = FakeEngine(), [], []
    async with client(engine) as http:
        error = await error_of(await http.post("/v1/recommend", content=parts(chunked)), 413)
        assert ("1,048,576 bytes" in error["expected"], len(chunked)) == (True, 2)  # the first one is within the limit
        headers = {"content-length": str(100 * 2**20)}
        response = await http.post("/v1/recommend", content=parts(told), headers=headers)
        assert (response.status_code, told, response.headers["connection"]) == (413, [], "close")  # it has said so
    assert not engine.asked
    with pytest.raises(ValueError, match="max_body=0, expected more than 0"):
        Limits(max_body=0)


@in_loop
async def test_too_many_requests_in_flight() -> None:
    async with client(limits=Limits(max_open=2)) as http:
        slow = [asyncio.create_task(http.post(**ask(history=["slow"], timeout_ms=300))) for _ in range(2)]
        await asyncio.sleep(0.05)
        await error_of(await http.post(**ask(history=["B01"])), 503)
        assert (await http.get("/healthz")).status_code == 200
        assert [response.status_code for response in await asyncio.gather(*slow)] == [200, 200]
        assert (await http.post(**ask(history=["B01"]))).status_code == 200


@in_loop
async def test_a_long_list_keeps_nobody_else() -> None:
    """Its reading, some milliseconds for each request, stopped the server, and many lists stopped it for minutes."""
    engine, clock, log = FakeEngine(), asyncio.get_running_loop().time, Log()
    engine.observers.append(log)
    log.computed = lambda _: time.sleep(0.002)
    async with client(engine) as http:
        begun, body = clock(), [{"history": ["B01"]}] * MOST_AT_ONCE
        many = asyncio.create_task(http.post("/v1/recommend", json=body))
        await asyncio.sleep(0.05)
        assert (await http.post(**ask(history=["B01"]))).status_code == 200
        assert (clock() - begun < 0.4, many.done()) == (True, False)
        assert len((await many).json()) == MOST_AT_ONCE
        late = (await http.post("/v1/recommend", json=[body[0] | {"timeout_ms": 60}] * 99)).json()
        assert ("items" in late[0], late[98]["error"]["status"]) == (True, 504)
        slow = [{"history": ["slow"], "timeout_ms": 500}] * MOST_AT_ONCE
        lists = await asyncio.gather(
            *(http.post("/v1/recommend", json=slow) for _ in range(MOST_LISTED // MOST_AT_ONCE + 1))
        )
        assert sorted(one.status_code for one in lists) == [200] * 16 + [503]
        assert (await http.post("/v1/recommend", json=slow[:1])).status_code == 200


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@in_loop
async def test_keys() -> None:
    taken: list[int] = []
    async with client(api_key="read", admin_key="change") as http:
        for key in (None, "wrong", "", "reaD", "rea"):
            headers = {} if key is None else bearer(key)
            response = await http.post("/v1/recommend", content=parts(taken), headers=headers)
            await error_of(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            await error_of(await http.patch("/v1/catalogue", content=parts(taken), headers=headers), 401)
            await error_of(await http.get("/v1/catalogue", headers=headers), 401)
        await error_of(await http.get("/v1/catalogue", headers={"authorization": "Basic read"}), 401)
        assert not taken  # the key comes before the body
        for key in ("read", "change"):
            assert (await http.post(**ask(history=["B01"]), headers=bearer(key))).status_code == 200
            assert (await http.get("/v1/catalogue", headers=bearer(key))).status_code == 200
        for change in (http.patch, http.put):
            error = await error_of(await change("/v1/catalogue", json={}, headers=bearer("read")), 403)
            assert "admin" in error["fix"]
        # The right key: the body is looked at.
        assert (await http.put("/v1/catalogue", json={}, headers=bearer("change"))).status_code == 422
        for path in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
    for key in ("", " ", "ключ", "a\0b"):
        with pytest.raises(ValueError, match="admin_key is empty or not ASCII"):
            make_app(FakeEngine(), admin_key=key)
    async with client(api_key="old new", admin_key="change\nother") as http:  # while keys are changed
        for key, asked, changed in (("old", 200, 403), ("new", 200, 403), ("other", 200, 200), ("old new", 401, 401)):
            assert (await http.get("/v1/catalogue", headers=bearer(key))).status_code == asked
            assert (await http.patch("/v1/catalogue", json={}, headers=bearer(key))).status_code == changed
    for options in ({"api_key": "read"}, {"is_read_only": True}):
        async with client(**options) as http:
            await error_of(await http.put("/v1/catalogue", json={}, headers=bearer("read")), 403)


FROM_HERE: list[dict[str, str]] = [
    {},
    {"origin": "http://127.0.0.1:8000"},  # the page
    {"origin": "http://localhost:8000", "host": "localhost:8000"},
    {"origin": "http://localhost", "host": "localhost:80"},
    {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
]
FROM_AFAR: list[dict[str, str]] = [
    {"origin": "http://127.0.0.1:8001"},
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example:8000", "host": "evil.example:8000"},  # a name turned to 127.0.0.1
    {"origin": "null"},
    {"origin": "http://127.0.0.1:port"},
    {"Forwarded": "for=192.0.2.1"},
    {"X-Forwarded-For": "192.0.2.1"},
    {"X-Forwarded-Host": "hf-gr.example"},
    {"X-Real-IP": "192.0.2.1"},
]


@in_loop
async def test_without_keys_changes_come_from_this_machine() -> None:
    change: dict[str, Any] = {"url": "/v1/catalogue", "json": {"rules": {"few": ["B01"]}}}
    async with client() as http, client(admin_key="change") as keyed:
        http.base_url = keyed.base_url = "http://127.0.0.1:8000"
        for headers in FROM_HERE:
            assert (await http.patch(**change, headers=headers)).status_code == 200
            assert (await http.put("/v1/catalogue", headers=headers, json={})).status_code == 422
        for headers in FROM_AFAR:
            error = await error_of(await http.patch(**change, headers=headers), 403)
            assert (error["argument"], "$HF_GR_ADMIN_KEY" in error["fix"]) == (next(iter(headers)).lower(), True)
            await error_of(await http.put("/v1/catalogue", headers=headers, json={}), 403)
            assert (await http.post(**ask(history=["B02"]), headers=headers)).status_code == 200
            assert (await keyed.patch(**change, headers=headers | bearer("change"))).status_code == 200
        assert (await http.get("/v1/catalogue")).json()["version"] == 3 + len(FROM_HERE)


@in_loop
async def test_pages_of_other_sites_ask_where_they_may() -> None:
    origin = "https://shop.example"
    how = {"origin": origin, "access-control-request-headers": "content-type"}
    async with client(origins=[origin]) as http, client() as closed:
        for url, method, status in (("/v1/recommend", "POST", 200), ("/v1/catalogue", "PATCH", 400)):
            preflight = how | {"access-control-request-method": method}
            assert (await http.options(url, headers=preflight)).status_code == status
            assert (await closed.options(url, headers=preflight)).status_code == 405
        for body in (b'{"history": ["B01"]}', b"{"):  # errors are read, too
            answer = await http.post("/v1/recommend", content=body, headers={"origin": origin})
            assert answer.headers["access-control-allow-origin"] == origin
        assert (
            "access-control-allow-origin" not in (await http.get("/readyz", headers={"origin": "https://x"})).headers
        )
    for origin in ("shop.example", "https://shop.example/", ""):
        with pytest.raises(ValueError, match="expected a scheme and a host"):
            make_app(FakeEngine(), origins=[origin])


@in_loop
async def test_sequences_are_of_the_edition_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_changes = FakeEngine(), 1
    answer = FakeEngine.recommend

    async def then_changed(self: FakeEngine, **given: Any) -> Any:
        found = await answer(self, **given)
        for number in range(num_changes):
            self.catalogue.swap(ConstraintIndex.from_sequences([[7 + number]], item_ids=["B01"]))
        return found

    monkeypatch.setattr(FakeEngine, "recommend", then_changed)
    async with client(engine) as http:
        one = {"history": ["B01"], "num_results": 1, "sequences": True}
        assert (await http.post(**ask(**one))).json()["sequences"] == [[5, 7]]
        num_changes = 2
        engine.catalogue.swap(ConstraintIndex.from_sequences([[5]], item_ids=["B01"]))
        assert (await http.post(**ask(**one))).json()["sequences"] == [[5]]


@in_loop
async def test_changes_of_the_catalogue() -> None:
    async with client() as http:
        state = {"version": 3, "model_version": "old", "num_items": 4, "max_length": 2, "rules": {"europe": 2}}
        assert (await http.get("/v1/catalogue")).json() == state
        change = {"remove": ["B02"], "add": [{"item_id": "B99", "sequence": [9, 9]}], "code_book": {"B01": "5 8"}}
        refused = await error_of(await http.patch("/v1/catalogue", json=change), 422)
        assert "expected that of the patch" in str(refused)
        change["code_book"] = {"B01": "5 7"}
        state |= {"version": 4, "rules": {"europe": 1}}
        assert (await http.patch("/v1/catalogue", json=change)).json() == state
        answer = (await http.post(**ask(history=["B01"], num_results=9, sequences=True))).json()
        assert (answer["items"], answer["catalogue_version"]) == (["B01", "B03", "B04", "B99"], 4)
        assert answer["sequences"][3] == [9, 9]
        change = {"rules": {"asia": ["B99"], "europe": None}}
        state = (await http.patch("/v1/catalogue", json=change)).json()
        assert (state["version"], state["rules"]) == (5, {"asia": 1})
        assert (await http.get("/v1/catalogue")).json() == state
        assert "hf_gr_catalogue_version 5.0" in (await http.get("/metrics")).text
        change = {"remove": ["B01"], "idempotency_key": "a-1"}
        for _ in range(2):  # its client does not know whether it was made
            assert (await http.patch("/v1/catalogue", json=change)).json()["version"] == 6
        error = await error_of(await http.patch("/v1/catalogue", json=change | {"remove": ["B03"]}), 422)
        assert (error["argument"], error["value"]) == ("idempotency_key", "a-1")


@in_loop
async def test_another_index_and_changes_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ConstraintIndex.from_sequences([[1, 2, 3], [1, 2, 4]], item_ids=["B01", "B02"]).save_pretrained(tmp_path / "new")
    (tmp_path / "empty").mkdir()

    def refuse(index: ConstraintIndex) -> None:
        raise ValueError("the catalogue has token 4, expected less than the vocabulary, 4: take its own")

    def full(update: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = FakeEngine()
    async with client(engine) as http:
        for name in ("no/such/folder", str(tmp_path / "empty"), "a b", "\0"):
            error = await error_of(await http.put("/v1/catalogue", json={"index": name}), 422)
            assert (error["argument"], error["value"], error["expected"]) == ("index", name, "a saved index")
        response = await http.put("/v1/catalogue", json={"index": str(tmp_path / "new")})
        state = {"version": 4, "model_version": "old", "num_items": 2, "max_length": 3, "rules": {"europe": 1}}
        assert response.json() == state
        engine.catalogue.check = refuse
        error = await error_of(await http.put("/v1/catalogue", json={"index": str(tmp_path / "new")}), 422)
        assert (error["argument"], error["expected"]) == ("index", "less than the vocabulary, 4")
        monkeypatch.setattr(engine.catalogue, "apply", full)
        error = await error_of(await http.patch("/v1/catalogue", json={"remove": ["B01"]}), 507)
        assert f"({os.strerror(errno.ENOSPC)}): the catalogue is unchanged" in error["message"]


@in_loop
async def test_another_model() -> None:
    engine = FakeEngine()
    async with client(engine, api_key="ask", admin_key="change") as http:
        await error_of(await http.put("/v1/model", json={"model": "new"}, headers=bearer("ask")), 403)
        for model, status in (("", 422), ("unknown", 422), ("full", 503), ("large", 507)):
            await error_of(await http.put("/v1/model", json={"model": model}, headers=bearer("change")), status)
        assert (engine.swapped, engine.model_version) == ([], "old")
        given = {"model": "new", "index": None, "tokenizer": None, "assistant_model": None, "revision": "v2"}
        body = {"model": "new", "revision": "v2"}
        state = (await http.put("/v1/model", json=body, headers=bearer("change"))).json()
        assert (engine.swapped, state["model_version"]) == ([given], "new")
        assert (await http.get("/readyz")).json()["model_version"] == "new"
        assert 'hf_gr_model_info{version="new"} 1.0' in (await http.get("/metrics")).text


@in_loop
async def test_changes_that_hang_keep_nobody_else() -> None:
    """Such as those that wait for another process's lock, in threads that large questions needed, too."""
    engine, may_end = FakeEngine(), threading.Event()
    engine.catalogue.apply = lambda update: may_end.wait(30)  # pyright: ignore
    async with client(engine) as http:
        changes = [asyncio.create_task(http.patch("/v1/catalogue", json={})) for _ in range(MOST_CHANGES)]
        await asyncio.sleep(0.05)
        error = await error_of(await http.patch("/v1/catalogue", json={}), 503)
        assert (error["message"], error["retry_after"]) == (
            "16 changes of the catalogue wait already: retry later",
            1.0,
        )
        assert (await http.post(**ask(history=["B01"] * 20_000))).status_code == 200
        may_end.set()
        assert {one.status_code for one in await asyncio.gather(*changes)} == {200}


@in_loop
async def test_visitors_of_a_demonstration_change_items_and_load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConstraintIndex, "from_pretrained", lambda name: pytest.fail(f"it loads {name}"))
    async with client(is_public=True, takes_indexes=False) as http:
        headers = {"x-forwarded-for": "192.0.2.1", "origin": "https://me-films.hf.space"}
        assert (await http.patch("/v1/catalogue", json={"remove": ["B01"]}, headers=headers)).status_code == 200
        await error_of(await http.put("/v1/catalogue", json={"index": "me/mine"}, headers=headers), 405)
        await error_of(await http.put("/v1/model", json={"model": "me/mine"}, headers=headers), 404)
        assert set((await http.get("/openapi.json")).json()["paths"]["/v1/catalogue"]) == {"get", "patch"}


@in_loop
async def test_the_server_answers_while_the_engine_warms_up() -> None:
    engine = FakeEngine(start_seconds=0.1)
    async with client(engine, is_ready=False) as http:
        assert (await http.get("/healthz")).status_code == 200
        response = await http.get("/readyz")
        assert "warms up" in (await error_of(response, 503))["message"]
        assert response.headers["retry-after"] == "1"
        await error_of(await http.post(**ask(history=["B01"])), 503)
        await asyncio.sleep(0.2)
        told = {"status": "ready", "catalogue_version": 3, "model_version": "old"}
        assert (await http.get("/readyz")).json() == told
        assert [
            (one.status_code, one.content) for one in (await http.head("/healthz"), await http.head("/readyz"))
        ] == [(200, b"")] * 2
        assert not engine.is_closed
        engine.is_stuck = True
        assert "hangs" in (await error_of(await http.get("/readyz"), 503))["message"]
        assert "start the server anew" in (await error_of(await http.get("/healthz"), 503))["message"]
    never, failing = FakeEngine(start_seconds=100), FakeEngine()
    failing.start_error = RuntimeError("no memory")
    async with client(never, is_ready=False), client(failing, is_ready=False) as http:
        await asyncio.sleep(0.01)
        assert "did not start" in (await error_of(await http.get("/readyz"), 503))["message"]
        assert (await http.get("/healthz")).status_code == 200
    assert engine.is_closed
    assert never.is_closed  # the end came during the warm-up


@in_loop
async def test_metrics() -> None:
    async with client() as http, client() as other:
        await http.post(**ask(history=["B01"]))
        await http.post(**ask(history=["full"]))
        await http.post("/v1/recommend/secret-item", json={})
        text = (await http.get("/metrics")).text
        openmetrics = await http.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert 'hf_gr_requests_total{outcome="answered"} 0.0' in (await other.get("/metrics")).text
    assert {
        'hf_gr_requests_total{outcome="answered"} 1.0',
        'hf_gr_requests_total{outcome="late"} 0.0',
        'hf_gr_request_seconds_bucket{le="0.01",outcome="answered"} 1.0',
        "hf_gr_batch_requests_sum 1.0",
        "hf_gr_tokens_total 64.0",
        "hf_gr_busy_workers 1.0",
        "hf_gr_forwards_total 3.0",
        "hf_gr_catalogue_items 4.0",
        'hf_gr_http_responses_total{path="/v1/recommend",status="200"} 1.0',
        'hf_gr_http_responses_total{path="/v1/recommend",status="503"} 1.0',
        'hf_gr_http_responses_total{path="other",status="404"} 1.0',
    } <= set(text.splitlines())
    assert ("process_resident_memory_bytes" in text, "secret" in text) == (True, False)
    assert openmetrics.text.endswith("# EOF\n")


def test_logs_have_no_histories() -> None:
    stream, secret = io.StringIO(), "secret-item-of-a-user"
    ids: list[str] = []

    @in_loop
    async def visit() -> None:
        async with client() as http:
            for number, body in (("abc.1", {}), ("a b", {"history": ["bug"], "text": secret})):
                body = {"history": ["B01", secret]} | body
                headers = {"x-request-id": number, "traceparent": f"00-{'4b' * 16}-{'00' * 8}-{number[:2]}"}
                ids.append((await http.post(**ask(**body), headers=headers)).headers["x-request-id"])
            await http.post(**ask(history=["unknown", secret], secret=1))
            await http.get(f"/v1/{secret}?q={secret}")
            await http.get("/healthz")

    logs.configure(stream=stream)
    try:
        visit()
    finally:
        for name in ("hf_gr.serving", "hf_gr", "uvicorn", "asyncio"):
            logger = logging.getLogger(name)
            logger.handlers[:], logger.propagate = [], True
            logger.setLevel(logging.NOTSET)
    assert secret not in stream.getvalue()
    assert (ids[0], ids[1] == "a b") == ("abc.1", False)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [
        "starting", "ready", "request", "failed", "request", "request", "request", "draining", "closed"
    ]  # fmt: skip
    assert [line.get("id") for line in lines[:5]] == [None, None, *ids, ids[1]]
    assert [line.get("status") for line in lines[2:7]] == [200, None, 500, 422, 404]
    assert [line.get("trace_id") for line in lines[1:4]] == [None, "4b" * 16, None]  # "a " is no flag
    assert (lines[2]["method"], lines[2]["path"], lines[6]["path"]) == ("POST", "/v1/recommend", "other")
    assert (lines[3]["level"], lines[3]["error"]["type"]) == ("error", "KeyError")
    assert any("serving_fake.py" in place for place in lines[3]["error"]["at"])


@in_loop
async def test_the_documentation_names_everything() -> None:
    async with client(api_key="read") as http:
        made = (await http.get("/openapi.json")).json()
        docs = (await http.get("/docs")).text
        assert ("POST /v1/recommend" in docs, "timeout_ms" in docs, "http" in docs.replace("over HTTP", "")) == (
            True,
            True,
            False,
        )
    with_key = {path for path, methods in made["paths"].items() if any("security" in one for one in methods.values())}
    assert with_key == {"/v1/recommend", "/v1/classify", "/v1/catalogue", "/v1/model"}
    assert set(made["paths"]) == with_key | {"/healthz", "/readyz", "/metrics"}
    schema = made["paths"]["/v1/recommend"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"history", "text", "tokens", "rule", "seed", "timeout_ms"} <= set(schema["oneOf"][0]["properties"])
    patch = made["paths"]["/v1/catalogue"]["patch"]["requestBody"]["content"]["application/json"]["schema"]
    assert patch["properties"]["add"]["items"]["required"] == ["item_id", "sequence"]
    assert made["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"  # the button Authorize
    assert "$defs" not in json.dumps(made)
