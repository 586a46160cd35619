"""The expected decode speed: the bandwidth of the memory over the bytes that a token must read."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from engine.cache.kv_rows import token_bytes
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
"""Tokens of the conversation that must fit in memory."""


@dataclass(frozen=True, slots=True)
class Program:
    """The speed of a decode program: the fraction of the bandwidth it reaches, and its overhead per layer."""

    efficiency: float
    layer_s: float
    """Seconds per layer for launching kernels and waiting for them."""


NATIVE = "native kernels"
PROGRAMS = {
    # Both fitted to an H100 that copies 3.0 TB/s: a token takes 630 us with Qwen3-0.6B and 5.38 ms with 8B.
    "fused kernels, CUDA graph": Program(0.99, 7.4e-6),
    # The products of Qwen3-8B alone on an H200: 54% of the copy bandwidth in Q4_0, 78% in Q8_0.
    "fused kernels, quantised weights": Program(0.7, 7.4e-6),
    "plain modules, CUDA graph": Program(0.85, 40e-6),
    "plain modules": Program(0.85, 400e-6),
    # bf16 on two cores with AVX-512 whose memory reads 46 GB/s: 75 tokens/s with 275 MB per token.
    "plain modules, CPU": Program(0.45, 0.0),
    # SmolLM2's Q4_1 on the same machine, with its layers computed like those of an unusual family.
    "plain modules, native products": Program(0.7, 0.3e-3),
    # Q4_1 on the same machine: 300 tokens/s with 110 MB per token, KV included.
    NATIVE: Program(0.7, 0.0),
}

CRAWLS = 5.0
"""Tokens/s below which a model is too slow to chat with: about the speed at which people read."""
RUNS_WELL = 15.0
"""Tokens/s from which nobody waits for the text: faster than people read."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The expected speed and memory use of one model."""

    name: str
    parameters: int
    """As in its checkpoint; an output layer tied to the embedding counts once."""
    weight_bytes: int
    """Bytes of the weights as the engine holds them."""
    context: int
    """Tokens of a conversation that fit in the free memory; 0 when the model does not fit."""
    tokens_per_s: float | None
    """Decoding at a context of CONTEXT tokens, batch 1; None where the bandwidth is unknown."""
    memory_bytes: int
    """Bytes of the weights and of a conversation of CONVERSATION tokens."""
    download_bytes: int | None = None
    """Bytes to download; None for a model outside the catalogue."""
    int4_tokens_per_s: float | None = None
    """The same speed with `--quantize int4`, where that makes a difference."""
    host_layers: int = 0
    """Layers whose experts do not fit on the GPU and are held in host memory; the speed is then unknown."""
    host_bytes: int = 0
    """Bytes of these experts in host memory."""

    @property
    def fits(self) -> bool:
        """Whether the weights and a short conversation fit in the free memory."""
        return self.context > 0

    @property
    def crawls(self) -> bool:
        """Whether the model fits but is too slow to chat with."""
        return self.fits and self.tokens_per_s is not None and self.tokens_per_s < CRAWLS


@dataclass(frozen=True, slots=True)
class Here:
    """Everything the speed of a model depends on besides the model."""

    device: torch.device
    dtype: torch.dtype
    program: Program
    keeps_blocks: bool
    """Whether quantised weights are read as they are, by the native CPU kernels or a GPU's fused kernels."""
    bandwidth: float | None
    """Read bandwidth of `device` in bytes/s; None if unknown."""
    free: int | None
    """Free bytes of the device's memory; None if unknown."""
    host_free: int | None = None
    """Free bytes of host memory beside a GPU; None if no experts are held there."""
    kv_dtype: str = "auto"
    """The dtype of the KV cache: see `engine.cache.kv_rows.kv_row`."""


def catalogue_speed(name: str, here: Here) -> Speed:
    """Return the speed of a catalogue model."""
    file = HUB_FILES.get(name)
    wheel = WHEELS.get(name)
    model = file.model if file is not None else name
    blocks = wheel.gguf_bytes if wheel is not None else CHECKPOINT_BYTES.get(name)
    blocks = file.bytes if file is not None else blocks
    found = speed_here(name, shape_of(model), here, blocks)
    download = wheel.wheel_bytes if wheel is not None else blocks or 2 * found.parameters
    return replace(found, download_bytes=download)


def speed_here(name: str, spec: ModelSpec, here: Here, blocks: int | None) -> Speed:
    """Return the speed of a model of this shape; `blocks` is the bytes of its weights if they are quantised."""
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
    """Return `here` with the program that decodes this network: plain modules if our kernels do not support it."""
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
    """Return the number of expert weights that one token does not use."""
    found = 0
    for layer in spec.layers:
        if isinstance(experts := layer.feed_forward, Experts):
            matrices = 3 if experts.expert.gated else 2
            found += (experts.count - experts.chosen) * matrices * experts.expert.size
    return found * spec.hidden_size


def expected_speed(name: str, spec: ModelSpec, here: Here, stored: int | None = None) -> Speed:
    """Return the speed of a model of this shape; `stored` is the bytes of its weights if they stay quantised."""
    count = parameters(spec)
    weights = stored or count * here.dtype.itemsize
    per_token = token_bytes(spec, here.dtype, here.kv_dtype)
    # Only one row is read of an embedding that is not also the output layer.
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
    """Return the tokens of a conversation that fit in `left` bytes, the memory beside the weights; 0 if none do."""
    reserve = GRAPH_BYTES + USUAL_BYTES if here.device.type == "cuda" else 0
    window = Window(spec.window, most_prefill_rows(here.device)) if spec.window is not None else None
    per_token, share = token_bytes(spec, here.dtype, here.kv_dtype), kv_share(here.device)
    with suppress(EngineError):
        plan = plan_kv(per_token, 32, max(left, 0), spec.max_positions, None, share, reserve, window=window)
        return plan.context_length
    return 0


def _split(spec: ModelSpec, here: Here, blocks: int | None) -> Placement | None:
    """Return which experts would go to host memory; None if none need to, or if there is no room there either."""
    if here.free is None or here.host_free is None or not_on_host(spec) is not None:
        return None
    experts, needed = (
        experts_of(slots(spec), here.dtype, {}, {}),
        needed_bytes(spec, here.dtype, spec.max_positions),
    )
    if blocks is not None:
        share = blocks / (parameters(spec) * here.dtype.itemsize)
        experts = [replace(layer, on_host=int(layer.plain * share)) for layer in experts]
        if here.keeps_blocks:  # kept as blocks on the device too
            needed = blocks
            experts = [replace(layer, on_device=layer.on_host) for layer in experts]
    room = weight_room(spec, here.free, here.dtype, None)
    placement = place_experts(needed, experts, room)
    if placement is None or not placement.host_layers or placement.host_bytes > here.host_free * HOST_SHARE:
        return None
    return placement
