# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers' architectures, shrunk by the names of their fields alone.

Those are omitted that this cannot shrink, that are too slow (hybrids of Mamba, Pegasus-X), whose scores depend on the
padding of a prompt (RoFormer, TrOCR, MiniMax), whose positions depend on tokens (M2M-100, FSMT), and those with a
`generate` of their own (SeamlessM4T).
"""

from typing import Any

from families import EOS, VOCABULARY, build
from transformers import CONFIG_MAPPING

# By size, the fields of that meaning under each name that configs give it.
SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size src_vocab_size tgt_vocab_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_experts_per_tok num_key_value_heads n_group",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts conv_kernel",
    8: "head_dim d_kv state_size qk_rope_head_dim qk_nope_head_dim v_head_dim q_lora_rank kv_lora_rank",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size n_embd d_model word_embed_proj_dim attention_hidden_size embedding_size",
    48: "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx",
}
OTHERS = {"is_decoder": True, "forced_eos_token_id": None, "forced_bos_token_id": None, "topk_group": 1}
NAMES = """
afmoe apertus arcee aria_text beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot
blenderbot-small camembert cohere cohere2_moe ctrl data2vec-text deepseek_v4 diffllama doge electra ernie ernie4_5
ernie4_5_moe exaone4 exaone_moe flint gemma glm4_moe gpt_bigcode gpt_neox_japanese gpt_oss granite granite_swa
granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
inkling2_text inkling_text internlm3 iquestcoder jais2 jetmoe kolibri1 laguna led lfm2 llama4_text longt5 mamba
mbart megatron-bert mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral ministral3 mixtral moshi mpt mt5
mvp nanochat nemotron olmo olmo3 olmoe openai-gpt pegasus persimmon phi phimoe plbart qwen2_moe rembert roberta
roberta-prelayernorm seed_oss solar_open stablelm starcoder2 switch_transformers umt5 vaultgemma xglm xlm-roberta
xlm-roberta-xl
""".split()


def build_small(kind: str, *, seed: int) -> Any:
    """A model of one of `NAMES`."""
    default = CONFIG_MAPPING[kind]()
    fields = {name: size for size, names in SIZES.items() for name in names.split()} | OTHERS
    own = {name: value for name, value in fields.items() if hasattr(default, name)}
    start = {"decoder_start_token_id": EOS} if default.is_encoder_decoder else {}
    return build(kind, seed=seed, config=own | start)
