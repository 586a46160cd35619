"""OLMo 2 and 3: norms after attention and feed-forward, and norms over all q heads and all k heads together."""

from dataclasses import replace

from models.families.common import base_spec, base_spec_of_gguf
from models.families.family import Family, GGUFConfig
from models.families.fields import Fields
from models.families.rope import ropes_by_layer, unscaled_of_gguf
from models.families.windows import but_last_of_each, sliding_layers, windows
from models.spec import Layer, ModelSpec, Rope, each_attention, each_layer

_THETA = 500_000.0
"""The rope_theta of an OLMo 3 model whose config has none."""
_PERIOD = 4
"""One layer of OLMo 3 in each period of this many sees all tokens, where a config does not say."""


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    bias, third = fields.flag("attention_bias"), architecture == "Olmo3ForCausalLM"
    fields = fields.or_else(rms_norm_eps=1e-5, **({"sliding_window": 4096} if third else {}))
    plain = {key: value for key, value in fields.raw.items() if not third or "rope" not in key}
    spec = base_spec(architecture, replace(fields, raw=plain), head_norm=True, qkv_bias=bias, out_bias=bias)
    if not third:
        return _normed(spec)
    sliding = sliding_layers(spec, fields, but_last_of_each(_PERIOD, len(spec.layers)))
    # A rope_theta at the top level of the config applies to the layers without a window, as in transformers.
    thetas = fields.number("rope_theta", _THETA), _THETA
    scaled, local = ropes_by_layer(fields, spec.attention.head_dim, *thetas)
    spec = windows(spec, fields, fields.integer("sliding_window"), sliding)
    return _normed(_rotated(spec, sliding, scaled, local))


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    fields = config.fields
    if not fields.raw.get("olmo2.attention.sliding_window"):
        return _normed(base_spec_of_gguf("Olmo2ForCausalLM", "olmo2", config, head_norm=True))
    sliding = but_last_of_each(_PERIOD, fields.integer("olmo2.block_count", limit=1024))
    fields = fields.or_else(**{"olmo2.attention.sliding_window_pattern": sliding})
    spec = base_spec_of_gguf("Olmo3ForCausalLM", "olmo2", replace(config, fields=fields), head_norm=True)
    rope = spec.attention.rope
    assert rope is not None
    sliding = [layer.attention.window is not None for layer in spec.layers]
    plain = unscaled_of_gguf(fields, "olmo2", fields.number("olmo2.rope.freq_base_swa", rope.theta))
    return _normed(_rotated(spec, sliding, rope, plain))


def _rotated(spec: ModelSpec, sliding: list[bool], scaled: Rope, plain: Rope) -> ModelSpec:
    """Return `spec` with unscaled rotation in the layers that have a window."""
    return each_attention(spec, lambda i, attention: replace(attention, rope=plain if sliding[i] else scaled))


def _normed(spec: ModelSpec) -> ModelSpec:
    """Return `spec` with OLMo's norms, which round after the weight, and rotation in fp32."""
    norm = replace(spec.final_norm, rounds_last=True)

    def normed(_: int, layer: Layer) -> Layer:
        assert layer.attention.rope is not None
        rope = replace(layer.attention.rope, exact=True)
        attention = replace(layer.attention, head_norm=norm, norms_all_heads=True, rope=rope)
        return Layer(attention, layer.feed_forward, None, norm, None, norm)

    return replace(each_layer(spec, normed), final_norm=norm)


FAMILY = Family(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    model_types=("olmo2", "olmo3"),
    from_hf=_from_hf,
    gguf_architecture="olmo2",
    from_gguf=_from_gguf,
)
