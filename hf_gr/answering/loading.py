# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Catalogues and tokenizers, by name or already loaded, names of models, padded prompts. Knows no framework."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import fingerprint
from hf_gr.catalogue.storage import JSON_FILE
from hf_gr.files.hub import Source
from hf_gr.generation.models import fill_token, position_limit
from hf_gr.generation.named_catalogues import resolve_index
from hf_gr.generation.prompts import pad, padding_side


def check_name(model: str | Path, *, argument: str = "model") -> None:
    """Refuse a name that is neither a folder nor a repository id, before any download."""
    try:
        if not Source(model).is_folder:
            validate_repo_id(str(model))
    except HFValidationError as error:
        raise ValueError(
            f"{argument}={str(model)!r} is no folder here and no repository id, expected one of them: check the path"
        ) from error


def name_of(model: Any, revision: str | None = None) -> str:
    """What loads a model again, by name or loaded: its folder's path, or `repository` or `repository@revision`."""
    name = str(model if isinstance(model, (str, Path)) else getattr(model.config, "name_or_path", ""))
    if name and Path(name).is_dir():
        return str(Path(name).resolve())  # of a link, the folder that it led to
    return f"{name}@{revision}" if revision else name


def load_index(index: Any, model: Any) -> ConstraintIndex:
    """A snapshot of a catalogue: an index, one by name, or for None the one that the checkpoint names or has."""
    named = getattr(model.generation_config, "constraint_index", None) if index is None else index
    if named is None and Path(model.config.name_or_path, JSON_FILE).is_file():
        named = "."
    if named is None:
        raise ValueError(
            "constraint_index=None and the checkpoint names none, expected a catalogue: pass constraint_index="
        )
    return copy.copy(resolve_index(model, named))


def load_tokenizer(tokenizer: Any, model: Any, *, revision: str | None = None) -> Any:
    """A tokenizer: a loaded one, one by name, or for None the one in the model's checkpoint, of that revision."""
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
                f"{name!r} has no tokenizer, expected one for a column of texts: pass tokenizer="
            ) from failure
        return made
    return tokenizer


def prompt_room(model: Any, index: ConstraintIndex, *, drafting: str | None, options: Mapping[str, Any]) -> int | None:
    """The longest prompt for which the model and any draft model have positions; None if neither has a limit."""
    models = [one for one in (model, options.get("assistant_model")) if one is not None]
    limits = [position_limit(one.config) for one in models]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None or model.config.is_encoder_decoder:
        return limit
    head = getattr(model, "draft_head", None) if drafting == "head" else None
    return limit - max(index.max_length - 1, 0 if head is None else head.config.num_placeholders)


def padded(model: Any, batch: Sequence[Sequence[int]]) -> dict[str, npt.NDArray[np.int64]]:
    """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
    side = padding_side(is_encoder_decoder=model.config.is_encoder_decoder)
    input_ids, mask = pad(batch, max(fill_token(model.generation_config), 0), side=side)
    return {"input_ids": input_ids, "attention_mask": mask}


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary, and of its tokens for a few texts."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{fingerprint(tokenizer)} {vocabulary}".encode()).hexdigest()
