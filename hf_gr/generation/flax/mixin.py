# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`FlaxGenerationMixin`: `generate` with a catalogue, for models in Flax. Checks, fills up to buckets, and hands over.

The way of a call: `generate` -> `hf_gr.flax.decode.decode_program`, one compiled program, and back to the host once.
Knows no PyTorch.

A program serves all prompts of one bucket: prompts are padded to 32, 48, 64, 96, 128, ... tokens and batches to powers
of two (on several devices: the rows of each), by copies of their first row. So are the catalogue's arrays
(`hf_gr.flax.transition`).

Axes: B batch, P prompt, R returned sequences a row, T generated tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Key
from transformers import GenerationConfig

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.buckets import bucket, padded
from hf_gr.flax.decode import Decoded, DecodePlan, decode_program
from hf_gr.flax.devices import decode_on_mesh, num_rows_on, replicated, settings_of_ours, to_mesh
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.scorers import Prompt
from hf_gr.flax.speculation import Speculation
from hf_gr.flax.transition import device_catalogue
from hf_gr.generation.catalogues import SOURCE_ARGUMENTS, batch_rules, remember_source, resolve_indexes
from hf_gr.generation.checks import missing_token
from hf_gr.generation.configuration import GR_FIELDS, extend, set_fields
from hf_gr.generation.models import fill_token, first_of, num_end_tokens
from hf_gr.internals import commit_of_source, default_generation_fields

from .checks import LARGEST, HostPrompt, check_call, check_draft_head, check_drafting, refuse_arguments
from .drafts import scorer_of, with_drafter
from .outputs import FlaxGenerateOutput

SMALLEST_PROMPT, PROMPT_STEPS = 32, 2  # buckets of prompts: two a doubling


class FlaxGenerationMixin:
    """Adds `generate` to a `FlaxModel`; `AutoModelForGenerativeRetrieval` and `hf_gr.enable` give it."""

    __slots__ = ()

    def generate(
        self: Any,
        inputs: npt.ArrayLike | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        constraint_index: ConstraintIndex | str | Sequence[ConstraintIndex | str] | Literal[False] | None = None,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        assistant_model: Any = None,
        key: Array | int | None = None,
        mesh: Mesh | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate sequences of a catalogue: `GRGenerationMixin.generate`, in one compiled program.

        Args:
            inputs: `[B, P]` tokens, in NumPy, JAX or nested lists (also as `input_ids`): a decoder's padded on the
                left.
            generation_config: as in transformers.
            constraint_index: the catalogue, as for `GRGenerationMixin.generate`; Flax generates nothing without one.
            exclude_items: for every prompt the ids of items that it must not be answered with.
            assistant_model: None: models draft in PyTorch alone.
            key: of all random draws: a seed, or a key of `jax.random`; by default another one for every call. What a
                row draws depends on the key and its number, not on the other rows.
            mesh: devices along the axes "data" (rows of the batch) and "model" (weights), such as
                `jax.make_mesh((2, 4), ("data", "model"))`; by default all local devices along "data". A batch that
                the devices do not divide is filled up with copies of its first row, which are dropped again.
            kwargs: `attention_mask`, `decoder_input_ids`, and all fields of a generation config. What Flax has not is
                refused by name. Of drafts it has `drafting="trie"`, where a draft is the whole rest of the catalogue
                below the beams or nothing, and has four times as many nodes as that has on average, up to
                `draft_token_budget`; and `drafting="head"` with `verification="catalogue"`.

        Returns:
            What `GRGenerationMixin.generate` returns, in JAX: `[B * R, P + T]` tokens, or with
            `return_dict_in_generate` a `FlaxGenerateOutput`.

        Raises:
            ValueError: before any work, for arguments that cannot lead to the catalogue's sequences, or that Flax has
                not.
            NotImplementedError: prompts longer than a sliding window.

        The first call of a bucket compiles; later ones do not, whatever the prompts, filters, exclusions, penalties
        and temperatures, and whether the catalogue changed a little. What the program is made for is: the model's
        shape; the buckets of prompt and batch; `num_beams`, `num_return_sequences`, `do_sample`, `early_stopping`,
        `top_k`, `renormalize_logits`, `drafting`, the outputs; which warpers there are; the length of
        `decoder_input_ids`; the number of different catalogues in a batch, up to a power of two; and the most prefixes
        that exclusions hide from one row: none, up to 16, up to 64, ... Buckets of prompts are 32, 48, 64, 96, 128,
        ... tokens, those of batches powers of two (for each device along "data"). Another program is made, too, once
        the catalogue has grown by a ninth, was compacted, or has additions of more than 1,024 nodes or with more than
        16 children at one.

        To compile before the first request, call `generate` once for every bucket; with
        `jax.config.update("jax_compilation_cache_dir", folder)` later processes load what earlier ones compiled.

        Example:
            >>> from transformers import Qwen3Config
            >>> from hf_gr import ConstraintIndex, enable
            >>> from hf_gr.flax.model import FlaxModel
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(FlaxModel(config))
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> out = model.generate([[1, 2]], constraint_index=index, num_beams=3, num_return_sequences=3)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]

        Source: STATIC, algorithm 1; xGR, sections 4 and 5.
        """
        if not isinstance(generation_config, GenerationConfig | None):
            what = type(generation_config).__name__
            fix = "pass it as constraint_index=" if what == "ConstraintIndex" else "pass its fields as arguments"
            raise ValueError(f"generation_config is a {what}, expected a GenerationConfig: {fix}")
        named = first_of("constraint_index", {}, generation_config, self.generation_config)
        if constraint_index is False or (constraint_index is None and named is None):
            raise ValueError(
                f"constraint_index={constraint_index!r}, expected a ConstraintIndex: Flax models generate sequences "
                "of a catalogue; plain generation is transformers', with backend='torch'"
            )
        of_prompt = ("input_ids", "attention_mask", "decoder_input_ids")
        arguments = {name: kwargs.pop(name) for name in of_prompt if name in kwargs}
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((inputs, arguments))):
            raise ValueError(
                "the prompt is traced, expected arrays: generate is one program already, call it outside of jit"
            )
        ours = {name: kwargs.pop(name) for name in GR_FIELDS if name in kwargs}
        lengths = [
            kwargs.get(name, getattr(generation_config, name, None)) for name in ("max_new_tokens", "max_length")
        ]
        config, rest = _prepared(self, generation_config, kwargs)
        set_fields(config, ours)
        refuse_arguments(rest | {"assistant_model": assistant_model})
        mesh = to_mesh(mesh)
        indexes = resolve_indexes(self, named if constraint_index is None else constraint_index)
        prompt = HostPrompt.read(self, config, inputs=inputs, **arguments)
        rules = batch_rules(indexes, exclude_items, num_prompts=prompt.num_rows)
        max_new_tokens, max_length = lengths
        check_call(self, rules.any, config, prompt, max_new_tokens=max_new_tokens, max_length=max_length)
        check_drafting(config, ours)
        if config.drafting == "head":
            check_draft_head(self, rules.any, prompt)
        if max_new_tokens is None:
            max_new_tokens = rules.any.max_length if max_length is None else max_length - prompt.length

        num_rows = num_rows_on(mesh, prompt.num_rows)
        plan = _make_plan(config, rules.any, max_new_tokens)
        size = self.config.vocab_size
        plan = with_drafter(plan, config, rules.any, num_rows=num_rows, vocab_size=size)
        key = _to_key(key) if config.do_sample else None
        program = decode_program if mesh is None else partial(decode_on_mesh, mesh)
        with settings_of_ours(mesh):
            keys = None if key is None else _row_keys(key, num_rows)
            catalogue = device_catalogue(rules, replicated(mesh), num_rows=num_rows)
            scorer, params = scorer_of(self, config, plan, mesh)
            decoded = program(scorer, params, catalogue, _to_bucket(prompt, num_rows), plan, keys)
            return _as_output(decoded, prompt, plan, config, is_ragged=catalogue.is_ragged)


def load(repo_or_dir: str | Path, **kwargs: Any) -> Any:
    """A `FlaxModel` with the mixin, its `generation_config` a `GRGenerationConfig`; the arguments are its own."""
    model = enable(FlaxModel.from_pretrained(repo_or_dir, **kwargs))
    commit = commit_of_source(model.config)
    kwargs |= {} if commit is None else {"revision": commit}  # the catalogue is of the weights' commit, too
    remember_source(model, **{name: kwargs[name] for name in SOURCE_ARGUMENTS if name in kwargs})
    return model


def enable(model: Any) -> Any:
    """Give a `FlaxModel` the mixin, in place."""
    if not isinstance(model, FlaxModel):
        raise ValueError(f"model is a {type(model).__name__}, expected a FlaxModel: FlaxModel.from_pretrained(...)")
    if not isinstance(model, FlaxGenerationMixin):
        object.__setattr__(model, "__class__", _with_mixin(type(model)))
    model.generation_config = extend(model.generation_config)
    return model


@cache
def _with_mixin(base: type) -> type:
    """The subclass of a model class that has the mixin; with its own class first, a loaded model can change to it."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        # Pickle finds classes by name, and this name belongs to the base.
        return _new, (base,), self.__getstate__()

    namespace = {"__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__, "__reduce_ex__": reduce}
    return type(base)(base.__name__, (base, FlaxGenerationMixin), namespace)


def _new(base: type) -> Any:
    enabled: Any = _with_mixin(base)
    return enabled.__new__(enabled)


def _prepared(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config of a call, and arguments that are no fields, by transformers' own rules.

    What the call gives goes before the config that it gives, that before the model's, and that before the defaults.
    """
    prepared: Any = GenerationConfig() if config is None else copy.deepcopy(config)
    prepared.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    prepared.update(**default_generation_fields(prepared), defaults_only=True)
    return prepared, prepared.update(**kwargs)


def _make_plan(config: Any, catalogue: Snapshot, max_new_tokens: int) -> DecodePlan:
    """What is asked for; what may change without another program has one type for all calls."""
    fill = fill_token(config)
    num_ends, is_beam_search = num_end_tokens(config), config.num_beams > 1

    def number(value: float) -> Any:
        return np.float32(value)

    def warper(name: str, *, neutral: float | None = None) -> Any:
        value = getattr(config, name)
        return None if not config.do_sample or value is None or value == neutral else number(value)

    return DecodePlan(
        num_beams=config.num_beams,
        num_return_sequences=config.num_return_sequences,
        num_kept=max(2, 1 + num_ends) * config.num_beams,
        do_sample=config.do_sample,
        early_stopping=config.early_stopping,
        top_k=(config.top_k or None) if config.do_sample else None,
        min_tokens_to_keep=(num_ends + 1 if num_ends else 2) if is_beam_search else 1,
        renormalize_logits=config.renormalize_logits is True,
        output_scores=bool(config.return_dict_in_generate and config.output_scores),
        output_logits=bool(config.return_dict_in_generate and config.output_logits),
        length_penalty=number(config.length_penalty),
        max_new_tokens=np.int32(min(max_new_tokens, LARGEST)),  # pyright: ignore
        fill_token_id=np.int32(fill),  # pyright: ignore
        missing_token_id=np.int32(missing_token(catalogue, fill)),  # pyright: ignore
        temperature=warper("temperature", neutral=1.0),
        top_p=warper("top_p", neutral=1.0),
        min_p=warper("min_p"),
    )


def _to_bucket(prompt: HostPrompt, num_rows: int) -> Prompt:
    """A prompt as the program of its bucket takes it: padded, and with copies of the first row."""
    order = np.arange(num_rows)
    order[prompt.num_rows :] = 0
    size = bucket(prompt.input_ids.shape[1], least=SMALLEST_PROMPT, steps=PROMPT_STEPS)
    tokens, mask = (padded(array, size, axis=1, in_front=True)[order] for array in (prompt.input_ids, prompt.mask))
    start = prompt.decoder_input_ids
    return Prompt(tokens, mask, None if start is None else start[order])  # pyright: ignore


def _to_key(key: Array | int | None) -> Key[Array, ""]:
    """A key of `jax.random`."""
    if key is None:
        return jax.random.key(secrets.randbits(31))
    if is_integer(key) and -(2**63) <= key < 2**63:  # pyright: ignore
        return jax.random.key(int(key))  # pyright: ignore
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.shape:
        return key
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    raise ValueError(f"key={key!r}, expected a seed or one key of jax.random: pass key=0, or key=jax.random.key(0)")


@partial(jax.jit, static_argnums=1)
def _row_keys(key: Key[Array, ""], num_rows: int) -> Key[Array, " batch"]:
    """A key for every row, by its number."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))


def _on_host(speculation: Speculation, num_rows: int, *, by_model: bool) -> Speculation:
    """What was scored ahead, without the rows that only fill the bucket; forwards are those of all rows together."""
    by_row = jax.tree.map(lambda array: array[:num_rows], jax.device_get(speculation))
    return replace(
        by_row,
        target_forwards=int(by_row.target_forwards.max()) if by_model else 0,
        draft_forwards=int(by_row.draft_forwards.max()),
    )


def _as_output(decoded: Decoded, prompt: HostPrompt, plan: DecodePlan, config: Any, *, is_ragged: bool) -> Any:
    """transformers' output for what was decoded, without the rows that only fill the bucket."""
    found = jax.device_get((decoded.sequences, decoded.scores, decoded.beam_indices, decoded.num_levels))
    sequences, scores, beam_indices, num_levels = (array[: prompt.num_rows] for array in found)
    length = max(int((beam_indices >= 0).sum(-1).max()), 1) if is_ragged else sequences.shape[-1]
    begun = prompt.input_ids if prompt.decoder_input_ids is None else prompt.decoder_input_ids
    new = sequences[..., :length].reshape(-1, length)
    # `jnp.asarray` would compile a program for every shape.
    rows = jax.device_put(np.concatenate([np.repeat(begun, plan.num_return_sequences, axis=0), new], axis=1))
    if not config.return_dict_in_generate:
        return rows
    num_levels = int(num_levels.max())

    def per_path(steps: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        if steps is None:
            return None
        return tuple(step[: prompt.num_rows].reshape(-1, step.shape[-1]) for step in steps[:num_levels])

    fields: dict[str, Any] = {
        "sequences": rows,
        "scores": per_path(decoded.step_scores),
        "logits": per_path(decoded.step_logits),
        "speculation": _on_host(decoded.speculation, prompt.num_rows, by_model=config.drafting != "head"),
    }
    if plan.is_beam_search:
        first_path = np.arange(prompt.num_rows, dtype=np.int32)[:, None, None] * plan.width
        paths = np.where(beam_indices >= 0, beam_indices + first_path, -1)[..., :length].reshape(-1, length)
        fields["beam_indices"] = jax.device_put(paths)
        fields["sequences_scores"] = jax.device_put(scores.reshape(-1)) if config.output_scores else None
    return FlaxGenerateOutput(**fields)
