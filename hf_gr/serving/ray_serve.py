# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Beyond one machine: the engine and its HTTP server as a deployment of Ray Serve.

Ray has the replicas, the routing, the autoscaling, the health checks and the rolling updates; a replica has what
`hf-gr serve` has: one `Engine` behind `hf_gr.serving.app`. Replicas agree on the catalogue by an `UpdateLog` in a
folder that all of them see: it is replayed before a replica is ready, and who changed it tells the others at once.

    serve run examples/ray_serve/serve.yaml

Needs `pip install "hf-gr[ray]"`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from .app import make_app
except ImportError as missing:
    raise ImportError(
        f'hf_gr.serving.ray_serve needs {missing.name}: pip install "hf-gr[ray]"', name=missing.name
    ) from missing

from hf_gr.catalogue import ConstraintIndex

from .catalogues import Edition, LiveCatalogue
from .engine import Engine
from .run import SWITCH_SECONDS
from .update_log import UpdateLog

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0  # between looks at the log, for what a replica was not told
TELL_SECONDS = 5.0  # for the other replicas to make an update, before its client is answered
DRAIN_SECONDS = 30.0
# The engine has a queue of its own, knows deadlines, and refuses what comes too late for them: Ray need not.
OPTIONS = {
    "name": "Recommender",
    "max_ongoing_requests": 1024,
    "graceful_shutdown_timeout_s": DRAIN_SECONDS + 5.0,
    "health_check_period_s": 5.0,
}
FIELDS = ("model", "constraint_index", "rules", "updates", "engine")


def build(args: Mapping[str, Any]) -> Any:
    """The application of `serve run hf_gr.serving.ray_serve:build`, whose `args` a YAML or the command line gives.

    Args:
        args: `model`, a folder or repository; `constraint_index`, the folder or repository of an index; `rules`, item
            ids by name; `updates`, the folder of an `UpdateLog` that all replicas see, without which the
            catalogue cannot be changed; `engine`, further arguments of `Engine`. For several models make several
            applications.

    The environment of the replicas has the keys: HF_GR_API_KEY for questions, without which anyone may ask, and
    HF_GR_ADMIN_KEY for changes of the catalogue, without which it cannot be changed.

    Raises:
        ValueError: an argument that is unknown or missing.
    """
    for name in args:
        if name not in FIELDS:
            raise ValueError(f"args has {name!r}, expected some of {', '.join(FIELDS)}: omit it")
    if "model" not in args:
        raise ValueError(f"args={dict(args)!r}, expected a model in it: model: me/recommender")
    return Recommender.bind(dict(args))  # pyright: ignore[reportAttributeAccessIssue]


@serve.deployment(**OPTIONS)
@serve.ingress()
class Recommender:
    """A replica: a model with its engine and its application, which ends the engine when Ray ends it."""

    async def __init__(self, fields: Mapping[str, Any]) -> None:
        self._engine, self._app = await asyncio.to_thread(load, fields)
        # Its own thread: a replica that tells the others of an update waits for itself, too.
        self._refreshing = ThreadPoolExecutor(1, thread_name_prefix="hf_gr-refresh")
        if fields.get("updates") is not None:
            self._engine.catalogue.on_change = _tell
            self._engine.catalogue.follow(FOLLOW_SECONDS)
        await self._engine.start()

    async def refresh(self) -> int:
        """Make the updates that are in the log, when another replica asks; the version."""
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(self._refreshing, self._engine.catalogue.refresh)).version

    def __serve_build_asgi_app__(self) -> Any:
        """The application."""
        return self._app


def load(fields: Mapping[str, Any]) -> tuple[Engine, Any]:
    """An engine that is not started, and the application around it; takes its time. `fields`: see `build`."""
    folder, catalogue, rules = (fields.get(name) for name in ("updates", "constraint_index", "rules"))
    sys.setswitchinterval(SWITCH_SECONDS)
    if folder is not None:
        log = UpdateLog(Path(folder))
        index = ConstraintIndex.from_pretrained(catalogue) if log.is_empty and catalogue is not None else None
        catalogue, rules = LiveCatalogue(index, rules, log=log), None
    engine = Engine(fields["model"], catalogue, rules=rules, **{"cores": _num_cpus(), **fields.get("engine", {})})
    admin_key = os.environ.get("HF_GR_ADMIN_KEY")
    app = make_app(
        engine,
        api_key=os.environ.get("HF_GR_API_KEY"),
        admin_key=admin_key,
        is_read_only=folder is None or admin_key is None,
        takes_models=False,  # of one replica: a changed file replaces them all, with another folder of updates
        drain_timeout=DRAIN_SECONDS,
    )
    return engine, app


def _tell(edition: Edition) -> None:
    """Have the other replicas make an update now; those that do not answer read the log a little later."""
    here = serve.get_replica_context()
    handle = serve.get_deployment_handle(here.deployment, here.app_name)
    try:
        handle.broadcast("refresh").results(timeout_s=TELL_SECONDS)
    except Exception:  # a replica that is about to end, or to begin
        logger.warning("version %d is in the log, but not every replica has answered", edition.version, exc_info=True)


def _num_cpus() -> int | None:
    """The cores that Ray has given to this replica, and not those of the machine."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
