# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which backend a model is for. Loads that one alone, on first use: neither framework is needed for the other."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from hf_gr.files.hub import naming_model

Model = TypeVar("Model")

BACKENDS = ("auto", "torch", "flax")


def enable(model: Model) -> Model:
    """Give a loaded model `GRGenerationMixin` (in Flax: `FlaxGenerationMixin`), in place.

    Args:
        model: any model of transformers with a language-modelling head, also one wrapped by PEFT; or a
            `hf_gr.flax.model.FlaxModel`. Enabling twice is harmless.

    Returns:
        The same object, its `generation_config` a `GRGenerationConfig`. It is saved under its own class name, so its
        checkpoints stay ordinary ones.

    Raises:
        ValueError: not such a model.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> from hf_gr import GRGenerationMixin
        >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, head_dim=8))
        >>> isinstance(enable(model), GRGenerationMixin), type(model).__name__
        (True, 'Qwen3ForCausalLM')
    """
    is_flax = any(base.__module__.startswith("hf_gr.flax.") for base in type(model).__mro__)
    return _backend("flax" if is_flax else "torch").enable(model)


class AutoModelForGenerativeRetrieval:
    """Loads what `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM` would, with `GRGenerationMixin`; or in Flax."""

    def __init__(self) -> None:
        raise ValueError("AutoModelForGenerativeRetrieval is not instantiated: call from_pretrained or from_config")

    @classmethod
    def from_pretrained(
        cls, repo_or_dir: str | Path, *args: Any, backend: Literal["auto", "torch", "flax"] = "auto", **kwargs: Any
    ) -> Any:
        """Load a checkpoint from a folder or the Hub.

        Args:
            repo_or_dir: folder or repository id of any decoder or encoder-decoder checkpoint; in Flax one of Llama,
                Qwen2, Qwen3, Mistral, Gemma or T5.
            args: as for transformers' auto classes.
            backend: `"torch"`, `"flax"`, or `"auto"`: Flax if JAX has a TPU or PyTorch is not installed; else PyTorch.
            kwargs: as for transformers' auto classes: `dtype`, `device_map`, `attn_implementation`, `revision`, ...;
                in Flax those of `FlaxModel.from_pretrained`: `dtype`, `revision`, `token`, `cache_dir`,
                `local_files_only`, `subfolder`.

        Returns:
            The model, in evaluation mode, its `generation_config` a `GRGenerationConfig`. If the checkpoint has a
            draft head, it is `model.draft_head`.

        Raises:
            ImportError: a backend that is not installed; the message names what to install.
            NotImplementedError: an architecture, or a config field, that Flax does not have.
            OSError: neither a folder nor reachable on the Hub; else as in transformers, and if the Hub does not say
                whether there is a draft head.
            ValueError: an unknown backend; arguments that Flax does not take; one of a draft head's two files without
                the other, or a head that cannot be read or belongs to another model.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}, expected one of {BACKENDS}")
        backend = choose_backend() if backend == "auto" else backend
        if backend == "flax":
            _refuse_for_flax(args, kwargs)
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
        loading = _backend(backend)
        with naming_model(repo_or_dir, "repo_or_dir"):
            return loading.load(repo_or_dir, *args, **kwargs)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """A model with random weights in PyTorch, as in transformers' auto classes."""
        return _backend("torch").from_config(config, **kwargs)


def choose_backend() -> Literal["torch", "flax"]:
    """Flax if JAX has a TPU or PyTorch is not installed; else PyTorch. JAX is not loaded without libtpu."""
    if find_spec("torch") is None:
        return "flax"
    if find_spec("jax") is None or find_spec("libtpu") is None:
        return "torch"
    return "flax" if import_module("jax").default_backend() == "tpu" else "torch"


def _backend(name: Literal["torch", "flax"]) -> Any:
    """The module that loads and enables models of a backend."""
    if name == "flax":
        import_module("hf_gr.flax")  # if JAX is missing, this names the extra
        return import_module(".flax.loading", __package__)
    if find_spec("torch") is None:
        raise ImportError("backend='torch' needs PyTorch: pip install torch, or pass backend='flax'", name="torch")
    return import_module(".torch.loading", __package__)


def _refuse_for_flax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        raise ValueError(f"{len(args)} positional arguments, expected none besides the checkpoint with backend='flax'")
    taken = ("dtype", "revision", "token", "cache_dir", "local_files_only", "subfolder")
    fixes = {"torch_dtype": "pass dtype=", "mesh": "pass mesh= to generate", "device_map": "pass mesh= to generate"}
    for name, value in kwargs.items():
        if name not in taken and value is not None:
            fix = fixes.get(name, "omit it, or use backend='torch'")
            raise ValueError(f"{name} is given, expected one of {taken} with backend='flax': {fix}")
