# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `generate` returns in Flax: transformers' fields, as JAX arrays. transformers' own classes need PyTorch."""

from dataclasses import dataclass, fields
from typing import Any

from jaxtyping import Array, Float, Int
from transformers.utils import ModelOutput

from hf_gr.flax.speculation import Speculation
from hf_gr.generation.answers import WithItems


@dataclass
class FlaxGenerateOutput(WithItems, ModelOutput):
    """The fields of `GRGenerateBeamDecoderOnlyOutput` and its siblings, and their `item_ids`.

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
