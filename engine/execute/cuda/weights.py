"""The weights of a decoder as the kernels take them: plain tensors and numbers."""

from dataclasses import dataclass

from torch import Tensor

from models.families.llama import LlamaModel
from models.families.qwen3 import Qwen3Model
from models.reference.decoder import DecoderLayer, DecoderModel
from models.reference.layers import HeadNorm, Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm; of heads, weight is [heads, head_dim]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Product:
    """weight [out, in], bias [out] or None"""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` has q, k and v one below the other, `gate_up` gate above up."""

    attention_norm: Norm
    qkv: Product
    head_norm: Norm | None
    """Of the q heads, then the k heads."""
    o: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model."""

    embedding: Tensor
    """[vocab, hidden]"""
    rotary: Tensor
    """[positions, head_dim]: cos beside sin"""
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Product
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of the MLP."""


def supports(model: DecoderModel) -> str | None:
    """Why the fused kernels cannot run this model; None if they can."""
    config = model.config
    if type(model) not in (Qwen3Model, LlamaModel):
        return f"there are no fused kernels for {config.architecture}"
    if config.head_dim not in (64, 128):
        return f"there are no fused kernels for a head_dim of {config.head_dim}"
    return None


def weights_of(model: DecoderModel) -> DecoderWeights:
    """The weights of a model that `supports` has nothing against."""
    config = model.config
    return DecoderWeights(
        model.embed_tokens.weight,
        model.rotary_table,
        tuple(_layer(layer) for layer in model.layers if isinstance(layer, DecoderLayer)),
        _norm(model.norm),
        _product(model.lm_head),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )


def _layer(layer: DecoderLayer) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    head_norm: HeadNorm | None = getattr(attention, "qk_norm", None)
    return LayerWeights(
        _norm(layer.input_layernorm),
        _product(attention.qkv_proj),
        None if head_norm is None else Norm(head_norm.weight, head_norm.eps),
        _product(attention.o_proj),
        _norm(layer.post_attention_layernorm),
        _product(mlp.gate_up_proj),
        _product(mlp.down_proj),
    )


def _norm(layer: RMSNorm) -> Norm:
    return Norm(layer.weight, layer.eps)


def _product(layer: Linear) -> Product:
    return Product(layer.weight, layer.bias)
