"""The other ranks, where a network is divided among several: they compute the same step at the same time."""

from typing import Protocol

from torch import Tensor


class Peers(Protocol):
    """Every rank calls the same method with a tensor of the same shape and dtype, in the same order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the shape and dtype of x; x may be overwritten."""

    def join_columns(self, x: Tensor) -> Tensor:
        """[n, columns] of every rank side by side: [n, ranks * columns]."""
