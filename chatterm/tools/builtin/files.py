"""Tools that read: one file, one folder, and a search through text files."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from chatterm.backends.backend import Tool
from chatterm.terminal.sanitize import cleaned
from chatterm.tools.arguments import check_arguments, flat_schema, show_arguments
from chatterm.tools.builtin.confined import FileTool
from chatterm.tools.output import bounded
from chatterm.tools.tool import Effect, ToolError, ToolPlan, ToolRun

_LINES = 400
"""Lines of a file that one call reads by default."""
_FOUND = 200
"""Lines that one search finds at most."""
_WIDE = 300
"""Characters of a found line that are returned."""
_SECRET = re.compile(
    r"(^|/)(\.env[^/]*|\.ssh|\.aws|\.gnupg|\.netrc|\.npmrc|\.pypirc|\.git-credentials|id_[a-z0-9]+|[^/]*\.(pem|key|p12|kdbx))(/|$)",
    re.IGNORECASE,
)
"""Names of files that usually hold secrets."""


def read_dangers(name: str) -> tuple[str, ...]:
    """Return why reading this file always needs approval."""
    return ("this file may hold secrets",) if _SECRET.search(name) else ()


class ReadFile(FileTool):
    effect: Effect = "read"
    tool = Tool(
        "read_file",
        "Read a text file below the working folder. Lines are numbered from 1.",
        flat_schema(
            ["path"],
            path=("string", "The file, from the working folder."),
            first=("integer", "The first line to read; 1 where it is left out."),
            lines=("integer", f"How many lines; {_LINES} where it is left out."),
        ),
    )

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        first, count = given.get("first", 1), given.get("lines", _LINES)
        if first < 1 or count < 1:
            raise ToolError("first and lines must be 1 or more.")
        name = self._files.name(given["path"])

        def run(_: ToolRun) -> str:
            lines = self._files.read_text(name).splitlines()
            chosen = lines[first - 1 : first - 1 + count]
            if not chosen:
                return f"{name} has {len(lines):,} lines." if lines else f"{name} is empty."
            rest = len(lines) - (first - 1 + len(chosen))
            more = f"\n[{rest:,} more lines]" if rest > 0 else ""
            return bounded("\n".join(chosen)) + more

        return ToolPlan("read_file", "read", name, show_arguments(given), run, read_dangers(name))


class ListFolder(FileTool):
    effect: Effect = "read"
    tool = Tool(
        "list_folder",
        "List the files and folders in a folder below the working folder.",
        flat_schema(path=("string", "The folder; the working folder where it is left out.")),
    )

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        name = self._files.name(given.get("path", ""))

        def run(_: ToolRun) -> str:
            entries = self._files.list(name)
            # A name with line breaks could pass for several entries.
            rows = [
                f"{cleaned(e.name).replace(chr(10), '?')}{_MARKS[e.kind]}  {_size(e.kind, e.size)}".rstrip()
                for e in entries
            ]
            return bounded("\n".join(rows)) if rows else f"{name} is empty."

        return ToolPlan("list_folder", "read", name, show_arguments({"path": name}), run)


class Search(FileTool):
    effect: Effect = "read"
    tool = Tool(
        "search",
        "Search text files below the working folder for a text; gives path:line: text.",
        flat_schema(
            ["text"],
            text=("string", "The text to look for, literally."),
            path=("string", "Where to search; everywhere if it is left out."),
            files=("string", "Only files with names like this: *.py"),
            ignore_case=("boolean", "Whether to ignore case."),
        ),
    )

    def plan(self, arguments: Mapping[str, Any]) -> ToolPlan:
        given = check_arguments(self.tool, arguments)
        if not given["text"]:
            raise ToolError("text is empty; say what to look for.")
        name = self._files.name(given.get("path", ""))

        def run(running: ToolRun) -> str:
            return self._found(
                name, given["text"], given.get("files", "*"), given.get("ignore_case", False), running
            )

        return ToolPlan("search", "read", name, show_arguments(given), run, read_dangers(name))

    def _found(self, start: str, text: str, files: str, ignore_case: bool, running: ToolRun) -> str:
        wanted = text.casefold() if ignore_case else text
        found: list[str] = []
        for name in self._names(start):
            if running.stopped.is_set():
                break
            # Files whose reading needs approval are skipped, unless the call names one.
            if not fnmatchcase(name.rpartition("/")[2], files) or (read_dangers(name) and name != start):
                continue
            try:
                lines = self._files.read_text(name).splitlines()
            except ToolError:
                continue
            for number, line in enumerate(lines, 1):
                if wanted in (line.casefold() if ignore_case else line):
                    found.append(f"{name}:{number}: {line.strip()[:_WIDE]}")
                    if len(found) >= _FOUND:
                        return bounded("\n".join(found)) + f"\n[the first {_FOUND} only]"
        return bounded("\n".join(found)) if found else "Nothing was found."

    def _names(self, start: str) -> list[str]:
        try:
            return list(self._files.walk(start))
        except ToolError:
            self._files.read(start)  # raises what is wrong, unless it is a file
            return [start]


_MARKS = {"file": "", "folder": "/", "link": " (link)", "other": " (special)"}


def _size(kind: str, size: int) -> str:
    return f"{size:,} bytes" if kind == "file" else ""
