"""Command R7B and Command A: attention beside the feed-forward, and rotation in the layers with a window alone."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.windows import but_last_of_each, sliding_layers, windows
from models.spec import Layer, ModelSpec, Norm, each_layer

_PERIOD = 4
"""One layer in each period of this many sees all tokens, where a config does not say."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias, eps = fields.flag("attention_bias"), fields.number("layer_norm_eps", 1e-5)
    tied = fields.flag("tie_word_embeddings", True)
    changes = {"rms_norm_eps": eps, "tie_word_embeddings": tied}
    fields = replace(fields, raw={**fields.raw, **changes})
    spec = base_spec(architecture, fields, qkv_bias=bias, out_bias=bias)
    period, window = fields.integer("sliding_window_pattern", _PERIOD), fields.integer("sliding_window", 4096)
    local = sliding_layers(spec, fields, but_last_of_each(period, len(spec.layers)))
    return _parallel(windows(spec, fields, window, local), local, fields.number("logit_scale", 0.0625))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    name, fields = "cohere2", config.fields
    local = but_last_of_each(_PERIOD, fields.integer(f"{name}.block_count", limit=1024))
    at = f"{name}.attention"
    eps = fields.number(f"{at}.layer_norm_epsilon")
    fields = fields.or_else(**{f"{at}.layer_norm_rms_epsilon": eps, f"{at}.sliding_window_pattern": local})
    spec = base_spec_of_gguf("Cohere2ForCausalLM", name, replace(config, fields=fields))
    return _parallel(spec, local, fields.number(f"{name}.logit_scale", 1.0))


def _parallel(spec: ModelSpec, rotated: list[bool], logit_scale: float) -> ModelSpec:
    """Return `spec` with one norm in each layer, and rotation in the layers of `rotated` alone."""
    norm = Norm(spec.final_norm.eps, "layer", rounds_last=True)

    def beside(index: int, layer: Layer) -> Layer:
        rope = layer.attention.rope
        assert rope is not None
        turned = replace(rope, interleaved=True, exact=True) if rotated[index] else None
        attention = replace(layer.attention, rope=turned)
        return Layer(attention, layer.feed_forward, norm, feed_forward_norm=None, parallel=True)

    return replace(each_layer(spec, beside), final_norm=norm, logit_scale=logit_scale)


FAMILY = Family(
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    from_hf=_from_hf,
    gguf_architecture="cohere2",
    from_gguf=_from_gguf,
)
