# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The server: damaged logs are refused or equal, killed writers lose nothing, odd requests are refused by name."""

import json
import time
from pathlib import Path
from typing import Any

import jobs_case
import pytest
from fastapi.testclient import TestClient
from savers import first_catalogue, items_of, update_on
from test_files import altered, damaged, folder, refusal  # noqa: F401  # the fixture, too
from test_page import make_engine

from hf_gr.serving.app import make_app
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving.update_log import UpdateLog

pytestmark = pytest.mark.slow

PER_CASE, KILLS = 50, 5
GOOD: list[tuple[str, str, Any]] = [
    (
        "POST",
        "/v1/recommend",
        {"history": [1, 2], "num_results": 3, "num_beams": 8, "exclude": [3], "timeout_ms": 500},
    ),
    ("POST", "/v1/recommend", [{"tokens": [3, 7], "filter": [0, 1, 2], "seed": 5, "exact": True}, {"history": [4]}]),
    ("POST", "/v1/classify", {"text": "a", "num_labels": 2, "score": "sum", "threshold": 0.5}),
    ("PATCH", "/v1/catalogue", {"remove": [5], "add": [{"item_id": 5, "sequence": [3, 7, 12]}], "rules": {"a": [1]}}),
    ("PUT", "/v1/catalogue", {"index": "nowhere"}),
    ("POST", "/page/titles", [1, 2]),
]


def test_damaged_logs_are_refused_or_equal(fuzz: Any, folder: Path) -> None:  # noqa: F811
    def known(catalogue: LiveCatalogue) -> Any:
        edition = catalogue.edition
        rules = {name: list(rule.item_ids) for name, rule in edition.rules.items()}
        return edition.version, dict(zip(edition.index.item_ids, edition.index, strict=True)), rules, edition.keys

    for case in fuzz:
        rng, path = case.rng, folder / str(case.number)
        catalogue = LiveCatalogue(first_catalogue(), {"few": [0]}, log=UpdateLog(path))
        for number in range(1, int(rng.integers(2, 6))):
            rules = {"few": [0, number]} if rng.random() < 0.5 else {}
            catalogue.apply(Update(items_of(number), rules=rules, idempotency_key=str(number)))
        files = sorted(file for file in path.rglob("*") if file.stat().st_size)
        files = [file for file in files if file.is_file() and file.suffix != ".md"]
        for _ in range(PER_CASE):
            file = files[int(rng.integers(len(files)))]
            whole = file.read_bytes()
            is_torn = file.suffix == ".jsonl" and rng.random() < 0.5  # a line that nobody acknowledged
            file.write_bytes((whole if is_torn else b"") + damaged(rng, whole, whole))
            found = refusal(path, lambda path=path: LiveCatalogue(log=UpdateLog(path)))
            assert known(found) == known(catalogue) if found else not is_torn, file
            fuzz.count(files=1, refused=int(found is None), torn=int(is_torn))
            file.write_bytes(whole)


def test_acknowledged_updates_outlive_kills(fuzz: Any, folder: Path) -> None:  # noqa: F811
    for case in fuzz:
        path, last = folder / str(case.number), 0
        LiveCatalogue(first_catalogue(), log=UpdateLog(path))
        for _ in range(KILLS):
            begun = jobs_case.SERVER.Value("q", last, lock=False)
            process = jobs_case.in_another_process(update_on, path, begun, last + 1)
            end = time.monotonic() + 60.0
            while begun.value == last:
                assert process.is_alive(), "the writer has failed"
                assert time.monotonic() < end, "the writer does not begin"
                time.sleep(0.0005)
            time.sleep(case.rng.uniform(0, 0.2))
            process.kill()
            process.join()
            acknowledged, last = begun.value - 1, begun.value
            late = LiveCatalogue(log=UpdateLog(path))
            assert {*range(acknowledged + 1)} <= {*late.edition.index.item_ids} <= {*range(last + 1)}
            fuzz.count(kills=1, landed_unknown=int(late.edition.version == last))
            # The writer's client sends the update again that got no answer.
            assert late.apply(Update(items_of(last), idempotency_key=str(last))).version == last
        fuzz.count(acknowledged=last)


def test_odd_requests_are_answered_or_refused_by_name(fuzz: Any) -> None:
    with TestClient(make_app(make_engine(), titles={})) as http:
        while http.get("/readyz").status_code != 200:
            time.sleep(0.05)
        for case in fuzz:
            rng = case.rng
            for _ in range(PER_CASE):
                method, path, body = GOOD[int(rng.integers(len(GOOD)))]
                for _ in range(int(rng.integers(3))):
                    body = altered(rng, body)
                content = json.dumps(body).encode()
                content = damaged(rng, content, content) if rng.random() < 0.3 else content
                answer = http.request(method, path, content=content)
                assert answer.status_code in (200, 422, 503, 504), (path, content, answer.text)
                told = answer.json() if isinstance(answer.json(), list) else [answer.json()]
                assert answer.status_code == 200 or set(told[0]) == {"error"}
                assert all("error" not in one or one["error"].get("status") != 500 for one in told), content
                fuzz.count(requests=1, refused=int(answer.status_code != 200))
