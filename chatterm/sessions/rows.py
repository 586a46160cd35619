"""Rows of the session database. What is read from a file is never trusted: it may be damaged anywhere."""

import sqlite3
from collections.abc import Iterator, Sequence
from math import inf
from types import UnionType
from typing import Any

Kind = type | UnionType
"""What a column holds: str, int, float, bytes, or one of them and None."""


def rows(
    connection: sqlite3.Connection, query: str, values: Sequence[Any], *kinds: Kind
) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, one after the other as they are needed; each has a value of every kind, in this order.

    Raises sqlite3.Error, also where a value is of another kind: SQLite itself keeps to no types.
    """
    for row in connection.execute(query, values):
        if not all(_fits(value, kind) for value, kind in zip(row, kinds, strict=True)):
            raise malformed()
        yield row


def row(connection: sqlite3.Connection, query: str, values: Sequence[Any], *kinds: Kind) -> tuple[Any, ...]:
    """The first row of a query that has one in every sound database. Raises sqlite3.Error like `rows`."""
    found = next(rows(connection, query, values, *kinds), None)
    if found is None:
        raise malformed()
    return found


def malformed() -> sqlite3.DatabaseError:
    """The error for rows that contradict the schema or each other; `schema.explain` calls it damage."""
    return sqlite3.DatabaseError("malformed row")


def _fits(value: object, kind: Kind) -> bool:
    return isinstance(value, kind) and not (isinstance(value, float) and abs(value) == inf)
