# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' outputs of `generate`, plus `num_proven`, `speculation`, `seeds` and `item_ids`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from hf_gr.core.plan import Speculation
from hf_gr.generation.answers import WithItems


@dataclass
class _Ours(WithItems):
    num_proven: Tensor | None = None  # by prompt, how many of its first answers are the best of its catalogue
    perturbed_scores: Tensor | None = None  # of samples without replacement, by which they are ranked
    speculation: Speculation | None = None  # forwards, and nodes scored ahead
    seeds: list[int] | None = None  # of samples


@dataclass
class GRGenerateDecoderOnlyOutput(_Ours, GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateEncoderDecoderOutput(_Ours, GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateBeamDecoderOnlyOutput(_Ours, GenerateBeamDecoderOnlyOutput):
    """`GenerateBeamDecoderOnlyOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


@dataclass
class GRGenerateBeamEncoderDecoderOutput(_Ours, GenerateBeamEncoderDecoderOutput):
    """`GenerateBeamEncoderDecoderOutput`, `speculation` (forwards, scored ahead), `seeds` (of samples), `item_ids`."""


def output_class(*, is_encoder_decoder: bool, is_beam_search: bool) -> Any:
    """The class of a call's output."""
    if is_beam_search:
        return GRGenerateBeamEncoderDecoderOutput if is_encoder_decoder else GRGenerateBeamDecoderOnlyOutput
    return GRGenerateEncoderDecoderOutput if is_encoder_decoder else GRGenerateDecoderOnlyOutput
