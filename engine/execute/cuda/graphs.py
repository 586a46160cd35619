"""CUDA graphs: a decode step is recorded once and replayed with one call, however many kernels it has."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from engine.execute.faults import first_line
from engine.kernels.recording import recording
from models.loading.load import is_out_of_memory

Graph = torch.cuda.CUDAGraph


class Graphs:
    """Graphs by key. All share one memory pool, since only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Graph] = {}
        self._seen: set[Hashable] = set()
        self._too_large: set[Hashable] = set()
        """Keys for which there was too little memory to record; smaller graphs may still fit."""
        self._pool: Any = None
        self.problem: str | None = None
        """Why recording failed. Once it is set, new keys are no longer recorded."""
        self.firsts = 0
        """Number of steps that compiled their kernels or were recorded; later steps of the same key are faster."""

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run `step`: directly the first time, which compiles its kernels, and from a recording afterwards.

        `step` must only enqueue work on the current stream, always on the same memory. Side effects on the host are
        lost when the recording is replayed.
        """
        graph = self._graphs.get(key)
        if key not in self._seen:
            self.firsts += 1
        elif graph is None and self.problem is None and key not in self._too_large:
            self.firsts += 1
            graph = self._record(key, step)
        if graph is not None:
            graph.replay()
        else:
            self._seen.add(key)
            step()

    def _record(self, key: Hashable, step: Callable[[], None]) -> Graph | None:
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = Graph()
            with recording(graph, self._pool):
                step()
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._too_large.add(key)
                return None
            self.problem = first_line(error)
            return None
        self._graphs[key] = graph
        return graph
