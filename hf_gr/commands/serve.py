# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr serve`: one process that recommends over HTTP; the work is done by `hf_gr.serving`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import typer

from hf_gr.serving.defaults import MAX_CONNECTIONS, MAX_PROMPT_TOKENS, TIMEOUT

from .failures import STOPPED, fail, quiet_libraries
from .programs import require
from .recommend import of_generate

PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
# Options that are arguments of `Engine` as they are.
OF_ENGINE = (
    *(
        "fallback",
        "attributes",
        "unknown_items",
        "tokenizer",
        "max_prompt_tokens",
        "num_beams",
        "num_results",
        "max_beams",
    ),
    *("workers", "token_budget", "max_batch", "max_queue", "timeout", "key_cache_bytes", "revision", "device"),
    *("prefix_tokens", "suffix_tokens", "max_tree_nodes", "cores"),
)


def serve(
    model: str | None = None,
    *,
    index: str | None = None,
    rules: Path | None = None,
    fallback: str | None = None,
    attributes: Path | None = None,
    updates: Path | None = None,
    unknown_items: Literal["drop", "refuse"] = "drop",
    tokenizer: str | None = None,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    prefix_tokens: Sequence[int] = (),
    suffix_tokens: Sequence[int] = (),
    prompt: str | None = None,
    max_tree_nodes: int = 8192,
    num_beams: int | None = None,
    num_results: int = 10,
    max_beams: int = 512,
    drafting: str | None = None,
    option: list[str] | None = None,
    revision: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    cores: int | None = None,
    token_budget: int | None = None,
    max_batch: int = 64,
    max_queue: int = 1024,
    timeout: float = TIMEOUT,
    key_cache_bytes: int = 2**28,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    admin_key: str | None = None,
    page: bool = False,
    titles: Path | None = None,
    allow_origin: list[str] | None = None,
    max_body: int = 2**20,
    max_update: int = 2**26,
    body_timeout: float = 10.0,
    max_connections: int = MAX_CONNECTIONS,
    drain_timeout: float = 30.0,
    drain_delay: float = 2.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
) -> None:
    r"""Serve recommendations over HTTP: POST /v1/recommend, /v1/classify, catalogue, health, metrics; help at /docs.

    One process answers many users at once: requests join in batches by token capacity, and those that cannot meet
    their deadline are refused at once. It listens on this machine only, unless --host says otherwise. SIGTERM and
    Ctrl-C end it after the requests in flight; SIGTERM waits for --drain-delay first. Exit code 0: ended like this;
    1: not started; 2: refused, an option or a file has to be changed first.

    Args:
        model: a model's folder or repository. Default: the one that the folder of --updates names, with which it
            began or which PUT /v1/model brought; else the recommender that `hf-gr demo` trained last.
        index: the catalogue's folder or repository. Default: the one that the model names, or has in its folder.
        rules: named rules, as JSON such as {"europe": ["B01", "B02"]}.
        fallback: a file that answers histories without a known item, as for hf-gr recommend, such as the
            fallback.parquet that hf-gr train writes; by default they are refused. Read again at PUT /v1/model.
        attributes: a table (Parquet, CSV, JSON lines) with item_id and columns of texts, numbers or truth values, for
            filters such as {"category": ["tea"], "price": {"max": 20}}; read again at PUT /v1/model.
        updates: folder that keeps changes of the catalogue, and shares them between servers of this machine. Once it
            has a catalogue, --index and --rules are not read. By default changes are lost when the process ends.
        unknown_items: items of a history or filter that the catalogue does not have: drop them, or refuse the request.
        tokenizer: for texts; by default the model's own.
        max_prompt_tokens: longer prompts are cut from the left, also to what the model takes.
        prefix_tokens: token ids before every history.
        suffix_tokens: token ids after every history.
        prompt: what the model reads for /v1/classify, with {text} in the text's place; \n is a new line. By default a
            plain request for a category.
        max_tree_nodes: the most nodes (tokens of labels) that /v1/classify scores for a text.
        num_beams: beams, unless a request says otherwise; by default the checkpoint's own, if any, else 20.
        num_results: items, unless a request says otherwise.
        max_beams: the most beams, and labels, of a request.
        workers: batches at once; by default one for each core, on a GPU two streams.
        cores: of the CPU, for all workers; by default all of the machine: name those of a container with a limit.
        token_budget: tokens of a batch; by default measured.
        max_batch: requests of a batch.
        max_queue: waiting requests; more are refused.
        timeout: seconds for a request that names none.
        key_cache_bytes: memory for the keys of prompts, which prompts with the same beginning share; 0 caches none.
        host: where to listen; 0.0.0.0 for all networks.
        port: of the machine; 0 for any free one.
        api_key: clients must send it; by default $HF_GR_API_KEY. Without a key, all requests are answered. Several,
            separated by spaces, are all valid, also as --admin-key: so keys are changed.
        admin_key: needed to change the catalogue; by default $HF_GR_ADMIN_KEY. Without a key, programs on this machine
            may change it if the server listens on this machine only and has no API key; proxies and pages of other
            sites may not.
        page: also serve a page to try it with.
        titles: names of items for the page, as JSON by id, or .csv or .tsv with item_id and title; by default those in
            the model's folder, where the demo saves them.
        allow_origin: a site whose pages may ask, such as https://shop.example, or * (CORS); may be repeated.
        max_body: bytes of a request.
        max_update: bytes of a change of the catalogue.
        body_timeout: seconds until a body is there.
        max_connections: clients at once; more take the place of those that have sent nothing for longest.
        drain_timeout: seconds for requests in flight at the end; whatever computes longer is cut.
        drain_delay: seconds after SIGTERM in which new requests are still answered, while /readyz says 503, so that a
            load balancer sends them elsewhere.
        log_level: the lowest level that is logged, as lines of JSON on stderr.
    """
    arguments = locals()
    require("hf-gr serve", "serve", PACKAGES)
    from hf_gr.serving.keys import check_keys, check_origins, is_loopback
    from hf_gr.serving.middleware import Limits
    from hf_gr.serving.page import find_titles
    from hf_gr.serving.run import address_of, bind, run

    # An empty variable is a lost secret: refuse it, rather than leave the server open.
    api_key = os.environ.get("HF_GR_API_KEY") if api_key is None else api_key
    admin_key = os.environ.get("HF_GR_ADMIN_KEY") if admin_key is None else admin_key
    check_keys(api_key=api_key, admin_key=admin_key)
    check_origins(allow_origin or ())
    limits = Limits(max_body=max_body, max_update=max_update, body_timeout=body_timeout)
    is_read_only = admin_key is None and not (is_loopback(host) and api_key is None)
    if prompt is not None and "{text}" not in prompt:
        raise ValueError(f"prompt={prompt!r}, expected a text with {{text}} in it, where the text goes")
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port}, expected 0 to 65535")
    for argument, least in (("drain_timeout", 0), ("drain_delay", 0), ("max_connections", 1)):
        if not arguments[argument] >= least:
            raise ValueError(f"{argument}={arguments[argument]}, expected {least} or more")
    with bind(host, port) as bound, ExitStack() as opened:
        log = live = None
        if updates is not None:
            from hf_gr.serving.catalogues import LiveCatalogue
            from hf_gr.serving.update_log import UpdateLog

            log = UpdateLog(updates)
            live = None if log.is_empty else opened.enter_context(closing(LiveCatalogue(log=log)))
        known = None if live is None else live.edition.model
        name = model or (known and _split(known)[0]) or _demo_model()
        if model is None and known:
            arguments["revision"] = revision = revision or _split(known)[1]
        quiet_libraries()
        from hf_gr.answering.loading import name_of

        if model is not None and known not in (None, name_of(name, revision)):
            typer.echo(f"hf-gr serve: {updates} has the catalogue of {known}: to serve that, omit MODEL")
        names = find_titles(titles, name) if page or titles is not None else None
        named_rules = None if rules is None else _read_rules(rules)
        if live is not None and (index is not None or rules is not None):
            what = "--index and --rules are not read"
            typer.echo(f"hf-gr serve: {what}: {updates} has a catalogue; PUT and PATCH /v1/catalogue change it")
        if index is None and _has_index(Path(name)):
            index = name  # else the one that the checkpoint names
        catalogue: dict[str, Any] = {"constraint_index": index, "rules": named_rules}
        if log is not None:
            if live is None:
                live = opened.enter_context(closing(_begin(log, index, named_rules, name_of(name, revision))))
            live.follow()
            catalogue = {"constraint_index": live}
        from hf_gr.serving import logs
        from hf_gr.serving.engine import Engine

        logs.configure(level=log_level)
        engine = Engine(
            name,
            **catalogue,
            **{name: arguments[name] for name in OF_ENGINE},
            **({} if prompt is None else {"prompt": prompt.replace("\\n", "\n")}),
            **of_generate(drafting, option, signature(serve).parameters),
        )
        url = address_of(bound)
        more = "" if names is None else f"page at {url}/page/, "
        typer.echo(f"hf-gr serve: {name} at {url}, {more}documentation at {url}/docs; Ctrl-C ends it")
        if is_read_only:
            typer.echo("hf-gr serve: the catalogue is read-only; $HF_GR_ADMIN_KEY allows changes")
        from hf_gr.serving.app import make_app

        app = make_app(
            engine,
            api_key=api_key,
            admin_key=admin_key,
            is_read_only=is_read_only,
            titles=names,
            origins=allow_origin or (),
            limits=limits,
            drain_timeout=drain_timeout,
        )
        how: dict[str, Any] = {"drain_timeout": drain_timeout, "drain_delay": drain_delay}
        failure = run(app, bound, **how, max_connections=max_connections, ends_process=True)
    if failure is not None:
        raise fail("serve", f"the engine does not start: {failure}", code=STOPPED) from failure


def _begin(log: Any, index: str | None, rules: Any, model: str) -> Any:
    """The catalogue of an empty log of updates, which begins with an index and rules."""
    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.serving.catalogues import LiveCatalogue

    if index is None:
        raise ValueError(f"updates={str(log.folder)!r} has no catalogue yet, expected --index: it begins with that")
    return LiveCatalogue(ConstraintIndex.from_pretrained(index), rules, model=model, log=log)


def _split(model: str) -> tuple[str, str | None]:
    """Name and revision, of `name_of`."""
    name, _, revision = (model, "", "") if Path(model).is_absolute() else model.partition("@")
    return name, revision or None


def _demo_model() -> str:
    """The demo's recommender that was trained last."""
    from hf_gr.files.cache import cache_folder

    demo = cache_folder("demo")
    found = [path.parent for path in demo.glob("*/config.json") if _has_index(path.parent)]
    if not found:
        raise ValueError(
            f"no MODEL, and {demo} has no recommender of the demo, expected one: run hf-gr demo first, or "
            "name a model: hf-gr serve MODEL --index INDEX"
        )
    return str(max(found, key=lambda folder: (folder / "config.json").stat().st_mtime))


def _has_index(folder: Path) -> bool:
    from hf_gr.catalogue.storage import JSON_FILE

    return (folder / JSON_FILE).is_file()


def _read_rules(path: Path) -> dict[str, list[Any]]:
    """Item ids by the name of a rule."""
    flag, example = f"rules={str(path)!r}", '{"europe": ["B01", "B02"]}'
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON ({error}), expected {example}: check the file") from error
    if not isinstance(value, dict) or not all(isinstance(items, list) for items in value.values()):
        raise ValueError(f"{flag} has a {type(value).__name__}, expected {example}: check the file")
    return value
