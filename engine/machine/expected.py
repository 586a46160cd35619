"""The expected decode speed: the bandwidth of the memory over the bytes that a token must read."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.cache.kv_needs import KVNeeds, kv_needs
from engine.cache.sizing import SHORT_CONTEXT, KVPlan, expected_plan, weight_room
from engine.errors import EngineError
from engine.execute.compatibility import not_fused, not_native, not_on_host
from engine.execute.loading import plan_here
from engine.machine.shapes import known_shape
from engine.params import LoadOptions
from models.files import ModelFiles
from models.hub.catalogue import CHECKPOINT_BYTES, HUB_FILES, WHEELS
from models.loading.load import HOST_SHARE
from models.loading.plan import needed_bytes
from models.spec import Experts, ModelSpec
from models.weights.placement import Placement, expert_layers, place_experts
from models.weights.slots import parameters, slots
from models.weights.too_large import INT4_BYTES

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
"""Tokens/s from which text comes faster than people read."""


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
    kv_bytes: int = 0
    """The size of the KV cache of a chat in bytes; 0 if the model does not fit."""
    kv_share: float = 0.0
    """The share that this cache takes of the memory that the weights leave free."""
    on_cpu: bool = False
    """Whether the GPU has no room for the model, so that these are the figures of the CPU, as with `--device auto`."""

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
    or_cpu: "Here | None" = None
    """The CPU, on which a model runs if the GPU has no room for it; None if the device was chosen by name."""


def catalogue_speed(name: str, here: Here) -> Speed:
    """Return the speed of a catalogue model."""
    file = HUB_FILES.get(name)
    wheel = WHEELS.get(name)
    model = file.model if file is not None else name
    blocks = wheel.gguf_bytes if wheel is not None else CHECKPOINT_BYTES.get(name)
    blocks = file.bytes if file is not None else blocks
    found = speed_here(name, known_shape(model), here, blocks)
    download = wheel.wheel_bytes if wheel is not None else blocks or 2 * found.parameters
    return replace(found, download_bytes=download)


def speed_here(name: str, spec: ModelSpec, here: Here, blocks: int | None) -> Speed:
    """Return the speed of a model of this shape; `blocks` is the bytes of its weights if they are quantised."""
    found = _speed_on(name, spec, here, blocks)
    return _or_on_cpu(found, spec, here, lambda cpu: _speed_on(name, spec, cpu, blocks))


def local_speed(files: ModelFiles, here: Here, options: LoadOptions) -> Speed:
    """Return the speed of a model on this machine, its weights held as loading plans it. Raises ModelError."""
    plan = plan_here(files, here.dtype, here.device, options)
    blocks = plan.nbytes if plan.kinds or plan.packed else None
    found = _speed_on(files.name, plan.spec, here, blocks)
    return _or_on_cpu(found, plan.spec, here, lambda cpu: local_speed(files, cpu, options))


def _or_on_cpu(found: Speed, spec: ModelSpec, here: Here, speed_on: Callable[[Here], Speed]) -> Speed:
    """Return `found`, or what `speed_on` returns for the CPU if only that has room for a conversation."""
    if here.or_cpu is None or found.context >= min(SHORT_CONTEXT, spec.max_positions):
        return found
    instead = speed_on(here.or_cpu)
    return replace(instead, on_cpu=True) if instead.fits else found


def _speed_on(name: str, spec: ModelSpec, here: Here, blocks: int | None) -> Speed:
    here = suited(spec, here, blocks is not None)
    found = expected_speed(name, spec, here, blocks if here.keeps_blocks else None)
    if (split := _split(spec, here, blocks)) is not None:
        plan = _plan(spec, here, split.device_bytes, on_host=True)
        held, conversation = split.host_bytes, found.memory_bytes - found.weight_bytes
        weights = split.device_bytes + held
        return replace(
            found,
            weight_bytes=weights,
            memory_bytes=weights + conversation,
            **_kv(plan),
            tokens_per_s=None,
            host_layers=len(split.host_layers),
            host_bytes=held,
        )
    if not here.keeps_blocks or blocks is not None:
        return found
    int4 = expected_speed(name, spec, here, int(found.parameters * INT4_BYTES))
    return replace(found, int4_tokens_per_s=int4.tokens_per_s)


def suited(spec: ModelSpec, here: Here, quantized: bool = False) -> Here:
    """Return `here` with the program that decodes this network: plain modules if our kernels do not support it."""
    if here.program is PROGRAMS[NATIVE] and not_native(spec):
        program = "plain modules, native products" if quantized else "plain modules, CPU"
        return replace(here, program=PROGRAMS[program], keeps_blocks=quantized)
    if here.program is PROGRAMS["fused kernels, CUDA graph"]:
        if not_fused(spec):
            return replace(here, program=PROGRAMS["plain modules, CUDA graph"])
        if quantized:
            return replace(here, program=PROGRAMS["fused kernels, quantised weights"], keeps_blocks=True)
    return here


def not_chosen(spec: ModelSpec) -> int:
    """Return the number of expert weights that one token does not use."""
    found = 0
    for layer in spec.layers:
        if isinstance(experts := layer.feed_forward, Experts):
            matrices = 3 if experts.expert.gated else 2
            each = matrices * experts.expert.size * (experts.latent or spec.hidden_size)
            found += (experts.count - experts.chosen) * each
    return found


def expected_speed(name: str, spec: ModelSpec, here: Here, stored: int | None = None) -> Speed:
    """Return the speed of a model of this shape; `stored` is the bytes of its weights if they stay quantised."""
    count = parameters(spec)
    weights = stored or count * here.dtype.itemsize
    kv = needed_kv(spec, here, here.kv_dtype)
    speed = None
    if here.bandwidth:
        seconds = (read_bytes(spec, weights) + kv.conversation_bytes(CONTEXT)) / (
            here.bandwidth * here.program.efficiency
        )
        speed = 1 / (seconds + len(spec.layers) * here.program.layer_s)
    plan = _plan(spec, here, stored or needed_bytes(spec, here.dtype, spec.max_positions))
    conversation = kv.conversation_bytes(min(CONVERSATION, spec.max_positions))
    found = Speed(name, count, weights, 0, speed, weights + conversation)
    return replace(found, **_kv(plan))


def needed_kv(spec: ModelSpec, here: Here, kv_dtype: str) -> KVNeeds:
    """Return what a model needs of the KV cache for a conversation, with rows of `kv_dtype`."""
    return kv_needs(spec, here.dtype, kv_dtype)


def read_bytes(spec: ModelSpec, weights: int) -> int:
    """Return how many of the `weights` bytes are read for one token: all but the experts that are not chosen for it.

    Of an embedding that is not also the output layer, and of that of the layers' inputs, only one row is read.
    """
    unread = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    if spec.layer_inputs is not None:
        unread += spec.vocab_size * len(spec.layers) * spec.layer_inputs.size
    return weights - (unread + not_chosen(spec)) * weights // parameters(spec)


def _kv(plan: KVPlan | None) -> dict[str, Any]:
    """Return the fields of Speed for the size of the KV cache."""
    if plan is None:
        return {"context": 0}
    return {"context": plan.context_length, "kv_bytes": plan.nbytes, "kv_share": plan.share}


def _plan(spec: ModelSpec, here: Here, weights: int, on_host: bool = False) -> KVPlan | None:
    """Return the plan of the KV cache beside `weights` bytes of weights; None if there is no room for a conversation.

    With `on_host`, there are experts in host memory, which `weights` leaves out.
    """
    if here.free is None:
        return None
    with suppress(EngineError):
        given = weights, None, here.kv_dtype, on_host
        return expected_plan(spec, here.dtype, here.device, here.free, *given)
    return None


def _split(spec: ModelSpec, here: Here, blocks: int | None) -> Placement | None:
    """Return which experts would go to host memory; None if none need to, or if there is no room there either."""
    if here.free is None or here.host_free is None or not_on_host(spec) is not None:
        return None
    experts, needed = (
        expert_layers(slots(spec), here.dtype, {}, {}),
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
