"""Chunks: beginnings that many prompts share, computed once and kept in the cache under a name."""

from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from engine.cache.offload import common_prefix
from engine.cache.rows import Rows
from engine.core import EngineCore
from engine.errors import EngineError
from engine.events import CachedChunk
from engine.schedule.sequence import Priority, Sequence


@dataclass(slots=True)
class _Kept:
    rows: Rows
    reading: Sequence
    owner: str | None
    """The owner of the file on disk that holds it."""
    pinned: bool = True
    done: int = 0
    """The most tokens that were seen to be computed."""

    @property
    def is_read(self) -> bool:
        return self.reading.finished.is_set()


class Chunks:
    """The chunks of an engine. Every method may be called from any thread.

    A chunk is a path in the prefix index: prompts that begin with its tokens use its blocks, and chunks share their
    common beginnings. A pinned chunk is evicted after everything except the conversation in use. Evicted rows are
    computed again when a prompt needs them.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._lock = Lock()
        self._kept: dict[str, _Kept] = {}
        self._seen: tuple[CachedChunk, ...] = ()
        self._looking = False

    def keep(self, tokens: Items[int], name: str, wait: bool = False, owner: str | None = None) -> None:
        """Compute `tokens` after all other idle work, and pin them under `name`.

        They replace a chunk of that name. If there is a disk tier, `owner` names their file there (see `chunk_owner`).
        Returns at once unless `wait` is set; then errors in computing are raised. Raises EngineError for an empty name,
        no tokens, or an unknown token id; ContextFullError for too many tokens.
        """
        if not name.strip():
            raise EngineError("A chunk needs a name.")
        if not tokens:
            raise EngineError(f"There is nothing to keep as {name!r}: it has no tokens.")
        rows = Rows.of(list(tokens))
        self._engine.check_rows(rows)
        self.drop(name)
        reading = Sequence(rows, Priority.PERSON if wait else Priority.IDLE, is_late=not wait)
        with self._lock:
            self._kept[name] = _Kept(rows, reading, owner)
        self._engine.loop.post(lambda: self._engine.pieces.blocks.keep(name, rows.keys))
        self._engine.submit(reading)
        self._engine.save(owner, rows)
        if wait:
            reading.finished.wait()
            if reading.error is not None:
                raise reading.error

    def pin(self, name: str, pinned: bool = True) -> None:
        """Have a chunk evicted late, or like everything else. Raises EngineError if there is no such chunk."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                raise EngineError(f"There is no chunk {name!r}; keep it first.")
            kept.pinned = pinned
        keys = kept.rows.keys if pinned else None
        self._engine.loop.post(lambda: self._engine.pieces.blocks.keep(name, keys))

    def drop(self, name: str) -> bool:
        """Forget a chunk: its rows are evicted like everything else. Return False if there is no such chunk."""
        with self._lock:
            kept = self._kept.pop(name, None)
        if kept is None:
            return False
        kept.reading.cancelled = True
        self._engine.loop.post(lambda: self._engine.pieces.blocks.keep(name, None))
        return True

    def list(self) -> list[CachedChunk]:
        """Return every chunk, in the order in which they were kept."""
        return [*self._engine.loop.call(self._standing)]

    def look(self) -> tuple[CachedChunk, ...]:
        """Return the chunks as of the last look, at once, and have them looked at again between two steps."""
        if self._kept and not self._looking:
            self._looking = True

            def job() -> None:
                self._seen, self._looking = self._standing(), False

            with suppress(EngineError):  # the engine is closed
                self._engine.loop.post(job)
        return self._seen if self._kept else ()

    def _standing(self) -> tuple[CachedChunk, ...]:
        """Return the state of every chunk. Call it on the loop's thread."""
        with self._lock:
            kept = list(self._kept.items())
        blocks, token_bytes = self._engine.pieces.blocks, self._engine.kv_token_bytes
        found: list[CachedChunk] = []
        before: list[list[int]] = []
        for name, one in kept:
            ids, keys = one.rows.token_ids, one.rows.keys
            shared = max((common_prefix(ids, others) for others in before), default=0)
            present, branches = blocks.match(keys), blocks.index.branches(keys)
            on_disk = self._engine.taken_on_disk(one.owner) if one.owner is not None else 0
            about = len(ids), one.pinned, present, shared, branches, token_bytes, one.is_read, on_disk
            found.append(CachedChunk(name, *about))
            before.append(ids)
        return tuple(found)

    def progress(self, name: str) -> tuple[int, int] | None:
        """Return (tokens computed, all tokens) while a chunk is computed; None once it is, or if there is none."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.is_read:
                return None
            kept.done = max(kept.done, kept.reading.computed)  # `computed` is 0 again at the end
            return kept.done, len(kept.rows)
