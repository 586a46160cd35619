"""Lists of things: a table on a terminal, tab-separated lines elsewhere."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chatterm.cli.usage import check_output
from chatterm.terminal.sanitize import visible


def print_list(
    columns: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Sequence[str]],
    lines: Iterable[Sequence[object]],
    nothing: str,
) -> None:
    """Print `rows` under `columns` (a title, and what rich knows of a column), or the fields of `lines`.

    If there are no rows, `nothing` is said on standard error. Raises WrongUsage if there is no standard output.
    """
    check_output()
    if not rows:
        print(nothing, file=sys.stderr)
    elif sys.stdout.isatty():
        _print_table(columns, rows)
    else:
        for fields in lines:
            print(*(visible(str(field)) for field in fields), sep="\t")


def _print_table(columns: Mapping[str, Mapping[str, Any]], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, how in columns.items():
        table.add_column(title, **how)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
