"""Short chunks of a prompt as CUDA graphs: one launch instead of some hundred.

A chunk of 16 tokens keeps a GPU busy for 1 ms and the host for 20, so the host is what a person would wait for. Its
tokens lie at the end of a step of a fixed size; what is before them is padding, which writes nothing and is seen by
nothing:

    step     | . . . . . . a b c d e |    . padding
    attends  rows 0 to start, then a; then a b; ...      (the mask is aligned at the right corner)

The plain twin is `engine.execute.runner.Runner.run`.
"""

from collections.abc import Sequence as Items

import torch
import triton
from torch import Tensor

from engine.attention.flash import Kernel
from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.graphs import Graphs
from engine.kernels.triton.prefill import write_kernel
from models.network import Network

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step. Longer chunks keep the GPU busy for longer than the host."""


class ShortPrefill:
    """One chunk of at most SIZES[-1] tokens, from its ids to its logits. It belongs to the loop thread."""

    def __init__(
        self, network: Network, cache: KVCache, attend: Kernel, rows: int, graphs: Graphs | None
    ) -> None:
        """`rows` is the most that a sequence holds; `attend` is flash_attn_with_kvcache.

        Without `graphs` every step runs kernel by kernel. Raises ImportError where triton is not installed.
        """
        from engine.execute.cuda.prefill import FusedPrefill

        device, most = cache.kv.device, SIZES[-1]
        self._model = FusedPrefill(network)
        self._cache = cache
        self._attend = attend
        self._graphs = graphs
        blocks = -(-rows // cache.block_size) + 1
        self._given = torch.zeros(2 + 2 * most + blocks, dtype=torch.int64, device=device)
        self._logits = torch.zeros(1, network.spec.vocab_size, dtype=network.dtype, device=device)

    @staticmethod
    def takes(span: Span) -> bool:
        """Whether `span` is short."""
        return span.count <= SIZES[-1]

    def run(self, span: Span) -> Tensor:
        """Compute the rows of `span`; logits [vocab] after its last token, which the next run overwrites."""
        blocks = span.blocks[: -(-span.stop // self._cache.block_size)]
        self._write(span.tokens, span.positions, span.start, blocks)
        self._run(next(size for size in SIZES if size >= span.count))
        return self._logits[0]

    def prepare(self) -> None:
        """Compile and record every size. The cache must be empty: the first row of its first block is written to."""
        for size in SIZES:
            for _ in range(2 if self._graphs is not None else 1):
                self._write([0], [0], 0, [0])
                self._run(size)

    def _write(self, token_ids: Items[int], positions: Items[int], start: int, blocks: Items[int]) -> None:
        padding = [0] * (SIZES[-1] - len(token_ids))
        given = torch.tensor([start, len(token_ids), *padding, *token_ids, *padding, *positions, *blocks])
        self._given[: given.shape[0]].copy_(given)

    @torch.inference_mode()
    def _run(self, size: int) -> None:
        if self._graphs is None:
            self._step(size)
        else:
            self._graphs.run(("chunk", size), lambda: self._step(size))

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        most, given = SIZES[-1], self._given
        token_ids, positions = given[2 : 2 + most], given[2 + most : 2 + 2 * most]
        attention = _PaddedSpan(self._cache, self._attend, given[:2], given[2 + 2 * most :])
        hidden = self._model.forward(token_ids[most - size :], positions[most - size :], attention)
        self._logits.copy_(self._model.logits(hidden[-1:]))


class _PaddedSpan:
    """Attention of a step whose last tokens are one span. Implements `models.reference.attention.Attention`."""

    def __init__(self, cache: KVCache, attend: Kernel, span: Tensor, table: Tensor) -> None:
        """span int64 [2]: the first row and how many; table int64 [blocks]. Both are read on the device."""
        self._cache = cache
        self._attend = attend
        self._span = span
        self._table = table.int().unsqueeze(0)
        self._stop = span.sum(0, keepdim=True).int()

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._cache.k[layer_index], self._cache.v[layer_index]
        write_kernel[(k.shape[0],)](
            k,
            v,
            keys,
            values,
            self._span,
            self._table,
            STRIDE=k.stride(0),
            TOKENS=k.shape[0],
            WIDTH=keys.shape[1] * keys.shape[2],
            PADDED=triton.next_power_of_2(keys.shape[1] * keys.shape[2]),
            BLOCK=self._cache.block_size,
            num_warps=4,
        )
        pages = (-1, self._cache.block_size, *k.shape[1:])
        out = self._attend(
            q.unsqueeze(0),
            keys.view(pages),
            values.view(pages),
            cache_seqlens=self._stop,
            block_table=self._table,
            causal=True,
        )
        return out.squeeze(0)
