# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of decoders: one for all families, which `spec.py` describes. Knows no files.

Parameters are in torch's `[out, in]` layout, under the names that `DecoderSpec.arrange` gives them.

A sliding window counts tokens: of a prompt by their places in it, of nodes by their depths.

Axes: B batch, P prompt, N nodes, S slots, V vocabulary, H key-value heads, G query heads of each, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .experts import mixture
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
    rms_norm,
    rotate,
    rotation,
    seen_by_nodes,
    soft_cap,
    to_heads,
    to_logits,
)
from .scorers import Cache, KeysValues, Layered, Params, Prompt
from .spec import EMBEDDING, HEAD, LAYERS, NORM, POSITIONS, DecoderSpec

Rotation: TypeAlias = "tuple[Array, Array] | None"
# How many tokens a layer sees, itself included: None for all of them. Where layers are stacked it is an array.
Window: TypeAlias = "int | Int[Array, ''] | None"
EVERYTHING = 2**30  # the window of a full layer among stacked sliding ones


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
        positions, layers = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0), params[LAYERS]
        turns = self._rotations(positions, params)

        def step(hidden: Array, layer: Layer, given: tuple[None, Window]) -> tuple[Array, None]:
            return self._layer(hidden, layer, turns, mask, given[1])[0], None

        hidden = self._embed(params, input_ids, positions)
        hidden, _ = over_layers(step, hidden, layers, self._with_windows(None, layers))
        return self.logits(params, self._norm(hidden, params, NORM))

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
        head = params[EMBEDDING if self.spec.is_tied else HEAD]
        return soft_cap(to_logits(hidden, head), self.spec.logit_cap)

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
        ends = places[None, -num_last:]  # places of those that are read
        seen = mask[:, None] & (places <= ends[..., None])  # by the last tokens
        of_nodes = None
        if below is not None:
            nodes, depths, visible = below
            tokens = jnp.concatenate([tokens, nodes], axis=1)
            positions = jnp.concatenate([positions, next_position[:, None] + depths - 1], axis=1)
            of_nodes = seen_by_nodes(mask, visible)
            seen = jnp.concatenate([jnp.pad(seen, ((0, 0), (0, 0), (0, visible.shape[-1]))), of_nodes], axis=1)
            ends, places = (
                jnp.concatenate([jnp.broadcast_to(some, (len(depths), some.shape[-1])), len(places) + depths - 1], 1)
                for some in (ends, places)
            )
        turns, num_read = self._rotations(positions, params), seen.shape[1]
        distances = ends[..., None] - places[..., None, :]

        def step(hidden: Array, layer: Layer, given: tuple[None, Window]) -> tuple[Array, KeysValues]:
            seen = None if of_nodes is None else _within(of_nodes, distances[:, num_last:], given[1])
            return self._layer(hidden, layer, turns, mask, given[1], seen)

        def last_step(hidden: Array, layer: Layer, window: Window) -> tuple[Array, KeysValues]:
            # The last layer's other tokens are only needed for keys and values.
            normed, turn = self._before(hidden, layer), _turn_of(turns, window)
            own = self._keys_values(normed, layer, turn)
            end = None if turn is None else (turn[0][:, -num_read:], turn[1][:, -num_read:])
            block = Block(own.keys, own.values, _within(seen, distances, window))
            mixed = self._attend(self._queries(normed[:, -num_read:], layer, end), [block])
            return self._rest(hidden[:, -num_read:], mixed, layer), own

        hidden, given = self._embed(params, tokens, positions), self._with_windows(None, layers)
        if isinstance(layers, tuple):
            hidden, made = over_layers(step, hidden, layers[:-1], given[:-1])
            hidden, of_last = last_step(hidden, layers[-1], given[-1][1])
            made = (*made, of_last)
        else:  # one of many: not worth a program of its own
            hidden, made = over_layers(step, hidden, layers, given)
            hidden = hidden[:, -num_read:]
        return self._norm(hidden, params, NORM), Cache(made, mask, next_position)

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
        positions, layers, slots = cache.next_position[:, None] + depths - 1, params[LAYERS], cache.num_slots
        turns, of_prompt = self._rotations(positions, params), cache.prompt_mask[:, None]
        to_prompt = (of_prompt.shape[-1] + depths - 1)[..., None] - np.arange(of_prompt.shape[-1])
        to_nodes = depths[..., None] - cache.depths_with(depths)[:, None]

        def step(
            hidden: Array, layer: Layer, given: tuple[tuple[KeysValues, None, KeysValues | None], Window]
        ) -> tuple[Array, KeysValues]:
            (prompt, _, room), window = given
            normed, turn = self._before(hidden, layer), _turn_of(turns, window)
            own, seen = self._keys_values(normed, layer, turn), _within(visible, to_nodes, window)
            blocks = [Block(prompt.keys, prompt.values, _within(of_prompt, to_prompt, window))]
            blocks += [] if room is None else [Block(room.keys, room.values, seen[..., :slots])]
            blocks += [Block(own.keys, own.values, seen[..., slots:])]
            mixed = self._attend(self._queries(normed, layer, turn), blocks)
            return self._rest(hidden, mixed, layer), own

        given = self._with_windows(cache.by_layer(), layers)
        hidden, made = over_layers(step, self._embed(params, tokens, positions), layers, given)
        hidden = hidden if wanted is None else along(hidden, wanted[..., None])
        return self.logits(params, self._norm(hidden, params, NORM)), made

    def _embed(
        self, params: Params, tokens: Int[Array, "batch tokens"], positions: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        hidden = params[EMBEDDING][tokens]
        if self.spec.num_positions is not None:
            hidden = hidden + params[POSITIONS][positions]
        if self.spec.embedding_scale is None:
            return hidden
        return hidden * jnp.asarray(self.spec.embedding_scale, dtype=hidden.dtype)

    def _rotations(self, positions: Int[Array, "batch tokens"], params: Params) -> tuple[Rotation, Rotation]:
        """Those of full layers, and of sliding ones if they have their own."""
        full, sliding = (
            rotation(positions, frequencies, params[EMBEDDING].dtype) if frequencies else None
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

    def _norm(self, x: Array, params: Params, name: str) -> Array:
        kind, eps, weight = self.spec.norm, self.spec.norm_eps, params[f"{name}.weight"]
        if kind == "layer":
            return layer_norm(x, weight, params[f"{name}.bias"], eps=eps)
        return rms_norm(x, weight, eps=eps, plus=float(kind == "rms_plus_one"), rounds_last=kind != "rms")

    def _normed_if(self, x: Array, layer: Layer, name: str | None) -> Array:
        return x if name is None else self._norm(x, layer, name)

    def _before(self, hidden: Float[Array, "batch tokens hidden"], layer: Layer) -> Array:
        """The attention's input."""
        return self._normed_if(hidden, layer, self.spec.layer_norms.before_attention)

    def _queries(
        self, normed: Float[Array, "batch tokens hidden"], layer: Layer, turn: Rotation
    ) -> Float[Array, "batch heads groups tokens head_dim"]:
        heads = self.spec.num_key_value_heads
        queries = self._heads(normed, layer, "q", heads, self.spec.num_heads // heads)
        return queries if turn is None else rotate(queries, turn)

    def _keys_values(self, normed: Float[Array, "batch tokens hidden"], layer: Layer, turn: Rotation) -> KeysValues:
        heads = self.spec.num_key_value_heads
        keys = self._heads(normed, layer, "k", heads)
        values = to_heads(linear(normed, layer, "self_attn.v_proj"), heads)
        return KeysValues(keys if turn is None else rotate(keys, turn), values)

    def _heads(self, normed: Float[Array, "batch tokens hidden"], layer: Layer, part: str, *heads: int) -> Array:
        """Queries or keys, normed if they are, before they are rotated."""
        rows, name = linear(normed, layer, f"self_attn.{part}_proj"), f"self_attn.{part}_norm"
        if self.spec.head_norms == "all":
            return to_heads(self._norm(rows, layer, name), *heads)
        found = to_heads(rows, *heads)
        return self._norm(found, layer, name) if self.spec.head_norms == "head" else found

    def _attend(self, queries: Array, blocks: list[Block]) -> Float[Array, "batch queries width"]:
        return attention(queries, blocks, scale=self.spec.scale, cap=self.spec.score_cap)

    def _layer(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        layer: Layer,
        turns: tuple[Rotation, Rotation],
        mask: Bool[Array, "batch prompt"],
        window: Window,
        of_nodes: Bool[Array, "batch nodes tokens"] | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], KeysValues]:
        """A layer over a prompt, and nodes after it if given what they see; also the keys and values that it keeps."""
        normed, turn = self._before(hidden, layer), _turn_of(turns, window)
        own = self._keys_values(normed, layer, turn)
        mixed = causal_attention(
            self._queries(normed, layer, turn),
            own.keys,
            own.values,
            mask=mask,
            scale=self.spec.scale,
            of_nodes=of_nodes,
            window=window,
            cap=self.spec.score_cap,
        )
        return self._rest(hidden, mixed, layer), own

    def _rest(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        mixed: Float[Array, "batch tokens width"],
        layer: Layer,
    ) -> Float[Array, "batch tokens hidden"]:
        """A layer from its attention on."""
        norms = self.spec.layer_norms
        hidden = hidden + self._normed_if(linear(mixed, layer, "self_attn.o_proj"), layer, norms.after_attention)
        return hidden + self._normed_if(
            self._mlp(self._normed_if(hidden, layer, norms.before_mlp), layer), layer, norms.after_mlp
        )

    def _mlp(self, x: Float[Array, "batch tokens hidden"], layer: Layer) -> Float[Array, "batch tokens hidden"]:
        if self.spec.experts is not None:
            return mixture(x, layer, self.spec.experts, activation=self.spec.activation)
        activate, inner = ACTIVATIONS[self.spec.activation], linear(x, layer, "mlp.up_proj")
        inner = activate(linear(x, layer, "mlp.gate_proj")) * inner if self.spec.is_gated else activate(inner)
        return linear(inner, layer, "mlp.down_proj")


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
