"""The files of blocks: one per conversation and fingerprint, with a limit on their total size.

    FOLDER/<fingerprint>/<conversation>.kv
    FOLDER/<fingerprint>/costs.json           measured times of reading and computing

One process at a time writes a file and holds a lock on it; any number may read it. When room is needed, files of whole
conversations are removed, the least recently used first.
"""

import errno
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from engine.store.digests import NAME, VOID, Digest, is_state, state_place
from engine.store.readers import Readers
from engine.store.records import HEADER, Record, header, is_at_its_place, read, scan
from models.system import BINARY, NOFOLLOW, try_lock, write_at

DEFAULT_SHARE = 0.1
"""The default limit as a share of the free space."""
DEFAULT_MOST = 20 * 10**9
"""The largest default limit, in bytes."""
LEFT_FREE = 256 * 1024**2
"""Bytes of the disk that are always left free, for sessions and other programs; on a small disk, a twentieth of it."""
MOST_OPEN = 4
"""The most files that are open at once."""
_LOOKS = 200
"""After this many appended blocks, the sizes of all files are read again, because other processes write, too."""
_PROBES = 32
"""The number of places at which `is_cold` looks."""
_MOST_MISSING = 0.25
"""Blocks are cold if more than this share of them is not in memory."""
_CHUNK = "chunk-"
"""The prefix of the names of chunks, with which many conversations begin."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SUFFIX = ".kv"


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    records: dict[Digest, Record] = field(default_factory=dict)
    last: Record | None = None
    fd: int = -1
    """-1 while the file is not open."""
    is_ours: bool = False
    """Whether this process holds the lock, and may append."""

    @property
    def end(self) -> int:
        """The offset at which the next record is written."""
        return self.last.end if self.last is not None else 0


class Folder:
    """The blocks of one fingerprint. For one thread at a time. Errors of the disk are raised as OSError."""

    def __init__(self, root: Path, fingerprint: str, most_bytes: int | None = None) -> None:
        """`most_bytes` limits all files below `root`; None: `default_bytes`. Raises OSError."""
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
        self._places: set[bytes] = set()
        """The first bytes of the digests of all states seen so far, whether they are still there or not."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with suppress(OSError):
                self._known(path)

    def __len__(self) -> int:
        """Return the number of blocks that can be read."""
        return len(self._found)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._found

    def holds(self, owner: str, digest: Digest) -> bool:
        """Return whether a block is in the file of `owner`, or in a chunk's file, which all its conversations use."""
        file, found = self._files.get(self._path(owner)), self._found.get(digest)
        if found is not None and is_chunk(found[0].path.name):
            return True
        return file is not None and digest in file.records

    def has_states(self, block: Digest) -> bool:
        """Return whether there may be states in the rows after a block, before the next one ends."""
        return state_place(block) in self._places

    def taken(self, owner: str) -> int:
        """Return the bytes in the file of a conversation."""
        file = self._files.get(self._path(owner))
        return file.end if file is not None else 0

    @property
    def costs(self) -> Path:
        """The file with the measured times (see `engine/store/cost_cache.py`)."""
        return self._folder / "costs.json"

    @property
    def nbytes(self) -> int:
        """The bytes of all files of all fingerprints."""
        return sum(size for _, size, _ in _files(self._root))

    def read(self, digest: Digest, into: memoryview, readers: Readers) -> Callable[[], bool]:
        """Begin to read a block into `into`. Call the returned function once, on this thread: it waits for the data.

        It returns False if the block is missing or damaged, and then forgets the block. Both raise OSError.
        """
        found = self._found.get(digest)
        if found is None:
            return lambda: False
        file, record = found
        is_read = read(file.fd, record, into, readers) if self._opened(file) else lambda: False

        def is_whole() -> bool:
            if is_read():
                return True
            if self._found.get(digest) == found:  # unless another file has taken its place
                del self._found[digest]
                file.records.pop(digest, None)
            return False

        return is_whole

    def is_cold(self, digests: Sequence[Digest]) -> bool:
        """Return whether much of these blocks is not in the system's page cache; False if the system does not tell.

        Does not wait for the disk.
        """
        flag, missing = int(getattr(os, "RWF_NOWAIT", 0)), 0
        for number in range(_PROBES) if flag else ():
            found = self._found.get(digests[len(digests) * number // _PROBES])
            if found is None:
                continue
            file, record = found
            try:
                if self._opened(file):
                    os.preadv(file.fd, [bytearray(1)], record.offset + record.size * number // _PROBES, flag)
            except BlockingIOError:
                missing += 1
            except OSError:  # not supported here, or an error that reading reports
                return False
        return missing > _MOST_MISSING * _PROBES

    def begin(self, owner: str) -> bool:
        """Make sure that a conversation has a file. If it is gone when a block is written, it was deleted or evicted.

        Return False if the conversation had a file that is gone; it has a new one then. Raises OSError.
        """
        path = self._path(owner)
        file = self._files.get(path)
        was_removed = file is not None and not self._is_there(file)
        if file is None or was_removed:
            self._opened(self._known(path), creates=True)
        return not was_removed

    def append(self, owner: str, digest: Digest, payload: memoryview) -> bool:
        """Append a block to the file of a conversation for which `begin` was called.

        Return False if the file was removed, another process writes it, or the limit leaves no room. Raises OSError;
        what was written of the block is never read then.
        """
        file = self._own(owner)
        if file is None or not self._make_room(HEADER + len(payload), file.path):
            return False
        try:
            write_at(file.fd, header(digest, payload), file.end)
            write_at(file.fd, payload, file.end + HEADER)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fd, file.end)
            raise
        file.last = self._note(file, digest, file.end)
        self._taken += HEADER + len(payload)
        return True

    def put(self, owner: str, digest: Digest, payload: memoryview, most: int, keep: Container[bytes]) -> bool:
        """Write a piece of a state as `append` does, but over the same piece, if the file has it, or if it has at least
        `most` pieces, over the first one of a state that is not named in `keep`.
        """
        file = self._own(owner)
        if file is None:
            return False
        old = file.records.get(digest)
        if old is None:
            pieces = [one for one in file.records if is_state(one)]
            others = (file.records[one] for one in pieces if one[:NAME] not in keep)
            fits = (record for record in others if record.size == len(payload))
            old = next(fits, None) if len(pieces) >= most else None
        if old is None:
            return self.append(owner, digest, payload)
        del file.records[old.digest]
        if self._found.get(old.digest) == (file, old):
            del self._found[old.digest]
        start = old.offset - HEADER
        write_at(file.fd, header(VOID, payload), start)  # until all is written, it is the old state no longer
        write_at(file.fd, payload, old.offset)
        write_at(file.fd, header(digest, payload), start)
        record = self._note(file, digest, start)
        file.last = record if file.last == old else file.last
        return True

    def _own(self, owner: str) -> _File | None:
        """Return the file of a conversation; None if it was removed or another process writes it. Raises OSError."""
        file = self._files.get(self._path(owner))
        if file is None or not self._is_there(file) or not (file.is_ours or self._lock(file)):
            return None
        return file

    def _note(self, file: _File, digest: Digest, start: int) -> Record:
        """Note the record that was written at byte `start`. Raises OSError if it cannot be read again."""
        record = next(scan(file.fd, start), None)
        if record is None or (record.digest, record.offset) != (digest, start + HEADER):
            raise OSError("what was written cannot be read again")
        self._keep(file, record)
        return record

    def touch(self, digest: Digest) -> None:
        """Mark the file that has this block as used now."""
        if (found := self._found.get(digest)) is not None:
            with suppress(OSError):
                os.utime(found[0].path)

    def close(self) -> None:
        """Close every file. Closing twice is fine."""
        for file in list(self._files.values()):
            self._let_go(file)

    def _path(self, owner: str) -> Path:
        if not _OWNER.fullmatch(owner):
            raise ValueError(f"{owner!r} cannot be the name of a file")
        return self._folder / f"{owner}{_SUFFIX}"

    def _known(self, path: Path) -> _File:
        """Return a file with the records found in it. Raises OSError."""
        file = _File(path)
        if self._opened(file):
            self._scan(file)
        self._files[path] = file
        return file

    def _opened(self, file: _File, creates: bool = False) -> bool:
        """Open a file if it is not open, and close others beyond MOST_OPEN. Return False if it does not exist.

        Raises OSError.
        """
        if file.fd >= 0:
            self._open.move_to_end(file)
            return True
        flags = os.O_RDWR | BINARY | NOFOLLOW | (os.O_CREAT if creates else 0)
        try:
            file.fd = os.open(file.path, flags, 0o600)
        except FileNotFoundError:
            return False
        self._open[file] = None
        while len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))
        if file.last is not None and not is_at_its_place(file.fd, file.last):
            self._forget_blocks(file)  # this is another file: the one we knew was removed in the meantime
            self._scan(file)
        return True

    def _is_there(self, file: _File) -> bool:
        """Open a file and return True; if somebody has removed it, forget it and return False. Raises OSError."""
        if self._opened(file) and os.fstat(file.fd).st_nlink:
            return True
        self._let_go(file)
        return False

    def _close(self, file: _File) -> None:
        """Close a file, which releases its lock."""
        os.close(file.fd)
        file.fd, file.is_ours = -1, False
        del self._open[file]

    def _scan(self, file: _File) -> None:
        for record in scan(file.fd, file.end):
            file.last = record
            self._keep(file, record)

    def _keep(self, file: _File, record: Record) -> None:
        """Note a record, so that it can be found."""
        file.records[record.digest] = record
        self._found[record.digest] = file, record
        if is_state(record.digest):
            self._places.add(record.digest[: NAME // 2])

    def _lock(self, file: _File) -> bool:
        """Lock a file for this process and cut off what a crash left at its end. Return False if another has it."""
        if not try_lock(file.fd):
            return False
        self._scan(file)  # another process may have written in the meantime
        os.ftruncate(file.fd, file.end)
        file.is_ours = True
        return True

    def _make_room(self, nbytes: int, keep: Path) -> bool:
        """Remove conversations until `nbytes` more fit within the limit and on the disk, and return whether they fit.

        `keep`, the file to be written, is never removed; if it is too large by itself, nothing is. Raises OSError if
        the disk has no room.
        """
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
            file = self._files.get(path)
            if file is not None and file.fd >= 0:
                self._close(file)  # Windows removes no open file
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue
            if file is not None:
                self._let_go(file)
            self._taken -= size
        if self._taken + nbytes > most and lacking > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._taken + nbytes <= most

    def _let_go(self, file: _File) -> None:
        """Forget a file and close it."""
        self._files.pop(file.path, None)
        self._forget_blocks(file)
        if file.fd >= 0:
            self._close(file)

    def _forget_blocks(self, file: _File) -> None:
        """Forget the blocks of a file; those that another file has, too, are found there from now on."""
        gone, file.records, file.last = file.records, {}, None
        for digest in gone:
            if self._found.get(digest, (None,))[0] is file:
                others = (one for one in self._files.values() if digest in one.records)
                if (other := next(others, None)) is not None:
                    self._found[digest] = other, other.records[digest]
                else:
                    del self._found[digest]


def chunk_owner(text: str) -> str:
    """Return the name under which the blocks of a chunk with this text are kept."""
    return chunk_owner_name(sha256(text.encode("utf-8", "replace")).hexdigest())


def chunk_owner_name(hexdigest: str) -> str:
    """Return the same name, given the SHA-256 of the text in hexadecimal."""
    return _CHUNK + hexdigest[:32]


def is_chunk(owner: str) -> bool:
    """Return whether a name is that of a chunk."""
    return owner.startswith(_CHUNK)


def default_folder() -> Path:
    """Return the folder of the blocks of conversations: in $CHATTERM_DATA, beside the sessions, if that is set, else in
    the cache folder."""
    from models.hub.catalogue import cache_folder  # not needed to remove files

    data = os.environ.get("CHATTERM_DATA")
    return (Path(data).expanduser() if data else cache_folder()) / "kv"


def default_bytes(root: Path) -> int:
    """Return the default limit in bytes: a share of the free space plus what the files take, up to a maximum."""
    taken = sum(size for _, size, _ in _files(root))
    return min(int((shutil.disk_usage(root).free + taken) * DEFAULT_SHARE), DEFAULT_MOST)


def forget(root: Path, owner: str) -> None:
    """Remove the files of a conversation, whichever model computed them."""
    if _OWNER.fullmatch(owner):
        for path in root.glob(f"*/{owner}{_SUFFIX}"):
            with suppress(OSError):
                path.unlink()


def owners(root: Path) -> set[str]:
    """Return the names of all conversations and chunks that have files, whichever model computed them."""
    return {path.stem for path in root.glob(f"*/*{_SUFFIX}")}


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of last use, the bytes and the path of each file."""
    for path in root.glob(f"*/*{_SUFFIX}"):
        with suppress(OSError):
            info = path.stat()
            yield info.st_mtime, info.st_size, path
