# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of encoder-decoders: an encoder, and a decoder in the tree layout. Knows no family and no files.

Transformers derives such decoders' positions from lengths, so that they need a row a beam. Here positions come from
the depths of nodes, and an encoder-decoder is called like any decoder: nodes on the sequence axis, the encoder's keys
and values stored once a request. A family says how it embeds, norms and projects.

Axes: B batch, P prompt (of the encoder), Q start (of the decoder), N nodes, S slots, V vocabulary, H heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .arrays import along
from .layers import Block, Layer, attention, causal_attention, over_layers, seen_by_nodes, to_heads
from .scorers import Cache, KeysValues, Layered, Params, Prompt


class EncoderDecoderScorer(ABC):
    """The forward of an encoder-decoder: see `Scorer`.

    Attributes:
        encoder: where its layers are among the parameters.
        decoder: where its layers are.
        self_attention: the name of these parameters in a layer.
        cross_attention: of these.
    """

    encoder: ClassVar[str]
    decoder: ClassVar[str]
    self_attention: ClassVar[str]
    cross_attention: ClassVar[str]
    spec: Any

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
        """What the head reads of the decoder's last tokens: the states after its last norm."""
        return self._start(params, prompt)[0][:, -num_last:]

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
        start, slots = cache.prompt_mask.shape[-1], cache.num_slots
        positions = start + depths - 1
        to_start = self._bias(params, self.decoder, positions, jnp.arange(start))
        to_nodes = self._bias(params, self.decoder, positions, start + cache.depths_with(depths) - 1)
        to_slots, to_own = (None, None) if to_nodes is None else (to_nodes[..., :slots], to_nodes[..., slots:])

        def step(
            hidden: Array, layer: Layer, given: tuple[KeysValues, KeysValues, KeysValues | None]
        ) -> tuple[Array, KeysValues]:
            prompt, cross, room = given
            normed = self._before(hidden, layer, self.self_attention)
            own = self._keys_values(normed, layer, self.self_attention)
            blocks = [Block(prompt.keys, prompt.values, cache.prompt_mask[:, None], to_start)]
            if room is not None:
                blocks.append(Block(room.keys, room.values, visible[..., :slots], to_slots))
            blocks.append(Block(own.keys, own.values, visible[..., slots:], to_own))
            mixed = attention(self._queries(normed, layer, self.self_attention), blocks, scale=self._scale)
            return self._rest(hidden, mixed, layer, cross, cache.cross_mask), own

        hidden = self._embed(params, self.decoder, tokens, positions)
        hidden, made = over_layers(step, hidden, params[self.decoder], cache.by_layer())
        hidden = hidden if wanted is None else along(hidden, wanted[..., None])
        return self.logits(params, self._finish(params, self.decoder, hidden)), made

    @abstractmethod
    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden"]
    ) -> Float[Array, "batch tokens vocab"]:
        """See `JointScorer.logits`."""

    @property
    @abstractmethod
    def _scale(self) -> float:
        """Of attention scores."""

    @abstractmethod
    def _embed(
        self, params: Params, stack: str, tokens: Int[Array, "batch tokens"], positions: Int[Array, "*rows tokens"]
    ) -> Float[Array, "batch tokens hidden"]:
        """The input of the first layer."""

    @abstractmethod
    def _finish(self, params: Params, stack: str, hidden: Array) -> Float[Array, "batch tokens hidden"]:
        """The last layer's output, normed if it is."""

    @abstractmethod
    def _bias(
        self, params: Params, stack: str, queries: Int[Array, "*rows queries"], keys: Int[Array, "*rows keys"]
    ) -> Float[Array, "*rows heads 1 queries keys"] | None:
        """Of attention scores, by positions; None for nothing."""

    @abstractmethod
    def _before(self, hidden: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        """The input of an attention, by its name."""

    @abstractmethod
    def _after(self, hidden: Array, mixed: Array, layer: Layer, part: str) -> Float[Array, "batch tokens hidden"]:
        """What an attention's output becomes, with its input before `_before`."""

    @abstractmethod
    def _project(self, states: Array, layer: Layer, part: str, which: str) -> Float[Array, "batch tokens width"]:
        """The queries, keys or values of an attention: `which` is q, k or v."""

    @abstractmethod
    def _feed_forward(self, hidden: Array, layer: Layer, stack: str) -> Float[Array, "batch tokens hidden"]:
        """The last part of a layer."""

    def _start(
        self, params: Params, prompt: Prompt, below: tuple[Array, Array, Array] | None = None
    ) -> tuple[Float[Array, "batch start hidden"], Cache]:
        """The decoder's last output at its first tokens, and at nodes `below`: tokens, depths, who sees whom."""
        tokens: Any = prompt.decoder_input_ids
        if tokens is None:
            raise ValueError("decoder_input_ids=None, expected what sequences of an encoder-decoder begin with")
        encoded, prompt_mask = self._encode(params, prompt), jnp.asarray(prompt.mask)
        mask, positions, of_nodes = jnp.ones(tokens.shape, dtype=bool), jnp.arange(tokens.shape[-1]), None
        next_position = jnp.full(tokens.shape[:1], tokens.shape[-1], dtype=jnp.int32)
        if below is not None:
            nodes, depths, visible = below
            of_start = jnp.broadcast_to(positions, tokens.shape)
            positions = jnp.concatenate([of_start, tokens.shape[-1] + depths - 1], axis=1)
            tokens, of_nodes = jnp.concatenate([tokens, nodes], axis=1), seen_by_nodes(mask, visible)
        bias = self._bias(params, self.decoder, positions, positions)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, tuple[KeysValues, KeysValues]]:
            normed = self._before(hidden, layer, self.self_attention)
            own = self._keys_values(normed, layer, self.self_attention)
            queries, scale = self._queries(normed, layer, self.self_attention), self._scale
            mixed = causal_attention(
                queries, own.keys, own.values, mask=mask, scale=scale, bias=bias, of_nodes=of_nodes
            )
            cross = self._keys_values(encoded, layer, self.cross_attention)
            return self._rest(hidden, mixed, layer, cross, prompt_mask), (own, cross)

        hidden, made = over_layers(step, self._embed(params, self.decoder, tokens, positions), params[self.decoder])
        own, cross = zip(*made, strict=True) if isinstance(params[self.decoder], tuple) else made
        cache = Cache(own, mask, next_position, cross=cross, cross_mask=prompt_mask)
        return self._finish(params, self.decoder, hidden), cache

    def _encode(self, params: Params, prompt: Prompt) -> Float[Array, "batch tokens hidden"]:
        mask, places = jnp.asarray(prompt.mask)[:, None], jnp.arange(prompt.input_ids.shape[-1])
        bias = self._bias(params, self.encoder, places, places)

        def step(hidden: Array, layer: Layer, _: None) -> tuple[Array, None]:
            normed = self._before(hidden, layer, self.self_attention)
            own = self._keys_values(normed, layer, self.self_attention)
            queries, block = self._queries(normed, layer, self.self_attention), Block(own.keys, own.values, mask, bias)
            mixed = attention(queries, [block], scale=self._scale)
            hidden = self._after(hidden, mixed, layer, self.self_attention)
            return self._feed_forward(hidden, layer, self.encoder), None

        hidden = self._embed(params, self.encoder, jnp.asarray(prompt.input_ids), places)
        hidden, _ = over_layers(step, hidden, params[self.encoder])
        return self._finish(params, self.encoder, hidden)

    def _queries(
        self, states: Float[Array, "batch tokens hidden"], layer: Layer, part: str
    ) -> Float[Array, "batch heads 1 tokens head_dim"]:
        return to_heads(self._project(states, layer, part, "q"), self.spec.num_heads, 1)

    def _keys_values(self, states: Float[Array, "batch tokens hidden"], layer: Layer, part: str) -> KeysValues:
        keys, values = (to_heads(self._project(states, layer, part, kv), self.spec.num_heads) for kv in "kv")
        return KeysValues(keys, values)

    def _rest(
        self,
        hidden: Float[Array, "batch tokens hidden"],
        mixed: Float[Array, "batch tokens width"],
        layer: Layer,
        encoded: KeysValues,
        mask: Any,
    ) -> Float[Array, "batch tokens hidden"]:
        """A layer of the decoder from its attention to itself on."""
        part = self.cross_attention
        hidden = self._after(hidden, mixed, layer, self.self_attention)
        block = Block(encoded.keys, encoded.values, mask[:, None])
        queries = self._queries(self._before(hidden, layer, part), layer, part)
        hidden = self._after(hidden, attention(queries, [block], scale=self._scale), layer, part)
        return self._feed_forward(hidden, layer, self.decoder)
