# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`save_pretrained`, `from_pretrained` and `push_to_hub` of all classes: the same arguments, each in the help."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

WHERE = ["revision", "token", "cache_dir", "local_files_only", "subfolder"]
ARGUMENTS = {
    "save_pretrained": ["self", "save_directory"],
    "from_pretrained": ["repo_or_dir", *WHERE],
    "push_to_hub": ["self", "repo_id", "private", "token", "revision", "commit_message", "create_pr"],
}
# By class: what its methods take besides, and what its `from_pretrained` says of files.
CLASSES: dict[str, tuple[dict[str, str], str]] = {
    "catalogue.index.ConstraintIndex": ({"from_pretrained": "verify"}, "mapped into memory"),
    "catalogue.semantic_ids.SemanticIds": ({}, "never unpickled"),
    "torch.draft_head.DraftHead": ({}, "tensors that do not fit the config"),
    "flax.draft_head.DraftHead": ({}, "never unpickled"),
    "flax.model.FlaxModel": (
        {"save_pretrained": "max_shard_size", "from_pretrained": "dtype", "push_to_hub": "max_shard_size"},
        "what to convert parameters to",
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_and_explain_the_same_arguments(name: str) -> None:
    module, _, class_name = name.rpartition(".")
    if name.startswith("flax"):
        pytest.importorskip("flax")
    owner: Any = getattr(import_module(f"hf_gr.{module}"), class_name)
    more, said = CLASSES[name]
    for method, arguments in ARGUMENTS.items():
        function = getattr(owner, method)
        parameters = inspect.signature(function).parameters
        assert [*parameters] == [*arguments, *([more[method]] if method in more else [])]
        text = inspect.getdoc(function) or ""
        assert all(argument == "self" or f"    {argument}: " in text for argument in parameters)
    assert said in " ".join(str(inspect.getdoc(owner.from_pretrained)).split())
    with pytest.raises(TypeError, match="force_download"):
        owner.from_pretrained("me/nothing", force_download=True)
    with pytest.raises(TypeError, match="exist_ok"):
        owner.__new__(owner).push_to_hub("me/nothing", exist_ok=True)
