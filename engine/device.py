"""The devices, dtypes and memory of this machine."""

import ctypes
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from engine.errors import EngineError, check_device
from models.system import total_memory
from models.weights.cgroups import PROC, lines
from models.weights.memory import available_bytes

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


FULL_SPEED = (8, 0)
"""The lowest compute capability with bf16, FlashAttention and the fused kernels."""
MOST_ON_CPU = 16
"""The most processes that may compute a model together on a CPU, which is meant for tests."""
_CUDA = torch.device("cuda")
_DRIVER = PROC / "driver/nvidia/version"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where the model runs. `notes` are lines to show once: why it is not the GPU, or what is off there."""

    device: torch.device
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaProblem:
    """The reason why torch cannot use an NVIDIA GPU. `what` fits into the middle of a sentence."""

    what: str
    remedy: str = ""
    """What to do about it, as sentences; empty if there simply is no GPU."""


def pick_device(name: str) -> DeviceChoice:
    """Return the device for "auto", "cpu", "cuda" or one GPU of several, such as "cuda:1".

    "auto" and "cuda" take the first GPU. If that cannot be used, "auto" takes the CPU, with a note that says why if
    there is a GPU. Raises EngineError if a device that was asked for cannot be used.
    """
    check_device(name)
    if name == "cpu":
        return DeviceChoice(torch.device("cpu"))
    device = torch.device("cuda" if name == "auto" else name)
    problem = cuda_problem(device)
    if problem is None:
        return DeviceChoice(device, _old_gpu_notes(device))
    if name != "auto":
        remedy = problem.remedy or "Use --device cpu or auto."
        raise EngineError(f"--device {name} cannot be used: {problem.what}. {remedy}")
    if not problem.remedy:
        return DeviceChoice(torch.device("cpu"))
    note = f"The model runs on the CPU because {problem.what}. {problem.remedy}"
    return DeviceChoice(torch.device("cpu"), (note,))


def check_parallel(ranks: int, device: torch.device) -> None:
    """Raise EngineError unless `ranks` devices can compute a model together."""
    if ranks < 1:
        raise EngineError(f"--tensor-parallel is {ranks}; it must be 1 or more.")
    if ranks > 1 and sys.platform == "win32":
        raise EngineError(
            f"--tensor-parallel {ranks} does not work on Windows, where processes cannot share sockets."
        )
    if device.index and ranks > 1:
        raise EngineError(
            f"--tensor-parallel uses the first GPUs, and --device {device} names one; use --device cuda."
        )
    if device.type == "cpu" and ranks > MOST_ON_CPU:
        raise EngineError(
            f"--tensor-parallel {ranks} would start as many processes on this CPU; {MOST_ON_CPU} are the most."
        )
    if device.type == "cuda" and ranks > (there := torch.cuda.device_count()):
        gpus = "1 GPU" if there == 1 else f"{there} GPUs"
        raise EngineError(f"--tensor-parallel {ranks} needs as many GPUs, and this machine has {gpus}.")


def check_tunable(name: str = "auto") -> None:
    """Raise EngineError unless the GPU `name` runs the fused kernels, which alone can be tuned and profiled."""
    what, remedy, device = "", "", torch.device(name if name.startswith("cuda") else "cuda")
    if (problem := cuda_problem(device)) is not None:
        what, remedy = problem.what, problem.remedy
    elif is_amd():
        what = f"{torch.cuda.get_device_name(device)} is an AMD GPU"
    elif (capability := torch.cuda.get_device_capability(device)) < FULL_SPEED:
        what = f"{torch.cuda.get_device_name(device)} ({sm(capability)}) is older than {sm(FULL_SPEED)}"
    elif find_spec("triton") is None:
        what, remedy = "triton is not installed", "Install it: pip install triton"
    if what:
        remedy = remedy or f"Use a machine with an NVIDIA GPU of {sm(FULL_SPEED)} or newer."
        raise EngineError(f"Only the fused kernels of a GPU can be tuned or profiled, and {what}. {remedy}")


def cuda_problem(device: torch.device = _CUDA) -> CudaProblem | None:
    """Return why a GPU cannot be used; None if it can. Suppresses torch's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return _no_such_gpu(device) or _unsupported_gpu(device)
        if torch.version.cuda is None:
            what = f"this torch ({torch.__version__}) was built without CUDA"
            return CudaProblem(what, _install_cuda_torch()) if has_nvidia_driver() else CudaProblem(what)
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # is_available() does not say why
        except (RuntimeError, AssertionError) as error:
            return _failed_start(error)
    return CudaProblem("no usable NVIDIA GPU was found")


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is installed on this machine, without asking torch."""
    return _DRIVER.exists() or shutil.which("nvidia-smi") is not None


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver can run, such as (13, 0); None without a driver."""
    version = ctypes.c_int()
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            if ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
                return version.value // 1000, version.value % 1000 // 10
        except (OSError, AttributeError):
            continue
    return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None without one. Raises EngineError if nvidia-smi fails."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", "\n".join(lines(_DRIVER)))
    if found:
        return found[1]
    if not has_nvidia_driver():
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    said, *_ = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).split("\n")
    if done.returncode:
        raise EngineError(f"nvidia-smi says: {said or f'exit code {done.returncode}'}")
    return said.strip() or None


def _failed_start(error: Exception) -> CudaProblem:
    reason = (str(error).splitlines() or [""])[0].strip()
    if "driver" in reason and "too old" in reason:
        found = re.search(r"found version (\d+)", reason)
        number = int(found[1]) if found else 0
        cuda = f"CUDA {number // 1000}.{number % 1000 // 10}" if number else "an older CUDA"
        what = f"the NVIDIA driver is too old for this torch: it supports {cuda}, torch needs {torch.version.cuda}"
        older = f", or use an older CUDA: {pip_torch('cu126')}" if number >= 12_000 else "."
        return CudaProblem(what, f"Update the driver (580 or newer){older}")
    if "Found no NVIDIA driver" in reason or "No CUDA GPUs" in reason:
        return CudaProblem("no usable NVIDIA GPU was found")
    return CudaProblem(f"CUDA failed to start ({reason[:200]})", "Restart the machine or repair the driver.")


def _no_such_gpu(device: torch.device) -> CudaProblem | None:
    """Return a problem if there is no GPU with this number; otherwise None."""
    there = torch.cuda.device_count()
    if device.index is None or device.index < there:
        return None
    names = ", ".join(f"cuda:{number}" for number in range(there))
    return CudaProblem(f"this machine has {there} GPU{'s' * (there > 1)}", f"Use one of: {names}.")


def _unsupported_gpu(device: torch.device) -> CudaProblem | None:
    """Return the problem if this torch has no code for the GPU."""
    capability = torch.cuda.get_device_capability(device)
    if is_amd() or runs_on(capability, torch.cuda.get_arch_list()):
        return None
    what = f"this build of torch does not support {torch.cuda.get_device_name(device)} ({sm(capability)})"
    # The builds for CUDA 12.6 are the last for Maxwell, Pascal and Volta; those for CUDA 13 support the newest GPUs.
    build = "cu126" if (5, 0) <= capability < (7, 5) else "cu130"
    return CudaProblem(what, f"Another build may have: {pip_torch(build)}")


def runs_on(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Return whether code for `built_for` ("sm_80", "compute_120", ...) runs on a GPU of this compute capability.

    Machine code (sm) runs on GPUs with the same major and no smaller minor number, intermediate code (compute) on
    every later one. An empty list says nothing and counts as yes.
    """
    number = 10 * capability[0] + capability[1]
    for arch in built_for:
        kind, _, digits = arch.partition("_")
        code = int(re.sub(r"\D", "", digits) or 0)
        if code <= number and (kind == "compute" or code // 10 == capability[0]):
            return True
    return not built_for


def is_amd() -> bool:
    """Return whether torch was built for AMD GPUs (ROCm), where our kernels do not run. It calls them "cuda", too."""
    return torch.version.hip is not None


def is_unfit(device: torch.device) -> bool:
    """Return whether none of our kernels run on this kind of GPU, which `pick_device` reports in a note."""
    return is_amd() or torch.cuda.get_device_capability(device) < FULL_SPEED


def has_pdl(device: torch.device) -> bool:
    """Return whether kernels may start while the previous one ends (programmatic dependent launch of NVIDIA)."""
    return device.type == "cuda" and not is_amd() and torch.cuda.get_device_capability(device) >= (9, 0)


def sm(capability: tuple[int, int]) -> str:
    """Return a compute capability as compilers write it: "sm_90"."""
    return f"sm_{capability[0]}{capability[1]}"


def _old_gpu_notes(device: torch.device) -> tuple[str, ...]:
    capability = torch.cuda.get_device_capability(device)
    if is_amd():
        return (
            f"{torch.cuda.get_device_name(device)} computes with plain PyTorch, which is slower: our own kernels, CUDA "
            "graphs and quantised weights in the GPU's memory are for NVIDIA GPUs. Nobody has tested AMD GPUs.",
        )
    if capability >= FULL_SPEED:
        return ()
    return (
        f"{torch.cuda.get_device_name(device)} ({sm(capability)}) is older than {sm(FULL_SPEED)}: bfloat16, "
        "FlashAttention and the fused kernels are off; it computes in float16 with SDPA and plain modules.",
    )


def _install_cuda_torch() -> str:
    cuda = driver_cuda()
    if cuda is not None and cuda < (12, 0):
        return f"Update the NVIDIA driver (580 or newer), then {pip_torch('cu130')}"
    return f"To use the GPU: {pip_torch('cu126' if cuda is not None and cuda < (13, 0) else 'cu130')}"


def pip_torch(build: str) -> str:
    """Return the command that installs a build of torch: "cpu", "cu130", ..."""
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for "auto" or a name in DTYPES: bf16 if the device can, because decoding reads every weight.

    Raises EngineError for an unknown name.
    """
    if name == "auto":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FULL_SPEED:
            return torch.float16
        return torch.bfloat16
    if name not in DTYPES:
        raise EngineError(f"Unknown dtype {name!r}; it must be auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on `device` without swapping, on a CPU within a container's limits.

    On a CPU, cached files count as free because the system can drop them; that includes mapped weights.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = available_bytes(device)
    # Elsewhere (macOS) only the total can be read without a library; half of it is a safe guess.
    return known if known is not None else (total_memory() or 0) // 2
