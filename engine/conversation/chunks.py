"""What many prompts begin with, computed once and kept in the cache by a name."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from threading import Lock

from engine.cache.blocks import BlockManager
from engine.cache.offload import common_prefix
from engine.cache.rows import Rows
from engine.core import EngineCore
from engine.errors import EngineError
from engine.schedule.loop import Loop
from engine.schedule.sequence import Priority, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """One of them, as it stands now. Counts are of tokens."""

    name: str
    tokens: int
    pinned: bool
    """Whether it is evicted late."""
    present: int
    """How many of its tokens need not be computed."""
    shared: int
    """How many it has in common with the beginning of one that is listed before it."""
    branches: int
    """Ends of conversations in the cache that stand on it."""
    token_bytes: int
    """What a token takes in the KV cache."""

    @property
    def bytes(self) -> int:
        """Memory that its own tokens take: those present and not shared."""
        return max(self.present - self.shared, 0) * self.token_bytes

    @property
    def saved_bytes(self) -> int:
        """Memory that the conversations on it would take more if each had its own."""
        return max(self.branches - 1, 0) * self.present * self.token_bytes


@dataclass(slots=True)
class _Kept:
    rows: Rows
    reading: Sequence
    pinned: bool = True
    done: int = 0
    """The most of its tokens that were seen to be computed."""


class Chunks:
    """The chunks of an engine. Every method may be called from any thread.

    A chunk is a path in the prefix index: whatever begins with its tokens stands on its blocks, and chunks share what
    they begin with. Pinned, it is evicted after everything else but the conversation in use. What had to go is computed
    again when a prompt needs it.
    """

    def __init__(self, engine: EngineCore, blocks: BlockManager, loop: Loop) -> None:
        self._engine = engine
        self._blocks = blocks
        self._loop = loop
        self._lock = Lock()
        self._kept: dict[str, _Kept] = {}

    def keep(self, tokens: Items[int], name: str, wait: bool = False) -> None:
        """Have `tokens` computed while nobody waits for anything else, and pinned under `name` from now on.

        A chunk of that name is dropped. Returns at once unless told to `wait`, and then raises what went wrong. Raises
        EngineError for an empty name, no tokens, or a token that does not exist; ContextFullError for too many.
        """
        if not name.strip():
            raise EngineError("A chunk needs a name.")
        if not tokens:
            raise EngineError(f"There is nothing to keep as {name!r}: it has no tokens.")
        rows = Rows.of(list(tokens))
        self._engine.check_rows(rows)
        self.drop(name)
        reading = Sequence(rows, Priority.PERSON if wait else Priority.IDLE)
        with self._lock:
            self._kept[name] = _Kept(rows, reading)
        self._loop.post(lambda: self._blocks.keep(name, rows.keys))
        self._engine.submit(reading)
        if wait:
            reading.finished.wait()
            if reading.error is not None:
                raise reading.error

    def pin(self, name: str, pinned: bool = True) -> None:
        """Have a chunk evicted late, or as everything else is. Raises EngineError where there is none."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                raise EngineError(f"There is no chunk {name!r}; keep it first.")
            kept.pinned = pinned
        keys = kept.rows.keys if pinned else None
        self._loop.post(lambda: self._blocks.keep(name, keys))

    def drop(self, name: str) -> bool:
        """Forget a chunk: what it has in the cache is evicted as everything else is. False where there is none."""
        with self._lock:
            kept = self._kept.pop(name, None)
        if kept is None:
            return False
        kept.reading.cancelled = True
        self._loop.post(lambda: self._blocks.keep(name, None))
        return True

    def list(self) -> list[Chunk]:
        """Every chunk, in the order in which they were kept."""
        with self._lock:
            kept = list(self._kept.items())
        blocks, token_bytes = self._blocks, self._engine.figures().kv_token_bytes
        standing = self._loop.call(
            lambda: [(blocks.match(one.rows.keys), blocks.branches(one.rows.keys)) for _, one in kept]
        )
        found: list[Chunk] = []
        before: list[list[int]] = []
        for (name, one), (present, branches) in zip(kept, standing, strict=True):
            ids = one.rows.token_ids
            shared = max((common_prefix(ids, others) for others in before), default=0)
            found.append(Chunk(name, len(ids), one.pinned, present, shared, branches, token_bytes))
            before.append(ids)
        return found

    def progress(self, name: str) -> tuple[int, int] | None:
        """(tokens computed, all of them) while a chunk is read; None once it is, or where there is none."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.reading.finished.is_set():
                return None
            kept.done = max(kept.done, kept.reading.computed)  # 0 again at its end
            return kept.done, len(kept.rows)
