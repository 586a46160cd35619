"""The tensors that hold the rows of the KV blocks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.batch import Span, StepBatch
from engine.cache.copies import Copy, RowCopy
from engine.cache.group_pool import GroupPool
from engine.cache.host_memory import HostKV
from engine.cache.kv_rows import KVRow, attention_row, kv_row
from engine.cache.states import States
from engine.cache.window import Window
from engine.kernels.on_gpu import triton_problem

Runs = Sequence[tuple[int, int]]
"""Runs of slots, each as its first slot and the slot after its last."""


class KVCache:
    """K and V of every layer in slots; block b holds the slots from b * block_size on.

    Layers whose rows have the same format share one of the `parts`, each [2, layers, slots, *row], where `row` is
    (num_kv_heads, head_dim), or the bytes of a quantised row (`KVRow`). `k[layer]` and `v[layer]` are the rows of a
    layer, [slots, *row]; a layer without rows of its own has those of the layer that it reads. The part of rows without
    V (latents, the inputs of convolutions) is [1, layers, slots, *row], and `v[layer]` is `k[layer]`. Code that cannot
    read quantised bytes uses `write` and `read`. The memory is allocated once and never grows. With a window, one more
    block of zeros follows: the blank block, which stands in block tables for the blocks that a sequence has released.

    Layers of another group than the primary (`engine/cache/groups.py`) are numbered from 1 on by their pool, whose
    slots take the place of the blocks there; their parts have the blank block, too.
    """

    def __init__(
        self,
        rows: Sequence[KVRow],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        window: Window | None = None,
        sources: Sequence[int] | None = None,
        is_free: bool = True,
        pools: Sequence[tuple[Sequence[int], GroupPool]] = (),
    ) -> None:
        """`rows` has the format of each layer's rows, `sources` the layer whose rows each layer reads (None: its own).

        `dtype` is the dtype in which the model computes. `is_free` says that the format may change (`hold_as`).
        `pools` are the layers and the pools of the groups but the primary.
        """
        self.pools = [pool for _, pool in pools]
        self.groups = [0] * len(rows)
        """The number of the group of each layer; 0 is the primary."""
        for number, (layers, _) in enumerate(pools, 1):
            for layer in layers:
                self.groups[layer] = number
        blocks = [num_blocks + (window is not None), *(pool.num_slots + 1 for pool in self.pools)]
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.rows = list(rows)
        self.lacks_v = not all(row.has_v for row in rows)
        """Whether some layers have no V, but latents or the inputs of convolutions."""
        self.is_free = is_free
        self._sources = list(sources or range(len(rows)))
        owners = [layer for layer, source in enumerate(self._sources) if layer == source]
        formats = dict.fromkeys((self.groups[i], rows[i]) for i in owners)
        self._layers = [[i for i in owners if (self.groups[i], rows[i]) == kind] for kind in formats]
        """The layers of each part."""
        self._group_of_part = [group for group, _ in formats]
        self.parts = [
            torch.empty(
                (1 + row.has_v, len(layers), blocks[group] * block_size, *row.shape),
                dtype=row.stored,
                device=device,
            )
            for (group, row), layers in zip(formats, self._layers, strict=True)
        ]
        self._by_kernel = device.type == "cuda" and triton_problem(device) is None
        self._windows = [window, *(pool.window for pool in self.pools)]
        for part, group in zip(self.parts, self._group_of_part, strict=True):
            if self._windows[group] is not None:
                part[:, :, -block_size:] = 0
        self._point()
        self.host: HostKV | None = None
        """The host memory for evicted blocks."""
        self.states: States | None = None
        """The states of recurrent layers, if there are any."""
        self.tell: Callable[[Runs, Runs, int], None] = lambda source, target, group: None
        """Called before rows are copied, so that the other processes of a divided model copy theirs, too."""

    @classmethod
    def uniform(
        cls,
        layers: int,
        num_blocks: int,
        block_size: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        window: Window | None = None,
        kind: str = "auto",
    ) -> "KVCache":
        """Return a cache whose layers all have rows of the same format. `kind` and the errors are those of `kv_row`."""
        rows = [kv_row(kind, heads, dim, dtype, device)] * layers
        return cls(rows, num_blocks, block_size, dtype, device, window, is_free=kind == "auto")

    def _point(self) -> None:
        """Set `k` and `v` to the rows of each layer."""
        own = {
            layer: part[:, index]
            for part, layers in zip(self.parts, self._layers, strict=True)
            for index, layer in enumerate(layers)
        }
        self.k = [own[source][0] for source in self._sources]
        self.v = [own[source][-1] for source in self._sources]

    @property
    def row(self) -> KVRow:
        """The format of K and V: that of all layers with attention, except for the heads if they differ."""
        return attention_row(self.rows)

    @property
    def kv(self) -> Tensor:
        """The rows of all layers [2, layers, slots, *row], if all have the same format."""
        (only,) = self.parts
        return only

    @property
    def nbytes(self) -> int:
        """The size of the cache in bytes, states included."""
        return sum(part.nbytes for part in self.parts) + (
            self.states.nbytes if self.states is not None else 0
        )

    @property
    def token_bytes(self) -> int:
        """The bytes that a token takes in all layers of the primary group."""
        return self.group_bytes(0)

    def figures(self, ranks: int) -> dict[str, Any]:
        """Return the fields of `engine.events.Figures` that describe the cache; each of `ranks` has one like it."""
        primary = sum(part.nbytes for part in self._group_parts(0))
        states = self.states
        return {
            "state_slots": states.slots if states is not None else 0,
            "state_bytes": states.nbytes // states.slots * ranks if states is not None else 0,
            "kv_bytes": self.nbytes * ranks,
            "kv_dtype": self.row.name,
            "kv_token_bytes": self.token_bytes * ranks,
            "kv_window_bytes": (sum(part.nbytes for part in self.parts) - primary) * ranks,
        }

    @property
    def every_group(self) -> range:
        """The numbers of all groups."""
        return range(1 + len(self.pools))

    def group_bytes(self, group: int) -> int:
        """Return the bytes that a token takes in all layers of a group."""
        return sum(part[:, :, 0].nbytes for part in self._group_parts(group))

    def _group_parts(self, group: int) -> list[Tensor]:
        return [part for part, own in zip(self.parts, self._group_of_part, strict=True) if own == group]

    @property
    def log(self) -> int | None:
        """The number of the group that is the log of recurrent layers; None without such layers."""
        return self.groups[next(iter(self.states.layers))] if self.states is not None else None

    def block(self, id: int, only: int | None = None) -> list[Tensor]:
        """Return the rows of a block in each part of a group `only`, or in each but the log.

        They are [1 or 2, layers, block_size, *row], and zeros where the block has no slot.
        """
        size, found = self.block_size, []
        for part, group in zip(self.parts, self._group_of_part, strict=True):
            if group == only or (only is None and group != self.log):
                (slot,) = self.table((id,), group)
                found.append(part[:, :, slot * size : (slot + 1) * size])
        return found

    def hold_as(self, dtype: torch.dtype) -> None:
        """Store plain numbers of another dtype of the same size from now on. What is stored becomes meaningless."""
        self.rows = [replace(row, dtype=dtype) for row in self.rows]
        self.parts = [part.view(dtype) for part in self.parts]
        self._point()

    def write(self, layer: int, at: slice | Tensor, k: Tensor, v: Tensor) -> None:
        """Write K and V [n, num_kv_heads, head_dim] into n slots: a slice, or int64 [n]."""
        row = self.rows[layer]
        if row.is_quantized and self.device.type == "cuda":
            from engine.kernels.triton.kv_rows import write_rows

            if isinstance(at, slice):
                at = torch.arange(at.start, at.stop, device=self.device)
            write_rows((self.k[layer], self.v[layer]), self.told(layer), at, k, v)
            return
        for rows, given in ((self.k[layer], k), (self.v[layer], v)):
            if isinstance(at, slice):
                rows[at] = row.encode(given)
            else:
                rows.index_copy_(0, at, row.encode(given))

    def keep(self, layer: int, at: Tensor, x: Tensor) -> None:
        """Write rows x [n, numbers] of a layer without V into the slots at int64 [n]."""
        row = self.rows[layer]
        self.k[layer].index_copy_(0, at, row.encode(x.reshape(-1, row.heads, row.dim)))

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """Return rows [n, *row] of a layer's `k` or `v` as numbers [n, num_kv_heads, head_dim] in `dtype`."""
        row = self.rows[layer]
        if row.is_quantized and self.device.type == "cuda":
            from engine.kernels.triton.kv_rows import read_rows

            out = torch.empty((len(rows), row.heads, row.dim), dtype=self.dtype, device=rows.device)
            return read_rows(rows, row.scales(rows), out, row.is_fp8)
        return row.decode(rows, self.dtype)

    @property
    def keeps_exactly(self) -> bool:
        """Whether reading returns exactly what was written, so that rows just computed need not be read back."""
        return not self.row.is_quantized and self.row.dtype == self.dtype

    def told(self, layer: int) -> dict[str, Any]:
        """Return the kernel arguments that describe rows in addition to `k` and `v`: none for plain rows."""
        row = self.rows[layer]
        if not row.is_quantized:
            return {}
        scales = {"k_scales": row.scales(self.k[layer]), "v_scales": row.scales(self.v[layer])}
        return {**scales, "ROW": row.nbytes, "FP8": row.is_fp8}

    def table(self, blocks: Sequence[int], group: int) -> Sequence[int]:
        """Return where the rows of blocks lie in a group: the slot of each of its pool, or the blocks themselves."""
        return list(map(self.pools[group - 1].slot, blocks)) if group else blocks

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Lend the first block slots in every group, for steps that only compile kernels. The cache must be empty."""
        for pool in self.pools:
            pool.take(0)
        try:
            yield
        finally:
            for pool in self.pools:
                pool.release(0, 0)
                pool.drop(0)

    def first_seen(self, row: int, group: int = 0) -> int:
        """Return the first row of the first block that rows from `row` on see in a group. It depends on `row` alone."""
        size, window = self.block_size, self._windows[group]
        return window.first(row // size, size) * size if window is not None else 0

    def _first_block(self, span: Span, group: int) -> int:
        """Return the index of the first block of a span that its rows see in a group."""
        if self.states is not None and span.states is not None and group == self.log:
            return max(span.states.row - self.states.tail, 0) // self.block_size
        return self.first_seen(span.start, group) // self.block_size

    def seen_table(self, span: Span, group: int) -> list[int]:
        """Return the slots of a span's blocks in the pool of a group, the blank one for those that it does not see."""
        first = self._first_block(span, group)
        return [self.pools[group - 1].blank] * first + list(self.table(span.blocks[first:], group))

    def seen_slots(self, batch: StepBatch) -> list[dict[int, int]]:
        """Return for each pool the slots of the blocks that the rows of a step see."""
        return [
            {
                block: pool.slot(block)
                for span in batch.spans
                for block in span.blocks[self._first_block(span, group) :]
            }
            for group, pool in enumerate(self.pools, 1)
        ]

    def slots(self, blocks: Sequence[int], start: int, stop: int, group: int = 0) -> list[tuple[int, int]]:
        """Return the slots of rows `start` to `stop` of a block table in the parts of a group, as few contiguous
        (first, end) runs."""
        if start >= stop:
            return []
        size = self.block_size
        here = self.table(blocks[start // size : (stop - 1) // size + 1], group)
        # A decode step asks for the whole table. Thousands of blocks are usually one run, so only its ends are sought.
        ends = [i for i, (one, after) in enumerate(pairwise(here), 1) if after != one + 1]
        runs = [
            (here[begin] * size, (here[end - 1] + 1) * size)
            for begin, end in zip([0, *ends], [*ends, len(here)], strict=True)
        ]
        runs[0] = (runs[0][0] + start % size, runs[0][1])
        runs[-1] = (runs[-1][0], runs[-1][1] - (-stop) % size)
        return runs

    def every_slot(self, blocks: Sequence[int], start: int, stop: int, group: int = 0) -> Tensor:
        """Return the slot of each of the rows that `slots` would return, int64 [rows] in host memory."""
        return _indices(self.slots(blocks, start, stop, group))

    def carry_out(self, copy: Copy) -> None:
        """Copy rows from block to block (copy-on-write), or rows or states from or to host memory."""
        if isinstance(copy, RowCopy):
            for group in self.every_group:
                if group and copy.target not in self.pools[group - 1]:
                    continue
                source, target = (
                    at * self.block_size for at in self.table((copy.source, copy.target), group)
                )
                self.copy_rows([(source, source + copy.rows)], [(target, target + copy.rows)], group)
        else:
            assert self.host is not None
            self.host.carry_out(copy)

    def copy_path(
        self, source: Sequence[int], rows: Runs, target: Sequence[int], start: int, groups: bool = True
    ) -> None:
        """Copy runs of rows of the block table `source`, in order, to the rows from `start` on of the block table
        `target`: in all groups, or in the primary alone."""
        stop = start + sum(end - first for first, end in rows)
        for group in self.every_group if groups else (0,):
            taken = [run for first, end in rows for run in self.slots(source, first, end, group)]
            self.copy_rows(taken, self.slots(target, start, stop, group), group)

    def copy_rows(self, source: Runs, target: Runs, group: int = 0) -> None:
        """Copy the rows in the slot runs `source` of a group to the slot runs `target`, in order, without overlap.

        Raises ValueError if they have different numbers of rows.
        """
        self.tell(source, target, group)
        (first, end), (to, last) = source[0], target[0]
        if len(source) == len(target) == 1 and end - first == last - to and self.device.type == "cpu":
            for part in self._group_parts(group):
                part[:, :, to:last] = part[:, :, first:end]  # slices are faster on a CPU
            return
        sources, targets = _indices(source), _indices(target)
        if sources.numel() != targets.numel():
            raise ValueError(f"{sources.numel()} rows do not fit into {targets.numel()}")
        slots = torch.stack((sources, targets)).to(self.device, non_blocking=True)
        copy = copy_rows_reference
        if self._by_kernel:
            from engine.kernels.triton.copy_rows import copy_rows as copy
        for part in self._group_parts(group):
            copy(part, slots)


def copy_rows_reference(kv: Tensor, slots: Tensor) -> None:
    """Copy the rows at slots[0] to slots[1] in every layer, K and V, as `engine/kernels/triton/copy_rows.py` does.

    kv [1 or 2, layers, slots, ...], slots int64 [2, n].
    """
    kv.index_copy_(2, slots[1], kv.index_select(2, slots[0]))


def _indices(runs: Runs) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in runs])
