# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Picks the framework that answers: one module for each, imported on first use. Imports neither itself.

`torch_models` and `flax_models` have the same functions, documented in the first. Answers are the same on both: what
differs is how models are loaded and told apart, how a batch reaches them, which batches suit them, and where they run.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_gr.generation.auto import BACKENDS, backend_of_model, choose_backend
from hf_gr.generation.messages import say_once

Backend = Any  # one of the two modules


def backend_of(model: Any) -> Backend:
    """The framework of a loaded model."""
    return named(backend_of_model(model))


def backend_for(model: Any, backend: str = "auto", given: Mapping[str, Any] | None = None) -> Backend:
    """The framework of a model: a loaded model's own, or for a name the requested one.

    `given` are other options of the call: with `"auto"`, an option that only one framework has decides.

    Raises:
        ValueError: an unknown backend, or a loaded model of the other one.
        ImportError: a backend that is not installed; the message names what to install.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}, expected one of {BACKENDS}")
    if isinstance(model, (str, Path)):
        chosen = choose_backend() if backend == "auto" else backend
        if backend == "auto" and chosen == "flax" and find_spec("torch") is not None:
            if (lack := named(chosen).why_not(model, given or {})) is None:
                return named(chosen)
            say_once(f"backend='auto' loads PyTorch, though JAX has a TPU, which PyTorch does not use: {lack}")
            chosen = "torch"
        return named(chosen)
    own = backend_of_model(model)
    if backend not in ("auto", own):
        raise ValueError(
            f"backend={backend!r} with a loaded {type(model).__name__}, expected {own!r} or 'auto': pass the model's "
            "name to have it loaded"
        )
    return named(own)


def named(name: str) -> Backend:
    """The framework of a name."""
    if name == "flax":
        import_module("hf_gr.flax")  # if JAX is missing, this names the extra
    return import_module(f".{name}_models", __package__)


def refuse(name: str, foreign: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Refuse options that only the other framework has, each with its remedy, unless None."""
    for option, remedy in foreign.items():
        if given.get(option) is not None:
            raise ValueError(f"{option}={given[option]!r} with backend={name!r}, expected none: {remedy}")


class Alone:
    """A single process, with the methods of `Processes`."""

    count, rank, is_main, device = 1, 0, True, None

    def from_main(self, value: Any) -> Any:
        """The value."""
        return value

    def by_main(self, work: Callable[[], Any], *, doing: str) -> Any:
        """The result of a function; `doing` is for other processes."""
        return work()

    def gather(self, value: Any) -> list[Any]:
        """The value, in a list."""
        return [value]

    def by_all(self, work: Callable[[], Any], *, after_failure: Callable[[], None] = lambda: None) -> list[Any]:
        """The result of a function, in a list; calls `after_failure` if it fails."""
        try:
            return [work()]
        except Exception:
            after_failure()
            raise
