"""Common parts of most families: norms before attention and a gated feed-forward, rotary positions."""

from dataclasses import replace
from typing import Any

from models.errors import ModelError
from models.families.family import GGUFConfig
from models.families.fields import Fields
from models.families.rope import rope_from_gguf, rope_from_hf
from models.families.windows import windows_of_gguf
from models.spec import Attention, Experts, FeedForward, Layer, ModelSpec, Norm


def base_spec(
    architecture: str,
    fields: Fields,
    *,
    head_dim: int | None = None,
    head_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelSpec:
    """Return the spec for a config.json whose layers are identical; `head_dim` is the default for a config without one.

    Raises ModelError if something is missing or not supported.
    """
    raw = fields.raw
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"hidden_act {str(raw['hidden_act'])[:60]} in config.json is not supported; supported: silu."
        )
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    norm = Norm(fields.number("rms_norm_eps", 1e-6))
    dim = fields.integer("head_dim", head_dim or _head_dim(hidden, heads))
    kv_heads = fields.integer("num_key_value_heads", heads)
    check_heads(heads, kv_heads, dim)
    return uniform(
        architecture,
        layers=fields.integer("num_hidden_layers", limit=1024),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=fields.integer("max_position_embeddings"),
        layer=pre_norm_layer(
            Attention(
                heads,
                kv_heads,
                dim,
                qkv_bias,
                out_bias,
                norm if head_norm else None,
                rope_from_hf(fields, dim),
            ),
            FeedForward(fields.integer("intermediate_size"), bias=mlp_bias),
            norm,
        ),
        tied=fields.flag("tie_word_embeddings"),
    )


def base_spec_of_gguf(
    architecture: str,
    name: str,
    config: GGUFConfig,
    *,
    head_norm: bool = False,
    partial: bool = False,
    experts: bool = False,
) -> ModelSpec:
    """Return the spec for the metadata of the GGUF architecture `name`.

    `partial`: heads may be rotated in part; `experts`: the family adds experts itself. Raises ModelError.
    """
    fields = config.fields
    if fields.raw.get(f"{name}.expert_count") and not experts:
        raise ModelError(
            "The GGUF file contains a mixture of experts, which is not supported; choose a dense model."
        )
    heads, hidden = fields.integer(f"{name}.attention.head_count"), fields.integer(f"{name}.embedding_length")
    dim = fields.integer(f"{name}.attention.key_length", _head_dim(hidden, heads))
    rotated = fields.integer(f"{name}.rope.dimension_count", dim)
    fits = partial and rotated < dim and rotated % 2 == 0
    for key, allowed in ((f"{name}.attention.value_length", False), (f"{name}.rope.dimension_count", fits)):
        if fields.integer(key, dim) != dim and not allowed:
            raise ModelError(f"{key} is {fields.raw[key]}, not the head size {dim}, which is not supported.")
    tokens = fields.raw.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else fields.integer(f"{name}.vocab_size")
    norm = Norm(fields.number(f"{name}.attention.layer_norm_rms_epsilon"))
    kv_heads = fields.integer(f"{name}.attention.head_count_kv", heads)
    check_heads(heads, kv_heads, dim)
    rope = rope_from_gguf(config, name, rotated)
    if rotated < dim:
        rope = replace(rope, dims=rotated)
    qkv_bias, out_bias = (
        any(tensor.endswith(f".{part}.bias") for tensor in config.tensors)
        for part in ("attn_q", "attn_output")
    )
    spec = uniform(
        architecture,
        layers=fields.integer(f"{name}.block_count", limit=1024),
        vocab_size=vocab_size,
        hidden_size=hidden,
        max_positions=fields.integer(f"{name}.context_length"),
        layer=pre_norm_layer(
            Attention(heads, kv_heads, dim, qkv_bias, out_bias, norm if head_norm else None, rope),
            FeedForward(fields.integer(f"{name}.feed_forward_length")),
            norm,
        ),
        tied="output.weight" not in config.tensors,
    )
    return windows_of_gguf(spec, fields, name)


def kv_heads_by_layer(config: GGUFConfig, name: str) -> tuple[GGUFConfig, list[int]]:
    """Return the metadata with one number of KV heads for all layers that have any, and the number of each layer."""
    key, fields = f"{name}.attention.head_count_kv", config.fields
    heads, layers = fields.raw.get(key), fields.integer(f"{name}.block_count", limit=1024)
    counts: list[Any] = heads if isinstance(heads, list) and len(heads) == layers else [heads] * layers
    kept = [count for count in counts if count != 0]
    if kept and kept.count(kept[0]) == len(kept):
        config = config.with_fields({key: kept[0]})
    return config, counts


def _head_dim(hidden_size: int, heads: int) -> int | None:
    """Return the default head_dim; None if the heads do not divide the hidden size."""
    return hidden_size // heads if hidden_size % heads == 0 else None


def check_heads(heads: int, kv_heads: int, dim: int) -> None:
    """Raise ModelError for heads that cannot be."""
    if heads % kv_heads:
        raise ModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; the config is "
            "damaged: download it again."
        )
    if dim % 2:
        raise ModelError(f"head_dim {dim} is odd, but RoPE rotates pairs; the config is damaged.")


_NO_TEXT = (
    *("vision_model.", "vision_tower.", "vision_adapter.", "vision_projection.", "vision_embedder."),
    *("multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio."),
)


def text_name(name: str) -> str | None:
    """Return a tensor's name in a text-only model; None for a tensor that only images or sound need."""
    if name.removeprefix("model.").startswith(_NO_TEXT):
        return None
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")


def pre_norm_layer(attention: Attention, feed_forward: FeedForward | Experts, norm: Norm) -> Layer:
    """Return a layer with the same norm before attention and feed-forward."""
    return Layer(attention, feed_forward, attention_norm=norm, feed_forward_norm=norm)


def uniform(
    architecture: str,
    *,
    layers: int,
    vocab_size: int,
    hidden_size: int,
    max_positions: int,
    layer: Layer,
    tied: bool,
) -> ModelSpec:
    """Return a network of identical layers that begin with a norm; the last norm is the same."""
    norm = layer.attention_norm
    assert norm is not None
    return ModelSpec(architecture, vocab_size, hidden_size, max_positions, (layer,) * layers, norm, tied)
