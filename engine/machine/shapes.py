"""The shapes of catalogue models, from their config.json, to compute their memory needs and speed."""

from functools import cache
from typing import Any

from models.families.registry import spec_of_hf
from models.spec import ModelSpec


def _config(
    architecture: str, sizes: tuple[int, int, int, int, int, int], context: int, tied: bool, **more: Any
) -> dict[str, Any]:
    """Build a config from `sizes`: hidden, feed-forward, layers, query heads, KV heads, vocabulary."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    found = dict(zip((*names, "vocab_size"), sizes, strict=True))
    named = {"architectures": [architecture], "max_position_embeddings": context, "tie_word_embeddings": tied}
    return named | found | more


def _qwen3(hidden: int, feed_forward: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    sizes = (hidden, feed_forward, layers, heads, 8, 151_936)
    return _config("Qwen3ForCausalLM", sizes, 40_960, tied, head_dim=128, rope_theta=1e6)


def _granite_moe(hidden: int, layers: int, heads: int, experts: int) -> dict[str, Any]:
    return _config(
        "GraniteMoeForCausalLM",
        (hidden, 512, layers, heads, 8, 49_155),
        131_072,
        True,
        num_local_experts=experts,
        num_experts_per_tok=8,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=6.0,
    )


def _granite4(sizes: tuple[int, int, int, int, int, int], scale: float, logits: float) -> dict[str, Any]:
    return _config(
        "GraniteMoeHybridForCausalLM",
        sizes,
        131_072,
        True,
        layer_types=["attention"] * sizes[2],
        position_embedding_type="rope",
        rope_theta=1e7,
        num_local_experts=0,
        shared_intermediate_size=sizes[1],
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=scale,
        logits_scaling=logits,
    )


def _layer_types(layers: int, period: int) -> list[str]:
    """Name the layers if one of each `period` sees all tokens."""
    return ["sliding_attention" if layer % period else "full_attention" for layer in range(1, layers + 1)]


def _gemma4(
    sizes: tuple[int, int, int, int, int, int], context: int, period: int = 6, **more: Any
) -> dict[str, Any]:
    """Build a config in which one layer of each `period` sees all tokens."""
    return {
        **_config("Gemma4ForCausalLM", sizes, context, True),
        "layer_types": _layer_types(sizes[2], period),
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        **more,
    }


def _hunyuan(sizes: tuple[int, int, int, int, int, int]) -> dict[str, Any]:
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    return _config(
        "HunYuanDenseV1ForCausalLM", sizes, 262_144, True, head_dim=128, rope_theta=1e4, rope_scaling=rope
    )


def _qwen3_5(sizes: tuple[int, int, int, int, int, int], tied: bool, **more: Any) -> dict[str, Any]:
    """Build a config with gated delta nets in all layers but the last of each four."""
    kinds = ["linear_attention" if layer % 4 else "full_attention" for layer in range(1, sizes[2] + 1)]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    fields = {"head_dim": 256, "layer_types": kinds, "rope_parameters": rope, **more}
    return _config("Qwen3_5ForCausalLM", sizes, 262_144, tied, **fields)


def _lfm2(
    architecture: str, sizes: tuple[int, int, int, int, int, int], attending: tuple[int, ...], **more: Any
) -> dict[str, Any]:
    """Build a config with attention in the layers `attending`, and short convolutions in the others."""
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(sizes[2])]
    return _config(architecture, sizes, 128_000, True, layer_types=kinds, rope_theta=1e6, **more)


_GEMMA4_SMALL = {
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_GEMMA4_LARGE = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256}
_QWEN_1_5B = _config("Qwen2ForCausalLM", (1536, 8960, 28, 12, 2, 151_936), 32_768, True)
_PARTS = [1.0] * 48

CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2": _config("LlamaForCausalLM", (576, 1536, 30, 9, 3, 49_152), 8192, True, rope_theta=1e5),
    "qwen3:0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3:1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3:4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3:8b": _qwen3(4096, 12_288, 36, 32, False),
    "qwen3:14b": _qwen3(5120, 17_408, 40, 40, False),
    "qwen3:32b": _qwen3(5120, 25_600, 64, 64, False),
    "qwen3.5:0.8b": _qwen3_5((1024, 3584, 24, 8, 2, 248_320), True, linear_num_value_heads=16),
    "qwen3.5:4b": _qwen3_5((2560, 9216, 32, 16, 4, 248_320), True),
    "qwen3.5:9b": _qwen3_5((4096, 12_288, 32, 16, 4, 248_320), False),
    "qwen3.5:35b-a3b": _qwen3_5(
        (2048, 512, 40, 16, 2, 248_320),
        False,
        architectures=["Qwen3_5MoeForCausalLM"],
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "qwen3:30b-a3b": _config(
        "Qwen3MoeForCausalLM",
        (2048, 6144, 48, 32, 4, 151_936),
        40_960,
        False,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen2.5:0.5b": _config("Qwen2ForCausalLM", (896, 4864, 24, 14, 2, 151_936), 32_768, True),
    "qwen2.5:1.5b": _QWEN_1_5B,
    "qwen2.5-coder:1.5b": _QWEN_1_5B,
    "llama3.2:1b": _config("LlamaForCausalLM", (2048, 8192, 16, 32, 8, 128_256), 131_072, True),
    "llama3.2:3b": _config("LlamaForCausalLM", (3072, 8192, 28, 24, 8, 128_256), 131_072, True),
    "smollm2:1.7b": _config("LlamaForCausalLM", (2048, 8192, 24, 32, 32, 49_152), 8192, True),
    "smollm3:3b": _config("SmolLM3ForCausalLM", (2048, 11_008, 36, 16, 4, 128_256), 65_536, True),
    "mistral:7b": _config(
        "MistralForCausalLM", (4096, 14_336, 32, 32, 8, 32_000), 32_768, False, sliding_window=None
    ),
    "gemma2:2b": _config(
        "Gemma2ForCausalLM",
        (2304, 9216, 26, 8, 4, 256_000),
        8192,
        True,
        **_GEMMA,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
    ),
    "gemma3:1b": _config(
        "Gemma3ForCausalLM",
        (1152, 6912, 26, 4, 1, 262_144),
        32_768,
        True,
        **_GEMMA,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    ),
    "gemma4:e2b": _gemma4(
        (1536, 6144, 35, 8, 1, 262_144),
        131_072,
        5,
        **_GEMMA4_SMALL,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma4:e4b": _gemma4(
        (2560, 10_240, 42, 8, 2, 262_144), 131_072, **_GEMMA4_SMALL, num_kv_shared_layers=18
    ),
    "gemma4:12b": {
        **_gemma4((3840, 15_360, 48, 16, 8, 262_144), 262_144, **_GEMMA4_LARGE, num_global_key_value_heads=1),
        "architectures": ["Gemma4UnifiedForCausalLM"],
    },
    "gemma4:26b-a4b": _gemma4(
        (2816, 2112, 30, 16, 8, 262_144),
        262_144,
        **_GEMMA4_LARGE,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma4:31b": _gemma4(
        (5376, 21_504, 60, 32, 16, 262_144), 262_144, **_GEMMA4_LARGE, num_global_key_value_heads=4
    ),
    "phi3:3.8b": _config(
        "Phi3ForCausalLM", (3072, 8192, 32, 32, 32, 32_064), 4096, False, sliding_window=2047
    ),
    "phi4-mini:3.8b": _config(
        "Phi3ForCausalLM",
        (3072, 8192, 32, 24, 8, 200_064),
        131_072,
        True,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": _PARTS, "long_factor": _PARTS},
    ),
    "granite3.1-moe:1b": _granite_moe(1024, 24, 16, 32),
    "granite3.1-moe:3b": _granite_moe(1536, 32, 24, 40),
    "granite3.3:2b": _config(
        "GraniteForCausalLM",
        (2048, 8192, 40, 32, 8, 49_159),
        131_072,
        True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
    ),
    "granite4:1b": _granite4((2048, 4096, 40, 16, 4, 100_352), 0.0078125, 8.0),
    "granite4:3b": _granite4((2560, 8192, 40, 40, 8, 100_352), 0.015625, 10.0),
    "olmo2:1b": _config("Olmo2ForCausalLM", (2048, 8192, 16, 16, 16, 100_352), 4096, False),
    "ernie4.5:0.3b": _config(
        "Ernie4_5ForCausalLM", (1024, 3072, 18, 16, 2, 103_424), 131_072, True, head_dim=128, use_bias=False
    ),
    "ministral3:3b": _config(
        "Ministral3ForCausalLM", (3072, 9216, 26, 32, 8, 131_072), 262_144, True, head_dim=128
    ),
    "ministral3:8b": _config(
        "Ministral3ForCausalLM", (4096, 14_336, 34, 32, 8, 131_072), 262_144, False, head_dim=128
    ),
    "ministral3:14b": _config(
        "Ministral3ForCausalLM", (5120, 16_384, 40, 32, 8, 131_072), 262_144, False, head_dim=128
    ),
    "exaone4:1.2b": _config(
        "Exaone4ForCausalLM",
        (2048, 4096, 30, 32, 8, 102_400),
        65_536,
        True,
        head_dim=64,
        rope_theta=1e6,
        layer_types=["full_attention"] * 30,
        sliding_window=None,
    ),
    "exaone4:32b": _config(
        "Exaone4ForCausalLM",
        (5120, 27_392, 64, 40, 8, 102_400),
        131_072,
        False,
        head_dim=128,
        rope_theta=1e6,
        layer_types=_layer_types(64, 4),
        sliding_window=4096,
    ),
    "seed-oss:36b": _config(
        "SeedOssForCausalLM",
        (5120, 27_648, 64, 80, 8, 155_136),
        524_288,
        False,
        head_dim=128,
        rope_theta=1e7,
        attention_bias=True,
    ),
    "hunyuan:1.8b": _hunyuan((2048, 6144, 32, 16, 4, 120_818)),
    "hunyuan:4b": _hunyuan((3072, 8192, 36, 32, 8, 120_818)),
    "hunyuan:7b": _hunyuan((4096, 14_336, 32, 32, 8, 128_167)),
    "command-r:7b": _config(
        "Cohere2ForCausalLM",
        (4096, 14_336, 32, 32, 8, 256_000),
        132_096,
        True,
        head_dim=128,
        rope_theta=5e4,
        sliding_window=4096,
        sliding_window_pattern=4,
        logit_scale=0.25,
    ),
    "lfm2.5:1.2b": _lfm2("Lfm2ForCausalLM", (2048, 12_288, 16, 32, 8, 65_536), (2, 5, 8, 10, 12, 14)),
    "lfm2.5:8b-a1b": _lfm2(
        "Lfm2MoeForCausalLM",
        (2048, 7168, 24, 32, 8, 128_000),
        (2, 6, 10, 14, 18, 21),
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
    ),
    "gpt-oss:20b": _config(
        "GptOssForCausalLM",
        (2880, 2880, 24, 64, 8, 201_088),
        131_072,
        False,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "glm4.7-flash": _config(
        "Glm4MoeLiteForCausalLM",
        (2048, 10_240, 47, 20, 20, 154_880),
        202_752,
        False,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        routed_scaling_factor=1.8,
    ),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
    },
}
"""The configs by catalogue name."""

COMMON = ("smollm2", "qwen3:0.6b", "qwen3:1.7b", "qwen3:4b", "qwen3:8b")
"""The models whose expected speed `doctor` reports."""


@cache
def known_shape(name: str) -> ModelSpec:
    """Return the description of a model in CONFIGS."""
    return spec_of_hf(CONFIGS[name])[1]
