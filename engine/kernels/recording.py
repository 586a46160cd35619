"""Recording CUDA graphs and waiting for a GPU: threads take turns at these two.

While one thread records, CUDA refuses both to every other thread, and the recording is lost, too. All other calls that
we make are free.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

_turn = RLock()
"""Reentrant, because garbage may be freed in the middle of a recording, and freeing pinned memory waits for the GPU."""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record into `graph` what is enqueued inside; its memory comes from `pool`."""
    # Other threads may use CUDA meanwhile and must not spoil the recording.
    with _turn, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done everything that was enqueued on it; a CPU always has."""
    if device.type == "cuda":
        with _turn:
            torch.cuda.synchronize(device)
