"""Every family of decoders, a row of settings each: official checkpoint in, the same numbers and text, and back.

A row is a model type and settings of its official config class. `make test` takes the first row of each family, `make
exhaustive` all.
"""

import copy
import inspect
import json
from typing import Any

import pytest
import torch
from pairs import assert_close
from safetensors.torch import save_file
from sizes import OFFICIAL_DECODER, TINY
from transformers.models.auto import modeling_auto

import blockformer
from blockformer.conversion import ConversionError, convert
from blockformer.conversion.families import index
from blockformer.conversion.families.composites import COMPOSITES
from blockformer.conversion.families.registry import FAMILIES

from .oracles import assert_verified, stored, there_and_back
from .outputs import assert_same_outputs
from .rows import Row, assert_there_and_back, model_of, parameters

SIZES = {**OFFICIAL_DECODER, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    **DEEPSEEK_EXPERTS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
LATENT_V3 = {**LATENT, **GROUPS}
LATENT_V2 = {**LATENT_V3, "n_shared_experts": 2, "topk_method": "group_limited_greedy"}
LATENT_LITE = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
LATENT_DENSE = {name: value for name, value in LATENT_LITE.items() if name not in DEEPSEEK_EXPERTS}
GRANITE_EXPERTS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
PHI_EXPERTS = {"num_local_experts": 6, "router_jitter_noise": 0.3}
MSCALE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
}
EXAONE_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 12}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}
SHARED_WINDOW = {
    "shared_expert_intermediate_size": 40,
    "use_sliding_window": True,
    "sliding_window": 8,
    "qkv_bias": False,
    "norm_topk_prob": True,
}


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 8, "layer_types": [SLIDING, FULL]}
AFMOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16, "route_scale": 2.5}
AFMOE |= {"num_dense_layers": 1, "num_shared_experts": 1, **WINDOW}
MELLUM = {**QWEN_EXPERTS, "num_experts_per_tok": 3, **WINDOW}
FLINT = {**QWEN_EXPERTS, **WINDOW, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "type": "default"}
GROWING = {**YARN, "type": "yarn", "original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.4}
BY_TYPE = {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
STATE = "linear_attention"
STATES = {"layer_types": [STATE, FULL], "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
# With larger weights, float32 is farther from float64 than 1e-5, in theirs as in ours.
STATES |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "initializer_range": 0.1}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 100.0}
NEXT = {**STATES, **QWEN_EXPERTS, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}
LARA = {**NEXT, **WINDOW, "num_hidden_layers": 3, "layer_types": [STATE, SLIDING, FULL]}
HYBRID = {name: value for name, value in STATES.items() if name != "head_dim"}
HYBRID |= {"linear_num_key_heads": 4, "rope_parameters": {"rope_theta": None}}
CONV = {"layer_types": ["conv", FULL], "block_multiple_of": 8, "initializer_range": 0.1}
CONV_EXPERTS = {"layer_types": ["conv", FULL], **QWEN_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 2.0}
CONV_EXPERTS |= {"num_experts_per_tok": 3}
SCANS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "initializer_range": 0.1}
BOTH = "attention_and_state_space"
FALCON = SCANS | {
    "mamba_d_ssm": 64,
    "mamba_n_groups": 2,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.5],
    "mlp_multipliers": [0.7, 0.4],
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 1.5,
}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "head_dim": 16}
NEMOTRON |= {"initializer_range": 0.1}
NEMOTRON_EXPERTS = {**NEMOTRON, **DEEPSEEK_EXPERTS, "moe_shared_expert_intermediate_size": 40}
SHARED_GRANITE = {
    **MULTIPLIERS,
    "logits_scaling": 0.5,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
}
DENSE_GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 40}
GEMMA4 = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 8, "head_dim": 8}
GEMMA4 |= {"global_head_dim": 16, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": SIZES["vocab_size"]}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
SLOWER = {FULL: {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 2.0}}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
UNIFIED = {name: value for name, value in GEMMA4.items() if "per_layer" not in name}
HUNYUAN_EXPERTS = {"num_experts": 6, "moe_topk": 2, "intermediate_size": 24}
COHERE_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "head_dim": 8,
    "logit_scale": 0.3,
}
COHERE_EXPERTS |= WINDOW
ARIA_EXPERTS = {"moe_num_experts": 6, "moe_topk": 2, "intermediate_size": 24}
COMPASS_ROPE = {SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, FULL: None}
ROWS = [
    Row("phi3"),
    Row("phi3", {"sliding_window": 8, "resid_pdrop": 0.1}, shards=True),
    Row("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, **TIED}),
    Row("olmo2"),
    Row("olmo2", {"attention_bias": True, **TIED}),
    Row("olmo2", {"num_key_value_heads": 4, "hidden_act": "gelu", "rms_norm_eps": 1e-3}, shards=True),
    Row("gpt_neox"),
    Row("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, **TIED}),
    Row("gpt_neox", {"attention_bias": False, "rotary_pct": 0.5, "hidden_act": "gelu_new"}, shards=True),
    Row("qwen3_moe", QWEN_EXPERTS | {"num_experts_per_tok": 3, "mlp_only_layers": [1]}),
    Row("qwen3_moe", QWEN_EXPERTS | {"norm_topk_prob": True, "attention_bias": True, "head_dim": 16}, shards=True),
    Row("qwen3_moe", QWEN_EXPERTS | {"use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": True}),
    Row("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 40}),
    Row("qwen2_moe", QWEN_EXPERTS | {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 2}, shards=True),
    Row("qwen2_moe", QWEN_EXPERTS | SHARED_WINDOW),
    Row("qwen3_next", NEXT),
    Row("qwen3_next", NEXT | {"decoder_sparse_step": 2, "norm_topk_prob": False, **TIED}, shards=True),
    Row("qwen3_next", NEXT | {"layer_types": [FULL, FULL], "mlp_only_layers": [0]}),
    Row("qwen3_5_text", STATES),
    Row("qwen3_5_text", STATES | {"layer_types": [FULL, STATE], "linear_conv_kernel_dim": 2, **TIED}, shards=True),
    Row("qwen3_5_text", STATES | {"linear_num_key_heads": 1, "rope_parameters": MROPE}),
    Row("qwen3_5_moe_text", NEXT),
    Row("qwen3_5_moe_text", NEXT | {"layer_types": [FULL, STATE], "rope_parameters": MROPE, **TIED}, shards=True),
    Row("lara_mini", LARA),
    Row("lara_mini", LARA | {"layer_types": [SLIDING, STATE, FULL], "attention_bias": True, **UNTIED}, shards=True),
    Row("lara_mini", LARA | {"layer_types": [FULL, FULL, SLIDING], "norm_topk_prob": False, **UNTIED}),
    Row("olmo_hybrid", HYBRID),
    Row("olmo_hybrid", HYBRID | {"linear_allow_neg_eigval": False, "attention_bias": True, **TIED}, shards=True),
    Row("olmo_hybrid", HYBRID | {"layer_types": [FULL, STATE], "rope_parameters": {"rope_theta": 1e4}}),
    Row("lfm2", CONV),
    Row("lfm2", CONV | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4, **UNTIED}, shards=True),
    Row("lfm2", CONV | {"layer_types": [FULL, FULL], "block_ffn_dim_multiplier": 1.3}),
    Row("lfm2_moe", CONV_EXPERTS),
    Row("lfm2_moe", CONV_EXPERTS | {"use_expert_bias": False, "norm_topk_prob": False, **UNTIED}, shards=True),
    Row("bamba", SCANS | {"attn_layer_indices": [1]}),
    Row("bamba", SCANS | {"attn_layer_indices": [0], "attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("bamba", SCANS | {"attn_layer_indices": [1], "mamba_n_groups": 2, "mamba_conv_bias": False}),
    Row("bamba", {"attn_layer_indices": [0, 1], "mamba_n_heads": 2}),
    Row("granitemoehybrid", SCANS | {"layer_types": ["mamba", "attention"], **SHARED_GRANITE}),
    Row("granitemoehybrid", SCANS | DENSE_GRANITE | {"layer_types": ["attention", "mamba"], **UNTIED}, shards=True),
    Row(
        "granitemoehybrid",
        SCANS | DENSE_GRANITE | {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
    ),
    Row("falcon_h1", FALCON),
    Row("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, **TIED}, shards=True),
    Row("falcon_h1", FALCON | {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    Row("falcon_h1", SCANS | {"mamba_d_ssm": None, "mamba_conv_bias": False, "mamba_d_conv": 2}),
    Row("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-M*-"}),
    Row("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "*M-*-", "mlp_bias": True, "head_dim": 8}, shards=True),
    Row("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-*-", "use_conv_bias": False, "time_step_min": 1e-4}),
    Row("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "*-*-", **TIED}),  # its class ties nothing
    Row("nemotron_h", NEMOTRON_EXPERTS | {"hybrid_override_pattern": "MEM*E"}, shards=True),
    Row(
        "nemotron_h",
        NEMOTRON_EXPERTS | GROUPS | {"hybrid_override_pattern": "M-*EM", "moe_latent_size": 20, "mlp_bias": True},
    ),
    Row("nemotron_h", NEMOTRON_EXPERTS | {"hybrid_override_pattern": "*E*E", "norm_topk_prob": False}),
    Row("apertus"),
    Row("apertus", {"attention_bias": True, "hidden_act": "relu2", **TIED}, shards=True),
    Row("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": ALPHA}),
    Row("hunyuan_v1_dense", {"head_dim": 8, "attention_bias": True, **TIED}, shards=True),
    Row("hunyuan_v1_moe", HUNYUAN_EXPERTS | {"head_dim": 16, "rope_parameters": ALPHA}),
    Row("hunyuan_v1_moe", HUNYUAN_EXPERTS | {"moe_topk": [3, 3], "head_dim": 8, **TIED}, shards=True),
    Row("granitemoe", GRANITE_EXPERTS),
    Row("granitemoe", GRANITE_EXPERTS | {"attention_bias": True, "tie_word_embeddings": True}, shards=True),
    Row("granitemoeshared", GRANITE_EXPERTS | {"shared_intermediate_size": 40}),
    Row("granitemoeshared", GRANITE_EXPERTS | {"shared_intermediate_size": 0}, shards=True),
    Row("phimoe", PHI_EXPERTS),
    Row("phimoe", PHI_EXPERTS | {"rope_parameters": MSCALE, "attention_bias": True, "lm_head_bias": True}, shards=True),
    Row("phimoe", PHI_EXPERTS | {"router_jitter_noise": 0.0, "sliding_window": 8, **TIED}),
    Row("afmoe", AFMOE),
    Row("afmoe", AFMOE | {"mup_enabled": True, "attention_bias": True, "num_shared_experts": 2, **TIED}, shards=True),
    Row("afmoe", AFMOE | {"layer_types": [FULL, FULL], "num_dense_layers": 0, "route_scale": 1.0}),
    Row("solar_open", DEEPSEEK_EXPERTS | {"head_dim": 8}),
    Row("solar_open", DEEPSEEK_EXPERTS | GROUPS | {"n_shared_experts": 2, "head_dim": 16, **TIED}, shards=True),
    Row("solar_open", DEEPSEEK_EXPERTS | {"attention_bias": True, "norm_topk_prob": False, "head_dim": 8}),
    Row("mellum", MELLUM | {"rope_parameters": BY_TYPE, "head_dim": 8}),
    Row("mellum", MELLUM | {"mlp_layer_types": ["dense", "sparse"], "attention_bias": True, **TIED}, shards=True),
    Row("mellum", QWEN_EXPERTS | {"head_dim": 16, "norm_topk_prob": False}),
    Row("exaone_moe", EXAONE_EXPERTS | WINDOW),
    Row("exaone_moe", EXAONE_EXPERTS | {**WINDOW, "first_k_dense_replace": 0, "num_shared_experts": 2}, shards=True),
    Row("exaone_moe", EXAONE_EXPERTS | {"layer_types": [FULL, FULL], "num_experts": 8, "n_group": 4, "topk_group": 2}),
    Row("hy_v3", EXAONE_EXPERTS | {"router_scaling_factor": 1.5}),
    Row("hy_v3", EXAONE_EXPERTS | {"mlp_layer_types": ["sparse"] * 2, "num_shared_experts": 2, **TIED}, shards=True),
    Row("hy_v3", EXAONE_EXPERTS | {"attention_bias": True, "head_dim": 16, "mlp_layer_types": ["sparse", "dense"]}),
    Row("flint", FLINT),
    Row("flint", FLINT | {"attention_bias": True, "layer_types": [FULL, SLIDING], **TIED}, shards=True),
    Row("flint", FLINT | {"mlp_only_layers": [], "layer_types": [SLIDING] * 2, "norm_topk_prob": False}),
    Row("granitemoe_swa", GRANITE_EXPERTS | {**WINDOW, "layer_rope_theta": [1e4, 0]}),
    Row("granitemoe_swa", GRANITE_EXPERTS | {**WINDOW, "shared_intermediate_size": 40, **UNTIED}, shards=True),
    Row("gpt_oss", GPT_OSS),
    Row("gpt_oss", GPT_OSS | {"sliding_window": 6, "attention_bias": False, "num_experts_per_tok": 1}, shards=True),
    Row("gpt_oss", GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True}),
    Row("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    Row("olmoe", {"num_experts": 4, "num_experts_per_tok": 1, "attention_bias": True, "norm_topk_prob": True}, True),
    Row("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 3}),
    Row("flex_olmo", {"num_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": True}, shards=True),
    Row("dots1", DEEPSEEK_EXPERTS),
    Row("dots1", DEEPSEEK_EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": True}, True),
    Row("dots1", DEEPSEEK_EXPERTS | {"sliding_window": 8, "max_window_layers": 1, "attention_bias": True}),
    Row("dots1", DEEPSEEK_EXPERTS | GROUPS | {"norm_topk_prob": True}),
    Row("glm4_moe", DEEPSEEK_EXPERTS | {"use_qk_norm": True, "attention_bias": True}),
    Row("glm4_moe", DEEPSEEK_EXPERTS | {"first_k_dense_replace": 0, "norm_topk_prob": False, **TIED}, shards=True),
    Row("glm4_moe", DEEPSEEK_EXPERTS | GROUPS | {"topk_group": 1, "num_experts_per_tok": 2}, shards=True),
    Row("glm4_moe", DEEPSEEK_EXPERTS | {"partial_rotary_factor": 1.0, "head_dim": 16, "n_shared_experts": 2}),
    Row("sarvam_moe", DEEPSEEK_EXPERTS | {"head_dim": 8}),
    Row("sarvam_moe", DEEPSEEK_EXPERTS | GROUPS | {"use_qk_norm": False, "attention_bias": True, **TIED}, shards=True),
    Row("sarvam_moe", DEEPSEEK_EXPERTS | {"head_dim": 16, "first_k_dense_replace": 0, "norm_topk_prob": False}),
    Row("glm4_moe_lite", LATENT_LITE | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    Row("glm4_moe_lite", LATENT_LITE | GROUPS | {"attention_bias": True, "q_lora_rank": None, **TIED}, shards=True),
    Row("glm4_moe_lite", LATENT_LITE | {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": False}),
    Row("mistral4", LATENT | {"rope_parameters": GROWING | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    Row("mistral4", LATENT | GROUPS | {"attention_bias": True, "q_lora_rank": None, **TIED}, shards=True),
    Row("mistral4", LATENT | {"norm_topk_prob": False, "rope_parameters": GROWING | {"llama_4_scaling_beta": 0}}),
    Row("youtu", LATENT_DENSE),
    Row("youtu", LATENT_DENSE | {"attention_bias": True, "q_lora_rank": None, **UNTIED}, shards=True),
    Row("youtu", LATENT_DENSE | {"rms_norm_eps": 1e-3, "rope_parameters": YARN | {"mscale_all_dim": 0.9}}),
    Row("minicpm3", LATENT_DENSE | {"dim_model_base": 16}),
    Row("minicpm3", LATENT_DENSE | {"dim_model_base": None, "scale_depth": None, "q_lora_rank": None}, shards=True),
    Row(
        "minicpm3",
        LATENT_DENSE
        | {"attention_bias": True, "mlp_bias": True, "scale_emb": 1, "scale_depth": 0.3, "v_head_dim": None, **UNTIED},
    ),
    Row("deepseek_v3", LATENT_V3 | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    Row("deepseek_v3", LATENT_V3 | {"attention_bias": True, "norm_topk_prob": False, **TIED}, shards=True),
    Row("deepseek_v3", LATENT | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_parameters": YARN}),
    Row("deepseek_v3", LATENT_V3 | {"rms_norm_eps": 1e-3, "v_head_dim": 24, "first_k_dense_replace": 3}),
    Row("sarvam_mla", LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    Row("sarvam_mla", LATENT | GROUPS | {"attention_bias": True, **TIED}, shards=True),
    Row("deepseek_v2", LATENT_V2 | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    Row("deepseek_v2", LATENT_V2 | {"attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row(  # with a factor of 2.5 in every layer, states grow so large that rounding alone is 1e-5 of the logits
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 0, "routed_scaling_factor": 1.5},
    ),
    Row("ernie4_5_moe", ERNIE_EXPERTS),
    Row("ernie4_5_moe", ERNIE_EXPERTS | {"use_bias": True, "moe_layer_start_index": 0}, shards=True),
    Row("ernie4_5_moe", ERNIE_EXPERTS | {"moe_num_shared_experts": 0, "tie_word_embeddings": False}),
    Row("minimax_m2", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}),
    Row("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, **TIED}, shards=True),
    Row("mixtral", {"num_local_experts": 5}),
    Row("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8}, shards=True),
    Row("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    Row("gemma"),
    Row("gemma", {"head_dim": 16, **UNTIED}, shards=True),
    Row("gemma", {"attention_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    Row("gemma2", {**WINDOW, "query_pre_attn_scalar": 5, "head_dim": 16}),
    Row("gemma2", {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **UNTIED}, shards=True),
    Row("gemma2", {**WINDOW, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    Row("gemma2", {"layer_types": [FULL, FULL], "attention_bias": True}),
    Row("gemma3_text", {**WINDOW, "query_pre_attn_scalar": 12, "head_dim": 16}),
    Row("gemma3_text", {**WINDOW, "rope_parameters": BY_TYPE, "final_logit_softcapping": 5.0, **UNTIED}, shards=True),
    Row("gemma3_text", {"layer_types": [FULL, FULL], "num_key_value_heads": 1}),
    Row("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Row("gemma4_text", GEMMA4 | KEYS_AS_VALUES | {"final_logit_softcapping": 5.0, "attention_bias": True}, shards=True),
    Row("gemma4_text", GEMMA4 | {"layer_types": [FULL] * 4, "num_kv_shared_layers": 1, **UNTIED}),
    Row("gemma4_text", GEMMA4 | KEYS_AS_VALUES | {"layer_types": [FULL] * 4, "rope_parameters": SLOWER}),
    Row("gemma4_text", GEMMA4 | KEYS_AS_VALUES | GEMMA4_EXPERTS | {"use_bidirectional_attention": "vision"}),
    Row("gemma4_text", GEMMA4 | GEMMA4_EXPERTS | {"num_kv_shared_layers": 1, **UNTIED}, shards=True),
    Row("gemma4_unified_text", UNIFIED | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Row("gemma4_unified_text", UNIFIED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, shards=True),
    Row("gemma4_unified_text", UNIFIED | {"layer_types": [FULL] * 4, "final_logit_softcapping": 5.0, **UNTIED}),
    Row("vaultgemma", {**WINDOW, "query_pre_attn_scalar": 12}),
    Row("vaultgemma", {**WINDOW, "attn_logit_softcapping": None, **UNTIED}, shards=True),
    Row("vaultgemma", {"layer_types": [SLIDING, SLIDING], "sliding_window": 4, "head_dim": 16}),
    Row("phi"),
    Row("phi", {"qk_layernorm": True, "partial_rotary_factor": 1.0}, shards=True),
    Row("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.25, **TIED}),
    Row("stablelm", {"qk_layernorm": True}),
    Row("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, **TIED}, shards=True),
    Row("stablelm", {"partial_rotary_factor": 1.0, "num_key_value_heads": 4}),
    Row("starcoder2", {"sliding_window": 8}),
    Row("starcoder2", {"use_bias": False, **UNTIED}, shards=True),
    Row("starcoder2", {"num_key_value_heads": 1, "rope_theta": 1e6}),
    Row("granite_swa", {**MULTIPLIERS, **WINDOW, "layer_rope_theta": [1e4, 0]}),
    Row("granite_swa", {**WINDOW, "layer_rope_theta": [500, 1e5], "attention_bias": True, **UNTIED}, shards=True),
    Row("granite_swa", {**MULTIPLIERS, "layer_types": [FULL, FULL], "layer_rope_theta": [0, 0], "mlp_bias": True}),
    Row("granite", MULTIPLIERS),
    Row("granite", {"attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("granite", {**MULTIPLIERS, "logits_scaling": 4.9, "num_key_value_heads": 4}),
    Row("cohere", {"logit_scale": 0.25}),
    Row("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.7}, shards=True),
    Row("cohere", {"num_key_value_heads": 4, "logit_scale": 1.0, **UNTIED}),
    Row("cohere2", {**WINDOW, "logit_scale": 0.25}),
    Row("cohere2", {"layer_types": [SLIDING] * 2, "sliding_window": 5, "logit_scale": 0.3, **UNTIED}, shards=True),
    Row("cohere2", {**WINDOW, "attention_bias": True, "num_key_value_heads": 4, "logit_scale": 1.0}),
    Row("cohere_compass_text", {**WINDOW, "rope_parameters": COMPASS_ROPE, "logit_scale": 0.25}),
    Row("cohere_compass_text", {"rope_parameters": {FULL: COMPASS_ROPE[SLIDING]}, **UNTIED}, shards=True),
    Row("cohere_compass_text", {**WINDOW, "rope_parameters": BY_TYPE, "attention_bias": True}),
    Row("cohere2_moe", COHERE_EXPERTS | {"expert_selection_fn": "sigmoid"}),
    Row(
        "cohere2_moe",
        COHERE_EXPERTS
        | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_intermediate_size": 40, "rms_norm_eps": 1e-5},
        shards=True,
    ),
    Row(
        "cohere2_moe",
        COHERE_EXPERTS
        | {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum", "attention_bias": True, **UNTIED}
        | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_sliding_window_pattern": 2},
    ),
    Row("cohere2_moe", COHERE_EXPERTS | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    Row("aria_text", ARIA_EXPERTS),
    Row("aria_text", ARIA_EXPERTS | {"moe_num_shared_experts": 1, "mlp_bias": False, **TIED}, shards=True),
    Row("smollm3", {"no_rope_layers": [1, 0]}),
    Row("smollm3", {"no_rope_layers": [1, 1], "attention_bias": True, "mlp_bias": True, **UNTIED}, shards=True),
    Row("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 8}),
    Row("glm4", {"head_dim": 16}),
    Row("glm4", {"attention_bias": False, "head_dim": 8, "partial_rotary_factor": 1.0, **TIED}, shards=True),
    Row("glm4", {"num_key_value_heads": 1, "head_dim": 24}),
    Row("glm", {"head_dim": 16}),
    Row("glm", {"attention_bias": False, "head_dim": 8, **TIED}, shards=True),
    Row("glm", {"num_key_value_heads": 1, "head_dim": 24, "partial_rotary_factor": 1.0}),
    Row("olmo", {"clip_qkv": 0.5}),
    Row("olmo", {"attention_bias": True, **TIED}, shards=True),
    Row("olmo", {"num_key_value_heads": 4, "hidden_act": "gelu"}),
    Row("olmo3", WINDOW),
    Row("olmo3", {**WINDOW, "rope_parameters": BY_TYPE, **TIED}, shards=True),
    Row("olmo3", {"layer_types": [FULL, FULL], "attention_bias": True}),
    Row("gptj", {"rotary_dim": 4}),
    Row("gptj", {"rotary_dim": 8, "n_inner": 40, **TIED}, shards=True),
    Row("gptj", {"rotary_dim": 6, "activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    Row("codegen", {"rotary_dim": 4}),
    Row("codegen", {"rotary_dim": 8, "n_inner": 40, **TIED}, shards=True),
    Row("codegen", {"rotary_dim": 6, "n_head": 8, "n_embd": 64}),
    Row("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Row("falcon", {"multi_query": True, "num_kv_heads": 1}, shards=True),
    Row("falcon", {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4, "bias": True, **UNTIED}),
    Row("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    Row("opt"),
    Row("opt", {"do_layer_norm_before": False, **UNTIED}, shards=True),
    Row("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    Row("opt", {"_remove_final_layer_norm": True, "activation_function": "gelu"}),
    Row("opt", {"word_embed_proj_dim": 40, **UNTIED}),
    Row("bloom"),
    Row("bloom", {"n_head": 8, **UNTIED}, shards=True),
    Row("bloom", {"n_head": 6, "hidden_size": 48, "n_layer": 3}),
    Row("modernbert-decoder", {"local_attention": 12, "layer_types": [FULL, SLIDING]}),
    Row(
        "modernbert-decoder", {"layer_types": [FULL, FULL], "norm_bias": True, "mlp_bias": True, **UNTIED}, shards=True
    ),
    Row("mpt"),
    Row("mpt", {"n_heads": 8, **UNTIED}, shards=True),
    Row("mpt", {"n_heads": 3, "d_model": 24, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    Row("gpt_bigcode"),
    Row("gpt_bigcode", {"multi_query": False, **UNTIED}, shards=True),
    Row("gpt_bigcode", {"n_inner": 40, "scale_attn_weights": False, "activation_function": "gelu"}),
    Row("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    Row("gpt_neo", {"attention_types": [[["local"], 1], [["global"], 1]], "window_size": 5, **UNTIED}, shards=True),
    Row("gpt_neo", {"attention_types": [[["global"], 2]], "intermediate_size": 40, "activation_function": "gelu"}),
    Row("biogpt"),
    Row("biogpt", {"scale_embedding": False, "hidden_act": "relu", **UNTIED}, shards=True),
    Row("xglm"),
    Row("xglm", {"scale_embedding": False, "activation_function": "relu", "pad_token_id": 1, **UNTIED}, shards=True),
    Row("ctrl", {"dff": 48}),
    Row("ctrl", {"dff": 72, "n_head": 8, **UNTIED}, shards=True),
    Row("exaone4", WINDOW),
    Row("exaone4", {"sliding_window": None, "layer_types": [FULL, FULL], **TIED}, shards=True),
    Row("exaone4", {"sliding_window": 8, "layer_types": [FULL, FULL], "head_dim": 16}),
    Row("arcee"),
    Row("arcee", {"attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("arcee", {"rope_parameters": YARN, "head_dim": 16}),
    Row("helium", {"head_dim": 8}),
    Row("helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("helium", {"head_dim": 8, "rope_theta": 500.0, "num_key_value_heads": 4}),
    Row("nemotron"),
    Row("nemotron", {"attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("nemotron", {"partial_rotary_factor": 1.0, "head_dim": 16}),
    Row("jais2"),
    Row("jais2", {"attention_bias": False, "mlp_bias": False, **TIED}, shards=True),
    Row("jais2", {"num_key_value_heads": 4, "head_dim": 16}),
    Row("hyperclovax"),
    Row("hyperclovax", {**MULTIPLIERS, "use_post_norm": False, "attention_bias": True, **TIED}, shards=True),
    Row("hyperclovax", {**MULTIPLIERS, "mlp_bias": True, "head_dim": 16}),
    Row("internlm3", {"head_dim": 8}),
    Row("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("iquestcoder", {"head_dim": 8}),
    Row("iquestcoder", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("exaone", {"head_dim": 8}),
    Row("exaone", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("exaone", {"rope_parameters": YARN, "num_key_value_heads": 4}),
    Row("ernie4_5"),
    Row("ernie4_5", {"use_bias": True, "head_dim": 16, **UNTIED}, shards=True),
    Row("nanochat"),
    Row("nanochat", {"attention_bias": True, "num_key_value_heads": 4, **TIED}, shards=True),
    Row("nanochat", {"rope_parameters": YARN, "final_logit_softcapping": None, "hidden_act": "gelu"}),
    Row("persimmon"),
    Row("persimmon", {"qk_layernorm": False, **TIED}, shards=True),
    Row("persimmon", {"partial_rotary_factor": 1.0, "hidden_act": "gelu"}),
    Row("seed_oss", {"head_dim": 16}),
    Row("seed_oss", {"attention_out_bias": True, "mlp_bias": True, **TIED}, shards=True),
    Row("seed_oss", {"attention_bias": False, "head_dim": 8}),
    Row("ministral", {**WINDOW, "head_dim": 8}),
    Row("ministral", {"layer_types": [FULL, FULL], "head_dim": 8, **TIED}, shards=True),
    Row("ministral", {"sliding_window": 8, "head_dim": 16}),
    Row("ministral3", {"rope_parameters": GROWING, "head_dim": 16}),
    Row("ministral3", {"rope_parameters": GROWING | DEFAULT, "sliding_window": 8, "head_dim": 8, **TIED}, shards=True),
    Row("ministral3", {"rope_parameters": GROWING | DEFAULT | {"llama_4_scaling_beta": 0}, "head_dim": 8}),
    Row("cwm", WINDOW),
    Row("cwm", {**WINDOW, "head_dim": 16, **TIED}, shards=True),
    Row("cwm", {"sliding_window": 8, "layer_types": [SLIDING, SLIDING], "head_dim": 8}),
]


def batch(official, length=20):
    """Two rows of tokens, the second padded on the left; with positions if the official model takes them."""
    ids = torch.randint(3, SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :7], mask[1, :7] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(official.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


@torch.no_grad()
def assert_same_model(ours, theirs):
    """Logits of padded rows, step by step with a cache, and text in two ways."""
    inputs = batch(theirs)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert_same_outputs(ours, theirs, inputs, spread=0.3)
    caches: list[Any] = [None, None]
    start = 0
    for part in (ids[:1, :17], ids[:1, 17:18], ids[:1, 18:]):
        # Bamba's class counts from 0 again at each call.
        places = {"position_ids": torch.arange(part.shape[1])[None] + start} if "position_ids" in inputs else {}
        outputs = [
            model(part, past_key_values=cache, use_cache=True, **given)
            for model, cache, given in zip((ours, theirs), caches, ({}, places), strict=True)
        ]
        start += part.shape[1]
        caches = [output.past_key_values for output in outputs]
        assert_close(*(output.logits for output in outputs))
    for way in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, **way}
        texts = [model.generate(ids, **settings) for model in (ours, theirs)]
        assert torch.equal(*texts)


@pytest.mark.versions
@pytest.mark.parametrize("row", parameters(ROWS))
def test_there_and_back_with_the_same_numbers_and_text(tmp_path, row):
    theirs = model_of(row, SIZES)
    dst = assert_there_and_back(tmp_path, row, theirs)
    assert_same_model(blockformer.BlockformerDecoderForCausalLM.from_pretrained(dst), theirs)
    attention = theirs.config._attn_implementation
    fresh = type(theirs).from_pretrained(tmp_path / "fresh", attn_implementation=attention)
    with torch.no_grad():
        assert torch.equal(*(model(**batch(theirs)).logits for model in (fresh, theirs)))


# Without experts, of which rounding may choose others.
NEAR_FLOAT64 = ("qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "nemotron_h", "falcon_h1", "gemma3_text", "gemma4_text")
NEAR_FLOAT64 += ("ministral3", "hunyuan_v1_dense", "apertus", "nanochat")


@torch.no_grad()
@pytest.mark.parametrize("family", NEAR_FLOAT64)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_float64_as_the_official_class(tmp_path, family, dtype):
    theirs = model_of(next(row for row in ROWS if row.family == family), SIZES)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).to(dtype)
    ids = torch.randint(3, 90, (4, 40), generator=torch.Generator().manual_seed(1))
    exact = copy.deepcopy(theirs.to(dtype)).double()(ids).logits
    errors = [(each(ids).logits.double() - exact).abs().mean() for each in (ours, theirs)]
    assert errors[0] < 1.3 * errors[1]


TYPED = [Row("gpt2"), *(row for row in ROWS if row.family in ("gpt_bigcode", "gpt_neo", "gptj", "codegen", "ctrl"))]


SPELLED = sorted({row.family for row in ROWS if row.family in FAMILIES and FAMILIES[row.family].names.spellings})


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name, marks=[] if name in ("exaone", "flint", "nemotron_h", "sarvam_moe") else pytest.mark.exhaustive
        )
        for name in SPELLED
    ],
)
def test_files_may_have_the_names_of_the_class(tmp_path, family):
    """As `torch.save(model.state_dict())` and libraries for training write them; transformers reads both."""
    theirs = model_of(next(row for row in ROWS if row.family == family), SIZES)
    theirs.config.save_pretrained(tmp_path / "src")
    tensors = {name: each.clone() for name, each in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        tensors = {name: each for name, each in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    there_and_back(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("family", ["cohere2_moe", "hunyuan_v1_moe"])
def test_a_loss_of_routers_that_the_official_class_lacks_is_left_out(tmp_path, family):
    theirs = model_of(next(row for row in ROWS if row.family == family), SIZES, output_router_logits=True)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    assert_close(ours(ids, labels=ids).loss, theirs(ids, labels=ids).loss)


@torch.no_grad()
@pytest.mark.parametrize("row", {row.family: row for row in reversed(TYPED)}.values(), ids=lambda row: row.family)
def test_token_types_add_the_vectors_of_tokens(tmp_path, row):
    """Also zeros, which some tokenizers always return."""
    theirs = model_of(row, SIZES)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = ours(ids).logits
    for types in (torch.zeros_like(ids), ids.flip(1)):
        logits, expected = (model(ids, token_type_ids=types).logits for model in (ours, theirs))
        assert_close(logits, expected)
        assert (logits - plain).abs().max() > 1e-3
        given = {
            "token_type_ids": types,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 6,
            "do_sample": False,
        }
        if row.family != "ctrl":  # whose official class leaves them out of `generate`
            assert torch.equal(*(model.generate(ids, pad_token_id=0, **given) for model in (ours, theirs)))
    with pytest.raises(ValueError, match=r"token_type_ids holds .*, and vocab_size is"):
        ours(ids, token_type_ids=ids + 10**6)
    ours.config.token_types_as_tokens = False  # as a repo of an earlier state has it: it goes out as well
    ours.save_pretrained(tmp_path / "ours")
    assert_verified(convert(tmp_path / "ours", tmp_path / "back", to_official=True, family=row.family, verify="quick"))


@torch.no_grad()
def test_a_4d_mask_has_the_windows_of_gpt_neo_where_the_caller_puts_them(tmp_path):
    """Its official class always does, other classes with windows take a mask as it is."""
    theirs = model_of(next(row for row in ROWS if row.family == "gpt_neo"), SIZES)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path).eval()
    ids, places = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0)), torch.arange(20)
    back = (places[:, None] - places).expand(2, 1, 20, 20)
    in_one_text = (back >= 0) & (places[:, None] // 11 == places // 11)
    full, sliding = (
        torch.zeros(back.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        for seen in (in_one_text, in_one_text & (back < ours.config.sliding_window))
    )
    given = {"full_attention": full, "sliding_attention": sliding}
    assert_close(ours(ids, attention_mask=given).logits, theirs(ids, attention_mask=full).logits)


@pytest.mark.parametrize("family", ["smollm3", "cohere2", "exaone4"])
def test_a_model_of_so_few_layers_that_all_rotate_goes_out(tmp_path, family):
    sizes = {
        **TINY,
        "vocab_size": 97,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = blockformer.preset(family, **sizes)
    assert config.rope_layers is None
    assert type(config)(**{**config.to_dict(), "rope_layers": [True, True]}).rope_layers is None
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "ours")
    report = convert(tmp_path / "ours", tmp_path / "official", to_official=True, family=family, verify="quick")
    assert_verified(report)


# Heads do not depend on the axes in which most families differ.
USUALLY = ("phi3", "gpt_neox", "gemma2", "falcon", "opt", "mixtral")
HEADS = [
    pytest.param(row, head, marks=[] if family in USUALLY else pytest.mark.exhaustive)
    for family, row in {row.family: row for row in reversed(ROWS)}.items() if family in FAMILIES
    for head in FAMILIES[family].heads[1:]
]  # fmt: skip


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*the official router draws experts at random:UserWarning")  # Phi-3.5-MoE's note
@pytest.mark.parametrize(("row", "head"), HEADS, ids=lambda value: getattr(value, "official", ""))
def test_the_other_heads(tmp_path, row, head):
    theirs = model_of(row, SIZES, head)
    theirs.save_pretrained(tmp_path)
    ours = blockformer.from_official(tmp_path)
    assert type(ours).__name__ == head.ours
    assert_same_outputs(ours, theirs, batch(theirs), spread=0.1)


def assert_out_again(folder, row, theirs):
    """In, and out without a memory of the source, unverified: the same tensors, and a model with the same logits."""
    src, dst, out = (folder / name for name in ("src", "dst", "out"))
    theirs.save_pretrained(src)
    convert(src, dst, verify=False)
    (dst / "conversion.json").unlink()
    convert(dst, out, to_official=True, family=row.family, verify=False)
    assert stored(out) == stored(src)
    again = type(theirs).from_pretrained(out, attn_implementation=theirs.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(*(model(**batch(theirs)).logits for model in (again, theirs)))
    return dst


FOLLOWED = {"norm_eps": 7.0, "hidden_act": "tanh", "hidden_dropout": 0.9, "attention_dropout": 0.9}
"""Our field -> a value that no model has, of fields that the record need not name."""
IDLE = {"falcon": ["attention_dropout"]}
"""Family -> what its class reads with ALiBi only."""
FIRST = {row.family: row for row in reversed(ROWS) if row.family in FAMILIES}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if name in USUALLY else pytest.mark.exhaustive, id=name)
        for name, row in FIRST.items()
    ],
)
def test_the_official_class_follows_each_field_that_counts(row):
    """Fields with usual names count wherever the class has them, so it must not only have them."""
    theirs, meanings = model_of(row, SIZES), FAMILIES[row.family].settings.meanings
    inputs = {"input_ids": torch.arange(3, 23)[None]}
    idle = []
    for field, (meaning, *_) in meanings.items():
        if meaning in FOLLOWED and getattr(theirs.config, field) != "xielu":
            config = copy.deepcopy(theirs.config)
            setattr(config, field, FOLLOWED[meaning])
            other = type(theirs)(config).train("dropout" in meaning)
            other.load_state_dict(theirs.state_dict())
            with torch.no_grad():
                idle += [field] * torch.allclose(other(**inputs).logits, theirs(**inputs).logits)
    assert idle == IDLE.get(row.family, [])


@pytest.mark.versions
@pytest.mark.parametrize("row", parameters(ROWS))
def test_decoders_that_read_texts_whole(tmp_path, row):
    """Official checkpoints whose `is_causal` is false, such as text encoders that were decoders."""
    theirs = model_of(row, SIZES, is_causal=False)
    if False not in FAMILIES[row.family].settings.directions:  # the official class does not follow it
        theirs.save_pretrained(tmp_path / "src")
        with pytest.raises(ConversionError, match="is_causal is 'False'"):
            convert(tmp_path / "src", tmp_path / "dst")
        return
    if row.family in USUALLY:
        dst = assert_there_and_back(tmp_path, row, theirs)
    else:
        dst = assert_out_again(tmp_path, row, theirs)
    ours = blockformer.BlockformerDecoderForCausalLM.from_pretrained(dst)
    assert ours.config.bidirectional
    given = batch(theirs)
    real = given["attention_mask"].bool()
    changed = {**given, "input_ids": given["input_ids"].clone()}
    changed["input_ids"][:, -1] += 1
    with torch.no_grad():
        logits = ours(**given).logits
        assert_close(logits[real], theirs(**given).logits[real])
        assert not torch.equal(ours(**changed).logits[:, -2], logits[:, -2])  # near enough for every window


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alibi", False), ("alibi_bias_max", 16), ("qk_ln", True), ("prefix_lm", True)),
        *(("attn_uses_sequence_id", True), ("attn_type", "multiquery_attention")),
        *(("no_bias", False), ("logit_scale", 0.5), ("expansion_ratio", 2)),
    ],
)
def test_mpt_refuses_what_the_official_class_does_not_follow(tmp_path, name, value):
    theirs = model_of(Row("mpt"), SIZES)
    settings = theirs.config.to_dict()
    part = settings["attn_config"] if name in settings["attn_config"] else settings
    part[name] = value
    other = type(theirs)(type(theirs.config)(**settings)).eval()
    other.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(*(model(**batch(theirs)).logits for model in (other, theirs)))
    other.save_pretrained(tmp_path / "src")
    with pytest.raises(
        ConversionError, match=rf"{name} is .*run this model with its own code|its own code:\s+{name} is"
    ):
        convert(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


TURNED_IN_PART = {
    kind: {
        each: {"rope_type": "default", "rope_theta": 1e4} | ({"partial_rotary_factor": 0.5} if each == kind else {})
        for each in (FULL, SLIDING)
    }
    for kind in (FULL, SLIDING)
}


PART = {**GROWING, "partial_rotary_factor": 0.9}
OF_PICTURES_OR_SOUNDS = set(
    (
        "audioflamingo3 dots3_note emu3 fuyu gemma3n git glmasr got_ocr2 granite_speech granite_speech_plus "
        "llama4 mllama modernvbert moshi moss_transcribe_diarize musicflamingo musicgen musicgen_melody "
        "nemo_speechlm neomme omniasr phi4_multimodal qwen2_audio qwen3_asr qwen4_exp seamless_m4t seamless_m4t_v2 "
        "trocr ultravbert vibevoice_asr voxtral voxtral_realtime whisper"
    ).split()
)


def test_all_types_of_texts_are_read_or_refused_by_name():
    """Of the models of texts that transformers 5.24 has, none is an unknown type."""
    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_ENCODING")
    types = {name for kind in kinds for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")}
    known = {*index.NAMES, *index.OUT_OF_REACH, *index.FORMER_TYPES, *COMPOSITES}
    unknown = {name for name in types - known if not name.startswith("blockformer")}
    assert unknown == OF_PICTURES_OR_SOUNDS & types


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("blenderbot-small", {}, "is not supported: its decoder normalizes token vectors before it adds positions"),
        ("dbrx", {}, "is not supported: all experts of a layer lie in one matrix"),
        ("ibert", {}, "is not supported: its layers hold integers and their scales"),
        ("ultrabert", {}, "is not supported: its language model's head has two layers of another width"),
        ("openai-gpt", {}, "is not supported: its official class has no cache"),
        ("kolibri1", {}, "is not supported: its router adds the term of the choice to logits; .*; run the model"),
        ("glm_moe_dsa", {}, "is not supported: in its attention an indexer chooses the keys"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "here, all layers choose equally many experts"),
        ("cohere2_moe", {"num_shared_experts": 1}, "shared_expert_combination_strategy is 'average'"),
        ("aria_text", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("cohere_compass_text", {"layer_types": ["full_attention"] * 2}, "says nothing of full_attention"),
        (
            "falcon_h1",
            {"projectors_bias": True},
            "projectors_bias is True and mamba_proj_bias False, but here all maps",
        ),
        ("falcon_h1", {"time_step_limit": [0.0, 2.0]}, "steps have no upper bound here"),
        ("nemotron_h", {"hybrid_override_pattern": "ME-*"}, r"the layers are ME-\* .* a feed-forward network or exp"),
        ("nemotron_h", {"hybrid_override_pattern": "-M*"}, r"the layers are -M\* .* a feed-forward network or exp"),
        ("nemotron_h", {"hybrid_override_pattern": "M--*"}, r"the layers are M--\* .* a feed-forward network or exp"),
        ("nemotron_h", {"hybrid_override_pattern": "M*", "attention_bias": True}, "attention_bias is 'True'"),
        ("bamba", {"attn_layer_indices": [1], "time_step_limit": [0.0, 2.0]}, "steps have no upper bound here"),
        *(
            (
                family,
                {"rope_parameters": by_type},
                f"partial_rotary_factor of {kind} is 0.5, which this family does not",
            )
            for kind, by_type in TURNED_IN_PART.items()
            for family in ("gemma3_text", "olmo3", "modernbert", "gemma4_text", "cohere_compass_text")
        ),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0; it must be a positive number"),
        *(
            (name, {"topk_group": 0}, "topk_group is 0, so no expert is ever chosen")
            for name in ("dots1", "exaone_moe")
        ),
        ("youtu", {"head_dim": 1}, "head_dim is 1, and of 192 channels 64 turn"),
        (
            "mistral4",
            {"rope_parameters": PART | {"rope_theta": 1e4}},
            "partial_rotary_factor of rope_parameters is 0.9",
        ),
        *(
            (name, {}, f"is not supported: {needed}")
            for name, needed in {
                "minimax_m3_vl_text": "in its attention an indexer chooses the keys",
                "layoutlm": "it reads where each word stands on a page",
                "fnet": "it mixes tokens by a Fourier transform",
                "kimi_linear": "its layers with a state forget by channel",
                "rwkv": "it has no attention",
                "siglip_text_model": "it is the tower for texts of a model of pictures or sounds",
            }.items()
        ),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; it must be a positive number"),
        ("bamba", {"attn_layer_indices": []}, "layer_types names 'state_space': add a layer of 'full_attention'"),
    ],
)
def test_models_that_cannot_be_converted(tmp_path, family, entries, message):
    src = tmp_path / "src"
    src.mkdir()
    layers = {"layer_types": [SLIDING, FULL]} if FULL in entries.get("rope_parameters", ()) else {}
    (src / "config.json").write_text(json.dumps({"model_type": family, "num_hidden_layers": 2, **layers, **entries}))
    root = "backbone" if family == "nemotron_h" else "model"
    save_file({f"{root}.layers.{layer}.weight": torch.zeros(2) for layer in range(2)}, src / "model.safetensors")
    with pytest.raises(ConversionError, match=message):
        convert(src, tmp_path / "dst")


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bamba", {"mamba_hidden_act": "gelu"}, r"mamba_hidden_act must be hidden_act \(silu\), not 'gelu'"),
        ("bamba", {"mamba_n_heads": 3, "mamba_d_head": 8}, "mamba_n_heads must be so many that heads are a multiple"),
        ("bamba", {"mlp_layers": [True, False]}, "mlp_layers"),
        ("falcon_h1", {"mamba_hidden_act": "gelu"}, r"mamba_hidden_act must be hidden_act \(silu\), not 'gelu'"),
        ("falcon_h1", {"layer_types": [BOTH, FULL]}, f"layer_types must be {BOTH}, not 'full_attention'"),
        ("nemotron_h", {"layer_types": ["sliding_attention", FULL], "sliding_window": 4}, "layer_types must be"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
    ],
)
def test_state_spaces_that_a_family_has_no_word_for(tmp_path, family, fields, message):
    config = blockformer.preset(family, **{**TINY, "vocab_size": 40, **fields})
    blockformer.BlockformerDecoderForCausalLM(config).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "ours", tmp_path / "back", to_official=True, family=family)
