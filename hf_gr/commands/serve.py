# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr serve`: one process that recommends over HTTP. Parses options; the work is done by `hf_gr.serving`.

Exit codes: 0 ended by SIGTERM or Ctrl-C, after what was under way; 1 refused or not started; 2 an option is wrong.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_gr.offline.options import DEVICE_HELP, REVISION_HELP

from .flags import DRAFTING, GENERATE, read_integers, read_options
from .programs import require
from .text import fail, flag_of, in_flags

PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
SEARCH, BATCHES, SERVER, CATALOGUE = "Search", "Batches", "Server", "Catalogue and prompts"


class UnknownItems(StrEnum):
    """What to do with items of a history that the catalogue does not have."""

    DROP = "drop"
    REFUSE = "refuse"


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, show_default="Default:" not in text, **more)


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model's folder or repository. Default: the recommender that `hf-gr demo` trained last.",
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        str | None,
        _option(
            CATALOGUE,
            "The catalogue's folder or repository. Default: the one that the model names, or has in its folder.",
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        _option(CATALOGUE, 'Named rules: JSON such as {"europe": ["B01", "B02"]}.', exists=True, dir_okay=False),
    ] = None,
    fallback: Annotated[
        Path | None,
        _option(
            CATALOGUE,
            "Answers to an empty history: item ids, the best first, in the column item_id of a table, or one per "
            "line, or as a JSON list. Default: it is refused.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    updates: Annotated[
        Path | None,
        _option(
            CATALOGUE,
            "Folder that keeps changes of the catalogue, and shares them between servers of this machine: once it has "
            "some, --index and --rules are not read. Default: changes end with the process.",
            file_okay=False,
        ),
    ] = None,
    unknown_items: Annotated[
        UnknownItems, _option(CATALOGUE, "Items of a history that the catalogue does not have.")
    ] = UnknownItems.DROP,
    tokenizer: Annotated[str | None, _option(CATALOGUE, "For texts. Default: the model's own.")] = None,
    max_prompt_tokens: Annotated[
        int | None, _option(CATALOGUE, "Longer prompts are cut from the left. Default: what the model takes.", min=1)
    ] = None,
    prefix_tokens: Annotated[
        str | None,
        _option(CATALOGUE, "Token ids before every history.", metavar="N,N,..."),
    ] = None,
    suffix_tokens: Annotated[
        str | None, _option(CATALOGUE, "Token ids after every history.", metavar="N,N,...")
    ] = None,
    prompt: Annotated[
        str | None,
        _option(
            CATALOGUE,
            "What /v1/classify reads, with {text} in the text's place. Default: a plain request for a category.",
        ),
    ] = None,
    num_beams: Annotated[int, _option(SEARCH, "Beams, unless a request says otherwise.", min=1)] = 20,
    num_results: Annotated[int, _option(SEARCH, "Items, unless a request says otherwise.", min=1)] = 10,
    max_beams: Annotated[int, _option(SEARCH, "The most beams, and labels, of a request.", min=2)] = 512,
    drafting: DRAFTING = None,
    option: GENERATE = None,
    revision: Annotated[str | None, _option(SERVER, REVISION_HELP)] = None,
    device: Annotated[str | None, _option(SERVER, DEVICE_HELP)] = None,
    lanes: Annotated[
        int | None, _option(BATCHES, "Batches at once. Default: one for each core; on a GPU two streams.", min=1)
    ] = None,
    token_budget: Annotated[int | None, _option(BATCHES, "Tokens of a batch. Default: measured.", min=1)] = None,
    max_batch: Annotated[int, _option(BATCHES, "Requests of a batch.", min=1)] = 64,
    max_queue: Annotated[int, _option(BATCHES, "Requests that wait; more are refused.", min=1)] = 1024,
    timeout: Annotated[float, _option(BATCHES, "Seconds for a request that does not say.", min=0.001)] = 10.0,
    key_cache_bytes: Annotated[
        int, _option(BATCHES, "Memory for keys of prompts, for those that begin alike; 0 keeps none.", min=0)
    ] = 2**28,
    host: Annotated[str, _option(SERVER, "Where to listen; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, _option(SERVER, "0 for any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        _option(SERVER, "Who asks must send it. Default: anybody may ask.", envvar="HF_GR_API_KEY"),
    ] = None,
    admin_key: Annotated[
        str | None,
        _option(
            SERVER,
            "Who changes the catalogue must send it. Default: programs on this machine may, if the server is only "
            "there and has no API key, but not through a proxy, nor another site's page.",
            envvar="HF_GR_ADMIN_KEY",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Also serve a page to try it with.", rich_help_panel=SERVER)
    ] = False,
    titles: Annotated[
        Path | None,
        _option(
            SERVER,
            "Names of items for the page: JSON by id, or .csv or .tsv with item_id and title. Default: those in the "
            "model's folder, where the demo saves them.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    max_body: Annotated[int, _option(SERVER, "Bytes of a request.", min=1)] = 2**20,
    drain_timeout: Annotated[float, _option(SERVER, "Seconds for what is under way at the end.", min=0)] = 30.0,
    drain_delay: Annotated[
        float,
        _option(
            SERVER,
            "Seconds after SIGTERM in which it still answers new requests, while /readyz says 503: a load balancer "
            "goes elsewhere meanwhile.",
            min=0,
        ),
    ] = 2.0,
    log_level: Annotated[LogLevel, _option(SERVER, "What is logged, as lines of JSON on stderr.")] = LogLevel.INFO,
) -> None:
    """Serve recommendations over HTTP: POST /v1/recommend, /v1/classify, catalogue, health, metrics; help at /docs.

    One process answers many users at once: requests join in batches by token capacity, and those that cannot meet
    their deadline are refused at once. It listens on this machine only, unless --host says otherwise. SIGTERM and
    Ctrl-C end it after the requests that are under way; SIGTERM after --drain-delay.
    """
    require("hf-gr serve", "serve", PACKAGES)
    from hf_gr.serving.keys import check_keys, is_loopback
    from hf_gr.serving.page import find_titles
    from hf_gr.serving.run import address_of, bind, run

    from .recommend import quiet_libraries

    made = catalogue = None
    try:
        # An empty variable is a secret that got lost; typer would pass it over, and leave the server open.
        api_key = os.environ.get("HF_GR_API_KEY") if api_key is None else api_key
        admin_key = os.environ.get("HF_GR_ADMIN_KEY") if admin_key is None else admin_key
        check_keys(api_key=api_key, admin_key=admin_key)
        is_open = is_loopback(host) and api_key is None
        if prompt is not None and "{text}" not in prompt:
            raise ValueError(f"--prompt {prompt!r}, expected a text with {{text}} in it, where the text goes")
        tokens = {"prefix_tokens": prefix_tokens, "suffix_tokens": suffix_tokens}
        prompts: dict[str, Any] = {
            name: read_integers(f"--{name.replace('_', '-')}", text) for name, text in tokens.items() if text
        } | ({} if prompt is None else {"prompt": prompt})
        made = bind(host, port)
        name = _demo_model() if model is None else model
        options = read_options(option or (), {"drafting": drafting} if drafting else {})
        quiet_libraries()
        names = find_titles(titles, name) if page or titles is not None else None
        named_rules = None if rules is None else _read_rules(rules)
        given = [name for name, value in {"--index": index, "--rules": rules}.items() if value is not None]
        index = _index_beside(name) if index is None else index
        if updates is not None:
            catalogue, begins = _open_catalogue(updates, index, named_rules)
            if given and not begins:
                what = f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} not read"
                typer.echo(f"hf-gr serve: {what}: {updates} has a catalogue; PUT and PATCH /v1/catalogue change it")
        from hf_gr.tables.items import read_items

        engine = _make_engine(
            name,
            index if catalogue is None else catalogue,
            rules=named_rules if catalogue is None else None,
            fallback=None if fallback is None else read_items("--fallback", fallback),
            unknown_items=unknown_items.value,
            tokenizer=tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            num_beams=num_beams,
            num_results=num_results,
            max_beams=max_beams,
            lanes=lanes,
            token_budget=token_budget,
            max_batch=max_batch,
            max_queue=max_queue,
            timeout=timeout,
            key_cache_bytes=key_cache_bytes,
            revision=revision,
            device=device,
            **prompts,
            **options,
        )
        url = address_of(made)
        more = "" if names is None else f"page at {url}/page/, "
        typer.echo(f"hf-gr serve: {name} at {url}, {more}documentation at {url}/docs; Ctrl-C ends it")
        if admin_key is None and not is_open:
            typer.echo("hf-gr serve: nobody may change the catalogue; $HF_GR_ADMIN_KEY makes that possible")
        app = _make_app(
            engine,
            api_key=api_key,
            admin_key=admin_key,
            is_read_only=admin_key is None and not is_open,
            titles=names,
            max_body=max_body,
            drain_timeout=drain_timeout,
            log_level=log_level.value,
        )
        failure = run(app, made, drain_timeout=drain_timeout, drain_delay=drain_delay)
    except KeyboardInterrupt as error:
        raise fail("hf-gr serve", "interrupted before it served", code=130) from error
    except (ValueError, OSError, ImportError) as error:
        flags = {name: flag_of(name) for name in signature(serve).parameters} | {"constraint_index": "--index"}
        raise fail("hf-gr serve", in_flags(str(error), flags)) from error
    finally:
        if made is not None:
            made.close()
        if catalogue is not None:
            catalogue.close()
    if failure is not None:
        raise fail("hf-gr serve", f"the engine does not start: {failure}") from failure


def _open_catalogue(folder: Path, index: str | None, rules: Any) -> tuple[Any, bool]:
    """The catalogue of a folder of updates, and whether it begins now, with an index and rules.

    Raises:
        ValueError: there is neither a log nor an index; the index is none, or does not have a rule's items.
    """
    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.serving.catalogues import LiveCatalogue
    from hf_gr.serving.update_log import UpdateLog

    log, first = UpdateLog(folder), None
    if log.is_empty:
        if index is None:
            raise ValueError(f"--updates {str(folder)!r} has no catalogue yet, expected --index: it begins with that")
        first = ConstraintIndex.from_pretrained(index)
    catalogue = LiveCatalogue(first, rules, log=log)
    catalogue.follow()
    return catalogue, first is not None


def _make_engine(name: str, index: Any, **options: Any) -> Any:
    from hf_gr.serving.engine import Engine

    return Engine(name, index, **options)


def _make_app(engine: Any, *, max_body: int, log_level: str, **options: Any) -> Any:
    """What makes the application, as `hf_gr.serving.run.run` wants it."""
    from hf_gr.serving import logs
    from hf_gr.serving.app import make_app
    from hf_gr.serving.middleware import Limits

    logs.configure(level=log_level)
    return lambda on_failure: make_app(engine, limits=Limits(max_body=max_body), on_failure=on_failure, **options)


def _demo_model() -> str:
    """The demo's recommender that was trained last.

    Raises:
        ValueError: there is none.
    """
    from hf_gr.demo.cache import default_folder

    found = [path.parent for path in default_folder().glob("*/config.json") if _has_index(path.parent)]
    if not found:
        raise ValueError(
            f"no MODEL, and {default_folder()} has no recommender of the demo, expected one: run hf-gr demo first, or "
            "name a model: hf-gr serve MODEL --index INDEX"
        )
    return str(max(found, key=lambda folder: (folder / "config.json").stat().st_mtime))


def _index_beside(model: str) -> str | None:
    """The catalogue in a model's folder; None if there is none, for the one that the checkpoint names."""
    return model if _has_index(Path(model)) else None


def _has_index(folder: Path) -> bool:
    from hf_gr.catalogue.storage import JSON_FILE

    return (folder / JSON_FILE).is_file()


def _read_rules(path: Path) -> dict[str, list[Any]]:
    """Item ids by the name of a rule.

    Raises:
        ValueError: the file has something else, or no JSON.
    """
    flag, example = f"--rules {str(path)!r}", '{"europe": ["B01", "B02"]}'
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON ({error}), expected {example}: check the file") from error
    if not isinstance(value, dict) or not all(isinstance(items, list) for items in value.values()):
        raise ValueError(f"{flag} has a {type(value).__name__}, expected {example}: check the file")
    return value
