"""Chooses the sizes of the KV cache and of the chunks for a loaded network, by measuring what its steps take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from engine.cache.computing import (
    EXPANDED_BYTES,
    EXPANDING_BYTES,
    GRAPH_BYTES,
    LEAST_ROWS,
    expert_bytes,
    prefill_rows,
)
from engine.cache.kv_needs import KVNeeds, kv_needs
from engine.cache.kv_rows import KVRow
from engine.cache.sizing import (
    USEFUL_CONTEXT,
    KVPlan,
    branch_share,
    kv_share,
    plan_chunks,
    plan_kv,
    plan_with_draft,
)
from engine.device import available_memory
from engine.execute.build_options import BuildOptions
from engine.execute.cuda.all_reduce_layout import MOST_ROWS, AllReduceLayout
from engine.execute.cuda.host_experts import HostExperts, without_experts
from engine.execute.cuda.plain_modules import plain_modules
from engine.execute.profile_run import activation_bytes
from models.network import Network


@dataclass(frozen=True, slots=True)
class Sized:
    """The KV cache, the most prefill rows of a step, and the KV cache of a draft model, if one fits."""

    plan: KVPlan
    max_chunk: int
    draft: KVPlan | None


def size_up(
    network: Network,
    device: torch.device,
    row: KVRow,
    block_size: int,
    on_host: HostExperts | None,
    options: BuildOptions,
) -> Sized:
    """Choose the sizes for a network that is loaded on a device, the same for all ranks of a group.

    Raises EngineError if nothing fits.
    """
    spec, most, free, group = network.spec, options.max_chunk, options.free, options.group
    drafter = options.drafter
    if most is None:
        most = prefill_rows(spec, network.dtype, device, _memory(network, device, on_host))
        most = most if group is None else group.least(most)
    if (planned := options.plan) is not None:
        slides = planned.slots or planned.needs.window is not None
        return Sized(planned, min(most, planned.needs.step) if slides else most, None)
    computing = _computing(network, device, row, on_host, options.streams, drafter is not None)
    reserve = computing(most)  # before asking what is free, because workspaces of libraries stay
    free = available_memory(device) if free is None else free
    if group is not None:  # all ranks need the same number of blocks
        free = group.least(free - reserve) + reserve

    def needs(rows: int) -> KVNeeds:
        return kv_needs(spec, network.dtype, options.kv_dtype, rows, block_size)

    def plan_with(needs: KVNeeds) -> KVPlan:
        return plan_kv(
            needs,
            free,
            network.positions,
            options.context,
            kv_share(device),
            computing(needs.step),
            options.streams,
            branch_share(device),
        )

    least = most if options.max_chunk is not None or group is not None else min(most, LEAST_ROWS)
    useful = min(options.context or USEFUL_CONTEXT, network.positions)
    rows = plan_chunks(lambda rows: plan_with(needs(rows)), most, least, useful)[1]
    beside = None
    if drafter is not None:
        beside = kv_needs(drafter.spec, drafter.dtype, "auto", rows, block_size)
    plan, draft = plan_with_draft(plan_with, needs(rows), beside)
    blocks = options.num_blocks or plan.num_blocks
    if group is not None:  # rank 0 may need room for a draft model
        agreed = tuple(map(group.least, plan.slots))
        states = group.least(plan.states)
        plan = replace(plan, context_length=group.least(plan.context_length), slots=agreed, states=states)
        blocks = group.least(blocks)
    return Sized(plan.with_blocks(blocks), rows, draft.with_blocks(blocks) if draft is not None else None)


def _memory(network: Network, device: torch.device, on_host: HostExperts | None) -> int | None:
    """Return the bytes of a GPU that are free or taken by the weights; None on a CPU."""
    if device.type != "cuda":
        return None
    held = network.nbytes - (on_host.nbytes if on_host is not None else 0)
    return available_memory(device) + held


def _computing(
    network: Network,
    device: torch.device,
    row: KVRow,
    on_host: HostExperts | None,
    streams: int,
    has_draft: bool,
) -> Callable[[int], int]:
    """Return a function of a number of rows: the bytes that steps of so many take beside the weights and the KV cache.

    Part of that is measured. It returns 0 on a CPU, where the KV cache is limited to a share of the memory that leaves
    enough for everything else.
    """

    @cache
    def computing(rows: int) -> int:
        if device.type != "cuda":
            return 0
        found = activation_bytes(plain_modules(network, without_experts), rows, streams, device)
        found += expert_bytes(network.spec, rows, network.dtype.itemsize)
        found += GRAPH_BYTES * (1 + has_draft)
        found += EXPANDING_BYTES if on_host is not None else 0
        found += EXPANDED_BYTES if row.is_quantized else 0
        return found + (
            AllReduceLayout.of(network, MOST_ROWS, rows).nbytes if network.share is not None else 0
        )

    return computing
