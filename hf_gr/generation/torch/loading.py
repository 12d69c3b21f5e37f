# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models in PyTorch with the mixin: loaded with it, or given it afterwards. Knows no decoding."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, find_adapter_config_file

from hf_gr.files.hub import WHERE, Source
from hf_gr.generation.configuration import extend
from hf_gr.generation.named_catalogues import remember_source

from .heads import load_draft_head
from .mixin import GRGenerationMixin

Model = TypeVar("Model")


def enable(model: Model) -> Model:
    """Give a loaded model `GRGenerationMixin`, in place: see `hf_gr.enable`."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False) and not inner.config.is_encoder_decoder:
        raise ValueError(
            f"model has a {adapter.peft_type.value} adapter, expected one of weights such as LoRA: on decoders a "
            "learned prefix is not supported; use ConstraintLogitsProcessor in transformers' own loop"
        )
    if not isinstance(inner, PreTrainedModel) or not hasattr(inner, "generate"):
        raise ValueError(
            f"model is a {type(model).__name__}, expected a transformers model that can generate: load it with "
            "AutoModelForGenerativeRetrieval.from_pretrained(..., backend='torch'), or add GRGenerationMixin to its "
            "class; enable it before compiling it"
        )
    if not isinstance(inner, GRGenerationMixin):
        inner.__class__ = _with_mixin(type(inner))
    inner.generation_config = extend(inner.generation_config)
    return model


@cache
def _with_mixin(base: type) -> type:
    """The subclass of a model class that has the mixin, under the same name: checkpoints record that name."""

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        # Pickle finds classes by name, and this name belongs to the base.
        return _new, (base,), self.__dict__

    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (GRGenerationMixin, base), {**namespace, "__reduce_ex__": reduce})


def _new(base: type) -> Any:
    enabled: Any = _with_mixin(base)
    return enabled.__new__(enabled)


def load(repo_or_dir: str | Path, *args: Any, **kwargs: Any) -> Any:
    """What transformers' auto classes load, with the mixin, and with the checkpoint's draft head if it has one."""
    config: Any = kwargs.get("config")
    if not hasattr(config, "is_encoder_decoder"):
        config = _read_config(config or repo_or_dir, kwargs)
    source = Source.of(repo_or_dir, kwargs)
    if kwargs.get("config") is None and not source.is_folder:
        # Weights, draft head and catalogue are of the config's commit, even if another is pushed in between.
        commit = source.find_commit(CONFIG_NAME)
        source, kwargs = source.at(commit), kwargs if commit is None else kwargs | {"revision": commit}
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model = auto.from_pretrained(repo_or_dir, *args, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"{_torn(source)}: {error}; download it or save it again") from error
    if (path := source.find_local(GENERATION_CONFIG_NAME)) is not None:
        try:
            json.loads(path.read_bytes())
        except ValueError as error:  # which transformers ignores
            raise ValueError(f"{path} is no JSON ({error}): download it or save it again") from error
    enable(model)
    remember_source(model, source)
    load_draft_head(model, source, force_download=bool(kwargs.get("force_download")))
    return model


def _torn(source: Source) -> str:
    """The first file of weights that is no safetensors."""
    folder = Path(source.repo_or_dir, source.subfolder)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(path, "pt")
        except SafetensorError:
            return f"{path} is cut short or damaged"
    return f"the weights of {source.repo_or_dir} are cut short or damaged"


def _read_config(name: str | Path, kwargs: Mapping[str, Any]) -> Any:
    """The config of a checkpoint, or of the model that an adapter (PEFT) is for."""
    given = {name: kwargs[name] for name in (*WHERE, "force_download") if name in kwargs}
    trust = {name: kwargs[name] for name in ("trust_remote_code",) if name in kwargs}
    try:
        return AutoConfig.from_pretrained(name, **given, **trust)
    except (OSError, ValueError):
        adapter = find_adapter_config_file(str(name), **given)
        if adapter is None:
            raise
        own = {name: value for name, value in given.items() if name not in ("revision", "subfolder")}  # the adapter's
        return AutoConfig.from_pretrained(
            json.loads(Path(adapter).read_text())["base_model_name_or_path"], **own, **trust
        )
