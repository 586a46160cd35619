"""Mixtures of experts on the native kernels, for a network whose other parts are computed elsewhere.

The plain twin is the loop over experts in `models/reference/decoder.py`. Inputs of quantised experts are rounded to
int8, in groups of 32 numbers with a common scale.
"""

import ctypes
import weakref
from collections.abc import Mapping

from torch import Tensor

from engine.execute.cpu.native_structs import NativeStructs
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.network import PLAIN, ExpertWeights
from models.spec import Experts


class NativeMixtures:
    """The routed experts of some layers. The bits of a row do not depend on the other rows."""

    def __init__(
        self,
        layers: Mapping[int, tuple[Experts, ExpertWeights]],
        hidden: int,
        pool: Pool,
        variant: int | None = None,
    ) -> None:
        """`layers` maps layer numbers to experts; `variant` indexes `pool.library.variants`, None is the best.

        Raises NativeError for experts of inconsistent shapes and for weights without kernels.
        """
        self._pool = pool
        self._functions = pool.library.functions
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._told = NativeStructs()
        told = [self._told.experts_alone(spec, weights) for spec, weights in layers.values()]
        reason = ctypes.c_char_p()
        with pool.held() as handle:
            self._handle = self._functions.ct_mixtures_create(
                (native.Experts * len(told))(*told),
                len(told),
                hidden,
                handle,
                pool.library.best if variant is None else variant,
                ctypes.byref(reason),
            )
        if not self._handle:
            raise NativeError((reason.value or b"no reason").decode())
        weakref.finalize(self, self._functions.ct_mixtures_destroy, self._handle).atexit = False

    @property
    def function(self) -> int:
        """The address of the C function that runs a job, for callers outside Python. Run one job at a time, and nothing
        else on this pool meanwhile."""
        return ctypes.cast(self._functions.ct_mixtures_run, ctypes.c_void_p).value or 0

    def job(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor, out: Tensor) -> native.MixtureJob:
        """Describe the computation of a layer. The tensors are CPU memory that must stay in place until it has run.

        x [rows, hidden], ids int32 [rows, chosen], shares fp32 [rows, chosen] -> out fp32 [rows, hidden]. A row whose
        first id is -1 yields zeros.
        """
        assert all(tensor.is_contiguous() for tensor in (x, ids, shares, out))
        return native.MixtureJob(
            self._handle,
            x.data_ptr(),
            ids.data_ptr(),
            shares.data_ptr(),
            out.data_ptr(),
            self._numbers[layer],
            len(x),
            PLAIN[x.dtype],
        )

    def run(self, job: native.MixtureJob) -> None:
        """Run the job now."""
        with self._pool.held():
            self._functions.ct_mixtures_run(ctypes.byref(job))
