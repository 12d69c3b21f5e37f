# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: every token uses some of many feed-forward layers. Knows no attention and no checkpoint.

Tokens are sorted by expert, and multiplied group by group: shapes are static, and on a TPU no expert computes a token
that does not use it. (XLA's program for CPUs computes all of them.)

Source: Qwen3-MoE in transformers. Axes: M tokens, K experts of each, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .layers import ACTIVATIONS, Layer, linear
from .spec import Experts

# Rows [M * K, in], in groups, times [E, out, in]: axis 1 with axis 2.
_DIMENSIONS = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])


def mixture(
    x: Float[Array, "batch tokens hidden"], layer: Layer, spec: Experts, *, activation: str
) -> Float[Array, "batch tokens hidden"]:
    """The experts' outputs, weighed by the router; a layer has those of all experts stacked."""
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = route(tokens, layer, spec)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=spec.count)

    def times(rows: Array, name: str) -> Array:
        return lax.ragged_dot_general(rows, layer[f"mlp.experts.{name}.weight"], sizes, _DIMENSIONS)

    rows = tokens[order // spec.per_token]
    inner = ACTIVATIONS[activation](times(rows, "gate_proj")) * times(rows, "up_proj")
    out = times(inner, "down_proj")[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(out * weights[..., None], axis=1).reshape(x.shape)


def route(
    tokens: Float[Array, "tokens hidden"], layer: Layer, spec: Experts
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """The experts that each token uses, and their weights."""
    shares = jax.nn.softmax(linear(tokens, layer, "mlp.gate").astype(jnp.float32), axis=-1)
    weights, chosen = lax.top_k(shares, spec.per_token)
    if spec.is_normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights.astype(tokens.dtype)
