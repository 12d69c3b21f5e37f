# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""transformers' outputs of `generate`, plus `speculation` and `seeds`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from hf_gr.torch.speculation import Speculation


@dataclass
class GRGenerateDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput`, `speculation` (forwards, what was scored ahead), `seeds` (of samples)."""

    speculation: Speculation | None = None
    seeds: list[int] | None = None


@dataclass
class GRGenerateEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`GenerateEncoderDecoderOutput`, `speculation` (forwards, what was scored ahead), `seeds` (of samples)."""

    speculation: Speculation | None = None
    seeds: list[int] | None = None


@dataclass
class GRGenerateBeamDecoderOnlyOutput(GenerateBeamDecoderOnlyOutput):
    """`GenerateBeamDecoderOnlyOutput`, `speculation` (forwards, what was scored ahead), `seeds` (of samples)."""

    speculation: Speculation | None = None
    seeds: list[int] | None = None


@dataclass
class GRGenerateBeamEncoderDecoderOutput(GenerateBeamEncoderDecoderOutput):
    """`GenerateBeamEncoderDecoderOutput`, `speculation` (forwards, what was scored ahead), `seeds` (of samples)."""

    speculation: Speculation | None = None
    seeds: list[int] | None = None


def output_class(*, is_encoder_decoder: bool, is_beam_search: bool) -> Any:
    """The class of a call's output."""
    if is_beam_search:
        return GRGenerateBeamEncoderDecoderOutput if is_encoder_decoder else GRGenerateBeamDecoderOnlyOutput
    return GRGenerateEncoderDecoderOutput if is_encoder_decoder else GRGenerateDecoderOnlyOutput
