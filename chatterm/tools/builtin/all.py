"""The list of all built-in tools."""

from pathlib import Path

from chatterm.tools.builtin.command import RunCommand
from chatterm.tools.builtin.confined import IS_SUPPORTED, Confined
from chatterm.tools.builtin.files import ListFolder, ReadFile, Search
from chatterm.tools.builtin.web import FetchUrl
from chatterm.tools.builtin.writing import PatchFile, WriteFile
from chatterm.tools.tool import Planner


def built_in(folder: Path) -> list[Planner]:
    """Return the tools that come with chatterm, for this working folder; on Windows only those without files."""
    if not IS_SUPPORTED:
        return [FetchUrl()]
    files = Confined(folder)
    return [
        ReadFile(files),
        ListFolder(files),
        Search(files),
        WriteFile(files),
        PatchFile(files),
        RunCommand(folder),
        FetchUrl(),
    ]
