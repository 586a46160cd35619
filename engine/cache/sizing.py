"""The size of the KV cache, and with it the longest possible context."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from engine.cache.computing import LEAST_ROWS, computing_bytes, prefill_rows
from engine.cache.kv_needs import BRANCH_PART, KVNeeds, kv_needs
from engine.errors import EngineError, OutOfRoomError
from models.spec import Experts, ModelSpec
from models.units import bytes_text
from models.weights.too_large import Beside

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
BRANCH_SHARE = 1 / 3
"""On a GPU, the cache has room for one more context, for branches, as long as it stays within this share of the most
that it could take. Main memory is taken only as it is written; memory of a GPU is taken from other programs at once."""
USEFUL_CONTEXT = 8192
"""Tokens of a conversation that should fit in memory, unless the user says how many: before a GPU holds all experts,
and before an unused model stays loaded."""
SHORT_CONTEXT = 2048
"""Tokens of a conversation that must fit on a GPU, unless `--context` says how many. If they do not fit,
`--device auto` takes the CPU."""
LEAST_CONTEXT = 16
"""The smallest context, in tokens."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The context length in tokens, and the blocks of the cache."""

    context_length: int
    num_blocks: int
    needs: KVNeeds
    available: int = 0
    """Bytes that the weights left free."""
    slots: tuple[int, ...] = ()
    """The blocks of each group of `needs`, as in the order there."""
    states: int = 0
    """The slots of states of recurrent layers; 0 if there are none."""

    @property
    def nbytes(self) -> int:
        """The size of the cache in bytes."""
        return self.needs.nbytes(self.num_blocks, self.slots) + self.states * self.needs.state_bytes

    def with_blocks(self, blocks: int) -> "KVPlan":
        """Return the plan with so many blocks, for a context of the same length."""
        return replace(self, num_blocks=blocks, slots=tuple(min(count, blocks) for count in self.slots))

    def split(self, own: KVNeeds, draft: KVNeeds) -> tuple["KVPlan", "KVPlan"]:
        """Split a plan for `own` beside `draft` into the plans of the two caches."""
        at = len(own.groups)
        return (
            replace(self, needs=own, slots=self.slots[:at], states=self.states * bool(own.state_bytes)),
            replace(self, needs=draft, slots=self.slots[at:], states=self.states * bool(draft.state_bytes)),
        )

    @property
    def share(self) -> float:
        """The share that the cache takes of the bytes that the weights left free."""
        return self.nbytes / self.available if self.available else 0.0


def kv_share(device: torch.device) -> float:
    """Return the share of a device's free memory that a KV cache may take."""
    return GPU_SHARE if device.type == "cuda" else DEFAULT_SHARE


def branch_share(device: torch.device) -> float:
    """Return BRANCH_SHARE on a GPU, and 1 on a CPU, where branches always have room for one more context."""
    return BRANCH_SHARE if device.type == "cuda" else 1.0


def plan_kv(
    needs: KVNeeds,
    available: int,
    model_limit: int,
    requested: int | None,
    share: float = DEFAULT_SHARE,
    reserve: int = 0,
    streams: int = 1,
    branches: float = 1.0,
) -> KVPlan:
    """Size the cache for contexts of `requested` tokens (None: as many as the model allows, or as fit).

    Of the `available` bytes, `reserve` are kept for activations and graphs; the share `share` of the rest is usable.
    The cache has room for one context for each of `streams`, and for branches: one more context while the cache stays
    within the share `branches` of the usable bytes, otherwise a quarter of one. If that does not fit, the cache takes
    what fits, but at least one context. If the network has a window, a context of any length needs only the blocks that
    one sequence holds at most. Other groups of layers have room as `KVNeeds.slots_within` says. Raises EngineError if
    `requested` is longer than the model allows or than fits.
    """
    if requested is not None and requested < LEAST_CONTEXT:
        raise EngineError(f"--context is {requested}; it must be {LEAST_CONTEXT} tokens or more.")
    if requested is not None and requested > model_limit:
        raise EngineError(
            f"--context is {requested:,}, but this model was made for {model_limit:,} tokens. Use at most that."
        )
    usable = int(max(available - reserve, 0) * share)
    size, limit = needs.block_size, requested or model_limit
    states = needs.states_within(usable, streams)
    room = max(usable - states * needs.state_bytes, 0)
    slots = needs.slots_within(room, streams, limit, states)
    fits = needs.tokens_in(room, slots)
    slides = needs.window is not None and fits >= needs.window.most_blocks(size) * size
    if fits < min(requested or LEAST_CONTEXT, model_limit) and not slides:
        wanted = requested or LEAST_CONTEXT
        besides = f" and {bytes_text(reserve)} to compute with" if reserve else ""
        raise OutOfRoomError(
            f"Too little memory: a context of {wanted:,} tokens needs {bytes_text(_least_bytes(needs, wanted))} for "
            f"its KV cache{besides}; {bytes_text(available)} are free, {bytes_text(usable)} can be used for the "
            f"cache. {_way_out(fits)}"
        )
    context = (requested or model_limit) if slides else min(requested or model_limit, fits)
    spare = min(max(int(fits * branches) - streams * context, context // BRANCH_PART), context)
    # One block more than the contexts fill: room for a copy-on-write while a full context is held.
    blocks = -(-min(streams * context + spare, fits) // size) + 1
    slots = tuple(min(count, blocks) for count in slots)
    return KVPlan(context, blocks, needs, available, slots, states)


def plan_chunks(
    plan: Callable[[int], KVPlan], rows: int, least: int, useful: int = USEFUL_CONTEXT
) -> tuple[KVPlan, int]:
    """Return the plan that `plan` makes for the prefill rows of a step, and these rows.

    `rows` are halved, but not below `least`, until a context of `useful` tokens fits beside their activations. Raises
    what `plan` raises.
    """
    while rows > least:
        with suppress(OutOfRoomError):
            found = plan(rows)
            if found.context_length >= useful:
                return found, rows
        rows = max(rows // 2, least)
    return plan(rows), rows


def expected_plan(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    weights: int,
    context: int | None = None,
    kv_dtype: str = "auto",
    on_host: bool = False,
) -> KVPlan:
    """Return the plan of a conversation's cache for a model that has not been loaded.

    `free` is how many bytes of the device are free before loading, `weights` how many the weights will take there.
    `on_host` says whether there are experts in host memory. Raises what `plan_kv` raises.
    """

    def plan(rows: int) -> KVPlan:
        return plan_kv(
            kv_needs(spec, dtype, kv_dtype, rows),
            max(free - weights, 0),
            spec.max_positions,
            context,
            kv_share(device),
            computing_bytes(spec, rows, dtype, device, kv_dtype, on_host),
            branches=branch_share(device),
        )

    most = prefill_rows(spec, dtype, device, free)
    useful = min(context or USEFUL_CONTEXT, spec.max_positions)
    return plan_chunks(plan, most, min(most, LEAST_ROWS), useful)[0]


def plan_with_draft(
    plan: Callable[[KVNeeds], KVPlan], own: KVNeeds, draft: KVNeeds | None
) -> tuple[KVPlan, KVPlan | None]:
    """Return what `plan` makes for the `own` needs of a network, and the plan of a draft model's cache if one fits.

    It must leave room for a useful context, or for all of the context possible without it. Raises as `plan` does.
    """
    alone = plan(own)
    if draft is not None:
        with suppress(OutOfRoomError):
            found = plan(own.beside(draft))
            if found.context_length >= min(USEFUL_CONTEXT, alone.context_length):
                return found.split(own, draft)
    return alone, None


def offload_bytes(requested_gb: float | None, kv_bytes: int, available: int) -> int:
    """Return the most of `available` bytes of host memory for evicted blocks; None: a modest share of them."""
    if requested_gb is None:
        return min(int(available * OFFLOAD_SHARE), OFFLOAD_CACHES * kv_bytes)
    return min(gb_to_bytes(requested_gb), int(available * MOST_OFFLOAD_SHARE))


def gb_to_bytes(gb: float) -> int:
    """Return the bytes of `gb` GB, any number from 0 on; values beyond any machine's memory are capped."""
    return int(min(gb, MOST_GB) * 1e9)


def kv_refused(plan: KVPlan, available: int) -> OutOfRoomError:
    """Return the error for a cache that was planned but could not be allocated; `available` bytes are free now."""
    states = plan.states * plan.needs.state_bytes
    fits = plan.needs.tokens_in(max(available // 2 - states, 0), plan.slots)
    return OutOfRoomError(
        f"Out of memory: the KV cache of {bytes_text(plan.nbytes)} could not be allocated, {bytes_text(available)} are "
        f"free now. {_way_out(min(fits, plan.context_length))}"
    )


def beside_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None,
    kv_dtype: str = "auto",
    memory: int | None = None,
) -> int:
    """Return the bytes that a conversation and a chunk of its prompt need beside the weights.

    The conversation has `context` tokens (None: a useful length), and the device has `memory` bytes free for the model
    (None: unknown).
    """
    chunk = prefill_rows(spec, dtype, device, memory)
    tokens = min(context or USEFUL_CONTEXT, spec.max_positions)
    kv = _kv_bytes(kv_needs(spec, dtype, kv_dtype, chunk), device, tokens)
    experts = any(isinstance(layer.feed_forward, Experts) for layer in spec.layers)
    return kv + computing_bytes(spec, chunk, dtype, device, kv_dtype, on_host=experts)


def least_beside(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None,
    kv_dtype: str = "auto",
    short: int = LEAST_CONTEXT,
) -> Beside:
    """Return the least that a model needs beside its weights.

    That is memory for the smallest chunks and for a cache of `context` tokens (None: `short`).
    """
    chunk = min(prefill_rows(spec, dtype, device, None), LEAST_ROWS)
    tokens = min(context or short, spec.max_positions)
    return Beside(
        computing_bytes(spec, chunk, dtype, device, kv_dtype),
        _kv_bytes(kv_needs(spec, dtype, kv_dtype, chunk), device, tokens),
        tokens,
        is_asked=context is not None,
    )


def weight_room(spec: ModelSpec, free: int, dtype: torch.dtype, context: int | None) -> int:
    """Return how many of the `free` bytes of a GPU the weights may take."""
    device = torch.device("cuda")
    return free - beside_weights(spec, dtype, device, context, memory=free)


def _least_bytes(needs: KVNeeds, tokens: int) -> int:
    """Return the bytes of the least cache for a context of `tokens` tokens."""
    whole = tokens * needs.token_bytes + needs.states_within(0, 1) * needs.state_bytes
    return whole + needs.group_bytes(
        [min(count, -(-tokens // needs.block_size)) for count in needs.slots(1, 0, 0)]
    )


def _kv_bytes(needs: KVNeeds, device: torch.device, tokens: int) -> int:
    """Return the bytes that must be free for a cache of `tokens` tokens, with what it must leave to others."""
    if needs.window is not None:
        tokens = min(tokens, needs.window.rows + needs.window.step)
    return int(_least_bytes(needs, tokens) / kv_share(device))


def _way_out(fits: int) -> str:
    return (
        f"Use --context {fits} or less, or close" if fits >= LEAST_CONTEXT else "Close"
    ) + " other programs."
