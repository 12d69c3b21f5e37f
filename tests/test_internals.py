# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which private names of transformers are used: in one module, and only such as the installed release has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import PrefixConstrainedLogitsProcessor
from transformers.utils import PushToHubMixin

import hf_gr
from hf_gr.generation import internals

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
# Written into an object by transformers' own code, or read from a file.
IN_SOURCE = {"_from_model_config": "configuration_utils.py"}
# Set by some releases only.
OPTIONAL = ("_mask_length",)
# Names of its files' fields, which are data.
AS_DATA = {"_from_model_config"}


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_the_installed_transformers_has_it(name: str) -> None:
    assert hasattr(OF_OBJECTS[name], name)


@pytest.mark.parametrize("name", IN_SOURCE)
def test_the_installed_transformers_writes_it(name: str) -> None:
    assert name in (Path(transformers.__file__).parent / "generation" / IN_SOURCE[name]).read_text()


@pytest.mark.parametrize("name", [*OF_OBJECTS, *IN_SOURCE, *OPTIONAL])
def test_one_module_uses_it(name: str) -> None:
    used = re.compile(rf"(?<![\w\"]){name}\b" if name in AS_DATA else rf"(?<!\w){name}\b")
    files = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if used.search(file.read_text())}
    assert files <= {"generation/internals.py"}


def test_a_prepared_config_asks_for_one_path_and_remembers_how_many() -> None:
    config = internals.for_one_path(GenerationConfig(num_beams=4, num_return_sequences=2))
    assert getattr(config, internals.PATHS) == (4, 2)
    assert (config.num_beams, config.num_return_sequences) == (1, 1)
