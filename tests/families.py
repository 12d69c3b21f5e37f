# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family that is held to transformers' own results.

Weights are scaled up: with the usual initialisation logits are flat, scores are alike, and errors hide.
"""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

VOCABULARY = 64
PAD, EOS = 1, 2
DETAILS = {"return_dict_in_generate": True, "output_scores": True}  # what tests ask of a call
SPECIAL = {"eos_token_id": None, "pad_token_id": PAD, "bos_token_id": None}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 128}
WITHOUT_HEAD_DIM = {name: value for name, value in LLAMA.items() if name != "head_dim"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# One sliding layer and one full one, and a window shorter than the prompts and than the sequences after them.
MIXED = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
SEQ2SEQ = {"decoder_start_token_id": PAD}

DECODERS: dict[str, dict[str, Any]] = {
    "cohere2": LLAMA | MIXED,
    "deepseek_v3": WITHOUT_HEAD_DIM
    | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    | {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "falcon": SMALL | {"alibi": False},
    "gemma2": LLAMA | MIXED | {"query_pre_attn_scalar": 8},
    "gemma3_text": LLAMA | MIXED | {"query_pre_attn_scalar": 8},
    "gpt2": GPT2,
    "gpt_neox": {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")},
    "gptj": GPT2 | {"rotary_dim": 4},
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": 3},
    "olmo2": WITHOUT_HEAD_DIM,
    "opt": SMALL | {"ffn_dim": 48, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    "phi3": WITHOUT_HEAD_DIM,
    "qwen2": WITHOUT_HEAD_DIM,
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA | MOE,
    "smollm3": WITHOUT_HEAD_DIM | {"no_rope_layers": [1, 0]},
}
ALIBI: dict[str, dict[str, Any]] = {"bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    | {"max_position_embeddings": 64, "forced_eos_token_id": None}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    | SEQ2SEQ,
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4} | SEQ2SEQ,
}
FAMILIES = DECODERS | ALIBI | ENCODER_DECODERS
# Families that are in no list of ours: each is tried once. Padding and the first token of a decoder are as in their
# checkpoints: Marian has its last token for both; padding there would have no position in M2M-100, and would be masked
# in FSMT.
BART = ENCODER_DECODERS["bart"]
STARTS_WITH_EOS = BART | {"decoder_start_token_id": EOS}
TRIED: dict[str, dict[str, Any]] = {
    "blenderbot": BART | {"pad_token_id": 0},
    "fsmt": {name: value for name, value in STARTS_WITH_EOS.items() if name != "vocab_size"}
    | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]}
    | {"max_length": 20, "num_beams": 1},
    "gpt_bigcode": GPT2,
    "gpt_neo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 3}
    | {"attention_types": [[["global", "local"], 1]]},
    "led": STARTS_WITH_EOS
    | {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "lfm2": LLAMA | {"full_attn_idxs": [1]},
    "m2m_100": STARTS_WITH_EOS,
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "marian": BART | {"pad_token_id": VOCABULARY - 1, "decoder_start_token_id": VOCABULARY - 1},
    "mbart": STARTS_WITH_EOS,
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "mvp": STARTS_WITH_EOS,
    "nllb-moe": STARTS_WITH_EOS | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus": BART | {"pad_token_id": 0, "decoder_start_token_id": 0},
    "stablelm": WITHOUT_HEAD_DIM,
    "umt5": ENCODER_DECODERS["t5"] | {"pad_token_id": 0, "decoder_start_token_id": 0},
    "xglm": {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    | {"max_position_embeddings": 128},
}


def limited(limit: int) -> dict[str, dict[str, Any]]:
    """Configs of models that read sequences of more than `limit` tokens in another way."""
    rope: dict[str, Any] = {"rope_theta": 10000.0, "original_max_position_embeddings": limit}
    longrope = rope | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]}
    longrope = {"rope_parameters": longrope | {"partial_rotary_factor": 1.0}, "max_position_embeddings": 4 * limit}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return {
        "phi3": DECODERS["phi3"] | longrope | {"original_max_position_embeddings": limit},
        "llama": LLAMA | {"rope_parameters": dynamic, "max_position_embeddings": limit},
        "doge": LLAMA | {"keep_window_size": limit},  # which a trial of a few tokens does not see
        "qwen3": LLAMA | {"rope_parameters": rope | {"rope_type": "yarn", "factor": 4.0}},
        "gemma2": DECODERS["gemma2"] | {"sliding_window": limit},
    }


def build(family: str, *, seed: int = 0, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A new tiny model; `config` overrides fields, keywords go to transformers (`attn_implementation`, `dtype`)."""
    fields = {**SPECIAL, **(FAMILIES | TRIED).get(family, {}), **(config or {})}
    torch.manual_seed(seed)
    made = AutoConfig.for_model(family, **fields)
    auto = AutoModelForSeq2SeqLM if made.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(made, **kwargs).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


@cache
def shared(family: str) -> Any:
    """One model of a family for all tests that only read it."""
    return build(family)


def prompts(batch_size: int, length: int, *, padded: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts with their mask; padded ones have padding on the left, of different widths."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    mask = torch.ones_like(input_ids)
    if padded:
        for row in range(batch_size - 1):
            mask[row, : 2 * row + 3] = 0
    return {"input_ids": input_ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
