"""Llama, Mistral and Ministral: rotary embedding right after the projection, with or without a sliding window."""

from functools import partial

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import ModelSpec

_MISTRAL_WINDOW = 4096
"""The sliding window of a Mistral config that does not name one."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    if architecture == "LlamaForCausalLM":
        bias = fields.flag("attention_bias")
        spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
        return windows(spec, fields, None)
    return windows(base_spec(architecture, fields), fields, fields.raw.get("sliding_window", _MISTRAL_WINDOW))


FAMILY = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("llama", "mistral", "ministral"),
    from_hf=_from_hf,
    gguf_architecture="llama",
    from_gguf=partial(base_spec_of_gguf, "LlamaForCausalLM", "llama"),
    gguf_interleaved=("q", "k"),
)
