# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which layout a model takes, and its scorer after a finished prefill. Knows transformers' caches, masks and configs.

Known families are listed, each tested against transformers. Any other model is tried once, on a few tokens, against
its own plain forward; one that fails every layout decodes in transformers' loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.generation import internals
from hf_gr.generation.internals import attention_of, has_dynamic_cache
from hf_gr.generation.models import special_tokens, start_token
from hf_gr.torch.scorers import BatchScorer, PlainScorer, Scorer, TreeScorer
from hf_gr.torch.tree import Nodes, to_additive

from .caches import copy_cache, keeps_all_keys, to_keep_all_keys
from .cross_attention import fold_beams, foldable_modules
from .models import evaluation, layer_types, mask_dtype, takes_argument
from .prompts import positions_of, prefill

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
_TRIED: WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()


def choose_layout(model: Any) -> Layout | None:
    """The layout that a model takes; None if it takes none."""
    chosen = _CHOSEN.setdefault(model, {})
    key = (attention_of(model.config), model.dtype)
    if key not in chosen:
        chosen[key] = _find_layout(model)
    return chosen[key]


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


def make_scorer(
    model: Any,
    layout: Layout,
    outputs: Any,
    model_kwargs: dict[str, Any],
    *,
    batch_size: int,
    width: int,
    scores_ahead: bool = False,
) -> Scorer:
    """The scorer that continues after a prefill.

    A single path over unpadded prompts has nothing to share and nothing to mask: it takes the batch layout, which is
    then transformers' own.

    Args:
        model: the model.
        layout: from `choose_layout`.
        outputs: the prefill's outputs; its cache is not changed.
        model_kwargs: the prefill's arguments, prepared by transformers.
        batch_size: B.
        width: paths a request.
        scores_ahead: whether nodes of several levels will be scored together, which takes the tree layout even for a
            single path.
    """
    prompt_logits = outputs.logits[:, -1:]
    if model.config.is_encoder_decoder:
        modules = foldable_modules(model) if layout == "folded" else []
        return _encoder_decoder_scorer(model, modules, prompt_logits, outputs, model_kwargs)
    cache, device = outputs.past_key_values, prompt_logits.device
    prompt_length = cache.get_seq_length()
    _check_prefix(prompt_length, model_kwargs)
    prompt_mask = _prompt_mask(model_kwargs.get("attention_mask"), batch_size, prompt_length, device)
    next_position = _next_position(model, outputs, model_kwargs, batch_size)
    takes_positions = next_position is not None
    if next_position is None:
        next_position = prompt_mask.sum(-1, keepdim=True)
    is_padded = model_kwargs.get("attention_mask") is not None
    if layout == "tree" and (width > 1 or is_padded or scores_ahead):
        return TreeScorer(
            model,
            prompt_logits,
            to_keep_all_keys(cache),
            prompt_mask=prompt_mask,
            next_position=next_position,
            windows=_windows(model.config.get_text_config(decoder=True), cache, prompt_length),
            mask_dtype=mask_dtype(model),
        )

    def arguments(num_beams: int, tokens: Tensor, depth: int) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": tokens, "past_key_values": own, "use_cache": True, "return_dict": True}
        if is_padded:
            mask = prompt_mask.repeat_interleave(num_beams, dim=0)
            given["attention_mask"] = torch.nn.functional.pad(mask.long(), (0, depth + tokens.shape[1]), value=1)
        if takes_positions:
            steps = torch.arange(depth, depth + tokens.shape[1], device=device)
            given["position_ids"] = (next_position + steps).repeat_interleave(num_beams, dim=-2)
        return given

    own = copy_cache(cache)
    # Every path has a copy of the prompt's keys here: many more paths than beams would cost more than they save.
    return BatchScorer(
        model,
        prompt_logits,
        own,
        arguments=arguments,
        suffix_start=prompt_length if keeps_all_keys(cache) else None,
        takes_levels=False,
    )


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
    def computed() -> tuple[Any, dict[str, Any]]:
        return prefill(model, prompt, inputs, attention_mask)

    def new_scorer() -> Scorer:
        outputs, kwargs = computed()
        return make_scorer(model, layout, outputs, kwargs, batch_size=len(prompt), width=width, scores_ahead=True)

    return new_scorer


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


def _may_take_tree(model: Any, config: Any) -> bool:
    """Whether nothing in a model's signature or config rules the tree layout out."""
    return (
        not model.config.is_encoder_decoder
        and takes_argument(model, "position_ids")
        and attention_of(config) in ("eager", "sdpa")
        and not getattr(config, "alibi", False)
        and set(layer_types(config)) <= {"full_attention", "sliding_attention"}
        # GPT-Neo's local layers count keys, not positions.
        and "local" not in (getattr(config, "attention_layers", None) or ())
        # BigBird slices a buffer by the tokens of a forward, which may be more than there are positions.
        and config.model_type != "big_bird"
    )


def _windows(config: Any, cache: Any, prompt_length: int) -> dict[str | None, tuple[int | None, int]]:
    """How far each kind of layer sees, and how many of the prompt's keys its cache holds (`TreeScorer.windows`)."""
    kinds: dict[str | None, tuple[int | None, int]] = {}
    for kind, layer in zip(layer_types(config), cache.layers, strict=False):
        if not layer.is_initialized:
            continue
        window = config.sliding_window if kind == "sliding_attention" else None
        kinds.setdefault(kind, (window, layer.keys.shape[-2] if window is not None else prompt_length))
    return kinds if len(kinds) > 1 else {None: next(iter(kinds.values()))}


def _next_position(model: Any, outputs: Any, model_kwargs: dict[str, Any], batch_size: int) -> Tensor | None:
    """`[..., B, 1]`, the position after the prompt, as the model wants it; None if it counts positions by itself.

    Some models count from 1 (PaliGemma), and only the arguments of transformers' own steps say so.
    """
    token = torch.zeros((batch_size, 1), dtype=torch.long, device=model.device)
    position = internals.next_inputs(model, token, outputs, model_kwargs)[0].get("position_ids")
    return None if position is None else position.to(outputs.logits.device).expand(*position.shape[:-2], batch_size, 1)


def _prompt_mask(mask: Tensor | None, batch_size: int, prompt_length: int, device: torch.device) -> Tensor:
    """Real tokens among the keys of the prompt."""
    if mask is None:
        return torch.ones((batch_size, prompt_length), dtype=torch.bool, device=device)
    return mask.to(device).bool()


def _check_prefix(prompt_length: int, model_kwargs: dict[str, Any]) -> None:
    """Refuse keys before the prompt that no argument accounts for: a learned prefix with positions of its own."""
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    known = next((known.shape[-1] for known in (mask, position_ids) if known is not None), prompt_length)
    if known != prompt_length:
        raise ValueError(
            f"the prompt has {prompt_length} keys for {known} tokens, expected one key a token: prefix, prompt and "
            "p-tuning are not supported on decoders; use ConstraintLogitsProcessor in transformers' own loop"
        )


def _encoder_decoder_scorer(
    model: Any, modules: list[Any], prompt_logits: Tensor, outputs: Any, model_kwargs: dict[str, Any]
) -> Scorer:
    """One row a beam in the decoder; the encoder's keys once a request, if `modules` are to be folded."""
    own = copy_cache(outputs.past_key_values)
    encoder_outputs, mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
    decoder_mask = model_kwargs.get("decoder_attention_mask")
    folds = bool(modules)
    shared = own.cross_attention_cache
    folded_mask = None
    if folds and mask is not None:
        folded_mask = mask[:, None, None].bool()
        if (dtype := mask_dtype(model)) is not None:
            folded_mask = to_additive(folded_mask, dtype)

    @cache
    def repeated(num_beams: int) -> Any:
        copies = copy_cache(shared)
        copies.batch_repeat_interleave(num_beams)
        return copies

    def arguments(num_beams: int, tokens: Tensor, depth: int) -> dict[str, Any]:
        given: dict[str, Any] = {
            "decoder_input_ids": tokens,
            "past_key_values": own,
            "use_cache": True,
            "return_dict": True,
            "encoder_outputs": encoder_outputs,
            "attention_mask": folded_mask if folds else mask,
        }
        if decoder_mask is not None:
            rows = decoder_mask.repeat_interleave(num_beams, dim=0)
            given["decoder_attention_mask"] = torch.nn.functional.pad(rows, (0, depth + tokens.shape[1]), value=1)
        if not folds and num_beams > 1:
            hidden = encoder_outputs[0].repeat_interleave(num_beams, dim=0)
            given["encoder_outputs"] = type(encoder_outputs)(last_hidden_state=hidden)
            given["attention_mask"] = None if mask is None else mask.repeat_interleave(num_beams, dim=0)
            own.cross_attention_cache = repeated(num_beams)
        return given

    def call(**given: Any) -> Any:
        with fold_beams(modules, batch_size):
            return model(**given)

    batch_size = len(prompt_logits)
    ours = own.self_attention_cache
    suffix_start = ours.get_seq_length() if keeps_all_keys(ours) else None
    return BatchScorer(
        call,
        prompt_logits,
        ours,
        arguments=arguments,
        suffix_start=suffix_start,
        takes_levels=folds and suffix_start is not None,
    )


@torch.no_grad()
def _agrees(model: Any, layout: Layout) -> bool:
    """Whether a model's scores in a layout are those of its plain forward, on a small tree over two short prompts."""
    num_beams, prompt_length = 3, 6
    tokens = _ordinary_tokens(model, 2 * (prompt_length + 2 * num_beams))
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
            scorer = make_scorer(model, layout, outputs, kwargs, batch_size=2, width=num_beams)
            scorer.score([Nodes(first, torch.zeros_like(first), first)], depth=1)
            ours = scorer.score([Nodes(second, parents, second)], depth=2)[0].flatten(0, 1)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    return _is_close(ours, plain.logits[:, -1], model.dtype)


@torch.no_grad()
def _steps_agree(model: Any, layout: Layout, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether two steps in a layout equal transformers' own, which find nothing else to read."""
    path = _ordinary_tokens(model, 2)[:, None, None].expand(-1, len(input_ids), -1)
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
            ours = [_two_steps(model, layout, outputs, kwargs, path, width=width) for width in (1, 2)]
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
    model: Any, layout: Layout, outputs: Any, kwargs: dict[str, Any], path: Int[Tensor, "2 batch 1"], *, width: int
) -> Float[Tensor, "batch vocab"]:
    """Logits after a path of two tokens, which is the last of `width` paths, and the first of them a step later."""
    first, second = path.expand(-1, -1, width)
    if width > 1:
        first = torch.cat([second[:, 1:], first[:, :1]], dim=1)
    scorer = make_scorer(model, layout, outputs, kwargs, batch_size=len(first), width=width)
    scorer.score([Nodes(first, torch.zeros_like(first), first)], depth=1)
    parents = torch.arange(width - 1, -1, -1, device=first.device).expand(len(first), -1)
    return scorer.score([Nodes(second, parents, second)], depth=2)[0][:, 0]


class Unread:
    """Stands for an array that a forward must not read: what forwards do with arrays fails."""

    def __bool__(self) -> bool:
        raise TypeError("this argument must not be read")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    __hash__ = object.__hash__


def _ordinary_tokens(model: Any, count: int) -> Tensor:
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
