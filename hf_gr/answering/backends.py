# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What answering needs of a framework: one object for each, which is imported on first use. Knows neither.

Answers are the same on both: what differs is how models are loaded and told apart, how a batch reaches them, which
batches suit them, and where they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_gr.generation.auto import BACKENDS, backend_of_model, choose_backend
from hf_gr.generation.messages import say_once

Name = Literal["torch", "flax"]


class Backend(ABC):
    """A framework.

    Attributes:
        name: as `backend=` has it.
        foreign: options that only the other framework has, each with its remedy.
        is_compiled: whether every shape has a program, so that its first call is slower.
    """

    name: ClassVar[Name]
    foreign: ClassVar[Mapping[str, str]]
    is_compiled: ClassVar[bool] = False

    def refuse_foreign(self, given: Mapping[str, Any]) -> None:
        """Refuse options that only the other framework has, unless None.

        Raises:
            ValueError: names the option, its value, and the remedy.
        """
        for name, remedy in self.foreign.items():
            if given.get(name) is not None:
                raise ValueError(f"{name}={given[name]!r} with backend={self.name!r}, expected none: {remedy}")

    def why_not(self, model: str | Path, given: Mapping[str, Any]) -> str | None:
        """Why this framework cannot run a model by name with these options; None if it can, as far as is known."""
        return next((f"{name}={given[name]!r}" for name in self.foreign if given.get(name) is not None), None)

    @abstractmethod
    def processes(self) -> Any:
        """This process and its peers: see `hf_gr.torch.processes.Processes`."""

    @abstractmethod
    def load_model(
        self, model: Any, *, dtype: Any, device: Any, device_map: Any, revision: str | None, processes: Any
    ) -> Any:
        """A model that is ready for `generate`: by name, or a loaded one, which stays as it is."""

    @abstractmethod
    def load_draft_model(self, draft_model: Any, model: Any) -> Any:
        """A draft model for a model, loaded beside it."""

    @abstractmethod
    def num_embeddings(self, model: Any) -> int | None:
        """The tokens that a model can read; None if unknown."""

    @abstractmethod
    def fingerprint(self, model: Any) -> str:
        """A digest of a model's config and weights: all bits count, and the framework."""

    @abstractmethod
    def hardware(self, model: Any, *, num_processes: int, mesh: Any) -> str:
        """What a model runs on, in words."""

    @abstractmethod
    def to_mesh(self, mesh: Any) -> Any:
        """The argument `mesh` of `generate`, from what users pass; None for its default."""

    @abstractmethod
    def prompts(self, model: Any, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
        """`input_ids` and `attention_mask` `[B, P]` where the model reads them."""

    @abstractmethod
    def draw_seeds(self, number: int) -> list[int]:
        """Seeds of samples for which none was given."""

    @abstractmethod
    def make_batches(
        self, lengths: Sequence[int], *, token_budget: int, tokens_ahead: int, mesh: Any
    ) -> list[list[int]]:
        """Rows of `lengths` to answer together: see `batching`. Every row is in a batch; one may come again."""


def backend_of(model: Any) -> Backend:
    """The framework of a loaded model."""
    return named(backend_of_model(model))


def backend_for(model: Any, backend: str = "auto", given: Mapping[str, Any] | None = None) -> Backend:
    """The framework of a model: a loaded one has its own, and one by name the one that is asked for.

    Args:
        model: a loaded model, or its name.
        backend: `"torch"`, `"flax"`, or `"auto"`: see `AutoModelForGenerativeRetrieval.from_pretrained`.
        given: other options of the call: `revision`, and those that one framework alone has.

    Raises:
        ValueError: an unknown backend, or a loaded model of the other one.
        ImportError: a backend that is not installed; the message names what to install.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}, expected one of {BACKENDS}")
    if isinstance(model, (str, Path)):
        chosen = choose_backend() if backend == "auto" else backend
        if backend == "auto" and chosen == "flax" and find_spec("torch") is not None:
            flax = named(chosen)
            lack = flax.why_not(model, given or {})
            if lack is None:
                return flax
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
        return import_module(".flax_models", __package__).FlaxBackend()
    return import_module(".torch_models", __package__).TorchBackend()


class Alone:
    """The only process, where nothing else tells: what `Processes` is to several."""

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
