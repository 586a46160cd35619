"""Qwen3 with a mixture of experts in most layers: 30B-A3B, 235B-A22B."""

from models.families.common import base_spec_of_gguf
from models.families.experts import gguf_expert_layers, whole_numbers, with_experts
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.qwen3 import without_windows
from models.families.windows import windows
from models.spec import Experts, FeedForward, ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    # Without head_dim, a sparse config means hidden_size / heads; the default of 128 is that of dense Qwen3 only.
    spec = without_windows(architecture, fields, head_dim=None)
    window = fields.raw.get("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    spec = windows(spec, fields, window)
    dense, step = whole_numbers(fields, "mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    size = FeedForward(fields.integer("moe_intermediate_size", 768))
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
    experts = Experts(
        fields.integer(count, 128, limit=4096),
        fields.integer("num_experts_per_tok", 8),
        size,
        renormalise=fields.flag("norm_topk_prob"),
    )
    sparse = [i for i in range(len(spec.layers)) if i not in dense and (i + 1) % step == 0]
    return with_experts(spec, experts, sparse)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec = base_spec_of_gguf("Qwen3MoeForCausalLM", "qwen3moe", config, head_norm=True, experts=True)
    fields = config.fields
    experts = Experts(
        fields.integer("qwen3moe.expert_count", limit=4096),
        fields.integer("qwen3moe.expert_used_count"),
        FeedForward(fields.integer("qwen3moe.expert_feed_forward_length")),
        renormalise=fields.flag("qwen3moe.expert_weights_norm", True),
    )
    return with_experts(spec, experts, gguf_expert_layers(config, spec))


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe",),
    from_hf=_from_hf,
    gguf_architecture="qwen3moe",
    from_gguf=_from_gguf,
)
