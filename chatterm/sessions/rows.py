"""Rows of the session database. Nothing read from the file is trusted: it may be damaged anywhere."""

import sqlite3
from collections.abc import Iterator, Sequence
from math import inf
from types import UnionType
from typing import Any

Kind = type | UnionType
"""The type of a column: str, int, float, bytes, or one of them or None."""


def rows(
    connection: sqlite3.Connection, query: str, values: Sequence[Any], *kinds: Kind
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query as they are needed. The values of each have these kinds, in this order.

    Raises sqlite3.Error, also if a value is of another kind: SQLite itself does not enforce types.
    """
    for row in connection.execute(query, values):
        if not all(_fits(value, kind) for value, kind in zip(row, kinds, strict=True)):
            raise malformed()
        yield row


def row(connection: sqlite3.Connection, query: str, values: Sequence[Any], *kinds: Kind) -> tuple[Any, ...]:
    """Return the first row of a query that has one in every intact database. Raises sqlite3.Error like `rows`."""
    found = next(rows(connection, query, values, *kinds), None)
    if found is None:
        raise malformed()
    return found


def malformed() -> sqlite3.DatabaseError:
    """Return the error for rows that contradict the schema or each other; `schema.explain` reports it as damage."""
    return sqlite3.DatabaseError("malformed row")


def _fits(value: object, kind: Kind) -> bool:
    return isinstance(value, kind) and not (isinstance(value, float) and abs(value) == inf)
