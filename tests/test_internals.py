# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which private names of transformers are used: in one module, and only such as the installed release has."""

import re
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import PrefixConstrainedLogitsProcessor
from transformers.utils import PushToHubMixin

import hf_gr

PACKAGE = Path(hf_gr.__file__).parent
OF_OBJECTS: dict[str, Any] = {
    "_attn_implementation": PreTrainedConfig(),
    "_extract_generation_mode_kwargs": GenerationMixin,
    "_get_default_generation_params": GenerationConfig(),
    "_get_logits_processor": GenerationMixin,
    "_keys_to_ignore_on_save": PreTrainedModel,
    "_prefill": GenerationMixin,
    "_prefix_allowed_tokens_fn": PrefixConstrainedLogitsProcessor(lambda batch, tokens: [], 1),
    "_prepare_generation_config": GenerationMixin,
    "_supports_default_dynamic_cache": GenerationMixin,
    "_update_model_kwargs_for_generation": GenerationMixin,
    "_upload_modified_files": PushToHubMixin,
    "_validate_generation_mode": GenerationMixin,
}


def test_the_installed_transformers_has_them() -> None:
    assert [name for name, owner in OF_OBJECTS.items() if not hasattr(owner, name)] == []


def test_one_module_uses_private_names() -> None:
    """`_from_model_config` and `_mask_length` are set by transformers' code, of some releases only."""
    used = re.compile(rf"(?<!\w)({'|'.join(OF_OBJECTS)}|_mask_length)\b|(?<![\w\"])_from_model_config\b")
    files = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if used.search(file.read_text())}
    assert files == {"generation/internals.py"}
