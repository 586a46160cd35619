"""What all decoders share: embedding, layers with a carried residual, final norm, logits."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from models.families.config import ModelConfig
from models.reference.attention import Attention
from models.reference.layers import MLP, Embedding, Linear, Product, RMSNorm, Slot
from models.reference.rope import select_rotation

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin of the step's positions, [T, 1, head_dim] each."""


class SelfAttention(nn.Module):
    """Projections around the attention seam; the architectures say what happens to q and k between."""

    def __init__(self, config: ModelConfig, layer_index: int, product: Product) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.q_heads = config.num_attention_heads
        self.qk_heads = config.num_attention_heads + config.num_key_value_heads
        self.q_size = self.q_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        parts = {"q_proj": self.q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, bias, product)
        self.o_proj = Linear(self.q_size, {"o_proj": config.hidden_size}, bias, product)

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """[T, hidden_size] -> the same shape"""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        # q and k lie side by side in the packed projection, so that one pass norms and rotates both.
        qk = self.position(heads[:, : self.qk_heads], rotation)
        out = attention(
            self.layer_index, qk[:, : self.q_heads], qk[:, self.q_heads :], heads[:, self.qk_heads :]
        )
        return cast(Tensor, self.o_proj(out.reshape(-1, self.q_size)))

    def position(self, qk: Tensor, rotation: Rotation) -> Tensor:
        """What turns projected heads into q and k: [T, q heads + k heads, head_dim] -> the same shape."""
        raise NotImplementedError


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm that also takes over the residual."""

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, product: Product) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm("input_layernorm", size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm("post_attention_layernorm", size, eps)
        self.mlp = MLP(size, config.intermediate_size, config.mlp_bias, product)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """x and residual [T, hidden_size] -> (what the MLP adds, the residual before it)"""
        if residual is None:
            normed, residual = self.input_layernorm.norm(x), x
        else:
            normed, residual = self.input_layernorm(x, residual)
        x = self.self_attn(normed, rotation, attention)
        normed, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(normed), residual


class DecoderModel(nn.Module):
    """A decoder without KV cache and without an attention kernel: both come through the attention seam.

    Call it under torch.inference_mode(). Parameters are on the meta device until models.load fills them.
    """

    attention_type: type[SelfAttention] = SelfAttention
    rotary_table: Tensor
    """[positions, head_dim] in the model's dtype: cos and sin side by side; empty until models.load sets it."""

    def __init__(self, config: ModelConfig, product: Product) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.attention_type(config, index, product), product)
            for index in range(config.num_hidden_layers)
        )
        self.register_buffer("rotary_table", torch.empty(0, config.head_dim), persistent=False)
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, False, product)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions int64 [T] -> [T, hidden_size] after the final norm, in the model's dtype.

        T is flat over all sequences of the step. Positions must be below `positions`.
        """
        rotation = select_rotation(self.rotary_table, positions)
        x: Tensor = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, attention)
        if residual is None:
            return self.norm.norm(x)
        return cast(Tensor, self.norm(x, residual)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size], in the model's dtype"""
        return cast(Tensor, self.lm_head(hidden))

    @property
    def positions(self) -> int:
        """Number of positions that the model can tell apart."""
        return self.rotary_table.shape[0]

    def slots(self) -> Iterator[tuple[str, nn.Module, Slot]]:
        """For every tensor of a checkpoint: its Hugging Face name, the module it fills and where."""
        for path, module in self.named_modules():
            if isinstance(module, DecoderModel) or not hasattr(module, "slots"):
                continue
            if module is self.lm_head and self.config.tie_word_embeddings:
                continue
            parent = path.rpartition(".")[0]
            prefix = "" if module is self.lm_head else f"model.{parent}." if parent else "model."
            for name, slot in module.slots():
                yield prefix + name, module, slot
