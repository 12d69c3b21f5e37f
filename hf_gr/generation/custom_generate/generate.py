# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`model.generate` of this checkpoint: answers with items of a catalogue only. Needs hf_gr: `pip install hf-gr`.

transformers puts the function below in the place of `model.generate` when a model is loaded with
`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)` (or `AutoModelForSeq2SeqLM`); without that, the
checkpoint is an ordinary one. `model.save_pretrained(..., custom_generate=True)` of hf_gr writes it.
"""

from typing import Any

try:
    from hf_gr.generation.custom_generate import enable_loaded
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("hf_gr"):
        raise
    raise ImportError(
        "this checkpoint's generate needs hf_gr, which is not installed (pip install hf-gr) or too old "
        "(pip install -U hf-gr); load it without trust_remote_code for plain generation, which has no catalogue"
    ) from None


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """transformers' `generate`, which also takes hf_gr's `constraint_index`, `exclude_items` and `drafting`.

    Without a catalogue, given here or named by the checkpoint, it is transformers' own.
    """
    return enable_loaded(model, __file__).generate(*args, **kwargs)
