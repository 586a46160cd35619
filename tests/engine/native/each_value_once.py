"""A plugin for pytest: of each test with parameters, only so many cases that each value of each parameter occurs."""

import pytest

from tests.covering import cover


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Treat every test as if it were marked."""
    items[:] = cover(items)
