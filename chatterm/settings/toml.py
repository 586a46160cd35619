"""TOML files as text: reading one, finding a value in it, writing a value."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatterm.settings.paths import check_regular
from chatterm.settings.settings import SettingsError
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text

LARGEST = 64 << 20
"""The largest file that is read, in bytes."""
Lines = tuple[int, int]
"""The first line (from 0) and the one after the last."""


def read_source(path: Path) -> str:
    """Return the text of the file; "" if there is none. Raises SettingsError if it cannot be read."""
    if str(path) != os.devnull:  # which users name to have no settings
        check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from error
    if len(data) > LARGEST:
        raise SettingsError(f"{path} is longer than {bytes_text(LARGEST)}; make it shorter.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{path}, line {line}: this is not UTF-8; save the file as UTF-8 text."
        ) from error


def parsed(path: Path, source: str) -> dict[str, Any]:
    """Parse the text of a TOML file; errors name `path`. Raises SettingsError."""
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, source, error) from error
    except (ValueError, RecursionError):  # limits of Python itself
        raise SettingsError(
            f"{path}: a number has thousands of digits, or lists are nested too deeply; correct it."
        ) from None


def _not_toml(path: Path, source: str, error: Exception) -> SettingsError:
    """Return the error for a file that tomllib does not accept."""
    text, _, place = one_line(str(error)).rstrip(")").partition(" (at ")
    line = place.split(",")[0] if place.startswith("line ") else f"line {source.rstrip().count(chr(10)) + 1}"
    return SettingsError(f"{path}, {line}: this is not TOML: {text}.")


def error_at(path: Path, source: str, keys: tuple[str, ...], problem: str) -> SettingsError:
    """Return the error for a problem with what `keys` are set to, which names the line; the first if they are not."""
    first, _ = statement_lines(source, keys) or (0, 0)
    return SettingsError(f"{path}, line {first + 1}: {problem}")


def statement_lines(source: str, keys: tuple[str, ...]) -> Lines | None:
    """Return the lines of the statement that sets `keys`; None if there is none. `source` is TOML.

    Ever longer beginnings of the file are parsed until the setting appears. So it does not matter how it is written
    (below its table, as `table.key`, over several lines).
    """
    rows = source.split("\n")
    whole = 0  # lines of the last beginning that was valid TOML
    for end in range(1, len(rows) + 1):
        try:
            tables = tomllib.loads("\n".join(rows[:end]))
        except tomllib.TOMLDecodeError:
            continue
        if _has(tables, keys):
            return whole, end
        whole = end
    return None


def _has(tables: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    node: object = tables
    for key in keys:
        if not isinstance(node, Mapping) or key not in node:
            return False
        node = node[key]
    return True


def toml_value(value: object) -> str:
    """Return `value` (text, number, boolean, list of texts) as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str):  # a JSON string is a TOML string, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
