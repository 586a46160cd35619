"""The choice of the attention backend: each one is tried with a tiny call, never guessed from versions."""

import importlib
from dataclasses import dataclass
from sys import maxsize
from types import MappingProxyType

import torch
from torch import Tensor

from engine.attention import AttentionBackend
from engine.attention.flash import FlashBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.attention.unusual import Layers, on_trial
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_rows import kv_row
from engine.device import FULL_SPEED, is_amd
from engine.errors import EngineError
from engine.kernels import flash
from engine.kernels.on_gpu import triton_problem
from models.features import Feature
from models.spec import Attention

BLOCK_SIZES = {"flash": 256, "triton": 32, "sdpa": 32}
"""Rows per block of each backend, best backend first.

On an H100, triton reads prompts of 2,000 tokens a little faster than flash (1.10 for 0.6B, 1.02 for 8B) and decodes as
fast, but prompts of 16,000 and 32,000 tokens of 8B take 1.06 and 1.15 times as long
(`benchmarks/attention_start.py`)."""
TOLERANCE = 5e-3
"""The relative error against fp32 that rounding to bf16 explains."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend that works here. `note` is a line for the user: why no better one is used."""

    name: str
    block_size: int
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a backend cannot be used. `why` fits into the middle of a sentence."""

    why: str
    broken: bool = True
    """True if it is there but does not work, which the user should know; False if it is simply not there."""
    remedy: str = "Use --attention auto."


def choose_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    asked: tuple[Attention, ...] = (),
    kind: str = "auto",
    most_rows: int = maxsize,
) -> AttentionChoice:
    """Return the backend `name`, or for "auto" the best one that works: on a GPU flash, then triton, then sdpa.

    `asked` has the kinds of attention of the layers (`engine.attention.unusual.kinds`); none: plain attention. `kind`
    is the format of the KV cache (`kv_row`). "auto" is none whose blocks have more than `most_rows` rows.

    Raises EngineError if the requested backend does not work here.
    """
    if name not in ("auto", *BLOCK_SIZES):
        raise EngineError(f"Unknown attention backend {name!r}; it must be auto, flash, triton or sdpa.")
    if name != "auto":
        problem = _problem(name, device, dtype, head_dim, asked, kind)
        if problem is not None:
            raise EngineError(f"--attention {name} cannot be used: {problem.why}. {problem.remedy}")
        return AttentionChoice(name, BLOCK_SIZES[name])
    if device.type != "cuda":
        return AttentionChoice("sdpa", BLOCK_SIZES["sdpa"])
    reasons: list[str] = []
    for candidate, block_size in BLOCK_SIZES.items():
        if block_size > most_rows:
            continue
        problem = _problem(candidate, device, dtype, head_dim, asked, kind)
        if problem is None:
            note = f"Attention uses {candidate} because {', and '.join(reasons)}." if reasons else None
            return AttentionChoice(candidate, block_size, note)
        if problem.broken and problem.why not in reasons:
            reasons.append(problem.why)
    raise AssertionError("sdpa works everywhere")


def usable_backends(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> list[tuple[str, str | None]]:
    """Return every backend, best first, with None if it works here, else why not (the middle of a sentence)."""
    problems = [(name, _problem(name, device, dtype, head_dim)) for name in BLOCK_SIZES]
    return [(name, None if problem is None else problem.why) for name, problem in problems]


def make_backend(
    name: str,
    cache: KVCache,
    unusual: Layers = MappingProxyType({}),
) -> AttentionBackend:
    """Return the backend `name` over `cache`; `unusual` has the layers whose attention is not plain softmax.

    flash does not support sinks.
    """
    if name == "flash":
        return FlashBackend(cache, unusual)
    if name == "triton":
        return TritonBackend(cache, unusual)
    return SdpaBackend(cache, unusual)


@dataclass(frozen=True, slots=True)
class _Package:
    """The package that a backend needs."""

    name: str
    module: str
    install: str


_PACKAGES = {
    "flash": _Package("flash-attn", flash.MODULE, "pip install 'flash-attn>=2.8,<3' --no-build-isolation"),
    "triton": _Package("triton", "triton", "pip install triton"),
}


def _problem(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    asked: tuple[Attention, ...] = (),
    kind: str = "auto",
) -> _Problem | None:
    if name == "sdpa":
        return None
    if device.type != "cuda" or is_amd():
        return _Problem("it needs an NVIDIA GPU", broken=False)
    capability = torch.cuda.get_device_capability(device)
    if capability < FULL_SPEED:
        here, least = (".".join(map(str, pair)) for pair in (capability, FULL_SPEED))
        # Not broken: choosing the device has reported it already.
        return _Problem(f"this GPU has compute capability {here}, and it needs {least}", broken=False)
    if name == "flash" and dtype not in (torch.bfloat16, torch.float16):
        return _Problem("flash-attn computes in bfloat16 or float16 only", broken=False)
    if name == "triton" and dtype == torch.float32 and not all(spec.is_plain for spec in asked):
        return _Problem(
            "its kernel for this model's attention computes in bfloat16 or float16 only", broken=False
        )
    if any(spec.chunk is not None for spec in asked):
        return _Problem(f"it does not support {Feature.CHUNKS.value}", broken=False)
    if name == "flash" and any(spec.sinks for spec in asked):
        return _Problem(f"flash-attn does not support {Feature.SINKS.value}", broken=False)
    if name == "flash" and len({spec.head_dim for spec in asked}) > 1:
        return _Problem(f"flash-attn is not used for {Feature.MIXED_HEADS.value}", broken=False)
    if name == "flash" and any(spec.kv_from is not None for spec in asked):
        return _Problem(f"flash-attn is not used for {Feature.SHARED_KV.value}", broken=False)
    return _tried(name, device, dtype, head_dim, asked, kind)


def _tried(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    asked: tuple[Attention, ...] = (),
    kind: str = "auto",
) -> _Problem | None:
    package = _PACKAGES[name]
    try:
        importlib.import_module(package.module)
        if name == "triton" and device.type == "cuda" and (why := triton_problem(device)) is not None:
            return _Problem(why, broken=False)  # a note about all kernels reports it
        error = _error(name, device, dtype, asked or (Attention(4, 2, head_dim),), kind)
    except Exception as problem:  # noqa: BLE001 - whatever a broken package raises, another backend works
        if isinstance(problem, ModuleNotFoundError) and problem.name == package.module:
            remedy = f"Install it with: {package.install}. Or use --attention auto."
            return _Problem(f"{package.name} is not installed", broken=False, remedy=remedy)
        said = (str(problem).strip().splitlines() or [""])[0][:200]
        return _Problem(f"{package.name} is installed but does not work ({type(problem).__name__}: {said})")
    if not error < TOLERANCE:
        return _Problem(f"{package.name} is installed but its results are wrong (relative error {error:.1e})")
    return None


def _error(
    name: str, device: torch.device, dtype: torch.dtype, asked: tuple[Attention, ...], kind: str
) -> float:
    """Return the relative error, against sdpa in fp32, of a prompt of 300 tokens, then of a token after it beside
    another prompt: the largest over all kinds of attention `asked` for.

    A shorter prompt would fit into one tile of flash-attn's kernels: a build without those for heads of 96 gives
    correct numbers for the first tile, and wrong ones from the second on.
    """
    random = torch.Generator().manual_seed(0)
    numbers: dict[int, list[Tensor]] = {}
    for dim in dict.fromkeys(spec.head_dim for spec in asked):
        numbers[dim] = [
            torch.randn(315, heads, dim, generator=random).to(device, dtype) for heads in (4, 2, 2)
        ]
    blocks = tuple(range(1, 2 + 300 // BLOCK_SIZES[name]))
    steps = ((Span(blocks, 0, 300),), (Span(blocks, 300, 1), Span((0,), 0, 14)))
    unusual = {i: on_trial(spec, device, dtype) for i, spec in enumerate(asked) if not spec.is_plain}
    outs: list[list[Tensor]] = []
    for backend_name, held in ((name, dtype), ("sdpa", torch.float32)):
        quantized = kind if kind in ("fp8", "int8") else "auto"
        formats = [kv_row(quantized, 2, spec.head_dim, held, device) for spec in asked]
        cache = KVCache(formats, 1 + len(blocks), BLOCK_SIZES[name], held, device)
        backend = make_backend(backend_name, cache, unusual)
        found: list[list[Tensor]] = [[] for _ in asked]
        for spans, rows in zip(steps, (slice(0, 300), slice(300, 315)), strict=True):
            step = backend.plan(StepBatch(spans))
            for layer, spec in enumerate(asked):
                given = [each[rows].to(held) for each in numbers[spec.head_dim]]
                found[layer].append(step(layer, *given).float().flatten())
        outs.append([torch.cat(own) for own in found])
    pairs = zip(*outs, strict=True)
    return float(torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max())
