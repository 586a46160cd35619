"""Colour themes: one TOML file each, in themes/ and in the folder of the user's own."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatterm.settings.paths import user_themes
from chatterm.settings.settings import SettingsError
from chatterm.settings.toml import error_at, parsed, read_source
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from textual.theme import Theme

FOLDER = Path(__file__).resolve().parents[2] / "themes"
STYLESHEET = FOLDER / "chatterm.tcss"
AUTO_THEME = "auto"
"""The theme that is dark where the terminal is, and light where that is light."""
DEFAULT_THEME, LIGHT_THEME = "graphite", "paper"
TERMINAL_THEME = "terminal"
"""The theme that uses the sixteen colours of the terminal itself."""
_TABLES = ("colors", "variables")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


def theme_names() -> list[str]:
    """Return the names of all themes, sorted."""
    return sorted({AUTO_THEME, *_files()})


def load_theme(name: str, is_dark: bool = True) -> "Theme":
    """Read a theme; one of the user's own overrides ours and states what differs from its `base`.

    `is_dark`: what AUTO_THEME shall be. Raises SettingsError.
    """
    from textual.theme import BUILTIN_THEMES, Theme

    files = _files()
    if name == AUTO_THEME:
        name = DEFAULT_THEME if is_dark else LIGHT_THEME
    if name not in files:
        shown = one_line(name, limit=60)
        raise SettingsError(f"Unknown theme {shown!r}; choose one of: {', '.join(theme_names())}.")
    data = _read(files[name])
    ansi = data.get("ansi", False)
    return Theme(
        name=name,
        dark=data["dark"],
        ansi=ansi,
        # Textual requires more variables of an ANSI theme than of others.
        variables=(BUILTIN_THEMES["ansi-dark"].variables if ansi else {}) | data["variables"],
        **data["colors"],
    )


def _files() -> dict[str, Path]:
    found = {path.stem: path for path in FOLDER.glob("*.toml")}
    try:
        found |= {path.stem: path for path in user_themes().glob("*.toml") if _NAME.fullmatch(path.stem)}
    except OSError:  # a folder that cannot be read holds no themes
        return found
    return found


def _read(path: Path) -> dict[str, Any]:
    """Read a theme file into `dark`, `ansi`, `colors` and `variables`, all complete. Raises SettingsError."""
    source = read_source(path)
    data = parsed(path, source)
    if path.parent == FOLDER:
        return data
    base = data.get("base", DEFAULT_THEME)
    known = sorted(file.stem for file in FOLDER.glob("*.toml"))
    if base not in known:
        raise error_at(path, source, ("base",), f"base must be one of {', '.join(known)}.")
    full = tomllib.loads(read_source(FOLDER / f"{base}.toml"))
    if not isinstance(data.get("dark", True), bool):
        raise error_at(path, source, ("dark",), "dark must be true or false.")
    for key in data:
        if key not in ("base", "dark", *_TABLES):
            known_keys = ", ".join(("base", "dark", *_TABLES))
            text = f"unknown key {one_line(key, 60)}; choose one of: {known_keys}."
            raise error_at(path, source, (key,), text)
    for table in _TABLES:
        full[table] |= _colours(path, source, table, data.get(table, {}), full[table])
    return full | {"dark": data.get("dark", full["dark"])}


def _colours(
    path: Path, source: str, table: str, given: object, known: Mapping[str, str]
) -> Mapping[str, str]:
    from textual.color import Color, ColorParseError

    if not isinstance(given, dict):
        raise error_at(
            path, source, (table,), f"{table} must be a table: write [{table}] and its colours below it."
        )
    for name, value in given.items():
        if name not in known:
            text = f"unknown colour {one_line(name, 60)}; choose one of: {', '.join(known)}."
            raise error_at(path, source, (table, name), text)
        try:
            Color.parse(value if isinstance(value, str) else "")
        except ColorParseError:
            text = f'{name} is {one_line(str(value), 60)!r}; it must be a colour, as in "#82b8cf".'
            raise error_at(path, source, (table, name), text) from None
    return given
