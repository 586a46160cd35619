"""The inputs of a recorded step, in memory whose address never changes."""

from collections.abc import Sequence as Items
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray


class StagedInputs:
    """Numbers on the device, sent together in one asynchronous copy.

    Two copies may be under way. `begin` of a third one waits for the first, so the host gets at most two steps ahead of
    the device. It belongs to the loop thread.
    """

    def __init__(self, sizes: Items[int], device: torch.device) -> None:
        """Make one part for each of `sizes`, counted in numbers."""
        is_cuda = device.type == "cuda"
        # Kernels read data faster that begins at a multiple of 16 bytes.
        starts = [0, *accumulate(-(-size // 4) * 4 for size in sizes)]
        self._at = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self.parts = [self._words[at] for at in self._at]
        """The parts on the device, int32."""
        self._staged = [torch.zeros(starts[-1], dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def begin(self) -> list[NDArray[np.int32]]:
        """Return the parts in host memory, all zeros, to be filled before `send`."""
        self._staged.reverse()
        self._copied.reverse()
        if self._copied:
            self._copied[0].synchronize()
        words: NDArray[np.int32] = self._staged[0].numpy()
        words.fill(0)
        return [words[at] for at in self._at]

    def send(self) -> None:
        """Enqueue the copy of the filled parts, after the steps that read the present values."""
        self._words.copy_(self._staged[0], non_blocking=True)
        if self._copied:
            self._copied[0].record()
