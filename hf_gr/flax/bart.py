# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""BART: an encoder-decoder with learned positions, whose norms come after what they norm. Knows no files.

Axes: B batch, N nodes, V vocabulary, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .encoder_decoder import EncoderDecoderScorer
from .layers import ACTIVATIONS, Layer, layer_norm, linear, to_logits
from .scorers import Params
from .spec import check_activation, check_positions

PREFIX = "model."
EMBEDDING, HEAD, BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
ENCODER, DECODER = "model.encoder.layers", "model.decoder.layers"
SELF, CROSS = "self_attn", "encoder_attn"
OFFSET = 2  # rows of the positions' embeddings before the first position's
NORM_EPS = 1e-5  # torch's


@dataclass(frozen=True)
class BartSpec:
    """The static facts of a BART: the parts of its config that affect the forward.

    Attributes:
        vocab_size: V.
        hidden_size: width of the residual stream (`d_model`).
        encoder_size: width inside the encoder's feed-forward layers.
        decoder_size: width inside the decoder's.
        num_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.
        num_heads: H.
        activation: of the feed-forward layers, by transformers' name.
        embedding_scale: factor of the embeddings.
        num_positions: that encoder and decoder have embeddings for.
        is_tied: whether the embeddings are also the head.
    """

    vocab_size: int
    hidden_size: int
    encoder_size: int
    decoder_size: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    activation: str
    embedding_scale: float
    num_positions: int
    is_tied: bool = True

    @classmethod
    def from_config(cls, config: Any) -> BartSpec:
        """Read a `BartConfig`.

        Raises:
            NotImplementedError: a field that is not implemented here; the message names the field.
        """
        if not config.is_encoder_decoder:
            raise NotImplementedError(
                "config.is_encoder_decoder=False, expected True: one half of a BART is not implemented in Flax; "
                "use backend='torch'"
            )
        if config.decoder_attention_heads != config.encoder_attention_heads:
            raise NotImplementedError(
                f"config.decoder_attention_heads={config.decoder_attention_heads}, expected encoder_attention_heads="
                f"{config.encoder_attention_heads}: other numbers are not implemented in Flax; use backend='torch'"
            )
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            encoder_size=config.encoder_ffn_dim,
            decoder_size=config.decoder_ffn_dim,
            num_layers=config.encoder_layers,
            num_decoder_layers=config.decoder_layers,
            num_heads=config.encoder_attention_heads,
            activation=check_activation(config, "activation_function"),
            embedding_scale=math.sqrt(config.d_model) if config.scale_embedding else 1.0,
            num_positions=config.max_position_embeddings,
            is_tied=bool(config.tie_word_embeddings),
        )

    @property
    def scorer(self) -> BartScorer:
        """The forward of such a BART."""
        return BartScorer(self)

    @property
    def embedding(self) -> str:
        """The name of the embeddings in checkpoints."""
        return EMBEDDING

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that are zero if a checkpoint has none."""
        return frozenset([BIAS])

    @property
    def stacks(self) -> dict[str, int]:
        """Where the parameters of equal layers are, and how many layers there are."""
        return {ENCODER: self.num_layers, DECODER: self.num_decoder_layers}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor: as in transformers' tied weights, and of a model without a head."""
        inputs = {f"{stack}.embed_tokens.weight": EMBEDDING for stack in ("encoder", "decoder")}
        bare = {name.removeprefix(PREFIX): name for name in self.shapes() if name.startswith(PREFIX)}
        names = inputs | {PREFIX + name: EMBEDDING for name in inputs} | bare
        return names | ({HEAD: EMBEDDING} if self.is_tied else {})

    def untie(self) -> BartSpec:
        """The same BART with a head of its own."""
        return replace(self, is_tied=False)

    def check_length(self, num_tokens: int, *, of_encoder: int = 0) -> None:
        """Refuse more tokens than positions.

        Args:
            num_tokens: that the decoder computes: its first ones and all generated tokens but the last.
            of_encoder: that the encoder computes: the prompt, padding included.

        Raises:
            ValueError: more tokens than positions.
        """
        check_positions(of_encoder, self.num_positions, "prompts")
        check_positions(num_tokens, self.num_positions)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for stack, num_layers in self.stacks.items():
            side = stack.removesuffix(".layers")
            shapes[f"{side}.embed_positions.weight"] = (self.num_positions + OFFSET, self.hidden_size)
            shapes |= {f"{side}.layernorm_embedding.{kind}": (self.hidden_size,) for kind in ("weight", "bias")}
            for place in range(num_layers):
                shapes |= {f"{stack}.{place}.{name}": shape for name, shape in self._layer(stack).items()}
        shapes[BIAS] = (1, self.vocab_size)
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, self.hidden_size)}

    def arrange(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """A checkpoint's parameters as the scorer takes them: as they are."""
        return arrays

    def _layer(self, stack: str) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.decoder_size if stack == DECODER else self.encoder_size
        shapes: dict[str, tuple[int, ...]] = {}
        for part in (SELF, CROSS) if stack == DECODER else (SELF,):
            for which in ("q", "k", "v", "out"):
                name = f"{part}.{which}_proj"
                shapes |= {f"{name}.weight": (hidden, hidden), f"{name}.bias": (hidden,)}
            shapes |= {f"{part}_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
        shapes |= {"fc1.weight": (inner, hidden), "fc1.bias": (inner,)}
        shapes |= {"fc2.weight": (hidden, inner), "fc2.bias": (hidden,)}
        return shapes | {f"final_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}


@dataclass(frozen=True)
class BartScorer(EncoderDecoderScorer):
    """The forward of a BART: see `Scorer`."""

    spec: BartSpec
    encoder, decoder, self_attention, cross_attention = ENCODER, DECODER, SELF, CROSS

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""
        return to_logits(hidden, params[EMBEDDING if self.spec.is_tied else HEAD]) + params[BIAS]

    @property
    def _scale(self) -> float:
        return (self.spec.hidden_size // self.spec.num_heads) ** -0.5

    def _embed(
        self, params: Params, stack: str, tokens: Int[Array, "batch tokens"], positions: Int[Array, "*rows tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        side, embedded = stack.removesuffix(".layers"), params[EMBEDDING][tokens]
        scaled = embedded * jnp.asarray(self.spec.embedding_scale, dtype=embedded.dtype)
        hidden = scaled + params[f"{side}.embed_positions.weight"][positions + OFFSET]
        return _norm(hidden, params, f"{side}.layernorm_embedding")

    def _finish(self, params: Params, stack: str, hidden: Array) -> Float[Array, "batch tokens hidden"]:
        return hidden

    def _bias(self, params: Params, stack: str, queries: Any, keys: Any) -> None:
        return None

    def _before(self, hidden: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        return hidden

    def _after(self, hidden: Array, mixed: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        return _norm(hidden + linear(mixed, layer, f"{part}.out_proj"), layer, f"{part}_layer_norm")

    def _project(self, states: Array, layer: Layer, part: str, which: str) -> Float[Array, "batch tokens width"]:
        return linear(states, layer, f"{part}.{which}_proj")

    def _feed_forward(self, hidden: Array, layer: Layer, stack: str) -> Float[Array, "batch tokens hidden"]:
        inner = ACTIVATIONS[self.spec.activation](linear(hidden, layer, "fc1"))
        return _norm(hidden + linear(inner, layer, "fc2"), layer, "final_layer_norm")


def _norm(x: Array, params: Params, name: str) -> Array:
    return layer_norm(x, params[f"{name}.weight"], params[f"{name}.bias"], eps=NORM_EPS)
