"""Find the files of a folder that are worth reading: neither ignored by .gitignore files nor generated."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ALWAYS = frozenset(
    ["node_modules", "__pycache__", "venv", "target", "dist", "build", "package-lock.json", "uv.lock"]
)
"""Names that are always left out, besides hidden ones."""
_LARGEST = 100_000
"""Bytes of a .gitignore that are read."""

Names = tuple[str, ...]
"""The parts of a path below the repository's folder."""


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """One line of a .gitignore."""

    folder: Names
    """The folder of the .gitignore: the rule applies to what is below it."""
    parts: Names
    """The pattern, name by name; `**` stands for any number of names."""
    is_kept: bool
    """Whether it is a `!pattern`: what it names is not ignored."""
    folders_only: bool

    def fits(self, path: Names, is_folder: bool) -> bool:
        if path[: len(self.folder)] != self.folder or (self.folders_only and not is_folder):
            return False
        names = path[len(self.folder) :]
        reached = {0}  # how many names the parts so far can match
        for part in self.parts:
            if part == "**":
                reached = set(range(min(reached), len(names) + 1)) if reached else reached
            else:
                reached = {at + 1 for at in reached if at < len(names) and fnmatchcase(names[at], part)}
        return len(names) in reached


def parse_rules(text: str, folder: Names) -> list[IgnoreRule]:
    """Parse the rules of a .gitignore in `folder`."""
    found = []
    for line in text.splitlines():
        line = re.sub(r"(?<!\\)\s+$", "", line)
        is_kept = line.startswith("!")
        pattern = line[is_kept:].rstrip("/")
        if not pattern or line.startswith("#"):
            continue
        parts = [re.sub(r"\\(.)", _literal, part) for part in pattern.removeprefix("/").split("/")]
        start = () if "/" in pattern else ("**",)
        found.append(IgnoreRule(folder, (*start, *parts), is_kept, line.endswith("/")))
    return found


def _literal(match: re.Match[str]) -> str:
    """Return a character that followed a backslash as fnmatch writes it."""
    return f"[{match[1]}]" if match[1] in "*?[" else match[1]


def is_ignored(path: Names, is_folder: bool, rules: Sequence[IgnoreRule]) -> bool:
    """Return whether a path is ignored; the last rule that fits counts."""
    return next((not rule.is_kept for rule in reversed(rules) if rule.fits(path, is_folder)), False)


def _is_there(path: Path) -> bool:
    """Return whether a path exists; False in a folder that may not be read."""
    try:
        return path.exists()
    except OSError:
        return False


def files_below(top: Path, most: int) -> Iterator[Path]:
    """Yield the files below a folder that are worth reading. Links are not followed; `most` names are looked at."""
    here = top.resolve()
    root = next((folder for folder in (here, *here.parents) if _is_there(folder / ".git")), here)
    inside = here.relative_to(root).parts
    rules: list[IgnoreRule] = []
    for depth in range(len(inside)):
        rules += parse_rules(_text(root.joinpath(*inside[:depth]) / ".gitignore"), inside[:depth])
    yield from _below(top, inside, rules, [most])


def _below(folder: Path, names: Names, rules: list[IgnoreRule], left: list[int]) -> Iterator[Path]:
    rules = [*rules, *parse_rules(_text(folder / ".gitignore"), names)]
    try:
        entries = sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name))
    except OSError:
        return
    for path in entries:
        left[0] -= 1
        if left[0] < 0:
            return
        if path.name.startswith(".") or path.name in ALWAYS or path.is_symlink():
            continue
        is_folder = path.is_dir()
        if is_ignored((*names, path.name), is_folder, rules):
            continue
        if is_folder:
            yield from _below(path, (*names, path.name), rules, left)
        elif path.is_file():
            yield path


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""
