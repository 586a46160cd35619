"""Completions of `@path` from the disk."""

import os
from dataclasses import dataclass
from pathlib import Path

from chatterm.conversation.attachments import located, mentions
from chatterm.terminal.sanitize import is_safe
from models.units import bytes_text

_MOST = 200
"""The most names offered; typing on narrows them down."""
_LOOKED_AT = 20_000
"""The most names of a folder that are examined."""


@dataclass(frozen=True, slots=True)
class PathToken:
    """The `@path` being typed, at `start:end` of the text."""

    start: int
    end: int
    path: str


@dataclass(frozen=True, slots=True)
class FoundPath:
    """A matching file or folder."""

    path: str
    """The completed path as typed; a folder ends in a slash."""
    is_folder: bool
    note: str
    """Its size."""

    @property
    def written(self) -> str:
        """The mention as inserted into the message. A folder's is left open, to continue into it."""
        if " " not in self.path:
            return f"@{self.path}" + ("" if self.is_folder else " ")
        return f'@"{self.path}' + ("" if self.is_folder else '" ')


def path_token(text: str, cursor: int) -> PathToken | None:
    """Return the mention that ends at the cursor; None if there is none."""
    line = text[text.rfind("\n", 0, cursor) + 1 : cursor]
    start = cursor - len(line)
    if line.endswith("@") and (len(line) == 1 or line[-2].isspace()):
        return PathToken(cursor - 1, cursor, "")
    quote = line.rfind('@"')
    if quote >= 0 and '"' not in line[quote + 2 :]:
        return PathToken(start + quote, cursor, line[quote + 2 :])
    last = next((m for m in mentions(line) if m.end == len(line) and not m.quoted), None)
    return None if last is None else PathToken(start + last.start, cursor, last.path)


def found_paths(path: str, folder: Path) -> list[FoundPath]:
    """Return files and folders that begin with `path`, then those that contain its last part. Reads the disk.

    Hidden ones appear only if the last part begins with a dot. Names unsafe for a terminal are left out.
    """
    parent, _, prefix = path.rpartition("/")
    parent += "/" if "/" in path else ""
    lead, inside = [], []
    try:
        with os.scandir(located(folder, parent or ".")) as entries:
            for number, entry in enumerate(entries):
                if number >= _LOOKED_AT:
                    break
                name = entry.name
                if (name.startswith(".") and not prefix.startswith(".")) or not is_safe(name) or '"' in name:
                    continue
                if name.lower().startswith(prefix.lower()):
                    lead.append(entry)
                elif prefix and prefix.lower() in name.lower():
                    inside.append(entry)
    except (OSError, ValueError):  # no such folder
        return []
    ordered = [e for group in (lead, inside) for e in sorted(group, key=lambda e: e.name.lower())]
    return [_found(entry, parent) for entry in ordered[:_MOST]]


def _found(entry: "os.DirEntry[str]", parent: str) -> FoundPath:
    try:
        is_folder = entry.is_dir()
        note = "" if is_folder else bytes_text(entry.stat().st_size)
    except OSError:
        is_folder, note = False, ""
    return FoundPath(f"{parent}{entry.name}{'/' if is_folder else ''}", is_folder, note)
