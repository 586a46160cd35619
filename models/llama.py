"""Llama: rotary embedding straight after the projection. Mistral without a sliding window is the same."""

from torch import Tensor

from models.decoder import DecoderModel, Rotation, SelfAttention
from models.rope import rotate


class LlamaAttention(SelfAttention):
    def position(self, qk: Tensor, rotation: Rotation) -> Tensor:
        return rotate(qk, rotation)


class LlamaModel(DecoderModel):
    """LlamaForCausalLM with any RoPE scaling of models.rope, with or without biases."""

    attention_type = LlamaAttention
