"""Settings as the user reads and writes them."""

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from chatterm.backends.remote.address import Remote
from chatterm.settings.reading import alternatives
from chatterm.settings.settings import FORMER_NAMES, TABLES, Settings, SettingsError
from chatterm.settings.themes import theme_names
from chatterm.settings.toml import toml_value

_WIDTH = 100


def field_docs(kind: type) -> dict[str, str]:
    """Return, by name, the string that follows each field of the dataclass `kind` in its source, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[statement.target.id] = " ".join(value.value.split())
    return docs


def described(settings: Settings, path: Path, *, exists: bool) -> str:
    """Return all settings as a TOML file, in which those at their defaults are comments."""
    note = "" if exists else " (this file does not exist yet; these are the defaults)"
    lines = [f"# {path}{note}"]
    for table, kind in TABLES.items():
        lines += ["", f"[{table}]  # {inspect.getdoc(kind)}"]
        for known in _declared(table, kind):
            value = known.value(settings)
            lines += ["", *textwrap.wrap(known.about, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            if value in (None, ()):
                lines.append(f"#{known.name} =")
            else:
                unset = "#" if value == known.default else ""
                lines.append(f"{unset}{known.name} = {toml_value(value)}")
    return "\n".join([*lines, *_remote_lines(settings)]) + "\n"


def _remote_lines(settings: Settings) -> list[str]:
    """Return lines on the settings that a server can have, and on the servers of the file."""
    declared = _declared("remotes", Remote)
    lines = [
        "",
        "# [remotes.NAME] names a server: chatterm run NAME chats with its model, NAME/MODEL with another.",
    ]
    for known in declared:
        text = f"{known.name}: {known.about}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    for name, remote in settings.remotes.items():
        lines += ["", f"[remotes.{name}]" if "." not in name else f'[remotes."{name}"]']
        for known in declared:
            value = getattr(remote, known.name)
            if value is not None and value != known.default:
                lines.append(f"{known.name} = {toml_value(value)}")
    return lines


@dataclass(frozen=True, slots=True)
class KnownSetting:
    """One setting, as declared in TABLES."""

    table: str
    name: str
    doc: str
    kind: Any
    """The type of its field."""
    default: Any

    @property
    def choices(self) -> tuple[Any, ...]:
        """All usual values; () if there are too many to list."""
        if (self.table, self.name) == ("screen", "theme"):
            return tuple(theme_names())
        part = alternatives(self.kind)[0]
        if part is bool:
            return (True, False)
        return get_args(part) if get_origin(part) is Literal else ()

    @property
    def about(self) -> str:
        """What it is, and its choices."""
        if not self.choices or alternatives(self.kind)[0] is bool:
            return self.doc
        usual = "Usually" if str in alternatives(self.kind) else "One of"
        return f"{self.doc} {usual} {', '.join(map(str, self.choices))}."

    def value(self, settings: Settings) -> Any:
        return getattr(getattr(settings, self.table), self.name)


def table_docs() -> dict[str, str]:
    """Return what each table is about, by its name."""
    return {name: inspect.getdoc(kind) or "" for name, kind in TABLES.items()}


def known_settings() -> list[KnownSetting]:
    """Return all settings, in the order of the file."""
    return [known for table, kind in TABLES.items() for known in _declared(table, kind)]


def _declared(table: str, kind: type) -> list[KnownSetting]:
    """Return the settings of a table that has these fields."""
    docs, hints = field_docs(kind), get_type_hints(kind)
    return [
        KnownSetting(table, part.name, docs[part.name], hints[part.name], part.default)
        for part in fields(kind)
    ]


def find(key: str) -> tuple[str, str]:
    """Return the table and name of the setting `key`, in which the table may be left out. Raises SettingsError."""
    table, _, name = key.rpartition(".")
    known = [(table, part) for table, kind in TABLES.items() for part in get_type_hints(kind)]
    found = [(t, part) for t, part in known if part == name and table in ("", t)]
    if len(found) == 1:
        return found[0]
    if name in FORMER_NAMES:
        raise SettingsError(f"{name} is called {FORMER_NAMES[name]} now; use that name.")
    from difflib import get_close_matches

    near = get_close_matches(key, [f"{t}.{part}" for t, part in known], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "chatterm config lists them all."
    raise SettingsError(f"Unknown setting {key}; {hint}")


def parsed(table: str, name: str, words: Sequence[str]) -> object:
    """Parse words of a command line into the setting's type; unreadable text is returned (and refused later)."""
    kind = alternatives(get_type_hints(TABLES[table])[name])[0]
    if get_origin(kind) is tuple:
        return tuple(words)
    text = " ".join(words)
    if kind is bool:
        return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}.get(
            text.lower(), text
        )
    if kind in (int, float):
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            return text
    return text
