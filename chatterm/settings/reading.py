"""Reading and checking the settings from one TOML file. Nothing in the file is ever executed."""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from chatterm.backends.backend import EngineError
from chatterm.backends.remote.address import Remote, is_name, wrong_url
from chatterm.settings.durations import parse_duration
from chatterm.settings.settings import FORMER_NAMES, Settings, SettingsError
from chatterm.settings.themes import theme_names
from chatterm.settings.toml import error_at, parsed, read_source, statement_lines
from chatterm.terminal.sanitize import is_safe, one_line

_MOST_BITS = 1000
"""The most bits of an integer that can still be displayed and converted to a float."""


def load_settings(path: Path) -> Settings:
    """Read the settings file; without one every setting has its default. Raises SettingsError."""
    return parse_settings(read_source(path), path)


def parse_settings(source: str, path: Path) -> Settings:
    """Parse the text of a settings file; errors name `path`. Raises SettingsError."""
    tables = parsed(path, source)
    try:
        return settings_from(tables)
    except _Wrong as wrong:
        former = [(*wrong.keys[:-1], old) for old, new in FORMER_NAMES.items() if new == wrong.keys[-1]]
        written = next((keys for keys in (wrong.keys, *former) if statement_lines(source, keys)), wrong.keys)
        raise error_at(path, source, written, str(wrong)) from None


class _Wrong(Exception):
    """A value of the file is wrong; `keys` says where."""

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


def check(table: str, key: str, value: object) -> None:
    """Raise SettingsError if the setting does not exist or cannot have this value."""
    if problem := problem_with(table, key, value):
        raise SettingsError(f"{table}.{key}: {problem}")


def problem_with(table: str, key: str, value: object) -> str:
    """Return what is wrong with this value of a setting, on a line that begins with its name; "" if nothing is."""
    try:
        settings_from({table: {key: list(value) if isinstance(value, tuple) else value}})
    except _Wrong as wrong:
        return str(wrong)
    return ""


def settings_from(tables: Mapping[str, Any]) -> Settings:
    """Build the settings from the tables of a file. Raises _Wrong."""
    types = get_type_hints(Settings)
    _check_names((), tables, types)
    built: dict[str, Any] = {}
    for table, values in tables.items():
        if table == "remotes":
            built[table] = _remotes(values)
            continue
        if not isinstance(values, dict):
            raise _Wrong((table,), f"{table} must be a table: write [{table}] and its settings below it.")
        kind = types[table]
        hints = get_type_hints(kind)
        # If a setting appears under its former and its new name, the new one comes last and wins.
        old_first = sorted(values.items(), key=lambda item: item[0] not in FORMER_NAMES)
        values = {FORMER_NAMES.get(name, name): value for name, value in old_first}
        _check_names((table,), values, hints)
        built[table] = kind(**{k: _checked((table, k), v, hints[k]) for k, v in values.items()})
    settings = Settings(**built)
    _check_ranges(settings)
    return settings


def _remotes(tables: object) -> dict[str, Remote]:
    """Return the servers of [remotes.NAME]. Raises _Wrong."""
    if not isinstance(tables, dict):
        raise _Wrong(("remotes",), "remotes must have a table for each server: write [remotes.NAME].")
    hints = get_type_hints(Remote)
    found: dict[str, Remote] = {}
    for name, values in tables.items():
        where = ("remotes", name)
        if not is_name(name):
            shown = one_line(name, 60)
            raise _Wrong(
                where, f"{shown!r} cannot be the name of a remote; use letters, digits, dots, - and _."
            )
        if not isinstance(values, dict):
            raise _Wrong(where, f"{name} must be a table: write [remotes.{name}] and its settings below it.")
        _check_names(where, values, hints)
        if "url" not in values:
            raise _Wrong(where, f'remotes.{name} has no url; add one, as in url = "http://localhost:8000".')
        checked: dict[str, Any] = {k: _checked((*where, k), v, hints[k]) for k, v in values.items()}
        remote = Remote(**checked)
        if problem := wrong_url(remote.url):
            raise _Wrong((*where, "url"), f"url {problem}.")
        if len(keys := [key for key in ("key_env", "key_command", "keyring") if key in values]) > 1:
            raise _Wrong((*where, keys[1]), f"{' and '.join(keys)} say where the key is; keep one of them.")
        if remote.key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", remote.key_env):
            raise _Wrong(
                (*where, "key_env"), "key_env is the name of an environment variable, not the key itself."
            )
        if remote.model is not None and not remote.model.strip():
            raise _Wrong((*where, "model"), "model is empty; name a model, or leave it out.")
        found[name] = remote
    return found


def _check_names(where: tuple[str, ...], given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise _Wrong((*where, name), unknown_setting(name, known, where))


def unknown_setting(name: str, known: Collection[str], where: Sequence[str] = ()) -> str:
    """Return that there is no setting `name` in the table at `where`, with the one of `known` that may be meant."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(known)}."
    return f"unknown setting {one_line('.'.join((*where, name)), limit=80)}; {hint}"


def _checked(keys: tuple[str, ...], value: object, kind: Any) -> object:
    """Return `value` in the type of its field. Raises _Wrong."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise _Wrong(keys, f"{keys[-1]} has too many digits; it must be {expected(kind)}.")
    for part in alternatives(kind):
        if get_origin(part) is Literal and value in get_args(part) and isinstance(value, str):
            return value
        if part is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if get_origin(part) is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        if part in (str, bool, int) and type(value) is part:
            return value
    raise _Wrong(keys, f"{keys[-1]} is {_shown(value)}; it must be {expected(kind)}.")


def expected(kind: Any) -> str:
    """Describe what a field of this type may hold."""
    first = alternatives(kind)[0]
    if get_origin(first) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(first))
    if get_origin(first) is tuple:
        return 'a list of strings, as in ["one", "two"]'
    names = {str: 'text in quotes, as in "text"', bool: "true or false", int: "a whole number"}
    return names.get(first, "a number")


def alternatives(kind: Any) -> Sequence[Any]:
    """Return the members of a union without None; any other type is its own only one."""
    is_union = get_origin(kind) in (Union, UnionType)
    return [part for part in get_args(kind) if part is not NoneType] if is_union else [kind]


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return one_line(text, limit=60)


def _check_ranges(settings: Settings) -> None:
    """Raise _Wrong for values that have the right type but make no sense."""
    from engine.errors import check_device
    from engine.params import SamplingParams

    for name, value in settings.sampling.given().items():
        try:
            SamplingParams(**{name: value})
        except EngineError as error:
            raise _Wrong(("sampling", name), one_line(str(error))) from error
    try:
        check_device(settings.model.device)
    except EngineError as error:
        raise _Wrong(("model", "device"), one_line(str(error))) from error
    for table, name, least in (("composer", "history", 0), ("model", "context", 1), ("model", "threads", 1)):
        number = getattr(getattr(settings, table), name)
        if number is not None and number < least:
            raise _Wrong((table, name), f"{name} is {number}; it must be {least} or more.")
    if not 0 <= settings.model.tensor_parallel < 1000:
        raise _Wrong(
            ("model", "tensor_parallel"),
            f"tensor_parallel is {settings.model.tensor_parallel}; it must be a number of GPUs, or 0 for as few as do.",
        )
    for table, name in (("model", "offload_gb"), ("cache", "disk_gb")):
        size = getattr(getattr(settings, table), name)
        if size is not None and not 0 <= size < inf:
            allowed = "0 or more" if size < inf else "a finite number, 0 or more"
            raise _Wrong((table, name), f"{name} is {size}; it must be {allowed}.")
    if settings.model.keep_alive is not None:
        try:
            parse_duration(settings.model.keep_alive, "keep_alive")
        except EngineError as error:
            raise _Wrong(("model", "keep_alive"), one_line(str(error))) from error
    for name, model in (("name", settings.model.name), ("draft", settings.model.draft)):
        if model is not None and (not model.strip() or "\n" in model or not is_safe(model)):
            shown = _shown(model) if model.strip() else "empty"
            raise _Wrong(("model", name), f'{name} is {shown}; it must name a model, as in "smollm2".')
    if settings.screen.theme not in theme_names():
        known = ", ".join(theme_names())
        theme = one_line(settings.screen.theme, limit=60)
        raise _Wrong(("screen", "theme"), f"unknown theme {theme!r}; choose one of: {known}.")
