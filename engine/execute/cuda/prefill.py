"""Prompts through the weights of the plain modules, with one kernel for what lies between two products.

The plain twin is `models/reference/decoder.py`; `fused_program.py` does the same for the one token of a
decode step.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.kernels.triton.prefill import gate_kernel, norm_kernel, position_kernel
from models.network import AttentionWeights, FeedForwardWeights, Linear, Network, NormWeights
from models.reference.attention import Attention
from models.reference.decoder import Decoder


class FusedPrefill:
    """Implements `engine.execute.runner.Decoder`. For the models that `engine.execute.cuda.fused_program.supports`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._reference = Decoder(network)
        self._eps = network.spec.final_norm.eps

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """As DecoderModel.forward."""
        network = self._network
        x = network.embedding.data.index_select(0, token_ids)
        residual: Tensor | None = None
        for index, layer in enumerate(network.layers):
            feed = layer.feed_forward
            assert isinstance(feed, FeedForwardWeights)
            normed, residual = _norm(x, residual, layer.attention_norm, self._eps)
            x = self._attend(index, layer.attention, normed, positions, attention)
            normed, residual = _norm(x, residual, layer.feed_forward_norm, self._eps)
            x = _feed(feed, normed)
        return _norm(x, residual, network.final_norm, self._eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """As DecoderModel.logits."""
        return self._reference.logits(hidden)

    def _attend(
        self, index: int, layer: AttentionWeights, x: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        spec = self._network.spec.layers[index].attention
        heads = _product(layer.qkv, x).view(x.shape[0], -1, spec.head_dim)
        norm, count = layer.head_norm, spec.heads + spec.kv_heads
        block = min(8, triton.next_power_of_2(count))
        position_kernel[(x.shape[0], triton.cdiv(count, block))](
            heads,
            norm if norm is not None else heads,
            layer.rotary,
            positions,
            HEADS=count,
            ALL=heads.shape[1],
            D=spec.head_dim,
            BLOCK=block,
            EPS=self._eps,
            NORM=norm is not None,
            num_warps=2,
        )
        q, k = heads[:, : spec.heads], heads[:, spec.heads : count]
        mixed = attention(index, q, k, heads[:, count:])
        return _product(layer.out, mixed.reshape(-1, spec.heads * spec.head_dim))


def _norm(x: Tensor, residual: Tensor | None, layer: NormWeights | None, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [T, size] -> (the norm of their sum, their sum)"""
    assert layer is not None
    rows, size = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        layer.weight,
        out,
        total,
        SIZE=size,
        BLOCK=block,
        EPS=eps,
        ADD=residual is not None,
        num_warps=max(1, min(8, block // 512)),
    )
    return out, total


def _product(linear: Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _feed(layer: FeedForwardWeights, x: Tensor) -> Tensor:
    gate_up = _product(layer.gate_up, x)
    rows, size = x.shape[0], gate_up.shape[1] // 2
    inner = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(size))
    gate_kernel[(rows, triton.cdiv(size, block))](gate_up, inner, SIZE=size, BLOCK=block, num_warps=4)
    return _product(layer.down, inner)
