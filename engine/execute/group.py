"""Exchanges between ranks during a step through torch's process groups: gloo between CPUs, NCCL between GPUs."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import EngineError
from engine.execute.faults import first_line

PATIENCE = timedelta(seconds=10)
"""How long rank 0 waits before it takes the others to hang; they compute as much as it does."""
_ALWAYS = timedelta(days=365)
"""How long the other ranks wait. Rank 0 ends them; it may have been stopped (Ctrl-Z) and continue later."""
_FEW = 4
"""Up to this many ranks, a sum of 16-bit numbers takes less time if every rank gets all of them as they are: that is no
more data than an all-reduce in fp32 sends."""
_LOOK = timedelta(seconds=1)
"""How often rank 0 looks while it waits. Only these looks count, because a clock runs on while a process is stopped."""
LOST = (
    "A process that computes a part of the model has ended or hangs; the conversation is intact. "
    "Load the model again."
)


@dataclass(frozen=True, slots=True)
class Group:
    """All ranks of one model. Not torch's default group: there may be more than one."""

    group: Any
    """The torch process group."""
    ranks: int
    device: torch.device
    rank: int
    store: Any
    """The torch store in the file where the ranks met."""
    leave: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that end every wait for other ranks in this process, from any thread."""
    shared: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks that free memory the other ranks had open, to be called once those have ended."""

    @classmethod
    def join(cls, meeting: Path, rank: int, ranks: int, device: torch.device) -> "Group":
        """Meet the other ranks in the new file `meeting`, the same for all. Raises EngineError if they do not come."""
        try:
            store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]
            store.set_timeout(PATIENCE)
            # NCCL refuses ranks that share a GPU, which is for tests only.
            if device.type == "cpu" or ranks > torch.cuda.device_count():
                options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = PATIENCE
                options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                return cls(dist.ProcessGroupGloo(store, rank, ranks, options), ranks, device, rank, store)
            # On a timeout, raise an error instead of ending the process, NCCL's default: it holds a conversation.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _ALWAYS if rank else PATIENCE
            return cls(dist.ProcessGroupNCCL(store, rank, ranks, nccl), ranks, device, rank, store)
        except RuntimeError as error:
            raise EngineError(
                f"The processes of the model could not connect to each other ({first_line(error)}). "
                "If it happens again, load it with --tensor-parallel 1."
            ) from None

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in fp32 (fp64 stays fp64) and round once; every rank gets the same bits."""
        if x.itemsize == 2 and self.ranks <= _FEW:
            return self._gather(x).sum(0)  # torch sums 16-bit numbers in fp32
        wide = x.float() if x.dtype != torch.float64 else x
        self._do(lambda: self.group.allreduce([wide], self._options(dist.AllreduceOptions)))
        return wide.to(x.dtype)

    def join_columns(self, x: Tensor) -> Tensor:
        """Concatenate the columns of all ranks: [n, columns] -> [n, ranks * columns]."""
        return torch.cat(list(self._gather(x)), -1)

    def swap(self, what: str, data: bytes) -> list[bytes]:
        """Return the `data` of all ranks in order; use each `what` only once. Raises EngineError if a rank is lost."""
        try:
            self.store.set(f"{what}/{self.rank}", data)
            return [bytes(self.store.get(f"{what}/{rank}")) for rank in range(self.ranks)]
        except RuntimeError as error:
            raise EngineError(LOST) from error

    def least(self, number: int) -> int:
        """Return the smallest `number` of all ranks."""
        found = torch.tensor([number], device=self.device)
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = dist.ReduceOp.MIN
        self._do(lambda: self.group.allreduce([found], options))
        return int(found.item())

    def _gather(self, x: Tensor) -> Tensor:
        """Return `x` of all ranks: [...] -> [ranks, ...]."""
        found = x.new_empty(self.ranks * x.shape[0], *x.shape[1:])
        options = self._options(dist.distributed_c10d.AllgatherOptions)  # type: ignore[attr-defined]
        self._do(lambda: self.group._allgather_base(found, x.contiguous(), options))
        return found.view(self.ranks, *x.shape)

    def _do(self, start: Callable[[], Any]) -> None:
        """Start an exchange and wait for it. Raises EngineError when a rank is lost."""
        try:
            work = start()
            if self.rank or self.device.type == "cuda":
                work.wait()
            else:
                _wait(work)
        except RuntimeError as error:
            raise EngineError(LOST) from error

    def _options(self, kind: Any) -> Any:
        """Return the options of an exchange."""
        found = kind()
        if self.device.type == "cpu":
            found.timeout = _ALWAYS
        return found


def _wait(work: Any) -> None:
    """Wait for an exchange. Raises RuntimeError if it fails or is not done in time."""
    for _ in range(int(PATIENCE / _LOOK)):
        with suppress(RuntimeError):
            work.wait(_LOOK)
            return
        if work.is_completed():
            break
    raise RuntimeError("the other processes did not answer in time")
