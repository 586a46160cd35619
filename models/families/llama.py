"""Llama, Mistral and Ministral: rotary embedding straight after the projection, a sliding window or none."""

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import ModelSpec

_MISTRAL_WINDOW = 4096
"""What a Mistral config means by not naming its sliding window."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    if architecture == "LlamaForCausalLM":
        bias = fields.flag("attention_bias")
        spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
        return windows(spec, fields, None)
    return windows(base_spec(architecture, fields), fields, fields.raw.get("sliding_window", _MISTRAL_WINDOW))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    return base_spec_of_gguf("LlamaForCausalLM", "llama", config)


FAMILY = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("llama", "mistral", "ministral"),
    from_hf=_from_hf,
    gguf_architecture="llama",
    from_gguf=_from_gguf,
    gguf_interleaved=("q", "k"),
)
