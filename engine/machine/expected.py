"""The decode speed to expect: bytes that a token must read, over the bandwidth of the memory."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from engine.cache.sizing import (
    GRAPH_BYTES,
    USUAL_BYTES,
    kv_share,
    most_prefill_rows,
    plan_kv,
    weight_room,
)
from engine.cache.window import Window
from engine.errors import EngineError
from engine.execute.compatibility import not_fused, not_native, not_on_host
from engine.machine.shapes import shape_of
from models.hub.catalogue import CHECKPOINT_BYTES, HUB_FILES, WHEELS
from models.load import HOST_SHARE, INT4_BYTES, needed_bytes
from models.spec import Experts, ModelSpec
from models.weights.placement import Placement, experts_of, place_experts
from models.weights.slots import parameters, slots

CONTEXT = 512
"""Tokens in the KV cache that a decoded token attends to."""
CONVERSATION = 4096
"""Tokens of a conversation, for which there must be memory."""


@dataclass(frozen=True, slots=True)
class Program:
    """How fast a decode program is: the fraction of the bandwidth it reaches, and what a layer costs besides."""

    efficiency: float
    layer_s: float
    """Seconds a layer for launching kernels and waiting for them."""


NATIVE = "native kernels"
PROGRAMS = {
    # Both fitted to an H100: 630 us for a token of Qwen3-0.6B and 5.38 ms for one of 8B, where 3.0 TB/s are copied.
    "fused kernels, CUDA graph": Program(0.99, 7.4e-6),
    # The products of Qwen3-8B on an H200 alone: 54% of what is copied in Q4_0, 78% in Q8_0.
    "fused kernels, quantised weights": Program(0.7, 7.4e-6),
    "plain modules, CUDA graph": Program(0.85, 40e-6),
    "plain modules": Program(0.85, 400e-6),
    # bf16 on two cores with AVX-512: 75 tokens/s of 275 MB where memory is read at 46 GB/s.
    "plain modules, CPU": Program(0.45, 0.0),
    # SmolLM2's Q4_1 on the same, where its layers are computed like those of an unusual family.
    "plain modules, native products": Program(0.7, 0.3e-3),
    # Q4_1 on the same: 300 tokens/s of 110 MB, KV included.
    NATIVE: Program(0.7, 0.0),
}

CRAWLS = 5.0
"""Tokens/s below which nobody wants to chat: people read about as fast."""
RUNS_WELL = 15.0
"""Tokens/s from which nobody waits: faster than people read."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What to expect of one model."""

    name: str
    parameters: int
    """As in its checkpoint; an output layer tied to the embedding counts once."""
    weight_bytes: int
    """As computed with."""
    context: int
    """Tokens that a conversation can hold in the memory that is free; 0 when the model does not fit."""
    tokens_per_s: float | None
    """Decoding at a context of CONTEXT tokens, batch 1; None where the bandwidth is unknown."""
    memory_bytes: int
    """What the weights and a conversation of CONVERSATION tokens take."""
    download_bytes: int | None = None
    """What is fetched for it; None for a model of no catalogue."""
    int4_tokens_per_s: float | None = None
    """The same speed with `--quantize int4`, where that makes a difference."""
    host_layers: int = 0
    """Layers whose experts a GPU has no room for: they are held in host memory, and the speed is not known."""
    host_bytes: int = 0
    """What they take there."""

    @property
    def fits(self) -> bool:
        """Whether its weights and a short conversation fit in the memory that is free."""
        return self.context > 0

    @property
    def crawls(self) -> bool:
        """Whether it fits and is too slow to chat with."""
        return self.fits and self.tokens_per_s is not None and self.tokens_per_s < CRAWLS


@dataclass(frozen=True, slots=True)
class Here:
    """What the speed of a model depends on beside the model."""

    device: torch.device
    dtype: torch.dtype
    program: Program
    keeps_blocks: bool
    """Whether quantised weights are read as they are: by the native kernels of a CPU, or a GPU's fused ones."""
    bandwidth: float | None
    """Bytes/s that `device` reads; None where nobody knows."""
    free: int | None
    """Bytes of its memory."""
    host_free: int | None = None
    """Bytes of host memory beside a GPU; None where no experts are held there."""


def catalogue_speed(name: str, here: Here) -> Speed:
    """The speed of a model of the catalogue."""
    file = HUB_FILES.get(name)
    wheel = WHEELS.get(name)
    model = file.model if file is not None else name
    blocks = wheel.gguf_bytes if wheel is not None else CHECKPOINT_BYTES.get(name)
    blocks = file.bytes if file is not None else blocks
    found = speed_here(name, shape_of(model), here, blocks)
    download = wheel.wheel_bytes if wheel is not None else blocks or 2 * found.parameters
    return replace(found, download_bytes=download)


def speed_here(name: str, spec: ModelSpec, here: Here, blocks: int | None) -> Speed:
    """The speed of a model of this shape; `blocks` are the bytes of its weights where they are quantised."""
    here = suited(spec, here, blocks is not None)
    found = expected_speed(name, spec, here, blocks if here.keeps_blocks else None)
    if (split := _split(spec, here, blocks)) is not None:
        assert here.free is not None
        context = _context(spec, here, here.free - split.device_bytes)
        held, conversation = split.host_bytes, found.memory_bytes - found.weight_bytes
        weights = split.device_bytes + held
        return replace(
            found,
            weight_bytes=weights,
            memory_bytes=weights + conversation,
            context=context,
            tokens_per_s=None,
            host_layers=len(split.host_layers),
            host_bytes=held,
        )
    if not here.keeps_blocks or blocks is not None:
        return found
    int4 = expected_speed(name, spec, here, int(found.parameters * INT4_BYTES))
    return replace(found, int4_tokens_per_s=int4.tokens_per_s)


def suited(spec: ModelSpec, here: Here, quantised: bool = False) -> Here:
    """`here` with the program that decodes such a network: plain modules where our kernels do not know it."""
    if here.program is PROGRAMS[NATIVE] and not_native(spec):
        program = "plain modules, native products" if quantised else "plain modules, CPU"
        return replace(here, program=PROGRAMS[program], keeps_blocks=quantised)
    if here.program is PROGRAMS["fused kernels, CUDA graph"]:
        if not_fused(spec):
            return replace(here, program=PROGRAMS["plain modules, CUDA graph"])
        if quantised:
            return replace(here, program=PROGRAMS["fused kernels, quantised weights"], keeps_blocks=True)
    return here


def not_chosen(spec: ModelSpec) -> int:
    """Weights of experts that one token does not take."""
    found = 0
    for layer in spec.layers:
        if isinstance(experts := layer.feed_forward, Experts):
            matrices = 3 if experts.expert.gated else 2
            found += (experts.count - experts.chosen) * matrices * experts.expert.size
    return found * spec.hidden_size


def expected_speed(name: str, spec: ModelSpec, here: Here, stored: int | None = None) -> Speed:
    """The speed of a model of this shape; `stored` are the bytes of weights that stay quantised, None: they do not."""
    count = parameters(spec)
    weights = stored or count * here.dtype.itemsize
    per_token = spec.kv_numbers * here.dtype.itemsize
    # Of an embedding that is not the output layer too, one row is read.
    unread = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    unread = (unread + not_chosen(spec)) * weights // count
    speed = None
    if here.bandwidth:
        seconds = (weights - unread + CONTEXT * per_token) / (here.bandwidth * here.program.efficiency)
        speed = 1 / (seconds + len(spec.layers) * here.program.layer_s)
    context = 0
    if here.free is not None:
        left = here.free - (stored or needed_bytes(spec, here.dtype, spec.max_positions))
        context = _context(spec, here, left)
    conversation = min(CONVERSATION, spec.max_positions) * per_token
    return Speed(name, count, weights, context, speed, weights + conversation)


def _context(spec: ModelSpec, here: Here, left: int) -> int:
    """Tokens of a conversation in the memory that the weights leave; 0 when there is none."""
    reserve = GRAPH_BYTES + USUAL_BYTES if here.device.type == "cuda" else 0
    window = Window(spec.window, most_prefill_rows(here.device)) if spec.window is not None else None
    per_token, share = spec.kv_numbers * here.dtype.itemsize, kv_share(here.device)
    with suppress(EngineError):
        plan = plan_kv(per_token, 32, max(left, 0), spec.max_positions, None, share, reserve, window=window)
        return plan.context_length
    return 0


def _split(spec: ModelSpec, here: Here, blocks: int | None) -> Placement | None:
    """What of the experts would be held in host memory; None where nothing is, or there is no room either."""
    if here.free is None or here.host_free is None or not_on_host(spec) is not None:
        return None
    experts, needed = (
        experts_of(slots(spec), here.dtype, {}, {}),
        needed_bytes(spec, here.dtype, spec.max_positions),
    )
    if blocks is not None:
        share = blocks / (parameters(spec) * here.dtype.itemsize)
        experts = [replace(layer, on_host=int(layer.plain * share)) for layer in experts]
        if here.keeps_blocks:  # on the device, too
            needed = blocks
            experts = [replace(layer, on_device=layer.on_host) for layer in experts]
    room = weight_room(spec, here.free, here.dtype, None)
    placement = place_experts(needed, experts, room)
    if placement is None or not placement.host_layers or placement.host_bytes > here.host_free * HOST_SHARE:
        return None
    return placement
