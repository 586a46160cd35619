"""How K or V of one token lies in the KV cache: as plain numbers, or in one byte each with a scale for every head.

A quantised row is one run of bytes, the numbers of all heads and then their scales in fp32, so whatever copies rows
copies both. A number is rounded once, when its row is written, and everything that attends reads what is stored: rows
have the same bits whether they were just computed or found in the cache.

fp8 is E4M3, with a power of two as the scale: bf16 holds the number that is stored exactly. The kernels' twins of
`encode` and `decode` are in `engine/kernels/triton/kv_rows.py` and `engine/kernels/native/kv_rows.h`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from engine.errors import EngineError
from models.spec import ModelSpec

KVKind = Literal["auto", "bf16", "fp16", "fp8", "int8"]
"""What `--kv-dtype` takes; auto: as the model computes."""
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALIGN = 16
"""Rows begin at a multiple of so many bytes, which is what a thread of a GPU copies at once."""
LEAST = 1e-30
"""A head whose numbers are all smaller is stored as zeros."""


@dataclass(frozen=True, slots=True)
class KVRow:
    """K or V of one token in one layer."""

    heads: int
    dim: int
    dtype: torch.dtype
    """Of plain numbers, and what quantised ones are read as."""
    kind: Literal["plain", "fp8", "int8"] = "plain"

    @property
    def is_quantised(self) -> bool:
        """Whether there is one byte for a number."""
        return self.kind != "plain"

    @property
    def is_fp8(self) -> bool:
        return self.kind == "fp8"

    @property
    def name(self) -> str:
        """The dtype of its numbers, for people."""
        return self.kind if self.is_quantised else str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of a row, its scales among them."""
        if not self.is_quantised:
            return self.heads * self.dim * self.dtype.itemsize
        return -(-self.heads * (self.dim + 4) // ALIGN) * ALIGN

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row as it is stored."""
        return (self.nbytes,) if self.is_quantised else (self.heads, self.dim)

    @property
    def stored(self) -> torch.dtype:
        """What it is stored in."""
        return torch.uint8 if self.is_quantised else self.dtype

    def scales(self, rows: Tensor) -> Tensor:
        """Those of quantised rows [..., nbytes]: a view, fp32 [..., heads]."""
        first = self.heads * self.dim
        return rows[..., first : first + 4 * self.heads].view(torch.float32)

    def encode(self, x: Tensor) -> Tensor:
        """Numbers [n, heads, dim] -> rows [n, *shape]."""
        if not self.is_quantised:
            return x.to(self.dtype)
        wide = x.float()
        most = wide.abs().amax(-1, keepdim=True)
        if self.is_fp8:
            # The power of two that brings the largest number to between 128 and 256.
            exponent = (most.view(torch.int32) >> 23) - 7
            scale = torch.where(exponent > 0, exponent << 23, 0).view(torch.float32)
            inverse = torch.where(exponent > 0, (254 - exponent) << 23, 0).view(torch.float32)
            codes = (wide * inverse).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            scale = torch.where(most > LEAST, most * (1 / 127), 0.0)
            inverse = torch.where(most > LEAST, torch.full_like(most, 127.0) / most, 0.0)
            codes = (wide * inverse).round().to(torch.int8).view(torch.uint8)
        rows = torch.zeros(len(x), self.nbytes, dtype=torch.uint8, device=x.device)
        rows[:, : self.heads * self.dim] = codes.flatten(1)
        self.scales(rows).copy_(scale.squeeze(-1))
        return rows

    def decode(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows [n, *shape] -> numbers [n, heads, dim] in `dtype` (None: the row's)."""
        dtype = dtype or self.dtype
        if not self.is_quantised:
            return rows.to(dtype)
        codes = rows[:, : self.heads * self.dim].view(torch.float8_e4m3fn if self.is_fp8 else torch.int8)
        numbers = codes.float().view(len(rows), self.heads, self.dim)
        return (numbers * self.scales(rows).unsqueeze(-1)).to(dtype)


def token_bytes(spec: ModelSpec, dtype: torch.dtype, kind: str = "auto") -> int:
    """Bytes of the KV cache that a token takes, all layers, for a model that computes in `dtype`."""
    heads = spec.attention
    row = kv_row(kind, heads.kv_heads, heads.head_dim, dtype, torch.device("cpu"))
    return 2 * len(spec.layers) * row.nbytes


def kv_row(kind: str, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> KVRow:
    """The row of `--kv-dtype` for a model that computes in `dtype`. Raises EngineError where it cannot be had."""
    if kind not in get_args(KVKind):
        raise EngineError(f"Unknown KV dtype {kind!r}; it must be auto, bf16, fp16, fp8 or int8.")
    if kind == "auto":
        return KVRow(heads, dim, dtype)
    if kind not in PLAIN:
        return KVRow(heads, dim, dtype, "fp8" if kind == "fp8" else "int8")
    if device.type != "cpu" and PLAIN[kind] != dtype:
        name = str(dtype).removeprefix("torch.")
        raise EngineError(
            f"--kv-dtype {kind} cannot be used: on a GPU a KV cache that is not quantised has the dtype of the model, "
            f"{name}. Use --kv-dtype auto, fp8 or int8."
        )
    return KVRow(heads, dim, PLAIN[kind])
