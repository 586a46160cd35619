"""SmolLM3: Llama without rotary embedding in every fourth layer, or in the layers that the config names."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import windows
from models.spec import ModelSpec, each_attention

_INTERVAL = 4
"""The interval of layers without rotary embedding if the config gives none, and always for GGUF files."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    fields = fields.or_else(rope_theta=2e6, tie_word_embeddings=True)
    bias = fields.flag("attention_bias")
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))
    rotated = fields.raw.get("no_rope_layers")  # despite its name, 1 for a layer with rotary embedding
    if rotated is None:
        rotated = _usual(spec, fields.integer("no_rope_layer_interval", _INTERVAL))
    if (
        not isinstance(rotated, list)
        or len(rotated) < len(spec.layers)
        or any(has not in (0, 1) for has in rotated)
    ):
        raise ModelError(
            f"no_rope_layers in {fields.where} is {str(rotated)[:60]}; it must be a list of a 0 or 1 for each layer."
        )
    window = fields.raw.get("sliding_window") if fields.flag("use_sliding_window") else None
    spec = windows(spec, fields, window, [not has for has in rotated[: len(spec.layers)]])
    return _without_rope(spec, rotated)


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    spec = base_spec_of_gguf("SmolLM3ForCausalLM", "smollm3", config)
    return _without_rope(spec, _usual(spec, _INTERVAL))


def _usual(spec: ModelSpec, interval: int) -> list[int]:
    return [int((index + 1) % interval != 0) for index in range(len(spec.layers))]


def _without_rope(spec: ModelSpec, rotated: list[int]) -> ModelSpec:
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
