"""Presets: a model, a system prompt, tools and sampling under one name, each in a TOML file beside the settings."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from chatterm.backends.backend import ThinkMode
from chatterm.settings.file import write
from chatterm.settings.paths import config_path
from chatterm.settings.reading import problem_with, unknown_setting
from chatterm.settings.settings import SamplingSettings, SettingsError
from chatterm.settings.toml import error_at, parsed, read_source, toml_value
from chatterm.terminal.sanitize import one_line

WORDS = ("save", "replace")
"""Words that `/preset` accepts before a name."""
_NAME = re.compile(r"[\w][\w.-]{0,63}")
_TOOL = re.compile(r"[\w.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class SavedPreset:
    """The contents of a preset's file. None, and a sampling setting that is missing, change nothing."""

    model: str | None = None
    system: str | None = None
    think: ThinkMode | None = None
    tools: tuple[str, ...] | None = None
    """Names as in `/tools`; () switches tools off."""
    sampling: Mapping[str, Any] = field(default_factory=dict)


def presets_folder() -> Path:
    return config_path().parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the preset files, whose contents are not checked."""
    try:
        return sorted(path.stem for path in presets_folder().glob("*.toml") if _NAME.fullmatch(path.stem))
    except OSError:
        return []


def load_preset(name: str) -> SavedPreset:
    """Read a preset. Raises SettingsError (one line) if it does not exist or its file is invalid."""
    known = preset_names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        listed = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}."
        here = listed if known else f"write one to {presets_folder()}, or use /preset save NAME."
        raise SettingsError(f"There is no preset {one_line(name, 60)!r}; {here}")
    path = presets_folder() / f"{name}.toml"
    return parse_preset(read_source(path), path)


def parse_preset(source: str, path: Path) -> SavedPreset:
    """Parse the text of a preset's file; errors name `path`. Raises SettingsError."""
    tables = parsed(path, source)
    sampling = tables.get("sampling", {})
    for keys, problem in _problems(tables, sampling):
        raise error_at(path, source, keys, problem)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in sampling.items()}
    tools = tuple(tables["tools"]) if "tools" in tables else None
    return SavedPreset(tables.get("model"), tables.get("system"), tables.get("think"), tools, values)


def _problems(tables: Mapping[str, Any], sampling: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the problems of a preset's file, each after its key."""
    known = [part.name for part in fields(SavedPreset)]
    yield from (((name,), unknown_setting(name, known)) for name in tables if name not in known)
    if not isinstance(sampling, dict):
        yield ("sampling",), "sampling must be a table: write [sampling] and its settings below it."
        return
    for name in ("model", "system"):
        value = tables.get(name, "x")
        if not isinstance(value, str) or not value.strip():
            yield (name,), f"{name} is {one_line(repr(value), 60)}; it must be text in quotes."
    if "think" in tables and (problem := problem_with("model", "think", tables["think"])):
        yield ("think",), problem
    tools = tables.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(w, str) and _TOOL.fullmatch(w) for w in tools):
        yield ("tools",), 'tools must be a list of names, as in /tools: tools = ["read", "search"].'
    names = [part.name for part in fields(SamplingSettings)]
    for name, value in sampling.items():
        if (
            problem := problem_with("sampling", name, value)
            if name in names
            else unknown_setting(name, names)
        ):
            yield ("sampling", name), problem


def save_preset(name: str, preset: SavedPreset, *, replace: bool = False) -> Path:
    """Write a preset and return its path. Raises SettingsError if the name is invalid or taken (see `replace`)."""
    if not _NAME.fullmatch(name) or name in WORDS:
        raise SettingsError(f"{one_line(name, 60)!r} cannot name a preset; use letters, digits, - and _.")
    path = presets_folder() / f"{name}.toml"
    if path.exists() and not replace:
        raise SettingsError(f"There is already a preset {name}; /preset replace {name} overwrites it.")
    lines = [
        f"{key} = {toml_value(value)}"
        for key in ("model", "system", "think", "tools")
        if (value := getattr(preset, key)) is not None
    ]
    if preset.sampling:
        lines += [
            "",
            "[sampling]",
            *(f"{key} = {toml_value(value)}" for key, value in preset.sampling.items()),
        ]
    write(path, "\n".join(lines) + "\n")
    return path
