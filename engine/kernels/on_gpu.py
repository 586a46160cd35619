"""Whether our GPU kernels run here: which GPUs they are for, and whether Triton, which compiles them, works.

Triton compiles its launchers with a C compiler and Python's headers. Whether they are needed is found out by launching
a tiny kernel: launchers in Triton's cache need neither.
"""

import os
import shutil
import subprocess
import sysconfig
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from engine.device import FULL_SPEED, cuda_problem, is_amd, sm
from models.loading.load import is_out_of_memory

_HEADERS = "python3-dev (on Fedora python3-devel)"
_AMD = "this is an AMD GPU, and our kernels are for NVIDIA's"


class _MissingError(RuntimeError):
    """Triton has to compile something and cannot. The message is a reason as `problem` returns it."""


def problem(device: torch.device) -> str | None:
    """Return why our kernels do not run on `device`, as the middle of a sentence; None if they do."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if is_amd():
        return _AMD
    if (capability := torch.cuda.get_device_capability(device)) < FULL_SPEED:
        return f"it needs {sm(FULL_SPEED)} or newer, this GPU is {sm(capability)}"
    return triton_problem(device)


def problem_here() -> str | None:
    """Return `problem` of this machine's first GPU; None if there is no GPU that torch can use."""
    return problem(torch.device("cuda")) if cuda_problem() is None else None


def triton_problem(device: torch.device) -> str | None:
    """Return why Triton does not work on `device`, a GPU, as the middle of a sentence; None if it does."""
    if is_amd():
        return _AMD
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        return tried(device)
    except (RuntimeError, MemoryError):  # no memory for a trial: loading a model reports that
        return None


@cache
def tried(device: torch.device) -> str | None:
    """Launch a tiny kernel and return what `triton_problem` does. Raises torch's error if memory runs out."""
    try:
        if (reason := missing()) is not None:
            _compile_nothing(reason)
        from engine.kernels.triton.trial import runs

        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return None if runs(device) else "Triton computes wrong results here"
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return in_words(error)  # compilers, drivers and file systems raise all sorts


def in_words(error: Exception) -> str:
    """Return why Triton's first launch failed and what to do about it, as the middle of a sentence."""
    if isinstance(error, _MissingError):
        return str(error)
    if isinstance(error, subprocess.CalledProcessError):
        return f"Triton's C compiler fails here ({Path(error.cmd[0]).name}): install gcc and {_HEADERS}"
    said = (str(error).strip().splitlines() or [repr(error)])[0]
    if "C compiler" in said:
        return "Triton needs a C compiler: install gcc"
    if "libcuda" in said or "ldconfig" in said:
        return "Triton does not find libcuda.so.1: set TRITON_LIBCUDA_PATH to the folder that has it"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        where = f"Triton cannot write to {Path(os.fsdecode(error.filename)).parent} ({error.strerror})"
        return f"{where}: set TRITON_CACHE_DIR to a folder that can be written to"
    return f"Triton does not work here ({type(error).__name__}: {said[:200].rstrip('.')})"


def missing() -> str | None:
    """Return what Triton lacks to compile its launchers and what to install, for a sentence; None if nothing."""
    if os.name != "posix":  # elsewhere Triton brings its compiler
        return None
    named = os.environ.get("CC")
    compiler = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if named and compiler is None:
        return (
            f"Triton needs a C compiler, and there is no {named[:80]}: correct the variable CC, or unset it"
        )
    lacks, packages = [], []
    if compiler is None:
        lacks.append("a C compiler")
        packages.append("gcc")
    if not _has_headers(compiler):
        lacks.append("Python's headers")
        packages.append(_HEADERS)
    return f"Triton needs {' and '.join(lacks)}: install {' and '.join(packages)}" if lacks else None


def _has_headers(compiler: str | None) -> bool:
    """Return whether Python.h is in the folder that Python names, or else in one that `compiler` searches."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    folder = sysconfig.get_paths(scheme)["include"]
    if (Path(folder) / "Python.h").exists() or compiler is None:
        return (Path(folder) / "Python.h").exists()
    command = [compiler, "-fsyntax-only", "-x", "c", "-"]
    return subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True).returncode == 0


def _compile_nothing(reason: str) -> None:
    """Have Triton raise `reason` instead of calling a compiler, which would write to the terminal."""
    from triton import knobs

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise _MissingError(reason)

    knobs.build.impl = refuse
