# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose `generate` is ours, wherever they are loaded. Knows no decoding.

`generate.py` in this folder is the file that such a checkpoint carries, unchanged. transformers runs it for users who
pass `trust_remote_code=True`, and it calls `enable_loaded`, whose name and arguments published checkpoints rely on.
There is no `requirements.txt` next to it: transformers would look for an installed distribution, refuse a checkout on
the path, and not name the fix, all before `generate.py` could.
"""

import re
from pathlib import Path
from typing import Any


def enable_loaded(model: Any, file: str) -> Any:
    """Make a model that transformers loaded what `AutoModelForGenerativeRetrieval` would have loaded.

    Runs at the model's first `generate`, in the `generate.py` at `file`. The model gets the mixin, the draft head of
    its checkpoint, and the revision of its catalogue (`constraint_index="."`); any other model, on which
    `generate(custom_generate="me/recommender")` was called, the mixin alone. transformers does not pass on the other
    arguments of `from_pretrained`: catalogue and head of a repository are downloaded with the stored token, to the
    default cache, and offline only if `HF_HUB_OFFLINE` says so. If the head cannot be read, the model is unchanged.
    """
    from hf_gr.files.hub import Source
    from hf_gr.generation.auto import enable
    from hf_gr.generation.named_catalogues import remember_source
    from hf_gr.generation.torch.heads import load_draft_head
    from hf_gr.generation.torch.mixin import GRGenerationMixin

    is_own = "generate" in vars(model)  # transformers' replacement, an attribute of this one object
    if is_own and not isinstance(model, GRGenerationMixin):
        source = Source(model.config.name_or_path, revision=_commit(Path(file)))
        load_draft_head(model, source)
        remember_source(model, source)
    enable(model)
    vars(model).pop("generate", None)
    return model


def _commit(file: Path) -> str | None:
    """The commit of a repository's downloaded `generate.py`, None for a folder's.

    transformers copies it to `<modules>/<owner>/<name>/<commit>/custom_generate/generate.py`, or, for a folder, with a
    shorter digest instead of the commit. The model itself does not know its commit since transformers 5.23.
    """
    name = file.parent.parent.name
    return name if re.fullmatch("[0-9a-f]{40}", name) else None
