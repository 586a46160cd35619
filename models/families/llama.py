"""Llama: rotary embedding straight after the projection. Mistral without a sliding window is the same."""

from torch import Tensor

from models.reference.decoder import DecoderModel, Rotation, SelfAttention
from models.reference.rope import rotate


class LlamaAttention(SelfAttention):
    def position(self, qk: Tensor, rotation: Rotation) -> Tensor:
        return rotate(qk, rotation)


class LlamaModel(DecoderModel):
    """LlamaForCausalLM with any RoPE scaling of models.reference.rope, with or without biases."""

    attention_type = LlamaAttention
