"""Fewer cases of slow tests that have several parameters: so many that each value of each parameter occurs.

CHATTERM_CASES=all pytest tests/engine      every combination of values
"""

import os
from collections.abc import Iterator

import pytest

ALL = os.environ.get("CHATTERM_CASES") == "all"
each_value_once = pytest.mark.each_value_once
"""Marks a test whose combinations of values are not worth their time."""


def cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return those of `items` that are enough: first those with new values only, then those with any."""
    seen: set[object] = set()
    kept: set[pytest.Item] = set()
    for enough in (set.isdisjoint, lambda values, seen: not values <= seen):
        for item in items:
            values = set(_values(item))
            if item not in kept and (not values or enough(values, seen)):
                kept.add(item)
                seen |= values
    return [item for item in items if item in kept]


def _values(item: pytest.Item) -> Iterator[object]:
    """Yield the test with each of its parameters and their values; those of one decorator stay together."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return
    test, values = item.nodeid.partition("[")[0], dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield test, *((name.strip(), id(values.pop(name.strip()))) for name in names)
    for name, value in values.items():
        yield test, (name, id(value))
