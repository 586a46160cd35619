"""Changes to the settings file: one setting at a time, with comments preserved."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatterm.settings.paths import check_regular
from chatterm.settings.reading import parse_settings
from chatterm.settings.settings import SettingsError
from chatterm.settings.toml import read_source, statement_lines, toml_value
from models.files import write_whole


def changed(source: str, table: str, key: str, value: object | None, path: Path) -> str:
    """Return `source` with `table.key` set to `value`; None removes it. Raises SettingsError."""
    wanted = tomllib.loads(source)
    section = wanted.setdefault(table, {})
    if value is None:
        section.pop(key, None)
    else:
        section[key] = list(value) if isinstance(value, tuple) else value
    text = _edited(source, table, key, None if value is None else toml_value(value))
    try:
        right = _without_empty(tomllib.loads(text)) == _without_empty(wanted)
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise SettingsError(
            f"{path}: {table}.{key} is written in a form that cannot be changed here; use: chatterm config edit"
        )
    return text


def _edited(source: str, table: str, key: str, value: str | None) -> str:
    rows = source.split("\n")
    if (span := statement_lines(source, (table, key))) is not None:
        first, last = span
        if value is None:
            return "\n".join(rows[:first] + rows[last:])
        left = rows[first].split("=", 1)[0].rstrip()
        comment = re.search(r"\s+#[^\"']*\Z", rows[last - 1])
        rows[first:last] = [f"{left} = {value}{comment[0] if comment else ''}"]
        return "\n".join(rows)
    if value is None:
        return source
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?")
    for number, row in enumerate(rows):
        if header.fullmatch(row):
            rows.insert(number + 1, f"{key} = {value}")
            return "\n".join(rows)
    start = source.rstrip("\n")
    return f"{start}\n\n[{table}]\n{key} = {value}\n" if start else f"[{table}]\n{key} = {value}\n"


def _without_empty(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in tables.items() if values != {}}


def store(path: Path, table: str, key: str, value: object | None) -> None:
    """Change one setting in the file; None goes back to the default. The file is replaced as a whole.

    Raises SettingsError if the file or the value is invalid, or writing fails; the file is then unchanged.
    """
    source = read_source(path)
    parse_settings(source, path)
    text = changed(source, table, key, value, path)
    parse_settings(text, path)
    write(path, text)


def write(path: Path, text: str) -> None:
    """Replace the file atomically. Raises SettingsError."""
    check_regular(path)  # a device would be replaced, too
    try:
        write_whole(path, text, mode=0o600)
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it would contain what is no character"
        raise SettingsError(f"{path} cannot be written: {why or error}.") from error
