"""Sessions as files: which formats there are, how a file is called, and how it is written and read."""

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
"""The most bytes of a file that can be imported."""
_SUFFIXES = {".md": "md", ".markdown": "md", ".json": "json", ".html": "html", ".htm": "html"}


def exported(info: SessionInfo, tree: Tree, format: Format) -> str:
    """The session as text: `json` is all of it, `md` and `html` the selected branch."""
    if format == "json":
        from chatterm.sessions.as_json import to_json

        return to_json(info, tree)
    if format == "html":
        from chatterm.sessions.as_html import to_html

        return to_html(info, tree.path(tree.head))
    from chatterm.sessions.as_markdown import to_markdown

    return to_markdown(info, tree.path(tree.head))


def choose_format(path: Path) -> Format:
    """By the end of the name. Raises SessionError for one that means nothing."""
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise SessionError(
            f"{one_line(path.name or str(path), 100)!r} does not say which format to use; end the name in {known}."
        )
    return cast("Format", found)


def file_name(info: SessionInfo, format: Format) -> str:
    """A name for the file, made from the title: letters, digits and "-" only."""
    words = re.sub(r"[^\w]+", "-", info.title.lower()).strip("-_")[:60].strip("-_")
    return f"{words or UNTITLED.lower()}.{format}"


def write_export(path: Path, text: str, *, replace: bool = False) -> None:
    """Write all of it or nothing. Raises SessionError, also when the file is there and not to be replaced."""
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
    """A session from a JSON file. Raises SessionError."""
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
