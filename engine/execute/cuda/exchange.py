"""What a rank sends the others in a decode step, by kernels that write into their memory.

All ranks do the same steps in the same order, and in each of them: `begin`, two sums a layer and one of the embedding,
`join`. A step is recorded like any other: what changes from one to the next is a number in device memory.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.execute.cuda.peer_memory import PeerMemory
from engine.execute.cuda.slots import StepInput
from engine.execute.group import PATIENCE
from engine.kernels.triton.exchange import begin_kernel, count_kernel, join_kernel, sum_kernel
from engine.kernels.triton.launch import split_alike
from models.network import Network

_WHILE_COMPILING_S = 300.0
"""How long others are waited for before the first answer: each compiles its kernels."""
_FEW = 128 * 1024
"""Numbers up to which a program adds 512 of them; beyond, there would be too many programs to run at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to exchange, and where it lies in the memory of each rank, in words of 8 bytes."""

    ranks: int
    rows: int
    """The most of a step."""
    size: int
    """Numbers of a row between layers."""
    columns: int
    """Logits of a rank."""
    vocab: int
    layers: int

    @classmethod
    def of(cls, network: Network, rows: int) -> "Plan":
        """Of a network that is divided."""
        assert network.share is not None
        spec, ranks = network.spec, network.share.ranks
        vocab = network.whole.vocab_size
        return cls(ranks, rows, spec.hidden_size, spec.vocab_size, vocab, len(spec.layers))

    @property
    def sums(self) -> int:
        """In a step."""
        return 2 * self.layers + 1

    @property
    def exchanges(self) -> int:
        """Tags of a step. Odd, as the buffers of sums take turns from one step to the next, too."""
        return self.sums + 2

    @property
    def logits(self) -> int:
        """Where the logits lie, behind two buffers of sums."""
        return 2 * self.ranks * self.rows * self.size

    @property
    def tokens(self) -> int:
        """Where the tokens lie."""
        return self.logits + self.ranks * self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Of a rank."""
        return 8 * (self.tokens + self.rows)


class Exchange:
    """The other ranks in a decode step, as `models.reference.peers.Peers` has them, and more. For the loop's thread."""

    def __init__(
        self, memory: PeerMemory, plan: Plan, rank: int, device: torch.device, dtype: torch.dtype, pdl: bool
    ) -> None:
        """`memory` has the plan's bytes, zeros at first, on each rank; `dtype` is the network's; `pdl` turns
        programmatic dependent launch on (sm_90 and later)."""
        self._memory = memory
        self._plan = plan
        self.rank = rank
        self._pdl = pdl
        self._cuda = device.type == "cuda"
        self._number = 0
        # Halves of words, where they can be taken in pairs.
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
        """Whether somebody did not come in time, or `give_up` was called; from then on results mean nothing."""
        return bool(self._is_lost[0])

    def give_up(self) -> None:
        """End what waits on the device. From any thread."""
        self._is_lost[0] = 1

    def wait_at_most(self, seconds: float = PATIENCE.total_seconds()) -> None:
        """For another rank, from the next step on."""
        self._patience.fill_(int(seconds * 1e9))

    def close(self) -> None:
        """Let go of the memory; nothing may be enqueued any more."""
        self.give_up()
        self._memory.close()

    def begin(self, given: StepInput, rows: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Enqueue that a step of `rows` rows begins: all have the newest tokens of rank 0 in `given`.

        Returns int32 [rows]: of rows whose token is `first` to `last` - 1 the row itself, else -1, and int64 [rows]:
        that token, counted from `first`.
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
            self._plan.tokens,
            first,
            last,
            ROWS=rows,
            RANKS=self._plan.ranks,
            EXCHANGES=self._plan.exchanges,
            BLOCK=max(32, triton.next_power_of_2(rows)),
            CUDA=self._cuda,
            num_warps=1,
        )
        split_alike(kernel)
        return self._own_row[:rows], self._own_token[:rows]

    def sum(self, x: Tensor) -> Tensor:
        """[T, size] -> the sum over all ranks, in its place."""
        self.add(x, None, x)
        return x

    def add(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        """out [T, size] = residual + the sum over all ranks of x [T, size], or of its parts fp32 [parts, T, size]."""
        self._number += 1
        count = out.numel()
        block = 512 if count <= _FEW else 2048
        kernel = sum_kernel[(triton.cdiv(count, block),)](
            x,
            residual,
            out,
            *self._told,
            self._number,
            self.rank,
            self._lost,
            self._patience,
            count,
            RANKS=self._plan.ranks,
            ROOM=self._plan.rows * self._plan.size,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            BLOCK=block,
            PDL=self._pdl,
            CUDA=self._cuda,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)

    def join_columns(self, x: Tensor) -> Tensor:
        """Logits [T, columns] of each rank -> [T, vocab] on rank 0; on the others they mean nothing."""
        rows, plan = x.shape[0], self._plan
        assert self._number == plan.sums
        out = self._joined[:rows]
        bits = x.to(out.dtype).view(torch.int32)
        kernel = join_kernel[(triton.cdiv(self._words, 1024), rows)](
            bits,
            out.view(torch.int32),
            *self._told,
            self._number + 1,
            self.rank,
            self._lost,
            self._patience,
            plan.logits,
            RANKS=plan.ranks,
            ROOM=plan.rows * plan.columns,
            COLUMNS=self._words,
            TOTAL=out.view(torch.int32).shape[1],
            BLOCK=1024,
            PDL=self._pdl,
            CUDA=self._cuda,
            num_warps=4,
            launch_pdl=self._pdl,
        )
        split_alike(kernel)
        return out

    def count(self, active: Tensor, counters: Tensor) -> None:
        """Enqueue that counters int64 [slots, n] of the slots `active` int32 [rows] go up by 1, as by a sampler."""
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
