"""Ranks of a test: processes that share memory, with Triton's interpreter in place of GPUs."""

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from engine.execute.cuda.peer_memory import PeerMemory
from tests.engine.forked import forking
from tests.engine.kernels import conftest

assert conftest.os is os  # the interpreter is quick in these processes, too


def memory_in(folder: Path, ranks: int, nbytes: int) -> PeerMemory:
    """Files that all ranks map."""
    held = []
    for rank in range(ranks):
        path = folder / f"memory-{rank}"
        with path.open("a") as file:
            file.truncate(nbytes)  # whoever comes first, the others change nothing
        held.append(torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8))

    def close() -> None:
        held.clear()

    return PeerMemory(tuple(each.data_ptr() for each in held), close)


def run_ranks(ranks: int, task: Callable[..., Any], *args: Any) -> list[Any]:
    """What `task(rank, *args)` gives in each of so many processes at once. It is a function of a module."""
    pool = ProcessPoolExecutor(ranks, forking())
    try:
        results = [pool.submit(task, rank, *args) for rank in range(ranks)]
        done, _ = wait(results, return_when=FIRST_EXCEPTION)  # the others would wait for one that failed
        for result in done:
            result.result()
        return [result.result() for result in results]
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=True)
