# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Logs of a server: one JSON object a line, without users' histories. Knows no engine and no web framework.

No body, no argument's value and no message of a `ValueError` or `KeyError` is ever logged, since these name items of a
user: of an exception the type and the places in the code are told.
"""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = "hf_gr.serving"
served: ContextVar[dict[str, str] | None] = ContextVar("served", default=None)  # the ids of a request
# Whose messages name no user's items: those of the device, of files, and of ours about a model.
_HARMLESS = (RuntimeError, OSError, MemoryError, ImportError)
_FRAMES = 20


def log(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Write one line: what happened, numbers and names that tell about it, and the request that it happened in."""
    logging.getLogger(LOGGER).log(level, event, extra={"fields": (served.get() or {}) | fields, "error": error})


def configure(*, level: str = "info", stream: TextIO | None = None) -> None:
    """Send the lines of the server, and of uvicorn, to a stream; stderr by default."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines())
    for name in (LOGGER, "hf_gr", "uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # uvicorn tells of its start and end, as the server itself does.
        logger.setLevel(level.upper() if name == LOGGER else logging.WARNING)
        logger.propagate = False


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
        if record.name == LOGGER:
            line |= {"event": record.getMessage()} | getattr(record, "fields", {})
        else:
            line |= {"event": "message", "logger": record.name, "message": record.getMessage()}
        error = getattr(record, "error", None) or (record.exc_info[1] if record.exc_info else None)
        if error is not None:
            line["error"] = describe_error(error)
        return json.dumps(line, default=str)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception's type and places, and its message if that can name no user's items."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    told: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, _HARMLESS) and not isinstance(error, RecursionError):
        told["message"] = " ".join(str(error).split())[:500]
    return told | {"at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}
