# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRGenerationConfig`: what transformers' configuration lacks. Holds values; loads nothing."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

DRAFTING = (None, "trie", "assistant", "head")
VERIFICATION = ("strict", "relaxed", "catalogue")
# Fields beyond transformers', with their defaults. They may also be given to `generate` as keywords.
GR_FIELDS: dict[str, Any] = {
    "constraint_index": None,
    "drafting": None,
    "verification": "strict",
    "num_draft_beams": None,
    "draft_token_budget": None,
}


class GRGenerationConfig(GenerationConfig):
    """A generation configuration that also names a catalogue.

    It is saved as `generation_config.json` like any other, and a checkpoint with it still loads in plain transformers.

    Args:
        constraint_index: repository id or folder of the checkpoint's `ConstraintIndex`; `"."` is the checkpoint
            itself.
        drafting: who proposes tokens ahead: nobody (None), the catalogue (`"trie"`), a draft model (`"assistant"`),
            or the checkpoint's draft head (`"head"`). This release decodes with None; `generate` refuses the others.
        verification: how proposals are accepted: `"strict"`, `"relaxed"` or `"catalogue"`.
        num_draft_beams: beams of a draft.
        draft_token_budget: the most tokens that are proposed at once.
        kwargs: everything that `transformers.GenerationConfig` takes.

    Raises:
        ValueError: a value that is none of those above.

    Example:
        >>> config = GRGenerationConfig(constraint_index=".", num_beams=20, num_return_sequences=20)
        >>> GRGenerationConfig.from_dict(config.to_dict()).constraint_index
        '.'
    """

    def __init__(self, **kwargs: Any) -> None:
        for name, default in GR_FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Check our fields, then transformers' own; the arguments are transformers'."""
        check_fields({name: getattr(self, name) for name in GR_FIELDS})
        super().validate(*args, **kwargs)


def check_fields(fields: dict[str, Any]) -> None:
    """Refuse values of our fields that mean nothing."""
    index = fields.get("constraint_index")
    if index is not None and not isinstance(index, str):
        raise ValueError(
            f"constraint_index={index!r} in a generation config, expected a repository id or a path: "
            "pass an index object to generate(constraint_index=...) instead"
        )
    if fields.get("drafting") not in DRAFTING:
        raise ValueError(f"drafting={fields['drafting']!r}, expected one of {DRAFTING}")
    if fields.get("verification") not in (None, *VERIFICATION):
        raise ValueError(f"verification={fields['verification']!r}, expected one of {VERIFICATION}")
    for name in ("num_draft_beams", "draft_token_budget"):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}, expected a positive integer or None")
