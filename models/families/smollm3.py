"""SmolLM3: Llama without rotary embedding in every fourth layer, or in the layers that the config names."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import rotated_layers
from models.families.windows import windows
from models.spec import ModelSpec, each_attention

_INTERVAL = 4
"""The interval of layers without rotary embedding if the config gives none, and always for GGUF files."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(rope_theta=2e6, tie_word_embeddings=True)
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    rotated = rotated_layers(fields, len(spec.layers), _INTERVAL)
    window = fields.raw.get("sliding_window") if fields.flag("use_sliding_window") else None
    spec = windows(spec, fields, window, [not has for has in rotated])
    return _without_rope(spec, rotated)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec = base_spec_of_gguf("SmolLM3ForCausalLM", "smollm3", config)
    return _without_rope(spec, [(index + 1) % _INTERVAL != 0 for index in range(len(spec.layers))])


def _without_rope(spec: ModelSpec, rotated: list[bool]) -> ModelSpec:
    return each_attention(
        spec, lambda i, attention: attention if rotated[i] else replace(attention, rope=None)
    )


FAMILY = Family(
    architectures=("SmolLM3ForCausalLM",),
    model_types=("smollm3",),
    from_hf=_from_hf,
    gguf_architecture="smollm3",
    from_gguf=_from_gguf,
    gguf_interleaved=("q", "k"),
)
