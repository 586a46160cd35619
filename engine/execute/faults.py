"""Errors of torch and the GPU, explained to people."""

import ctypes

import torch

from engine.errors import EngineError, GpuLostError, OutOfRoomError
from engine.kernels.recording import wait_for
from models.errors import ModelError
from models.loading.load import is_out_of_memory

_LOST = (
    *("unspecified launch failure", "illegal memory access", "device-side assert", "misaligned address"),
    *("illegal instruction", "invalid program counter", "hardware stack error", "launch timed out"),
    *("uncorrectable", "context is destroyed", "CUDA error: unknown error"),
    *("no CUDA-capable device", "device is lost", "GPU is lost"),
)
"""Words in errors after which this process can no longer use the GPU: after a failed kernel, a reset or a sleep."""


def explain(error: Exception, remedy: str = "Try again.") -> EngineError:
    """Return an error for people, of one line that ends with `remedy` if the cause is unknown.

    The conversation is intact: the rows of the step were not noted, and its blocks have been released.
    """
    if is_out_of_memory(error):
        return EngineError(
            "Out of memory; the conversation is intact. Close other programs, or start with a smaller --context."
        )
    if isinstance(error, EngineError):
        return error
    if isinstance(error, ModelError):
        return EngineError(str(error))
    if (lost := lost_gpu(error)) is not None:
        return lost
    text = first_line(error) if isinstance(error, RuntimeError) else repr(error)
    return EngineError(f"The computation failed ({text[:200]}); the conversation is intact. {remedy}")


def not_loaded(error: RuntimeError) -> EngineError:
    """Return an error for people, of one line, for one that torch raised while a GPU was prepared for a model."""
    if is_out_of_memory(error):
        return OutOfRoomError(
            "Out of memory while the GPU was made ready for the model. Close other programs, choose a smaller model, "
            "or use --device cpu."
        )
    failed = f"The GPU could not be made ready for the model ({first_line(error)}). Use --device cpu."
    return lost_gpu(error) or EngineError(failed)


def lost_gpu(error: BaseException) -> GpuLostError | None:
    """Return an error for people if this process can no longer use the GPU; None if it still can."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return None
    if not any(words in str(error) for words in _LOST) and _answers():
        return None
    why = first_line(error).removeprefix("CUDA error: ")
    return GpuLostError(f"The GPU was lost ({why}); the conversation is intact. Restart chatterm.")


def never_free(owner: object) -> None:
    """Keep `owner`, with all the memory that it holds, until the process has ended.

    Torch calls the GPU to free pinned memory. If the GPU is lost, the call fails, and torch ends the process with a
    stack trace, at the latest when Python clears its modules.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def _answers() -> bool:
    """Return whether the GPU still accepts calls; True if this process uses none.

    After an error that lasts, every later call fails with it.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        wait_for(torch.device("cuda"))
    except RuntimeError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters, without the full stop.

    That of a kernel that does not compile is the last one; source code and where in it something is wrong precede it.
    """
    lines = str(error).strip().splitlines() or [repr(error)]
    said = lines[-1] if type(error).__name__ == "CompilationError" else lines[0]
    return said.strip()[:200].rstrip(".")
