# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The architectures that Flax has, read from transformers' configs. Knows no forward and no files.

A family with rotary embeddings is a row of `FAMILIES`. A config field that asks for something unsupported is refused
by name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from .layers import ACTIVATIONS
from .spec import Experts, Names, Spec, StackNames

_LLAMA = {
    "before_self": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    **{f"self.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"self.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_MATRICES = {part: name for part, name in _LLAMA.items() if "." in part}
_AFTER = {"after_self": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_AROUND = {"before_self": "input_layernorm", "before_mlp": "pre_feedforward_layernorm", **_AFTER}


def _of_llama(parts: Mapping[str, str], **options: Any) -> Names:
    return Names("model.embed_tokens.weight", StackNames("model.layers", parts, "model.norm"), **options)


def _of_t5(up: Mapping[str, str]) -> Names:
    """T5's names, with those of the matrices into its feed-forward layers."""

    def stack(name: str, *attentions: tuple[str, str]) -> StackNames:
        parts = {}
        for place, (part, attention) in enumerate(attentions):
            parts |= {f"{part}.{which}": f"layer.{place}.{attention}.{which}" for which in "qkvo"}
            parts[f"before_{part}"] = f"layer.{place}.layer_norm"
        last = f"layer.{len(attentions)}"
        parts |= {f"mlp.{part}": f"{last}.DenseReluDense.{name}" for part, name in {**up, "down": "wo"}.items()}
        parts["before_mlp"] = f"{last}.layer_norm"
        relative = "layer.0.SelfAttention.relative_attention_bias"
        return StackNames(f"{name}.block", parts, f"{name}.final_layer_norm", relative=relative)

    own, cross = ("self", "SelfAttention"), ("cross", "EncDecAttention")
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    return Names("shared.weight", stack("decoder", own, cross), stack("encoder", own), copies=copies)


def _of_bart() -> Names:
    def stack(side: str, **attentions: str) -> StackNames:
        parts = {}
        for part, name in attentions.items():
            parts |= {f"{part}.{which}": f"{name}.{which}_proj" for which in "qkv"}
            parts |= {f"{part}.o": f"{name}.out_proj", f"summed_{part}": f"{name}_layer_norm"}
        parts |= {"mlp.up": "fc1", "mlp.down": "fc2", "summed_mlp": "final_layer_norm"}
        around = {"positions": f"{side}.embed_positions", "embedding_norm": f"{side}.layernorm_embedding"}
        return StackNames(f"{side}.layers", parts, **around)

    encoder = stack("model.encoder", self="self_attn")
    decoder = stack("model.decoder", self="self_attn", cross="encoder_attn")
    inputs = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    return Names(
        "model.shared.weight",
        decoder,
        encoder,
        head_bias="final_logits_bias",
        copies=(*inputs, *(f"model.{name}" for name in inputs)),
        prefix="model.",
    )


QKV = ("self.q", "self.k", "self.v")
LLAMA, OLMO2, GEMMA2 = _of_llama(_LLAMA), _of_llama(_AFTER | _MATRICES), _of_llama(_AROUND | _MATRICES)
PHI3 = _of_llama(_LLAMA, fused={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": ("mlp.gate", "mlp.up")})
T5, T5_GATED, BART = _of_t5({"up": "wi"}), _of_t5({"gate": "wi_0", "up": "wi_1"}), _of_bart()
GPT2 = Names(
    "transformer.wte.weight",
    StackNames(
        "transformer.h",
        {
            "before_self": "ln_1",
            "before_mlp": "ln_2",
            **{part: f"attn.{part[-1]}_proj" for part in QKV},
            "self.o": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        norm="transformer.ln_f",
        positions="transformer.wpe",
    ),
    fused={"attn.c_attn": QKV},
    is_transposed=True,
    prefix="transformer.",
)


def _spec(config: Any, **own: Any) -> Spec:
    """A spec with the fields that all configs have under one name, and a family's own."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "is_tied": bool(config.tie_word_embeddings),
    }
    return Spec(**{**shared, **own})


def _read_gpt2(config: Any) -> Spec:
    _refuse(config, add_cross_attention=False, scale_attn_by_inverse_layer_idx=False)
    return _spec(
        config,
        names=GPT2,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        activation=_activation(config, "activation_function"),
        norm_eps=config.layer_norm_epsilon,
        biases=frozenset(GPT2.decoder.parts),
        norm="layer",
        num_positions=config.n_positions,
        **({} if config.scale_attn_weights else {"scale": 1.0}),
    )


def _read_bart(config: Any) -> Spec:
    _refuse(config, is_encoder_decoder=True)
    if (number := config.decoder_attention_heads) != config.encoder_attention_heads:
        own = f"encoder_attention_heads={config.encoder_attention_heads}"
        raise _lacking(f"config.decoder_attention_heads={number}", own)
    return _spec(
        config,
        names=BART,
        intermediate_size=config.decoder_ffn_dim,
        num_layers=config.decoder_layers,
        activation=_activation(config, "activation_function"),
        norm_eps=1e-5,  # torch's
        num_encoder_layers=config.encoder_layers,
        encoder_size=config.encoder_ffn_dim,
        biases=frozenset(BART.decoder.parts),
        norm="layer",
        embedding_scale=math.sqrt(config.d_model) if config.scale_embedding else None,
        num_positions=config.max_position_embeddings,
        position_offset=2,
    )


def _read_t5(config: Any) -> Spec:
    if config.dense_act_fn not in ACTIVATIONS:
        expected = f"one of {', '.join(ACTIVATIONS)}, with or without 'gated-' before it"
        raise _lacking(f"config.feed_forward_proj={config.feed_forward_proj!r}", expected)
    _refuse(config, is_encoder_decoder=True)
    far, number = config.relative_attention_max_distance, config.relative_attention_num_buckets
    if far <= number // 2:
        expected = f"more than half of relative_attention_num_buckets={number}, so that there are far distances"
        raise _lacking(f"config.relative_attention_max_distance={far}", expected)
    return _spec(
        config,
        names=T5_GATED if config.is_gated_act else T5,
        intermediate_size=config.d_ff,
        num_layers=config.num_decoder_layers,
        activation=config.dense_act_fn,
        norm_eps=config.layer_norm_epsilon,
        scale=1.0,
        num_encoder_layers=config.num_layers,
        encoder_size=config.d_ff,
        num_buckets=config.relative_attention_num_buckets,
        max_distance=config.relative_attention_max_distance,
        # Older releases of transformers have no such field; there, tying implies it.
        scales_outputs=bool(getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)),
        is_tied=True,
    )


@dataclass(frozen=True)
class Rotary:
    """A family of decoders with rotary embeddings: what transformers' code does and the config does not say."""

    names: Names = LLAMA  # of its parameters
    # see `Spec.norm`; Gemma's, "rms_plus_one", also scale the embeddings
    norm: Literal["rms", "rms_plus_one", "rms_rounded_last"] = "rms"
    head_norms: Literal["none", "head", "all"] = "none"  # see `Spec.head_norms`
    # the fields of its config that it reads: `attention_bias` of q, k, v and o, `mlp_bias` of the rest
    bias_fields: tuple[str, ...] = ()
    has_qkv_bias: bool = False  # whether q, k and v always have biases
    # whether layers slide: none, those that `layer_types` lists, or all if there is a window
    windows: Literal["none", "listed", "all"] = "none"
    caps_scores: bool = False  # whether it reads `attn_logit_softcapping`
    is_partly_rotary: bool = False  # whether it reads `partial_rotary_factor`

    def __call__(self, config: Any) -> Spec:
        """Read a config of the family."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        is_capped = hasattr(config, "query_pre_attn_scalar")  # of Gemma 2 and 3
        is_sliding = self._sliding_layers(config)
        of_full, of_sliding = self._frequencies(config, head_dim=head_dim, slides=any(is_sliding))
        spec = _spec(
            config,
            names=self.names,
            intermediate_size=config.intermediate_size,
            num_key_value_heads=config.num_key_value_heads,
            activation=_activation(config, "hidden_activation" if is_capped else "hidden_act"),
            norm_eps=config.rms_norm_eps,
            scale=(config.query_pre_attn_scalar if is_capped else head_dim) ** -0.5,
            inverse_frequencies=of_full,
            biases=self._biases(config),
            norm=self.norm,
            head_norms=self.head_norms,
            experts=_experts(config) if hasattr(config, "num_experts") else None,
            embedding_scale=math.sqrt(config.hidden_size) if self.norm == "rms_plus_one" else None,
            sliding_window=config.sliding_window if any(is_sliding) else None,
            is_sliding=is_sliding if any(is_sliding) else (),
            sliding_frequencies=of_sliding,
            score_cap=config.attn_logit_softcapping if self.caps_scores else None,
            logit_cap=config.final_logit_softcapping if is_capped else None,
        )
        if getattr(config, "use_bidirectional_attention", None):
            _refuse(config, use_bidirectional_attention=False)
        if spec.num_heads % spec.num_key_value_heads:
            raise ValueError(
                f"config.num_attention_heads={spec.num_heads}, expected a multiple of num_key_value_heads="
                f"{spec.num_key_value_heads}: the config does not belong to a model"
            )
        if spec.head_dim % 2:
            raise ValueError(f"config.head_dim={spec.head_dim}, expected an even number: rotary embeddings turn pairs")
        return spec

    def _biases(self, config: Any) -> frozenset[str]:
        has = {field for field in self.bias_fields if getattr(config, field)}
        of_mlp = ("mlp.gate", "mlp.up", "mlp.down") if "mlp_bias" in has else ()
        of_attention = (*QKV, "self.o") if "attention_bias" in has else QKV if self.has_qkv_bias else ()
        return frozenset((*of_attention, *of_mlp))

    def _sliding_layers(self, config: Any) -> tuple[bool, ...]:
        """Of each layer, whether it is sliding."""
        num_layers = config.num_hidden_layers
        if self.windows != "listed":
            return (self.windows == "all" and config.sliding_window is not None,) * num_layers
        if unknown := set(config.layer_types) - {"full_attention", "sliding_attention"}:
            raise _lacking(
                f"config.layer_types has {', '.join(sorted(unknown))}", "full_attention or sliding_attention"
            )
        return tuple(kind == "sliding_attention" for kind in config.layer_types[:num_layers])

    def _frequencies(
        self, config: Any, *, head_dim: int, slides: bool
    ) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
        """The frequencies of full layers, and those of sliding ones if they have their own (Gemma 3)."""
        fields = config.rope_parameters
        if "full_attention" in fields:
            full, own = (inverse_frequencies(fields[f"{of}_attention"], width=head_dim) for of in ("full", "sliding"))
            return full, own if slides else None
        part = fields.get("partial_rotary_factor", 1.0)
        if part != 1.0 and not self.is_partly_rotary:
            raise _lacking(f"config.rope_parameters has partial_rotary_factor={part}", "1.0")
        return inverse_frequencies(fields, width=int(head_dim * part)), None


_GEMMA: dict[str, Any] = {"norm": "rms_plus_one", "bias_fields": ("attention_bias",)}
_QWEN3: dict[str, Any] = {"head_norms": "head", "bias_fields": ("attention_bias",)}
# From a config's `model_type` to the class of transformers that loads such checkpoints, and to what reads the config.
FAMILIES: Mapping[str, tuple[str, Callable[[Any], Spec]]] = MappingProxyType(
    {
        "bart": ("BartForConditionalGeneration", _read_bart),
        "gemma": ("GemmaForCausalLM", Rotary(**_GEMMA)),
        "gemma2": ("Gemma2ForCausalLM", Rotary(GEMMA2, **_GEMMA, windows="listed", caps_scores=True)),
        "gemma3_text": ("Gemma3ForCausalLM", Rotary(GEMMA2, **_GEMMA, head_norms="head", windows="listed")),
        "gpt2": ("GPT2LMHeadModel", _read_gpt2),
        "llama": ("LlamaForCausalLM", Rotary(bias_fields=("attention_bias", "mlp_bias"))),
        "mistral": ("MistralForCausalLM", Rotary(windows="all")),
        "olmo2": (
            "Olmo2ForCausalLM",
            Rotary(OLMO2, "rms_rounded_last", head_norms="all", bias_fields=("attention_bias",)),
        ),
        "phi3": ("Phi3ForCausalLM", Rotary(PHI3, windows="all", is_partly_rotary=True)),
        "qwen2": ("Qwen2ForCausalLM", Rotary(has_qkv_bias=True, windows="listed")),
        "qwen3": ("Qwen3ForCausalLM", Rotary(**_QWEN3, windows="listed")),
        "qwen3_moe": ("Qwen3MoeForCausalLM", Rotary(**_QWEN3, windows="all")),
        "t5": ("T5ForConditionalGeneration", _read_t5),
    }
)


def to_spec(config: Any) -> Spec:
    """The static facts of the model that a transformers config describes."""
    check_family(getattr(config, "model_type", None))
    if getattr(config, "quantization_config", None) is not None:
        raise _lacking("config.quantization_config is there", "no quantised checkpoint")
    if not getattr(config, "is_causal", True):  # makes any decoder of transformers see later tokens
        _refuse(config, is_causal=True)
    return FAMILIES[config.model_type][1](config)


def check_family(model_type: str | None) -> None:
    """Refuse architectures that Flax does not have."""
    if model_type not in FAMILIES:
        raise _lacking(f"config.model_type={model_type!r}", f"one of {', '.join(FAMILIES)}")


def inverse_frequencies(fields: Mapping[str, Any], *, width: int) -> tuple[float, ...]:
    """The frequencies of rotary embeddings, in fp32 as transformers computes them.

    Source: transformers' `ROPE_INIT_FUNCTIONS`; Llama 3.1 for `llama3`.
    """
    kind = fields.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise _lacking(f"config.rope_parameters has rope_type={kind!r}", "'default', 'linear' or 'llama3'")
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


def _refuse(config: Any, **expected: Any) -> None:
    """Refuse fields with other values."""
    for field, wanted in expected.items():
        if (value := getattr(config, field)) != wanted:
            raise _lacking(f"config.{field}={value!r}", repr(wanted))


def _lacking(found: str, expected: str) -> NotImplementedError:
    return NotImplementedError(f"{found}, expected {expected}: not implemented in Flax; use backend='torch'")


def _activation(config: Any, field: str) -> str:
    """The activation that a field names."""
    name = getattr(config, field)
    if name not in ACTIVATIONS:
        raise _lacking(f"config.{field}={name!r}", f"one of {', '.join(ACTIVATIONS)}")
    return name


def _experts(config: Any) -> Experts:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        found = f"config.mlp_only_layers={config.mlp_only_layers} and decoder_sparse_step={config.decoder_sparse_step}"
        raise _lacking(found, "[] and 1: experts in every layer")
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
    )
