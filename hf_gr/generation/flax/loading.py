# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models in Flax with the mixin: loaded with it, or enabled later. Knows no decoding."""

from functools import cache
from pathlib import Path
from typing import Any

from hf_gr.files.hub import Source
from hf_gr.flax.model import FlaxModel
from hf_gr.generation.configuration import extend
from hf_gr.generation.named_catalogues import remember_source

from .mixin import FlaxGenerationMixin


def enable(model: Any) -> Any:
    """Give a `FlaxModel` the mixin, in place."""
    if not isinstance(model, FlaxModel):
        raise ValueError(f"model is a {type(model).__name__}, expected a FlaxModel: FlaxModel.from_pretrained(...)")
    if not isinstance(model, FlaxGenerationMixin):
        object.__setattr__(model, "__class__", _with_mixin(type(model)))
    model.generation_config = extend(model.generation_config)
    return model


@cache
def _with_mixin(base: type) -> type:
    """The subclass of a model class with the mixin; the class comes first, so that a loaded model can change to it."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # Pickle finds classes by name, and this name belongs to the base.
        return _new, (base,), self.__getstate__()

    namespace = {"__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__, "__reduce_ex__": reduce}
    return type(base)(base.__name__, (base, FlaxGenerationMixin), namespace)


def _new(base: type) -> Any:
    enabled: Any = _with_mixin(base)
    return enabled.__new__(enabled)


def load(repo_or_dir: str | Path, **kwargs: Any) -> Any:
    """A `FlaxModel` with the mixin, its `generation_config` a `GRGenerationConfig`; the arguments are its own."""
    model = enable(FlaxModel.from_pretrained(repo_or_dir, **kwargs))
    # The catalogue is of the weights' commit, whatever is pushed meanwhile.
    remember_source(model, Source.of(repo_or_dir, kwargs).at(model._facts.commit))
    return model
