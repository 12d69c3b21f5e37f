# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""T5 and T5 v1.1: an encoder, and a decoder in the tree layout. Knows no files.

Transformers derives T5's positions from lengths, so its decoder needs a row a beam. Here relative positions come from
the depths of nodes, and T5 is called like any decoder: nodes on the sequence axis, the encoder's keys and values
stored once a request.

Axes: B batch, P prompt (of the encoder), Q start (of the decoder), N nodes, S slots, V vocabulary, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .layers import (
    ACTIVATIONS,
    Block,
    Layer,
    RelativeBuckets,
    attention,
    causal_attention,
    linear,
    over_layers,
    rms_norm,
    seen_by_nodes,
    to_heads,
    to_logits,
)
from .scorers import Cache, KeysValues, Layered, Params, Prompt

EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
ENCODER, DECODER = "encoder.block", "decoder.block"
SELF, CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
FINAL_NORM = "decoder.final_layer_norm"


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
    def stacks(self) -> dict[str, int]:
        """Where the parameters of equal layers are, and how many layers there are."""
        return {ENCODER: self.num_layers, DECODER: self.num_decoder_layers}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor, as in transformers' tied weights."""
        inputs = {"encoder.embed_tokens.weight": EMBEDDING, "decoder.embed_tokens.weight": EMBEDDING}
        return {**inputs, HEAD: EMBEDDING} if self.is_tied else inputs

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

    def check_length(self, num_tokens: int) -> None:
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
class T5Scorer:
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

    def __call__(
        self,
        params: Params,
        input_ids: Int[Array, "batch tokens"],
        mask: Bool[Array, "batch tokens"],
        decoder_input_ids: Int[Array, "batch start"],
    ) -> Float[Array, "batch start vocab"]:
        """Logits after every token of the decoder: the plain forward. Padding of the encoder may be anywhere."""
        hidden, _ = self._start(params, Prompt(input_ids, mask, decoder_input_ids))
        return self.logits(params, hidden)

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch vocab"], Cache]:
        """See `Scorer.prefill`; the decoder's first tokens are part of it."""
        hidden, cache = self._start(params, prompt)
        return self.logits(params, hidden[:, -1:])[:, 0], cache

    def read_with(
        self,
        params: Params,
        prompt: Prompt,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, "batch nodes"],
        visible: Bool[Array, "batch nodes nodes"],
    ) -> tuple[Float[Array, "batch one_and_nodes hidden"], Cache, Layered]:
        """See `JointScorer.read_with`: the nodes follow the decoder's first tokens."""
        hidden, cache = self._start(params, prompt, below=(tokens, depths, visible))
        return hidden[:, cache.prompt_mask.shape[-1] - 1 :], *cache.split()

    def hidden_states(self, params: Params, prompt: Prompt, *, num_last: int) -> Float[Array, "batch last hidden"]:
        """What the head reads of the decoder's last tokens, before scaling: the states after the final norm."""
        return self._start(params, prompt)[0][:, -num_last:]

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""
        if self.spec.scales_outputs:
            hidden = hidden * self.spec.hidden_size**-0.5
        return to_logits(hidden, params[EMBEDDING if self.spec.is_tied else HEAD])

    def score(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, "batch nodes"],
        visible: Bool[Array, "batch nodes slots_and_nodes"],
        wanted: Int[Array, "batch wanted"] | None = None,
    ) -> tuple[Float[Array, "batch wanted vocab"], Layered]:
        """See `Scorer.score`."""
        start = cache.prompt_mask.shape[-1]
        positions = start + depths - 1
        to_start = self._bias(params, DECODER, positions, jnp.arange(start))
        to_nodes = self._bias(params, DECODER, positions, start + cache.depths_with(depths) - 1)
        slots = cache.num_slots

        def step(
            hidden: Array, layer: Layer, given: tuple[KeysValues, KeysValues, KeysValues | None]
        ) -> tuple[Array, KeysValues]:
            prompt, cross, room = given
            normed = self._norm(hidden, layer, "layer.0.layer_norm")
            own = self._keys_values(normed, layer, SELF)
            blocks = [Block(prompt.keys, prompt.values, cache.prompt_mask[:, None], to_start)]
            if room is not None:
                blocks.append(Block(room.keys, room.values, visible[..., :slots], to_nodes[..., :slots]))
            blocks.append(Block(own.keys, own.values, visible[..., slots:], to_nodes[..., slots:]))
            hidden = hidden + linear(
                attention(self._queries(normed, layer, SELF), blocks, scale=1.0), layer, f"{SELF}.o"
            )
            hidden = self._cross(hidden, layer, cross, cache.cross_mask)
            return self._feed_forward(hidden, layer, "layer.2"), own

        hidden, made = over_layers(step, params[EMBEDDING][tokens], params[DECODER], cache.by_layer())
        hidden = hidden if wanted is None else along(hidden, wanted[..., None])
        return self.logits(params, self._norm(hidden, params, FINAL_NORM)), made

    def _start(
        self, params: Params, prompt: Prompt, below: tuple[Array, Array, Array] | None = None
    ) -> tuple[Float[Array, "batch start hidden"], Cache]:
        """The decoder's normed output at its first tokens, and at nodes `below`: tokens, depths, and who sees whom."""
        tokens = prompt.decoder_input_ids
        if tokens is None:
            raise ValueError("decoder_input_ids=None, expected what sequences of an encoder-decoder begin with")
        encoded, prompt_mask = self._encode(params, prompt), jnp.asarray(prompt.mask)
        mask, positions, of_nodes = jnp.ones(tokens.shape, dtype=bool), jnp.arange(tokens.shape[-1]), None
        next_position = jnp.full(tokens.shape[:1], tokens.shape[-1], dtype=jnp.int32)
        if below is not None:
            nodes, depths, visible = below
            positions = jnp.concatenate(
                [jnp.broadcast_to(positions, tokens.shape), tokens.shape[-1] + depths - 1], axis=1
            )
            tokens, of_nodes = jnp.concatenate([tokens, nodes], axis=1), seen_by_nodes(mask, visible)
        bias = self._bias(params, DECODER, positions, positions)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, tuple[KeysValues, KeysValues]]:
            normed = self._norm(hidden, layer, "layer.0.layer_norm")
            own = self._keys_values(normed, layer, SELF)
            queries = self._queries(normed, layer, SELF)
            mixed = causal_attention(queries, own.keys, own.values, mask=mask, scale=1.0, bias=bias, of_nodes=of_nodes)
            hidden = hidden + linear(mixed, layer, f"{SELF}.o")
            cross = self._keys_values(encoded, layer, CROSS)
            hidden = self._cross(hidden, layer, cross, prompt_mask)
            return self._feed_forward(hidden, layer, "layer.2"), (own, cross)

        hidden, made = over_layers(step, params[EMBEDDING][tokens], params[DECODER])
        own, cross = zip(*made, strict=True) if isinstance(params[DECODER], tuple) else made
        cache = Cache(own, mask, next_position, cross=cross, cross_mask=prompt_mask)
        return self._norm(hidden, params, FINAL_NORM), cache

    def _encode(self, params: Params, prompt: Prompt) -> Float[Array, "batch tokens hidden"]:
        mask, places = jnp.asarray(prompt.mask)[:, None], jnp.arange(prompt.input_ids.shape[-1])
        bias = self._bias(params, ENCODER, places, places)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, None]:
            normed = self._norm(hidden, layer, "layer.0.layer_norm")
            own = self._keys_values(normed, layer, SELF)
            block = Block(own.keys, own.values, mask, bias)
            mixed = attention(self._queries(normed, layer, SELF), [block], scale=1.0)
            return self._feed_forward(hidden + linear(mixed, layer, f"{SELF}.o"), layer, "layer.1"), None

        hidden, _ = over_layers(step, params[EMBEDDING][prompt.input_ids], params[ENCODER])
        return self._norm(hidden, params, "encoder.final_layer_norm")

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

    def _queries(
        self, normed: Float[Array, "batch tokens hidden"], layer: Layer, name: str
    ) -> Float[Array, "batch heads 1 tokens head_dim"]:
        return to_heads(linear(normed, layer, f"{name}.q"), self.spec.num_heads, 1)

    def _keys_values(self, states: Float[Array, "batch tokens hidden"], layer: Layer, name: str) -> KeysValues:
        heads = self.spec.num_heads
        return KeysValues(
            to_heads(linear(states, layer, f"{name}.k"), heads), to_heads(linear(states, layer, f"{name}.v"), heads)
        )

    def _cross(
        self, hidden: Float[Array, "batch tokens hidden"], layer: Layer, encoded: KeysValues, mask: Any
    ) -> Float[Array, "batch tokens hidden"]:
        normed = self._norm(hidden, layer, "layer.1.layer_norm")
        block = Block(encoded.keys, encoded.values, mask[:, None])
        mixed = attention(self._queries(normed, layer, CROSS), [block], scale=1.0)
        return hidden + linear(mixed, layer, f"{CROSS}.o")

    def _feed_forward(
        self, hidden: Float[Array, "batch tokens hidden"], layer: Layer, place: str
    ) -> Float[Array, "batch tokens hidden"]:
        name, activate = f"{place}.DenseReluDense", ACTIVATIONS[self.spec.activation]
        normed = self._norm(hidden, layer, f"{place}.layer_norm")
        if self.spec.is_gated:
            inner = activate(linear(normed, layer, f"{name}.wi_0")) * linear(normed, layer, f"{name}.wi_1")
        else:
            inner = activate(linear(normed, layer, f"{name}.wi"))
        return hidden + linear(inner, layer, f"{name}.wo")
