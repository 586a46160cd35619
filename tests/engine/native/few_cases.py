"""A plugin for pytest: in files about formats each value of each parameter of a test, in others the first case.

These cases run 98 % of the lines that all run. CHATTERM_CASES=all takes each value of all tests.
"""

import pytest

from tests.covering import ALL, cover

FORMATS = {
    "test_interleaved.py",
    "test_native_decode.py",
    "test_native_experts.py",
    "test_native_kv_rows.py",
    "test_native_mixtures.py",
    "test_native_products.py",
    "test_products.py",
}
SLOW = "test_native_experts.py::test_a_row_has_the_same_bits_in_any_company"
"""A quarter of the time, for mixtures that others of its file compute as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Treat every test as if it were slow."""
    if ALL:
        items[:] = cover(items)
        return
    fast = [item for item in items if SLOW not in item.nodeid]
    first = {item.nodeid.partition("[")[0]: item for item in reversed(fast)}
    few = set(cover([item for item in fast if item.path.name in FORMATS])).union(first.values())
    items[:] = [item for item in items if item in few]
