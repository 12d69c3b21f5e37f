# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate` in Flax: read and checked, planned, answered. Decodes nothing.

Axes: B batch, P prompt, R returned sequences a row, T generated tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Key
from transformers import GenerationConfig

from hf_gr.catalogue.rules import BatchRules
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.flax.decode import Decoded
from hf_gr.flax.devices import num_rows_on, settings_of_ours, to_mesh
from hf_gr.flax.noise import Noise
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.processors import Processors
from hf_gr.flax.speculation import Speculation
from hf_gr.generation.answers import with_items
from hf_gr.generation.checks import forced_end, options_of
from hf_gr.generation.configuration import VERIFICATION, set_fields
from hf_gr.generation.drafts import kind_of
from hf_gr.generation.internals import default_generation_fields
from hf_gr.generation.models import first_of, num_end_tokens
from hf_gr.generation.named_catalogues import batch_rules, resolve_indexes
from hf_gr.generation.seeds import row_seeds

from .auto import AutoDraft
from .checks import LARGEST, check_call, refuse_arguments
from .drafts import AssistantDraft, Draft, HeadDraft, SearchingHeadDraft, TrieDraft
from .outputs import FlaxGenerateOutput
from .processors import processors_of
from .prompts import HostPrompt

KINDS = {None: Draft, "trie": TrieDraft, "assistant": AssistantDraft, "head": SearchingHeadDraft}
OF_PROMPT = ("input_ids", "attention_mask", "decoder_input_ids")


@dataclass(frozen=True)
class Call:
    """A call, checked.

    Attributes:
        config: the prepared generation config, with our fields.
        prompt: the prompt.
        rules: the catalogue of every prompt.
        draft: the kind of draft.
        plan: the options.
        num_rows: B of the program.
        seeds: of the prompts' samples; None if nothing is drawn.
        mesh: where the program runs; None for one device.
    """

    config: Any
    prompt: HostPrompt
    rules: BatchRules
    draft: Draft
    plan: DecodePlan
    num_rows: int
    seeds: npt.NDArray[np.int64] | None
    mesh: Mesh | None

    @property
    def noise(self) -> Noise | None:
        """What the program's rows draw from: those that only fill the bucket, too."""
        return noise_of(self.seeds, num_rows=self.num_rows)

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        *,
        fields: Mapping[str, Any],
        indexes: Any,
        exclude_items: Any,
        assistant: Any,
        seed: Any,
        key: Any,
        mesh: Mesh | None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
    ) -> Call:
        """Read the arguments of a call."""
        arguments = arguments_of_prompt(inputs, kwargs)
        max_new_tokens, max_length = (
            kwargs.get(name, getattr(generation_config, name, None)) for name in ("max_new_tokens", "max_length")
        )
        configs = (generation_config, model.generation_config)
        if first_of("verification", fields, *configs) == "relaxed":
            if kwargs.setdefault("do_sample", True) is False:
                raise ValueError("do_sample=False with verification='relaxed', expected True: it samples beams")
            if first_of("top_k", kwargs, *configs) is None:
                kwargs["top_k"] = 0  # transformers' default, 50, could leave fewer candidates than beams
        config, rest = prepared(model, generation_config, kwargs)
        set_fields(config, fields)
        step_scores = rest.pop("_step_scores", True)  # whether `output_scores` asks for more than `sequences_scores`
        refuse_arguments(rest)
        mesh = to_mesh(mesh)
        indexes = resolve_indexes(model, indexes)
        prompt = HostPrompt.read(model, config, inputs=inputs, **arguments)
        rules = batch_rules(indexes, exclude_items, num_prompts=prompt.num_rows)
        check_call(model, rules.shared, config, prompt, max_new_tokens=max_new_tokens, max_length=max_length)
        draft = draft_of(model, config, assistant, mesh)
        draft.check(prompt, rules.shared, given=fields)
        seeds = read_seeds(config, seed, key, num_prompts=prompt.num_rows)
        if max_new_tokens is None:
            max_new_tokens = rules.shared.max_length if max_length is None else max_length - prompt.length
        num_rows = num_rows_on(mesh, prompt.num_rows)
        processors = processors_of(
            config,
            vocab_size=model.config.vocab_size,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        plan = make_plan(config, rules.shared, max_new_tokens, processors)
        plan = replace(plan, output_scores=plan.output_scores and step_scores)
        plan = draft.plan(plan, rules.shared, num_rows=num_rows)
        return cls(config, prompt, rules, draft, plan, num_rows, seeds, mesh)

    def answer(self, decoded: Decoded, *, is_ragged: bool) -> Any:
        """transformers' output, without the rows that only fill the bucket."""
        prompt, plan, config = self.prompt, self.plan, self.config
        names = ["sequences"] + ["beam_indices"] * is_ragged  # each array fetched takes 0.1 ms
        if config.return_dict_in_generate:
            names = ["sequences", "beam_indices", "scores", "num_levels"]
        arrays = jax.device_get([getattr(decoded, name) for name in names])
        found = {name: array[: prompt.num_rows] for name, array in zip(names, arrays, strict=True)}
        sequences = found["sequences"]
        length = max(int((found["beam_indices"] >= 0).sum(-1).max()), 1) if is_ragged else sequences.shape[-1]
        begun = prompt.input_ids if prompt.decoder_input_ids is None else prompt.decoder_input_ids
        new = sequences[..., :length].reshape(-1, length)
        # `jnp.asarray` would compile a program for every shape.
        rows = jax.device_put(np.concatenate([np.repeat(begun, plan.num_return_sequences, axis=0), new], axis=1))
        if not config.return_dict_in_generate:
            return rows
        beam_indices, num_levels = found["beam_indices"], int(found["num_levels"].max())

        def per_path(steps: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
            if steps is None:
                return None
            return tuple(step[: prompt.num_rows].reshape(-1, step.shape[-1]) for step in steps[:num_levels])

        fields: dict[str, Any] = {
            "sequences": rows,
            "scores": per_path(decoded.step_scores),
            "logits": per_path(decoded.step_logits),
            "speculation": _on_host(decoded.speculation, prompt.num_rows, self.draft),
            "seeds": None if self.seeds is None else self.seeds.tolist(),
        }
        if plan.is_beam_search:
            first_path = np.arange(prompt.num_rows, dtype=np.int32)[:, None, None] * plan.width
            paths = np.where(beam_indices >= 0, beam_indices + first_path, -1)[..., :length].reshape(-1, length)
            fields["beam_indices"] = jax.device_put(paths)
            fields["sequences_scores"] = jax.device_put(found["scores"].reshape(-1)) if config.output_scores else None
        return with_items(FlaxGenerateOutput(**fields), self.rules, begun.shape[1])


def draft_of(model: Any, config: Any, assistant: Any = None, mesh: Mesh | None = None) -> Draft:
    """The draft of a call."""
    kind = kind_of(config, assistant)
    if kind == "auto":
        return AutoDraft(model, config, assistant, mesh)
    decides = kind == "head" and VERIFICATION[config.verification].by_head_alone
    return (HeadDraft if decides else KINDS[kind])(model, config, assistant)


def arguments_of_prompt(inputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of a call that are its prompt, taken out of `kwargs`; refuses arrays that are traced."""
    arguments = {name: kwargs.pop(name) for name in OF_PROMPT if name in kwargs}
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((inputs, arguments))):
        raise ValueError(
            "the prompt is traced, expected arrays: generate is one program already, call it outside of jit"
        )
    return arguments


def prepared(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config of a call, and arguments that are not fields, by transformers' own rules.

    In order of precedence: the call's fields, the call's config, the model's config, the defaults.
    """
    prepared: Any = GenerationConfig() if config is None else copy.deepcopy(config)
    # One update where transformers has two: each checks all fields. Values are the model's own: nothing changes them.
    defaults = default_generation_fields(prepared)
    for name, value in vars(model.generation_config).items():
        if not name.startswith("_") and (value is not None or name not in defaults):
            defaults[name] = value
    prepared.update(**defaults, defaults_only=True, allow_custom_entries=True)
    return prepared, prepared.update(**kwargs)


def read_seeds(config: Any, seed: Any, key: Any, *, num_prompts: int) -> npt.NDArray[np.int64] | None:
    """The seeds of the prompts' samples, drawn if none are given; None if the config draws no samples."""
    if seed is not None and key is not None:
        raise ValueError("seed and key are given, expected one of them: a key draws the seed")
    seeds = None if seed is None else row_seeds(seed, num_prompts)
    if not config.do_sample:
        return None
    return row_seeds(_drawn_seed(key), num_prompts) if seeds is None else seeds


def noise_of(seeds: npt.NDArray[np.int64] | None, *, num_rows: int) -> Noise | None:
    """What the program's rows draw from: those that only fill the bucket, too."""
    return None if seeds is None else Noise.of(np.pad(seeds, (0, num_rows - len(seeds))))


def make_plan(
    config: Any, catalogue: Snapshot, max_new_tokens: int, processors: Processors | None = None
) -> DecodePlan:
    """The options of a call; those that may change without a new program have one type for all calls."""
    num_ends = num_end_tokens(config)
    forces_end = forced_end(config, catalogue, max_new_tokens) is not None
    options = options_of(config, catalogue, max_new_tokens=min(max_new_tokens, LARGEST), forces_end=forces_end)
    options["length_penalty"] = np.float32(options["length_penalty"] or 0.0)
    options |= {name: np.int32(options[name]) for name in ("max_new_tokens", "fill_token_id", "missing_token_id")}

    def warper(name: str, *, neutral: float | None = None) -> Any:
        value = getattr(config, name)
        return None if not config.do_sample or value is None or value == neutral else np.float32(value)

    return DecodePlan(
        **options,
        top_k=(config.top_k or None) if config.do_sample else None,
        min_tokens_to_keep=(num_ends + 1 if num_ends else 2) if config.num_beams > 1 or options["is_relaxed"] else 1,
        renormalize_logits=config.renormalize_logits is True,
        temperature=warper("temperature", neutral=1.0),
        top_p=warper("top_p", neutral=1.0),
        min_p=warper("min_p"),
        processors=processors,
    )


def _on_host(speculation: Speculation, num_rows: int, draft: Draft) -> Speculation:
    """The speculation, without the rows that only fill the bucket; forwards are those of all rows together."""
    by_row = jax.tree.map(lambda array: array[:num_rows], jax.device_get(speculation))
    return replace(
        by_row,
        target_forwards=int(by_row.target_forwards.max()) if draft.calls_model else 0,
        draft_forwards=int(by_row.draft_forwards.max()),
        chosen=draft.chosen,
    )


def _drawn_seed(key: Array | int | None) -> int:
    """63 bits, from a key of `jax.random` or from the system."""
    if key is None:
        return secrets.randbits(63)
    with settings_of_ours(None):
        high, low = jax.random.bits(_to_key(key), (2,), jnp.uint32).tolist()
    return (high << 32 | low) >> 1


def _to_key(key: Array | int) -> Key[Array, ""]:
    """A key of `jax.random`."""
    if is_integer(key) and -(2**63) <= key < 2**63:  # pyright: ignore
        return jax.random.key(int(key))  # pyright: ignore
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.shape:
        return key
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    raise ValueError(f"key={key!r}, expected a seed or one key of jax.random: pass key=0, or key=jax.random.key(0)")
