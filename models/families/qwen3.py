"""Qwen3: every q and k head is normed after the projection and before the rotary embedding."""

from torch import Tensor

from models.families.config import ModelConfig
from models.reference.decoder import DecoderModel, Rotation, SelfAttention
from models.reference.layers import HeadNorm, Product
from models.reference.rope import rotate


class Qwen3Attention(SelfAttention):
    def __init__(self, config: ModelConfig, layer_index: int, product: Product) -> None:
        super().__init__(config, layer_index, product)
        heads = config.num_attention_heads, config.num_key_value_heads
        self.qk_norm = HeadNorm(*heads, config.head_dim, config.rms_norm_eps)

    def position(self, qk: Tensor, rotation: Rotation) -> Tensor:
        return rotate(self.qk_norm(qk), rotation)


class Qwen3Model(DecoderModel):
    """Qwen3ForCausalLM, dense."""

    attention_type = Qwen3Attention
