# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate` in Flax: read and checked, planned, answered. Decodes nothing.

Axes: B batch, P prompt, R returned sequences a row, T generated tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.core import ops as core_ops
from hf_gr.flax.decode import Decoded
from hf_gr.flax.devices import num_rows_on, settings_of_ours, to_mesh
from hf_gr.flax.noise import Noise
from hf_gr.flax.scores import DecodePlan, Processors
from hf_gr.flax.speculation import Speculation
from hf_gr.generation.call import BaseCall, WithItems, with_items
from hf_gr.generation.checks import not_with_exact, options_of
from hf_gr.generation.internals import default_generation_fields
from hf_gr.generation.models import end_tokens
from hf_gr.generation.seeds import row_seeds

from .drafts import KINDS, Draft, draft_of
from .prompts import LARGEST, read_prompt


@dataclass
class FlaxGenerateOutput(WithItems, ModelOutput):
    """The fields of `GRGenerateBeamDecoderOnlyOutput` and its siblings, which need PyTorch, and their `item_ids`.

    Attributes:
        sequences: prompt (for an encoder-decoder: the first tokens of its sequences) and generated tokens.
        sequences_scores: of beams, if scores were requested.
        scores: by level, the processed scores, `-inf` for illegal tokens, if requested.
        logits: by level, if requested.
        beam_indices: of beams; -1 after the end.
        attentions: None.
        hidden_states: None.
        past_key_values: None: the prompt's keys live inside the program.
        num_proven: by prompt, how many of its first answers are proven to be the best of its catalogue.
        perturbed_scores: of samples without replacement, by which they are ranked.
        speculation: the number of forwards, and what was scored ahead.
        seeds: of the prompts' samples, if any were drawn.
    """

    sequences: Int[Array, "rows length"] | None = None
    sequences_scores: Float[Array, " rows"] | None = None
    scores: tuple[Float[Array, "paths vocab"], ...] | None = None
    logits: tuple[Float[Array, "paths vocab"], ...] | None = None
    beam_indices: Int[Array, "rows new"] | None = None
    attentions: Any = None
    hidden_states: Any = None
    past_key_values: Any = None
    num_proven: Int[Array, " batch"] | None = None
    perturbed_scores: Float[Array, " rows"] | None = None
    speculation: Speculation | None = None
    seeds: list[int] | None = None

    def __post_init__(self) -> None:
        """Store the given fields under their names; transformers' own would iterate over the first array's entries."""
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


@dataclass(frozen=True)
class Call(BaseCall):
    """A checked call, in Flax.

    Attributes:
        draft: what drafts.
        plan: the options.
        num_rows: B of the program.
        mesh: where the program runs; None for one device.
    """

    kinds = KINDS
    read_prompt = staticmethod(read_prompt)

    draft: Any = None
    plan: Any = None
    num_rows: int = 0
    mesh: Mesh | None = None

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: Any,
        kwargs: dict[str, Any],
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        key: Any,
        mesh: Mesh | None,
        **shared: Any,
    ) -> Call:
        """Read the arguments of a call; `shared` are those of `BaseCall.read`."""
        if shared["seed"] is not None and key is not None:
            raise ValueError("seed and key are given, expected one of them: a key draws the seed")
        call = super().read(model, inputs, generation_config, kwargs, **shared)
        config, catalogue, prompt = call.config, call.rules.shared, call.prompt
        # The last token of a sequence is not computed.
        model.spec.check_length(prompt.length + catalogue.max_length - 1, of_encoder=prompt.inputs.shape[1])
        seeds = call.seeds if config.do_sample else None
        if config.do_sample and seeds is None:
            seeds = row_seeds(_drawn_seed(key), prompt.num_rows)
        processors = processors_of(
            config,
            vocab_size=model.config.vocab_size,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        if config.exact and processors is not None:  # all that may make a prefix worse than an item below
            functions = [("logits_processor", processors.functions), ("stopping_criteria", processors.criteria)]
            raise not_with_exact(next((name for name, given in functions if given), "suppress_tokens"))
        for name, neutral in {"top_k": 0, "top_p": 1.0, "min_p": None}.items() if config.exact else ():
            if config.do_sample and getattr(config, name) not in (None, neutral):
                raise not_with_exact(name)
        plan = make_plan(config, catalogue, processors, step_scores=call.step_scores)
        mesh = to_mesh(mesh)
        num_rows = num_rows_on(mesh, prompt.num_rows)
        draft: Draft = draft_of(call.drafts, prompt, catalogue, plan, mesh, num_rows=num_rows)
        plan = draft.plan(plan, catalogue, num_rows=num_rows)
        return replace(call, seeds=seeds, draft=draft, plan=plan, num_rows=num_rows, mesh=mesh)

    @staticmethod
    def prepare_config(model: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """In order of precedence: the call's fields, the call's config, the model's config, the defaults."""
        prepared: Any = GenerationConfig() if config is None else copy.deepcopy(config)
        # One update where transformers has two: each checks all fields. The model's own values are never changed.
        defaults = default_generation_fields(prepared)
        for name, value in vars(model.generation_config).items():
            if not name.startswith("_") and (value is not None or name not in defaults):
                defaults[name] = value
        prepared.update(**defaults, defaults_only=True, allow_custom_entries=True)
        return prepared, prepared.update(**kwargs)

    @staticmethod
    def vocabulary_of(model: Any) -> int:
        """See `BaseCall.vocabulary_of`."""
        return model.config.vocab_size

    @property
    def noise(self) -> Noise | None:
        """What the program's rows draw from; those that only fill the bucket are copies of the first."""
        if self.seeds is None:
            return None
        return Noise.of(np.append(self.seeds, np.repeat(self.seeds[:1], self.num_rows - len(self.seeds))))

    def answer(self, decoded: Decoded, *, is_ragged: bool) -> Any:
        """transformers' output, without the rows that only fill the bucket."""
        prompt, plan, config = self.prompt, self.plan, self.config
        names = ["sequences"] + ["beam_indices"] * is_ragged  # each array fetched takes 0.1 ms
        if config.return_dict_in_generate:
            names = ["sequences", "beam_indices", "scores", "num_levels", "num_proven", "perturbed_scores"]
        arrays = {name: getattr(decoded, name) for name in names if getattr(decoded, name) is not None}
        found = {name: array[: prompt.num_rows] for name, array in jax.device_get(arrays).items()}
        found = self.with_values(core_ops, found, missing_token=plan.missing_token_id)
        sequences = found["sequences"]
        length = max(int((found["beam_indices"] >= 0).sum(-1).max()), 1) if is_ragged else sequences.shape[-1]
        begun = prompt.inputs if prompt.start is None else prompt.start
        new = sequences[..., :length].reshape(-1, length)
        # `jnp.asarray` would compile a program for every shape.
        rows = jax.device_put(np.concatenate([np.repeat(begun, config.num_return_sequences, axis=0), new], axis=1))
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
            "num_proven": found.get("num_proven"),
            "speculation": _on_host(decoded.speculation, prompt.num_rows, self.draft),
            "seeds": None if self.seeds is None else self.seeds.tolist(),
        }
        if plan.is_beam_search:
            width = 0 if config.exact else plan.width  # of a search by beams alone
            first_path = np.arange(prompt.num_rows, dtype=np.int32)[:, None, None] * width
            paths = np.where(beam_indices >= 0, beam_indices + first_path, -1)[..., :length].reshape(-1, length)
            fields["beam_indices"] = jax.device_put(paths)
            for name, of_rows in {"sequences_scores": "scores", "perturbed_scores": "perturbed_scores"}.items():
                is_wanted = of_rows in found and (config.output_scores or of_rows == name)
                fields[name] = jax.device_put(found[of_rows].reshape(-1)) if is_wanted else None
        return with_items(FlaxGenerateOutput(**fields), self.rules, begun.shape[1])


def make_plan(
    config: Any, catalogue: Snapshot, processors: Processors | None = None, *, step_scores: bool = True
) -> DecodePlan:
    """The options of a call; those that may change without a new program have one type for all calls."""
    num_ends, options = len(end_tokens(config)), options_of(config, catalogue, step_scores=step_scores)
    options["certifies"] &= processors is None
    options["length_penalty"] = np.float32(options["length_penalty"] or 0.0)
    options["max_new_tokens"] = min(options["max_new_tokens"], LARGEST)
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
        target_forwards=0 if draft.verification.by_head_alone else int(by_row.target_forwards.max()),
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


def processors_of(
    config: Any, *, vocab_size: int, logits_processor: Any = None, stopping_criteria: Any = None
) -> Processors | None:
    """What a call does to scores before its warpers; None for nothing."""
    functions = _read_functions(logits_processor, "logits_processor", "scores")
    criteria = _read_functions(stopping_criteria, "stopping_criteria", "booleans [rows]")
    always, first = (_read_tokens(config, name) for name in ("suppress_tokens", "begin_suppress_tokens"))
    # Tokens that are not of the vocabulary have no effect, as in transformers.
    suppressed = np.stack([np.isin(np.arange(vocab_size), tokens) for tokens in (always + first, always)])
    if not (suppressed.any() or functions or criteria):
        return None
    return Processors(suppressed if suppressed.any() else None, functions, criteria)


def _read_functions(given: Any, name: str, returned: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name} is a {type(given).__name__}, expected a list of functions: pass {name}=[...]")
    for one in given:
        if type(one).__name__.endswith("ConstraintLogitsProcessor"):
            raise ValueError(
                f"{name} has a {type(one).__name__}, expected the catalogue itself: pass constraint_index= instead"
            )
        if type(one).__module__.partition(".")[0] == "transformers":
            raise ValueError(
                f"{name} has a {type(one).__name__}, which is PyTorch's, expected functions of JAX (tokens, scores) "
                f"-> {returned}: write it in JAX, or use backend='torch'"
            )
        if not callable(one) or not isinstance(one, Hashable):
            raise ValueError(f"{name} has {one!r}, expected functions of JAX (tokens, scores) -> {returned}")
    return tuple(given)


def _read_tokens(config: Any, name: str) -> list[int]:
    value = getattr(config, name)
    if value is None:
        return []
    if not isinstance(value, list | tuple | np.ndarray) or not all(map(is_integer, value)):
        raise ValueError(f"{name}={value!r}, expected a list of token ids")
    return [int(token) for token in value]
