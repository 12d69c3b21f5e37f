# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The page: titles, what its endpoints say, and a visit with a real browser, where there is one."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from families import shared
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving_fake import FakeEngine

from hf_gr import ConstraintIndex, Engine, enable
from hf_gr.serving.app import make_app
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving.page import HEADERS, add_page, find_titles, read_titles
from hf_gr.serving.run import bind

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SEQUENCES = [[3 + a, 7 + b, 11 + c] for a in range(4) for b in range(4) for c in range(2)]
TITLES = {str(item): f"Film {item}" for item in range(len(SEQUENCES))} | {"0": "Heat <b>1995</b>", "7": "The Heat"}
TITLES |= {str(item): f"{item} {'WWWWWWWWW ' * 4}W" for item in range(9, 14)}  # wide


def make_engine() -> Engine:
    index = ConstraintIndex.from_sequences(SEQUENCES, item_ids=range(len(SEQUENCES)))
    return Engine(enable(shared("qwen3")), index, token_budget=512, workers=1)


def client_of(engine: Any, titles: dict[str, str]) -> TestClient:
    app = FastAPI()
    add_page(app, engine, titles)
    return TestClient(app)


@pytest.fixture
def still() -> FakeEngine:
    engine = FakeEngine()
    engine.catalogue = LiveCatalogue(ConstraintIndex.from_sequences(SEQUENCES, item_ids=range(len(SEQUENCES))))
    return engine


def test_titles_are_read_from_json_and_tables(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"B1": "Löwe"}', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("title\titem_id\nA, b\t7\n", encoding="utf-8")
    (tmp_path / "a.csv").write_text('item_id,title\n8\n9,\n7,"A, b"\n', encoding="utf-8-sig")  # two have no title
    assert read_titles(tmp_path / "a.json") == {"B1": "Löwe"}
    assert read_titles(tmp_path / "a.tsv") == read_titles(tmp_path / "a.csv") == {"7": "A, b"}
    assert find_titles(None, tmp_path) == {}
    (tmp_path / "titles.json").write_text('{"B1": "beside"}', encoding="utf-8")
    assert find_titles(None, tmp_path) == {"B1": "beside"}
    assert find_titles(tmp_path / "a.json", tmp_path) == {"B1": "Löwe"}
    for name, content, said in (
        ("b.json", "{", "is no JSON"),
        ("b.json", '["a"]', "expected a JSON object of titles"),
        ("b.json", '{"a": 1}', "all of them strings"),
        ("b.csv", "id,name\n1,a\n", "expected item_id and title"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            read_titles(tmp_path / name)


def search(client: TestClient, text: str, **how: Any) -> list[tuple[Any, bool]]:
    """What is found, and whether it is in the catalogue."""
    found = client.get("/page/items", params={"search": text, **how}).json()
    return [(one["item_id"], one["in_catalogue"]) for one in found]


def test_a_search_finds_all_words_and_puts_beginnings_first(still: FakeEngine) -> None:
    client = client_of(still, TITLES | {"99": "Heat 2"})
    assert search(client, "heat") == [(0, True), (7, True)]
    assert search(client, "hEAT the") == [(7, True)]
    assert search(client, "nothing like it") == []
    assert len(search(client, "film", limit=5)) == 5
    assert client.get("/page/items", params={"limit": 10**9}).status_code == 422
    # A removed item keeps its name, and a new one is found.
    still.catalogue.apply(Update(remove=[0], add=[{"item_id": 99, "sequence": [3, 7, 13]}]))
    assert search(client, "heat") == [(99, True), (7, True), (0, False)]
    described = client.post("/page/titles", json=[0, 99, 12345, "B1"]).json()
    assert [one["title"] for one in described] == ["Heat <b>1995</b>", "Heat 2", "12345", "B1"]
    assert [one["in_catalogue"] for one in described] == [False, True, False, False]
    assert search(client_of(FakeEngine(), {}), "b0", limit=2) == [("B01", True), ("B02", True)]  # by id


def test_every_file_is_served_and_titles_need_the_key(still: FakeEngine) -> None:
    still.is_ready = True
    client = TestClient(make_app(still, api_key="secret", titles=TITLES))
    page = client.get("/")
    assert page.url.path == "/page/"
    assert page.headers["content-security-policy"] == HEADERS["content-security-policy"]
    for name, kind in {"page.js": "text/javascript", "tree.js": "text/javascript", "page.css": "text/css"}.items():
        assert client.get(f"/page/{name}").headers["content-type"].startswith(kind)
        assert name in page.text or name == "tree.js"
    for name in ("__init__.py", "..%2f__init__.py"):
        assert client.get(f"/page/{name}").status_code == 404
    for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 200)):
        assert client.get("/page/items", headers=headers).status_code == status
        assert client.post("/page/titles", json=[0], headers=headers).status_code == status
    for body in (b"[NaN]", b'["\\ud800"]', b"7", b"[1.5]"):
        answer = client.post("/page/titles", content=body, headers=headers)
        assert (answer.status_code, set(answer.json())) == (422, {"error"})
    error = client.get("/page/items?limit=no", headers=headers).json()["error"]
    assert (error["argument"], error["value"]) == ("query.limit", "no")
    assert "/page/items" not in client.get("/openapi.json").json()["paths"]
    assert TestClient(make_app(still)).get("/page/").status_code == 404


@pytest.fixture
def address() -> Iterator[str]:
    """A server with the page, in a thread."""
    engine = make_engine()
    made = bind("127.0.0.1", 0)
    made.listen()
    server = uvicorn.Server(uvicorn.Config(make_app(engine, titles=TITLES), log_level="error"))
    thread = threading.Thread(target=server.run, args=([made],))
    thread.start()
    while not engine.is_ready:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{made.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    made.close()


@pytest.fixture
def visit(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page in Chromium; what it says in its console must be nothing."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    address, said = request.getfixturevalue("address"), []  # no server without a browser
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)
        yield page
        browser.close()
    assert said == []


def focused(visit: Any) -> str:
    return visit.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.tagName")


def test_a_visitor_asks_makes_a_rule_and_changes_the_catalogue(visit: Any) -> None:
    def titles() -> list[str]:
        return [line.split("\n")[0] for line in visit.locator("#items li").all_inner_texts()]

    def after(act: Any) -> dict[str, Any]:
        """What is asked next; done when its answer is shown."""
        with visit.expect_request("**/v1/recommend") as asked:
            act()
        visit.locator("#items[aria-busy=false]").wait_for()
        return json.loads(asked.value.post_data)

    visit.locator("#catalogue", has_text="32 items, version 0").wait_for()
    visit.get_by_role("combobox", name="Search an item by title").fill("heat")
    visit.get_by_role("option", name="The Heat").wait_for()
    body = after(lambda: visit.get_by_role("combobox", name="Search").press("Enter"))
    assert body["history"] == body["exclude"] == [0]  # the first one found, whose title is no HTML
    assert visit.locator("#history").inner_text().startswith("Heat <b>1995</b>")
    assert "Heat <b>1995</b>" not in titles()

    # The tree has a leaf for every beam, and as many branches as the beams have different beginnings.
    answer = visit.request.post(visit.url + "../v1/recommend", data=body).json()
    prefixes = {tuple(row[: depth + 1]) for row in answer["sequences"] for depth in range(len(row))}
    assert visit.locator("#tree .leaf").count() == len(answer["items"]) == 20
    assert visit.locator("#tree .links path").count() == len(prefixes)
    assert visit.locator("#times .legend li").count() == 4
    expected = [TITLES[str(item)] for item in answer["items"][:10]]
    assert titles() == expected

    # The best item leaves the catalogue: the next answer is without it, and with it again when it is added.
    best, second = titles()[:2]
    for answers in (["Tab", "Escape"], ["Enter"]):  # who only looks what the button does has not removed it
        visit.get_by_role("button", name=f"Remove {best} from the catalogue").focus()
        visit.keyboard.press("Enter")
        visit.get_by_role("dialog").filter(has_text=f"Remove {best} from the catalogue, for all").wait_for()
        for key in answers:
            visit.keyboard.press(key)
        visit.get_by_role("dialog").wait_for(state="hidden")
    assert visit.locator("#catalogue").inner_text().endswith("version 0")
    visit.keyboard.press("Enter")
    visit.keyboard.press("Shift+Tab")
    after(lambda: visit.keyboard.press("Enter"))
    visit.locator("#catalogue", has_text="31 items, version 1").wait_for()
    assert titles() == [*expected[1:], TITLES[str(answer["items"][10])]]
    assert focused(visit) == f"Remove {second} from the catalogue"  # which is at its place now
    after(lambda: visit.get_by_role("button", name=f"Add {best} again").click())
    visit.locator("#catalogue", has_text="32 items, version 2").wait_for()
    assert titles() == expected

    assert focused(visit) == "Search an item by title"  # nothing else is left to add again

    # A rule, on and off.
    visit.get_by_label("Name").fill("the ones")
    visit.get_by_label("Titles with").fill("film 1")
    assert after(lambda: visit.get_by_role("button", name="Make rule").click())["rule"] == "the ones"
    assert titles()
    assert all("Film" in title and "1" in title for title in titles())
    body = after(lambda: visit.locator("#rule").select_option(""))
    assert "rule" not in body
    assert titles() == expected
    after(lambda: visit.get_by_role("button", name="Delete the rule the ones").click())
    assert visit.locator("#rule").locator("option").all_inner_texts() == ["none"]

    # An error is shown.
    visit.get_by_label("Titles with").fill("unheard of")
    visit.get_by_label("Name").fill("none")
    visit.get_by_role("button", name="Make rule").click()
    visit.get_by_role("alert").filter(has_text="No title has “unheard of”").wait_for()
    assert visit.locator("#results.stale").count() == 0
    visit.evaluate("() => { window.fetch = () => Promise.reject() }")
    visit.get_by_role("spinbutton", name="Beams").fill("21")
    visit.get_by_role("spinbutton", name="Beams").press("Enter")
    visit.locator("#results.stale").wait_for()  # what is shown is of an earlier question
    visit.get_by_role("button", name="Remove Heat <b>1995</b> from the history").press("Enter")
    assert (visit.locator("#results").is_visible(), focused(visit)) == (False, "Search an item by title")


@pytest.mark.parametrize("width", [1280, 390])
def test_results_are_seen_whole_and_before_the_controls(visit: Any, width: int) -> None:
    visit.set_viewport_size({"width": width, "height": 900})
    assert visit.locator("h2:visible").all_inner_texts() == ["History", "Request", "Rules", "Removed"]  # none is empty
    visit.get_by_role("combobox", name="Search an item by title").fill("heat")
    visit.get_by_role("option", name="The Heat").click()
    visit.locator("#items[aria-busy=false] li").first.wait_for()
    top = {name: visit.locator(name).bounding_box()["y"] for name in (".history", "#results", ".controls")}
    assert (top[".history"] < top["#results"], top["#results"] < top[".controls"]) == (width < 760, True)
    tree = visit.locator("#tree svg").bounding_box()
    for leaf in visit.locator("#tree .leaf").all():
        box, score = leaf.bounding_box(), leaf.locator(".score").bounding_box()
        assert score["x"] + score["width"] < box["x"] + 120  # before the title, however long that is
        assert box["x"] + box["width"] <= tree["x"] + tree["width"]
    assert visit.evaluate("document.documentElement.scrollWidth") == width  # sideways the tree alone scrolls
    assert visit.locator("#items .score").first.bounding_box()["x"] < width - 60
