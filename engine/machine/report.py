"""The report of `chatterm doctor`: the hardware, the engine parts that work on it, and the expected speed."""

import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch

from engine.attention.choose import usable_backends
from engine.device import (
    FULL_SPEED,
    CudaProblem,
    available_memory,
    cuda_problem,
    driver_cuda,
    driver_version,
    has_nvidia_driver,
    is_amd,
    is_unfit,
    pick_device,
    pick_dtype,
    pip_torch,
    sm,
)
from engine.errors import EngineError
from engine.execute.tuning.store import Tuning, all_kept
from engine.kernels import on_gpu
from engine.kernels.native import library as native
from engine.kernels.recording import wait_for
from engine.machine.bandwidth import cpu_name, known_bandwidth
from engine.machine.drafts import DraftPair, draft_pairs
from engine.machine.expected import NATIVE, PROGRAMS, Here, Program, Speed, catalogue_speed
from engine.machine.links import Links, SplitSpeed, find_links, split
from engine.machine.shapes import COMMON, known_shape
from models.hub.catalogue import HUB_FILES, names
from models.system import total_memory
from models.weights.cgroups import PROC, lines
from models.weights.memory import group_limits

T = TypeVar("T")

_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "sve": "SVE",
    "i8mm": "int8 products",
    "bf16": "bf16",
}
"""Flags in /proc/cpuinfo that decide how fast matrix products are."""
_PACKAGES = ("torch", "triton", "flash-attn", "transformers")
_READ_BYTES = 2**29
"""Bytes to read: more than the caches of all but the largest servers. Filling the buffer takes most of the time."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that the engine uses. Memory is in bytes."""

    name: str
    capability: str
    """The compute capability, such as "sm_90"; for an AMD GPU its architecture, such as "gfx1100"."""
    memory_free: int
    memory_total: int
    count: int
    """Number of GPUs that torch sees."""
    number: int = 0
    """The number of this GPU among them, from 0."""
    is_amd: bool = False


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor; `cores` are those this process may use, `instructions` those that matter to the engine."""

    name: str
    cores: int
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineFeature:
    """A part of the engine; `reason` says why it cannot be used here, None if it can."""

    name: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything known about this machine. The result of a failed probe is None or empty."""

    device: str
    """The device that was examined: "cuda", "cuda:1" or "cpu"; by default the one that `--device auto` picks."""
    dtype: str
    """The dtype that `--dtype auto` picks on that device."""
    gpu: Gpu | None
    cpu: Cpu | None
    memory_free: int | None
    """Main memory in bytes, within the limits of a container."""
    memory_total: int | None
    driver: str | None
    """Version of the NVIDIA driver."""
    driver_cuda: str | None
    """The newest CUDA version that the driver runs."""
    torch_cuda: str | None
    """The CUDA version that torch was built for; None for a build for CPUs or AMD GPUs."""
    packages: dict[str, str]
    """Versions of the relevant packages that are installed."""
    attention: tuple[MachineFeature, ...]
    decode: tuple[MachineFeature, ...]
    bandwidth: float | None
    """Memory bandwidth of `device` in bytes/s, measured."""
    program: Program
    """The decode program on `device` that the speeds assume."""
    speeds: tuple[Speed, ...]
    tunings: tuple[Tuning, ...]
    """The tuned choices for this GPU, by model."""
    drafts: tuple[DraftPair, ...]
    """Pairs of a model and a smaller one that guesses for it, both on this machine."""
    advice: tuple[str, ...]
    """What to install or change for better results; one line each."""
    failures: tuple[str, ...]
    """Probes that failed, with their reasons; one line each."""
    links: Links | None = None
    """How the GPUs are linked, if there are several."""
    splits: tuple[SplitSpeed, ...] = ()
    """The estimated gain of dividing a model among all GPUs."""
    host_bandwidth: float | None = None
    """Bandwidth of main memory beside a GPU in bytes/s, measured."""


def inspect_machine(name: str = "auto") -> Machine:
    """Inspect the hardware and measure its memory bandwidth, within about 3 s. Never raises.

    `name` is a device as in `Engine.load`. Of several GPUs, the one that it names is examined, otherwise the first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about old drivers and GPUs; the report says it better
        return _inspect(name)


def _inspect(name: str) -> Machine:
    failures: list[str] = []

    def probe(what: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - a broken driver may raise anything; it becomes a line
            text = " ".join(str(error).split())[:300] or type(error).__name__
            failures.append(f"{what} could not be determined: {text}")
            return otherwise

    cpu, wanted = torch.device("cpu"), torch.device(name if name.startswith("cuda") else "cuda")
    broken: CudaProblem | None = CudaProblem("CUDA is broken")
    no_features: tuple[MachineFeature, ...] = ()
    problem = probe("The state of CUDA", lambda: cuda_problem(wanted), broken)
    device = wanted if problem is None else cpu
    gpu = probe("The GPU", lambda: _gpu(device), None) if device.type == "cuda" else None
    dtype = probe("The dtype", lambda: pick_dtype("auto", device), torch.bfloat16)
    newest = probe("The driver's CUDA", driver_cuda, None)
    attention = probe("Attention backends", lambda: _attention(device, dtype), no_features)
    decode = probe("Decode programs", lambda: decode_programs(device), no_features)
    bandwidth = probe("The memory bandwidth", lambda: measure_bandwidth(device), None)
    free = probe("Free memory", lambda: available_memory(device), None)
    here = _here(device, dtype, decode, bandwidth, free)
    of_host = None
    if device.type == "cuda":
        of_host = probe("The bandwidth of main memory", lambda: measure_bandwidth(cpu), None)
        here = replace(here, or_cpu=cpu_instead(of_host) if name == "auto" else None)
    speeds = tuple(catalogue_speed(name, here) for name in _worth_telling(here))
    links = probe("How the GPUs are linked", find_links, None) if device.type == "cuda" else None
    return Machine(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        gpu=gpu,
        cpu=probe("The CPU", _cpu, None),
        memory_free=free if device.type == "cpu" else probe("Memory", lambda: available_memory(cpu), None),
        memory_total=probe("The size of the memory", _memory_total, None),
        driver=probe("The driver", driver_version, None),
        driver_cuda=f"{newest[0]}.{newest[1]}" if newest else None,
        torch_cuda=torch.version.cuda,
        packages=probe("Packages", _packages, {}),
        attention=attention,
        decode=decode,
        bandwidth=bandwidth,
        host_bandwidth=of_host,
        program=here.program,
        speeds=speeds,
        links=links,
        splits=_splits(speeds, here, links),
        tunings=probe("The tuned kernels", lambda: _tunings(device), ()),
        drafts=probe("Draft models", lambda: draft_pairs(str(device)), ()),
        advice=advice(
            problem,
            gpu,
            attention,
            flash_attn=_installed("flash_attn"),
            triton=_installed("triton"),
            no_native=native.problem(),
            no_triton=probe("Triton", lambda: _no_triton(device), None),
            unused_cuda=torch.version.cuda is not None and not has_nvidia_driver(),
        ),
        failures=tuple(failures),
    )


def look_here(device: str, dtype: str, given_back: int = 0, bandwidth: float | None = None) -> Here | None:
    """Return what decides the speed of models here, for a device and dtype as in `Engine.load`; None if there is none.

    `given_back` is the bytes that the present model holds and the next one may take. A `bandwidth` that is not given is
    looked up, or else measured, which takes a second.
    """
    try:
        place = pick_device(device).device
        numbers = pick_dtype(dtype, place)
        free = available_memory(place) + given_back
    except (EngineError, RuntimeError, OSError):
        return None  # loading will say why
    bandwidth = bandwidth or known_bandwidth(place)
    if bandwidth is None:
        with suppress(EngineError, RuntimeError):
            bandwidth = measure_bandwidth(place)
    here = _here(place, numbers, decode_programs(place), bandwidth, free)
    return replace(here, or_cpu=cpu_instead()) if device == "auto" and place.type == "cuda" else here


def cpu_instead(bandwidth: float | None = None) -> Here | None:
    """Return what the CPU offers to models for which a GPU has no room; None if the CPU cannot be examined.

    `bandwidth` is that of main memory in bytes/s (None: look it up).
    """
    cpu = torch.device("cpu")
    with suppress(EngineError, RuntimeError, OSError):
        free, found = available_memory(cpu), bandwidth or known_bandwidth(cpu)
        return _here(cpu, pick_dtype("auto", cpu), decode_programs(cpu), found, free)
    return None


def _here(
    device: torch.device,
    dtype: torch.dtype,
    decode: Sequence[MachineFeature],
    bandwidth: float | None,
    free: int | None,
) -> Here:
    works = [feature.name for feature in decode if feature.reason is None]
    on_native = bool(works) and works[0].startswith(NATIVE)
    on_cpu = NATIVE if on_native else "plain modules, CPU"
    program = PROGRAMS[works[0] if works and device.type == "cuda" else on_cpu]
    beside = None
    if device.type == "cuda" and native.problem() is None:
        with suppress(RuntimeError, OSError):
            beside = available_memory(torch.device("cpu"))
    return Here(device, dtype, program, on_native, bandwidth, free, beside)


def _worth_telling(here: Here) -> list[str]:
    """Return the catalogue models to report; quantised ones only if more than their download differs."""
    keeps_them = here.keeps_blocks or here.program is PROGRAMS["fused kernels, CUDA graph"]
    quantized = {name for name, file in HUB_FILES.items() if keeps_them and file.model in COMMON}
    return [name for name in names() if name in COMMON or name in quantized]


def measure_bandwidth(device: torch.device) -> float:
    """Measure the memory bandwidth of `device` in bytes/s, the median of several passes.

    On a GPU, copy within its memory and count the bytes read and written; on a CPU, read with all of torch's threads.
    Raises EngineError when there is no memory to measure with.
    """
    return _copy_bandwidth(device) if device.type == "cuda" else _read_bandwidth()


def _copy_bandwidth(device: torch.device) -> float:
    size = min(2**30, torch.cuda.mem_get_info(device)[0] // 4) // 2**20 * 2**20
    if not size:
        raise EngineError("the GPU's memory is full")
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    with torch.cuda.device(device):  # events are recorded on the stream of the current GPU
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(24)]  # type: ignore[no-untyped-call]
        for mark in marks:
            target.copy_(source)
            mark.record()
    wait_for(device)
    del source, target
    torch.cuda.empty_cache()
    # The first copies wake the GPU up.
    milliseconds: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks[3:])]
    return 2000 * size / median(milliseconds)


def _read_bandwidth() -> float:
    size = min(_READ_BYTES, available_memory(torch.device("cpu")) // 8)
    if size < 2**20:
        raise EngineError("the memory is full")
    buffer = torch.ones(size // 4)
    times: list[float] = []
    begun = perf_counter()
    while len(times) < 5 or (perf_counter() - begun < 0.5 and len(times) < 50):
        start = perf_counter()
        buffer.sum()
        times.append(perf_counter() - start)
    return size / median(times)


def decode_programs(device: torch.device) -> tuple[MachineFeature, ...]:
    """Return the ways to decode a token on `device`, fastest first; the first without a reason against it is used."""
    if device.type != "cuda":
        no_gpu = "it needs an NVIDIA GPU"
        return (
            MachineFeature(_native_name(), native.problem()),
            MachineFeature("fused kernels, CUDA graph", no_gpu),
            MachineFeature("plain modules, CUDA graph", no_gpu),
            MachineFeature("plain modules", None),
        )
    reason = on_gpu.problem(device)  # steps in graphs use our kernels, too
    return (
        MachineFeature("fused kernels, CUDA graph", reason),
        MachineFeature("plain modules, CUDA graph", reason),
        MachineFeature("plain modules", None),
    )


def _native_name() -> str:
    if native.problem() is not None:
        return NATIVE
    threads = native.default_threads()
    return f"{NATIVE}, {native.library().best_name}, {threads} thread{'s' if threads > 1 else ''}"


def advice(
    problem: CudaProblem | None,
    gpu: Gpu | None,
    attention: tuple[MachineFeature, ...],
    *,
    flash_attn: bool,
    triton: bool,
    no_native: str | None = None,
    no_triton: str | None = None,
    unused_cuda: bool = False,
) -> tuple[str, ...]:
    """Return what to install or change for better results on this machine, most valuable first.

    `no_native` is why there are no native kernels, `no_triton` why Triton, though installed, does not work;
    `unused_cuda` whether torch brings CUDA and there is no driver for it.
    """
    lines = []
    if problem is not None and problem.remedy:
        lines.append(f"{problem.what[:1].upper()}{problem.what[1:]}. {problem.remedy}")
    if gpu is None:
        if no_native is not None:
            why = f"{no_native[:1].upper()}{no_native[1:]}"
            lines.append(f"{why}; torch decodes more slowly, with expanded weights.")
        if unused_cuda:
            lines.append(
                "torch is the build for CUDA, and there is no NVIDIA driver; the build for CPUs takes gigabytes less: "
                f"{pip_torch('cpu')}"
            )
        return tuple(lines)
    if gpu.is_amd:
        lines.append(
            "The GPU is an AMD one: it computes with plain PyTorch, and quantised weights are expanded; "
            "our own kernels need an NVIDIA GPU."
        )
        return tuple(lines)
    if int(gpu.capability.removeprefix("sm_")) < 10 * FULL_SPEED[0] + FULL_SPEED[1]:
        lines.append(
            f"The GPU is older than {sm(FULL_SPEED)}: it computes in float16 with SDPA and plain modules; "
            "FlashAttention, the fused kernels and bfloat16 need a newer one."
        )
        return tuple(lines)
    if not triton:
        lines.append("Triton is missing, so nothing is fused and decoding is slower: pip install triton")
    elif no_triton is not None:
        lines.append(
            f"{no_triton}. Until then nothing is fused, quantised weights are expanded, and all is slower."
        )
    if not flash_attn:
        lines.append(
            "flash-attn is missing, so long prompts are read more slowly: "
            "pip install 'flash-attn>=2.8,<3' --no-build-isolation (it is compiled, which needs the CUDA toolkit)"
        )
    broken = [part.reason for part in attention if part.reason and "installed but" in part.reason]
    lines += [f"Reinstall what is broken: {reason}" for reason in broken]
    return tuple(lines)


def _splits(speeds: tuple[Speed, ...], here: Here, links: Links | None) -> tuple[SplitSpeed, ...]:
    if links is None or not links.direct:
        return ()
    files = (HUB_FILES.get(speed.name) for speed in speeds)
    specs = (
        known_shape(file.model if file else speed.name) for file, speed in zip(files, speeds, strict=True)
    )
    found = (split(speed, spec, here, links.count) for speed, spec in zip(speeds, specs, strict=True))
    return tuple(one for one in found if one is not None)


def _attention(device: torch.device, dtype: torch.dtype) -> tuple[MachineFeature, ...]:
    return tuple(MachineFeature(name, reason) for name, reason in usable_backends(device, dtype))


def _no_triton(device: torch.device) -> str | None:
    return None if device.type != "cuda" or is_unfit(device) else on_gpu.triton_problem(device)


def _tunings(device: torch.device) -> tuple[Tuning, ...]:
    if on_gpu.problem(device) is not None:
        return ()
    from engine.execute.cuda.tuner import machine_identity

    return tuple(all_kept(machine_identity(device)))


def _gpu(device: torch.device) -> Gpu:
    free, total = torch.cuda.mem_get_info(device)
    return Gpu(
        name=torch.cuda.get_device_name(device),
        capability=_architecture(device),
        memory_free=free,
        memory_total=total,
        count=torch.cuda.device_count(),
        number=device.index or 0,
        is_amd=is_amd(),
    )


def _architecture(device: torch.device) -> str:
    if is_amd():
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    return sm(torch.cuda.get_device_capability(device))


def _cpu() -> Cpu:
    text = "\n".join(lines(PROC / "cpuinfo"))
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        cores = os.cpu_count() or 1
    return Cpu(
        name=cpu_name(),
        cores=cores,
        instructions=tuple(label for flag, label in _INSTRUCTIONS.items() if flag in present),
    )


def _memory_total() -> int:
    return min(((total_memory() or 0), *(limit for limit, _ in group_limits())))


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        if name == "torch":
            versions[name] = str(torch.__version__)
            continue
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if _installed(name.replace("-", "_")):
                versions[name] = "(version unknown)"
    return versions


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
