"""Tools that write a whole file or a part of one. The change is shown as a diff before it is made."""

import re
from collections.abc import Callable, Mapping
from difflib import unified_diff
from typing import Any

from chatterm.backends.backend import Tool
from chatterm.terminal.sanitize import is_safe
from chatterm.tools.arguments import check_arguments, flat_schema
from chatterm.tools.builtin.confined import MOST_BYTES, Confined, FileTool
from chatterm.tools.tool import Effect, Tone, ToolError, ToolPlan, ToolRun
from models.units import counted

_RUNS_LATER = re.compile(
    r"(^|/)(\.git|\.githooks|\.husky|\.github|\.vscode|\.idea|\.devcontainer)/"
    r"|(^|/)(\.bashrc|\.bash_profile|\.profile|\.zshrc|\.zprofile|\.zshenv|\.envrc|\.gitconfig|\.gitmodules|\.npmrc)$"
    r"|(^|/)(conftest\.py|sitecustomize\.py|usercustomize\.py|.*\.pth)$",
    re.IGNORECASE,
)
"""Files that other programs run or obey by themselves."""


class WriteFile(FileTool):
    effect: Effect = "write"
    tool = Tool(
        "write_file",
        "Write a text file below the working folder, or replace all of one.",
        flat_schema(
            ["path", "text"],
            path=("string", "The file, from the working folder."),
            text=("string", "All of its new text."),
        ),
    )

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        return _plan(self._files, "write_file", given["path"], lambda _: given["text"], {})


class PatchFile(FileTool):
    effect: Effect = "write"
    tool = Tool(
        "patch_file",
        "Replace a part of a text file below the working folder. The old text must occur exactly once.",
        flat_schema(
            ["path", "old", "new"],
            path=("string", "The file, from the working folder."),
            old=("string", "The text to replace, exactly as it is in the file."),
            new=("string", "The text to put in its place."),
        ),
    )

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        old, new = given["old"], given["new"]
        if not old:
            raise ToolError("old is empty; write_file creates a new file.")

        def patched(before: str | None) -> str:
            count = before.count(old) if before is not None else 0
            if before is None or count != 1:
                where = "There is no such file" if before is None else f"The old text occurs {count} times"
                raise ToolError(f"{where}; it must occur exactly once.")
            return before.replace(old, new)

        return _plan(self._files, "patch_file", given["path"], patched, {"old": old, "new": new})


def write_dangers(name: str, text: str) -> tuple[str, ...]:
    """Return why writing this file always needs approval."""
    found = ["other programs run or obey this file"] if _RUNS_LATER.search(name) else []
    if not is_safe(text):
        found.append("the text has control characters")
    return tuple(found)


def _plan(
    files: Confined, tool: str, path: str, made: Callable[[str | None], str], given: Mapping[str, str]
) -> ToolPlan:
    """Plan a write of `made(current text)`. The person sees a problem with the file at once; the model
    learns of it only if the call is allowed, so that a refused call reveals nothing about the disk."""
    name = files.name(path)
    if name == ".":
        raise ToolError("This is the working folder itself; name a file in it.")
    problem: ToolError | None = None
    before: bytes | None = None
    text = ""
    try:
        before = _before(files, name)
        text = made(None if before is None else before.decode("utf-8"))
        if len(text.encode("utf-8", "replace")) > MOST_BYTES:
            raise ToolError(f"The text is larger than {MOST_BYTES:,} bytes.")
        data = text.encode("utf-8")
    except ToolError as error:
        problem = error
    except UnicodeError:
        problem = ToolError(f"{name} is not UTF-8 text.")
    if problem is not None:
        lines: list[tuple[str, Tone]] = [(f"path: {name}", "text")]
        lines += [(f"{key}: {value}", "muted") for key, value in given.items()]
        failed = problem

        def fail(_: ToolRun) -> str:
            raise failed

        return ToolPlan(tool, "write", name, (*lines, (f"This will fail: {problem}", "warning")), fail)
    old = "" if before is None else before.decode("utf-8")

    def run(_: ToolRun) -> str:
        files.write(name, data, before)
        return f"{name} is written: {counted(len(text.splitlines()), 'line')}."

    head: tuple[str, Tone] = (f"path: {name}" + (" (a new file)" if before is None else ""), "text")
    return ToolPlan(tool, "write", name, (head, *_diff(old, text)), run, write_dangers(name, text))


def _before(files: Confined, name: str) -> bytes | None:
    """Return the file's content, or None if it does not exist."""
    above, _, last = name.rpartition("/")
    try:
        entries = files.list(above)
    except ToolError:
        if _is_missing(files, above):
            return None
        raise
    found = next((entry for entry in entries if entry.name == last), None)
    if found is None:
        return None
    data = files.read(name)
    if b"\0" in data:
        raise ToolError(f"{name} is not a text file.")
    return data


def _is_missing(files: Confined, name: str) -> bool:
    """Return whether a folder does not exist, and each one above it is a folder or does not exist either."""
    above, _, last = name.rpartition("/")
    try:
        return all(entry.name != last for entry in files.list(above))
    except ToolError:
        return bool(above) and _is_missing(files, above)


def _diff(before: str, after: str) -> list[tuple[str, Tone]]:
    """Return the lines of a diff with three lines of context."""
    if before == after:
        return [("Nothing changes.", "muted")]
    rows: list[tuple[str, Tone]] = []
    for line in list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3))[2:]:
        tone: Tone = "added" if line[:1] == "+" else "removed" if line[:1] == "-" else "muted"
        rows.append((line, tone))
    return rows or [("Only line ends change.", "muted")]
