"""Descriptions and sizes from the parts of well-known checkpoints' configs that matter to the network."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.random_checkpoint import GRANITE_HYBRID, NEMOTRON_NANO
from engine.cache.kv_rows import token_bytes
from models.errors import ModelError
from models.families.registry import spec_of_hf
from models.features import Feature, features
from models.loading.context import for_context
from models.recurrences import Mamba2
from models.spec import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    ModelSpec,
    Norm,
    QueryScaling,
    Rope,
    ShortConvolution,
)
from models.weights.slots import parameters
from tests.models.known_configs import ERNIE, ERNIE_MOE, GEMMA2, GEMMA3, GPT2, GPT_OSS, QWEN3_MOE

LLAMA_2 = {  # 7B
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
TINYLLAMA = LLAMA_2 | {  # 1.1B-Chat-v1.0
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
}
MINISTRAL = {  # 8B-Instruct-2410
    "architectures": ["MistralForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
MISTRAL_SMALL = MINISTRAL | {  # 24B-Instruct-2501
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "sliding_window": None,
}
MISTRAL_SMALL_IMAGES = {  # 3.1-24B-Instruct-2503
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {key: value for key, value in MISTRAL_SMALL.items() if key != "architectures"}
    | {"model_type": "mistral"},
    "vision_config": {"model_type": "pixtral"},
}
MINISTRAL_3 = {  # 3B-Instruct-2512
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral"},
}
DEVSTRAL_ROPE = {
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "llama_4_scaling_beta": 0.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
}
DEVSTRAL_2 = {  # 123B-Instruct-2512
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "max_position_embeddings": 262144,
    "num_attention_heads": 96,
    "num_hidden_layers": 88,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": DEVSTRAL_ROPE,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
PHI_3_MINI = {  # 4k-instruct
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI_4_MINI = PHI_3_MINI | {  # instruct; the factors are in truth 48 different numbers
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SMOLLM3 = {  # 3B
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000.0,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
OLMO_2 = LLAMA_2 | {  # 1124-7B-Instruct
    "architectures": ["Olmo2ForCausalLM"],
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "vocab_size": 100352,
}
OLMO_3 = OLMO_2 | {  # 7B-Instruct
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
GRANITE = {  # 3.0-8b-instruct
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}
GRANITE_MOE = GRANITE | {  # 3.1-1b-a400m-instruct
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_multiplier": 0.015625,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1500000.0,
}
GRANITE_4 = GRANITE | {  # 4.0-micro
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_multiplier": 0.015625,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10.0,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "rope_theta": 10000000,
    "shared_intermediate_size": 8192,
    "vocab_size": 100352,
}
EXAONE_4 = {  # 32B
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
SEED_OSS = {  # 36B-Instruct
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}
HUNYUAN = {  # 7B-Instruct
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128167,
}
LFM_2 = {  # 1.2B
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}
LFM_2_KINDS = ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]
LFM_2_MOE = {  # 8B-A1B
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": LFM_2_KINDS,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
GLM_4_7_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
OF_DEEPSEEK = {Feature.LATENT, Feature.EXPERTS, Feature.EXACT_ROUTER, Feature.MIXED_LAYERS}
OF_DEEPSEEK_V3 = OF_DEEPSEEK | {Feature.SELECTION_BIAS, Feature.EXPERT_SCALE}
OF_LFM_2 = {Feature.CONVOLUTION, Feature.HEAD_NORM, Feature.MIXED_LAYERS}
COMMAND_R7B = {  # 12-2024
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 256000,
}
OF_COMMAND_R = {
    Feature.LAYER_NORM,
    Feature.NORM_ROUNDING,
    Feature.PARALLEL,
    Feature.LOGIT_SCALE,
    Feature.WINDOW,
    Feature.INTERLEAVED_ROPE,
    Feature.EXACT_ROPE,
    Feature.NO_ROPE,
    Feature.MIXED_LAYERS,
}
APERTUS = {  # 8B-Instruct-2509
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
OF_APERTUS = {Feature.HEAD_NORM, Feature.UNGATED, Feature.ACTIVATION, Feature.LEARNED_ACTIVATION}
LFM_3 = {  # 1.7B
    "architectures": ["Lfm3ForCausalLM"],
    "conv_L_cache": 7,
    "conv_bias": False,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "layer_types": [
        "conv",
        "conv",
        *["full_attention", "conv", "sliding_attention", "conv"] * 5,
        "full_attention",
        "conv",
    ],
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "use_attention_gate": True,
    "use_sandwich_norm": True,
    "vocab_size": 128000,
}
OF_LFM_3 = OF_LFM_2 | {Feature.GATE, Feature.WINDOW, Feature.NORM_PLACE, Feature.EXACT_ROPE}
MUSE_GLIMMER: dict[str, Any] = {  # 30B
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "final_logit_softcapping": 20.0,
        "head_dim": 128,
        "hidden_activation": "silu",
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0] * 13,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 13,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-08,
        "qk_scale_factor": 3.87,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "vocab_size": 202048,
    },
}
OF_MUSE_GLIMMER = {
    Feature.GATE,
    Feature.HEAD_NORM,
    Feature.NO_WEIGHT,
    Feature.EMBEDDING_NORM,
    Feature.NORM_OFFSET,
    Feature.NORM_PLACE,
    Feature.NORM_ROUNDING,
    Feature.MIXED_EPS,
    Feature.SCALE,
    Feature.WINDOW,
    Feature.NO_ROPE,
    Feature.LOGIT_SCALE,
    Feature.LOGIT_CAP,
    Feature.MIXED_LAYERS,
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
}
MAVERICK = {
    "architectures": ["Llama4ForCausalLM"],
    **SCOUT["text_config"],
    "attn_temperature_tuning": 4,
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}
OF_MAVERICK = {
    Feature.CHUNKS,
    Feature.NO_ROPE,
    Feature.QUERY_SCALING,
    Feature.NEXT_POSITION,
    Feature.INTERLEAVED_ROPE,
    Feature.EXACT_ROPE,
    Feature.EXPERTS,
    Feature.EXPERT_INPUTS,
    Feature.MIXED_LAYERS,
}
OF_SCOUT = OF_MAVERICK | {Feature.HEAD_NORM, Feature.NORM_ROTATED, Feature.NO_WEIGHT}
GEMMA_3N: dict[str, Any] = {  # E4B-it
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [16384] * 35,
        "laurel_rank": 64,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    },
}
GEMMA_3N_TEXT: dict[str, Any] = {"architectures": ["Gemma3nForCausalLM"], **GEMMA_3N["text_config"]}
OF_GEMMA_3N = {
    Feature.STREAMS,
    Feature.LAUREL,
    Feature.SPARSE_GATE,
    Feature.LAYER_INPUTS,
    Feature.SHARED_KV,
    Feature.HEAD_NORM,
    Feature.VALUE_NORM,
    Feature.NORM_PLACE,
    Feature.NORM_ROUNDING,
    Feature.ACTIVATION,
    Feature.SCALE,
    Feature.WINDOW,
    Feature.EMBEDDING_SCALE,
    Feature.LOGIT_CAP,
    Feature.MIXED_LAYERS,
}
OF_EXAONE = {
    Feature.HEAD_NORM,
    Feature.NORM_PLACE,
    Feature.WINDOW,
    Feature.NO_ROPE,
    Feature.MIXED_LAYERS,
}
MULTIPLIED = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
OLMO_NORMS = {Feature.HEAD_NORM, Feature.NORM_ALL_HEADS, Feature.NORM_ROUNDING, Feature.NORM_PLACE}
OLMO_FEATURES = OLMO_NORMS | {Feature.EXACT_ROPE}
OF_EXPERTS = {
    Feature.EXPERTS,
    Feature.ROUTER_BIAS,
    Feature.CLAMP,
    Feature.FEED_FORWARD_BIAS,
}
OF_ATTENTION = {Feature.SINKS, Feature.WINDOW, Feature.QKV_BIAS, Feature.OUT_BIAS}
OF_GPT_OSS = OF_EXPERTS | OF_ATTENTION | {Feature.MIXED_LAYERS, Feature.NORM_ROUNDING}
MULTIPLIERS = {Feature.EMBEDDING_SCALE, Feature.SCALE, Feature.RESIDUAL_SCALE, Feature.LOGIT_SCALE}


def hf(raw: dict[str, Any]) -> ModelSpec:
    return spec_of_hf(raw)[1]


def test_qwen2_5_has_biases_of_q_k_v_and_windows_only_if_they_are_used() -> None:
    raw = {  # Qwen2.5-0.5B-Instruct
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert hf(raw).attention == Attention(14, 2, 64, qkv_bias=True, rope=Rope(1e6))
    assert features(hf(raw)) == {Feature.QKV_BIAS}
    assert parameters(hf(raw)) == 494_032_768
    windowed = hf(raw | {"use_sliding_window": True, "sliding_window": 4096})
    assert [layer.attention.window for layer in windowed.layers] == [None] * 21 + [4096] * 3
    # As the model card recommends for texts beyond the trained length.
    rope = hf(
        raw | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    )
    assert rope.attention.rope == Rope(
        1e6, "yarn", 4.0, original_positions=32768, attention_factor=1 + 0.1 * math.log(4)
    )


OF_GRANITE_HYBRID = MULTIPLIERS | {
    Feature.EXPERTS,
    Feature.MIXED_LAYERS,
    Feature.NO_ROPE,
    Feature.RECURRENCE,
}
OF_NEMOTRON = {
    Feature.ACTIVATION,
    Feature.EXACT_ROUTER,
    Feature.EXPERTS,
    Feature.EXPERT_SCALE,
    Feature.HALF_LAYERS,
    Feature.MIXED_LAYERS,
    Feature.NO_ROPE,
    Feature.RECURRENCE,
    Feature.SELECTION_BIAS,
    Feature.SQUARED_RELU,
    Feature.UNGATED,
}


@pytest.mark.parametrize(
    ("raw", "size", "asked"),
    [
        (LLAMA_2, 6_738_415_616, set()),
        (TINYLLAMA, 1_100_048_384, set()),
        (MINISTRAL, 8_019_808_256, set()),
        (MISTRAL_SMALL, 23_572_403_200, set()),
        (MISTRAL_SMALL_IMAGES, 23_572_403_200, set()),
        (PHI_3_MINI, 3_821_079_552, {Feature.WINDOW}),
        (PHI_4_MINI, 3_836_021_760, {Feature.PARTIAL_ROPE}),
        (OLMO_2, 7_298_617_344, OLMO_FEATURES),
        (OLMO_3, 7_298_011_136, OLMO_FEATURES | {Feature.WINDOW, Feature.MIXED_LAYERS}),
        (GRANITE, 8_170_848_256, MULTIPLIERS),
        (GRANITE_MOE, 1_334_628_352, MULTIPLIERS | {Feature.EXPERTS}),
        (SMOLLM3, 3_075_098_624, {Feature.NO_ROPE, Feature.MIXED_LAYERS}),
        (GPT_OSS, 20_914_757_184, OF_GPT_OSS),
        (GRANITE_4, 3_402_836_480, MULTIPLIERS),
        (EXAONE_4, 32_003_216_384, OF_EXAONE),
        (SEED_OSS, 36_151_104_512, {Feature.QKV_BIAS}),
        (MINISTRAL_3, 3_429_006_336, {Feature.QUERY_SCALING}),
        (DEVSTRAL_2, 125_025_988_608, set()),
        (HUNYUAN, 7_504_568_320, {Feature.HEAD_NORM, Feature.NORM_ROTATED}),
        (COMMAND_R7B, 8_028_033_024, OF_COMMAND_R),
        (APERTUS, 8_053_338_176, OF_APERTUS),
        (LFM_3, 1_728_801_536, OF_LFM_3),
        (MUSE_GLIMMER, 27_854_780_928, OF_MUSE_GLIMMER),
        (SCOUT, 107_769_861_120, OF_SCOUT),
        (MAVERICK, 400_711_848_960, OF_MAVERICK),
        (GEMMA_3N, 6_835_235_568, OF_GEMMA_3N),
        (LFM_2, 1_170_340_608, OF_LFM_2),
        (LFM_2_MOE, 8_339_930_560, OF_LFM_2 | {Feature.EXPERTS, Feature.SELECTION_BIAS}),
        (DEEPSEEK_V2_LITE, 15_706_484_224, OF_DEEPSEEK),
        (DEEPSEEK_V3, 671_026_419_200, OF_DEEPSEEK_V3 | {Feature.EXPERT_GROUPS}),
        (GRANITE_HYBRID, 6_939_037_248, OF_GRANITE_HYBRID),
        (NEMOTRON_NANO, 31_577_940_288, OF_NEMOTRON),
        (GLM_4_7_FLASH, 29_943_393_920, OF_DEEPSEEK_V3 | {Feature.MIXED_EPS}),
    ],
)
def test_well_known_checkpoints_have_the_size_that_is_known_of_them(
    raw: dict[str, Any], size: int, asked: set[Feature]
) -> None:
    assert parameters(hf(raw)) == size
    assert features(hf(raw)) == asked


def test_phi_4_mini() -> None:
    rope = hf(PHI_4_MINI).attention.rope
    assert rope == Rope(
        kind="longrope",
        original_positions=4096,
        dims=96,
        frequency_factors=(1.0,) * 48,
        long_factors=(2.0,) * 48,
        attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),
    )
    for old in ("su", "yarn"):
        scaling = PHI_4_MINI["rope_scaling"] | {"type": old}  # type: ignore[operator]
        assert hf(PHI_4_MINI | {"rope_scaling": scaling}).attention.rope == rope


def test_smollm3_rotates_three_layers_of_four() -> None:
    assert [layer.attention.rope for layer in hf(SMOLLM3).layers] == [*[Rope(5e6)] * 3, None] * 9
    assert hf(SMOLLM3 | {"no_rope_layers": None}) == hf(SMOLLM3)
    assert hf(SMOLLM3).tied


def test_olmo_3_scales_the_rotation_of_layers_without_a_window_alone() -> None:
    spec = hf(OLMO_3)
    scaled = Rope(5e5, "yarn", 8.0, original_positions=8192, attention_factor=1.2079441541679836, exact=True)
    plain = Rope(5e5, exact=True)
    assert [layer.attention.window for layer in spec.layers] == [4096, 4096, 4096, None] * 8
    assert [layer.attention.rope for layer in spec.layers] == [plain, plain, plain, scaled] * 8
    assert hf(OLMO_3 | {"layer_types": None}) == spec
    new = {"full_attention": OLMO_3["rope_scaling"], "sliding_attention": {"rope_type": "default"}}
    assert hf(OLMO_3 | {"rope_scaling": None, "rope_parameters": new}) == spec


def test_exaone_4_rotates_the_layers_with_a_window_alone() -> None:
    spec = hf(EXAONE_4)
    rope = Rope(1e6, "llama3", 16.0, original_positions=8192)
    assert [layer.attention.window for layer in spec.layers] == [4096, 4096, 4096, None] * 16
    assert [layer.attention.rope for layer in spec.layers] == [rope, rope, rope, None] * 16
    for pattern in ("LLLG", 4):
        assert hf(EXAONE_4 | {"layer_types": None, "sliding_window_pattern": pattern}) == spec
    whole = hf(EXAONE_4 | {"layer_types": None, "sliding_window": None})  # as the 1.2B model
    assert {(layer.attention.window, layer.attention.rope) for layer in whole.layers} == {(None, rope)}


def test_command_r7b_rotates_the_layers_with_a_window_alone() -> None:
    spec, rope = hf(COMMAND_R7B), Rope(5e4, interleaved=True, exact=True)
    assert [layer.attention.window for layer in spec.layers] == [4096, 4096, 4096, None] * 8
    assert [layer.attention.rope for layer in spec.layers] == [rope, rope, rope, None] * 8
    assert (spec.tied, spec.logit_scale) == (True, 0.25)
    types = [*["sliding_attention"] * 3, "full_attention"] * 8
    assert hf(COMMAND_R7B | {"layer_types": types, "sliding_window_pattern": None}) == spec


def test_lfm_3_has_its_defaults() -> None:
    spec = hf(LFM_3)
    needed = ("architectures", "tie_word_embeddings")
    assert hf({key: LFM_3[key] for key in needed}) == spec
    whole = Rope(1e6, frequency_factors=(1.0,) * 32 + (math.inf,) * 32, exact=True)
    attention = Attention(16, 4, 128, head_norm=Norm(1e-5), rope=whole, gate="heads")
    local = replace(attention, rope=Rope(1e4, exact=True), window=256)
    convolution = ShortConvolution(2048, 7)
    mixers = [layer.mixer for layer in spec.layers]
    assert mixers == [
        *[convolution, convolution],
        *[attention, convolution, local, convolution] * 5,
        attention,
        convolution,
    ]
    assert {layer.feed_forward_post_norm for layer in spec.layers} == {Norm(1e-5)}


def test_muse_glimmer_rotates_the_layers_with_a_window_alone() -> None:
    spec = hf(MUSE_GLIMMER)
    assert hf(MUSE_GLIMMER | {"text_config": {}}) == spec
    whole = Attention(
        *(32, 2, 128),
        head_norm=Norm(1e-5, weighted=False),
        scale=3.87 * 128**-0.5,
        gate="numbers",
    )
    local = replace(whole, rope=Rope(), window=2048)
    assert [layer.attention for layer in spec.layers] == [local, local, local, whole] * 13
    norm, after = Norm(1e-5, offset=1.0), Norm(1e-8, offset=1.0)
    assert {layer.attention_norm for layer in spec.layers} == {norm}
    assert {layer.feed_forward_post_norm for layer in spec.layers} == {after}
    assert spec.final_norm == Norm(1e-5, rounds_last=True)


def test_llama_4_has_chunks_where_it_has_rotation_and_scaled_queries_elsewhere() -> None:
    spec = hf(SCOUT)
    rope = Rope(5e5, "llama3", 16.0, 1.0, 1.0, 8192, interleaved=True, exact=True)
    local = Attention(
        40, 8, 128, head_norm=Norm(1e-5, weighted=False), rope=rope, chunk=8192, norms_rotated=True
    )
    whole = Attention(40, 8, 128, query_scaling=QueryScaling(0.1, 8192, 1))
    assert [layer.attention for layer in spec.layers] == [local, local, local, whole] * 12
    experts = Experts(
        *(16, 1, FeedForward(8192)),
        renormalise=False,
        scoring="sigmoid",
        scales_inputs=True,
        shared=FeedForward(8192),
    )
    assert {layer.feed_forward for layer in spec.layers} == {experts}
    assert [layer.attention.chunk for layer in for_context(spec, 8192).layers] == [None] * 48
    assert for_context(spec, 8193) == spec
    given = {
        "layer_types",
        "attention_chunk_size",
        "attn_scale",
        "floor_scale",
        "head_dim",
        "num_hidden_layers",
    }
    text = {key: value for key, value in SCOUT["text_config"].items() if key not in given}
    assert hf(SCOUT | {"text_config": text}) == spec
    dense = [isinstance(layer.feed_forward, FeedForward) for layer in hf(MAVERICK).layers]
    assert dense == [True, False] * 24
    assert hf(MAVERICK).layers[0].feed_forward == FeedForward(16384)


def test_gemma_3n_has_its_defaults_and_shares_keys_and_values() -> None:
    spec, text = hf(GEMMA_3N), GEMMA_3N["text_config"]
    defaults = {"layer_types", "activation_sparsity_pattern", "intermediate_size", "head_dim", "vocab_size"}
    without = {key: value for key, value in text.items() if key not in defaults}
    assert hf(GEMMA_3N | {"text_config": without}) == spec
    assert replace(hf(GEMMA_3N_TEXT), architecture=spec.architecture) == spec
    assert [layer.attention.kv_from for layer in spec.layers] == [None] * 20 + [18, 18, 18, 18, 19] * 3
    assert [layer.attention.window for layer in spec.layers] == [512, 512, 512, 512, None] * 7
    assert [layer.attention.rope for layer in spec.layers[3:5]] == [Rope(1e4), Rope(1e6)]
    cutoffs = [layer.feed_forward.cutoff for layer in spec.layers]
    assert cutoffs == [pytest.approx(1.6448536)] * 10 + [None] * 25
    assert spec.layer_inputs is not None
    assert (spec.layer_inputs.size, spec.layer_inputs.vocab_size) == (256, 262144)


def test_ministral_3_scales_queries_beyond_the_original_context() -> None:
    text = MINISTRAL_3["text_config"]
    spec, alone = hf(MINISTRAL_3), hf({"architectures": ["Ministral3ForCausalLM"]} | text)
    assert {layer.attention.query_scaling for layer in spec.layers} == {QueryScaling(0.1, 16384)}
    assert {layer.attention.rope for layer in spec.layers} == {
        Rope(1e6, "yarn", 16.0, original_positions=16384)
    }
    assert replace(alone, architecture=spec.architecture) == spec
    defaults = (
        "head_dim",
        "max_position_embeddings",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
    )
    without = {key: value for key, value in text.items() if key not in defaults}
    assert hf(MINISTRAL_3 | {"text_config": without}) == spec
    rope = hf(DEVSTRAL_2).attention.rope
    assert rope is not None
    assert rope.attention_factor == 1 + 0.1 * math.log(64)


def test_hunyuan_stretches_theta_by_a_fixed_factor() -> None:
    rope = Rope(10_000.0 * 1000.0 ** (128 / 126))
    assert {layer.attention.rope for layer in hf(HUNYUAN).layers} == {rope}
    without = hf(HUNYUAN | {"rope_scaling": {"factor": 2.0, "type": "dynamic"}})
    assert without.attention.rope == Rope(10_000.0, "dynamic", 2.0)


def test_lfm_2_has_attention_in_the_layers_that_its_config_names() -> None:
    spec, sparse = hf(LFM_2), hf(LFM_2_MOE)
    attention = Attention(32, 8, 64, head_norm=Norm(1e-5), rope=Rope(1e6))
    assert spec.attentions == dict.fromkeys((2, 5, 8, 10, 12, 14), attention)
    assert {spec.layers[i].mixer for i in (0, 1, 15)} == {ShortConvolution(2048, 3)}
    assert {layer.feed_forward for layer in spec.layers} == {FeedForward(8192)}
    assert (spec.tied, spec.final_norm) == (True, Norm(1e-5))
    kinds = ["full_attention" if i in spec.attentions else "conv" for i in range(16)]
    assert hf(LFM_2 | {"layer_types": kinds, "full_attn_idxs": None}) == spec
    assert len(hf(LFM_2 | {"full_attn_idxs": None}).attentions) == 16
    exact = hf(LFM_2 | {"block_auto_adjust_ff_dim": False, "tie_embedding": False})
    assert (exact.layers[0].feed_forward, exact.tied) == (FeedForward(12288), False)
    experts = Experts(32, 4, FeedForward(1792), scoring="sigmoid", selection_bias=True)
    assert [layer.feed_forward for layer in sparse.layers] == [FeedForward(7168)] * 2 + [experts] * 22
    assert list(sparse.attentions) == [2, 6, 10, 14, 18, 21]


def test_deepseek_and_glm_keep_576_numbers_a_layer() -> None:
    lite, large, glm = (hf(raw) for raw in (DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_4_7_FLASH))
    for spec in (lite, large, glm):
        assert token_bytes(spec, torch.bfloat16) == 2 * 576 * len(spec.layers)
        assert token_bytes(spec, torch.bfloat16, "fp8") == 624 * len(spec.layers)  # with nine scales
        assert (spec.attentions, spec.window) == ({}, None)
    rope = Rope(1e4, "yarn", 40.0, original_positions=4096, interleaved=True)
    stretch = 1 + 0.1 * 0.707 * math.log(40)
    assert lite.layers[26].mixer == LatentAttention(
        16, None, 512, 128, 64, 128, Norm(1e-6), replace(rope, exact=True), 192**-0.5 * stretch**2
    )
    stretch = 1 + 0.1 * math.log(40)
    assert large.layers[60].mixer == LatentAttention(
        128, 1536, 512, 128, 64, 128, Norm(1e-6), rope, 192**-0.5 * stretch**2
    )
    assert glm.layers[46].mixer == LatentAttention(
        20, 768, 512, 192, 64, 256, Norm(1e-6), Rope(1e6, interleaved=True)
    )
    assert [layer.feed_forward for layer in large.layers] == [FeedForward(18432)] * 3 + [
        Experts(
            256,
            8,
            FeedForward(2048),
            scoring="sigmoid",
            exact_router=True,
            selection_bias=True,
            groups=8,
            chosen_groups=4,
            group_best=2,
            scale=2.5,
            shared=FeedForward(2048),
        )
    ] * 58
    experts = lite.layers[26].feed_forward
    assert experts == Experts(
        64, 6, FeedForward(1408), renormalise=False, exact_router=True, shared=FeedForward(2816)
    )
    assert lite.layers[0].feed_forward == FeedForward(10944)
    assert isinstance(glm.layers[1].feed_forward, Experts)


def test_granite_multiplies() -> None:
    spec = hf(GRANITE)
    assert {(layer.attention.scale, layer.residual_scale) for layer in spec.layers} == {(0.0078125, 0.22)}
    assert (spec.embedding_scale, spec.logit_scale) == (12.0, 1 / 16)
    assert not features(hf(GRANITE | dict.fromkeys(MULTIPLIED, 1.0) | {"attention_multiplier": 128**-0.5}))


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (SMOLLM3, {"no_rope_layers": [1, 0]}, ["no_rope_layers", "for each layer"]),
        (SMOLLM3, {"no_rope_layers": [[]] * 36}, ["no_rope_layers", "for each layer"]),
        (OLMO_3, {"layer_types": ["linear_attention"] * 32}, ["linear_attention"]),
        (OLMO_3, {"sliding_window": 0}, ["sliding_window"]),
        (GRANITE, {"residual_multiplier": -1}, ["residual_multiplier", "above 0"]),
        (GRANITE_4, {"layer_types": ["mamba"] * 40, "mamba_n_heads": 80}, ["no layer with attention"]),
        (GRANITE_4, {"layer_types": None}, ["layers_block_type", "40 layers"]),
        (EXAONE_4, {"layer_types": None, "sliding_window_pattern": "LX"}, ["sliding_window_pattern", "LLLG"]),
        (
            DEVSTRAL_2,
            {"rope_parameters": DEVSTRAL_ROPE | {"llama_4_scaling_beta": -1.0}},
            ["beta", "above 0"],
        ),
        (HUNYUAN, {"rope_scaling": {"alpha": -1, "factor": 1.0, "type": "dynamic"}}, ["alpha", "above 0"]),
        (LFM_2, {"layer_types": ["conv", "linear_attention"] * 8}, ["layer_types", "conv or full_attention"]),
        (LFM_2, {"layer_types": ["conv"] * 3}, ["layer_types", "16 layers"]),
        (LFM_2, {"full_attn_idxs": []}, ["no layer with attention"]),
        (LFM_2, {"conv_L_cache": 0}, ["conv_L_cache"]),
        (LFM_2, {"norm_eps": "x"}, ["norm_eps"]),
        (LFM_2_MOE, {"routed_scaling_factor": 2.5}, ["routed_scaling_factor", "only 1"]),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, ["topk_method", "greedy, group_limited_greedy"]),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, ["norm_topk_prob", "not supported"]),
        (DEEPSEEK_V2_LITE, {"kv_lora_rank": None}, ["kv_lora_rank", "incomplete"]),
        (DEEPSEEK_V3, {"topk_group": 9}, ["9 of 8 groups", "damaged"]),
        (DEEPSEEK_V3, {"n_group": 7}, ["4 of 7 groups", "damaged"]),
        (DEEPSEEK_V3, {"topk_group": 1, "n_group": 64}, ["8 of 256 experts from 1 of 64", "damaged"]),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "47 layers"]),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["linear"] * 47}, ["dense or sparse"]),
        (COMMAND_R7B, {"sliding_window_pattern": "LLLG"}, ["sliding_window_pattern", "a whole number"]),
        (GEMMA_3N, {"text_config": {"altup_active_idx": 1}}, ["altup_active_idx"]),
        (GEMMA_3N, {"text_config": {"altup_correct_scale": False}}, ["altup_correct_scale"]),
        (
            GEMMA_3N,
            {"text_config": {"activation_sparsity_pattern": [0.5]}},
            ["activation_sparsity_pattern", "35"],
        ),
        (GEMMA_3N, {"text_config": {"activation_sparsity_pattern": [1.0] * 35}}, ["below 1"]),
        (GEMMA_3N, {"text_config": {"num_kv_shared_layers": 35}}, ["no layer", "damaged"]),
        (MAVERICK, {"layer_types": ["sliding_attention"] * 48}, ["layer_types", "chunked_attention"]),
        (MAVERICK, {"no_rope_layers": [1]}, ["no_rope_layers"]),
        (MAVERICK, {"moe_layers": "all"}, ["moe_layers", "whole numbers"]),
        (LFM_3, {"layer_types": ["conv", "mamba"] * 12}, ["layer_types", "conv, sliding_attention or full"]),
        (MUSE_GLIMMER, {"text_config": {"hidden_activation": "gelu"}}, ["hidden_activation gelu", "silu"]),
        (MUSE_GLIMMER, {"text_config": {"layer_rope_theta": [0]}}, ["layer_rope_theta", "52 layers"]),
        (APERTUS, {"hidden_act": "silu"}, ["hidden_act silu", "xielu"]),
        (PHI_4_MINI, {"partial_rotary_factor": 0.7}, ["partial_rotary_factor", "89"]),
    ],
)
def test_what_cannot_be_run_is_one_line(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        hf(base | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


KNOWN = [
    *(LLAMA_2, MINISTRAL, PHI_4_MINI, SMOLLM3, OLMO_2, OLMO_3, GRANITE),
    *(QWEN3_MOE, GEMMA2, GEMMA3, GPT2, ERNIE, ERNIE_MOE, GPT_OSS),
    *(GRANITE_4, EXAONE_4, SEED_OSS, HUNYUAN, DEVSTRAL_2),
    *(COMMAND_R7B, APERTUS, GEMMA_3N_TEXT, MAVERICK, LFM_2, LFM_2_MOE, LFM_3),
    *(DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_4_7_FLASH),
]
READ = ("layer_types", "sliding_window", "use_sliding_window", "no_rope_layer_interval", "rope_parameters")
JUNK: tuple[Any, ...] = (
    *(0, 1, -1, 0.5, 1e29, 10**30, math.nan, math.inf, True, "x", [], [1], ["x"], [[]], {}),
    *({"rope_type": kind} for kind in ("yarn", "longrope", "llama3")),
    *({"full_attention": 3}, {"full_attention": {"rope_type": "yarn"}}),
)


@pytest.mark.parametrize("raw", KNOWN, ids=lambda raw: str(raw["architectures"][0]))
def test_whatever_a_field_holds_is_read_or_refused_in_one_line(raw: dict[str, Any]) -> None:
    scaling = raw.get("rope_scaling") or {}
    changes = [{key: junk} for key in {*raw, *READ} for junk in JUNK]
    changes += [{"rope_scaling": scaling | {key: junk}} for key in scaling for junk in JUNK]
    said = []
    for change in changes:
        try:
            hf(raw | change)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > len(changes) / 4
    assert not any("\n" in line for line in said)


def test_nemotron_3_has_one_part_in_each_layer() -> None:
    spec = hf(NEMOTRON_NANO)
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    as_pattern = {key: value for key, value in NEMOTRON_NANO.items() if key != "layers_block_type"}
    assert hf(as_pattern | {"hybrid_override_pattern": pattern}) == spec
    kinds = {Mamba2: "M", Attention: "*", type(None): "E"}
    assert "".join(kinds[type(layer.mixer)] for layer in spec.layers) == pattern
    assert all((layer.mixer is None) != (layer.feed_forward is None) for layer in spec.layers)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (
            NEMOTRON_NANO,
            {"layers_block_type": ["moe", "window"]},
            ["layers_block_type", "kind of each layer"],
        ),
        (NEMOTRON_NANO, {"layers_block_type": ["moe", "mlp"]}, ["no layer with attention"]),
        (NEMOTRON_NANO, {"mlp_hidden_act": "gelu"}, ["mlp_hidden_act", "relu2"]),
        (NEMOTRON_NANO, {"n_groups": 7}, ["64 Mamba heads", "7 groups"]),
        (NEMOTRON_NANO, {"num_experts_per_tok": 129}, ["129 of 128 experts"]),
        (GRANITE_HYBRID, {"mamba_d_head": 32}, ["48 heads of 32", "3072"]),
        (GRANITE_HYBRID, {"time_step_limit": [0.0]}, ["time_step_limit", "two numbers"]),
        (GRANITE_HYBRID, {"time_step_limit": "none"}, ["time_step_limit", "two numbers"]),
        (GRANITE_HYBRID, {"layer_types": ["mamba"] * 40}, ["no layer with attention"]),
        (GRANITE_HYBRID, {"layer_types": ["conv"] * 40}, ["layer_types", "40 layers"]),
    ],
)
def test_recurrent_layers_that_cannot_be_are_refused_in_one_line(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        hf(base | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
