"""The tensors behind the block ids."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engine.blocks import RowCopy


class KVCache:
    """K and V of every layer in slots; block b holds the slots from b * block_size on.

    `k` and `v` have shape [layers, num_blocks * block_size, num_kv_heads, head_dim]. The memory is taken once
    and never grows.
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
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V together."""
        return self.k.nbytes + self.v.nbytes

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

    def copy_blocks(self, copies: Sequence[RowCopy]) -> None:
        """Copy the leading rows of blocks, all layers at once (copy-on-write)."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            self._copy(source, target, copy.rows)

    def copy_rows(self, source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> None:
        """Copy the rows in the slot runs `source` to the slot runs `target`, in order; the runs must not overlap."""
        sources, targets = self._indices(source), self._indices(target)
        if sources.numel() != targets.numel():
            raise ValueError(f"{sources.numel()} rows do not fit into {targets.numel()}")
        for cache in (self.k, self.v):
            cache.index_copy_(1, targets, cache.index_select(1, sources))

    def _copy(self, source: int, target: int, rows: int) -> None:
        for cache in (self.k, self.v):
            cache[:, target : target + rows] = cache[:, source : source + rows]

    def _indices(self, runs: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(first, end, device=self.k.device) for first, end in runs])
