"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention, and experts beside shared ones."""

from collections.abc import Iterable
from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.experts import gguf_expert_layers, with_experts
from models.families.family import GGUF_NAMES, GGUF_PACKED, NAMES, PACKED, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_parameters, yarn_attention
from models.spec import Experts, FeedForward, LatentAttention, ModelSpec, Norm, Rope, each_layer

_NORM = Norm(1e-6)
"""The norm of latents and low-rank queries, which does not have the epsilon of the config."""
_SOFTMAX, _SIGMOID = 1, 2
"""The numbers of the scorings of experts in GGUF files."""


def _v2_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    method = fields.raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"topk_method in {fields.where} is {str(method)[:60]!r}; supported: greedy, group_limited_greedy."
        )
    if fields.flag("norm_topk_prob"):
        raise ModelError(f"norm_topk_prob in {fields.where} is true, which is not supported.")
    experts = replace(_experts(fields), renormalise=False)
    if method == "greedy":
        experts = replace(experts, groups=1, chosen_groups=1)
    spec = _attending(architecture, fields, interleaved=True, exact=True)
    return with_experts(spec, experts, _after_dense(fields, spec, 0))


def _v3_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    spec = _attending(architecture, fields, interleaved=fields.flag("rope_interleave", True))
    return with_experts(spec, _corrected(_experts(fields)), _after_dense(fields, spec, 3))


def _glm_from_hf(architecture: str, fields: Fields) -> ModelSpec:
    spec = _attending(architecture, fields, interleaved=fields.flag("rope_interleave", True))
    layers, kinds = len(spec.layers), fields.raw.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense", *["sparse"] * (layers - 1)]
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ModelError(
            f"mlp_layer_types in {fields.where} is {str(kinds)[:60]!r}; it must name {layers} layers, each of them "
            "dense or sparse."
        )
    sparse = [index for index, kind in enumerate(kinds) if kind == "sparse"]
    return with_experts(spec, _corrected(_experts(fields)), sparse)


def _after_dense(fields: Fields, spec: ModelSpec, usual: int) -> Iterable[int]:
    """Return the layers after those that are dense: `usual` of them unless the config says otherwise."""
    return range(fields.integer("first_k_dense_replace", usual, least=0), len(spec.layers))


def _attending(architecture: str, fields: Fields, *, interleaved: bool, exact: bool = False) -> ModelSpec:
    """Return the network with a dense feed-forward in every layer. Raises ModelError."""
    rotated = fields.integer("qk_rope_head_dim")
    spec = base_spec(architecture, replace(fields, raw={**fields.raw, "head_dim": rotated}))
    rope, scaling = spec.attention.rope, rope_parameters(fields)
    assert rope is not None
    stretch = 1.0
    if rope.kind != "default" and scaling.raw.get("mscale_all_dim"):
        stretch = yarn_attention(rope.factor, scaling.number("mscale_all_dim"))
    latent = LatentAttention(
        spec.attention.heads,
        None if fields.raw.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        fields.integer("kv_lora_rank"),
        fields.integer("qk_nope_head_dim"),
        rotated,
        fields.integer("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )
    return _with_latents(spec, latent, replace(rope, interleaved=interleaved, exact=exact), stretch)


def _with_latents(spec: ModelSpec, latent: LatentAttention, rope: Rope, stretch: float) -> ModelSpec:
    """Return `spec` with latent attention in every layer, rotated by `rope`.

    YaRN multiplies the scores by the square of `stretch`, those of the numbers that are not rotated included.
    """
    scale = None if stretch == 1.0 else latent.head_dim**-0.5 * stretch**2
    mixer = replace(latent, norm=_NORM, rope=rope, scale=scale)
    return each_layer(spec, lambda _, layer: replace(layer, mixer=mixer))


def _experts(fields: Fields) -> Experts:
    """Return the experts of a config.json, scored by a softmax."""
    return _with_shared(
        Experts(
            fields.integer("n_routed_experts", limit=4096),
            fields.integer("num_experts_per_tok"),
            FeedForward(fields.integer("moe_intermediate_size")),
            renormalise=fields.flag("norm_topk_prob", True),
            exact_router=True,
            groups=fields.integer("n_group", 1, limit=4096),
            chosen_groups=fields.integer("topk_group", 1, limit=4096),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        fields.integer("n_shared_experts", 0, least=0, limit=4096),
    )


def _with_shared(experts: Experts, count: int) -> Experts:
    """Return `experts` with as many shared ones, which are one wide feed-forward."""
    return replace(experts, shared=FeedForward(experts.expert.size * count)) if count else experts


def _corrected(experts: Experts) -> Experts:
    """Return `experts` with the scoring of V3: a sigmoid, and a bias that corrects the choice."""
    return replace(experts, scoring="sigmoid", selection_bias=True, group_best=2)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "deepseek2", config.fields
    at, scaling = f"{name}.attention.", f"{name}.rope.scaling."
    rotated = fields.integer(f"{name}.rope.dimension_count")
    # Files without the keys for latents have the sizes of whole heads in the usual ones.
    head, value = (
        fields.integer(f"{at}{part}_length_mla", fields.integer(f"{at}{part}_length"))
        for part in ("key", "value")
    )
    if head <= rotated:
        raise ModelError(f"{at}key_length_mla in {fields.where} is {head}; it must be above {rotated}.")
    if fields.raw.get(f"{at}temperature_scale"):
        raise ModelError(
            "The GGUF file has latent attention whose queries are scaled by their positions, which is not supported; "
            "choose another model."
        )
    layers = fields.integer(f"{name}.block_count", limit=1024)
    layers -= fields.integer(f"{name}.nextn_predict_layers", 0, least=0, limit=layers - 1)
    changes = {
        f"{at}key_length": rotated,
        f"{at}value_length": rotated,
        f"{name}.block_count": layers,
        # The rotation is that of a log multiplier of 1; what the file has multiplies the scores.
        f"{scaling}yarn_log_multiplier": 1.0 if fields.raw.get(f"{scaling}yarn_log_multiplier") else 0.0,
    }
    base = config.with_fields(changes)
    scoring = _gguf_scoring(config)
    version = 3 if scoring == _SIGMOID else 2
    spec = base_spec_of_gguf(f"DeepseekV{version}ForCausalLM", name, base, experts=True)
    rope = spec.attention.rope
    assert rope is not None
    stretch = 1.0
    if rope.kind == "yarn" and fields.raw.get(f"{scaling}yarn_log_multiplier"):
        # The converter has multiplied it by 0.1.
        stretch = yarn_attention(rope.factor, 10 * fields.number(f"{scaling}yarn_log_multiplier"))
    latent = LatentAttention(
        spec.attention.heads,
        None if "blk.0.attn_q.weight" in config.tensors else fields.integer(f"{at}q_lora_rank"),
        fields.integer(f"{at}kv_lora_rank"),
        head - rotated,
        rotated,
        value,
    )
    spec = _with_latents(spec, latent, replace(rope, interleaved=True), stretch)
    sparse = gguf_expert_layers(config, spec)
    return with_experts(spec, _gguf_experts(fields, name, scoring), sparse) if sparse else spec


def _gguf_scoring(config: GGUFConfig) -> int:
    """Return the number of the scoring of experts; files without it have a softmax unless experts have biases."""
    fields, corrects = config.fields, any(name.endswith(".exp_probs_b.bias") for name in config.tensors)
    key = "deepseek2.expert_gating_func"
    scoring = fields.integer(key, _SIGMOID if corrects else _SOFTMAX)
    if scoring != (_SIGMOID if corrects else _SOFTMAX):
        raise ModelError(
            f"{key} in {fields.where} is {scoring}; supported: {_SIGMOID} with biases of experts, {_SOFTMAX} without."
        )
    return scoring


def _gguf_experts(fields: Fields, name: str, scoring: int) -> Experts:
    def given(key: str) -> int:
        """Return a number that is 1 if it is missing or 0."""
        return fields.integer(f"{name}.{key}", limit=4096) if fields.raw.get(f"{name}.{key}") else 1

    scale = f"{name}.expert_weights_scale"
    experts = Experts(
        fields.integer(f"{name}.expert_count", limit=4096),
        fields.integer(f"{name}.expert_used_count"),
        FeedForward(fields.integer(f"{name}.expert_feed_forward_length")),
        renormalise=fields.flag(f"{name}.expert_weights_norm"),
        exact_router=True,
        groups=given("expert_group_count"),
        chosen_groups=given("expert_group_used_count"),
        scale=fields.number(scale) if fields.raw.get(scale) else 1.0,
    )
    experts = _with_shared(experts, fields.integer(f"{name}.expert_shared_count", 0, least=0, limit=4096))
    return _corrected(experts) if scoring == _SIGMOID else experts


_NAMES = {
    **NAMES,
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "k_b": "self_attn.k_b_proj",
    "v_b": "self_attn.v_b_proj",
    "selection_bias": "mlp.gate.e_score_correction_bias",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}
_GGUF_NAMES = {
    **GGUF_NAMES,
    "q_a": "attn_q_a",
    "q_a_norm": "attn_q_a_norm",
    "q_b": "attn_q_b",
    "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm",
    "k_b": "attn_k_b",
    "v_b": "attn_v_b",
}
_PACKED = {**PACKED, "self_attn.kv_b_proj.weight": ("k_b", "v_b")}
_GGUF_PACKED = {**GGUF_PACKED, "attn_kv_b.weight": ("k_b", "v_b")}
"""Old files have one tensor, as checkpoints do."""

V2 = Family(
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    from_hf=_v2_from_hf,
    names=_NAMES,
    packed=_PACKED,
)
V3 = Family(
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    from_hf=_v3_from_hf,
    gguf_architecture="deepseek2",
    from_gguf=_from_gguf,
    names=_NAMES,
    packed=_PACKED,
    gguf_names=_GGUF_NAMES,
    gguf_packed=_GGUF_PACKED,
)
GLM = Family(
    architectures=("Glm4MoeLiteForCausalLM",),
    model_types=("glm4_moe_lite",),
    from_hf=_glm_from_hf,
    names=_NAMES,
    packed=_PACKED,
)
