# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""T5 and T5 v1.1: encoder-decoders with relative positions. Knows no files.

Axes: B batch, N nodes, V vocabulary, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float, Int

from .encoder_decoder import EncoderDecoderScorer
from .layers import ACTIVATIONS, Layer, RelativeBuckets, linear, rms_norm, to_logits
from .scorers import Params

EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
ENCODER, DECODER = "encoder.block", "decoder.block"
SELF, CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"


@dataclass(frozen=True)
class T5Spec:
    """The static facts of a T5: the parts of its config that affect the forward.

    Attributes:
        vocab_size: V.
        hidden_size: width of the residual stream (`d_model`).
        head_dim: width of a head (`d_kv`).
        intermediate_size: width inside the feed-forward layers (`d_ff`).
        num_layers: layers of the encoder.
        num_decoder_layers: layers of the decoder.
        num_heads: H.
        activation: of the feed-forward layers, by transformers' name.
        is_gated: whether those are gated (v1.1).
        norm_eps: added to the mean square in norms.
        num_buckets: of relative positions.
        max_distance: relative positions from here on share a bucket.
        scales_outputs: whether the decoder's outputs are scaled before the head (the first T5, not v1.1).
        is_tied: whether the embeddings are also the head.
    """

    vocab_size: int
    hidden_size: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    activation: str
    is_gated: bool
    norm_eps: float
    num_buckets: int
    max_distance: int
    scales_outputs: bool
    is_tied: bool = True

    @classmethod
    def from_config(cls, config: Any) -> T5Spec:
        """Read a `T5Config`.

        Raises:
            NotImplementedError: a field that is not implemented here; the message names the field.
        """
        if config.dense_act_fn not in ACTIVATIONS:
            raise NotImplementedError(
                f"config.feed_forward_proj={config.feed_forward_proj!r}, expected one of {', '.join(ACTIVATIONS)}, "
                "with or without 'gated-' before it: use backend='torch'"
            )
        if not config.is_encoder_decoder:
            raise NotImplementedError(
                "config.is_encoder_decoder=False, expected True: one half of a T5 is not implemented in Flax; "
                "use backend='torch'"
            )
        if config.relative_attention_max_distance <= config.relative_attention_num_buckets // 2:
            raise NotImplementedError(
                f"config.relative_attention_max_distance={config.relative_attention_max_distance}, expected more than "
                f"half of relative_attention_num_buckets={config.relative_attention_num_buckets}: without far "
                "distances relative positions are not implemented in Flax; use backend='torch'"
            )
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            head_dim=config.d_kv,
            intermediate_size=config.d_ff,
            num_layers=config.num_layers,
            num_decoder_layers=config.num_decoder_layers,
            num_heads=config.num_heads,
            activation=config.dense_act_fn,
            is_gated=config.is_gated_act,
            norm_eps=config.layer_norm_epsilon,
            num_buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            # Older releases of transformers have no such field; there, tying implies it.
            scales_outputs=bool(getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)),
        )

    @property
    def scorer(self) -> T5Scorer:
        """The forward of such a T5."""
        return T5Scorer(self)

    @property
    def embedding(self) -> str:
        """The name of the embeddings in checkpoints."""
        return EMBEDDING

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that are zero if a checkpoint has none."""
        return frozenset()

    @property
    def stacks(self) -> dict[str, int]:
        """Where the parameters of equal layers are, and how many layers there are."""
        return {ENCODER: self.num_layers, DECODER: self.num_decoder_layers}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor, as in transformers' tied weights."""
        inputs = {"encoder.embed_tokens.weight": EMBEDDING, "decoder.embed_tokens.weight": EMBEDDING}
        return {**inputs, HEAD: EMBEDDING} if self.is_tied else inputs

    def arrange(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """A checkpoint's parameters as the scorer takes them: as they are."""
        return arrays

    def untie(self) -> T5Spec:
        """The same T5 with a head of its own."""
        return replace(self, is_tied=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for stack, num_layers in self.stacks.items():
            for place in range(num_layers):
                shapes |= {f"{stack}.{place}.{name}": shape for name, shape in self._layer(stack, place).items()}
            shapes[f"{stack.partition('.')[0]}.final_layer_norm.weight"] = (self.hidden_size,)
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, self.hidden_size)}

    def check_length(self, num_tokens: int, *, of_encoder: int = 0) -> None:
        """Nothing is refused: relative positions have no end."""

    def _layer(self, stack: str, place: int) -> dict[str, tuple[int, ...]]:
        hidden, inner, width = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        attentions = (SELF, CROSS) if stack == DECODER else (SELF,)
        for name in attentions:
            shapes |= {f"{name}.{part}.weight": (width, hidden) for part in "qkv"}
            shapes[f"{name}.o.weight"] = (hidden, width)
            if name == SELF and place == 0:
                shapes[f"{name}.relative_attention_bias.weight"] = (self.num_buckets, self.num_heads)
            shapes[f"{name.rpartition('.')[0]}.layer_norm.weight"] = (hidden,)
        last = f"layer.{len(attentions)}"
        for part in ("wi_0", "wi_1") if self.is_gated else ("wi",):
            shapes[f"{last}.DenseReluDense.{part}.weight"] = (inner, hidden)
        shapes[f"{last}.DenseReluDense.wo.weight"] = (hidden, inner)
        shapes[f"{last}.layer_norm.weight"] = (hidden,)
        return shapes


@dataclass(frozen=True)
class T5Scorer(EncoderDecoderScorer):
    """The forward of a T5: see `Scorer`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from transformers import T5Config
        >>> from hf_gr.flax.model import FlaxModel
        >>> from hf_gr.flax.scorers import Prompt
        >>> model = FlaxModel(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2))
        >>> prompt = Prompt(jnp.array([[3, 4, 5]]), jnp.ones((1, 3), dtype=bool), decoder_input_ids=jnp.array([[0]]))
        >>> logits, cache = jax.jit(model.scorer.prefill)(model.params, prompt)
        >>> nodes, see = jnp.array([[6, 7]]), jnp.eye(2, dtype=bool)[None]
        >>> after, _ = jax.jit(model.scorer.score)(model.params, cache, nodes, jnp.array([[1, 1]]), see)
        >>> logits.shape, after.shape
        ((1, 8), (1, 2, 8))
    """

    spec: T5Spec
    encoder, decoder, self_attention, cross_attention = ENCODER, DECODER, SELF, CROSS

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""
        if self.spec.scales_outputs:
            hidden = hidden * self.spec.hidden_size**-0.5
        return to_logits(hidden, params[EMBEDDING if self.spec.is_tied else HEAD])

    @property
    def _scale(self) -> float:
        return 1.0

    def _embed(
        self, params: Params, stack: str, tokens: Int[Array, "batch tokens"], positions: Any
    ) -> Float[Array, "batch tokens hidden"]:
        return params[EMBEDDING][tokens]

    def _finish(self, params: Params, stack: str, hidden: Array) -> Float[Array, "batch tokens hidden"]:
        return self._norm(hidden, params, f"{stack.partition('.')[0]}.final_layer_norm")

    def _bias(
        self, params: Params, stack: str, queries: Int[Array, "*rows queries"], keys: Int[Array, "*rows keys"]
    ) -> Float[Array, "*rows heads 1 queries keys"]:
        buckets = RelativeBuckets(self.spec.num_buckets, self.spec.max_distance, is_causal=stack == DECODER)
        name = f"{SELF}.relative_attention_bias.weight"
        own = params.get(f"{stack}.0.{name}")
        # Of several layers only the first has it; a single layer has it in the stack.
        return buckets.bias(params[stack][0][name] if own is None else own, queries, keys)

    def _norm(self, x: Array, params: Params, name: str) -> Array:
        return rms_norm(x, params[f"{name}.weight"], eps=self.spec.norm_eps)

    def _before(self, hidden: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        return self._norm(hidden, layer, f"{part.rpartition('.')[0]}.layer_norm")

    def _after(self, hidden: Array, mixed: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        return hidden + linear(mixed, layer, f"{part}.o")

    def _project(self, states: Array, layer: Layer, part: str, which: str) -> Float[Array, "batch tokens width"]:
        return linear(states, layer, f"{part}.{which}")

    def _feed_forward(self, hidden: Array, layer: Layer, stack: str) -> Float[Array, "batch tokens hidden"]:
        name, activate = f"layer.{2 if stack == DECODER else 1}.DenseReluDense", ACTIVATIONS[self.spec.activation]
        normed = self._before(hidden, layer, name)
        if self.spec.is_gated:
            inner = activate(linear(normed, layer, f"{name}.wi_0")) * linear(normed, layer, f"{name}.wi_1")
        else:
            inner = activate(linear(normed, layer, f"{name}.wi"))
        return hidden + linear(inner, layer, f"{name}.wo")
