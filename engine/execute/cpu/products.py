"""Products with quantised weights on the native kernels, for networks they cannot run as a whole.

The plain twin is `models.reference.tiled.TiledProduct`. Inputs are rounded to int8, in groups of 32 numbers with a
common scale.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execute.cpu.executor import PORTABLE
from engine.execute.cpu.native_structs import to_matrix
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from models.network import Linear, Network, Weight

ROWS = 128
"""Rows to multiply at once: with more, unpacking costs no less per row, and the rows no longer fit the cache."""


def problem() -> str | None:
    """Return why native kernels cannot multiply here, as the middle of a sentence; None if they can."""
    if (missing := native.problem()) is not None:
        return missing
    return "this processor has no AVX2" if native.library().best == PORTABLE else None


class NativeProduct:
    """The products of a network's layers. The bits of a row do not depend on the other rows."""

    def __init__(self, network: Network, pool: Pool) -> None:
        """Set up the kernels. Raises NativeError if that fails."""
        self._pool = pool
        self._functions = pool.library.functions
        self._layers: dict[int, tuple[Sequence[Weight], native.Linear]] = {}
        widest = max(layer.columns for layer in network.parts(Linear))
        with pool.held() as handle:
            self._handle = self._functions.ct_multiplier_create(handle, pool.library.best, widest, ROWS)
        if not self._handle:
            raise NativeError("memory is short")
        weakref.finalize(self, self._functions.ct_multiplier_destroy, self._handle).atexit = False

    def __call__(self, x: Tensor, weights: Sequence[Weight], bias: Tensor | None) -> Tensor:
        """Multiply as `TiledProduct.__call__` does. Raises NativeError for a layer without kernels."""
        _, layer = self._layers.get(id(weights)) or self._layers.setdefault(
            id(weights), (weights, _layer(weights))
        )
        given = x.to(torch.float32).contiguous()
        out = torch.empty(len(x), sum(weight.rows for weight in weights))
        with self._pool.held():
            done = self._functions.ct_multiplier_run(
                self._handle, layer, len(x), given.data_ptr(), out.data_ptr()
            )
        if not done:
            raise NativeError("a layer has a type or a shape without kernels")
        if bias is not None:
            out += bias
        return out.to(x.dtype)


def _layer(weights: Sequence[Weight]) -> native.Linear:
    return native.Linear((native.Matrix * native.MOST_PARTS)(*map(to_matrix, weights)), None, len(weights))
