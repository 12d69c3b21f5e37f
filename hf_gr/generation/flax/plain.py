# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""One call of `generate` without a catalogue in Flax: read and checked, planned, answered. Decodes nothing.

Axes: B batch, P prompt, R returned sequences a row, T generated tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jaxtyping import Array, Float
from transformers import GenerationConfig

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.sequences import is_integer
from hf_gr.flax.devices import num_rows_on, settings_of_ours, to_mesh
from hf_gr.flax.plain import Generated, PlainPlan, plain_on_mesh, plain_program
from hf_gr.generation.checks import refuse_without_catalogue
from hf_gr.generation.models import end_tokens, fill_token, position_limit

from .call import arguments_of_prompt, make_plan, noise_of, prepared, read_seeds
from .checks import check_options, refuse_arguments
from .outputs import FlaxGenerateOutput
from .processors import processors_of
from .prompts import HostPrompt

SMALLEST_ROOM, ROOM_STEPS = 16, 2  # buckets of new tokens: two a doubling
DEFAULT_TOKENS = 20  # transformers' own


@dataclass(frozen=True)
class PlainCall:
    """A call without a catalogue, checked.

    Attributes:
        model: the model.
        config: the prepared generation config.
        prompt: the prompt.
        plan: the options.
        num_rows: B of the program.
        seeds: of the prompts' samples; None if nothing is drawn.
        mesh: where the program runs; None for one device.
    """

    model: Any
    config: Any
    prompt: HostPrompt
    plan: PlainPlan
    num_rows: int
    seeds: npt.NDArray[np.int64] | None
    mesh: Mesh | None

    @classmethod
    def read(
        cls,
        model: Any,
        inputs: Any,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        *,
        ours: Mapping[str, Any],
        logits_processor: Any,
        stopping_criteria: Any,
        seed: Any,
        key: Any,
        mesh: Mesh | None,
    ) -> PlainCall:
        """Read the arguments of a call.

        Args:
            model: the model.
            inputs: the prompts.
            generation_config: as in transformers.
            kwargs: fields of the config, and arguments of the prompt.
            ours: what means nothing without a catalogue, as given in the call.
            logits_processor: functions of the user's.
            stopping_criteria: likewise.
            seed: as in `generate`.
            key: as in `generate`.
            mesh: where the program runs.

        Raises:
            ValueError: names the argument, its value, what is expected, and the fix.
        """
        refuse_without_catalogue(ours)
        arguments = arguments_of_prompt(inputs, kwargs)
        own_lengths = [kwargs, *(vars(config) for config in (generation_config, model.generation_config) if config)]
        has_max_length = any(fields.get("max_length") is not None for fields in own_lengths)
        config, rest = prepared(model, generation_config, kwargs)
        refuse_arguments(rest)
        check_options(config)
        prompt = HostPrompt.read(model, config, inputs=inputs, **arguments)
        max_new_tokens = _max_new_tokens(model, config, prompt.length, has_max_length=has_max_length)
        processors = processors_of(
            config,
            vocab_size=model.config.vocab_size,
            prompt_length=prompt.length,
            max_new_tokens=max_new_tokens,
            is_constrained=False,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        # The last token is not computed.
        model.spec.check_length(prompt.length + max_new_tokens - 1, of_encoder=prompt.input_ids.shape[1])
        seeds = read_seeds(config, seed, key, num_prompts=prompt.num_rows)
        if config.max_new_tokens is None and not has_max_length:
            warnings.warn(
                f"no length is given: at most {max_new_tokens} tokens are generated; pass max_new_tokens=",
                UserWarning,
                stacklevel=3,
            )
        mesh, ends = to_mesh(mesh), end_tokens(config)
        options = make_plan(config, None, max_new_tokens, processors)
        options = replace(options, fill_token_id=np.int32(_fill_token(config)))
        plan = PlainPlan(
            # However many end tokens there are, a single path keeps one candidate.
            options=options if options.is_beam_search else replace(options, num_kept=1),
            ends=np.isin(np.arange(model.config.vocab_size), ends),
            room=bucket(max_new_tokens, least=SMALLEST_ROOM, steps=ROOM_STEPS),
            fills=bool(ends),
        )
        return cls(model, config, prompt, plan, num_rows_on(mesh, prompt.num_rows), seeds, mesh)

    def run(self) -> Any:
        """The answer: one program, and back on the host once."""
        with settings_of_ours(self.mesh):
            prompt, noise = self.prompt.to_bucket(self.num_rows), noise_of(self.seeds, num_rows=self.num_rows)
            given = (self.model.scorer, self.model.params_on(self.mesh), prompt, self.plan, noise)
            found = plain_program(*given) if self.mesh is None else plain_on_mesh(self.mesh, *given)
            return self._answer(found)

    def _answer(self, generated: Generated) -> Any:
        """transformers' output, without the rows that only fill the bucket."""
        prompt, config, options = self.prompt, self.config, self.plan.options
        found = jax.device_get((generated.sequences, generated.scores, generated.beam_indices, generated.num_steps))
        sequences, scores, beam_indices, num_steps = (array[: prompt.num_rows] for array in found)
        num_steps = int(num_steps.max())
        length = max(int((beam_indices >= 0).sum(-1).max()), 1) if options.is_beam_search else num_steps
        begun = prompt.input_ids if prompt.decoder_input_ids is None else prompt.decoder_input_ids
        begun = np.repeat(begun, options.num_return_sequences, axis=0)
        # `jnp.asarray` would compile a program for every shape.
        rows = jax.device_put(np.concatenate([begun, sequences[..., :length].reshape(len(begun), -1)], axis=1))
        if not config.return_dict_in_generate:
            return rows

        def per_path(steps: Float[Array, "room batch paths vocab"] | None) -> tuple[Array, ...] | None:
            if steps is None:
                return None
            host = jax.device_get(steps)[:num_steps, : prompt.num_rows]
            return tuple(jax.device_put(step.reshape(-1, step.shape[-1])) for step in host)

        fields: dict[str, Any] = {
            "sequences": rows,
            "scores": per_path(generated.step_scores),
            "logits": per_path(generated.step_logits),
            "seeds": None if self.seeds is None else self.seeds.tolist(),
        }
        if options.is_beam_search:
            first_path = np.arange(prompt.num_rows, dtype=np.int32)[:, None, None] * options.width
            paths = np.where(beam_indices >= 0, beam_indices + first_path, -1)[..., :length]
            fields["beam_indices"] = jax.device_put(paths.reshape(len(begun), length))
            fields["sequences_scores"] = jax.device_put(scores.reshape(-1)) if config.output_scores else None
        return FlaxGenerateOutput(**fields)


def _max_new_tokens(model: Any, config: Any, prompt_length: int, *, has_max_length: bool) -> int:
    """How many tokens may be generated, by transformers' rules.

    Args:
        model: the model.
        config: the prepared config.
        prompt_length: tokens before the generated ones, padding included.
        has_max_length: whether the call, its config or the model's gives a `max_length`.
    """
    for name in ("max_new_tokens", "max_length"):
        value = getattr(config, name)
        if value is not None and not is_integer(value):
            raise ValueError(f"{name}={value!r}, expected an int")
    if config.max_new_tokens is not None:
        number, given = int(config.max_new_tokens), f"max_new_tokens={config.max_new_tokens}"
    elif has_max_length:
        number, given = int(config.max_length) - prompt_length, f"max_length={config.max_length}"
    else:
        number, given = DEFAULT_TOKENS, "the default length"
        if (limit := position_limit(model.config)) is not None:
            number = min(number, limit - prompt_length)
    if number < 1:
        raise ValueError(
            f"{given} leaves {number} new tokens after a prompt of {prompt_length}, expected at least 1: pass "
            "max_new_tokens="
        )
    return number


def _fill_token(config: Any) -> int:
    """What follows the end of a sequence.

    transformers' beams take the end token where the padding token is 0 (it counts as none), and -1 without an end.
    """
    ends = end_tokens(config)
    if config.num_beams == 1:
        return fill_token(config)
    return (config.pad_token_id or ends[0]) if ends else -1
