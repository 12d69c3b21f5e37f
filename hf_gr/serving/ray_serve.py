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
import json
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
from hf_gr.catalogue.sequences import is_integer

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
MODEL_FIELDS = ("model", "constraint_index", "rules", "updates", "engine")
FIELDS = (*MODEL_FIELDS, "models", "most_models")


def build(args: Mapping[str, Any]) -> Any:
    """The application of `serve run hf_gr.serving.ray_serve:build`, whose `args` a YAML or the command line gives.

    Args:
        args: of one model: `model`, a folder or repository; `constraint_index`, the folder or repository of an index;
            `rules`, item ids by name; `updates`, the folder of an `UpdateLog` that all replicas see, without which
            nobody may change the catalogue; `engine`, further arguments of `Engine`. Of several models: `models`, the
            same by the name that requests carry in the header `serve_multiplexed_model_id`; and `most_models` that a
            replica holds.

    The environment of the replicas has the keys: HF_GR_API_KEY for questions, without which anybody may ask, and
    HF_GR_ADMIN_KEY for changes of the catalogue, without which nobody may make them.

    Raises:
        ValueError: an argument that is unknown or missing.
    """
    for name in args:
        if name not in FIELDS:
            raise ValueError(f"args has {name!r}, expected some of {', '.join(FIELDS)}: omit it")
    if "models" not in args:
        return Recommender.bind(_checked(args, "args"))  # pyright: ignore[reportAttributeAccessIssue]
    models, most = args["models"], args.get("most_models", 1)
    if not isinstance(models, Mapping) or not models or len(args) > 1 + ("most_models" in args):
        raise ValueError("args has models, expected {name: {'model': ...}} and beside it most_models alone")
    if not is_integer(most) or most < 1:
        raise ValueError(f"most_models={most!r}, expected an integer, 1 or more")
    return _multiplexed(most).bind({name: _checked(fields, f"models[{name!r}]") for name, fields in models.items()})


class Served:
    """A model with its engine and its application, from its start to its end.

    Attributes:
        engine: the engine; its catalogue tells the other replicas of what it changes.
        app: the application around it.
    """

    def __init__(self, fields: Mapping[str, Any], *, name: str | None = None) -> None:
        """Load the model; takes its time.

        Args:
            fields: see `build`.
            name: of the model, where there are several.
        """
        folder = fields.get("updates")
        sys.setswitchinterval(SWITCH_SECONDS)
        options = {"cores": _num_cpus(), **fields.get("engine", {})}
        catalogue: Any = fields.get("constraint_index")
        rules = fields.get("rules")
        if folder is not None:
            log = UpdateLog(Path(folder))
            index = ConstraintIndex.from_pretrained(catalogue) if log.is_empty and catalogue is not None else None
            catalogue, rules = LiveCatalogue(index, rules, log=log), None
        self.name = name
        # Its own thread: a replica that tells the others of an update waits for itself, too.
        self._refreshing = ThreadPoolExecutor(1, thread_name_prefix="hf_gr-refresh")
        self.engine = Engine(fields["model"], catalogue, rules=rules, **options)
        admin_key = os.environ.get("HF_GR_ADMIN_KEY")
        self.app = make_app(
            self.engine,
            api_key=os.environ.get("HF_GR_API_KEY"),
            admin_key=admin_key,
            is_read_only=folder is None or admin_key is None,
            drain_timeout=DRAIN_SECONDS,
        )
        if folder is not None:
            self.engine.catalogue.on_change = self._tell
            self.engine.catalogue.follow(FOLLOW_SECONDS)

    async def start(self) -> None:
        """Warm up: afterwards the replica may be asked."""
        await self.engine.start()

    async def refresh(self) -> int:
        """Make the updates that are in the log; the version."""
        loop = asyncio.get_running_loop()
        return (await loop.run_in_executor(self._refreshing, self.engine.catalogue.refresh)).version

    async def end(self) -> None:
        """Finish what is under way."""
        await self.engine.close(timeout=DRAIN_SECONDS)
        await asyncio.to_thread(self.engine.catalogue.close)
        self._refreshing.shutdown(wait=False)

    def _tell(self, edition: Edition) -> None:
        """Have the other replicas make an update now; those that do not answer read the log a little later."""
        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        try:
            handle.broadcast("refresh", self.name).results(timeout_s=TELL_SECONDS)
        except Exception:  # a replica that is about to end, or to begin
            logger.warning(
                "version %d is in the log, but not every replica has answered", edition.version, exc_info=True
            )


class _Replica:
    """What a replica is asked by the others."""

    def _served(self) -> dict[str | None, Served]:
        raise NotImplementedError

    async def refresh(self, name: str | None = None) -> int | None:
        """Make the updates that are in the log; the version, or None where this model is not loaded."""
        served = self._served().get(name)
        return None if served is None else await served.refresh()


@serve.deployment(**OPTIONS)
@serve.ingress()
class Recommender(_Replica):
    """One model in every replica."""

    async def __init__(self, fields: Mapping[str, Any]) -> None:
        self._one = await asyncio.to_thread(Served, fields)
        await self._one.start()

    def _served(self) -> dict[str | None, Served]:
        return {None: self._one}

    def __serve_build_asgi_app__(self) -> Any:
        """The application; it ends the engine when Ray ends it."""
        return self._one.app


class ManyModels(_Replica):
    """Several models, each loaded in a replica when it is first asked for there."""

    def __init__(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        self._fields = models
        self._loaded: dict[str | None, Served] = {}

    async def load(self, name: str) -> Served:
        """The model of this name."""
        raise NotImplementedError

    def _served(self) -> dict[str | None, Served]:
        return dict(self._loaded)

    async def _load(self, name: str) -> Served:
        served = await asyncio.to_thread(Served, self._fields[name], name=name)
        await served.start()
        self._loaded[name] = served

        async def unload() -> None:
            del self._loaded[name]
            await served.end()

        served.__del__ = unload  # pyright: ignore[reportAttributeAccessIssue]  # what Ray calls when others need the room
        return served

    def __serve_build_asgi_app__(self) -> Any:
        """Each request goes to the application of its model."""
        return _Dispatcher(self)

    async def end(self) -> None:
        """Finish what is under way in all models."""
        await asyncio.gather(*(served.end() for served in self._served().values()))

    def has(self, name: str) -> bool:
        """Whether a model of this name may be loaded."""
        return name in self._fields

    def refusal(self, name: str) -> bytes:
        """The answer to a request for another model."""
        error = {
            "message": f"{name!r} is no model of this server",
            "argument": "serve_multiplexed_model_id",
            "value": name,
            "expected": f"one of {', '.join(self._fields)}",
            "fix": "send the header serve_multiplexed_model_id",
        }
        return json.dumps({"error": error}).encode()


class _Dispatcher:
    """The ASGI application before those of several models."""

    def __init__(self, models: ManyModels) -> None:
        self._models = models

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        name = serve.get_multiplexed_model_id()
        if self._models.has(name):
            await (await self._models.load(name)).app(scope, receive, send)
            return
        body = self._models.refusal(name)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _live(self, receive: Any, send: Any) -> None:
        while (kind := (await receive())["type"]) == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        assert kind == "lifespan.shutdown", kind
        await self._models.end()
        await send({"type": "lifespan.shutdown.complete"})


def _multiplexed(most_models: int) -> Any:
    @serve.deployment(**OPTIONS)
    @serve.ingress()
    class Recommenders(ManyModels):
        """Several models; Ray prefers replicas that have a request's model already."""

        @serve.multiplexed(max_num_models_per_replica=most_models)
        async def load(self, name: str) -> Served:
            """The model of this name, loaded unless it is."""
            return await self._load(name)

    return Recommenders


def _checked(fields: Mapping[str, Any], argument: str) -> dict[str, Any]:
    if not isinstance(fields, Mapping) or "model" not in fields:
        raise ValueError(f"{argument}={fields!r}, expected a model in it: model: me/recommender")
    for name in fields:
        if name not in MODEL_FIELDS:
            raise ValueError(f"{argument} has {name!r}, expected some of {', '.join(MODEL_FIELDS)}: omit it")
    return dict(fields)


def _num_cpus() -> int | None:
    """The cores that Ray has given to this replica, and not those of the machine."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
