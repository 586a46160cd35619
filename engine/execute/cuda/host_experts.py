"""Experts that do not fit on a GPU: they lie in pinned host memory, the rest of their layers on the GPU.

**The rule.** In a decode step, the native kernels compute them on the CPU: the normed rows and their choices go to the
host, some KB, and the sum comes back. Short prompt chunks do the same. For a chunk of `fetch_from` tokens or more, all
experts of a layer are copied to the GPU and multiplied there, while the next layer is being copied. `fetch_from` is the
smallest entry of MEASURED for which the CPU took longer than copying a layer; both are timed when the model is loaded.
It is a constant if sums must have one order, so that no measurement affects the bits.

    device  | norm, router, choice | copy |          wait           | copy | sum, next layer
    host    |                             | experts of these rows   |

The host's part is a call in stream order (`host_call.py`): CUDA graphs keep it, and Python does not wait for it. On a
CPU, for tests, everything happens at once.
"""

import weakref
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.execute.compatibility import not_on_host
from engine.execute.cpu.mixtures import NativeMixtures
from engine.execute.cuda import host_call
from engine.execute.cuda.fetched_experts import FetchedExperts, stacks
from engine.execute.cuda.tiles import FEW
from engine.kernels.native.library import MixtureJob, NativeError, Pool
from engine.kernels.recording import wait_for
from models.loading.load import is_out_of_memory
from models.network import Network
from models.spec import Experts, ModelSpec
from models.units import bytes_text
from models.weights.memory import on_device
from models.weights.staging import pin

MEASURED = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
"""Numbers of tokens for which the CPU is timed, until it takes longer than copying a layer."""
MOST_ROWS = 1024
"""The most rows that the host gets at once."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Measured seconds for the experts of a layer."""

    token: float
    """One token on the CPU."""
    chunks: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) on the CPU, fewest tokens first."""
    fetched: float | None = None
    """Copying to the GPU; None if that is not done."""

    def fetch_from(self) -> int | None:
        """Return the number of tokens from which experts are fetched; None if they never are."""
        if self.fetched is None:
            return None
        return next((tokens for tokens, seconds in self.chunks if seconds > self.fetched), None)


class HostExperts:
    """Computes experts in host memory, in the order of the current stream. It belongs to the loop thread."""

    def __init__(self, network: Network, pool: Pool) -> None:
        """Take over `pool`: nothing else may use it. Raises NativeError for experts that cannot be computed here, and
        the error of torch if there is too little host memory."""
        is_cuda = network.device.type == "cuda"
        if (reason := not_on_host(network.spec) or (host_call.problem() if is_cuda else None)) is not None:
            raise NativeError(reason)
        self._layers = network.on_host
        self._specs = {layer: experts_in(network.spec, layer) for layer in self._layers}
        self._hidden = network.spec.hidden_size
        self._device = network.device
        self._dtype = network.dtype
        told = {layer: (self._specs[layer], weights) for layer, weights in self._layers.items()}
        self._mixtures = NativeMixtures(told, self._hidden, pool)
        self._chosen = max(spec.chosen for spec in self._specs.values())
        self._x = torch.zeros(MOST_ROWS, self._hidden, dtype=self._dtype, pin_memory=is_cuda)
        self._ids = torch.zeros(MOST_ROWS * self._chosen, dtype=torch.int32, pin_memory=is_cuda)
        self._shares = torch.zeros(MOST_ROWS * self._chosen, pin_memory=is_cuda)
        self._out = torch.zeros(MOST_ROWS, self._hidden, pin_memory=is_cuda)
        self._jobs: dict[tuple[int, int], MixtureJob] = {}
        self._pinned: list[Tensor] = []
        # Unregisters the pinned memory before the memory itself is freed, even if nobody called `close`.
        self._release = weakref.finalize(self, _release, self._device, self._pinned)
        self._release.atexit = False
        self._fetched: FetchedExperts | None = None
        self.fetch_from: int | None = None
        """Chunks of at least this many tokens fetch the experts; None if none do."""
        self.costs = HostCosts(0.0)
        self.nbytes = sum(stack.nbytes for weights in self._layers.values() for stack in stacks(weights))
        self.problem: str | None = None
        """Why they are not fetched, as the middle of a sentence."""

    def prepare(self, fetches: bool, fixed: bool) -> None:
        """Pin the experts' memory, allocate what fetching needs, and measure. With `fixed`, `fetch_from` is a constant.

        Nothing is ever fetched without `fetches`, or if the system refuses to pin so much memory.
        """
        memory = [stack for weights in self._layers.values() for stack in stacks(weights)]
        if self._device.type == "cuda":
            for stack in memory:
                if not pin(stack):
                    self.problem = f"the system refuses to pin {bytes_text(self.nbytes)}"
                    break
                self._pinned.append(stack)
        try:
            if fetches and self.problem is None:
                self._fetched = FetchedExperts(self._layers, self._dtype, self._device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.problem = "there is no room for them on the GPU"
        self.costs = self._measure()
        if self._fetched is not None:
            self.fetch_from = FEW + 1 if fixed else self.costs.fetch_from()

    def mix(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Enqueue the experts of normed rows x [T, hidden], with ids int32 [T, chosen], -1 for none, and shares fp32;
        return their output, fp32 [T, hidden]."""
        found = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for start in range(0, len(x), MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            self._mix(layer, x[part], ids[part], shares[part], found[part])
        return found

    def _mix(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor, out: Tensor) -> None:
        count, chosen = ids.shape
        rows = 1 << (count - 1).bit_length()  # few sizes, because a job is kept for each
        here = self._ids[: rows * chosen].view(rows, chosen)
        if rows > count:
            ids = F.pad(ids, (0, 0, 0, rows - count), value=-1)
        self._x[:count].copy_(x, non_blocking=True)
        here.copy_(ids, non_blocking=True)
        self._shares[: count * chosen].copy_(shares.reshape(-1), non_blocking=True)
        self._call(self._job(layer, rows, chosen))
        out.copy_(self._out[:count], non_blocking=True)

    def _job(self, layer: int, rows: int, chosen: int) -> MixtureJob:
        job = self._jobs.get((layer, rows))
        if job is None:
            ids, shares = (part[: rows * chosen] for part in (self._ids, self._shares))
            job = self._mixtures.job(layer, self._x[:rows], ids, shares, self._out[:rows])
            self._jobs[layer, rows] = job
        return job

    def _call(self, job: MixtureJob) -> None:
        if self._device.type == "cuda":
            host_call.enqueue_call(self._mixtures.function, job)
        else:
            self._mixtures.run(job)

    def fetches(self, tokens: int) -> bool:
        """Return whether a chunk of `tokens` tokens fetches its experts. If so, call `fetched.begin` before its first
        layer, and `take` and `give_back` around each of the layers, in order."""
        return self.fetch_from is not None and tokens >= self.fetch_from

    @property
    def fetched(self) -> FetchedExperts:
        """The place that experts are fetched to."""
        assert self._fetched is not None
        return self._fetched

    def _measure(self) -> HostCosts:
        layer = next(iter(self._layers))
        token, fetched = self._host_seconds(layer, 1), None
        chunks: list[tuple[int, float]] = []
        if self._fetched is not None:
            fetched = self._fetch_seconds(self._fetched)
            for tokens in MEASURED:
                chunks.append((tokens, self._host_seconds(layer, tokens)))
                if chunks[-1][1] > fetched:
                    break
        return HostCosts(token, tuple(chunks), fetched)

    def _host_seconds(self, layer: int, tokens: int) -> float:
        """Time the CPU for `tokens` tokens whose choices are spread over all experts."""
        spec, times = self._specs[layer], []
        each = min(tokens, MOST_ROWS)
        chosen = torch.arange(each * spec.chosen, dtype=torch.int32) % spec.count
        self._ids[: each * spec.chosen] = chosen
        self._shares[: each * spec.chosen] = 1.0 / spec.chosen
        self._x[:each] = 0.01
        job = self._mixtures.job(
            layer,
            self._x[:each],
            self._ids[: each * spec.chosen],
            self._shares[: each * spec.chosen],
            self._out[:each],
        )
        for _ in range(4 if tokens <= FEW else 2):
            began = perf_counter()
            for _ in range(tokens // each):
                self._mixtures.run(job)
            times.append(perf_counter() - began)
        return median(times[1:])  # the first run wakes the threads up

    def _fetch_seconds(self, fetched: FetchedExperts) -> float:
        """Time the copying and expanding of one layer after the other, per layer."""
        times, layers = [], list(self._layers)
        for _ in range(2):
            wait_for(self._device)
            began = perf_counter()
            fetched.begin()
            for layer in layers[:4]:
                fetched.take(layer)
                fetched.give_back(layer)
            wait_for(self._device)
            # While the last layers are waited for, `begin` and `give_back` have started two more copies.
            brought = min(len(layers), min(len(layers), 4) + 2)
            times.append((perf_counter() - began) / brought)
        return times[-1]

    def told(self, layers: int) -> str:
        """Describe for people how many of the network's `layers` have experts here, and what is done with them."""
        line = (
            f"The experts of {len(self._layers)} of {layers} layers are in host memory ({bytes_text(self.nbytes)}), "
            "because the GPU has no room for them; they are computed on the CPU"
        )
        costs = f"{self.costs.token * 1e3:.2g} ms per layer and token"
        if self.fetch_from is None:
            why = (
                f", and so are prompts: {self.problem}"
                if self.problem is not None
                else ", and so are prompts"
            )
            return f"{line}{why} ({costs})."
        if self.costs.fetched is not None:
            costs += f", {self.costs.fetched * 1e3:.2g} ms to copy a layer"
        return (
            f"{line}; for prompts of {self.fetch_from} tokens or more they are copied to the GPU ({costs})."
        )

    def close(self) -> None:
        """Wait for enqueued work and unpin the memory. Closing twice is fine."""
        self._release()


def _release(device: torch.device, pinned: list[Tensor]) -> None:
    if device.type != "cuda":
        return
    with suppress(RuntimeError):  # a failed device runs no more calls
        wait_for(device)
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with on_device(device):
        for memory in pinned:
            cudart.cudaHostUnregister(memory.data_ptr())
    pinned.clear()


def experts_in(spec: ModelSpec, layer: int) -> Experts:
    """Return the experts of a layer."""
    feed = spec.layers[layer].feed_forward
    assert isinstance(feed, Experts)
    return feed


def without_experts(layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Stand in for `HostExperts.mix` when only the memory on the device matters: returns zeros."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def not_for_padding(active: Tensor, ids: Tensor) -> Tensor:
    """Return ids int32 [T, chosen] with -1 where active [T or more] is negative: padding rows choose no experts."""
    return ids.masked_fill(active[: len(ids), None] < 0, -1)
