"""Mixtures of experts by the native kernels, in a network that is otherwise computed elsewhere.

The plain twin is the loop over experts in `models/reference/decoder.py`. What is multiplied with experts in blocks is
rounded to int8, by 32 numbers with a common scale.
"""

import ctypes
import weakref
from collections.abc import Mapping

from torch import Tensor

from engine.execute.cpu.telling import Telling
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.network import PLAIN, ExpertWeights
from models.spec import Experts


class NativeMixtures:
    """The chosen experts of some layers. The bits of a row are the same whatever is beside it."""

    def __init__(
        self,
        layers: Mapping[int, tuple[Experts, ExpertWeights]],
        hidden: int,
        pool: Pool,
        variant: int | None = None,
    ) -> None:
        """`layers` by their number; `variant` is a number of `pool.library.variants`, None the best.

        Raises NativeError for experts that do not fit together or have weights without kernels.
        """
        self._pool = pool
        self._functions = pool.library.functions
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._told = Telling()
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
        """The address of what computes a job, for whoever calls it without Python: one at a time, and with this pool
        nothing beside it."""
        return ctypes.cast(self._functions.ct_mixtures_run, ctypes.c_void_p).value or 0

    def job(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor, out: Tensor) -> native.MixtureJob:
        """What is to be computed of a layer, in memory of a CPU that must stay where it is until then.

        x [rows, hidden], ids int32 [rows, chosen], shares fp32 [rows, chosen] -> out fp32 [rows, hidden]. A row whose
        first id is -1 gets zeros.
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
        """Compute it now."""
        with self._pool.held():
            self._functions.ct_mixtures_run(ctypes.byref(job))
