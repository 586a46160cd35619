"""Copies the weights of a mapped file into an order that is read faster, in idle time."""

import torch

from engine.device import available_memory
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError

SLICE = 1 << 20
"""Bytes to copy at once: a few milliseconds at most, so that a request hardly waits."""
_CPU = torch.device("cpu")


class Interleaving:
    """The copying of one decoder's weights.

    It continues only while the free memory holds the KV cache and twice the bytes left to copy. Then the file can stay
    in the system's page cache too, and nothing is ever swapped out for a copy.
    """

    def __init__(self, decoder: NativeDecoder, kv_bytes: int) -> None:
        self._decoder = decoder
        self._kv_bytes = kv_bytes
        self._all = self._left = decoder.interleave(0)
        self._over = not self._left

    @property
    def copied(self) -> int:
        """Bytes of weights that are no longer read from the file."""
        return self._all - self._left

    def go_on(self) -> bool:
        """Copy the next slice. Return whether more is left and may be copied."""
        if not self._over:
            self._over = available_memory(_CPU) < 2 * self._left + self._kv_bytes
        if not self._over:
            try:
                self._left = self._decoder.interleave(SLICE)
            except NativeError:
                self._over = True
        self._over = self._over or not self._left
        return not self._over
