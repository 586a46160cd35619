"""Qwen3, dense: every q and k head is normed after the projection and before the rotary embedding."""

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import windows_of_qwen
from models.spec import ModelSpec


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, head_dim=128, head_norm=True, qkv_bias=bias, out_bias=bias)
    return windows_of_qwen(spec, fields)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    return base_spec_of_gguf("Qwen3ForCausalLM", "qwen3", config, head_norm=True)


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    from_hf=_from_hf,
    gguf_architecture="qwen3",
    from_gguf=_from_gguf,
)
