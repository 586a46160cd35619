"""Products of activations with plain weights, by the fastest method that torch has on this machine."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] or None -> [T, out], in the dtype of x"""


def choose_product(dtype: torch.dtype, device: torch.device) -> Product:
    """Return this machine's fastest matrix product for activations and weights of `dtype` on `device`."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return F.linear
    return _native_linear if _has_native_bf16() else _upcast_linear


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype (bf16 or fp32) in which a CPU multiplies activations of `dtype`; weights can have any dtype."""
    return dtype if dtype == torch.bfloat16 and _has_native_bf16() else torch.float32


def _has_native_bf16() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _native_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # For one row oneDNN's bf16 GEMM takes twice as long as torch's own matrix-vector product (15 ms against
    # 7 ms for all products of SmolLM2-135M), which torch uses only while oneDNN is switched off.
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
