"""The tensors behind the block ids."""

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from engine.blocks import Copy, RowCopy
from engine.host_kv import HostKV


class KVCache:
    """K and V of every layer in slots; block b holds the slots from b * block_size on.

    `kv` has shape [2, layers, num_blocks * block_size, num_kv_heads, head_dim]; `k` and `v` are its two halves.
    The memory is taken once and never grows.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.kv = torch.empty(shape, dtype=dtype, device=device)
        self.k, self.v = self.kv.unbind()
        self.host: HostKV | None = None
        """What takes evicted blocks."""

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.kv.nbytes

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
        """Where rows `start` to `stop` of a block table lie, as few contiguous (first, end) runs of slots."""
        if start >= stop:
            return []
        size = self.block_size
        here = blocks[start // size : (stop - 1) // size + 1]
        # A decode step asks for the whole table, and thousands of blocks are usually one run: look for the ends only.
        ends = [i for i, (one, after) in enumerate(pairwise(here), 1) if after != one + 1]
        runs = [
            (here[begin] * size, (here[end - 1] + 1) * size)
            for begin, end in zip([0, *ends], [*ends, len(here)], strict=True)
        ]
        runs[0] = (runs[0][0] + start % size, runs[0][1])
        runs[-1] = (runs[-1][0], runs[-1][1] - (-stop) % size)
        return runs

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy rows from block to block (copy-on-write), and blocks from and to host memory, in this order."""
        for within, part in groupby(copies, lambda copy: isinstance(copy, RowCopy)):
            if within:
                self._copy_on_write([copy for copy in part if isinstance(copy, RowCopy)])
                continue
            assert self.host is not None
            for copy in part:
                if not isinstance(copy, RowCopy):
                    self.host.carry_out(copy)

    def _copy_on_write(self, copies: Sequence[RowCopy]) -> None:
        """Copy the leading rows of blocks, all layers at once, as if one after the other."""
        if self.kv.device.type != "cuda":
            for copy in copies:
                source, target = copy.source * self.block_size, copy.target * self.block_size
                self.kv[:, :, target : target + copy.rows] = self.kv[:, :, source : source + copy.rows]
            return
        for together in _independent(copies):
            starts = [(c.source * self.block_size, c.target * self.block_size, c.rows) for c in together]
            self._copy(
                [(source, source + rows) for source, _, rows in starts],
                [(target, target + rows) for _, target, rows in starts],
            )

    def copy_rows(self, source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> None:
        """Copy the rows in the slot runs `source` to the slot runs `target`, in order; the runs must not overlap."""
        self._copy(source, target)

    def _copy(self, source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> None:
        sources, targets = _indices(source), _indices(target)
        if sources.numel() != targets.numel():
            raise ValueError(f"{sources.numel()} rows do not fit into {targets.numel()}")
        slots = torch.stack((sources, targets)).to(self.kv.device, non_blocking=True)
        if self.kv.device.type == "cuda":
            from engine.kernels.copy_rows import copy_rows

            copy_rows(self.kv, slots)
        else:
            copy_rows_reference(self.kv, slots)


def copy_rows_reference(kv: Tensor, slots: Tensor) -> None:
    """The rows at slots[0] go to slots[1] in every layer, K and V; the plain twin of `engine/kernels/copy_rows.py`.

    kv [2, layers, slots, num_kv_heads, head_dim], slots int64 [2, n].
    """
    kv.index_copy_(2, slots[1], kv.index_select(2, slots[0]))


def _independent(copies: Sequence[RowCopy]) -> list[list[RowCopy]]:
    """The copies in order, cut where one reads or writes what another before it in the same part has touched."""
    parts: list[list[RowCopy]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if not parts or copy.source in written or copy.target in read | written:
            parts.append([])
            read, written = set(), set()
        parts[-1].append(copy)
        read.add(copy.source)
        written.add(copy.target)
    return parts


def _indices(runs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in runs])
