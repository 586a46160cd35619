"""The files of a folder that are attached together, and a preview of them."""

from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from chatterm.conversation.attached_file import read_text
from chatterm.conversation.attachment_errors import AttachmentError
from chatterm.conversation.gitignore import files_below
from chatterm.terminal.sanitize import one_line
from models.units import bytes_text, counted

MOST_FILES = 200
MOST_CHARACTERS = 400_000
"""Most characters of all files together."""
LARGEST = 100_000
"""Largest size of one file, in bytes."""
_LOOKED_AT = 5_000
"""Most names that are looked at."""
_SECONDS = 3.0
"""Seconds after which no more files are read."""
_MACHINE = tuple(map(Path, ("/proc", "/sys", "/dev")))
_NAMED = 8
"""Most files that a preview names."""
_PER_TOKEN = 4
"""Approximate characters per token."""


@dataclass(slots=True)
class FolderFiles:
    name: str
    texts: dict[str, str] = field(default_factory=dict)
    """Texts by file name."""
    left_out: list[str] = field(default_factory=list)
    """Names of files that are no text, too large, or one too many."""

    @property
    def preview(self) -> str:
        """A line that says what would be attached."""
        size = sum(map(len, self.texts.values()))
        inside = [name.removeprefix(self.name) for name in self.texts]
        names = ", ".join(inside[:_NAMED]) + (
            f" and {len(inside) - _NAMED:,} more" if len(inside) > _NAMED else ""
        )
        rest = f"; {len(self.left_out):,} left out" if self.left_out else ""
        tokens = counted(max(size // _PER_TOKEN, 1), "token")
        return (
            f"{one_line(self.name, 100)} has {counted(len(self.texts), 'file')}, {bytes_text(size)}, about {tokens}: "
            f"{one_line(names, 300)}{rest}."
        )


def folder_files(folder: Path, name: str) -> FolderFiles:
    """Read the text files below a folder, as far as they fit. Raises AttachmentError (one line) if there are none."""
    here = folder.resolve()
    if here == Path(here.anchor) or any(here.is_relative_to(place) for place in _MACHINE):
        raise AttachmentError(f"{one_line(name, 200)} is too large to attach; name a folder in it.")
    found, size, deadline = FolderFiles(name), 0, monotonic() + _SECONDS
    for path in files_below(folder, _LOOKED_AT):
        inner = name + path.relative_to(folder).as_posix()
        try:
            fits = (
                0 < path.stat().st_size <= LARGEST
                and len(found.texts) < MOST_FILES
                and monotonic() < deadline
            )
            text = read_text(path, inner) if fits else ""
        except (AttachmentError, OSError):
            text = ""
        if not text.strip() or size + len(text) > MOST_CHARACTERS:
            found.left_out.append(inner)
            continue
        found.texts[inner] = text
        size += len(text)
    if not found.texts:
        raise AttachmentError(f"{one_line(name, 200)} has no text files to attach.")
    return found
