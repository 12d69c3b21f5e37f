# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The building blocks of models: pure functions of arrays. Knows no model, no checkpoint and no scorer.

Numbers follow transformers: norms, softmax and logits in fp32, everything else in the parameters' dtype.

Axes: B batch, H key-value heads, G query heads of each of those, N queries, S keys, D width of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Layer: TypeAlias = Mapping[str, Array]  # the parameters of one layer, by their names within it
Layers: TypeAlias = (
    "tuple[Layer, ...] | Layer"  # one by one, or stacked: every array then has a leading axis of layers
)

QUERIES_AT_ONCE = 256  # of a causal prompt: keys after a whole block of queries are skipped
MAX_BLOCKS = 8  # of a causal prompt: each is compiled as code of its own
# With fewer layers than this, each is compiled on its own: XLA's loops copy a layer's parameters before using them
# (on a CPU 5 to 50 % of a forward), but their compile time does not grow with depth.
MIN_SCANNED_LAYERS = 9

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


def linear(x: Float[Array, "*rows n_in"], layer: Layer, name: str) -> Float[Array, "*rows n_out"]:
    """`torch.nn.Linear` with the parameters `name.weight` `[out, in]` and, if there is one, `name.bias`."""
    y = _times_transposed(x, layer[f"{name}.weight"])
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def to_logits(x: Float[Array, "*rows width"], weight: Float[Array, "vocab width"]) -> Float[Array, "*rows vocab"]:
    """Logits, in fp32 whatever the parameters' dtype."""
    return _times_transposed(x, weight, dtype=jnp.float32)


def rms_norm(
    x: Float[Array, "*rows width"],  # what to norm
    weight: Float[Array, " width"],  # factors of channels
    *,
    eps: float,  # added to the mean square
    plus: float = 0.0,  # added to weights: 1 for Gemma, whose weights are differences from that
    rounds_last: bool = False,  # whether weights multiply before results are rounded to the dtype of `x`, or after
) -> Float[Array, "*rows width"]:
    """Root-mean-square norm."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if rounds_last:
        return (normed * (plus + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * normed.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, " width"], bias: Float[Array, " width"], *, eps: float
) -> Float[Array, "*rows width"]:
    """`torch.nn.LayerNorm`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def soft_cap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Values squashed to less than `cap` (Gemma 2); the same if it is None."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def rotation(
    positions: Int[Array, "batch tokens"], inverse_frequencies: Sequence[float], dtype: Any
) -> tuple[Float[Array, "batch tokens half"], Float[Array, "batch tokens half"]]:
    """Cosines and sines of rotary embeddings (RoFormer, section 3.2.2)."""
    angles = positions[..., None].astype(jnp.float32) * np.asarray(inverse_frequencies, dtype=np.float32)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(
    x: Float[Array, "batch *heads tokens width"],
    cos_sin: tuple[Float[Array, "batch tokens half"], Float[Array, "batch tokens half"]],
) -> Float[Array, "batch *heads tokens width"]:
    """Rotate every pair of channels `(i, i + half)` by the angle of its position; channels after those stay."""
    cos, sin = (jnp.expand_dims(part, tuple(range(1, x.ndim - 2))) for part in cos_sin)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def to_heads(x: Float[Array, "batch tokens width"], *heads: int) -> Float[Array, "batch *heads tokens head_dim"]:
    """Channels to heads, which come before tokens: `[B, N, H * G * D] -> [B, H, G, N, D]`."""
    batch, tokens, _ = x.shape
    return jnp.moveaxis(x.reshape(batch, tokens, *heads, -1), 1, -2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """Keys that queries may attend to, with their values."""

    keys: Float[Array, "batch heads keys head_dim"]  # of each key-value head; its query heads share them
    values: Float[Array, "batch heads keys head_dim"]  # of the same heads
    mask: Bool[Array, "batch _ keys"]  # which keys each query sees; one row if all queries see the same
    # added to scores; None for nothing
    bias: Float[Array, "*rows heads groups #queries keys"] | None = None


def attention(
    # of all query heads, grouped by the key-value head that they share
    queries: Float[Array, "batch heads groups queries head_dim"],
    blocks: Sequence[Block],  # the keys and values
    *,
    scale: float,  # of scores, before their bias
    cap: float | None = None,  # see `soft_cap`, of scores
) -> Float[Array, "batch queries width"]:
    """Attention over several blocks of keys at once: one softmax over all, and no block is moved or repeated.

    A query that sees nothing gets some average of the values: results at padding mean nothing, but are finite.

    Source: xGR, section 5, over a shared and an unshared cache.
    """
    batch, heads, groups, num_queries, head_dim = queries.shape
    rows = queries.reshape(batch, heads, groups * num_queries, head_dim)
    scores = []
    for block in blocks:
        found = soft_cap(_batched(rows, block.keys, axis=3, dtype=jnp.float32) * scale, cap)
        found = found.reshape(batch, heads, groups, num_queries, -1)
        if block.bias is not None:
            found = found + block.bias
        scores.append(jnp.where(block.mask[:, None, None], found, jnp.finfo(jnp.float32).min))
    largest = jnp.stack([jnp.max(part, axis=-1) for part in scores]).max(axis=0)[..., None]
    weights = [jnp.exp(part - lax.stop_gradient(largest)) for part in scores]
    totals = [jnp.sum(part, axis=-1) for part in weights]
    total = sum(totals[1:], start=totals[0])
    parts = [
        _batched(part.astype(queries.dtype).reshape(*rows.shape[:3], -1), block.values, axis=2, dtype=jnp.float32)
        for part, block in zip(weights, blocks, strict=True)
    ]
    mixed = sum(parts[1:], start=parts[0]).reshape(queries.shape) / total[..., None]
    return jnp.moveaxis(mixed.astype(queries.dtype), 3, 1).reshape(batch, num_queries, -1)


def causal_attention(
    queries: Float[Array, "batch heads groups tokens head_dim"],  # of the prompt, and of the nodes after it
    keys: Float[Array, "batch heads tokens head_dim"],  # of the same tokens
    values: Float[Array, "batch heads tokens head_dim"],  # of the same tokens
    *,
    mask: Bool[Array, "batch prompt"],  # real tokens of the prompt
    scale: float,  # of scores, before their bias
    bias: Float[Array, "*rows heads groups tokens tokens"] | None = None,  # added to scores; None for nothing
    of_nodes: Bool[Array, "batch nodes tokens"] | None = None,  # what the nodes see
    # how many tokens one sees, itself included; None for all. It is not applied to nodes.
    window: int | Int[Array, ""] | None = None,
    cap: float | None = None,  # see `attention`
) -> Float[Array, "batch tokens width"]:
    """Attention of a prompt to itself: a token sees the real tokens up to itself; then of nodes, if there are some."""
    length = mask.shape[-1]
    step = max(QUERIES_AT_ONCE, -(-length // MAX_BLOCKS))
    parts = []
    for start in range(0, length, step):
        end = min(start + step, length)
        # Keys before every query's window are skipped, if its size is known here.
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        distances = np.arange(start, end)[:, None] - np.arange(first, end)
        is_seen = distances >= 0
        if window is not None:
            is_seen = is_seen & (distances < window)
        block = Block(
            keys[:, :, first:end],
            values[:, :, first:end],
            mask[:, None, first:end] & is_seen,
            None if bias is None else bias[..., start:end, first:end],
        )
        parts.append(attention(queries[..., start:end, :], [block], scale=scale, cap=cap))
    if of_nodes is not None:
        block = Block(keys, values, of_nodes, None if bias is None else bias[..., length:, :])
        parts.append(attention(queries[..., length:, :], [block], scale=scale, cap=cap))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def over_layers(
    step: Callable[[Any, Layer, Any], tuple[Any, Any]],  # one layer
    carry: Any,  # the first layer's input
    layers: Layers,  # parameters, one by one or stacked
    given: Any = None,  # each layer's further input, one by one or stacked as the layers are; None for none
) -> tuple[Any, Any]:
    """Run layers in sequence, `carry, made = step(carry, layer, given)`: the last carry, and what all layers made."""
    if isinstance(layers, tuple):
        made = []
        for place, layer in enumerate(layers):
            carry, new = step(carry, layer, None if given is None else given[place])
            made.append(new)
        return carry, tuple(made)

    return lax.scan(lambda carry, own: step(carry, *own), carry, (layers, given))


def relative_buckets(num_buckets: int, max_distance: int, *, is_causal: bool) -> npt.NDArray[np.int32]:
    """T5's buckets of distances, key minus query, from `-max_distance` to `max_distance`: far ones share theirs.

    Source: T5, section 2.1; transformers' `_relative_position_bucket`, to the rounding of its fp32 logarithm.
    """
    distances = np.arange(-max_distance, max_distance + 1)
    count, offset, steps = num_buckets, 0, np.maximum(-distances, 0)
    if not is_causal:  # as many for keys after their query
        count //= 2
        offset, steps = np.where(distances > 0, count, 0), np.abs(distances)
    exact = count // 2
    ratio = np.log(np.maximum(steps, 1).astype(np.float32) / np.float32(exact))
    ratio /= np.float32(np.log(max_distance / exact))
    far = np.minimum(exact + (ratio * np.float32(count - exact)).astype(np.int64), count - 1)
    return (offset + np.where(steps < exact, steps, far)).astype(np.int32)


def relative_bias(
    weight: Float[Array, "buckets heads"],
    buckets: npt.NDArray[np.int32],  # see `relative_buckets`
    queries: Int[Array, "*rows queries"],
    keys: Int[Array, "*rows keys"],
) -> Float[Array, "*rows heads 1 queries keys"]:
    """The bias of every query for every key, by their positions, which may differ from row to row."""
    most = len(buckets) // 2
    distances = jnp.clip(keys[..., None, :] - queries[..., None], -most, most)
    return jnp.moveaxis(weight[buckets][distances + most], -1, -3)[..., None, :, :]


def _times_transposed(x: Array, weight: Array, dtype: Any = None) -> Array:
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


def _batched(rows: Array, other: Array, *, axis: int, dtype: Any) -> Array:
    """Rows of each head times the keys or values of that head, over one of their axes."""
    return lax.dot_general(rows, other, (((3,), (axis,)), ((0, 1), (0, 1))), preferred_element_type=dtype)
