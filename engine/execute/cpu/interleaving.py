"""Weights of a mapped file are copied into an order that is read faster, while there is nothing else to do."""

import torch

from engine.device import available_memory
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeError

SLICE = 1 << 20
"""Bytes that are copied at once: a few milliseconds at most, so that whoever asks for something hardly waits."""
_CPU = torch.device("cpu")


class Interleaving:
    """The copies of one decoder.

    They are made only as long as twice what is left to copy and the KV cache are free: then the file can stay in the
    system's memory, too, and nothing is ever swapped for a copy.
    """

    def __init__(self, decoder: NativeDecoder, kv_bytes: int) -> None:
        self._decoder = decoder
        self._kv_bytes = kv_bytes
        self._all = self._left = decoder.interleave(0)
        self._over = not self._left

    @property
    def copied(self) -> int:
        """Bytes of weights that are no longer read from their file."""
        return self._all - self._left

    def go_on(self) -> bool:
        """Copy some more. Returns whether more is left, and may be copied."""
        if not self._over:
            self._over = available_memory(_CPU) < 2 * self._left + self._kv_bytes
        if not self._over:
            try:
                self._left = self._decoder.interleave(SLICE)
            except NativeError:
                self._over = True
        self._over = self._over or not self._left
        return not self._over
