"""Exchange data between ranks in a decode step, by kernels that write into the memory of the other ranks.

Prompts have sums of their own (`prefill_all_reduce.py`) in the same memory.

All ranks run the same steps in the same order. Each step has `begin`, two sums per layer, one sum for the embedding,
and `join_columns`. A step is recorded like any other: only a number in device memory changes between steps.
"""

import torch
import triton
from torch import Tensor

from engine.execute.cuda.add_norm import AddNorm
from engine.execute.cuda.all_reduce_layout import AllReduceLayout
from engine.execute.cuda.peer_memory import PeerMemory
from engine.execute.cuda.slots import StepInput
from engine.execute.group import PATIENCE
from engine.kernels.triton.all_reduce import begin_kernel, count_kernel, join_kernel, sum_kernel
from engine.kernels.triton.launch import split_alike
from engine.kernels.triton.sum_norm import sum_norm_kernel

_WHILE_COMPILING_S = 300.0
"""How long to wait for another rank before the first answer, in seconds: each rank compiles its kernels."""
_WARPS = 8
"""Warps of a program; every thread has one word."""
_THREAD_WORDS = 4
"""Pairs of numbers of a thread, where a program sums and norms a row."""


class AllReduce:
    """Sums over all ranks in a decode step; extends `models.reference.collective.Collective`. Loop thread only."""

    def __init__(
        self,
        memory: PeerMemory,
        plan: AllReduceLayout,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
    ) -> None:
        """`memory` holds the plan's bytes on each rank, zeros at first. `dtype` is the network's. `pdl` turns on
        programmatic dependent launch (sm_90 and later)."""
        self.memory = memory
        self.plan = plan
        self.rank = rank
        self._pdl = pdl
        self._cuda = device.type == "cuda"
        self._number = 0
        # Two 16-bit logits share a word where both widths are even.
        pairs = dtype.itemsize == 2 and not plan.columns % 2 and not plan.vocab % 2
        self._words = plan.columns // 2 if pairs else plan.columns
        self._joined = torch.zeros(
            plan.rows, plan.vocab, dtype=dtype if pairs else torch.float32, device=device
        )
        self._own_row = torch.full((plan.rows,), -1, dtype=torch.int32, device=device)
        self._own_token = torch.zeros(plan.rows, dtype=torch.int64, device=device)
        self._patience = torch.zeros(1, dtype=torch.int64, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, pin_memory=self._cuda)
        self._is_lost = self._lost.numpy()
        self._told = (
            torch.tensor(memory.addresses, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.wait_at_most(_WHILE_COMPILING_S)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was late or `give_up` was called; from then on, results are meaningless."""
        return bool(self._is_lost[0])

    def give_up(self) -> None:
        """Make kernels that wait on the device stop waiting. May be called from any thread."""
        self._is_lost[0] = 1

    def wait_at_most(self, seconds: float = PATIENCE.total_seconds()) -> None:
        """Set how long to wait for another rank, from the next step on."""
        self._patience.fill_(int(seconds * 1e9))

    def close(self) -> None:
        """Release the memory; nothing may be enqueued afterwards."""
        self.give_up()
        self.memory.close()

    def begin(self, given: StepInput, rows: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Enqueue the start of a step of `rows` rows: every rank gets rank 0's newest tokens into `given`.

        Return int32 [rows], the row's own index where its token is in `first` to `last` - 1, else -1; and int64
        [rows], the token counted from `first`.
        """
        self._number = 0
        kernel = begin_kernel[(1,)](
            given.active,
            given.token,
            self._own_row,
            self._own_token,
            *self._told,
            self.rank,
            self._lost,
            self._patience,
            self.plan.tokens,
            first,
            last,
            ROWS=rows,
            RANKS=self.plan.ranks,
            EXCHANGES=self.plan.exchanges,
            BLOCK=max(32, triton.next_power_of_2(rows)),
            CUDA=self._cuda,
            num_warps=1,
        )
        split_alike(kernel)
        return self._own_row[:rows], self._own_token[:rows]

    def sum(self, x: Tensor) -> Tensor:
        """Replace x [T, size] by its sum over all ranks, in place, and return it."""
        self.add(x, None, x)
        return x

    def add(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """Set out [T, size] to residual + the sum over all ranks of x: [T, size], or fp32 parts [parts, T, size]."""
        self._number += 1
        count = out.numel()
        kernel = sum_kernel[(triton.cdiv(count, 32 * _WARPS),)](
            x,
            residual,
            out,
            *self._told,
            self._number,
            self._lost,
            self._patience,
            count,
            RANK=self.rank,
            RANKS=self.plan.ranks,
            ROOM=self.plan.rows * self.plan.size,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            BLOCK=32 * _WARPS,
            PDL=self._pdl,
            CUDA=self._cuda,
            num_warps=_WARPS,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def place(self, rows: int) -> Tensor | None:
        """Return None: products may be anywhere."""
        return None

    def add_norm(self, x: Tensor, residual: Tensor, between: AddNorm, out: Tensor, total: Tensor) -> None:
        """See `engine.execute.cuda.prefill.Sums`. Every rank's sum of its parts is rounded to the network's dtype."""
        self._number += 1
        room = self.plan.rows * self.plan.size
        self.sum_norm(x, residual, between, out, total, self._told[1], self._number, room, None)

    def sum_norm(
        self,
        x: Tensor,
        residual: Tensor,
        between: AddNorm,
        out: Tensor,
        total: Tensor,
        epoch: Tensor,
        number: int,
        room: int,
        start: int | None,
    ) -> None:
        """Launch `sum_norm_kernel` with `told`, its peers, epoch and number. With a `start`, ranks read from others."""
        rows, size = out.shape
        words = max(32, triton.next_power_of_2(triton.cdiv(size, 2)))
        warps = max(1, min(16, words // _THREAD_WORDS // 32))
        pdl = self._pdl and start is None  # the library's products, which prompts use, do not start early
        kernel = sum_norm_kernel[(rows,)](
            x,
            residual,
            residual if between.norm is None else between.norm[1].weight,
            out,
            total,
            self._told[0],
            epoch,
            number,
            self._lost,
            self._patience,
            start or 0,
            RANK=self.rank,
            RANKS=self.plan.ranks,
            ROOM=room,
            SIZE=size,
            WORDS=words,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            PULL=start is not None,
            PDL=pdl,
            CUDA=self._cuda,
            WARPS=warps,
            **between.arguments(),
            num_warps=warps,
            launch_pdl=pdl,
        )
        if start is None:
            split_alike(kernel)

    def join_columns(self, x: Tensor) -> Tensor:
        """Join the logits [T, columns] of all ranks to [T, vocab] on rank 0; the result is meaningless elsewhere."""
        rows, plan = x.shape[0], self.plan
        assert self._number == plan.sums
        out = self._joined[:rows]
        bits = x.to(out.dtype).view(torch.int32)
        kernel = join_kernel[(triton.cdiv(self._words, 32 * _WARPS), rows)](
            bits,
            out.view(torch.int32),
            self._told[0],
            self.rank,
            self._lost,
            self._patience,
            plan.logits,
            RANKS=plan.ranks,
            ROOM=plan.rows * plan.columns,
            COLUMNS=self._words,
            TOTAL=out.view(torch.int32).shape[1],
            BLOCK=32 * _WARPS,
            PDL=self._pdl,
            CUDA=self._cuda,
            num_warps=_WARPS,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)
        return out

    def count(self, active: Tensor, counters: Tensor) -> None:
        """Enqueue adding 1 to counters int64 [slots, n] of the slots `active` int32 [rows], as a sampler does."""
        rows = len(active)
        kernel = count_kernel[(1,)](
            active,
            counters,
            ROWS=rows,
            WIDTH=counters.shape[1],
            BLOCK=max(32, triton.next_power_of_2(rows)),
            num_warps=1,
        )
        split_alike(kernel)
