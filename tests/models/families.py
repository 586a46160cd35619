"""Tiny configs of all families with every quirk turned on; texts exceed their windows and original positions."""

import math
from statistics import NormalDist
from typing import Any

from transformers import (
    ApertusConfig,
    BambaConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MuseGlimmerConfig,
    MuseGlimmerTextConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.models.checkpoints import VOCAB_SIZE, tiny_llama, tiny_qwen3

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
}
LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
OLMO3_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "attention_bias": True,
}


def tiny(config: type[Any], **changes: Any) -> Any:
    """Return `tiny_llama` as another kind of config."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rope_parameters")
    values = tiny_llama().to_dict()
    return config(**({key: values[key] for key in (*kept, *more)} | {"pad_token_id": None} | changes))


def tiny_qwen3_moe(**changes: Any) -> Qwen3MoeConfig:
    """Return four layers; the second and the last have eight experts, whose weights do not add up to 1."""
    values: dict[str, Any] = tiny_qwen3(num_hidden_layers=4).to_dict() | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "layer_types": None,
    }
    return Qwen3MoeConfig(**(values | changes))


def tiny_gemma2(**changes: Any) -> Gemma2Config:
    """Return four layers, two of them local, with caps and a scale that matter."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": 7,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    }
    return Gemma2Config(**(values | changes))


def tiny_gemma3(**changes: Any) -> Gemma3TextConfig:
    """Return seven layers; the sixth sees all tokens and has a RoPE of its own."""
    values: dict[str, Any] = tiny_gemma2(num_hidden_layers=7).to_dict() | {
        "model_type": "gemma3_text",
        "layer_types": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
    return Gemma3TextConfig(**(values | changes))


GEMMA4_WHOLE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def tiny_gemma4(**changes: Any) -> Gemma4TextConfig:
    """Return six layers as those of E2B: the last three have a wide MLP, and the keys and values of earlier ones."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "max_position_embeddings": 256,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "pad_token_id": None,
    }
    return Gemma4TextConfig(**(values | changes))


def tiny_gemma4_moe(**changes: Any) -> Gemma4TextConfig:
    """Return three layers like 26B-A4B, with eight experts beside each MLP; the values of the last are its keys."""
    values: dict[str, Any] = GEMMA4_WHOLE | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    }
    return tiny_gemma4(**(values | changes))


def tiny_gemma4_unified(**changes: Any) -> Gemma4UnifiedTextConfig:
    """Return layers as those of 12B, which are dense."""
    values = tiny_gemma4().to_dict() | GEMMA4_WHOLE | {"num_kv_shared_layers": 0, "global_head_dim": 32}
    left_out = ("model_type", "per_layer_config", "vocab_size_per_layer_input", "hidden_size_per_layer_input")
    return Gemma4UnifiedTextConfig(**{k: v for k, v in (values | changes).items() if k not in left_out})


def tiny_gemma3n(**changes: Any) -> Gemma3nTextConfig:
    """Return six layers; the first two have sparse gates, the last three keys and values of earlier ones."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": 7,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "pad_token_id": None,
    }
    return Gemma3nTextConfig(**(values | changes))


def tiny_gpt2(**changes: Any) -> GPT2Config:
    """Return three layers of four heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
    }
    return GPT2Config(**(values | changes))


def tiny_ernie(**changes: Any) -> Ernie4_5Config:
    """Return three layers, tied."""
    values = tiny_qwen3().to_dict() | {"model_type": "ernie4_5", "layer_types": None}
    return Ernie4_5Config(**(values | changes))


def tiny_ernie_moe(**changes: Any) -> Ernie4_5_MoeConfig:
    """Return five layers; the second and the fourth have eight experts and two shared ones."""
    values: dict[str, Any] = tiny_qwen3(num_hidden_layers=5).to_dict() | {
        "model_type": "ernie4_5_moe",
        "layer_types": None,
        "moe_intermediate_size": 40,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 3,
    }
    return Ernie4_5_MoeConfig(**(values | changes))


def tiny_gpt_oss(**changes: Any) -> GptOssConfig:
    """Return four layers of eight experts, two of them local; matrices are square where the real ones are."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "swiglu_limit": 7.0,
        "rope_parameters": YARN | {"truncate": False},
    }
    return GptOssConfig(**(values | changes))


def tiny_granite_moe(kind: type[Any] = GraniteMoeConfig, **changes: Any) -> Any:
    """Return layers with eight experts each."""
    values: dict[str, Any] = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3} | changes
    return tiny(kind, **{"intermediate_size": 40} | values)


def tiny_granite4(**changes: Any) -> GraniteMoeHybridConfig:
    """Return layers of attention alone; they are dense, and their feed-forward is the shared expert."""
    values = GRANITE | {
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "layer_types": ["attention"] * changes.get("num_hidden_layers", 3),
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
    }
    return tiny(GraniteMoeHybridConfig, **values | changes)


MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 3,
    "mamba_d_state": 10,
    "mamba_chunk_size": 8,
    "time_step_limit": (0.5, 1.0),
}


def tiny_bamba(**changes: Any) -> BambaConfig:
    """Return four layers; the second and the last have attention, the others are Mamba-2."""
    values = MAMBA2 | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}
    return tiny(BambaConfig, **values | changes)


def tiny_granite_hybrid(**changes: Any) -> GraniteMoeHybridConfig:
    """Return three layers with experts; the second has attention without positions, the others are Mamba-2."""
    values = MAMBA2 | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
    }
    return tiny_granite4(**values | changes)


def tiny_falcon_h1(**changes: Any) -> FalconH1Config:
    """Return three layers with every multiplier."""
    values = MAMBA2 | {
        "mamba_d_ssm": 60,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.25,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.5,
        "key_multiplier": 0.5,
        "mlp_multipliers": [0.5, 3.0],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
        "ssm_multipliers": [0.5, 1.5, 2.0, 0.75, 1.25],
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
    }
    found: FalconH1Config = tiny(FalconH1Config, **values | changes)
    return found


def tiny_nemotron_h(**changes: Any) -> NemotronHConfig:
    """Return six layers, each Mamba-2, attention, a dense feed-forward or eight experts alone."""
    values: dict[str, Any] = {
        "hybrid_override_pattern": "ME*M-E",
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 10,
        "n_groups": 3,
        "chunk_size": 8,
        "time_step_min": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    }
    found: NemotronHConfig = tiny(NemotronHConfig, **values | changes)
    return found


ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0}
STRETCHED = {"rope_type": "default", "rope_theta": 100.0 * 50.0 ** (24 / 22)}
"""What `ALPHA` amounts to with heads of 24."""
MINISTRAL3: dict[str, Any] = YARN | {
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}


def tiny_lfm2(kind: type[Any] = Lfm2Config, **changes: Any) -> Any:
    """Return five layers; the second and the fourth have attention, the others are convolutions."""
    values: dict[str, Any] = {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
        "block_multiple_of": 32,
        "tie_word_embeddings": True,
    }
    return tiny(kind, **values | changes)


def tiny_lfm2_moe(**changes: Any) -> Lfm2MoeConfig:
    """Return the same layers; the last three have eight experts."""
    values = {"num_dense_layers": 2, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
    return tiny_lfm2(Lfm2MoeConfig, **values | changes)


def tiny_llama4(**changes: Any) -> Llama4TextConfig:
    """Return four layers; the first three attend within chunks, the second and the last have eight experts."""
    values: dict[str, Any] = {
        "num_hidden_layers": 4,
        "intermediate_size": 40,
        "intermediate_size_mlp": 80,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 8,
        "attention_chunk_size": 12,
        "floor_scale": 10,
        "attn_scale": 0.7,
    }
    return tiny(Llama4TextConfig, **values | changes)


DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}


def tiny_deepseek(kind: type[Any] = DeepseekV3Config, **changes: Any) -> Any:
    """Return three layers; the last two have eight experts in four groups, and two shared ones."""
    values: dict[str, Any] = {
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    }
    return tiny(kind, **values | changes)


def tiny_deepseek_v2(**changes: Any) -> DeepseekV2Config:
    """Return the same for V2, whose queries have no low rank in V2-Lite."""
    values = {
        "topk_method": "group_limited_greedy",
        "num_key_value_heads": None,
        "rope_parameters": DEEPSEEK_YARN,
    }
    return tiny_deepseek(DeepseekV2Config, **values | changes)


def tiny_glm_lite(**changes: Any) -> Glm4MoeLiteConfig:
    """Return four layers as those of GLM-4.7-Flash; all but the first have eight experts, in one group."""
    values = {
        "num_hidden_layers": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
    }
    return tiny_deepseek(Glm4MoeLiteConfig, **values | changes)


def tiny_lfm3(**changes: Any) -> Lfm3Config:
    """Return six layers: convolutions, one layer with a window and two that see all tokens."""
    values: dict[str, Any] = {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention", "full_attention"],
        "head_dim": 24,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    }
    return tiny(Lfm3Config, **values | changes)


def tiny_muse_glimmer(**changes: Any) -> MuseGlimmerConfig:
    """Return five layers, of which the first and the last see all tokens, beside a small model of images."""
    values: dict[str, Any] = {
        "num_hidden_layers": 5,
        "head_dim": 24,
        "sliding_window": 7,
        "post_norm_eps": 0.01,
        "output_multiplier": 0.5,
    }
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = tiny(MuseGlimmerTextConfig, **values | changes)
    between = {"out_hidden_size": 16, "projector_hidden_size": 16}
    return MuseGlimmerConfig(text_config=text.to_dict(), vision_config=images, **between)


ALL_CHOSEN = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
"""No rounding changes which experts are chosen."""

FAMILIES: dict[str, Any] = {
    "qwen2": tiny(Qwen2Config),
    "qwen2 windows": tiny(Qwen2Config, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "phi3": tiny(Phi3Config, sliding_window=12),
    "phi3 longrope": tiny(
        Phi3Config,
        rope_parameters=dict(LONGROPE, partial_rotary_factor=0.5),
        original_max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
    "smollm3": tiny(SmolLM3Config, num_hidden_layers=4),
    "smollm3 layers": tiny(
        SmolLM3Config,
        no_rope_layers=[0, 1, 1],
        attention_bias=True,
        mlp_bias=True,
        use_sliding_window=True,
        sliding_window=12,
        rope_parameters=YARN,
    ),
    "mistral window": tiny(MistralConfig, sliding_window=12, head_dim=32),
    "ministral": tiny(
        MinistralConfig,
        sliding_window=12,
        head_dim=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": tiny(Ministral3Config, head_dim=24, rope_parameters=MINISTRAL3),
    "olmo2": tiny(Olmo2Config, attention_bias=True),
    "olmo3": tiny(
        Olmo3Config,
        num_hidden_layers=4,
        sliding_window=12,
        rope_parameters=OLMO3_ROPE,
    ),
    "granite": tiny(GraniteConfig, **GRANITE),
    "granite moe": tiny_granite_moe(),
    "granite moe shared": tiny_granite_moe(GraniteMoeSharedConfig, shared_intermediate_size=48),
    "qwen3 moe": tiny_qwen3_moe(),
    "gemma2": tiny_gemma2(),
    "gemma3": tiny_gemma3(),
    "gemma4": tiny_gemma4(),
    "gemma4 moe": tiny_gemma4_moe(),
    "gemma4 unified": tiny_gemma4_unified(),
    "gemma3n": tiny_gemma3n(),
    "gemma3n small": tiny_gemma3n(
        vocab_size_per_layer_input=VOCAB_SIZE - 20,
        laurel_rank=8,
        altup_num_inputs=2,
        num_kv_shared_layers=0,
        intermediate_size=[96, 64, 96, 64, 32, 96],
    ),
    "gpt2": tiny_gpt2(),
    "ernie": tiny_ernie(),
    "ernie moe": tiny_ernie_moe(),
    "gpt-oss": tiny_gpt_oss(),
    "exaone4": tiny(Exaone4Config, num_hidden_layers=4, sliding_window=12),
    "exaone4 whole": tiny(Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 3),
    "seed oss": tiny(SeedOssConfig, head_dim=24),
    "seed oss biases": tiny(SeedOssConfig, head_dim=24, attention_out_bias=True, mlp_bias=True),
    "granite4": tiny_granite4(),
    "granite4 moe": tiny_granite4(
        num_local_experts=8, num_experts_per_tok=3, intermediate_size=40, position_embedding_type=None
    ),
    "hunyuan": tiny(HunYuanDenseV1Config, head_dim=24, rope_parameters=ALPHA),
    "hunyuan biases": tiny(HunYuanDenseV1Config, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "cohere2": tiny(Cohere2Config, num_hidden_layers=4, sliding_window=12, tie_word_embeddings=True),
    "cohere2 biases": tiny(
        Cohere2Config,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        head_dim=24,
        attention_bias=True,
    ),
    "apertus": tiny(ApertusConfig),
    "apertus biases": tiny(ApertusConfig, head_dim=24, attention_bias=True, tie_word_embeddings=True),
    "llama4": tiny_llama4(),
    "llama4 plain": tiny_llama4(
        use_qk_norm=False,
        attn_temperature_tuning=False,
        num_experts_per_tok=3,
        moe_layers=[0, 3],
        no_rope_layers=[0, 1, 1, 0],
        attention_bias=True,
        rope_parameters=LLAMA4_ROPE,
    ),
    "llama4 of gguf": tiny_llama4(attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1),
    "lfm2": tiny_lfm2(),
    "lfm2 biases": tiny_lfm2(conv_bias=True, conv_L_cache=7, block_ffn_dim_multiplier=1.3),
    "lfm2 moe": tiny_lfm2_moe(),
    "muse glimmer": tiny_muse_glimmer(),
    "muse glimmer layers": tiny_muse_glimmer(
        attention_bias=True, layer_rope_theta=[0, 1.0, 1.0, 0, 1.0], layer_types=["sliding_attention"] * 5
    ),
    "lfm3": tiny_lfm3(),
    "lfm3 plain": tiny_lfm3(
        conv_bias=True, attention_bias=True, use_sandwich_norm=False, use_attention_gate=False, conv_L_cache=3
    ),
    "deepseek v2": tiny_deepseek_v2(),
    "deepseek v2 lite": tiny_deepseek_v2(q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1),
    "deepseek v3": tiny_deepseek(rope_parameters=DEEPSEEK_YARN),
    "deepseek v3 biases": tiny_deepseek(attention_bias=True, rope_interleave=False, norm_topk_prob=False),
    "glm4 moe lite": tiny_glm_lite(),
    "glm4 moe lite layers": tiny_glm_lite(mlp_layer_types=["sparse", "dense", "dense", "sparse"]),
}

RECURRENT: dict[str, Any] = {
    "bamba": tiny_bamba(),
    "bamba biases": tiny_bamba(
        attention_bias=True,
        mlp_bias=True,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_n_groups=1,
        mamba_d_conv=3,
        time_step_limit=(0.0, math.inf),
    ),
    "granite4 hybrid": tiny_granite_hybrid(),
    "granite4 hybrid dense": tiny_granite_hybrid(num_local_experts=0, position_embedding_type="rope"),
    "falcon h1": tiny_falcon_h1(),
    "falcon h1 no norm": tiny_falcon_h1(mamba_rms_norm=False, mamba_d_ssm=None, projectors_bias=True),
    "falcon h1 biases": tiny_falcon_h1(
        mamba_norm_before_gate=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        attention_in_multiplier=1.0,
        key_multiplier=1.0,
        mlp_multipliers=None,
        ssm_in_multiplier=1.0,
    ),
    "nemotron h": tiny_nemotron_h(),
    "nemotron h latent": tiny_nemotron_h(
        moe_latent_size=20,
        mlp_bias=True,
        use_bias=True,
        use_conv_bias=False,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
    ),
}
"""Families with Mamba-2 layers."""

GPT_OSS_PARTS: dict[str, dict[str, Any]] = {
    "gain": {"swiglu_alpha": 1.0},
    "limit": {"swiglu_limit": 100.0},
    "windows": {"sliding_window": 256},
    "layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "truncate": {"rope_parameters": YARN},
}
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 40}
_HEADS = _SMALL | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
_GEMMA = _HEADS | {"query_pre_attn_scalar": 36}
_FACTORS = {"short_factor": [1.0, 1.25] * 8, "long_factor": [1.0, 6.0] * 8}
_CONVOLVES = ["conv", "full_attention"]
_TYPES = ["sliding_attention", "full_attention"]
_GEMMA4 = _SMALL | {
    "vocab_size_per_layer_input": 40,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": _TYPES * 2,
}
FUSED: dict[str, Any] = {
    "qwen2 windows": tiny(
        Qwen2Config, **_HEADS, use_sliding_window=True, sliding_window=12, max_window_layers=1
    ),
    "phi3": tiny(Phi3Config, **_HEADS | {"hidden_size": 192}, sliding_window=12),
    "phi3 longrope": tiny(
        Phi3Config,
        **_HEADS,
        rope_parameters=dict(LONGROPE, **_FACTORS, partial_rotary_factor=0.5),
        original_max_position_embeddings=32,
    ),
    "smollm3": tiny(SmolLM3Config, **_HEADS, no_rope_layers=[0, 1]),
    "ministral": tiny(MinistralConfig, **_HEADS, sliding_window=12, head_dim=128, layer_types=_TYPES),
    "ministral3": tiny(Ministral3Config, **_HEADS, head_dim=128, rope_parameters=MINISTRAL3),
    "olmo2": tiny(Olmo2Config, **_HEADS | {"num_key_value_heads": 2}, attention_bias=True),
    "olmo3": tiny(Olmo3Config, **_HEADS, layer_types=_TYPES, sliding_window=12, rope_parameters=OLMO3_ROPE),
    "granite": tiny(GraniteConfig, **_HEADS, **GRANITE | {"attention_multiplier": 0.25}),
    "granite moe": tiny_granite_moe(
        GraniteMoeSharedConfig, **_HEADS, shared_intermediate_size=48, attention_multiplier=0.25
    ),
    "gemma2": tiny_gemma2(**_GEMMA, head_dim=64),
    "gemma3": tiny_gemma3(**_GEMMA, head_dim=256, layer_types=_TYPES),
    "gemma4": tiny_gemma4(**_GEMMA4, num_kv_shared_layers=2, head_dim=64, global_head_dim=512),
    "gemma4 unified": tiny_gemma4_unified(
        **_GEMMA4 | {"num_key_value_heads": 1}, head_dim=256, global_head_dim=128
    ),
    "gemma4 moe": tiny_gemma4_moe(
        **_GEMMA4 | {"num_key_value_heads": 4, "num_hidden_layers": 2, "layer_types": _TYPES},
        head_dim=128,
        global_head_dim=256,
    ),
    "ernie": tiny_ernie(**_HEADS, head_dim=128),
    "qwen3 moe": tiny_qwen3_moe(**_HEADS, head_dim=64),
    "ernie moe": tiny_ernie_moe(**_HEADS, head_dim=64, moe_layer_end_index=1),
    "gpt-oss": tiny_gpt_oss(**_HEADS, head_dim=64),
    "exaone4": tiny(Exaone4Config, **_HEADS, sliding_window=12, layer_types=_TYPES),
    "seed oss": tiny(SeedOssConfig, **_HEADS, head_dim=128),
    "granite4": tiny_granite4(**_HEADS, attention_multiplier=0.25),
    "hunyuan": tiny(HunYuanDenseV1Config, **_HEADS, head_dim=96),
    "lfm2": tiny_lfm2(**_HEADS, layer_types=_CONVOLVES),
    "lfm2 biases": tiny_lfm2(**_HEADS, layer_types=_CONVOLVES, conv_bias=True, conv_L_cache=7),
    "lfm2 moe": tiny_lfm2_moe(**_HEADS, layer_types=_CONVOLVES, num_dense_layers=1),
}
"""Configs with head sizes that the fused kernels know, and as many layers as differ from each other."""

_LATENT = _SMALL | {
    "hidden_size": 144,
    "num_attention_heads": 18,
    "num_key_value_heads": 18,
    "num_hidden_layers": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
"""As many heads as two programs share."""
FUSED_LATENTS: dict[str, Any] = {
    "glm4 moe lite": tiny_glm_lite(**_LATENT),
    "deepseek v2 lite": tiny_deepseek_v2(**_LATENT | {"q_lora_rank": None}, topk_method="greedy"),
    "deepseek v3 biases": tiny_deepseek(
        **_LATENT, attention_bias=True, rope_interleave=False, first_k_dense_replace=2
    ),
}

GEMMA4_PARTIAL = {kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in _TYPES}
MULTIPLIERS = [name for name in GRANITE if name != "attention_bias"]
PLAINER: dict[str, Any] = {
    "hunyuan": tiny(HunYuanDenseV1Config, head_dim=24, rope_parameters=ALPHA | {"rope_type": "default"}),
    "hunyuan norms": tiny(Qwen3Config, head_dim=24, rope_parameters=STRETCHED),
    "qwen2 windows": tiny(Qwen2Config),
    "phi3": tiny(Phi3Config),
    "phi3 longrope": tiny(Phi3Config, tie_word_embeddings=True),
    "smollm3": tiny(SmolLM3Config, num_hidden_layers=4, no_rope_layers=[1] * 4),
    "smollm3 layers": tiny(SmolLM3Config, no_rope_layers=[1] * 3, attention_bias=True, mlp_bias=True),
    "mistral window": tiny(MistralConfig, sliding_window=None, head_dim=32),
    "ministral": tiny(MinistralConfig, sliding_window=12, head_dim=24),
    "ministral3": tiny(
        Ministral3Config, head_dim=24, rope_parameters=MINISTRAL3 | {"llama_4_scaling_beta": 0.0}
    ),
    "olmo3": tiny(Olmo2Config, num_hidden_layers=4),
    "olmo3 windows": tiny(Olmo3Config, num_hidden_layers=4, rope_parameters=OLMO3_ROPE, sliding_window=256),
    "olmo3 rope": tiny(Olmo3Config, num_hidden_layers=4, rope_parameters=None, sliding_window=12),
    "exaone4": tiny(
        Exaone4Config, num_hidden_layers=4, sliding_window=12, layer_types=["full_attention"] * 4
    ),
    "exaone4 whole": tiny(Exaone4Config, sliding_window=12, layer_types=["full_attention"] * 3),
    "granite4": tiny_granite4(position_embedding_type=None),
    "cohere2 logits": tiny(
        Cohere2Config, num_hidden_layers=4, sliding_window=12, tie_word_embeddings=True, logit_scale=1.0
    ),
    "cohere2 windows": tiny(Cohere2Config, num_hidden_layers=4, sliding_window=256, tie_word_embeddings=True),
    "cohere2 layers": tiny(
        Cohere2Config,
        num_hidden_layers=4,
        sliding_window=12,
        layer_types=["sliding_attention"] * 4,
        tie_word_embeddings=True,
    ),
    "gemma3n gates": tiny_gemma3n(activation_sparsity_pattern=[0.0] * 6),
    "gemma3n windows": tiny_gemma3n(sliding_window=256),
    "gemma3n caps": tiny_gemma3n(final_logit_softcapping=500.0),
    "llama4 chunks": tiny_llama4(attention_chunk_size=256),
    "llama4 norms": tiny_llama4(use_qk_norm=False),
    "llama4 scales": tiny_llama4(attn_temperature_tuning=False),
    "llama4 layers": tiny_llama4(layer_types=["chunked_attention"] * 4),
    "muse glimmer windows": tiny_muse_glimmer(sliding_window=256),
    "muse glimmer scale": tiny_muse_glimmer(qk_scale_factor=1.0),
    "muse glimmer rope": tiny_muse_glimmer(layer_rope_theta=[1.0] * 5),
    "muse glimmer caps": tiny_muse_glimmer(final_logit_softcapping=0.5),
    "muse glimmer logits": tiny_muse_glimmer(output_multiplier=1.0),
    "lfm3 windows": tiny_lfm3(sliding_window=256),
    "lfm3 rope": tiny_lfm3(
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in _TYPES}
    ),
    "gemma4 shared": tiny_gemma4(use_double_wide_mlp=False),
    "gemma4 windows": tiny_gemma4(sliding_window=256),
    "gemma4 rope": tiny_gemma4(rope_parameters=GEMMA4_PARTIAL),
    "gemma4 caps": tiny_gemma4(final_logit_softcapping=None),
    "gemma4 moe experts": tiny_gemma4_moe(top_k_experts=2),
    "gemma4 unified values": tiny_gemma4_unified(attention_k_eq_v=False),
    "lfm2 moe choice": tiny_lfm2_moe(use_expert_bias=False),
    "lfm2 moe sums": tiny_lfm2_moe(norm_topk_prob=False),
    "deepseek v2 groups": tiny_deepseek_v2(topk_method="greedy"),
    "deepseek v2 scale": tiny_deepseek_v2(rope_parameters=YARN),
    "deepseek v3 groups": tiny_deepseek(rope_parameters=DEEPSEEK_YARN, topk_group=4),
    "deepseek v3 sums": tiny_deepseek(rope_parameters=DEEPSEEK_YARN, routed_scaling_factor=1.0),
    "deepseek v3 rope": tiny_deepseek(rope_parameters=DEEPSEEK_YARN, rope_interleave=False),
    "glm4 moe lite sums": tiny_glm_lite(routed_scaling_factor=1.0),
    **{f"gpt-oss {part}": tiny_gpt_oss(**change) for part, change in GPT_OSS_PARTS.items()},
    **{f"granite moe {part}": tiny_granite_moe(**{part: 1.0}) for part in MULTIPLIERS},
    **{f"granite {part}": tiny(GraniteConfig, **(GRANITE | {part: 1.0})) for part in MULTIPLIERS},
}
"""The same weights without each quirk: if a quirk made no difference, nothing would test it."""

GEMMA4_GGUF: dict[str, Any] = {
    "gemma4.attention.key_length": 32,
    "gemma4.attention.value_length": 32,
    "gemma4.attention.key_length_swa": 16,
    "gemma4.attention.value_length_swa": 16,
    "gemma4.attention.sliding_window_pattern": [True, True, False] * 2,
    "gemma4.final_logit_softcapping": 5.0,
    "gemma4.rope.dimension_count": 32,
    "gemma4.rope.dimension_count_swa": 16,
    "gemma4.rope.freq_base_swa": 100.0,
}
DEEPSEEK_GGUF: dict[str, Any] = {
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 8.0,
    "deepseek2.rope.scaling.original_context_length": 32,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
}
GGUF: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 windows": {
        "qwen2.attention.sliding_window": 12,
        "qwen2.attention.sliding_window_pattern": [False, True, True],
    },
    "phi3": {"phi3.attention.sliding_window": 12},
    "phi3 longrope": {
        "phi3.rope.dimension_count": 8,
        "phi3.rope.scaling.original_context_length": 32,
        "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(8) / math.log(32)),
    },
    "smollm3": {},
    "mistral window": {"llama.attention.sliding_window": 12},
    "ministral3": {
        "mistral3.rope.scaling.type": "yarn",
        "mistral3.rope.scaling.factor": 8.0,
        "mistral3.rope.scaling.original_context_length": 16,
        "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
        "mistral3.attention.temperature_scale": 0.7,
    },
    "olmo2": {},
    "olmo3": {
        "olmo2.attention.sliding_window": 12,
        "olmo2.attention.sliding_window_pattern": [True, True, True, False],
        "olmo2.rope.scaling.type": "yarn",
        "olmo2.rope.scaling.factor": 8.0,
        "olmo2.rope.scaling.original_context_length": 32,
    },
    "granite": {
        "granite.embedding_scale": 12.0,
        "granite.logit_scale": 8.0,
        "granite.residual_scale": 0.22,
        "granite.attention.scale": 0.5,
    },
    **{
        name: {
            "granitemoe.embedding_scale": 12.0,
            "granitemoe.logit_scale": 8.0,
            "granitemoe.residual_scale": 0.22,
            "granitemoe.attention.scale": 0.5,
        }
        for name in ("granite moe", "granite moe shared")
    },
    "gemma4": GEMMA4_GGUF
    | {
        "gemma4.attention.shared_kv_layers": 3,
        "gemma4.embedding_length_per_layer_input": 8,
        "gemma4.feed_forward_length": [96] * 3 + [192] * 3,
    },
    "gemma4 moe": GEMMA4_GGUF
    | {
        "gemma4.attention.head_count_kv": [2, 2, 1],
        "gemma4.attention.sliding_window_pattern": [True, True, False],
        "gemma4.expert_count": 8,
        "gemma4.expert_used_count": 3,
        "gemma4.expert_feed_forward_length": 40,
    },
    "gemma4 unified": GEMMA4_GGUF | {"gemma4.attention.head_count_kv": [2, 2, 1] * 2},
    "gemma3n": {
        "gemma3n.attention.sliding_window_pattern": [True, True, False] * 2,
        "gemma3n.attention.shared_kv_layers": 3,
        "gemma3n.embedding_length_per_layer_input": 8,
        "gemma3n.altup.num_inputs": 3,
        "gemma3n.activation_sparsity_scale": [NormalDist().inv_cdf(0.9), 0.0, *[-math.inf] * 4],
        "gemma3n.final_logit_softcapping": 5.0,
        "gemma3n.rope.freq_base_swa": 100.0,
    },
    "exaone4": {"exaone4.attention.sliding_window": 12},
    "exaone4 whole": {},
    "seed oss": {},
    "hunyuan": {},
    "hunyuan biases": {},
    "cohere2": {"cohere2.attention.sliding_window": 12, "cohere2.logit_scale": 0.0625},
    "apertus": {},
    "llama4 of gguf": {},
    "lfm2": {},
    "lfm2 biases": {},
    "lfm2 moe": {},
    "deepseek v2": DEEPSEEK_GGUF,
    "deepseek v2 lite": DEEPSEEK_GGUF,
    "deepseek v3": DEEPSEEK_GGUF,
    "glm4 moe lite": {},
    "gpt-oss": {
        "gpt-oss.attention.sliding_window": 7,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 8.0,
        "gpt-oss.rope.scaling.original_context_length": 32,
    },
}
"""The configs that also exist as GGUF files, and their metadata besides the sizes."""

GGUF_FACTORS: dict[str, dict[str, Any]] = {
    "phi3 longrope": {"rope_factors": LONGROPE["short_factor"], "long_factors": LONGROPE["long_factor"]},
    **{name: {"rope_factors": [1.0] * 4 + [1e30] * 12} for name in GGUF if name.startswith("gemma4")},
}
"""The divisors of rotary frequencies for GGUF files, which are tensors."""

_UNLIMITED = {"time_step_limit": (0.0, math.inf)}
RECURRENT_GGUF: dict[str, Any] = {
    "granite hybrid": tiny_granite_hybrid(**_UNLIMITED),
    "granite hybrid dense": tiny_granite_hybrid(
        **_UNLIMITED,
        num_local_experts=0,
        intermediate_size=128,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
    ),
    "nemotron h dense": tiny_nemotron_h(hybrid_override_pattern="M-*-M", time_step_min=0.001, mlp_bias=True),
    "nemotron h moe": tiny_nemotron_h(time_step_min=0.001),
    "nemotron h latent": tiny_nemotron_h(time_step_min=0.001, moe_latent_size=20, norm_topk_prob=False),
}
"""Configs with Mamba-2 layers, whose steps have the limits that GGUF files do not tell."""

GRANITE_HYBRID_GGUF: dict[str, Any] = {
    "granitehybrid.embedding_scale": 12.0,
    "granitehybrid.logit_scale": 8.0,
    "granitehybrid.residual_scale": 0.22,
    "granitehybrid.attention.scale": 0.5,
}
