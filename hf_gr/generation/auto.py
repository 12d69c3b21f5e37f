# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which backend a model is for. Loads that one alone, on first use: neither framework is needed for the other."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from hf_gr.files.hub import naming_model

from .messages import say_once

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
    return _backend(backend_of_model(model)).enable(model)


class AutoModelForGenerativeRetrieval:
    """Loads what `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM` would, with `GRGenerationMixin`; or in Flax."""

    def __init__(self) -> None:
        raise ValueError("AutoModelForGenerativeRetrieval is not instantiated: call from_pretrained")

    @classmethod
    def from_pretrained(
        cls, repo_or_dir: str | Path, *args: Any, backend: Literal["auto", "torch", "flax"] = "auto", **kwargs: Any
    ) -> Any:
        """Load a checkpoint from a folder or the Hub.

        Args:
            repo_or_dir: folder or repository id of any decoder or encoder-decoder checkpoint; in Flax one of
                `hf_gr.flax.families.FAMILIES`.
            args: as for transformers' auto classes.
            backend: `"torch"`, `"flax"`, or `"auto"`: Flax if JAX has a TPU or PyTorch is not installed; else PyTorch.
                What Flax cannot load, `"auto"` loads in PyTorch, and says once why.
            kwargs: as for transformers' auto classes: `dtype`, `device_map`, `attn_implementation`, `revision`, ...;
                in Flax those of `FlaxModel.from_pretrained`: `dtype`, `revision`, `token`, `cache_dir`,
                `local_files_only`, `subfolder`.

        Returns:
            The model, in evaluation mode, its `generation_config` a `GRGenerationConfig`. If the checkpoint has a
            draft head, it is `model.draft_head`.

        Raises:
            ImportError: a backend that is not installed; the message names what to install.
            NotImplementedError: an architecture or a config field that Flax does not support, and only Flax may load
                it.
            OSError: neither a folder nor reachable on the Hub; else as in transformers, and if the Hub does not say
                whether there is a draft head.
            ValueError: an unknown backend; arguments that Flax does not take, and only Flax may load it; one of a
                draft head's two files without the other, or a head that cannot be read or belongs to another model.
        """
        with naming_model(repo_or_dir, "repo_or_dir"):
            return _load(repo_or_dir, backend, args, kwargs)


def backend_of_model(model: Any) -> Literal["torch", "flax"]:
    """The backend of a loaded model: Flax for our models in Flax, PyTorch for all else."""
    is_flax = any(base.__module__.startswith("hf_gr.flax.") for base in type(model).__mro__)
    return "flax" if is_flax else "torch"


def choose_backend() -> Literal["torch", "flax"]:
    """Flax if JAX has a TPU or PyTorch is not installed; else PyTorch. JAX is not loaded without libtpu."""
    if find_spec("torch") is None:
        return "flax"
    if find_spec("jax") is None or find_spec("libtpu") is None:
        return "torch"
    return "flax" if import_module("jax").default_backend() == "tpu" else "torch"


class _OnlyTorchs(ValueError):
    """Options that Flax does not take."""


def _load(repo_or_dir: Any, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Load by a backend; what Flax cannot load, PyTorch does, unless the caller asks for Flax."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}, expected one of {BACKENDS}")
    if (choose_backend() if backend == "auto" else backend) == "flax":
        given, has_torch = {option: value for option, value in kwargs.items() if value is not None}, find_spec("torch")
        try:
            _refuse_only_torchs(args, given)
            return _backend("flax").load(repo_or_dir, **given)
        except (ImportError, NotImplementedError, _OnlyTorchs) as error:
            is_mistake = isinstance(error, ImportError) and error.name not in ("jax", "flax")
            if not has_torch and not isinstance(error, ImportError):
                raise type(error)(f"{error}, which needs PyTorch: pip install torch") from error
            if backend == "flax" or is_mistake or not has_torch:
                raise
            say_once(
                "backend='auto' loads PyTorch, though JAX has a TPU, which PyTorch does not use: "
                f"{error}. Pass backend='torch' to choose this, or backend='flax' to be refused"
            )
    return _backend("torch").load(repo_or_dir, *args, **kwargs)


def _backend(name: Literal["torch", "flax"]) -> Any:
    """The module that loads and enables models of a backend."""
    if name == "flax":
        import_module("hf_gr.flax")  # if JAX is missing, this names the extra
        return import_module(".flax.loading", __package__)
    if find_spec("torch") is None:
        raise ImportError("backend='torch' needs PyTorch: pip install torch, or pass backend='flax'", name="torch")
    return import_module(".torch.loading", __package__)


def _refuse_only_torchs(args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuse options that Flax does not take, with a remedy for each."""
    found = [
        f"{name} is given, expected one of {_TAKEN} with backend='flax': {_INSTEAD.get(name, 'omit it')}"
        for name in given
        if name not in _TAKEN
    ]
    if args:
        found.append(f"{len(args)} positional arguments, expected only the checkpoint with backend='flax'")
    if found:
        raise _OnlyTorchs(f"{'; '.join(found)}; or use backend='torch'")


_TAKEN = ("dtype", "revision", "token", "cache_dir", "local_files_only", "subfolder")  # by Flax
_INSTEAD = {  # of options that only PyTorch's side takes
    "torch_dtype": "pass dtype=",
    "attn_implementation": "omit it, as Flax has one attention",
    "quantization_config": "load a checkpoint that is not quantised, with dtype='bfloat16'",
    **dict.fromkeys(("mesh", "device_map", "device_mesh", "max_memory", "tp_plan"), "pass mesh= to generate"),
}
