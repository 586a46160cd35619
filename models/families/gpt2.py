"""GPT-2: LayerNorm with biases, learned positions, ungated feed-forward; its checkpoints store weights transposed."""

from dataclasses import replace

from models.errors import ModelError
from models.families.common import pre_norm_layer, uniform
from models.families.family import GGUF_NAMES, Family, GGUFConfig
from models.families.fields import Fields
from models.spec import Activation, Attention, FeedForward, Layer, ModelSpec, Norm, each_attention

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def _from_hf(architecture: str, fields: Fields) -> ModelSpec:
    given = str(fields.raw.get("activation_function", "gelu_new"))
    if given not in _ACTIVATIONS:
        raise ModelError(
            f"activation_function {given[:60]} in {fields.where} is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}."
        )
    if fields.flag("add_cross_attention"):
        raise ModelError(f"{fields.where} requires attention to another network, which is not supported.")
    hidden = fields.integer("n_embd", 768)
    spec = uniform(
        architecture,
        layers=fields.integer("n_layer", 12, limit=1024),
        vocab_size=fields.integer("vocab_size", 50257),
        hidden_size=hidden,
        max_positions=fields.integer("n_positions", 1024),
        layer=_layer(
            hidden,
            fields.integer("n_head", 12),
            FeedForward(fields.integer("n_inner", 4 * hidden), _ACTIVATIONS[given], gated=False, bias=True),
            fields.number("layer_norm_epsilon", 1e-5),
        ),
        tied=fields.flag("tie_word_embeddings", True),
    )
    spec = replace(spec, learned_positions=True)
    plain = spec.attention.softmax_scale if fields.flag("scale_attn_weights", True) else 1.0
    deeper = fields.flag("scale_attn_by_inverse_layer_idx")
    if plain == spec.attention.softmax_scale and not deeper:
        return spec
    return each_attention(
        spec, lambda i, attention: replace(attention, scale=plain / (i + 1 if deeper else 1))
    )


def _from_gguf(config: GGUFConfig) -> ModelSpec:
    fields = config.fields
    tokens = fields.raw.get("tokenizer.ggml.tokens")
    hidden = fields.integer("gpt2.embedding_length")
    spec = uniform(
        "GPT2LMHeadModel",
        layers=fields.integer("gpt2.block_count", limit=1024),
        vocab_size=len(tokens) if isinstance(tokens, list) else fields.integer("gpt2.vocab_size"),
        hidden_size=hidden,
        max_positions=fields.integer("gpt2.context_length"),
        layer=_layer(
            hidden,
            fields.integer("gpt2.attention.head_count"),
            FeedForward(fields.integer("gpt2.feed_forward_length"), "gelu_tanh", gated=False, bias=True),
            fields.number("gpt2.attention.layer_norm_epsilon"),
        ),
        tied="output.weight" not in config.tensors,
    )
    return replace(spec, learned_positions=True)


def _layer(hidden: int, heads: int, feed_forward: FeedForward, eps: float) -> Layer:
    if hidden % heads:
        raise ModelError(
            f"The hidden size {hidden} is not a multiple of {heads} heads; the config is damaged."
        )
    attention = Attention(heads, heads, hidden // heads, qkv_bias=True, out_bias=True)
    return pre_norm_layer(attention, feed_forward, Norm(eps, "layer", bias=True))


def _name(name: str) -> str | None:
    """Return the name without the prefix that only some checkpoints have; None for causal masks."""
    return None if name.endswith((".attn.bias", ".attn.masked_bias")) else name.removeprefix("transformer.")


FAMILY = Family(
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    from_hf=_from_hf,
    gguf_architecture="gpt2",
    from_gguf=_from_gguf,
    names={
        "embedding": "wte",
        "position_embedding": "wpe",
        "layers": "h.{}.",
        "attention_norm": "ln_1",
        "q": "attn.q",
        "k": "attn.k",
        "v": "attn.v",
        "out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "final_norm": "ln_f",
        "head": "lm_head",
    },
    gguf_names={**GGUF_NAMES, "position_embedding": "position_embd"},
    packed={"attn.c_attn.{field}": ("q", "k", "v")},
    gguf_packed={"attn_qkv.{field}": ("q", "k", "v")},
    rename=_name,
    turned=("q", "k", "v", "out", "up", "down"),
)
