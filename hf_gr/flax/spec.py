# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The description of a model, one for all families. Knows no config, no forward and no files.

A family is a choice of switches, and a table of the names that its checkpoints give to parameters.

Axes: V vocabulary, H key-value heads, G query heads of each, D width of a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Array

from .arrays import stacked, view

HEAD = "lm_head.weight"
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")

Arrays = Mapping[str, Array]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class StackNames:
    """The parameter names of a stack of equal layers and of the parts around it; None for a part that is absent."""

    layers: str  # of the list of layers
    # of the parts of a layer, within it, by what they are. Matrices are `self.q`, `self.k`, `self.v`, `self.o`, the
    # same of `cross`, `mlp.gate`, `mlp.up` and `mlp.down`; norms of queries and keys `self.q_norm` and `self.k_norm`.
    # Other norms are named after the part of a layer, `self`, `cross` or `mlp`: `before_self` is of its input,
    # `after_self` of its output, `summed_self` of the output added to the input.
    parts: Mapping[str, str]
    norm: str | None = None  # of the norm of the last layer's output
    positions: str | None = None  # of the embeddings of positions
    embedding_norm: str | None = None  # of the norm of the first layer's input
    relative: str | None = None  # of the biases of relative positions, within the first layer


@dataclass(frozen=True, eq=False)
class Names:
    """The names that a family's checkpoints have; attention and feed-forward layers have the parts that are named."""

    embedding: str  # of the embeddings
    decoder: StackNames  # of the layers that generate
    encoder: StackNames | None = None  # of those that read the prompt for them; None for none
    # of matrices in checkpoints that are several parts of a layer, one after the other
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_transposed: bool = False  # whether checkpoints have the matrices of layers as `[in, out]`
    head_bias: str | None = None  # of a bias of the head, zero where a checkpoint has none
    copies: tuple[str, ...] = ()  # other names of the embeddings
    prefix: str | None = None  # what names begin with, but not those of models without a head


@dataclass(frozen=True)
class Experts:
    """Feed-forward layers of which every token uses some."""

    count: int  # of them
    per_token: int  # how many a token uses
    size: int  # width inside each
    is_normalised: bool  # whether the weights of those that a token uses are divided by their sum


@dataclass(frozen=True)
class Spec:
    """The static facts of a model: the parts of its config that affect the forward."""

    names: Names  # of its parameters
    vocab_size: int  # V
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the feed-forward layers
    num_layers: int  # layers that generate
    num_heads: int  # query heads, H * G
    num_key_value_heads: int  # H
    head_dim: int  # D
    activation: str  # of the feed-forward layers, by transformers' name
    norm_eps: float  # added to the mean square in norms
    scale: float  # of attention scores
    num_encoder_layers: int = 0  # layers of the encoder
    encoder_size: int = 0  # width inside its feed-forward layers
    # of the rotary embeddings, scaling included; of as many pairs of channels as are rotated
    inverse_frequencies: tuple[float, ...] = ()
    biases: frozenset[str] = frozenset()  # the parts of layers that have some, by their keys in `names`
    # of which kind norms are: see `forward.ModelScorer`
    norm: Literal["rms", "rms_plus_one", "rms_rounded_last", "layer"] = "rms"
    # whether queries and keys are normed, by head or over all heads together
    head_norms: Literal["none", "head", "all"] = "none"
    experts: Experts | None = None  # in place of the feed-forward layers; None for none
    embedding_scale: float | None = None  # factor of the embeddings
    num_positions: int | None = None  # of learned positions, added to the embeddings; None for none
    position_offset: int = 0  # rows of their embeddings before the first position's
    num_buckets: int | None = None  # of relative positions (T5); None for none
    max_distance: int = 0  # relative positions from here on share a bucket
    scales_outputs: bool = False  # whether outputs are scaled before the head (the first T5, not v1.1)
    is_tied: bool = False  # whether the embeddings are also the head
    sliding_window: int | None = None  # how many tokens a sliding layer sees, itself included
    is_sliding: tuple[bool, ...] = ()  # of each layer, whether it is sliding; empty if none is
    sliding_frequencies: tuple[float, ...] | None = None  # `inverse_frequencies` of sliding layers; None for the same
    score_cap: float | None = None  # attention scores are squashed to less than this (Gemma 2); None for no limit
    logit_cap: float | None = None  # logits are squashed to less than this; None for no limit

    @property
    def embedding(self) -> str:
        """The name of the embeddings."""
        return self.names.embedding

    @property
    def stacks(self) -> dict[str, int]:
        """Where the parameters of equal layers are, and how many layers there are."""
        return {stack.layers: number for stack, number, _ in self._stacks()}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor: as in transformers' tied weights, and of a model without a head."""
        found, prefix = dict.fromkeys(self.names.copies, self.embedding), self.names.prefix
        if prefix is not None:
            found |= {name.removeprefix(prefix): name for name in self.shapes() if name.startswith(prefix)}
        return found | ({HEAD: self.embedding} if self.is_tied else {})

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that are zero if a checkpoint has none."""
        return frozenset() if self.names.head_bias is None else frozenset([self.names.head_bias])

    def untie(self) -> Spec:
        """The same model with a head of its own."""
        return replace(self, is_tied=False)

    def check_length(self, num_tokens: int, *, of_encoder: int = 0) -> None:
        """Refuse more tokens, padding included, than learned positions, in the decoder or the encoder.

        Raises:
            ValueError: more tokens than positions.
        """
        for what, number in (("prompts", of_encoder if self.names.encoder else 0), ("sequences", num_tokens)):
            if self.num_positions is not None and number > self.num_positions:
                raise ValueError(
                    f"{what} have {number} tokens, expected at most {self.num_positions}, for which the model has "
                    "positions: shorten the prompts"
                )

    def shapes(self) -> Shapes:
        """The names and shapes of parameters in checkpoints."""
        hidden = self.hidden_size
        shapes: Shapes = {self.embedding: (self.vocab_size, hidden)}
        for stack, number, inner in self._stacks():
            if stack.positions is not None and self.num_positions is not None:
                shapes[f"{stack.positions}.weight"] = (self.num_positions + self.position_offset, hidden)
            shapes |= self._norm(stack.embedding_norm)
            layer = self._layer(stack, inner)
            for place in range(number):
                shapes |= {f"{stack.layers}.{place}.{name}": shape for name, shape in layer.items()}
            if stack.relative is not None and self.num_buckets is not None:
                shapes[f"{stack.layers}.0.{stack.relative}.weight"] = (self.num_buckets, self.num_heads)
            shapes |= self._norm(stack.norm)
        if self.names.head_bias is not None:
            shapes[self.names.head_bias] = (1, self.vocab_size)
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, hidden)}

    def arrange(self, arrays: Arrays) -> Arrays:
        """A checkpoint's parameters as the scorer takes them: one matrix `[out, in]` for each part, experts stacked.

        Args:
            arrays: by the names of `shapes`.
        """
        stack, found = self.names.decoder, dict[str, Array]()
        for name, array in arrays.items():
            if self.names.is_transposed and array.ndim == 2 and name.startswith(f"{stack.layers}."):
                array = view(array).T
            fused = next((fused for fused in self.names.fused if f".{fused}." in name), None)
            if fused is None:
                found[name] = array
                continue
            rows, start, sizes = view(array), 0, self._sizes(self.intermediate_size)
            for part in self.names.fused[fused]:
                end = start + sizes[part.partition(".")[2]][0]
                found[name.replace(fused, stack.parts[part])], start = rows[start:end], end
        return found if self.experts is None else _stack_experts(found)

    def _stacks(self) -> list[tuple[StackNames, int, int]]:
        """The stacks, and of each the number of layers and the width inside their feed-forward layers."""
        decoder = (self.names.decoder, self.num_layers, self.intermediate_size)
        if self.names.encoder is None:
            return [decoder]
        return [(self.names.encoder, self.num_encoder_layers, self.encoder_size), decoder]

    def _sizes(self, inner: int) -> dict[str, tuple[int, int]]:
        hidden, queries, keys = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        of_attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        return of_attention | {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}

    def _layer(self, stack: StackNames, inner: int) -> Shapes:
        sizes, shapes = self._sizes(inner), Shapes()
        fused = {part: name for name, parts in self.names.fused.items() for part in parts}
        for part, name in stack.parts.items():
            of, _, which = part.partition(".")
            if not which:
                shapes |= self._norm(name)
            elif which.endswith("_norm"):
                width = sizes[which[0]][0] if self.head_norms == "all" else self.head_dim
                shapes |= {} if self.head_norms == "none" else {f"{name}.weight": (width,)}
            elif of != "mlp" or self.experts is None:
                name, size = fused.get(part, name), sizes[which]
                before = shapes.get(f"{name}.weight", (0, 0))  # of the same fused matrix, in the order of checkpoints
                before = before[::-1] if self.names.is_transposed else before
                size = (before[0] + size[0], size[1])
                shapes[f"{name}.weight"] = size[::-1] if self.names.is_transposed else size
                shapes |= {f"{name}.bias": size[:1]} if part in self.biases else {}
        return shapes if self.experts is None else shapes | _of_experts(self.experts, self.hidden_size)

    def _norm(self, name: str | None) -> Shapes:
        kinds = () if name is None else ("weight", "bias") if self.norm == "layer" else ("weight",)
        return {f"{name}.{kind}": (self.hidden_size,) for kind in kinds}


def _of_experts(experts: Experts, hidden: int) -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (experts.count, hidden)}
    for place in range(experts.count):
        name = f"mlp.experts.{place}"
        shapes |= {f"{name}.{part}_proj.weight": (experts.size, hidden) for part in ("gate", "up")}
        shapes[f"{name}.down_proj.weight"] = (hidden, experts.size)
    return shapes


def _stack_experts(arrays: Arrays) -> Arrays:
    """Those of a layer's experts become one array `[experts, out, in]` under `experts.gate_proj.weight`, ..."""
    found: dict[str, Array] = {}
    of_experts: dict[str, dict[int, Array]] = {}
    for name, array in arrays.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = array
        else:
            of_experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = array
    return found | {name: stacked([own[place] for place in sorted(own)]) for name, own in of_experts.items()}
