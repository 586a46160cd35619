"""Finds the fastest cuts of the kernels for a model on this GPU, and keeps them for the next start.

It measures a few steps at a time while no request is running, or all at once if somebody waits for the result. A
running engine keeps its cuts, because a row would get other bits with other cuts.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

import torch

import engine.kernels.triton
from engine.cache.kv_cache import KVCache
from engine.device import available_memory, driver_version
from engine.errors import EngineError
from engine.execute.cuda.fused_program import unsupported
from engine.execute.cuda.kernel_configs import KernelConfigs, table_cuts
from engine.execute.cuda.step_bench import PROMPT, Compute, GraphStopwatch, StepBench
from engine.execute.cuda.step_profile import ProfiledKernel, Ran, median_kernels
from engine.execute.cuda.tiles import FEW, FUSED
from engine.execute.faults import first_line
from engine.execute.tuning import store
from engine.execute.tuning.search import Choice, Measure, Numbers, search
from engine.execute.tuning.store import Tuning
from engine.kernels.triton.precompile import Compilers
from models.network import Network, Weight
from models.units import counted

T = TypeVar("T")
IDLE_S = 4.0
"""Seconds without a request before tuning begins, so that it does not start after every single answer."""
BUSY_S = 0.3
"""Seconds between checks whether a request is running."""
SMALL_BYTES, SMALL_S, LARGE_S = 3 << 30, 10.0, 30.0
"""The most bytes of a small model's weights; seconds after which no measurement begins, for small and large models."""
SPARE_BYTES = 512 << 20
"""GPU memory that tuning needs besides the rows of its sequence; with less free it does not run."""
MOST_PROCESSES, PROCESS_BYTES = 16, 1 << 30
"""The most compiler processes, and the most host memory that each takes."""


class Bench(Protocol):
    """Times steps (see `StepBench`)."""

    def candidates(self, rows: int) -> dict[str, tuple[Numbers, ...]]:
        """Return the candidates for steps of `rows` rows; the first of each is the default of the tables."""
        ...

    def compile(self, rows: int, choices: Sequence[Choice]) -> Callable[[], None]:
        """Start compiling the kernels of steps with these choices; return a function that waits for it."""
        ...

    def measure(self, rows: int) -> Measure:
        """Return the timer of steps of `rows` rows."""
        ...

    def profile(self, trace: Path) -> list[Ran]:
        """Run some steps of one row with the choices in use; write a trace and return the kernels that ran."""
        ...

    def close(self) -> None:
        """Release everything without waiting. Closing twice is fine."""
        ...


class StoppedError(Exception):
    """Raised because the engine is being closed."""


def tune(
    bench: Bench, model: str, in_time: Callable[[], bool], told: Callable[[str], None] = lambda _: None
) -> Tuning:
    """Search the best cuts for steps of one and FUSED rows and for prompts; none for one row may slow down 2 or FEW."""
    chosen: dict[str, Numbers] = {}
    seconds: dict[str, tuple[float, float]] = {}
    known = {rows: bench.candidates(rows) for rows in (1, FUSED, PROMPT)}
    for rows, candidates in known.items():  # compile all while the first ones are measured
        bench.compile(rows, every(candidates))
    for rows, candidates in known.items():
        if not candidates:
            continue
        guards = [bench.measure(count) for count in (2, FEW)] if rows == 1 else []
        found = search(candidates, bench.measure(rows), in_time, guards, told)
        chosen |= found.chosen
        if isfinite(found.before):
            seconds["prompt" if rows == PROMPT else str(rows)] = (found.before, found.after)
    return Tuning(model, chosen, seconds)


def every(candidates: Mapping[str, Sequence[Numbers]]) -> list[Choice]:
    """Return the fewest choices that cover every candidate: the n-th choice takes the n-th candidate of each thing."""
    most = max(map(len, candidates.values()), default=0)
    return [
        {name: found[min(at, len(found) - 1)] for name, found in candidates.items()} for at in range(most)
    ]


def machine_identity(device: torch.device) -> dict[str, str]:
    """Return the part of the identity that all measurements on this machine share."""
    import triton

    driver = None
    with suppress(EngineError, OSError):
        driver = driver_version()
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver or "unknown",
        "triton": str(triton.__version__),
        "kernels": _sources(),
    }


def model_identity(network: Network) -> str:
    """Return a hash that is equal for networks whose steps have the same kernels."""
    formats = [
        (weight.format.name, weight.planes is not None, weight.rows, weight.columns)
        for weight in network.parts(Weight)
    ]
    return sha256(repr((network.spec, formats)).encode()).hexdigest()[:16]


def _sources() -> str:
    """Return a hash of the sources of the kernels and of the code that launches them."""
    rooms = Path(__file__).parent, Path(engine.kernels.triton.__file__).parent
    files = [path for room in rooms for path in sorted(room.glob("*.py"))] + sorted(
        store.TABLES.glob("*.json")
    )
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def tuned_cuts(network: Network, device: torch.device) -> KernelConfigs:
    """Return the cuts to use here: those chosen at an earlier start, if any."""
    kept, cuts = store.load_tuning(_identity(network, device)), table_cuts(device)
    return cuts if kept is None else cuts.with_(kept.chosen)


def _identity(network: Network, device: torch.device) -> dict[str, str]:
    return {**machine_identity(device), "model": model_identity(network)}


class Tuner:
    """Tunes one model once, in its own thread or in the caller's."""

    def __init__(
        self,
        make_bench: Callable[[Compute], Bench],
        identity: dict[str, str],
        model: str,
        call: Callable[[Callable[[], object]], object],
        is_busy: Callable[[], bool],
        seconds: float,
    ) -> None:
        """`make_bench` receives a function that runs a job on the computing thread. `call` runs a function there at
        once; `is_busy`, called on that thread, returns whether a request is waiting. After `seconds`, nothing more is
        tried."""
        self._make_bench = make_bench
        self._identity = identity
        self._model = model
        self._call = call
        self._is_busy = is_busy
        self._seconds = seconds
        self._stop = threading.Event()
        self._bench: Bench | None = None
        self._thread: threading.Thread | None = None
        self._waited = 0.0
        self.notes: tuple[str, ...] = ()
        """Notes on the tuning, for people."""

    @classmethod
    def of(
        cls,
        network: Network,
        cache: KVCache,
        prompts: bool,
        model: str,
        call: Callable[[Callable[[], object]], object],
        is_busy: Callable[[], bool],
    ) -> "Tuner":
        """Make a tuner for a network on a GPU with this cache; `prompts` says whether our kernels attend for prompts.

        Raises EngineError if there is nothing to tune.
        """
        if (reason := unsupported(network)) is not None:
            raise EngineError(f"Only the fused kernels can be tuned or profiled, and {reason}.")
        if network.on_host:
            raise EngineError(
                "A model with experts in host memory cannot be tuned or profiled: they take most of the time."
            )
        identity = _identity(network, cache.device)
        seconds = SMALL_S if network.nbytes <= SMALL_BYTES else LARGE_S
        kept = store.load_tuning(identity)
        used = kept.chosen if kept is not None else {}
        return cls(
            lambda compute: _gpu_bench(network, cache, prompts, used, compute),
            identity,
            model,
            call,
            is_busy,
            seconds,
        )

    def kept(self) -> Tuning | None:
        """Return the result of an earlier tuning; None if there is none."""
        return store.load_tuning(self._identity)

    def start(self) -> None:
        """Tune in the background once no request has been running for a while."""
        self._thread = threading.Thread(target=self._wait_and_run, name="tuner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Start nothing more, and do not wait for compilations."""
        self._stop.set()
        if (bench := self._bench) is not None:
            bench.close()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run(self, told: Callable[[str], None] = lambda _: None) -> Tuning:
        """Tune now and store the result.

        Raises EngineError if that is not possible, StoppedError after `stop`.
        """
        until, self._waited = monotonic() + self._seconds, 0.0
        self._bench = bench = self._make_bench(self._compute)
        try:
            found = tune(bench, self._model, lambda: monotonic() < until + self._waited, told)
        except (StoppedError, EngineError):
            raise
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise all sorts
            raise EngineError(f"The kernels could not be tuned: {first_line(error)}.") from None
        finally:
            self._bench = None
            bench.close()
        try:
            store.keep(self._identity, found)
        except OSError as error:
            raise EngineError(f"The result of tuning could not be written: {first_line(error)}.") from None
        return found

    def profile(self, trace: Path) -> list[ProfiledKernel]:
        """Return where a step of one token spends its time; write a trace for Perfetto. Raises EngineError."""
        bench = self._make_bench(self._compute)
        try:
            parts = median_kernels(bench.profile(trace))
        except OSError as error:
            raise EngineError(f"The trace could not be written: {first_line(error)}.") from None
        except RuntimeError as error:
            raise EngineError(f"The step could not be profiled: {first_line(error)}.") from None
        finally:
            bench.close()
        if not parts:
            raise EngineError("The profiler saw no kernels; the driver may not let this user profile.")
        return parts

    def _wait_and_run(self) -> None:
        try:
            idle_since = monotonic()
            while monotonic() - idle_since < IDLE_S:
                if self._stop.wait(BUSY_S):
                    return
                if self._call(self._is_busy):
                    idle_since = monotonic()
            self.notes = (
                "The kernels are being tuned for this GPU in idle time, which takes about "
                f"{self._seconds:.0f} s; the next start uses the result.",
            )
            self.notes = (result_line(self.run()),)
        except StoppedError:
            self.notes = ()
        except (EngineError, RuntimeError) as error:
            self.notes = () if self._stop.is_set() else (str(error),)

    def _compute(self, job: Callable[[], T]) -> T:
        found: list[T] = []

        def try_it() -> None:
            if not self._is_busy():
                found.append(job())

        while not self._stop.is_set():
            self._call(try_it)
            if found:
                return found[0]
            self._stop.wait(BUSY_S)
            self._waited += BUSY_S
        raise StoppedError


def result_line(found: Tuning) -> str:
    """Describe the result of tuning, for people."""
    if not found.chosen:
        return "Tuned for this GPU: the built-in choices are the fastest here."
    return (
        f"Tuned for this GPU: {counted(len(found.chosen), 'better choice')} for its kernels; "
        f"a token takes {found.gain:.1%} less time from the next start on."
    )


def _gpu_bench(network: Network, cache: KVCache, prompts: bool, used: Choice, compute: Compute) -> Bench:
    device = cache.device
    room = (torch.cuda.mem_get_info(device)[0] - SPARE_BYTES) // StepBench.cache_bytes(cache)
    if room < 1:
        raise EngineError("The kernels could not be tuned: too little memory of the GPU is free.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fit = available_memory(torch.device("cpu")) // PROCESS_BYTES
    compilers = Compilers(max(1, min(cores - 1, MOST_PROCESSES, fit)))
    return StepBench(
        network, cache, compute, compilers, GraphStopwatch(), prompts, used, sequences=min(room, FEW)
    )
