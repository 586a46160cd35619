"""What ranks exchange in a step, by torch's process groups: gloo between CPUs, NCCL between GPUs."""

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

PATIENCE = timedelta(seconds=10)
"""How long rank 0 waits for the others, who compute as much as it does, before it takes them to hang."""
_ALWAYS = timedelta(days=365)
"""How long the others wait, whom rank 0 ends: it may have been stopped (Ctrl-Z), and goes on later."""
_LOOK = timedelta(seconds=1)
"""How often rank 0 looks meanwhile: only these looks count, as a clock goes on while it is stopped, too."""
LOST = (
    "A process that computes a part of the model has ended or hangs; the conversation is intact. "
    "Load the model again."
)


@dataclass(frozen=True, slots=True)
class Group:
    """All ranks of one model; see `models.reference.peers.Peers`. Not torch's default group: there may be several."""

    group: Any
    """torch's."""
    ranks: int
    device: torch.device
    rank: int
    store: Any
    """torch's, in the file where they met."""
    leave: list[Callable[[], None]] = field(default_factory=list)
    """What ends whatever waits for others here, from any thread."""
    shared: list[Callable[[], None]] = field(default_factory=list)
    """What lets go of memory that others had open, once they have ended."""

    @classmethod
    def join(cls, meeting: Path, rank: int, ranks: int, device: torch.device) -> "Group":
        """Meet the others in the new file `meeting`, which all name. Raises EngineError when they do not come."""
        try:
            store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]
            store.set_timeout(PATIENCE)
            # NCCL refuses ranks that share a GPU, which is for tests only.
            if device.type == "cpu" or ranks > torch.cuda.device_count():
                options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = PATIENCE
                options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                return cls(dist.ProcessGroupGloo(store, rank, ranks, options), ranks, device, rank, store)
            # Who waits in vain gives up, and does not end the process, as is the rule: there is a conversation in it.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _ALWAYS if rank else PATIENCE
            return cls(dist.ProcessGroupNCCL(store, rank, ranks, nccl), ranks, device, rank, store)
        except RuntimeError as error:
            raise EngineError(
                f"The processes of the model could not connect to each other ({_line(error)})."
            ) from None

    def sum(self, x: Tensor) -> Tensor:
        """In fp32, rounded once, with the same bits on every rank."""
        wide = x.float() if x.dtype != torch.float64 else x
        self._do(lambda: self.group.allreduce([wide], self._options(dist.AllreduceOptions)))
        return wide.to(x.dtype)

    def join_columns(self, x: Tensor) -> Tensor:
        """[n, columns] of every rank -> [n, ranks * columns]"""
        found = [torch.empty_like(x) for _ in range(self.ranks)]
        options = self._options(dist.distributed_c10d.AllgatherOptions)  # type: ignore[attr-defined]
        self._do(lambda: self.group.allgather([found], [x.contiguous()], options))
        return torch.cat(found, -1)

    def swap(self, what: str, data: bytes) -> list[bytes]:
        """`data` of every rank, in their order; `what` is asked for once. Raises EngineError when a rank is lost."""
        try:
            self.store.set(f"{what}/{self.rank}", data)
            return [bytes(self.store.get(f"{what}/{rank}")) for rank in range(self.ranks)]
        except RuntimeError as error:
            raise EngineError(LOST) from error

    def least(self, number: int) -> int:
        """The smallest of what the ranks give."""
        found = torch.tensor([number], device=self.device)
        options = self._options(dist.AllreduceOptions)
        options.reduceOp = dist.ReduceOp.MIN
        self._do(lambda: self.group.allreduce([found], options))
        return int(found.item())

    def _do(self, start: Callable[[], Any]) -> None:
        """Raises EngineError when a rank is lost."""
        try:
            work = start()
            if self.rank or self.device.type == "cuda":
                work.wait()
            else:
                _wait(work)
        except RuntimeError as error:
            raise EngineError(LOST) from error

    def _options(self, kind: Any) -> Any:
        """Those of an exchange."""
        found = kind()
        if self.device.type == "cpu":
            found.timeout = _ALWAYS
        return found


def _wait(work: Any) -> None:
    """Raises RuntimeError when it has failed, or is not done in time."""
    for _ in range(int(PATIENCE / _LOOK)):
        with suppress(RuntimeError):
            work.wait(_LOOK)
            return
        if work.is_completed():
            break
    raise RuntimeError("nobody answers")


def _line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200].rstrip(".")
