"""The files of blocks: one for each conversation and fingerprint, and no more than a cap allows.

    FOLDER/<fingerprint>/<conversation>.kv
    FOLDER/<fingerprint>/costs.json           what reading and computing were measured to take

A file is written by one process at a time, which holds a lock on it; any number read. Where room is needed whole
conversations go, those used longest ago first.
"""

import errno
import fcntl
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from engine.store.digests import Digest
from engine.store.readers import Readers
from engine.store.records import Record, header, is_at_its_place, read, scan

DEFAULT_SHARE = 0.1
"""Of the free space, where nobody says how much may be taken,"""
DEFAULT_MOST = 20 * 10**9
"""and at most so many bytes."""
LEFT_FREE = 256 * 1024**2
"""Bytes of the disk that are left to others, sessions among them; of a small disk a twentieth."""
MOST_OPEN = 4
"""Files that are open at once."""
_LOOKS = 200
"""Blocks after which it is looked at what other processes have written."""
_CHUNK = "chunk-"
"""So begin the names of what many conversations begin with."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".kv"


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    records: dict[Digest, Record] = field(default_factory=dict)
    last: Record | None = None
    fd: int = -1
    """Open while it was used lately."""
    is_ours: bool = False
    """Whether this process holds the lock, and may append."""

    @property
    def end(self) -> int:
        """Where the next record is written."""
        return self.last.end if self.last is not None else 0


class Folder:
    """The blocks of one fingerprint. One thread at a time reads and writes; what the disk refuses is OSError."""

    def __init__(self, root: Path, fingerprint: str, most_bytes: int | None = None) -> None:
        """`most_bytes` is for all files below `root`; None: a share of the free space. Raises OSError."""
        self._root = root
        self._folder = root / fingerprint
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._most = default_bytes(root) if most_bytes is None else most_bytes
        self._taken = self.nbytes
        self._appended = 0
        self._files: dict[Path, _File] = {}
        self._open: OrderedDict[_File, None] = OrderedDict()
        self._found: dict[Digest, tuple[_File, Record]] = {}
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with suppress(OSError):
                self._known(path)

    def __len__(self) -> int:
        """How many blocks can be read."""
        return len(self._found)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._found

    def holds(self, owner: str, digest: Digest) -> bool:
        """Whether the file of a conversation has a block, or that of a chunk: there it is for all who begin with it."""
        file, found = self._files.get(self._path(owner)), self._found.get(digest)
        if found is not None and is_chunk(found[0].path.name):
            return True
        return file is not None and digest in file.records

    def taken(self, owner: str) -> int:
        """Bytes of the blocks of a conversation."""
        file = self._files.get(self._path(owner))
        return file.end if file is not None else 0

    @property
    def costs(self) -> Path:
        """Where it is kept what was measured."""
        return self._folder / "costs.json"

    @property
    def nbytes(self) -> int:
        """Bytes of all files of all fingerprints."""
        return sum(size for _, size, _ in _files(self._root))

    def read(self, digest: Digest, into: memoryview, readers: Readers) -> Callable[[], bool]:
        """Begin to read a block. What is returned is to be called once, on this thread: it waits, and says False where
        there is none that is whole; that is not looked for again. Both raise OSError."""
        found = self._found.get(digest)
        if found is None:
            return lambda: False
        file, record = found
        is_read = read(file.fd, record, into, readers) if self._opened(file) else lambda: False

        def is_whole() -> bool:
            if is_read():
                return True
            if self._found.get(digest) == found:  # no other file was found in its place
                del self._found[digest]
                file.records.pop(digest, None)
            return False

        return is_whole

    def begin(self, owner: str) -> bool:
        """Have a file for a conversation: if it is gone when a block is written, the conversation was deleted. False
        where there was one that is gone. Raises OSError."""
        path = self._path(owner)
        file = self._files.get(path)
        was_removed = file is not None and not self._is_there(file)
        if file is None or was_removed:
            self._opened(self._known(path), creates=True)
        return not was_removed

    def append(self, owner: str, digest: Digest, payload: memoryview) -> bool:
        """Write a block behind those of a conversation that was begun. False where its file was removed, another
        process writes it, or the cap has no room for it. Raises OSError; then nothing was written that is ever read."""
        path = self._path(owner)
        file = self._files.get(path)
        if file is None or not self._is_there(file) or not (file.is_ours or self._lock(file)):
            return False
        head = header(digest, payload)
        offset = file.end + len(head)
        if not self._make_room(len(head) + len(payload), path):
            return False
        try:
            for start, part in ((file.end, memoryview(head)), (offset, payload)):
                done = 0
                while done < len(part):
                    done += os.pwrite(file.fd, part[done:], start + done)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fd, file.end)
            raise
        at = next(scan(file.fd, file.end), None)
        if at is None or (at.digest, at.offset) != (digest, offset):
            raise OSError("what was written cannot be read again")
        self._taken += len(head) + len(payload)
        file.records[digest] = file.last = at
        self._found[digest] = file, at
        return True

    def touch(self, digest: Digest) -> None:
        """The conversation that has this block is used now."""
        if (found := self._found.get(digest)) is not None:
            with suppress(OSError):
                os.utime(found[0].path)

    def close(self) -> None:
        """Let go of every file. Closing twice is fine."""
        for file in list(self._files.values()):
            self._let_go(file)

    def _path(self, owner: str) -> Path:
        if not _OWNER.fullmatch(owner):
            raise ValueError(f"{owner!r} cannot be the name of a file")
        return self._folder / f"{owner}{_SUFFIX}"

    def _known(self, path: Path) -> _File:
        """A file, with the records that it has so far. Raises OSError."""
        file = _File(path)
        if self._opened(file):
            self._scan(file)
        self._files[path] = file
        return file

    def _opened(self, file: _File, creates: bool = False) -> bool:
        """Have a file open, and no more than a few. False where it is not there. Raises OSError."""
        if file.fd >= 0:
            self._open.move_to_end(file)
            return True
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if creates else 0)
        try:
            file.fd = os.open(file.path, flags, 0o600)
        except FileNotFoundError:
            return False
        self._open[file] = None
        while len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        if file.last is not None and not is_at_its_place(file.fd, file.last):
            self._forget_blocks(file)  # it is another file: this one was removed meanwhile
            self._scan(file)
        return True

    def _is_there(self, file: _File) -> bool:
        """Have a file open that nobody has removed; else nothing is known of it. Raises OSError."""
        if self._opened(file) and os.fstat(file.fd).st_nlink:
            return True
        self._let_go(file)
        return False

    def _close(self, file: _File) -> None:
        """With the file its lock is given back."""
        os.close(file.fd)
        file.fd, file.is_ours = -1, False
        del self._open[file]

    def _scan(self, file: _File) -> None:
        for record in scan(file.fd, file.end):
            file.records[record.digest] = file.last = record
            self._found[record.digest] = file, record

    def _lock(self, file: _File) -> bool:
        """Have the file to ourselves, and cut off what a crash left at its end."""
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._scan(file)  # another process may have written meanwhile
        os.ftruncate(file.fd, file.end)
        file.is_ours = True
        return True

    def _make_room(self, nbytes: int, keep: Path) -> bool:
        """Remove conversations until so many bytes fit below the cap and on the disk; never the one that is written to,
        and none where that alone is too large. Raises OSError where the disk has no room."""
        self._appended += 1
        disk = shutil.disk_usage(self._folder)
        lacking = min(LEFT_FREE, disk.total // 20) + nbytes - disk.free
        if self._taken + nbytes <= self._most and lacking <= 0 and self._appended % _LOOKS:
            return True
        found = sorted(_files(self._root))
        self._taken = sum(size for _, size, _ in found)
        own = sum(size for _, size, path in found if path == keep)
        most = min(self._most, self._taken + nbytes - max(lacking, 0))
        for _, size, path in found:
            if self._taken + nbytes <= most or own + nbytes > most:
                break
            if path == keep:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue
            if (file := self._files.get(path)) is not None:
                self._let_go(file)
            self._taken -= size
        if self._taken + nbytes > most and lacking > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._taken + nbytes <= most

    def _let_go(self, file: _File) -> None:
        """Know nothing of it any more."""
        self._files.pop(file.path, None)
        self._forget_blocks(file)
        if file.fd >= 0:
            self._close(file)

    def _forget_blocks(self, file: _File) -> None:
        """What another file has of them is found there."""
        gone, file.records, file.last = file.records, {}, None
        for digest in gone:
            if self._found.get(digest, (None,))[0] is file:
                others = (one for one in self._files.values() if digest in one.records)
                if (other := next(others, None)) is not None:
                    self._found[digest] = other, other.records[digest]
                else:
                    del self._found[digest]


def chunk_owner(text: str) -> str:
    """Under which name it is kept what conversations on this text begin with."""
    return chunk_owner_of(sha256(text.encode("utf-8", "replace")).hexdigest())


def chunk_owner_of(hexdigest: str) -> str:
    """The same for the SHA-256 of the text."""
    return _CHUNK + hexdigest[:32]


def is_chunk(owner: str) -> bool:
    """Whether that is what many conversations begin with."""
    return owner.startswith(_CHUNK)


def default_folder() -> Path:
    """Where the blocks of conversations lie: beside the sessions, where $CHATTERM_DATA says where these are, else among
    what may be computed again."""
    from models.hub.catalogue import cache_folder  # for who only removes files

    data = os.environ.get("CHATTERM_DATA")
    return (Path(data).expanduser() if data else cache_folder()) / "kv"


def default_bytes(root: Path) -> int:
    """What may be taken where nobody says how much: a share of what is free and what is taken already."""
    taken = sum(size for _, size, _ in _files(root))
    return min(int((shutil.disk_usage(root).free + taken) * DEFAULT_SHARE), DEFAULT_MOST)


def forget(root: Path, owner: str) -> None:
    """Remove what a conversation has on disk, whatever model computed it."""
    if _OWNER.fullmatch(owner):
        for path in root.glob(f"*/{owner}{_SUFFIX}"):
            with suppress(OSError):
                path.unlink()


def owners(root: Path) -> set[str]:
    """Who has anything on disk, whatever model computed it."""
    return {path.stem for path in root.glob(f"*/*{_SUFFIX}")}


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """When each was used last, its bytes, its path."""
    for path in root.glob(f"*/*{_SUFFIX}"):
        with suppress(OSError):
            info = path.stat()
            yield info.st_mtime, info.st_size, path
