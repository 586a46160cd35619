"""Prompts through the weights of the plain modules, with one kernel for what lies between two products.

The plain twin is `models/reference/decoder.py`; `fused_program.py` does the same for the one token of a
decode step.
"""

import torch
import triton
from torch import Tensor

from engine.kernels.triton.prefill import gate_kernel, norm_kernel, position_kernel
from models.reference.attention import Attention
from models.reference.decoder import DecoderLayer, DecoderModel, SelfAttention
from models.reference.layers import MLP, RMSNorm


class FusedPrefill:
    """Implements `engine.execute.runner.Decoder`. For the models that `engine.execute.cuda.fused_program.supports`."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """As DecoderModel.forward."""
        model = self.model
        x: Tensor = model.embed_tokens(token_ids)
        residual: Tensor | None = None
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            normed, residual = _norm(x, residual, layer.input_layernorm)
            x = self._attend(index, layer.self_attn, normed, positions, attention)
            normed, residual = _norm(x, residual, layer.post_attention_layernorm)
            x = _feed(layer.mlp, normed)
        return _norm(x, residual, model.norm)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """As DecoderModel.logits."""
        return self.model.logits(hidden)

    def _attend(
        self, index: int, layer: SelfAttention, x: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        heads: Tensor = layer.qkv_proj(x).view(x.shape[0], -1, layer.head_dim)
        norm = getattr(layer, "qk_norm", None)
        block = min(8, triton.next_power_of_2(layer.qk_heads))
        position_kernel[(x.shape[0], triton.cdiv(layer.qk_heads, block))](
            heads,
            norm.weight if norm is not None else heads,
            self.model.rotary_table,
            positions,
            HEADS=layer.qk_heads,
            ALL=heads.shape[1],
            D=layer.head_dim,
            BLOCK=block,
            EPS=norm.eps if norm is not None else 0.0,
            NORM=norm is not None,
            num_warps=2,
        )
        q, k = heads[:, : layer.q_heads], heads[:, layer.q_heads : layer.qk_heads]
        mixed = attention(index, q, k, heads[:, layer.qk_heads :])
        out: Tensor = layer.o_proj(mixed.reshape(-1, layer.q_size))
        return out


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [T, size] -> (the norm of their sum, their sum)"""
    rows, size = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        total,
        SIZE=size,
        BLOCK=block,
        EPS=eps,
        ADD=residual is not None,
        num_warps=max(1, min(8, block // 512)),
    )
    return out, total


def gate(gate_up: Tensor) -> Tensor:
    """[T, 2 size] -> [T, size]: silu of the first half times the second"""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    inner = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(size))
    gate_kernel[(rows, triton.cdiv(size, block))](gate_up, inner, SIZE=size, BLOCK=block, num_warps=4)
    return inner


def _norm(x: Tensor, residual: Tensor | None, layer: RMSNorm) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, layer.weight, layer.eps)


def _feed(mlp: MLP, x: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(gate(mlp.gate_up_proj(x)))
    return out
