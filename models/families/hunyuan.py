"""Hunyuan, dense: every q and k head is normed after its rotation, whose base is stretched by a fixed factor."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_parameters
from models.spec import Attention, ModelSpec, Rope, each_attention


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    fields = fields.or_else(rms_norm_eps=1e-5, max_position_embeddings=2048)
    spec = base_spec(architecture, fields, head_norm=True, qkv_bias=bias, out_bias=bias)
    rope, given, dim = spec.attention.rope, rope_parameters(fields), spec.attention.head_dim
    if rope is not None and rope.kind == "dynamic" and given.raw.get("alpha"):
        # NTK-aware scaling by a fixed alpha, as in transformers (`HunYuanDenseV1RotaryEmbedding`)
        rope = Rope(rope.theta * given.number("alpha") ** (dim / max(dim - 2, 1)))
    return _normed_after(spec, rope)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    """Read a GGUF file, whose base is stretched already."""
    spec = base_spec_of_gguf("HunYuanDenseV1ForCausalLM", "hunyuan-dense", config, head_norm=True)
    return _normed_after(spec, spec.attention.rope)


def _normed_after(spec: ModelSpec, rope: Rope | None) -> ModelSpec:
    """Return `spec` with this rotation in every layer, before the norms of heads."""

    def normed(_: int, attention: Attention) -> Attention:
        return replace(attention, rope=rope, norms_rotated=True)

    return each_attention(spec, normed)


FAMILY = Family(
    architectures=("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense",),
    from_hf=_from_hf,
    gguf_architecture="hunyuan-dense",
    from_gguf=_from_gguf,
    names={**NAMES, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
)
