"""Chunks of a prompt as CUDA graphs: one launch instead of some hundred.

A chunk of 16 tokens keeps a GPU busy for 1 ms and the host for 20, so the host is what a person would wait for. Its
tokens lie at the end of a step of a fixed size; what is before them is padding, which writes nothing and is seen by
nothing:

    step     | . . . . . . a b c d e |    . padding
    attends  rows 0 to start, then a; then a b; ...      (the mask is aligned at the right corner)

Deterministic steps are the slabs of a sequence, SLAB rows each, and every token lies where its row lies in the slab,
however the prompt is cut. So a product has one shape and a token one place in it: the order of its sums is the same,
whatever the library does; norms, positions and our attention compute a token by itself, and the head takes one:

    slab     | . . a b c d e . . . . |

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
from engine.kernels.triton.prompt_attention import prompt_attention
from models.network import Network

SLAB = 1024
"""Rows of a deterministic step."""
SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step. Longer chunks keep the GPU busy for longer than the host."""


class ShortPrefill:
    """One chunk of at most SIZES[-1] tokens, from its ids to its logits. It belongs to the loop thread.

    Deterministic: any chunk, slab by slab.
    """

    def __init__(
        self, network: Network, cache: KVCache, attend: Kernel | None, rows: int, graphs: Graphs | None
    ) -> None:
        """`rows` is the most that a sequence holds; `attend` is flash_attn_with_kvcache, None for deterministic steps.

        Without `graphs` every step runs kernel by kernel. Raises ImportError where triton is not installed.
        """
        from engine.execute.cuda.prefill import FusedPrefill

        device, most = cache.kv.device, SIZES[-1]
        self._model = FusedPrefill(network)
        self._cache = cache
        self._attend = attend
        self._graphs = graphs
        blocks = -(-rows // cache.block_size) + 1
        self._sizes = SIZES if attend is not None else (SLAB,)
        self._given = torch.zeros(3 + 2 * most + blocks, dtype=torch.int64, device=device)
        self._logits = torch.zeros(1, network.spec.vocab_size, dtype=network.dtype, device=device)

    @property
    def deterministic(self) -> bool:
        """Whether the bits of a token depend on nothing but the tokens before it."""
        return self._attend is None

    def takes(self, span: Span) -> bool:
        """Whether `span` is short enough."""
        return self.deterministic or span.count <= SIZES[-1]

    def run(self, span: Span) -> Tensor:
        """Compute the rows of `span`; logits [vocab] after its last token, which the next run overwrites."""
        rest: Span | None = span
        while rest is not None:
            part, rest = rest.cut((rest.start // SLAB + 1) * SLAB) if self.deterministic else (rest, None)
            assert part is not None
            size = next(size for size in self._sizes if size >= part.count)
            blocks = part.blocks[: -(-part.stop // self._cache.block_size)]
            self._write(size, part.tokens, part.positions, part.start, blocks)
            self._run(size)
        return self._logits[0]

    def prepare(self) -> None:
        """Compile and record every size. The cache must be empty: the first row of its first block is written to."""
        for size in self._sizes:
            for _ in range(2 if self._graphs is not None else 1):
                self._write(size, [0], [0], 0, [0])
                self._run(size)

    def _write(
        self, size: int, token_ids: Items[int], positions: Items[int], start: int, blocks: Items[int]
    ) -> None:
        count = len(token_ids)
        place = start % SLAB if self.deterministic else size - count
        before, after = [0] * place, [0] * (SIZES[-1] - place - count)
        span = (start - place, start, start + count)
        given = torch.tensor([*span, *before, *token_ids, *after, *before, *positions, *after, *blocks])
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
        token_ids, positions = given[3 : 3 + most], given[3 + most : 3 + 2 * most]
        attention = _PaddedSpan(self._cache, self._attend, given[:3], given[3 + 2 * most :])
        hidden = self._model.forward(token_ids[:size], positions[:size], attention)
        last = hidden[-1:]
        if self.deterministic:
            last = hidden.index_select(0, given[2:3] - given[:1] - 1)
        self._logits.copy_(self._model.logits(last))


class _PaddedSpan:
    """Attention of a step of one span and padding. Implements `models.reference.attention.Attention`."""

    def __init__(self, cache: KVCache, attend: Kernel | None, span: Tensor, table: Tensor) -> None:
        """span int64 [3]: see `write_kernel`; table int64 [blocks]. Both are read on the device."""
        self._cache = cache
        self._attend = attend
        self._span = span
        self._table = table.int().unsqueeze(0)
        self._stop = span[2:].int()

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
            WIDTH=keys.shape[1] * keys.shape[2],
            PADDED=triton.next_power_of_2(keys.shape[1] * keys.shape[2]),
            BLOCK=self._cache.block_size,
            num_warps=4,
        )
        if self._attend is None:
            return prompt_attention(
                q, keys, values, self._span, self._table[0], block_size=self._cache.block_size
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
