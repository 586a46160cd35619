"""Sessions as files: the formats, file names, writing and reading."""

import re
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Literal, cast, get_args

from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.titles import UNTITLED
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import one_line
from models.files import write_whole
from models.units import bytes_text

Format = Literal["md", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
LARGEST_IMPORT = 256 << 20
"""The largest file that can be imported, in bytes."""
_SUFFIXES = {".md": "md", ".markdown": "md", ".json": "json", ".html": "html", ".htm": "html"}


def exported(info: SessionInfo, tree: Tree, format: Format) -> str:
    """Return the session as text: `json` is all of it, `md` and `html` the selected branch."""
    if format == "json":
        from chatterm.sessions.as_json import to_json

        return to_json(info, tree)
    if format == "html":
        from chatterm.sessions.as_html import to_html

        return to_html(info, tree.path(tree.head))
    from chatterm.sessions.as_markdown import to_markdown

    return to_markdown(info, tree.path(tree.head))


def choose_format(path: Path) -> Format:
    """Return the format that the suffix of `path` names. Raises SessionError for an unknown suffix."""
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise SessionError(
            f"{one_line(path.name or str(path), 100)!r} does not say which format to use; end the name in {known}."
        )
    return cast("Format", found)


def file_name(info: SessionInfo, format: Format) -> str:
    """Return a file name made from the title: letters, digits, "_" and "-" only."""
    words = re.sub(r"[^\w]+", "-", info.title.lower()).strip("-_")[:60].strip("-_")
    return f"{words or UNTITLED.lower()}.{format}"


def write_export(path: Path, text: str, *, replace: bool = False) -> None:
    """Write the file whole or not at all. Raises SessionError, also if it exists and `replace` is false."""
    shown = one_line(str(path), 200)
    try:
        if path.exists() and not replace:
            raise SessionError(f"{shown} already exists; choose another name or delete it first.")
        if path.exists() and not path.is_file():  # a device would be replaced, too
            raise SessionError(f"{shown} is not a regular file; choose another name.")
        write_whole(path, text, errors="replace", parents=False)
    except OSError as error:
        raise SessionError(
            f"{shown} cannot be written: {error.strerror or error}; choose another place."
        ) from error


def read_import(path: Path) -> tuple[SessionInfo, Tree]:
    """Read a session from a JSON file. Raises SessionError."""
    from chatterm.sessions.as_json import from_json

    shown = one_line(str(path), 200)
    try:
        mode = path.stat().st_mode
        if not S_ISREG(mode) and not S_ISDIR(mode):  # reading a pipe would wait, and a device may have no end
            raise SessionError(f"{shown} is not a regular file; a JSON export is needed.")
        with path.open("rb") as file:
            data = file.read(LARGEST_IMPORT + 1)
    except OSError as error:
        raise SessionError(f"{shown} cannot be read: {error.strerror or error}.") from error
    if len(data) > LARGEST_IMPORT:
        raise SessionError(f"{shown} is longer than {bytes_text(LARGEST_IMPORT)}; it cannot be imported.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SessionError(f"{shown} is not UTF-8 text; a JSON export is needed.") from error
    try:
        return from_json(text)
    except SessionError as error:
        raise SessionError(f"{shown}: {error}") from error
