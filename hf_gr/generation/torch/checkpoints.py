# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files in addition to transformers' own, when it is saved and when it is pushed. Knows no decoding."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_gr.catalogue.storage import FILES as INDEX_FILES
from hf_gr.catalogue.storage import JSON_FILE
from hf_gr.files import cards
from hf_gr.files import draft_head as head_files
from hf_gr.files.atomic import make_folder, replaced_file
from hf_gr.files.pairs import CARD_FILE
from hf_gr.generation.named_catalogues import resolve_index

from .heads import NAME, check_bare, save_draft_head
from .models import base_model

# What a checkpoint carries whose `generate` is ours: transformers looks for custom_generate/generate.py.
CUSTOM_GENERATE = Path(__file__).parents[1] / "custom_generate" / "generate.py"


def save_beside(model: Any, directory: str | Path, *, custom_generate: bool = False) -> None:
    """Write the files of a checkpoint that transformers does not know, and a card where there is none; no head.

    The catalogue `"."` comes along, but for the checkpoints of a training.
    """
    folder = Path(directory)
    if (head := getattr(base_model(model), NAME, None)) is not None:
        check_bare(head)  # before any file is replaced
    if not _is_ours(model, custom_generate):
        return
    make_folder(folder)
    if custom_generate:
        (folder / CUSTOM_GENERATE.parent.name).mkdir(exist_ok=True)
        code = CUSTOM_GENERATE.read_text(encoding="utf-8")
        _write(folder / CUSTOM_GENERATE.parent.name / CUSTOM_GENERATE.name, code)
    card = folder / CARD_FILE
    if not card.exists():
        _write(card, _card(model, folder.resolve().name, custom_generate))
    is_own = getattr(base_model(model).generation_config, "constraint_index", None) == "."
    if is_own and not (folder / JSON_FILE).exists() and not folder.name.startswith(PREFIX_CHECKPOINT_DIR):
        with suppress(ValueError, OSError):  # the checkpoint that the model came from may be gone, or have none
            resolve_index(base_model(model), ".").save_pretrained(folder)


def prepare_upload(
    model: Any,
    directory: str | Path,
    repo_id: str,
    files_timestamps: Mapping[str, float],
    *,
    custom_generate: bool = False,
) -> dict[str, float]:
    """What transformers must upload of a saved model: always our files, and a card that describes them.

    A card that a user wrote gets tags and keeps its text. The one that transformers makes for a new repository is
    replaced by ours. transformers skips files that have not changed since it recorded their timestamps, but ours were
    saved before that: returns the timestamps without those of our files, so that they are uploaded.
    """
    save_draft_head(model, directory)  # not yet there with save_pretrained(push_to_hub=True)
    card = Path(directory, CARD_FILE)
    if _is_ours(model, custom_generate) and card.is_file():
        text = card.read_text(encoding="utf-8")
        has_head = getattr(base_model(model), NAME, None) is not None
        if cards.is_template(text):
            _write(card, _card(model, repo_id, custom_generate, tags=cards.read_tags(text)))
        else:
            tags = cards.model_tags(has_head=has_head, custom_generate=custom_generate)
            _write(card, cards.tag_card(text, tags))
    ours = (*head_files.FILES, *INDEX_FILES, *[CUSTOM_GENERATE.parent.name] * custom_generate)
    return {name: written for name, written in files_timestamps.items() if name not in ours}


def _is_ours(model: Any, custom_generate: bool) -> bool:
    """Whether a checkpoint has anything that its card should describe."""
    inner = base_model(model)
    named = getattr(inner.generation_config, "constraint_index", None)
    return custom_generate or named is not None or getattr(inner, NAME, None) is not None


def _card(model: Any, name: str, custom_generate: bool, *, tags: Sequence[str] = ()) -> str:
    inner = base_model(model)
    head = getattr(inner, NAME, None)
    return cards.model_card(
        name,
        architecture=type(inner).__name__,
        is_encoder_decoder=inner.config.is_encoder_decoder,
        catalogue=getattr(inner.generation_config, "constraint_index", None),
        head=None if head is None else head.facts(),
        custom_generate=custom_generate,
        base_model=_repository(inner.config.name_or_path, other_than=name),
        tags=tags,
    )


def _repository(name: str, *, other_than: str) -> str | None:
    """The repository of the Hub that a model was loaded from; None if that is uncertain.

    A name alone does not tell a repository from a folder that is gone; one whose config is cached was downloaded.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not name or name == other_than or Path(name).exists():
        return None
    try:
        return name if isinstance(try_to_load_from_cache(name, "config.json"), str) else None
    except HFValidationError:
        return None


def _write(path: Path, text: str) -> None:
    with replaced_file(path) as file:
        file.write(text.encode())
