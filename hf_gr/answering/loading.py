# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models, catalogues and tokenizers, by name or already loaded, and their fingerprints. Knows no users."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch.nn.parallel import DistributedDataParallel

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import fingerprint
from hf_gr.catalogue.storage import JSON_FILE
from hf_gr.files.hub import check_revision, naming_model
from hf_gr.generation.models import position_limit
from hf_gr.generation.named_catalogues import resolve_index
from hf_gr.generation.torch.loading import enable, load
from hf_gr.generation.torch.models import is_sharded

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    device: Any = None,
    revision: str | None = None,
    own_device: Any = None,
    num_processes: int = 1,
) -> Any:
    """A model with `GRGenerationMixin`, in evaluation mode; a loaded one stays on its device.

    Args:
        model: a loaded model, or the folder or repository of one.
        dtype: of the weights, for a model by name, as all that follows: one of `DTYPES`, or torch's own.
        device_map: spreads the model over several devices.
        device: where the model runs, as asked for; None for `own_device`.
        revision: branch, tag or commit of the repository.
        own_device: this process's; None for a GPU if there is one.
        num_processes: how many processes load a model each.

    Raises:
        OSError: a name that is neither a folder nor reachable on the Hub.
        ValueError: weights sharded over processes, `device_map` or `device` with several processes, no such device,
            or no model.
    """
    for name, value, why in (
        ("device_map", device_map, "it spreads one model over all devices, and every process has a model of its own"),
        ("device", device, "every process has a device of its own"),
    ):
        if value is not None and num_processes > 1:
            raise ValueError(f"{name}={value!r} with {num_processes} processes, expected one of both: {why}")
    if isinstance(model, (str, Path)):
        return _load_by_name(model, dtype, device_map, device, revision, own_device)
    given = {"dtype": None if dtype == "auto" else dtype, "device": device, "device_map": device_map}
    given = [name for name, value in (given | {"revision": revision}).items() if value is not None]
    if given:
        raise ValueError(f"{given[0]}= with a loaded model, expected none: load it with that, or pass its name")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if is_sharded(model):
        raise ValueError(
            "model is in pieces (FSDP or tensor parallelism), expected whole weights in every process: here users are "
            "divided among processes, not weights, and processes do not take equally many steps. Save it and pass the "
            "folder's name, with device_map='auto' in one process if it is larger than a device"
        )
    model = enable(model)
    if model.training:
        raise ValueError("model is in training mode, expected evaluation: model.eval()")
    return model


def _load_by_name(
    model: str | Path, dtype: Any, device_map: Any, device: Any, revision: str | None, own_device: Any
) -> Any:
    check_name(model)
    check_revision(model, revision)
    name = dtype if dtype in (None, "auto") else getattr(torch, str(dtype).removeprefix("torch."), None)
    if name is not None and name != "auto" and not getattr(name, "is_floating_point", False):
        name = None
    if name is None:
        raise ValueError(f"dtype={dtype!r}, expected one of {', '.join(DTYPES)}")
    place = check_device(device) if device is not None else own_device
    if place is None:
        place = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"device_map": device_map, "revision": revision}
    given = {name: value for name, value in given.items() if value is not None}
    with naming_model(model, "model"):
        loaded = load(model, dtype=name, **given)
    return (loaded if device_map is not None else loaded.to(place)).eval()


def check_device(device: Any) -> torch.device:
    """A device that is there, before anything is loaded.

    Raises:
        ValueError: it is none, or not on this machine.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        there = ["cpu"]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            there += [f"{kind}:{number}" for number in range(torch.accelerator.device_count())]
        raise ValueError(
            f"device={str(device)!r}, expected one of this machine's, {', '.join(there)} ({reason[:120]})"
        ) from error
    return found


def check_name(model: str | Path, *, argument: str = "model") -> None:
    """Refuse a name that is neither a folder nor a repository id, before any download."""
    try:
        if not Path(model).is_dir():
            validate_repo_id(str(model))
    except HFValidationError as error:
        raise ValueError(
            f"{argument}={str(model)!r} is no folder here and no repository id, expected one of them: check the path"
        ) from error


def load_draft_model(draft_model: Any, model: Any) -> Any:
    """A draft model for a model, loaded beside it; a loaded one stays on its device."""
    if isinstance(draft_model, (str, Path)):
        check_name(draft_model, argument="assistant_model")
        loaded = load(draft_model, dtype=model.dtype)
        return loaded.to(input_device(model)).eval()
    return draft_model


def input_device(model: Any) -> torch.device:
    """The device of a model's prompts: its weights may be on disk until they are needed."""
    return model.device if model.device.type != "meta" else torch.device(model._hf_hook.execution_device)


def load_index(index: Any, model: Any) -> ConstraintIndex:
    """A snapshot of a catalogue: an index, the name of one, or None: the checkpoint names it, or has it in its folder.

    Raises:
        ValueError: none is given, and the checkpoint has none.
    """
    named = getattr(model.generation_config, "constraint_index", None) if index is None else index
    if named is None and Path(model.config.name_or_path, JSON_FILE).is_file():
        named = "."
    if named is None:
        raise ValueError(
            "constraint_index=None and the checkpoint names none, expected a catalogue: "
            "pass constraint_index= (--index)"
        )
    return copy.copy(resolve_index(model, named))


def load_tokenizer(tokenizer: Any, model: Any, *, revision: str | None = None) -> Any:
    """A tokenizer: a loaded one, one by name, or for None the one in the model's checkpoint, of that revision.

    Raises:
        ValueError: there is none.
    """
    if tokenizer is None and not isinstance(model, (str, Path)):
        raise ValueError("text= with a loaded model and tokenizer=None, expected its tokenizer: pass tokenizer=")
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        name = str(model if tokenizer is None else tokenizer)
        made: Any = None
        failure: Exception | None = None
        try:
            made = AutoTokenizer.from_pretrained(name, revision=(tokenizer is None and revision) or "main")
        except (OSError, ValueError) as error:
            failure = error
        # Without files transformers fails, or creates one without a vocabulary.
        if made is None or len(made) <= len(made.all_special_ids):
            raise ValueError(
                f"{name!r} has no tokenizer, expected one for a column of texts: pass tokenizer= (--tokenizer)"
            ) from failure
        return made
    return tokenizer


def prompt_room(model: Any, index: ConstraintIndex, *, drafting: str | None, options: Mapping[str, Any]) -> int | None:
    """The longest prompt that the model, and a draft model, have positions for; None if neither says."""
    models = [one for one in (model, options.get("assistant_model")) if one is not None]
    limits = [position_limit(one.config) for one in models]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or model.config.is_encoder_decoder:
        return limit
    head = getattr(model, "draft_head", None) if drafting == "head" else None
    return limit - max(index.max_length - 1, 0 if head is None else head.config.num_placeholders)


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary, and of its tokens for a few texts."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{fingerprint(tokenizer)} {vocabulary}".encode()).hexdigest()
