"""The library of native kernels (engine/kernels/native): finding it, its functions, its threads.

The library is optional. If there was no compiler at install, it is missing, and `problem()` says why.
"""

import ctypes
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from engine.errors import EngineError
from engine.kernels.native import compile as compiling
from models.spec import Activation
from models.weights.cgroups import PROC, groups, lines

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).parent
_PROCESSORS = Path("/sys/devices/system/cpu")
VARIANT_NAMES = {
    "portable": "portable C++",
    "avx2": "AVX2",
    "avxvnni": "AVX2 with VNNI",
    "avx512": "AVX-512 with VNNI",
    "avx512bf16": "AVX-512 with VNNI and BF16",
    "dotprod": "NEON with dot products",
    "i8mm": "NEON with products of int8 matrices",
}
"""Names of the kernel variants for people."""

IMPOSSIBLE = -2
"""CT_IMPOSSIBLE"""
ROWS, MAPPED, INTERLEAVED = 0, 1, 2
"""The values of ct_storage."""

MOST_PARTS = 5
"""CT_MOST_PARTS"""

_Pointer, _Int, _Long, _Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields_of_type(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Return fields that share one type."""
    return [(name, kind) for name in names]


class Matrix(ctypes.Structure):
    """ct_matrix: the rows of a weight in memory."""

    _fields_: ClassVar = [
        ("data", _Pointer),
        ("row_bytes", _Long),
        *_fields_of_type(_Int, "type", "rows", "columns", "storage"),
    ]


class Linear(ctypes.Structure):
    """ct_linear: matrices with the same input, side by side in the output."""

    _fields_: ClassVar = [
        ("parts", Matrix * MOST_PARTS),
        ("bias", _Pointer),
        *_fields_of_type(_Int, "count", "unused"),
    ]


class Norm(ctypes.Structure):
    """ct_norm: all zeros mean no norm."""

    _fields_: ClassVar = [*_fields_of_type(_Pointer, "weight", "bias"), ("eps", _Float), ("centred", _Int)]


class Attention(ctypes.Structure):
    """ct_attention: the attention settings of one layer."""

    _fields_: ClassVar = [
        *_fields_of_type(Norm, "head_norm", "v_norm"),
        *_fields_of_type(_Pointer, "rotary", "sinks"),
        *_fields_of_type(_Int, "together", "later", "rotated", "interleaved", "window"),
        *_fields_of_type(_Float, "scale", "cap", "beta"),
        *_fields_of_type(_Int, "original", "q_heads", "kv_heads", "head_dim", "shares_kv", "v_is_k"),
        *_fields_of_type(_Int, "gate", "unused"),
    ]


class Latent(ctypes.Structure):
    """ct_latent: what latent attention multiplies by; all zeros mean that a layer has none."""

    _fields_: ClassVar = [
        *_fields_of_type(Norm, "q_norm", "kv_norm"),
        *_fields_of_type(Linear, "q_b", "k_b", "v_b"),
        *_fields_of_type(_Int, "kv_rank", "nope", "rope", "values"),
    ]


class Convolution(ctypes.Structure):
    """ct_convolution: a short convolution in place of attention; all zeros mean none."""

    _fields_: ClassVar = [
        *_fields_of_type(_Pointer, "filters", "bias"),
        *_fields_of_type(_Int, "width", "size", "type", "unused"),
    ]


DELTA_NET, MAMBA2 = range(2)
"""The kinds of recurrences, as in ct_recurrence_kind."""


class Recurrence(ctypes.Structure):
    """ct_recurrence: a recurrence in place of attention; all zeros mean none."""

    _fields_: ClassVar = [
        *_fields_of_type(_Pointer, "states", "filters", "bias", "decay", "dt_bias", "skip", "factors"),
        ("norm", Norm),
        *_fields_of_type(_Int, "kind", "width", "key_heads", "value_heads", "key_dim", "value_dim"),
        *_fields_of_type(_Int, "alternating", "norms_first", "type"),
        *_fields_of_type(_Float, "least", "most"),
        ("unused", _Int),
    ]


class Kept(ctypes.Structure):
    """ct_kept: where a layer keeps rows in the KV cache."""

    _fields_: ClassVar = [
        *_fields_of_type(_Pointer, "k", "v"),
        ("slots", _Long),
        *_fields_of_type(_Int, "table", "unused"),
    ]


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "xielu", "relu2")
"""In the order of ct_activation."""


class Feed(ctypes.Structure):
    """ct_feed: a feed-forward."""

    _fields_: ClassVar = [
        *_fields_of_type(Linear, "gate_up", "down"),
        *_fields_of_type(_Int, "activation", "gated"),
        *_fields_of_type(_Float, "gain", "limit", "up_offset", "alpha_p", "alpha_n"),
        ("unused", _Int),
    ]


class Experts(ctypes.Structure):
    """ct_experts: a mixture of experts."""

    _fields_: ClassVar = [
        ("router", Linear),
        *_fields_of_type(Norm, "router_norm", "norm", "post_norm", "shared_norm", "shared_post_norm"),
        *_fields_of_type(_Pointer, "selection_bias", "expert_scales"),
        *_fields_of_type(ctypes.POINTER(Feed), "experts", "shared"),
        *_fields_of_type(_Int, "count", "chosen", "sigmoid", "renormalise", "shared_gate"),
        *_fields_of_type(_Int, "groups", "chosen_groups", "group_best"),
        *_fields_of_type(_Float, "router_scale", "scale"),
    ]


class LayerInput(ctypes.Structure):
    """ct_layer_input: what a layer adds to its result; all zeros mean nothing."""

    _fields_: ClassVar = [("feed", Feed), ("post_norm", Norm)]


class Layer(ctypes.Structure):
    """ct_layer: a layer with all its parts."""

    _fields_: ClassVar = [
        *_fields_of_type(Norm, "input_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        ("attention", Attention),
        ("latent", Latent),
        ("convolution", Convolution),
        ("recurrence", Recurrence),
        ("kept", Kept),
        *_fields_of_type(Linear, "qkv", "output"),
        ("feed", Feed),
        ("experts", ctypes.POINTER(Experts)),
        ("input", LayerInput),
        *_fields_of_type(_Float, "residual_scale", "scalar"),
        *_fields_of_type(_Int, "parallel", "beside"),
    ]


class Inputs(ctypes.Structure):
    """ct_inputs: how the inputs of all layers are made; all zeros mean that there are none."""

    _fields_: ClassVar = [
        ("embedding", Matrix),
        ("projection", Linear),
        ("norm", Norm),
        ("scale", _Float),
        ("size", _Int),
    ]


class Model(ctypes.Structure):
    """ct_model: a whole network."""

    _fields_: ClassVar = [
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", Norm),
        *_fields_of_type(Matrix, "embedding", "learned"),
        ("head", Linear),
        ("inputs", Inputs),
        *_fields_of_type(_Int, "layer_count", "hidden", "positions"),
        *_fields_of_type(_Float, "embedding_scale", "logit_cap"),
        ("unused", _Int),
    ]


class Cache(ctypes.Structure):
    """ct_cache: the KV cache."""

    _fields_: ClassVar = _fields_of_type(_Int, "type", "block_size", "tables", "states")


class MixtureJob(ctypes.Structure):
    """ct_mixture_job: a mixture of experts for some rows."""

    _fields_: ClassVar = [
        *_fields_of_type(_Pointer, "mixtures", "x", "ids", "shares", "out"),
        *_fields_of_type(_Int, "layer", "rows", "type", "unused"),
    ]


class Sampling(ctypes.Structure):
    """ct_sampling: how a token is drawn."""

    _fields_: ClassVar = [
        ("chance", ctypes.c_double),
        *_fields_of_type(_Pointer, "room", "seen", "generated", "mask"),
        *_fields_of_type(_Float, "repetition", "presence", "frequency", "temperature", "top_p", "min_p"),
        *_fields_of_type(_Int, "top_k", "count"),
    ]


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ct_source_hash": (ctypes.c_char_p, ()),
    "ct_variants": (_Int, ()),
    "ct_variant_name": (ctypes.c_char_p, (_Int,)),
    "ct_variant_works": (_Int, (_Int,)),
    "ct_pool_create": (_Pointer, (_Int,)),
    "ct_pool_working": (None, (_Pointer, _Int)),
    "ct_pool_destroy": (None, (_Pointer,)),
    "ct_decoder_create": (
        _Pointer,
        (ctypes.POINTER(Model), ctypes.POINTER(Cache), _Pointer, _Int, ctypes.POINTER(ctypes.c_char_p)),
    ),
    "ct_decoder_destroy": (None, (_Pointer,)),
    "ct_decoder_run": (ctypes.c_char_p, (_Pointer, _Pointer, _Int, _Pointer)),
    "ct_decoder_interleave": (_Long, (_Pointer, _Long)),
    "ct_multiplier_create": (_Pointer, (_Pointer, _Int, _Int, _Int)),
    "ct_multiplier_destroy": (None, (_Pointer,)),
    "ct_multiplier_run": (_Int, (_Pointer, ctypes.POINTER(Linear), _Int, _Pointer, _Pointer)),
    "ct_mixtures_create": (
        _Pointer,
        (ctypes.POINTER(Experts), _Int, _Int, _Pointer, _Int, ctypes.POINTER(ctypes.c_char_p)),
    ),
    "ct_mixtures_destroy": (None, (_Pointer,)),
    "ct_mixtures_run": (None, (ctypes.POINTER(MixtureJob),)),
    "ct_sample": (_Int, (_Int, _Pointer, ctypes.POINTER(Sampling))),
    "ct_crc32_works": (_Int, ()),
    "ct_crc32": (ctypes.c_uint32, (_Pointer, _Long)),
    "ct_products": (_Int, (_Pointer, _Int, ctypes.POINTER(Matrix), _Int, _Pointer, _Pointer)),
    "ct_interleave": (_Int, (ctypes.POINTER(Matrix), _Pointer)),
    "ct_dequantize_row": (_Int, (ctypes.POINTER(Matrix), _Int, _Pointer)),
}
"""Result and argument types of every function of chatterm_native.h."""


class NativeError(EngineError):
    """Raised if the library is missing or cannot do what was asked; the text is the middle of a sentence."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library, and the variants that this machine runs."""

    functions: Any
    """A ctypes.CDLL with typed functions; calls release the interpreter's lock."""
    variants: dict[str, int]
    """Indices of the variants that work here, by name, the best one last."""

    @property
    def best(self) -> int:
        """The index of the fastest variant on this machine."""
        return max(self.variants.values())

    @property
    def best_name(self) -> str:
        """The name of the fastest variant, for people."""
        name = next(name for name, number in self.variants.items() if number == self.best)
        return VARIANT_NAMES[name]


@cache
def library() -> NativeLibrary:
    """Return the library beside its sources. Raises NativeError if it is missing or does not match them."""
    return open_library(FOLDER / compiling.library_name())


def open_library(path: Path) -> NativeLibrary:
    """Load a library from a file. Raises NativeError if that fails or if it was built from other sources."""
    if sys.byteorder != "little":
        raise NativeError("the native kernels are for little-endian machines")
    if not path.exists():
        raise NativeError("the native kernels are not built; install a C++ compiler and then chatterm again")
    try:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NativeError(
            f"the native kernels cannot be loaded ({' '.join(str(error).split())[:200]})"
        ) from None
    # A library built from other sources would read the structs at the wrong offsets.
    if functions.ct_source_hash().decode() != compiling.source_hash():
        raise NativeError("the native kernels were built from other sources; install chatterm again")
    works = [number for number in range(functions.ct_variants()) if functions.ct_variant_works(number)]
    return NativeLibrary(functions, {functions.ct_variant_name(number).decode(): number for number in works})


def problem() -> str | None:
    """Return why there are no native kernels here, as the middle of a sentence; None if there are."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return None


def sample(logits: "Tensor", how: Sampling, mask: "Tensor | None" = None) -> int:
    """Draw a token from fp32 logits [how.count] by `how.chance`; -1 if a logit is NaN or the largest is not finite.

    Only tokens whose bits are set in int32 `mask` [(count + 31) / 32] may be drawn. Raises NativeError if there is too
    little memory, ValueError if the sizes differ.
    """
    given, found = logits.contiguous(), library()
    words = mask.contiguous() if mask is not None else None
    if len(given) != how.count:
        raise ValueError(f"There are {len(given)} logits and not {how.count}.")
    if words is not None and len(words) * 32 < how.count:
        raise ValueError(f"The mask has {len(words)} words for {how.count} logits.")
    how.mask = words.data_ptr() if words is not None else None
    token = int(found.functions.ct_sample(found.best, given.data_ptr(), how))
    if token == IMPOSSIBLE:
        raise NativeError("memory is short")
    return token


class Pool:
    """A team of threads in the library. They spin for some 100 µs after a step and then sleep."""

    def __init__(self, threads: int | None = None, using: NativeLibrary | None = None) -> None:
        """`threads` includes the caller (None: `default_threads`). Raises NativeError if they cannot be started."""
        self.library = using or library()
        functions = self.library.functions
        self.threads = threads or default_threads()
        self.working = self.threads
        self._handle = functions.ct_pool_create(self.threads)
        if not self._handle:
            raise NativeError(f"{self.threads} threads cannot be started")
        self._lock = Lock()
        self._process = os.getpid()
        # When the program exits, a thread may still be within a step; the system ends all threads.
        weakref.finalize(self, _destroy_pool, functions, self._handle, self._process).atexit = False

    @contextmanager
    def held(self) -> Iterator[int]:
        """Yield the handle, to one caller at a time. Raises NativeError in a forked process: it lacks the threads."""
        if os.getpid() != self._process:
            raise NativeError("the threads of the native kernels do not exist in the forked process")
        with self._lock:
            yield self._handle

    def set_working(self, threads: int) -> None:
        """Set how many of the threads compute from now on, callers included; the results are the same to the bit."""
        with self.held() as handle:
            self.library.functions.ct_pool_working(handle, threads)
        self.working = threads


def _destroy_pool(functions: Any, handle: int, process: int) -> None:
    if os.getpid() == process:
        functions.ct_pool_destroy(handle)


def default_threads() -> int:
    """Return how many physical cores to compute with: those of this process, less one for the screen if more than two.

    If some are slow, return at most the number of fast ones: the screen then runs on a slow one.
    """
    cores = physical_cores()
    threads = cores - 1 if cores > 2 else cores
    return min(threads, fast_cores() or threads)


def check_threads(threads: int | None) -> None:
    """Raise EngineError if this machine does not have that many processors."""
    most = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= most:
        raise EngineError(f"--threads is {threads}; it must be from 1 to {most} on this machine.")


def physical_cores() -> int:
    """Return how many physical cores this process may use, within the CPU quotas of its cgroups; at least 1."""
    if not hasattr(os, "sched_getaffinity"):
        return _sysctl("hw.physicalcpu") or os.cpu_count() or 1
    return max(1, min([len(core_speeds()), *processor_quotas()]))


def fast_cores() -> int | None:
    """Return how many physical cores of this process have at least half the speed of the fastest.

    Return None if all have, or if the system does not say. On a Mac, return the number of performance cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        cores, fast = _sysctl("hw.physicalcpu"), _sysctl("hw.perflevel0.physicalcpu")
        return fast if cores and fast and fast < cores else None
    speeds = core_speeds()
    count = sum(2 * speed >= max(speeds) for speed in speeds)
    return count if count < len(speeds) else None


def core_speeds(folder: Path = _PROCESSORS) -> list[int]:
    """Return the relative speeds of this process's physical cores, in no unit; all equal if the system does not say."""
    cores = {}  # by a text that all processors of a core have in common
    for processor in os.sched_getaffinity(0):
        path = folder / f"cpu{processor}"
        siblings = lines(path / "topology/thread_siblings_list")
        cores[siblings[0].strip() if siblings else str(processor)] = path
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = ["".join(lines(path / name)) for path in cores.values()]
        if all(speed.isdigit() for speed in speeds):
            return [int(speed) for speed in speeds]
    return [1] * len(cores)


def _sysctl(name: str) -> int | None:
    """Return the number that macOS reports under this name; None if it does not."""
    try:
        told = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True).stdout.strip()
    except OSError:
        return None
    return int(told) if told.isdigit() else None


def processor_quotas(proc: Path = PROC) -> list[int]:
    """Return the CPU quota of each cgroup around this process that has one, in processors, rounded up."""
    try:
        folders = list(groups("cpu", proc))
    except (ValueError, IndexError):  # not in the format of the manual: no limit is known
        return []
    found = [_cgroup_processors(folder / "cpu.max") or _v1_processors(folder) for folder in folders]
    return [processors for processors in found if processors is not None]


def _cgroup_processors(path: Path) -> int | None:
    """Return how many processors a container may keep busy, rounded up; None if there is no limit."""
    return _rounded_up("".join(lines(path)).split())


def _v1_processors(folder: Path) -> int | None:
    return _rounded_up(["".join(lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period")])


def _rounded_up(quota_and_period: list[str]) -> int | None:
    """Return the quotient of two numbers; None if they say that there is no limit: "max 100000" or "-1 100000"."""
    try:
        quota, period = map(int, quota_and_period)
        return None if quota < 0 else max(1, -(-quota // period))
    except (ValueError, ZeroDivisionError):
        return None
