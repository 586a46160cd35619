"""The memory that a model needs on a device, and messages for models that need more than there is."""

from dataclasses import dataclass

import torch

from models.spec import ModelSpec
from models.units import bytes_text
from models.weights.slots import parameters

INT4_BYTES = 0.75
"""Bytes per weight with `--quantize int4`, including the matrices that stay in 8 bits."""
Q4_BYTES = 0.6
"""Bytes per weight of a usual GGUF file in 4 bits (Q4_K_M)."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The fewest bytes that a model needs on a device beside its weights."""

    computing: int = 0
    kv: int = 0
    """For a KV cache of `tokens` tokens."""
    tokens: int = 0
    is_asked: bool = False
    """Whether the user asked for this context length."""

    @property
    def nbytes(self) -> int:
        return self.computing + self.kv


def too_large(
    spec: ModelSpec,
    needed: int,
    beside: Beside,
    available: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: str | None,
    on_cpu: int | None,
) -> str:
    """Return a line for the user: the memory that is needed, the memory that is free, and what would fit instead.

    The weights need `needed` bytes, and `beside` is needed in addition. `kind` is the type in which most weights are
    held in blocks or planes; None if all are plain numbers. `on_cpu` is how many bytes of main memory are free; None if
    unknown.
    """
    left = max(available - beside.nbytes, 0)
    ways = []
    if beside.is_asked and (tokens := _tokens(available - needed - beside.computing, beside)) >= 16:
        ways.append(f"use --context {tokens} or less")
    if not left:
        ways.append("choose a smaller model")
    elif kind is not None:
        fit = left * parameters(spec) // max(needed, 1)
        ways.append(
            f"choose a model of at most {bytes_text(left)} (about {count_text(fit)} parameters in {kind})"
        )
    else:
        plain, quantized = left // dtype.itemsize, int(left / Q4_BYTES)
        ways.append(
            f"choose a smaller model (about {count_text(plain)} parameters fit in {8 * dtype.itemsize} bits, "
            f"{count_text(quantized)} in a file of 4 bits)"
        )
    if kind is None:
        if dtype.itemsize > 2:
            ways.append("use --dtype bfloat16, which needs half")
        if device.type == "cpu" and needed * INT4_BYTES / dtype.itemsize < left:
            ways.append("use --quantize int4")
    if device.type != "cpu" and on_cpu is not None and needed < on_cpu:
        ways.append(f"use --device cpu, where {bytes_text(on_cpu)} are free")
    more = ""
    if beside.computing:
        more = f", {bytes_text(beside.computing)} to compute with"
    if beside.kv:
        more += f" and {bytes_text(beside.kv)} for a context of {beside.tokens:,} tokens"
    return (
        f"The model needs {bytes_text(needed)} of memory on {device}{more}, but {bytes_text(available)} are free; "
        f"{', '.join(ways)}, or free some memory."
    )


def too_large_for_host(
    needed: int, free: int, layers: int, on_device: int, available: int | None, device: torch.device
) -> str:
    """Return a line for the user about experts that fit neither on the device nor in host memory."""
    fits = free + (on_device if available is None else available)
    return (
        f"The model takes {bytes_text(on_device)} of memory on {device} and {bytes_text(needed)} "
        f"of host memory for the experts of {layers} layers, where {bytes_text(free)} can be used; choose a model of "
        f"at most {bytes_text(fits)}, or a quantised GGUF file of this one, or free some memory."
    )


def count_text(number: int) -> str:
    """Return a number of parameters in words."""
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _tokens(left: int, beside: Beside) -> int:
    """Return how many tokens' cache fits in `left` bytes, in whole blocks, with one block to spare."""
    return max(left * beside.tokens // beside.kv // 32 - 2, 0) * 32 if beside.kv else 0
