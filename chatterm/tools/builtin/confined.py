"""Files below one folder, and nowhere else.

Every part of a path is opened relative to its parent folder, and none of them may be a link. So no concurrent change
of the tree (a folder replaced by a link, say) leads outside, and nothing has to be checked beforehand.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chatterm.terminal.sanitize import is_safe, one_line
from chatterm.tools.tool import ToolError
from models.system import NOFOLLOW

MOST_BYTES = 4_000_000
"""The largest file that is read or written, in bytes."""
IS_SUPPORTED = (
    hasattr(os, "O_NOFOLLOW") and {os.open, os.stat, os.mkdir, os.rename, os.unlink} <= os.supports_dir_fd
)
"""Whether this system opens files relative to a folder; Windows does not."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NOFOLLOW  # opening a pipe must not block
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One name in a folder."""

    name: str
    kind: str
    """"file", "folder", "link" or "other"."""
    size: int


class Confined:
    """The files below `root`. Paths are relative to it; every method raises ToolError in one line."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def parts(self, path: str) -> tuple[str, ...]:
        """Split `path` into names without reading the disk; it need not exist, and () is the folder itself."""
        if not is_safe(path) or "\n" in path or "\t" in path:
            raise ToolError("The path has control characters; leave them out.")
        if path.startswith("~"):
            raise ToolError(f"{one_line(path, 80)} is outside the working folder; name a path below it.")
        if path.startswith("/"):
            root = str(self.root).rstrip("/") + "/"
            if path.rstrip("/") + "/" == root:
                path = ""
            elif not path.startswith(root):
                raise ToolError(f"{one_line(path, 80)} is outside the working folder; name a path below it.")
            path = path[len(root) :] if path else path
        names = tuple(name for name in path.split("/") if name not in ("", "."))
        if ".." in names:
            raise ToolError("The path goes up with ..; name it from the working folder.")
        if len(names) > _MOST_PARTS or any(len(name.encode("utf-8", "replace")) > 255 for name in names):
            raise ToolError("The path is too long.")
        return names

    def name(self, path: str) -> str:
        """Return `path` in the canonical form that rules and people see."""
        return "/".join(self.parts(path)) or "."

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        with self._parent(path) as (folder, name):
            return self._read(folder, name, path)

    def read_text(self, path: str) -> str:
        """Return the text of a file, which must be UTF-8 without NUL."""
        data = self.read(path)
        if b"\0" in data:
            raise ToolError(f"{self.name(path)} is not a text file.")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{self.name(path)} is not UTF-8 text.") from None

    def list(self, path: str) -> list[FolderEntry]:
        """Return the entries of a folder, sorted by name."""
        with self._folder(self.parts(path), path) as folder:
            try:
                return sorted(self._entries(folder), key=lambda entry: entry.name)
            except OSError as error:
                raise _failed(path, error) from None

    def walk(self, path: str, most: int = 20_000) -> Iterator[str]:
        """Yield the files at or below `path` without links and hidden folders, looking at up to `most` entries."""
        start = self.name(path)
        waiting = [start]
        seen = 0
        while waiting:
            here = waiting.pop()
            try:
                entries = self.list(here)
            except ToolError:
                if here == start:
                    raise
                continue
            folders = []
            for entry in entries:
                full = entry.name if here == "." else f"{here}/{entry.name}"
                if entry.kind == "folder" and not entry.name.startswith("."):
                    folders.append(full)
                elif entry.kind == "file":
                    yield full
                seen += 1
                if seen >= most:
                    return
            waiting += reversed(folders)

    def write(self, path: str, data: bytes, before: bytes | None) -> None:
        """Replace a file atomically with `data` if its content still is `before` (None: it did not exist).

        Missing folders are created. Other hard links to the same file keep the old content.
        """
        if len(data) > MOST_BYTES:
            raise ToolError(f"The text has {len(data):,} bytes; {MOST_BYTES:,} is the most.")
        with self._parent(path, make=True) as (folder, name):
            mode = 0o666 & ~_umask()
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                found = None
            if found is not None:
                mode = stat.S_IMODE(found.st_mode)
                if before is None or self._read(folder, name, path) != before:
                    raise ToolError(f"{self.name(path)} has changed since it was shown; look at it again.")
            elif before is not None:
                raise ToolError(f"{self.name(path)} no longer exists; look again.")
            scratch = f".{secrets.token_hex(8)}.tmp"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW
                handle = os.open(scratch, flags, 0o600, dir_fd=folder)
                try:
                    with os.fdopen(handle, "wb") as file:
                        file.write(data)
                        file.flush()
                        os.fchmod(file.fileno(), mode & 0o777)
                    os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(scratch, dir_fd=folder)
                    raise
            except OSError as error:
                raise _failed(path, error) from None

    # -- internals

    @contextmanager
    def _folder(self, names: tuple[str, ...], path: str, make: bool = False) -> Iterator[int]:
        """Open the folder at these names; `make` creates missing ones."""
        try:
            folder = os.open(self.root, _FOLDER)
        except OSError as error:
            raise _failed(str(self.root), error) from None
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                below = os.open(name, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
        except OSError as error:
            os.close(folder)
            raise _failed(path, error) from None
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _parent(self, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
        names = self.parts(path)
        if not names:
            raise ToolError("This is the working folder itself; name a file in it.")
        with self._folder(names[:-1], path, make) as folder:
            yield folder, names[-1]

    def _read(self, folder: int, name: str, path: str) -> bytes:
        try:
            handle = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            raise _failed(path, error) from None
        try:
            found = os.fstat(handle)
            if stat.S_ISDIR(found.st_mode):
                raise ToolError(f"{self.name(path)} is a folder; list it.")
            if not stat.S_ISREG(found.st_mode):
                raise ToolError(f"{self.name(path)} is not a regular file.")
            with os.fdopen(handle, "rb", closefd=False) as file:
                data = file.read(MOST_BYTES + 1)  # whatever its reported size
        except OSError as error:
            raise _failed(path, error) from None
        finally:
            os.close(handle)
        if len(data) > MOST_BYTES:
            raise ToolError(f"{self.name(path)} is larger than {MOST_BYTES:,} bytes.")
        return data

    @staticmethod
    def _entries(folder: int) -> Iterator[FolderEntry]:
        with os.scandir(folder) as found:
            for entry in found:
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                yield FolderEntry(entry.name, _kind(info.st_mode), info.st_size)


class FileTool:
    """A tool that uses the files of the working folder."""

    def __init__(self, files: Confined) -> None:
        self._files = files


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def _umask() -> int:
    """Return this process's umask from /proc, since `os.umask` cannot read it without changing it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def _failed(path: str, error: OSError) -> ToolError:
    import errno

    shown = one_line(path, 120)
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return ToolError(f"{shown} is a symbolic link; tools do not follow links.")
    if error.errno == errno.ENOTDIR:
        return ToolError(f"{shown}: a part of the path is not a folder, or is a symbolic link.")
    return ToolError(f"{shown}: {error.strerror or 'it cannot be used'}.")
