"""A plugin for pytest: of a test with parameters, only so many cases that each value of each parameter occurs."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take first the cases with new values only, then those with any."""
    seen: set[tuple[str, str, int]] = set()
    kept: set[pytest.Item] = set()
    for enough in (set.isdisjoint, lambda values, seen: not values <= seen):
        for item in items:
            values = _values(item)
            if item not in kept and (not values or enough(values, seen)):
                kept.add(item)
                seen |= values
    items[:] = [item for item in items if item in kept]


def _values(item: pytest.Item) -> set[tuple[str, str, int]]:
    """The test and the name and the identity of each of its parameters."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return set()
    test = item.nodeid.partition("[")[0]
    return {(test, name, id(value)) for name, value in item.callspec.params.items()}
