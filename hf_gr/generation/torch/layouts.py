# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a model takes beams as a tree on the sequence axis, and how. Knows transformers' configs.

Known families are listed, each tested against transformers. Any other model is tried once, on a few tokens, against
its own plain forward; one that fails decodes in transformers' loop.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_gr.generation.internals import attention_of, has_dynamic_cache
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import sees_later_tokens, special_tokens, start_token
from hf_gr.torch.scorers import TreeScorer
from hf_gr.torch.tree import Nodes

from .attention import may_attend_in_parts
from .encoder_decoders import takes_positions
from .models import TREE_FAMILIES, decoder_config, evaluation, is_patched, layer_types, takes_argument, takes_masks
from .prompts import positions_of, prefill
from .scorers import Prompts, make_scorer
from .sliced_head import SlicedHead

# How nodes are told what they see: in two parts by `hf_gr.torch.tree_attention`, or by a mask.
How = Literal["parts", "mask"]

# Models whose images matter to the prompt's forward alone, and the arguments that hold them: later forwards find them
# in the cache. tests/test_images.py compares each of them.
IMAGE_FAMILIES = frozenset("gemma3 llava paligemma qwen2_5_vl qwen2_vl qwen3_vl video_llama_3".split())
IMAGE_ARGUMENTS = frozenset("image_grid_thw image_merge_sizes mm_token_type_ids pixel_values token_type_ids".split())
# Arguments that every model's steps continue, or that say what the prompt is.
COMMON_ARGUMENTS = frozenset(
    "attention_mask decoder_attention_mask decoder_input_ids encoder_outputs input_ids inputs_embeds logits_to_keep "
    "past_key_values position_ids tokenizer use_cache".split()
)
# Fields by which attention skips tokens, other than `sliding_window`, which our masks know: Doge, ModernBERT, ...
UNTRIED = re.compile(r"window_(size|len)$|local_attention$|index_(topk|block_size)$")
# Largest difference of log-probabilities, relative to the largest logit, that rounding explains in a few layers.
PROBE_TOL = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# What a model raises if it cannot take its inputs. Running out of memory is different: it may be temporary.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError)

_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], How | None]] = WeakKeyDictionary()


def takes_tree(model: Any) -> bool:
    """Whether a model takes nodes of a tree after a prompt."""
    return layout_of(model) is not None


def own_arguments(model_kwargs: Mapping[str, Any]) -> set[str]:
    """The arguments of a call that only some models have: images, kinds of tokens, ..."""
    return {name for name, value in model_kwargs.items() if value is not None} - COMMON_ARGUMENTS


def every_step_may_read(model: Any, model_kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments of a call that are not known to matter to the prompt alone."""
    own = own_arguments(model_kwargs)
    return sorted(own - IMAGE_ARGUMENTS if model.config.model_type in IMAGE_FAMILIES else own)


def may_take_nodes(model: Any, config: Any, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether nodes may be read in the prompts' own forward: for plain prompts, computed from their first token on."""
    cache, text = model_kwargs.get("past_key_values"), decoder_config(model)
    return (
        text.model_type in TREE_FAMILIES
        and not sees_later_tokens(text)
        and not own_arguments(model_kwargs)
        and model_kwargs.get("inputs_embeds") is None
        and config.prefill_chunk_size is None
        and (cache is None or cache.get_seq_length() == 0)
        and "prepare_inputs_for_generation" not in vars(model)  # PEFT's, which prepends learned tokens
        and takes_masks(model)
    )


def prefilled(
    model: Any,
    prompt: Tensor,
    inputs: Tensor | None,
    attention_mask: Tensor | None,
    *,
    width: int,
    head: SlicedHead | None = None,
) -> Callable[[], TreeScorer]:
    """Makes scorers of a model over prompts; the first one prefills. Inputs and their mask are of encoders."""

    @cache
    def prompts() -> Prompts:
        outputs, kwargs = prefill(model, prompt, inputs, attention_mask)
        return Prompts(prompt, kwargs, lambda: outputs, room=0 if is_patched(model) else width)

    in_parts = layout_of(model) == "parts"
    return lambda: make_scorer(model, prompts(), in_parts=in_parts, head=head)


def layout_of(model: Any) -> How | None:
    """How a model takes nodes; None if it does not.

    Masks are used, where possible, in training mode, since our attention has no dropout, and with a patched forward:
    a user's forward may read them, and torch.compile retraces ours for every size, if it can at all.
    """
    config = decoder_config(model)
    known = _KNOWN.setdefault(model, {})
    key = (attention_of(config), model.dtype, model.training or is_patched(model))
    if key not in known:
        is_known = config.model_type in TREE_FAMILIES
        known[key] = next((how for how in _ways(model, config) if is_known or _agrees(model, how)), None)
        is_decoder, attention, prefers_mask = not model.config.is_encoder_decoder, key[0], key[2]
        if known[key] == "mask" and is_decoder and attention != "eager" and not prefers_mask:
            say_once(
                f"{type(model).__name__} hands its attention no arguments of ours: beams attend by a mask, which is "
                "slower and needs 'sdpa' or 'eager' attention"
            )
    return known[key]


def _ways(model: Any, config: Any) -> Iterator[How]:
    """The layouts that a model's signature and config do not rule out, fastest first."""
    kinds = set(layer_types(config))
    if model.config.is_encoder_decoder:
        if has_dynamic_cache(model) and takes_masks(model) and kinds == {"full_attention"} and takes_positions(model):
            yield "mask"
        return
    if (
        not has_dynamic_cache(model)
        or not takes_argument(model, "position_ids")
        or getattr(config, "alibi", False)
        or not kinds <= {"full_attention", "sliding_attention"}
        # GPT-Neo's local layers count keys, not positions.
        or "local" in (getattr(config, "attention_layers", None) or ())
        # A trial of a few tokens notices no window of hundreds.
        or (config.model_type not in TREE_FAMILIES and any(UNTRIED.search(name) for name in vars(config)))
        # BigBird slices a buffer by the tokens of a forward, which may be more than there are positions.
        or config.model_type == "big_bird"
    ):
        return
    # A small trial does not notice a window that only masks know (PhiMoE).
    knows_windows = config.model_type in TREE_FAMILIES or "sliding_attention" not in kinds
    prefers_mask = takes_masks(model) and (model.training or is_patched(model))
    if knows_windows and may_attend_in_parts(model) and not prefers_mask:
        yield "parts"
    if takes_masks(model):
        yield "mask"


@torch.no_grad()
def _agrees(model: Any, how: How) -> bool:
    """Whether a model's scores are those of its plain forward, on a small tree over two short prompts."""
    num_beams, prompt_length = 3, 6
    tokens = ordinary_tokens(model, 2 * (prompt_length + 2 * num_beams))
    prompt, first, second = tokens.view(2, -1).split([prompt_length, num_beams, num_beams], dim=1)
    parents = torch.tensor([[2, 0, 0], [1, 1, 2]], device=model.device)
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    rows = torch.arange(2, device=model.device)[:, None].expand(-1, num_beams).flatten()
    path = torch.stack([first.gather(1, parents), second], dim=-1).flatten(0, 1)
    try:
        with evaluation(model):
            if model.config.is_encoder_decoder:
                named = start_token(model.generation_config, model.config)
                begun = tokens[:1] if named is None else torch.tensor([named], device=model.device)
                begun = begun.expand(2, -1)
                outputs, kwargs = prefill(model, begun, prompt, mask)
                given = {"input_ids": prompt[rows], "attention_mask": mask[rows]}
                plain = model(**given, decoder_input_ids=torch.cat([begun[rows], path], dim=1), use_cache=False)
            else:
                begun = prompt
                outputs, kwargs = prefill(model, prompt, None, mask)
                longer = {"attention_mask": torch.nn.functional.pad(mask[rows], (0, 2), value=1), "use_cache": False}
                if "position_ids" in kwargs:
                    longer["position_ids"] = positions_of(longer["attention_mask"])
                given = torch.cat([prompt[rows], path], dim=1)
                plain = model(**model.prepare_inputs_for_generation(given, is_first_iteration=True, **longer))
            scorer = make_scorer(model, Prompts(begun, kwargs, lambda: outputs), in_parts=how == "parts")
            scorer.begin()
            scorer.score([Nodes(first, torch.zeros_like(first), first)], depth=1)
            (ours,) = scorer.score([Nodes(second, parents, second)], depth=2)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    expected = plain.logits[:, -1]
    tolerance = PROBE_TOL.get(model.dtype, max(PROBE_TOL.values())) * max(float(expected.abs().max()), 1.0)
    ours = ours.flatten(0, 1).double().log_softmax(-1)
    return bool((ours - expected.to(ours.device).double().log_softmax(-1)).abs().max() <= tolerance)


def ordinary_tokens(model: Any, count: int) -> Tensor:
    """Tokens with no special meaning, if there are any: padding would move positions, placeholders need images."""
    configs = (model.generation_config, model.config, decoder_config(model))
    is_ordinary = torch.ones(configs[-1].vocab_size, dtype=torch.bool)
    is_ordinary[[token for token in special_tokens(*configs) if token < len(is_ordinary)]] = False
    ordinary = (is_ordinary if is_ordinary.any() else ~is_ordinary).nonzero().flatten().to(model.device)
    return ordinary[(7 * torch.arange(count, device=model.device) + 3) % len(ordinary)]
