# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which layout a model takes. Knows transformers' configs, and tries models out.

Known families are listed, each tested against transformers. Any other model is tried once, on a few tokens, against
its own plain forward; one that fails every layout decodes in transformers' loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.generation import internals
from hf_gr.generation.internals import attention_of, has_dynamic_cache
from hf_gr.generation.messages import say_once
from hf_gr.generation.models import special_tokens, start_token
from hf_gr.torch.scorers import PlainScorer, Scorer
from hf_gr.torch.tree import Nodes

from .attention import may_attend_in_parts
from .cross_attention import foldable_modules
from .models import evaluation, is_patched, layer_types, takes_argument, takes_masks
from .prompts import positions_of, prefill
from .scorers import Prompts, make_scorer

# "folded" is the batch layout of an encoder-decoder whose beams share the encoder's keys.
Layout = Literal["tree", "folded", "batch"]

# tests/test_parity.py compares each of them with transformers' own results.
TREE_FAMILIES = frozenset(
    "cohere2 deepseek_v3 falcon gemma2 gemma3_text gpt2 gpt_neox gptj llama mistral olmo2 opt phi3 qwen2 qwen3 "
    "qwen3_moe smollm3".split()
)
BATCH_FAMILIES = frozenset(["bart", "bloom", "t5"])
# Largest difference of log-probabilities, relative to the largest logit, that rounding explains in a few layers.
PROBE_TOL = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# What a model raises if it cannot take what it is given. Out of memory is another matter: it may pass.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError)
# Arguments that a layout's steps continue, or that say what the prompt is.
COMMON_ARGUMENTS = frozenset(
    "attention_mask decoder_attention_mask decoder_input_ids encoder_outputs input_ids inputs_embeds logits_to_keep "
    "past_key_values position_ids tokenizer use_cache".split()
)
# Options of a forward: what one value does says nothing about another one.
PLAIN = (bool, int, float, str)

_CHOSEN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Layout | None]] = WeakKeyDictionary()
_IN_PARTS: WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
_WITH_PROMPT: WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
_TRIED: WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()


def choose_layout(model: Any) -> Layout | None:
    """The layout that a model takes; None if it takes none."""
    chosen = _CHOSEN.setdefault(model, {})
    key = (attention_of(model.config), model.dtype)
    if key not in chosen:
        chosen[key] = _find_layout(model)
    return chosen[key]


def attends_in_parts(model: Any) -> bool:
    """Whether tree nodes attend by `hf_gr.torch.tree_attention`; else by a mask.

    Where masks can be taken, they are in training mode, since ours has no dropout, and by a patched forward: a user's
    may read them, and torch.compile traces ours anew for every size, if it can at all.
    """
    if takes_masks(model) and (model.training or is_patched(model)):
        return False
    known = _IN_PARTS.setdefault(model, {})
    config = model.config.get_text_config(decoder=True)
    key = (attention_of(config), model.dtype)
    if key not in known:
        known[key] = _may_attend_in_parts(model) and (
            config.model_type in TREE_FAMILIES or _agrees(model, "tree", in_parts=True)
        )
        if not known[key] and attention_of(config) != "eager":
            say_once(
                f"{type(model).__name__} hands its attention no arguments of ours: beams attend by a mask, which is "
                "slower and needs 'sdpa' or 'eager' attention"
            )
    return known[key]


def own_arguments(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that only some models have: images, kinds of tokens, ..."""
    return {
        name: value
        for name, value in sorted(model_kwargs.items())
        if value is not None and name not in COMMON_ARGUMENTS
    }


def are_for_prompt(
    model: Any, layout: Layout, own: dict[str, Any], tried_on: tuple[Tensor, Any, dict[str, Any]] | None = None
) -> bool:
    """Whether arguments of the model's own matter to the prompt alone, so that a layout's steps need none of them.

    transformers hands most of them on at every step. Whether the model reads any is tried once, on a call's own
    prompts, two steps far.

    Args:
        model: the model.
        layout: from `choose_layout`.
        own: from `own_arguments`.
        tried_on: tokens, config and arguments of a prefill; without them untried arguments pass.
    """
    if not own:
        return True
    tried = _TRIED.setdefault(model, {})
    options = ((name, value if isinstance(value, PLAIN) else None) for name, value in own.items())
    key = (attention_of(model.config), model.dtype, *options)
    if key not in tried and tried_on is not None:
        try:
            tried[key] = _steps_agree(model, layout, *tried_on)
        except torch.OutOfMemoryError:
            return False  # in this call
    return tried.get(key, True)


def may_take_nodes(model: Any, layout: Layout, config: Any, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether nodes may be read in the prompts' own forward: for plain prompts, computed from their first token on.

    Args:
        model: the model.
        layout: from `choose_layout`.
        config: the prepared generation config.
        model_kwargs: the arguments of the prompts' forward, prepared by transformers.
    """
    cache, of_text = model_kwargs.get("past_key_values"), model.config.get_text_config(decoder=True)
    if (
        layout == "batch"
        or own_arguments(model_kwargs)
        or model_kwargs.get("inputs_embeds") is not None
        or config.prefill_chunk_size is not None
        or (cache is not None and cache.get_seq_length() > 0)
        or "prepare_inputs_for_generation" in vars(model)  # by PEFT, to prepend learned tokens
        or not takes_masks(model)
        or (layout == "folded" and set(layer_types(of_text)) != {"full_attention"})
    ):
        return False
    if of_text.model_type in (TREE_FAMILIES if layout == "tree" else BATCH_FAMILIES):
        return True
    known = _WITH_PROMPT.setdefault(model, {})
    key = (attention_of(model.config), model.dtype)
    if key not in known:
        known[key] = _agrees(model, layout, with_prompt=True)
    return known[key]


def _find_layout(model: Any) -> Layout | None:
    config = model.config.get_text_config(decoder=True)
    if not has_dynamic_cache(model):
        return None
    layouts: list[Layout] = ["batch"]
    if model.config.is_encoder_decoder and foldable_modules(model):
        layouts.insert(0, "folded")
    elif _may_take_tree(model, config):
        layouts.insert(0, "tree")
    if config.model_type in (TREE_FAMILIES if layouts[0] == "tree" else BATCH_FAMILIES):
        return layouts[0]
    return next((layout for layout in layouts if _agrees(model, layout)), None)


def prefilled(
    model: Any, prompt: Tensor, inputs: Tensor | None, attention_mask: Tensor | None, *, width: int
) -> Callable[[], Scorer]:
    """Makes scorers of a model over prompts; the first one runs the prefill.

    Args:
        model: in evaluation mode; for one that takes neither layout nothing is precomputed.
        prompt: tokens of a decoder.
        inputs: an encoder's tokens.
        attention_mask: of the encoder's tokens, or of the decoder's.
        width: paths a request.
    """
    layout = choose_layout(model)
    if layout is None:
        return lambda: PlainScorer(_plain_reader(model, prompt, inputs, attention_mask), batch_size=len(prompt))

    @cache
    def prompts() -> Prompts:
        outputs, kwargs = prefill(model, prompt, inputs, attention_mask)
        return Prompts(prompt, kwargs, lambda: outputs, room=0 if is_patched(model) else width)

    in_parts = layout == "tree" and attends_in_parts(model)
    return lambda: make_scorer(model, layout, prompts(), width=width, scores_ahead=True, in_parts=in_parts)


def _plain_reader(
    model: Any, prompt: Tensor, inputs: Tensor | None, attention_mask: Tensor | None
) -> Callable[[int, Tensor], Tensor]:
    """Logits after paths of a request, as in transformers' own loop without a cache; arguments as of `prefilled`.

    No row has padding: a model with a recurrent state need not support a mask.
    """

    def read(request: int, paths: Tensor) -> Tensor:
        paths = paths.to(prompt.device)
        is_real = slice(None) if attention_mask is None else attention_mask[request].bool()
        if inputs is not None:
            rows = torch.cat([prompt[request].expand(len(paths), -1), paths], dim=1)
            encoded = inputs[request, is_real].expand(len(paths), -1)
            return model(input_ids=encoded, decoder_input_ids=rows, use_cache=False, return_dict=True).logits[:, -1]
        rows = torch.cat([prompt[request, is_real].expand(len(paths), -1), paths], dim=1)
        given = {"logits_to_keep": 1} if takes_argument(model, "logits_to_keep") else {}
        given |= model.prepare_inputs_for_generation(rows, attention_mask=torch.ones_like(rows), use_cache=False)
        return model(**given, return_dict=True).logits[:, -1]

    return read


def _may_attend_in_parts(model: Any) -> bool:
    """Whether two parts may be tried; a small trial does not notice a window that only masks know (PhiMoE)."""
    config = model.config.get_text_config(decoder=True)
    knows_windows = config.model_type in TREE_FAMILIES or "sliding_attention" not in layer_types(config)
    return knows_windows and may_attend_in_parts(model)


def _may_take_tree(model: Any, config: Any) -> bool:
    """Whether nothing in a model's signature or config rules the tree layout out."""
    return (
        not model.config.is_encoder_decoder
        and takes_argument(model, "position_ids")
        and (takes_masks(model) or _may_attend_in_parts(model))
        and not getattr(config, "alibi", False)
        and set(layer_types(config)) <= {"full_attention", "sliding_attention"}
        # GPT-Neo's local layers count keys, not positions.
        and "local" not in (getattr(config, "attention_layers", None) or ())
        # BigBird slices a buffer by the tokens of a forward, which may be more than there are positions.
        and config.model_type != "big_bird"
    )


@torch.no_grad()
def _agrees(model: Any, layout: Layout, *, with_prompt: bool = False, in_parts: bool | None = None) -> bool:
    """Whether a model's scores in a layout are those of its plain forward, on a small tree over two short prompts.

    Args:
        model: the model.
        layout: the layout.
        with_prompt: whether the tree is scored in the prompt's own forward.
        in_parts: whether nodes attend in parts; None where only that is possible.
    """
    if in_parts is None:
        in_parts = layout == "tree" and not takes_masks(model)
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
                start = tokens[:1] if named is None else torch.tensor([named], device=model.device)
                start = start.expand(2, -1)
                outputs, kwargs = prefill(model, start, prompt, mask)
                given = {"input_ids": prompt[rows], "attention_mask": mask[rows]}
                plain = model(**given, decoder_input_ids=torch.cat([start[rows], path], dim=1), use_cache=False)
            else:
                outputs, kwargs = prefill(model, prompt, None, mask)
                longer = {"attention_mask": torch.nn.functional.pad(mask[rows], (0, 2), value=1), "use_cache": False}
                if "position_ids" in kwargs:
                    longer["position_ids"] = positions_of(longer["attention_mask"])
                given = torch.cat([prompt[rows], path], dim=1)
                plain = model(**model.prepare_inputs_for_generation(given, is_first_iteration=True, **longer))
            begun = start if model.config.is_encoder_decoder else prompt
            prompts = Prompts(begun, kwargs, lambda: outputs, takes_nodes=with_prompt)
            scorer = make_scorer(model, layout, prompts, width=num_beams, in_parts=in_parts)
            levels = [Nodes(first, torch.zeros_like(first), first), Nodes(second, parents, second)]
            if with_prompt:
                ours = scorer.begin(levels)[-1]
            else:
                ours = _one_by_one(scorer, levels)
            ours = ours.flatten(0, 1)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    return _is_close(ours, plain.logits[:, -1], model.dtype)


@torch.no_grad()
def _steps_agree(model: Any, layout: Layout, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether two steps in a layout equal transformers' own, which find nothing else to read."""
    path = ordinary_tokens(model, 2)[:, None, None].expand(-1, len(input_ids), -1)
    try:
        with evaluation(model):
            # Some arguments are written to: caches, and whatever a model keeps about its inputs.
            kwargs = {
                name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in model_kwargs.items()
                if name != "encoder_outputs"  # only read; those with gradients cannot be copied
            }
            kwargs |= {name: model_kwargs[name] for name in model_kwargs.keys() - kwargs.keys()}
            outputs = internals.prefill(model, input_ids, config, kwargs)
            prompts = Prompts(input_ids, kwargs, lambda of_prompt=outputs: of_prompt)
            ours = [_two_steps(model, layout, prompts, path, width=width) for width in (1, 2)]
            tokens = input_ids
            for token in path:
                tokens = torch.cat([tokens, token.to(tokens.device)], dim=1)
                given, kwargs = internals.next_inputs(model, tokens, outputs, kwargs)
                unread = {
                    name: Unread() for name, value in own_arguments(given).items() if not isinstance(value, PLAIN)
                }
                outputs = model(**given | unread, return_dict=True)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    return all(_is_close(logits, outputs.logits[:, -1], model.dtype) for logits in ours)


def _two_steps(
    model: Any, layout: Layout, prompts: Prompts, path: Int[Tensor, "2 batch 1"], *, width: int
) -> Float[Tensor, "batch vocab"]:
    """Logits after a path of two tokens, which is the last of `width` paths, and the first of them a step later."""
    first, second = path.expand(-1, -1, width)
    if width > 1:
        first = torch.cat([second[:, 1:], first[:, :1]], dim=1)
    parents = torch.arange(width - 1, -1, -1, device=first.device).expand(len(first), -1)
    in_parts = layout == "tree" and attends_in_parts(model)
    scorer = make_scorer(model, layout, prompts, width=width, in_parts=in_parts)
    return _one_by_one(scorer, [Nodes(first, torch.zeros_like(first), first), Nodes(second, parents, second)])[:, 0]


def _one_by_one(scorer: Scorer, levels: Sequence[Nodes]) -> Float[Tensor, "batch nodes vocab"]:
    """Logits after the last level, one forward a level."""
    logits = scorer.begin()
    for depth, nodes in enumerate(levels, start=1):
        logits = scorer.score([nodes], depth=depth)
    return logits[0]


class Unread:
    """Stands for an array that a forward must not read: what forwards do with arrays fails."""

    def __bool__(self) -> bool:
        raise TypeError("this argument must not be read")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __hash__ = object.__hash__


def ordinary_tokens(model: Any, count: int) -> Tensor:
    """Tokens without a meaning to the model, if it has any: padding would move positions, placeholders need images."""
    configs = (model.generation_config, model.config, model.config.get_text_config(decoder=True))
    is_ordinary = torch.ones(configs[-1].vocab_size, dtype=torch.bool)
    is_ordinary[[token for token in special_tokens(*configs) if token < len(is_ordinary)]] = False
    ordinary = (is_ordinary if is_ordinary.any() else ~is_ordinary).nonzero().flatten().to(model.device)
    return ordinary[(7 * torch.arange(count, device=model.device) + 3) % len(ordinary)]


def _is_close(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding explains the difference of two scores."""
    tolerance = PROBE_TOL.get(dtype, max(PROBE_TOL.values())) * max(float(expected.abs().max()), 1.0)
    difference = logits.double().log_softmax(-1) - expected.to(logits.device).double().log_softmax(-1)
    return bool(difference.abs().max() <= tolerance)
