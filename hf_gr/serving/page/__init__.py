# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A page to try a server with: a history by titles, beams as a tree, rules, changes of the catalogue, times.

It uses the public endpoints; of its own it has the titles of items. Needs `pip install "hf-gr[serve]"`.
"""

import csv
import json
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from hf_gr.answering.requests import split_items
from hf_gr.serving.schemas import ItemIds, Taken, read_body, read_json

TITLES = "titles.json"  # in the folder of a model: found without --titles
STATIC = Path(__file__).parent / "static"
MOST_FOUND, MOST_NAMED = 10_000, 10_000

# Only what comes from this server is run or shown; Spaces show the page in a frame.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
mimetypes.add_type("text/javascript", ".js")  # systems may know another one, which browsers refuse

ItemId = int | str


def read_titles(path: Path) -> dict[str, str]:
    """Titles by item id.

    Args:
        path: a JSON object `{"item id": "title"}`, or a `.csv` or `.tsv` with the columns `item_id` and `title`; items
            of rows without a title are shown by id.

    Raises:
        ValueError: the file is neither.
        OSError: it cannot be read.
    """
    if path.suffix in (".csv", ".tsv"):
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            if not {"item_id", "title"} <= set(rows.fieldnames or ()):
                raise ValueError(f"{path} has the columns {rows.fieldnames}, expected item_id and title: rename them")
            return {row["item_id"]: row["title"] for row in rows if row["item_id"] and row["title"]}
    try:
        titles = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}), expected {{'item id': 'title'}}: or a .csv or .tsv") from error
    if not isinstance(titles, dict) or not all(isinstance(title, str) for title in titles.values()):
        raise ValueError(f"{path}, expected a JSON object of titles by item id, all of them strings")
    return titles


def find_titles(titles: Path | None, model: Any) -> dict[str, str]:
    """Titles from a file, or from the model's folder, if it has some; otherwise none, and ids are shown."""
    if titles is not None:
        return read_titles(titles)
    own = Path(str(model)) / TITLES
    return read_titles(own) if own.is_file() else {}


class Named(Taken):
    """Whose titles the page asks for."""

    item_ids: ItemIds


class Names:
    """Items by name, of a catalogue that changes. An item that was removed keeps its name."""

    def __init__(self, engine: Any, titles: Mapping[str, str]) -> None:
        self._engine, self._titles = engine, titles
        self._known: dict[str, ItemId] = {}  # by what JSON calls them
        self._version: int | None = None

    def search(self, text: str, *, limit: int) -> list[dict[str, Any]]:
        """Items whose title has all words of a text: those of the catalogue first, then titles that begin so."""
        edition, words = self._engine.catalogue.edition, text.casefold().split()
        if edition.version != self._version:  # items that are new in it are known from now on
            ids = edition.index.item_ids
            new = {str(item): item for item in (ids if isinstance(ids, list) else ids.tolist())}
            self._known, self._version = self._known | new, edition.version
        found = [
            item for name, item in self._known.items() if all(word in self._title(name).casefold() for word in words)
        ]
        described = self.describe(found)
        described.sort(key=lambda one: not one["title"].casefold().startswith(" ".join(words)))
        return sorted(described, key=lambda one: not one["in_catalogue"])[:limit]

    def describe(self, item_ids: Sequence[ItemId]) -> list[dict[str, Any]]:
        """Titles of items, in their order, and which are in the catalogue: of ids of the other type none."""
        index = self._engine.catalogue.edition.index
        kind = str if index.snapshot.are_strings else int
        right = [item for item in item_ids if isinstance(item, kind)]
        living = set(split_items(right, index)[0])
        return [
            {"item_id": item, "title": self._title(str(item)), "in_catalogue": item in living} for item in item_ids
        ]

    def _title(self, name: str) -> str:
        return self._titles.get(name, name)


class Files(StaticFiles):
    """The page's files."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """A file, with `HEADERS`."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response


def add_page(
    app: FastAPI, engine: Any, titles: Mapping[str, str], *, home: bool = True, dependencies: Sequence[Any] = ()
) -> None:
    """Serve the page at `/page/`.

    Args:
        app: with `/v1/recommend` and `/v1/catalogue`.
        engine: an `Engine`.
        titles: by item id, as a string; items without one are shown by id.
        home: send visitors of `/` to the page.
        dependencies: of what names items: the app's check of the key. The page itself is open, and asks for a key.
    """
    names = Names(engine, titles)
    router = APIRouter(include_in_schema=False)

    if home:
        router.add_api_route("/", lambda: RedirectResponse("page/"), methods=["GET"])

    @router.get("/page/items", dependencies=[*dependencies])
    def items(
        search: Annotated[str, Query(max_length=200)] = "", limit: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 12
    ) -> list[dict[str, Any]]:
        return names.search(search, limit=limit)

    @router.post("/page/titles", dependencies=[*dependencies])
    async def describe(request: Request) -> list[dict[str, Any]]:
        item_ids = read_body(Named, {"item_ids": read_json(await request.body())}).item_ids
        return names.describe(item_ids[:MOST_NAMED])

    app.include_router(router)
    app.mount("/page", Files(directory=STATIC, html=True))
