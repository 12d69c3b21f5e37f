# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a model allows to keep what is computed of prompts. Tries models out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.generation.messages import say_once
from hf_gr.generation.torch.layouts import FAILURES, PROBE_TOL, ordinary_tokens
from hf_gr.generation.torch.models import layer_types

from .kept import LEAST_TOKENS, Kept, Reuse, Tokens
from .kept_encodings import KeptEncodings
from .kept_keys import KeptKeys
from .torch_models import padded


def keep_computed(model: Any, *, num_bytes: int = 2**28, least_tokens: int = LEAST_TOKENS) -> Kept | None:
    """A store of what a model computes of prompts; None, said once, for one whose keys depend on later tokens.

    Decoders keep keys and values of the tokens that prompts begin with; encoder-decoders the encoder's output, of
    whole prompts. Whether that gives the same answers is tried with a few tokens.

    Args:
        model: in evaluation mode, with `GRGenerationMixin`.
        num_bytes: of memory at most.
        least_tokens: see `Kept`.
    """
    if num_bytes <= 0:
        return None
    reason = _why_not(model)
    if reason is not None:
        say_once(f"{type(model).__name__} {reason}: every prompt is computed from its first token on")
        return None
    return _kind_of(model)(model, num_bytes=num_bytes, least_tokens=least_tokens)


def _kind_of(model: Any) -> type[Kept]:
    return KeptEncodings if model.config.is_encoder_decoder else KeptKeys


def _why_not(model: Any) -> str | None:
    """Why a model's keys cannot be kept; None if they can."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(layer_types(config)) - {"full_attention", "sliding_attention"}
    if kinds and not model.config.is_encoder_decoder:
        return f"has layers of {', '.join(sorted(kinds))}"
    if not model.config.is_encoder_decoder and _has_growing_rope(config):
        return "turns keys by angles that depend on the length of the prompt (rope_type)"
    try:
        if not _agrees(model):
            return "computes other keys if later tokens are others"
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"cannot continue from the keys of a prompt ({error})"
    return None


def _has_growing_rope(config: Any) -> bool:
    """Whether rotary angles change when a prompt is longer than in training, also those of its first tokens."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_kind = [ropes, *(one for one in ropes.values() if isinstance(one, Mapping))]
    return any(one.get("rope_type") in ("dynamic", "longrope") for one in by_kind)


def _agrees(model: Any) -> bool:
    """Whether a model's scores after what was kept of other prompts are those without."""
    tokens = ordinary_tokens(model, 16).tolist()
    kept = _kind_of(model)(model, least_tokens=1)
    index = ConstraintIndex.from_sequences(sorted({*zip(tokens, tokens[1:], strict=False)}))
    first = [tokens[:6], tokens[2:4]]
    second = [tokens[:4] + tokens[10:13], tokens[2:4], tokens[5:9]] if isinstance(kept, KeptKeys) else first[::-1]

    def scores(batch: Sequence[Tokens], reuse: Reuse) -> tuple[Any, Tensor]:
        out = model.generate(
            **padded(model, batch),
            **reuse.arguments,
            constraint_index=index,
            num_beams=2,
            num_return_sequences=2,
            do_sample=False,
            drafting=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return out, out.sequences_scores.cpu()

    reuse = kept.begin(first)
    kept.keep(first, reuse, scores(first, reuse)[0])
    reuse = kept.begin(second)
    if not reuse.num_kept_tokens:
        return False
    _, ours = scores(second, reuse)
    _, expected = scores(second, Reuse())
    tolerance = PROBE_TOL.get(model.dtype, max(PROBE_TOL.values())) * max(1.0, float(expected.abs().max()))
    return bool((ours - expected).abs().max() <= 4 * tolerance)  # best first: ties may be in another order
