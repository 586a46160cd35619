"""Qwen3, dense: every q and k head is normed between the projection and the rotary embedding."""

from functools import partial

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family
from models.families.fields import Fields
from models.families.windows import windows_of_qwen
from models.spec import ModelSpec


def without_windows(architecture: str, fields: Fields, head_dim: int | None = 128) -> ModelSpec:
    """Return the dense network with full attention; `head_dim` is the default for a config without one."""
    bias = fields.flag("attention_bias")
    return base_spec(architecture, fields, head_dim=head_dim, head_norm=True, qkv_bias=bias, out_bias=bias)


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    return windows_of_qwen(without_windows(architecture, fields), fields)


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    from_hf=_from_hf,
    gguf_architecture="qwen3",
    from_gguf=partial(base_spec_of_gguf, "Qwen3ForCausalLM", "qwen3", head_norm=True),
)
