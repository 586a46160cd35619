"""The other ranks of a network that is divided among several: they compute the same step at the same time."""

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """Operations across ranks. All ranks call the same methods in the same order, with equal shapes and dtypes."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in the shape and dtype of x; x may be overwritten."""

    def join_columns(self, x: Tensor) -> Tensor:
        """Return the [n, columns] of all ranks side by side: [n, ranks * columns]."""
