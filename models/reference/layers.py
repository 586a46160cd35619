"""The building blocks of a decoder: products, norms, packed linear layers, the MLP.

Parameters are made on the meta device and filled by models.load. Each module says through `slots()` which
tensors of a checkpoint fill which rows of its parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] or None -> [T, out], in the dtype of x."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of a checkpoint goes."""

    parameter: str
    """The attribute of the module that `slots()` was asked of."""
    start: int
    """First row of the parameter that the tensor fills."""
    rows: int
    """Number of rows that it fills."""
    shape: tuple[int, ...]
    """The shape that the tensor must have; where it has one dimension less, it is repeated in every row."""


def choose_product(dtype: torch.dtype, device: torch.device) -> Product:
    """The fastest matrix product of this machine for activations and weights of `dtype` on `device`."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return F.linear
    return _native_linear if _has_native_bf16() else _upcast_linear


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a CPU multiplies activations of `dtype` in, where the weights can have any: bf16 or else fp32."""
    return dtype if dtype == torch.bfloat16 and _has_native_bf16() else torch.float32


def _has_native_bf16() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _native_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # For one row oneDNN's bf16 GEMM takes twice as long as torch's own matrix-vector product (15 ms against
    # 7 ms for all products of SmolLM2-135M), which torch takes only where oneDNN is switched off.
    if x.shape[0] != 1 or not torch._C._get_mkldnn_enabled():
        return F.linear(x, weight, bias)
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


def _upcast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Without bf16 instructions a bf16 GEMM runs at a quarter of the speed of fp32, casts included.
    if x.shape[0] < 16:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """One or several linear layers over the same input, packed along the output.

    `parts` maps the checkpoint's layer names to their numbers of output features, in packing order.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool, product: Product) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.product = product
        out_features = sum(parts.values())
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of the parts]"""
        return self.product(x, self.weight, self.bias)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Checkpoint names relative to the enclosing module, and where they go."""
        start = 0
        for name, rows in self.parts.items():
            yield f"{name}.weight", Slot("weight", start, rows, (rows, self.weight.shape[1]))
            if self.bias is not None:
                yield f"{name}.bias", Slot("bias", start, rows, (rows,))
            start += rows


class Embedding(nn.Module):
    """One row of `weight` a token."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]"""
        return self.weight.index_select(0, token_ids)

    def slots(self) -> Iterator[tuple[str, Slot]]:
        rows, width = self.weight.shape
        yield "embed_tokens.weight", Slot("weight", 0, rows, (rows, width))


class RMSNorm(nn.Module):
    """Normalise in fp32, cast back, then multiply by the weight: the order that networks were trained in."""

    def __init__(self, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = _parameter(size)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, size] -> (the norm of their sum, their sum)"""
        residual = residual + x
        return self.norm(residual), residual

    def norm(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape"""
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight

    def slots(self) -> Iterator[tuple[str, Slot]]:
        size = self.weight.shape[0]
        yield f"{self.name}.weight", Slot("weight", 0, size, (size,))


class HeadNorm(nn.Module):
    """RMSNorm of every q and k head, with one weight for all q heads and one for all k heads.

    The weight is kept once a head, so that q and k, side by side in the packed projection, take one pass.
    """

    def __init__(self, q_heads: int, k_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.q_heads = q_heads
        self.k_heads = k_heads
        self.eps = eps
        self.weight = _parameter(q_heads + k_heads, head_dim)

    def forward(self, heads: Tensor) -> Tensor:
        """[T, q_heads + k_heads, head_dim] -> the same shape"""
        return F.rms_norm(heads, heads.shape[-1:], None, self.eps) * self.weight

    def slots(self) -> Iterator[tuple[str, Slot]]:
        shape = (self.weight.shape[1],)
        yield "q_norm.weight", Slot("weight", 0, self.q_heads, shape)
        yield "k_norm.weight", Slot("weight", self.q_heads, self.k_heads, shape)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, product: Product) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias, product)
        self.down_proj = Linear(intermediate_size, {"down_proj": hidden_size}, bias, product)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same shape"""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))  # type: ignore[no-any-return]
