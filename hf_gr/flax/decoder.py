# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama, Qwen2, Qwen3, Mistral and Gemma: one decoder with a few switches. Knows no files.

`DecoderSpec` reads the switches from a config; `DecoderScorer` is the forward over parameters under their Hugging Face
names, in torch's `[out, in]` layout.

Axes: B batch, P prompt, N nodes, S slots, V vocabulary, H key-value heads, G query heads of each, D width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .layers import (
    ACTIVATIONS,
    Block,
    Layer,
    attention,
    causal_attention,
    linear,
    over_layers,
    rms_norm,
    rotate,
    rotation,
    seen_by_nodes,
    to_heads,
    to_logits,
)
from .scorers import Cache, KeysValues, Layered, Params, Prompt

FAMILIES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
EMBEDDING, HEAD, LAYERS = "model.embed_tokens.weight", "lm_head.weight", "model.layers"
FINAL_NORM = "model.norm"
Rotation = tuple[Array, Array]


@dataclass(frozen=True)
class DecoderSpec:
    """The static facts of a decoder: the parts of its config that affect the forward.

    Attributes:
        vocab_size: V.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the feed-forward layers.
        num_layers: decoder layers.
        num_heads: query heads, H * G.
        num_key_value_heads: H.
        head_dim: D.
        activation: of the feed-forward layers, by transformers' name.
        norm_eps: added to the mean square in norms.
        inverse_frequencies: of the rotary embeddings, scaling included; D / 2 of them.
        projection_bias: whether q, k and v have biases.
        output_bias: whether o has one.
        mlp_bias: whether the feed-forward layers have them.
        head_norms: whether every head of q and k is normed (Qwen3).
        norms_plus_one: whether weights of norms are differences from 1 (Gemma).
        embedding_scale: factor of the embeddings (Gemma).
        is_tied: whether the embeddings are also the head.
        sliding_window: how many tokens some layer sees, itself included; None for all. Sequences up to that length see
            everything; longer ones are refused.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    inverse_frequencies: tuple[float, ...]
    projection_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    norms_plus_one: bool = False
    embedding_scale: float | None = None
    is_tied: bool = False
    sliding_window: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> DecoderSpec:
        """Read a transformers config of one of `FAMILIES`.

        Raises:
            NotImplementedError: a field that this decoder does not implement; the message names the field.
            ValueError: sizes that do not match.
        """
        family = config.model_type
        assert family in FAMILIES, family
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # In transformers the other families ignore these fields.
        has_bias = family in ("gemma", "llama", "qwen3") and bool(config.attention_bias)
        spec = cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            activation=_activation(config),
            norm_eps=config.rms_norm_eps,
            inverse_frequencies=inverse_frequencies(config, head_dim=head_dim),
            projection_bias=has_bias or family == "qwen2",
            output_bias=has_bias,
            mlp_bias=family == "llama" and bool(config.mlp_bias),
            head_norms=family == "qwen3",
            norms_plus_one=family == "gemma",
            embedding_scale=math.sqrt(config.hidden_size) if family == "gemma" else None,
            is_tied=bool(config.tie_word_embeddings),
            sliding_window=_sliding_window(config),
        )
        if getattr(config, "use_bidirectional_attention", None):
            raise NotImplementedError(
                f"config.use_bidirectional_attention={config.use_bidirectional_attention!r}, expected False: "
                "only causal attention is implemented in Flax; use backend='torch'"
            )
        if spec.num_heads % spec.num_key_value_heads:
            raise ValueError(
                f"config.num_attention_heads={spec.num_heads}, expected a multiple of num_key_value_heads="
                f"{spec.num_key_value_heads}: the config does not belong to a model"
            )
        if spec.head_dim % 2:
            raise ValueError(f"config.head_dim={spec.head_dim}, expected an even number: rotary embeddings turn pairs")
        return spec

    @property
    def scorer(self) -> DecoderScorer:
        """The forward of such a decoder."""
        return DecoderScorer(self)

    @property
    def stacks(self) -> dict[str, int]:
        """Where the parameters of equal layers are, and how many layers there are."""
        return {LAYERS: self.num_layers}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor, as in transformers' tied weights."""
        return {HEAD: EMBEDDING} if self.is_tied else {}

    def untie(self) -> DecoderSpec:
        """The same decoder with a head of its own."""
        return replace(self, is_tied=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        projections = {
            "self_attn.q_proj": ((queries, hidden), self.projection_bias),
            "self_attn.k_proj": ((keys, hidden), self.projection_bias),
            "self_attn.v_proj": ((keys, hidden), self.projection_bias),
            "self_attn.o_proj": ((hidden, queries), self.output_bias),
            "mlp.gate_proj": ((inner, hidden), self.mlp_bias),
            "mlp.up_proj": ((inner, hidden), self.mlp_bias),
            "mlp.down_proj": ((hidden, inner), self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, (shape, has_bias) in projections.items():
            layer[f"{name}.weight"] = shape
            if has_bias:
                layer[f"{name}.bias"] = shape[:1]
        if self.head_norms:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        layer["post_attention_layernorm.weight"] = (hidden,)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for place in range(self.num_layers):
            shapes |= {f"{LAYERS}.{place}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, hidden)}

    def check_length(self, num_tokens: int) -> None:
        """Refuse sequences (prompt, padding and generated tokens) that a sliding layer would not see whole.

        Raises:
            NotImplementedError: sequences longer than the sliding window.
        """
        if self.sliding_window is not None and num_tokens > self.sliding_window:
            raise NotImplementedError(
                f"config.sliding_window={self.sliding_window}, and sequences have {num_tokens} tokens, expected no "
                "more: sliding attention is not implemented in Flax; shorten the prompts, or use backend='torch'"
            )


@dataclass(frozen=True)
class DecoderScorer:
    """The forward of a decoder: see `Scorer`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from transformers import LlamaConfig
        >>> from hf_gr.flax.model import FlaxModel
        >>> from hf_gr.flax.scorers import Prompt
        >>> model = FlaxModel(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
        >>> prompt = Prompt(jnp.array([[3, 4, 5]]), jnp.ones((1, 3), dtype=bool))
        >>> logits, cache = jax.jit(model.scorer.prefill)(model.params, prompt)
        >>> nodes, see = jnp.array([[6, 7]]), jnp.eye(2, dtype=bool)[None]
        >>> after, _ = jax.jit(model.scorer.score)(model.params, cache, nodes, jnp.array([[1, 1]]), see)
        >>> logits.shape, after.shape
        ((1, 8), (1, 2, 8))
    """

    spec: DecoderSpec

    def __call__(
        self, params: Params, input_ids: Int[Array, "batch tokens"], mask: Bool[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens vocab"]:
        """Logits after every token: the plain causal forward. Padding may be anywhere."""
        turn = self._rotation(jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0), params)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, None]:
            return self._layer(hidden, layer, turn, mask)[0], None

        hidden, _ = over_layers(step, self._embed(params, input_ids), params[LAYERS])
        return self.logits(params, self._norm(hidden, params, FINAL_NORM))

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch vocab"], Cache]:
        """See `Scorer.prefill`."""
        hidden, cache = self._read(params, prompt, num_last=1)
        return self.logits(params, hidden)[:, 0], cache

    def read_with(
        self,
        params: Params,
        prompt: Prompt,
        tokens: Int[Array, "batch nodes"],
        depths: Int[Array, "batch nodes"],
        visible: Bool[Array, "batch nodes nodes"],
    ) -> tuple[Float[Array, "batch one_and_nodes hidden"], Cache, Layered]:
        """See `JointScorer.read_with`."""
        hidden, cache = self._read(params, prompt, num_last=1, below=(tokens, depths, visible))
        return hidden, *cache.split()

    def hidden_states(self, params: Params, prompt: Prompt, *, num_last: int) -> Float[Array, "batch last hidden"]:
        """What the head reads of the prompt's last tokens: the last layer's output after the final norm."""
        return self._read(params, prompt, num_last=num_last)[0]

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""
        return to_logits(hidden, params[EMBEDDING if self.spec.is_tied else HEAD])

    def _read(
        self, params: Params, prompt: Prompt, *, num_last: int, below: tuple[Array, Array, Array] | None = None
    ) -> tuple[Float[Array, "batch last hidden"], Cache]:
        """The prompt's keys and values, and the last layer's normed output at its last tokens, all of them real.

        Nodes `below`, by tokens, depths and who sees whom, are as many more tokens.
        """
        mask, layers = jnp.asarray(prompt.mask), params[LAYERS]
        tokens, places = jnp.asarray(prompt.input_ids), np.arange(mask.shape[-1])
        next_position = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
        seen = mask[:, None] & (places <= places[-num_last:, None])  # by the last tokens
        of_nodes = None
        if below is not None:
            nodes, depths, visible = below
            tokens = jnp.concatenate([tokens, nodes], axis=1)
            positions = jnp.concatenate([positions, next_position[:, None] + depths - 1], axis=1)
            of_nodes = seen_by_nodes(mask, visible)
            seen = jnp.concatenate([jnp.pad(seen, ((0, 0), (0, 0), (0, visible.shape[-1]))), of_nodes], axis=1)
        turn, num_read = self._rotation(positions, params), seen.shape[1]

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, KeysValues]:
            return self._layer(hidden, layer, turn, mask, of_nodes)

        def last_step(hidden: Array, layer: Layer) -> tuple[Array, KeysValues]:
            # The last layer's other tokens are only needed for keys and values.
            normed = self._norm(hidden, layer, "input_layernorm")
            own = self._keys_values(normed, layer, turn)
            end = (turn[0][:, -num_read:], turn[1][:, -num_read:])
            block = Block(own.keys, own.values, seen)
            mixed = attention(self._queries(normed[:, -num_read:], layer, end), [block], scale=self._scale)
            return self._rest(hidden[:, -num_read:], mixed, layer), own

        hidden = self._embed(params, tokens)
        if isinstance(layers, tuple):
            hidden, made = over_layers(step, hidden, layers[:-1])
            hidden, of_last = last_step(hidden, layers[-1])
            made = (*made, of_last)
        else:  # one of many: not worth a program of its own
            hidden, made = over_layers(step, hidden, layers)
            hidden = hidden[:, -num_read:]
        return self._norm(hidden, params, FINAL_NORM), Cache(made, mask, next_position)

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
        turn = self._rotation(cache.next_position[:, None] + depths - 1, params)
        of_slots, of_nodes = visible[..., : cache.num_slots], visible[..., cache.num_slots :]

        def step(
            hidden: Array, layer: Layer, given: tuple[KeysValues, None, KeysValues | None]
        ) -> tuple[Array, KeysValues]:
            prompt, _, room = given
            normed = self._norm(hidden, layer, "input_layernorm")
            own = self._keys_values(normed, layer, turn)
            blocks = [Block(prompt.keys, prompt.values, cache.prompt_mask[:, None])]
            blocks += [] if room is None else [Block(room.keys, room.values, of_slots)]
            blocks += [Block(own.keys, own.values, of_nodes)]
            mixed = attention(self._queries(normed, layer, turn), blocks, scale=self._scale)
            return self._rest(hidden, mixed, layer), own

        hidden, made = over_layers(step, self._embed(params, tokens), params[LAYERS], cache.by_layer())
        hidden = hidden if wanted is None else along(hidden, wanted[..., None])
        return self.logits(params, self._norm(hidden, params, FINAL_NORM)), made

    @property
    def _scale(self) -> float:
        return self.spec.head_dim**-0.5

    def _embed(self, params: Params, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens hidden"]:
        hidden = params[EMBEDDING][tokens]
        if self.spec.embedding_scale is None:
            return hidden
        return hidden * jnp.asarray(self.spec.embedding_scale, dtype=hidden.dtype)

    def _rotation(self, positions: Int[Array, "batch tokens"], params: Params) -> Rotation:
        return rotation(positions, self.spec.inverse_frequencies, params[EMBEDDING].dtype)

    def _norm(self, x: Array, params: Params, name: str) -> Array:
        weight = params[f"{name}.weight"]
        return rms_norm(x, weight, eps=self.spec.norm_eps, plus_one=self.spec.norms_plus_one)

    def _queries(
        self, normed: Float[Array, "batch tokens hidden"], layer: Layer, turn: Rotation
    ) -> Float[Array, "batch heads groups tokens head_dim"]:
        heads = self.spec.num_key_value_heads
        queries = to_heads(linear(normed, layer, "self_attn.q_proj"), heads, self.spec.num_heads // heads)
        if self.spec.head_norms:
            queries = self._norm(queries, layer, "self_attn.q_norm")
        return rotate(queries, turn)

    def _keys_values(self, normed: Float[Array, "batch tokens hidden"], layer: Layer, turn: Rotation) -> KeysValues:
        heads = self.spec.num_key_value_heads
        keys = to_heads(linear(normed, layer, "self_attn.k_proj"), heads)
        if self.spec.head_norms:
            keys = self._norm(keys, layer, "self_attn.k_norm")
        return KeysValues(rotate(keys, turn), to_heads(linear(normed, layer, "self_attn.v_proj"), heads))

    def _layer(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        layer: Layer,
        turn: Rotation,
        mask: Bool[Array, "batch prompt"],
        of_nodes: Bool[Array, "batch nodes tokens"] | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], KeysValues]:
        """A layer over a prompt, and nodes after it if given what they see; also the keys and values that it keeps."""
        normed = self._norm(hidden, layer, "input_layernorm")
        own = self._keys_values(normed, layer, turn)
        mixed = causal_attention(
            self._queries(normed, layer, turn),
            own.keys,
            own.values,
            mask=mask,
            scale=self._scale,
            of_nodes=of_nodes,
        )
        return self._rest(hidden, mixed, layer), own

    def _rest(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        mixed: Float[Array, "batch tokens width"],
        layer: Layer,
    ) -> Float[Array, "batch tokens hidden"]:
        """A layer from its attention on."""
        hidden = hidden + linear(mixed, layer, "self_attn.o_proj")
        normed = self._norm(hidden, layer, "post_attention_layernorm")
        gate = ACTIVATIONS[self.spec.activation](linear(normed, layer, "mlp.gate_proj"))
        return hidden + linear(gate * linear(normed, layer, "mlp.up_proj"), layer, "mlp.down_proj")


def inverse_frequencies(config: Any, *, head_dim: int) -> tuple[float, ...]:
    """The frequencies of rotary embeddings, in fp32 as transformers computes them.

    Raises:
        NotImplementedError: a scaling other than `linear` and `llama3`, or embeddings of only some channels.

    Source: transformers' `ROPE_INIT_FUNCTIONS`; Llama 3.1 for `llama3`.
    """
    fields = config.rope_parameters
    kind = fields.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise NotImplementedError(
            f"config.rope_parameters has rope_type={kind!r}, expected 'default', 'linear' or 'llama3': the others are "
            "not implemented in Flax; use backend='torch'"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError(
            f"config.rope_parameters has partial_rotary_factor={fields['partial_rotary_factor']}, expected 1.0: "
            "partial rotary embeddings are not implemented in Flax; use backend='torch'"
        )
    one = np.float32(1)
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    frequencies = one / np.float32(fields["rope_theta"]) ** exponents
    if kind == "linear":
        frequencies = frequencies / np.float32(fields["factor"])
    if kind == "llama3":
        low, high = fields["low_freq_factor"], fields["high_freq_factor"]
        context, factor = fields["original_max_position_embeddings"], np.float32(fields["factor"])
        wavelengths = np.float32(2 * math.pi) / frequencies
        slow = frequencies / factor
        smooth = (np.float32(context) / wavelengths - np.float32(low)) / np.float32(high - low)
        between = (one - smooth) * slow + smooth * frequencies
        is_slow, is_fast = wavelengths > context / low, wavelengths < context / high
        frequencies = np.where(is_slow, slow, np.where(is_fast, frequencies, between))
    return tuple(frequencies.astype(np.float32).tolist())


def _activation(config: Any) -> str:
    name = config.hidden_act
    if name not in ACTIVATIONS:
        raise NotImplementedError(
            f"config.hidden_act={name!r}, expected one of {', '.join(ACTIVATIONS)}: use backend='torch'"
        )
    return name


def _sliding_window(config: Any) -> int | None:
    """The window of the config's sliding layers; None if it has no such layers."""
    if config.model_type == "mistral":  # has no layer types: all layers are sliding if there is a window
        return config.sliding_window
    if config.model_type not in ("qwen2", "qwen3"):
        return None
    kinds = set(config.layer_types)
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(
            f"config.layer_types has {', '.join(sorted(unknown))}, expected full_attention or sliding_attention: "
            "use backend='torch'"
        )
    return config.sliding_window if "sliding_attention" in kinds else None
