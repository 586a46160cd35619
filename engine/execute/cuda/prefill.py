"""Many rows through the layers by the library's products, with one kernel for what lies between two of them.

The plain twin is `models/reference/decoder.py`. Prompts take it, and decode steps of more than 16 rows
(`fused_program.py`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.execute.cuda.experts import mix
from engine.kernels.triton.prefill import gate_kernel, norm_kernel, position_kernel
from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, NormWeights
from models.reference.attention import Attention
from models.reference.decoder import Decoder
from models.spec import Experts, FeedForward

Attend = Callable[[int, Tensor], Tensor]
"""(layer, q, k and v as projected [T, numbers]) -> what the output is made of [T, q numbers]"""


def run_layers(network: Network, x: Tensor, attend: Attend) -> Tensor:
    """Embedded tokens [T, hidden] -> the same shape after the final norm."""
    eps = network.spec.final_norm.eps
    residual: Tensor | None = None
    for index, layer in enumerate(network.layers):
        normed, residual = _add_norm(x, residual, layer.attention_norm, eps)
        x = product(layer.attention.out, attend(index, product(layer.attention.qkv, normed)))
        normed, residual = _add_norm(x, residual, layer.feed_forward_norm, eps)
        x = _feed(network.spec.layers[index].feed_forward, layer.feed_forward, normed)
    return _add_norm(x, residual, network.final_norm, eps)[0]


class FusedPrefill:
    """Implements `engine.execute.runner.Decoder`, for what `engine.execute.cuda.fused_program` supports."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._reference = Decoder(network)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """As `Decoder.forward`."""

        def attend(index: int, projected: Tensor) -> Tensor:
            return self._attend(index, projected, positions, attention)

        return run_layers(self._network, self._network.embedding.data.index_select(0, token_ids), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        return self._reference.logits(hidden)

    def _attend(self, index: int, projected: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        spec, layer = self._network.spec.layers[index].attention, self._network.layers[index].attention
        heads = projected.view(projected.shape[0], -1, spec.head_dim)
        norm, count = layer.head_norm, spec.heads + spec.kv_heads
        block = min(8, triton.next_power_of_2(count))
        position_kernel[(heads.shape[0], triton.cdiv(count, block))](
            heads,
            norm if norm is not None else heads,
            layer.rotary,
            positions,
            HEADS=count,
            ALL=heads.shape[1],
            D=spec.head_dim,
            BLOCK=block,
            EPS=spec.head_norm.eps if spec.head_norm is not None else 0.0,
            NORM=norm is not None,
            num_warps=2,
        )
        mixed = attention(index, heads[:, : spec.heads], heads[:, spec.heads : count], heads[:, count:])
        return mixed.reshape(-1, spec.heads * spec.head_dim)


def product(linear: Linear, x: Tensor) -> Tensor:
    """[T, columns] -> [T, rows]"""
    return F.linear(x, linear.weight, linear.bias)


def _feed(spec: FeedForward | Experts, weights: FeedForwardWeights | ExpertWeights, normed: Tensor) -> Tensor:
    """[T, hidden] -> the same shape"""
    if isinstance(weights, FeedForwardWeights):
        return product(weights.down, _gate(product(weights.gate_up, normed)))
    assert isinstance(spec, Experts)
    beside = _feed(spec.expert, weights.shared, normed) if weights.shared is not None else None
    return mix(spec, weights, normed, beside)


def _add_norm(
    x: Tensor, residual: Tensor | None, norm: NormWeights | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x and residual [T, size] -> (the norm of their sum, their sum)"""
    assert norm is not None
    rows, size = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        norm.weight,
        out,
        total,
        SIZE=size,
        BLOCK=block,
        EPS=eps,
        ADD=residual is not None,
        num_warps=max(1, min(8, block // 512)),
    )
    return out, total


def _gate(gate_up: Tensor) -> Tensor:
    """[T, 2 size] -> [T, size]: silu of the first half times the second"""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    inner = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(size))
    gate_kernel[(rows, triton.cdiv(size, block))](gate_up, inner, SIZE=size, BLOCK=block, num_warps=4)
    return inner
