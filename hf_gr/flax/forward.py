# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of models: one for all families, which `spec.py` describes. Knows no files.

Decoders, and encoder-decoders in the same tree layout: nodes on the sequence axis, the encoder's keys and values
stored once a request. Positions come from the depths of nodes; transformers derives them from lengths.

Parameters are in torch's `[out, in]` layout, under the names that `Spec.arrange` gives them. A sliding window counts
tokens: of a prompt by their places in it, of nodes by their depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .layers import (
    ACTIVATIONS,
    Block,
    Layer,
    Layers,
    attention,
    causal_attention,
    layer_norm,
    linear,
    over_layers,
    relative_bias,
    relative_buckets,
    rms_norm,
    rotate,
    rotation,
    soft_cap,
    to_heads,
    to_logits,
)
from .scorers import Cache, KeysValues, Layered, Params, Prompt
from .spec import HEAD, Experts, Spec, StackNames

Rotation: TypeAlias = "tuple[Array, Array] | None"
# How many tokens a layer sees, itself included: None for all of them. Where layers are stacked it is an array.
Window: TypeAlias = "int | Int[Array, ''] | None"
EVERYTHING = 2**30  # the window of a full layer among stacked sliding ones
# Rows of some experts, in groups, times [experts, out, in]: axis 1 with axis 2.
BY_EXPERT = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])


@dataclass(frozen=True)
class ModelScorer:
    """The forward of a model: see `Scorer`.

    Norms are root-mean-square norms ("rms"), those whose weights are differences from 1 ("rms_plus_one", Gemma), those
    that round after their weights ("rms_rounded_last", OLMo 2), or norms of mean and deviation ("layer").
    """

    spec: Spec

    def __call__(
        self,
        params: Params,
        input_ids: Int[Array, "batch tokens"],
        mask: Bool[Array, "batch tokens"],
        decoder_input_ids: Int[Array, "batch start"] | None = None,
    ) -> Float[Array, "batch some vocab"]:
        """Logits after every token (of the decoder): the plain forward. Padding may be anywhere."""
        return self.logits(params, self._read(params, Prompt(input_ids, mask, decoder_input_ids))[0])

    def prefill(self, params: Params, prompt: Prompt) -> tuple[Float[Array, "batch vocab"], Cache]:
        """See `Scorer.prefill`; includes an encoder-decoder's first tokens."""
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
        """What the head reads of the last tokens: the last layer's output after the final norm."""
        return self._read(params, prompt, num_last=num_last)[0]

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""
        spec = self.spec
        hidden = hidden * spec.hidden_size**-0.5 if spec.scales_outputs else hidden
        logits = soft_cap(to_logits(hidden, params[spec.embedding if spec.is_tied else HEAD]), spec.logit_cap)
        return logits if spec.names.head_bias is None else logits + params[spec.names.head_bias]

    def _read(
        self,
        params: Params,
        prompt: Prompt,
        *,
        num_last: int | None = None,
        below: tuple[Array, Array, Array] | None = None,
    ) -> tuple[Float[Array, "batch some hidden"], Cache]:
        """The prompt's keys and values, and the last layer's normed output at its last tokens, all of them real.

        With `num_last=None` it is the output at all tokens. Nodes `below`, by tokens, depths and who sees whom, are as
        many more tokens.
        """
        stack, tokens, mask, encoded, cross_mask = self.spec.names.decoder, prompt.input_ids, prompt.mask, None, None
        if self.spec.names.encoder is not None:
            if prompt.decoder_input_ids is None:
                raise ValueError("decoder_input_ids=None, expected what sequences of an encoder-decoder begin with")
            encoded, cross_mask = self._encode(params, prompt, self.spec.names.encoder), jnp.asarray(mask)
            tokens, mask = prompt.decoder_input_ids, jnp.ones(prompt.decoder_input_ids.shape, dtype=bool)
        tokens, mask, layers = jnp.asarray(tokens), jnp.asarray(mask), params[stack.layers]
        places = np.arange(mask.shape[-1])
        next_position = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
        ends = places[None, -(num_last or 1) :]  # places of those that are read
        seen = mask[:, None] & (places <= ends[..., None])  # by the last tokens
        of_nodes, num_ends = None, ends.shape[1]
        if below is not None:
            nodes, depths, visible = below
            tokens = jnp.concatenate([tokens, nodes], axis=1)
            positions = jnp.concatenate([positions, next_position[:, None] + depths - 1], axis=1)
            of_prompt = jnp.broadcast_to(mask[:, None], (*visible.shape[:2], mask.shape[-1]))
            of_nodes = jnp.concatenate([of_prompt, visible], axis=-1)  # what they see
            seen = jnp.concatenate([jnp.pad(seen, ((0, 0), (0, 0), (0, visible.shape[-1]))), of_nodes], axis=1)
            ends, places = (
                jnp.concatenate([jnp.broadcast_to(some, (len(depths), some.shape[-1])), len(places) + depths - 1], 1)
                for some in (ends, places)
            )
        turns, num_read = self._rotations(positions, params), seen.shape[1]
        distances = ends[..., None] - places[..., None, :]
        bias = self._bias(params, stack, positions, positions)

        def step(
            hidden: Array, layer: Layer, given: tuple[None, Window], *, is_last: bool = False
        ) -> tuple[Array, tuple[KeysValues, KeysValues | None]]:
            window = given[1]
            normed, turn = self._normed(hidden, layer, stack, "before_self"), _turn_of(turns, window)
            own = self._keys_values(normed, layer, stack, turn=turn)
            cross = None if encoded is None else self._keys_values(encoded, layer, stack, of="cross")
            if is_last:  # its other tokens are only needed for keys and values
                end = None if turn is None else (turn[0][:, -num_read:], turn[1][:, -num_read:])
                queries = self._queries(normed[:, -num_read:], layer, stack, turn=end)
                of_end = None if bias is None else bias[..., -num_read:, :]
                mixed = self._attend(queries, Block(own.keys, own.values, _within(seen, distances, window), of_end))
                return self._rest(hidden[:, -num_read:], mixed, layer, stack, cross, cross_mask), (own, cross)
            mixed = causal_attention(
                self._queries(normed, layer, stack, turn=turn),
                own.keys,
                own.values,
                mask=mask,
                scale=self.spec.scale,
                bias=bias,
                of_nodes=None if of_nodes is None else _within(of_nodes, distances[:, num_ends:], window),
                window=window,
                cap=self.spec.score_cap,
            )
            return self._rest(hidden, mixed, layer, stack, cross, cross_mask), (own, cross)

        hidden, given = self._embed(params, stack, tokens, positions), self._with_windows(None, layers)
        if isinstance(layers, tuple) and num_last is not None:
            hidden, made = over_layers(step, hidden, layers[:-1], given[:-1])
            hidden, of_last = step(hidden, layers[-1], given[-1], is_last=True)
            made = (*made, of_last)
        else:  # one of many: not worth a program of its own
            hidden, made = over_layers(step, hidden, layers, given)
            hidden = hidden if num_last is None else hidden[:, -num_read:]
        own, cross = (*zip(*made, strict=True),) if isinstance(layers, tuple) else made
        of_encoder: Any = None if encoded is None else cross
        cache = Cache(own, mask, next_position, cross=of_encoder, cross_mask=cross_mask)
        return self._norm(hidden, params, stack.norm), cache

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
        stack, of_prompt, slots = self.spec.names.decoder, cache.prompt_mask[:, None], cache.num_slots
        layers, places, all_depths = params[stack.layers], np.arange(of_prompt.shape[-1]), cache.depths_with(depths)
        positions, all_positions = (cache.next_position[:, None] + some - 1 for some in (depths, all_depths))
        turns = self._rotations(positions, params)
        to_prompt = (len(places) + depths - 1)[..., None] - places
        to_nodes = depths[..., None] - all_depths[:, None]
        # Only encoder-decoders have biases by position: what their sequences begin with has no padding.
        prompt_bias = self._bias(params, stack, positions, jnp.asarray(places))
        node_bias = self._bias(params, stack, positions, all_positions)
        of_slots, of_own = (None, None) if node_bias is None else (node_bias[..., :slots], node_bias[..., slots:])

        def step(
            hidden: Array, layer: Layer, given: tuple[tuple[KeysValues, KeysValues | None, KeysValues | None], Window]
        ) -> tuple[Array, KeysValues]:
            (prompt, cross, room), window = given
            normed, turn = self._normed(hidden, layer, stack, "before_self"), _turn_of(turns, window)
            own, seen = self._keys_values(normed, layer, stack, turn=turn), _within(visible, to_nodes, window)
            blocks = [Block(prompt.keys, prompt.values, _within(of_prompt, to_prompt, window), prompt_bias)]
            blocks += [] if room is None else [Block(room.keys, room.values, seen[..., :slots], of_slots)]
            blocks += [Block(own.keys, own.values, seen[..., slots:], of_own)]
            mixed = self._attend(self._queries(normed, layer, stack, turn=turn), *blocks)
            return self._rest(hidden, mixed, layer, stack, cross, cache.cross_mask), own

        given = self._with_windows(cache.by_layer(), layers)
        hidden, made = over_layers(step, self._embed(params, stack, tokens, positions), layers, given)
        hidden = hidden if wanted is None else along(hidden, wanted[..., None])
        return self.logits(params, self._norm(hidden, params, stack.norm)), made

    def _encode(self, params: Params, prompt: Prompt, stack: StackNames) -> Float[Array, "batch tokens hidden"]:
        mask, places = jnp.asarray(prompt.mask)[:, None], jnp.arange(prompt.input_ids.shape[-1])
        bias = self._bias(params, stack, places, places)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, None]:
            normed = self._normed(hidden, layer, stack, "before_self")
            own, queries = self._keys_values(normed, layer, stack), self._queries(normed, layer, stack)
            mixed = self._attend(queries, Block(own.keys, own.values, mask, bias))
            return self._rest(hidden, mixed, layer, stack), None

        hidden = self._embed(params, stack, jnp.asarray(prompt.input_ids), places)
        hidden, _ = over_layers(step, hidden, params[stack.layers])
        return self._norm(hidden, params, stack.norm)

    def _embed(
        self, params: Params, stack: StackNames, tokens: Int[Array, "batch tokens"], positions: Int[Array, "*_ tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        """The input of the first layer."""
        spec, hidden = self.spec, params[self.spec.embedding][tokens]
        if spec.embedding_scale is not None:
            hidden = hidden * jnp.asarray(spec.embedding_scale, dtype=hidden.dtype)
        if stack.positions is not None:
            hidden = hidden + params[f"{stack.positions}.weight"][positions + spec.position_offset]
        return self._norm(hidden, params, stack.embedding_norm)

    def _bias(
        self, params: Params, stack: StackNames, queries: Int[Array, "*_ queries"], keys: Int[Array, "*__ keys"]
    ) -> Float[Array, "*_ heads 1 queries keys"] | None:
        """Of attention scores, by positions; None for nothing."""
        spec = self.spec
        if stack.relative is None or spec.num_buckets is None:
            return None
        is_causal = stack is spec.names.decoder
        buckets = relative_buckets(spec.num_buckets, spec.max_distance, is_causal=is_causal)
        name = f"{stack.relative}.weight"
        own = params.get(f"{stack.layers}.0.{name}")
        # Of several layers only the first has it; a single layer has it in the stack.
        return relative_bias(params[stack.layers][0][name] if own is None else own, buckets, queries, keys)

    def _rotations(self, positions: Int[Array, "batch tokens"], params: Params) -> tuple[Rotation, Rotation]:
        """Those of full layers, and of sliding ones if they have their own."""
        full, sliding = (
            rotation(positions, frequencies, params[self.spec.embedding].dtype) if frequencies else None
            for frequencies in (self.spec.inverse_frequencies, self.spec.sliding_frequencies)
        )
        return full, sliding

    def _with_windows(self, given: Any, layers: Layers) -> Any:
        """What each layer is given, and its window."""
        slides, size = self.spec.is_sliding, self.spec.sliding_window
        if isinstance(layers, tuple):
            windows = [size if slide else None for slide in slides] or [None] * len(layers)
            return tuple(zip([None] * len(layers) if given is None else given, windows, strict=True))
        return given, jnp.array([size if slide else EVERYTHING for slide in slides]) if slides else None

    def _norm(self, x: Array, params: Params, name: str | None) -> Array:
        """The same without a name."""
        if name is None:
            return x
        kind, eps, weight = self.spec.norm, self.spec.norm_eps, params[f"{name}.weight"]
        if kind == "layer":
            return layer_norm(x, weight, params[f"{name}.bias"], eps=eps)
        return rms_norm(x, weight, eps=eps, plus=float(kind == "rms_plus_one"), rounds_last=kind != "rms")

    def _normed(self, x: Array, layer: Layer, stack: StackNames, part: str) -> Array:
        return self._norm(x, layer, stack.parts.get(part))

    def _queries(
        self, states: Array, layer: Layer, stack: StackNames, *, of: str = "self", turn: Rotation = None
    ) -> Float[Array, "batch heads groups tokens head_dim"]:
        heads = self.spec.num_key_value_heads
        queries = self._heads(states, layer, stack, f"{of}.q", heads, self.spec.num_heads // heads)
        return queries if turn is None else rotate(queries, turn)

    def _keys_values(
        self, states: Array, layer: Layer, stack: StackNames, *, of: str = "self", turn: Rotation = None
    ) -> KeysValues:
        heads = self.spec.num_key_value_heads
        keys = self._heads(states, layer, stack, f"{of}.k", heads)
        values = to_heads(linear(states, layer, stack.parts[f"{of}.v"]), heads)
        return KeysValues(keys if turn is None else rotate(keys, turn), values)

    def _heads(self, states: Array, layer: Layer, stack: StackNames, part: str, *heads: int) -> Array:
        """Queries or keys, normed if they are, before they are rotated."""
        rows, norm = linear(states, layer, stack.parts[part]), f"{part}_norm"
        if self.spec.head_norms == "all":
            return to_heads(self._normed(rows, layer, stack, norm), *heads)
        found = to_heads(rows, *heads)
        return self._normed(found, layer, stack, norm) if self.spec.head_norms == "head" else found

    def _attend(self, queries: Array, *blocks: Block) -> Float[Array, "batch queries width"]:
        return attention(queries, blocks, scale=self.spec.scale, cap=self.spec.score_cap)

    def _rest(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        mixed: Float[Array, "batch tokens width"],
        layer: Layer,
        stack: StackNames,
        cross: KeysValues | None = None,
        cross_mask: Any = None,
    ) -> Float[Array, "batch tokens hidden"]:
        """A layer after its attention to its own tokens."""

        def added(hidden: Array, new: Array, part: str) -> Array:
            hidden = hidden + self._normed(new, layer, stack, f"after_{part}")
            return self._normed(hidden, layer, stack, f"summed_{part}")

        hidden = added(hidden, linear(mixed, layer, stack.parts["self.o"]), "self")
        if cross is not None:
            queries = self._queries(self._normed(hidden, layer, stack, "before_cross"), layer, stack, of="cross")
            mixed = self._attend(queries, Block(cross.keys, cross.values, cross_mask[:, None]))
            hidden = added(hidden, linear(mixed, layer, stack.parts["cross.o"]), "cross")
        return added(hidden, self._mlp(self._normed(hidden, layer, stack, "before_mlp"), layer, stack), "mlp")

    def _mlp(self, x: Array, layer: Layer, stack: StackNames) -> Float[Array, "batch tokens hidden"]:
        if self.spec.experts is not None:
            return _mixture(x, layer, self.spec.experts, activation=self.spec.activation)
        activate, inner = ACTIVATIONS[self.spec.activation], linear(x, layer, stack.parts["mlp.up"])
        gate = stack.parts.get("mlp.gate")
        inner = activate(inner) if gate is None else activate(linear(x, layer, gate)) * inner
        return linear(inner, layer, stack.parts["mlp.down"])


def _within(seen: Array, distances: Any, window: Window) -> Array:
    """What is seen within a window, by the distances of keys from their queries."""
    return seen if window is None else seen & (distances < window)


def _turn_of(turns: tuple[Rotation, Rotation], window: Window) -> Rotation:
    """A layer's rotation: sliding layers may have their own."""
    full, sliding = turns
    if sliding is None or window is None:
        return full
    if isinstance(window, int):
        return sliding
    return jax.tree.map(lambda one, other: jnp.where(window < EVERYTHING, one, other), sliding, full)


def _mixture(
    x: Float[Array, "batch tokens hidden"], layer: Layer, spec: Experts, *, activation: str
) -> Float[Array, "batch tokens hidden"]:
    """The outputs of the experts that each token uses, weighed by the router. Source: Qwen3-MoE in transformers.

    Tokens are sorted by expert, and multiplied group by group: shapes are static, and on a TPU no expert computes a
    token that does not use it. (XLA's program for CPUs computes all of them.)
    """
    tokens = x.reshape(-1, x.shape[-1])
    shares = jax.nn.softmax(linear(tokens, layer, "mlp.gate").astype(jnp.float32), axis=-1)
    weights, chosen = lax.top_k(shares, spec.per_token)
    if spec.is_normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=spec.count)

    def times(rows: Array, name: str) -> Array:
        return lax.ragged_dot_general(rows, layer[f"mlp.experts.{name}.weight"], sizes, BY_EXPERT)

    rows = tokens[order // spec.per_token]
    inner = ACTIVATIONS[activation](times(rows, "gate_proj")) * times(rows, "up_proj")
    out = times(inner, "down_proj")[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(out * weights[..., None].astype(x.dtype), axis=1).reshape(x.shape)
