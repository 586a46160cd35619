"""Processes for tests, forked from one that has imported what they need: importing takes longer than all they do."""

from multiprocessing import get_context
from multiprocessing.context import BaseContext

import torch

IMPORTED = (
    "tests.engine.gloo_ranks",
    "tests.engine.kernels.divided_steps",
    "tests.engine.kernels.test_all_reduce",
)


def forking() -> BaseContext:
    """Return what starts such processes, for all tests the same. A process that has asked for GPUs cannot be forked."""
    if torch.cuda.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context
