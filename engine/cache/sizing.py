"""Sizes the KV cache, and so decides how long a context can be."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from engine.cache.kv_rows import token_bytes
from engine.cache.window import Window
from engine.errors import EngineError, OutOfRoomError
from models.spec import Experts, ModelSpec
from models.units import bytes_text

DEFAULT_SHARE = 0.5
"""The share of the memory left after the weights for the KV cache; the rest is for activations and other programs."""
GPU_SHARE = 0.9
"""The same on a GPU, which a chat has to itself, after the reserve is subtracted. The rest is for what cannot be
foreseen: gaps in the allocator's memory, a window of the desktop."""
OFFLOAD_SHARE = 0.25
"""The share of the free host memory for blocks that a GPU evicts, unless the user sets a size."""
MOST_OFFLOAD_SHARE = 0.75
"""The largest share that the user may set: pinned memory cannot be reclaimed by the system."""
MOST_GB = 1e9
"""The largest size that a user's number may mean, in GB."""
OFFLOAD_CACHES = 4
"""By default, host memory for this many times the KV cache is enough."""
GRAPH_BYTES = 256 * 1024**2
"""Bytes that graphs, compiled kernels and the workspaces of libraries take on a GPU beside the activations."""
USUAL_BYTES = 512 * 1024**2
"""Roughly the bytes of a chunk on a GPU, for a model that is not loaded; once it is, they are measured."""


USEFUL_CONTEXT = 8192
"""Tokens of a conversation that should fit in memory, unless the user says how many: before a GPU holds all experts,
and before an unused model stays loaded."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The context length in tokens, and the blocks of the cache, of `block_size` tokens each."""

    context_length: int
    num_blocks: int
    block_size: int
    bytes_per_token: int


def kv_share(device: torch.device) -> float:
    """Return the share of a device's free memory that a KV cache may take."""
    return GPU_SHARE if device.type == "cuda" else DEFAULT_SHARE


def plan_kv(
    bytes_per_token: int,
    block_size: int,
    available: int,
    model_limit: int,
    requested: int | None,
    share: float = DEFAULT_SHARE,
    reserve: int = 0,
    streams: int = 1,
    window: Window | None = None,
) -> KVPlan:
    """Size the cache for contexts of `requested` tokens (None: as many as the model allows, or as fit).

    Of the `available` bytes, `reserve` are left alone (activations, graphs), and `share` of the rest is used. The cache
    has room for a context for each of `streams` and one more, so that a conversation and its branches fit side by side;
    with less memory, for what fits, but at least one context. With a `window`, memory for the most blocks that one
    sequence holds is enough, and then a context of any length fits. Raises EngineError if the request is longer than
    the model allows or memory can hold.
    """
    if requested is not None and requested < 16:
        raise EngineError(f"--context is {requested}; it must be 16 tokens or more.")
    if requested is not None and requested > model_limit:
        raise EngineError(
            f"--context is {requested:,}, but this model was made for {model_limit:,} tokens. Use at most that."
        )
    usable = int(max(available - reserve, 0) * share)
    fits = _fitting(usable, bytes_per_token, block_size)
    slides = window is not None and fits >= window.most_blocks(block_size) * block_size
    if fits < min(requested or 16, model_limit) and not slides:
        wanted = requested or 16
        besides = f" and {bytes_text(reserve)} to compute with" if reserve else ""
        raise OutOfRoomError(
            f"Too little memory: a context of {wanted:,} tokens needs {bytes_text(wanted * bytes_per_token)} for "
            f"its KV cache{besides}; {bytes_text(available)} are free, {bytes_text(usable)} can be used for the "
            f"cache. {_way_out(fits)}"
        )
    context = (requested or model_limit) if slides else min(requested or model_limit, fits)
    # One block more than the context fills: room for a copy-on-write while a full context is held.
    blocks = -(-min((streams + 1) * context, fits) // block_size) + 1
    return KVPlan(context, blocks, block_size, bytes_per_token)


def plan_with_draft(plan: Callable[[int], KVPlan], draft_bytes: int) -> tuple[KVPlan, bool]:
    """Call `plan` with the bytes per token that a draft model's KV cache adds, and return the plan and whether a draft
    model fits. `draft_bytes` are those bytes (0: no draft model). It must leave room for a useful context, or for all
    of the context possible without it. Raises as `plan` does.
    """
    alone = plan(0)
    if draft_bytes:
        with suppress(OutOfRoomError):
            found = plan(draft_bytes)
            if found.context_length >= min(USEFUL_CONTEXT, alone.context_length):
                return found, True
    return alone, False


def offload_bytes(requested_gb: float | None, kv_bytes: int, available: int) -> int:
    """Return the most of `available` bytes of host memory for evicted blocks; None: a modest share of them."""
    if requested_gb is None:
        return min(int(available * OFFLOAD_SHARE), OFFLOAD_CACHES * kv_bytes)
    return min(bytes_of(requested_gb), int(available * MOST_OFFLOAD_SHARE))


def bytes_of(gb: float) -> int:
    """Return the bytes of `gb` GB, which may be any number from 0 on: more than there is anywhere is as good."""
    return int(min(gb, MOST_GB) * 1e9)


def kv_refused(plan: KVPlan, available: int) -> OutOfRoomError:
    """Return the error for a cache that was planned but could not be allocated; `available` bytes are free now."""
    fits = _fitting(available // 2, plan.bytes_per_token, plan.block_size)
    needed = plan.num_blocks * plan.block_size * plan.bytes_per_token
    return OutOfRoomError(
        f"Out of memory: the KV cache of {bytes_text(needed)} could not be allocated, {bytes_text(available)} are "
        f"free now. {_way_out(min(fits, plan.context_length))}"
    )


def most_prefill_rows(device: torch.device) -> int:
    """Return the prefill rows of one step: enough to use the machine well, few enough that a cancel takes effect soon.

    A GPU computes thousands of rows within milliseconds.
    """
    return 4096 if device.type == "cuda" else 512


def expert_bytes(spec: ModelSpec, rows: int, itemsize: int) -> int:
    """Return the bytes on a GPU for the chosen experts of `rows` rows: their inner activations and their outputs."""
    found = [
        layer.feed_forward.chosen * (layer.feed_forward.expert.size + spec.hidden_size)
        for layer in spec.layers
        if isinstance(layer.feed_forward, Experts)
    ]
    return max(found, default=0) * rows * itemsize


def beside_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, context: int | None, kv_dtype: str = "auto"
) -> int:
    """Return the bytes for a conversation of `context` tokens (None: a useful length) and a chunk of its prompt."""
    chunk = most_prefill_rows(device)
    tokens = min(context or USEFUL_CONTEXT, spec.max_positions)
    if spec.window is not None:
        tokens = min(tokens, spec.window + chunk)
    kv = int(tokens * token_bytes(spec, dtype, kv_dtype) / kv_share(device))
    if device.type != "cuda":  # a CPU's share for the KV leaves enough for everything else
        return kv
    return kv + GRAPH_BYTES + USUAL_BYTES + expert_bytes(spec, chunk, dtype.itemsize)


def weight_room(spec: ModelSpec, free: int, dtype: torch.dtype, context: int | None) -> int:
    """Return how many of the `free` bytes of a GPU the weights may take."""
    return free - beside_weights(spec, dtype, torch.device("cuda"), context)


def _fitting(usable: int, bytes_per_token: int, block_size: int) -> int:
    """Return the tokens of a context whose cache takes at most `usable` bytes, spare block included."""
    return usable // bytes_per_token // block_size * block_size - block_size


def _way_out(fits: int) -> str:
    return (f"Use --context {fits} or less, or close" if fits >= 16 else "Close") + " other programs."
