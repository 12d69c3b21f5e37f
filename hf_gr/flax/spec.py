# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a decoder is, read from transformers' configs: one description for all families. Knows no forward and no files.

A family is a choice of switches. Whatever a config asks for that no switch describes is refused by the field's name.

Axes: V vocabulary, H key-value heads, G query heads of each, D width of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Array

from .arrays import stacked, view
from .layers import ACTIVATIONS

if TYPE_CHECKING:
    from .decoder import DecoderScorer

EMBEDDING, HEAD, LAYERS, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.layers", "model.norm"
POSITIONS = "model.embed_positions.weight"
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")

Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class LayerNorms:
    """Where a layer has norms, by the names of their parameters; None where it has none.

    Attributes:
        before_attention: of the attention's input.
        after_attention: of its output, before it is added.
        before_mlp: of the feed-forward layers' input.
        after_mlp: of their output, before it is added.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> list[str]:
        """Of those that there are."""
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in places if name is not None]


AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = replace(AFTER, before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm")


@dataclass(frozen=True)
class Experts:
    """Feed-forward layers of which every token uses some.

    Attributes:
        count: of them.
        per_token: how many a token uses.
        size: width inside each.
        is_normalised: whether the weights of those that a token uses are divided by their sum.
    """

    count: int
    per_token: int
    size: int
    is_normalised: bool


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
        scale: of attention scores.
        inverse_frequencies: of the rotary embeddings, scaling included; of as many pairs of channels as are rotated.
        projection_bias: whether q, k and v have biases.
        output_bias: whether o has one.
        mlp_bias: whether the feed-forward layers have them.
        norm: of which kind norms are: see `layers.norm`.
        layer_norms: where they are.
        head_norms: whether queries and keys are normed, by head or over all heads together.
        is_gated: whether the feed-forward layers have a gate.
        experts: in place of the feed-forward layers; None for none.
        is_fused: whether checkpoints have q, k and v as one matrix, gate and up as another (Phi-3).
        embedding_scale: factor of the embeddings (Gemma).
        num_positions: of learned positions, added to the embeddings; None for none.
        is_tied: whether the embeddings are also the head.
        sliding_window: how many tokens a sliding layer sees, itself included.
        is_sliding: of each layer, whether it is sliding; empty if none is.
        sliding_frequencies: `inverse_frequencies` of sliding layers; None for the same.
        score_cap: attention scores are squashed to less than this (Gemma 2); None for no limit.
        logit_cap: logits are squashed to less than this; None for no limit.
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
    scale: float
    inverse_frequencies: tuple[float, ...] = ()
    projection_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "rms_plus_one", "rms_rounded_last", "layer"] = "rms"
    layer_norms: LayerNorms = LayerNorms()
    head_norms: Literal["none", "head", "all"] = "none"
    is_gated: bool = True
    experts: Experts | None = None
    is_fused: bool = False
    embedding_scale: float | None = None
    num_positions: int | None = None
    is_tied: bool = False
    sliding_window: int | None = None
    is_sliding: tuple[bool, ...] = ()
    sliding_frequencies: tuple[float, ...] | None = None
    score_cap: float | None = None
    logit_cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> DecoderSpec:
        """Read a transformers config of a family with rotary embeddings.

        Raises:
            NotImplementedError: a field that this decoder does not implement; the message names the field.
            ValueError: sizes that do not match.
        """
        family = config.model_type
        is_gemma = family.startswith("gemma")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # In transformers the other families ignore these fields.
        reads_bias = ("gemma", "gemma2", "gemma3_text", "llama", "olmo2", "qwen3", "qwen3_moe")
        has_bias = family in reads_bias and bool(config.attention_bias)
        is_sliding = _sliding_layers(config)
        of_full, of_sliding = _rotary(config, head_dim=head_dim, is_sliding=is_sliding)
        has_caps = family in ("gemma2", "gemma3_text")
        spec = cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            activation=check_activation(config, "hidden_activation" if has_caps else "hidden_act"),
            norm_eps=config.rms_norm_eps,
            scale=(config.query_pre_attn_scalar if has_caps else head_dim) ** -0.5,
            inverse_frequencies=of_full,
            projection_bias=has_bias or family == "qwen2",
            output_bias=has_bias,
            mlp_bias=family == "llama" and bool(config.mlp_bias),
            norm="rms_plus_one" if is_gemma else "rms_rounded_last" if family == "olmo2" else "rms",
            layer_norms=AROUND if has_caps else AFTER if family == "olmo2" else LayerNorms(),
            head_norms="all" if family == "olmo2" else "head" if family in _NORMS_HEADS else "none",
            experts=_experts(config) if family == "qwen3_moe" else None,
            is_fused=family == "phi3",
            embedding_scale=math.sqrt(config.hidden_size) if is_gemma else None,
            is_tied=bool(config.tie_word_embeddings),
            sliding_window=config.sliding_window if any(is_sliding) else None,
            is_sliding=is_sliding if any(is_sliding) else (),
            sliding_frequencies=of_sliding,
            score_cap=config.attn_logit_softcapping if family == "gemma2" else None,
            logit_cap=config.final_logit_softcapping if has_caps else None,
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
        from .decoder import DecoderScorer

        return DecoderScorer(self)

    @property
    def embedding(self) -> str:
        """The name of the embeddings in checkpoints."""
        return EMBEDDING

    @property
    def stacks(self) -> dict[str, int]:
        """Where the scorer finds the parameters of equal layers, and how many layers there are."""
        return {LAYERS: self.num_layers}

    @property
    def aliases(self) -> dict[str, str]:
        """A checkpoint's other names for a tensor, as in transformers' tied weights."""
        return {HEAD: EMBEDDING} if self.is_tied else {}

    @property
    def optional(self) -> frozenset[str]:
        """Parameters that are zero if a checkpoint has none."""
        return frozenset()

    def untie(self) -> DecoderSpec:
        """The same decoder with a head of its own."""
        return replace(self, is_tied=False)

    def check_length(self, num_tokens: int, *, of_encoder: int = 0) -> None:
        """Refuse sequences with more tokens than learned positions.

        Args:
            num_tokens: that the decoder computes: prompt, padding and all generated tokens but the last.
            of_encoder: none, for a decoder.

        Raises:
            ValueError: more tokens than positions.
        """
        if self.num_positions is not None:
            check_positions(num_tokens, self.num_positions)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of parameters in checkpoints."""
        hidden = self.hidden_size
        norms: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in self.layer_norms.names}
        layer = norms | self._of_attention() | self._of_mlp()
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for place in range(self.num_layers):
            shapes |= {f"{LAYERS}.{place}.{name}": shape for name, shape in layer.items()}
        shapes[f"{NORM}.weight"] = (hidden,)
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, hidden)}

    def arrange(self, arrays: Arrays) -> Arrays:
        """A checkpoint's parameters as the scorer takes them: fused matrices are split, experts stacked.

        Args:
            arrays: by the names of `shapes`.
        """
        if self.is_fused:
            return _split(arrays, self._fused())
        return arrays if self.experts is None else _stack_experts(arrays)

    def _of_attention(self) -> dict[str, tuple[int, ...]]:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self._keys
        if self.is_fused:
            return {
                "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
            }
        shapes: dict[str, tuple[int, ...]] = {}
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            shapes |= _linear(f"self_attn.{part}_proj", (width, hidden), self.projection_bias)
        shapes |= _linear("self_attn.o_proj", (hidden, queries), self.output_bias)
        if self.head_norms != "none":
            of_all = self.head_norms == "all"
            shapes["self_attn.q_norm.weight"] = (queries if of_all else self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (keys if of_all else self.head_dim,)
        return shapes

    def _of_mlp(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.is_fused:
            return {"mlp.gate_up_proj.weight": (2 * inner, hidden), "mlp.down_proj.weight": (hidden, inner)}
        if self.experts is not None:
            shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.experts.count, hidden)}
            for place in range(self.experts.count):
                name, size = f"mlp.experts.{place}", self.experts.size
                shapes |= {f"{name}.{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
                shapes[f"{name}.down_proj.weight"] = (hidden, size)
            return shapes
        shapes = {}
        for part in ("gate", "up"):
            shapes |= _linear(f"mlp.{part}_proj", (inner, hidden), self.mlp_bias)
        return shapes | _linear("mlp.down_proj", (hidden, inner), self.mlp_bias)

    def _fused(self) -> dict[str, dict[str, int]]:
        """Into what fused matrices are split, and how many outputs each part has."""
        queries, inner = self.num_heads * self.head_dim, self.intermediate_size
        return {
            "qkv_proj": {"q_proj": queries, "k_proj": self._keys, "v_proj": self._keys},
            "gate_up_proj": {"gate_proj": inner, "up_proj": inner},
        }

    @property
    def _keys(self) -> int:
        return self.num_key_value_heads * self.head_dim


_NORMS_HEADS = ("gemma3_text", "qwen3", "qwen3_moe")
_HAS_LAYER_TYPES = ("gemma2", "gemma3_text", "qwen2", "qwen3")
_ALL_SLIDE = ("mistral", "phi3", "qwen3_moe")  # have no layer types: all layers are sliding if there is a window


def inverse_frequencies(fields: Mapping[str, Any], *, width: int) -> tuple[float, ...]:
    """The frequencies of rotary embeddings, in fp32 as transformers computes them.

    Args:
        fields: `config.rope_parameters`, or those of one type of layers.
        width: channels of a head that are rotated.

    Raises:
        NotImplementedError: a scaling other than `linear` and `llama3`.

    Source: transformers' `ROPE_INIT_FUNCTIONS`; Llama 3.1 for `llama3`.
    """
    kind = fields.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise NotImplementedError(
            f"config.rope_parameters has rope_type={kind!r}, expected 'default', 'linear' or 'llama3': the others are "
            "not implemented in Flax; use backend='torch'"
        )
    one = np.float32(1)
    exponents = np.arange(0, width, 2).astype(np.float32) / np.float32(width)
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


def check_activation(config: Any, field: str) -> str:
    """The activation that a field names.

    Raises:
        NotImplementedError: one that is not implemented here.
    """
    name = getattr(config, field)
    if name not in ACTIVATIONS:
        raise NotImplementedError(
            f"config.{field}={name!r}, expected one of {', '.join(ACTIVATIONS)}: use backend='torch'"
        )
    return name


def check_positions(num_tokens: int, num_positions: int, what: str = "sequences") -> None:
    """Refuse more tokens than a model has learned positions for.

    Raises:
        ValueError: more tokens than positions.
    """
    if num_tokens > num_positions:
        raise ValueError(
            f"{what} have {num_tokens} tokens, expected at most {num_positions}, for which the model has positions: "
            "shorten the prompts"
        )


def _rotary(
    config: Any, *, head_dim: int, is_sliding: tuple[bool, ...]
) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """The frequencies of full layers, and those of sliding ones if they have their own (Gemma 3)."""
    fields, family = config.rope_parameters, config.model_type
    if family == "gemma3_text":
        full = inverse_frequencies(fields["full_attention"], width=head_dim)
        if not any(is_sliding):
            return full, None
        return full, inverse_frequencies(fields["sliding_attention"], width=head_dim)
    part = fields.get("partial_rotary_factor", 1.0)
    if part != 1.0 and family != "phi3":
        raise NotImplementedError(
            f"config.rope_parameters has partial_rotary_factor={part}, expected 1.0: "
            "partial rotary embeddings are not implemented in Flax; use backend='torch'"
        )
    return inverse_frequencies(fields, width=int(head_dim * part)), None


def _sliding_layers(config: Any) -> tuple[bool, ...]:
    """Of each layer, whether it is sliding."""
    num_layers = config.num_hidden_layers
    if config.model_type in _ALL_SLIDE:
        return (config.sliding_window is not None,) * num_layers
    if config.model_type not in _HAS_LAYER_TYPES:
        return (False,) * num_layers
    kinds = config.layer_types
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(
            f"config.layer_types has {', '.join(sorted(unknown))}, expected full_attention or sliding_attention: "
            "use backend='torch'"
        )
    return tuple(kind == "sliding_attention" for kind in kinds[:num_layers])


def _experts(config: Any) -> Experts:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise NotImplementedError(
            f"config.mlp_only_layers={config.mlp_only_layers} and decoder_sparse_step={config.decoder_sparse_step}, "
            "expected [] and 1: layers without experts among others are not implemented in Flax; use backend='torch'"
        )
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
    )


def _linear(name: str, shape: tuple[int, int], has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": shape}
    return {**weight, f"{name}.bias": shape[:1]} if has_bias else weight


def _split(arrays: Arrays, parts: Mapping[str, Mapping[str, int]]) -> Arrays:
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        fused = name.split(".")[-2] if name.count(".") else name
        if fused not in parts:
            found[name] = array
            continue
        rows, start = view(array), 0
        for part, size in parts[fused].items():
            found[name.replace(fused, part)] = rows[start : start + size]
            start += size
    return found


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
