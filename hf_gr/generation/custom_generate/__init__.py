# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose `generate` is ours, wherever they are loaded. Knows no decoding.

`generate.py` in this folder is the file that such a checkpoint carries, as it stands. transformers runs it for those
who say `trust_remote_code=True`, and it calls `enable_loaded`, whose name and arguments published checkpoints rely on.
There is no `requirements.txt` beside it: transformers would look for an installed distribution, refuse a checkout on
the path, and leave the fix unsaid, all before `generate.py` could tell it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def enable_loaded(model: Any, file: str) -> Any:
    """Make a model that transformers loaded what `AutoModelForGenerativeRetrieval` would have loaded.

    That happens at its first `generate`, before which nothing of ours has seen it: it gets the mixin, the draft head
    of its checkpoint, and the revision that its catalogue (`constraint_index="."`) is to be found at. transformers
    tells none of the other arguments of `from_pretrained`: catalogue and head of a repository are downloaded with the
    stored token, to the default cache, and without a connection only where `HF_HUB_OFFLINE` says so.

    Args:
        model: what transformers loaded, its `generate` replaced; or any other model that
            `generate(custom_generate="me/recommender")` was called on, which gets the mixin alone.
        file: where `generate.py` ran from.

    Returns:
        The same object. Its `generate` is the mixin's from now on.

    Raises:
        ValueError: the checkpoint's draft head cannot be read, or is another model's. Nothing is changed then.
        ConnectionError: the Hub does not say whether there is a draft head.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, num_hidden_layers=1, head_dim=8))
        >>> enable_loaded(model, "generate.py") is model, hasattr(model, "add_draft_head")
        (True, True)
    """
    from hf_gr.generation.auto import enable
    from hf_gr.generation.catalogues import remember_source
    from hf_gr.generation.torch.heads import load_draft_head
    from hf_gr.generation.torch.mixin import GRGenerationMixin
    from hf_gr.internals import source_of

    is_own = "generate" in vars(model)  # transformers' replacement, an attribute of this one object
    if is_own and not isinstance(model, GRGenerationMixin):
        revision = _commit(Path(file))
        load_draft_head(model, source_of(model.config), revision=revision)
        remember_source(model, revision=revision)
    enable(model)
    vars(model).pop("generate", None)
    return model


def _commit(file: Path) -> str | None:
    """The commit that a repository's `generate.py` was downloaded at, None for a folder's.

    transformers copies it to `<modules>/<owner>/<name>/<commit>/custom_generate/generate.py`, or, of a folder, with a
    shorter digest in the commit's place. The model itself does not know its commit since transformers 5.23.
    """
    name = file.parent.parent.name
    return name if re.fullmatch("[0-9a-f]{40}", name) else None
