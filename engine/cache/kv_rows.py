"""The layout of a token's K or V in the KV cache: plain numbers, or one byte per number and a scale per head.

A quantised row is one run of bytes, the numbers of all heads and then their scales in fp32, so copying a row copies
both. A number is rounded once, when its row is written, and all attention reads what is stored. So a row has the
same bits whether it was just computed or found in the cache.

fp8 is E4M3 with a power of two as the scale, so bf16 represents every stored number exactly. The kernel versions of
`encode` and `decode` are in `engine/kernels/triton/kv_rows.py` and `engine/kernels/native/kv_rows.h`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal, get_args

import torch
from torch import Tensor

from engine.errors import EngineError
from models.recurrences import Recurrence
from models.spec import LatentAttention, Mixer, ModelSpec, ShortConvolution, kv_sources

KVKind = Literal["auto", "bf16", "fp16", "fp8", "int8"]
"""The values of `--kv-dtype`; auto: the dtype in which the model computes."""
QUANTIZED = ("fp8", "int8")
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALIGN = 16
"""Rows begin at a multiple of this many bytes, the number that one GPU thread copies at once."""
LEAST = 1e-30
"""If all numbers of a head are smaller than this, they are stored as zeros."""


@dataclass(frozen=True, slots=True)
class KVRow:
    """The format of what one layer keeps of one token: K and V, a latent, or the input of a convolution or a
    recurrence."""

    heads: int
    dim: int
    dtype: torch.dtype
    """The dtype of plain numbers, and the dtype to which quantised ones are decoded."""
    kind: Literal["plain", "fp8", "int8"] = "plain"
    has_v: bool = True
    """Whether there are a K and a V of this format. Latent attention keeps a latent and the key that all heads share in
    place of K, a convolution or recurrence its input; they have no V."""

    @property
    def is_quantized(self) -> bool:
        """Whether each number is stored in one byte."""
        return self.kind != "plain"

    @property
    def is_fp8(self) -> bool:
        return self.kind == "fp8"

    @property
    def name(self) -> str:
        """The format of its numbers, for display."""
        return self.kind if self.is_quantized else str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of a row, scales included."""
        if not self.is_quantized:
            return self.heads * self.dim * self.dtype.itemsize
        return -(-self.heads * (self.dim + 4) // ALIGN) * ALIGN

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row as stored."""
        return (self.nbytes,) if self.is_quantized else (self.heads, self.dim)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of a row as stored."""
        return torch.uint8 if self.is_quantized else self.dtype

    def scales(self, rows: Tensor) -> Tensor:
        """Return the scales of quantised rows uint8 [..., nbytes] as a view, fp32 [..., heads]."""
        first = self.heads * self.dim
        return rows[..., first : first + 4 * self.heads].view(torch.float32)

    def encode(self, x: Tensor) -> Tensor:
        """Convert numbers [n, heads, dim] to rows [n, *shape]."""
        if not self.is_quantized:
            return x.to(self.dtype)
        wide = x.float()
        most = wide.abs().amax(-1, keepdim=True)
        if self.is_fp8:
            # The power of two that brings the largest magnitude to at least 128 and below 256.
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
        """Convert rows [n, *shape] to numbers [n, heads, dim] in `dtype` (None: the row's)."""
        dtype = dtype or self.dtype
        if not self.is_quantized:
            return rows.to(dtype)
        codes = rows[:, : self.heads * self.dim].view(torch.float8_e4m3fn if self.is_fp8 else torch.int8)
        numbers = codes.float().view(len(rows), self.heads, self.dim)
        return (numbers * self.scales(rows).unsqueeze(-1)).to(dtype)


def token_bytes(spec: ModelSpec, dtype: torch.dtype, kind: str = "auto") -> int:
    """Return the bytes of KV cache that a token takes in all layers, for a model that computes in `dtype`."""
    rows = layer_rows(spec, dtype, torch.device("cpu"), kind)
    return sum(rows[layer].nbytes * (1 + rows[layer].has_v) for layer in set(kv_sources(spec)))


def layer_rows(spec: ModelSpec, dtype: torch.dtype, device: torch.device, kind: str = "auto") -> list[KVRow]:
    """Return the format of each layer's rows, for a model that computes in `dtype`. Raises as `kv_row` does.

    The inputs of convolutions and recurrences keep this dtype: `kind` is that of K and V, and of latents.
    """

    def row(mixer: Mixer | None) -> KVRow:
        if isinstance(mixer, ShortConvolution):
            return KVRow(1, mixer.size, dtype, has_v=False)
        if isinstance(mixer, Recurrence):
            return KVRow(1, mixer.log_size, dtype, has_v=False)
        if isinstance(mixer, LatentAttention):
            # As heads of 64 numbers, so that no scale covers a part of the latent and of the key.
            dim = gcd(mixer.kv_rank, mixer.rope_dim)
            return replace(kv_row(kind, mixer.row_size // dim, dim, dtype, device), has_v=False)
        assert mixer is not None
        return kv_row(kind, mixer.kv_heads, mixer.head_dim, dtype, device)

    sources = kv_sources(spec)
    return [row(spec.layers[source].mixer) for source in sources]


def attention_row(rows: Sequence[KVRow]) -> KVRow:
    """Return the format of K and V in the first layer that has both, among the formats of all layers."""
    return next((row for row in rows if row.has_v), rows[0])


def kv_row(kind: str, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> KVRow:
    """Return the row format of `--kv-dtype` for a model that computes in `dtype`. Raises EngineError if impossible."""
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
