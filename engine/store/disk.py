"""The disk tier: blocks of conversations are written in idle time, and brought back when a prompt needs them.

The loop's thread looks up and copies; the tier's own thread reads and writes. An error ends only the tier.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, Timer
from time import perf_counter

from engine.cache.block import Key
from engine.cache.blocks import BlockManager
from engine.cache.host_memory import PromptCosts
from engine.cache.kv_cache import KVCache
from engine.cache.state_bytes import state_bytes
from engine.errors import EngineError
from engine.events import DiskFigures
from engine.store import cost_cache
from engine.store.arriving import arrive
from engine.store.buffers import Buffers
from engine.store.digests import root
from engine.store.folder import Folder, is_chunk
from engine.store.jobs import RestoreRequest, WriteRequest, pays
from engine.store.path_digests import PathDigests
from engine.store.path_writer import PathWriter
from engine.store.record_writer import RecordWriter, Store
from engine.store.state_writer import StateWriter
from models.weights.staging import StagingBuffer

MOST_WRITES = 32
"""The most paths that are remembered to be written."""
WRITING = 2
"""The most blocks handed to the disk's thread and not written yet."""
WORTH_WAITING = {"cpu": 256, "cuda": 8192}
"""The rows from which a prompt waits for the folder to be scanned (about 40 ms, more if a GPU's buffers are pinned)."""
KEPT_WITHIN = 0.1
"""The measured times are saved again when they have changed by this share."""
PATIENCE_S = 0.5, 5.0
"""The least seconds that a request waits for the disk, and the seconds if the time of computing is unknown, as it is
before the folder was scanned."""
CLOSING_S = 1.0
"""The most seconds that an engine continues writing when it ends."""

Post = Callable[[Callable[[], None]], None]
"""Runs a job on the loop's thread. Raises EngineError once the loop has ended."""


class DiskTier:
    """The blocks on disk, as the engine uses them. For the loop's thread, except where a method says otherwise."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int | None,
        cache: KVCache,
        blocks: BlockManager,
        post: Post,
        fingerprint: Callable[[], Mapping[str, str]],
    ) -> None:
        """Files are below `folder` and take at most `most_bytes` (None: a share of the free space). `fingerprint` is
        called on another thread and returns everything that the bits of a block depend on."""
        self._cache = cache
        self._blocks = blocks
        self._size = blocks.block_size
        self._post = post
        self._buffers = Buffers(sum(rows.nbytes for rows in cache.block(0)), cache.device)
        self._digests = PathDigests(blocks, self._count_pieces)
        records = RecordWriter(cache, self._buffers, self._hand_over)
        marks, digests = blocks.marks, self._digests
        states = StateWriter(cache, blocks, marks, digests, records) if marks is not None else None
        self._writer = PathWriter(blocks, digests, records, states)
        self._folder: Folder | None = None
        """None until it has been scanned, and once it is of no use."""
        self._writes: list[WriteRequest] = []
        """The paths to be written; the last one is next."""
        self._looked = 0
        """How many of them, from the end, were found to have nothing to write at the moment."""
        self._restores: list[RestoreRequest] = []
        self._early: list[Callable[[], None]] | None = []
        """Requests made before the folder was scanned; None from then on."""
        self._scan_timer = Timer(0.0, int)
        """Ends their wait."""
        self._writing = 0
        self._opened: Folder | None = None
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._finished: Event | None = None
        """The event that `finish` waits for: set once everything that can be written is written."""
        self.problem = ""
        """Why the tier is no longer used, in a line for people."""
        self.costs = PromptCosts()
        self._kept = PromptCosts()
        """The costs last saved for other runs."""
        self._hangs = False
        """Whether the disk once delivered nothing in time. Other runs are not told, because the disk may recover."""
        self.restored = self.written = 0
        """Tokens brought back and written so far."""
        self._thread = Thread(target=self._work, name="disk", daemon=True)
        self._thread.start()
        self._tasks.put(lambda: self._begin(folder, fingerprint, most_bytes))

    # -- writing

    def request_write(
        self, owner: str, keys: Sequence[Key], until: int = 0, edges: Sequence[int] = ()
    ) -> None:
        """Have the full blocks of a conversation written in idle time, as far as they are still cached then, and some
        states of recurrent layers.

        Rows before `until` are masked (see `Rows.masked_until`); they are written even if the last block is not full.
        `edges` are those of the rows.
        """
        if self.problem:
            return
        write = WriteRequest(owner, list(keys), until, list(edges))
        for before in [one for one in self._writes if one.owner == owner]:
            if before.keys == write.keys[: len(before.keys)]:
                self._writes.remove(before)
                write.done, write.digest = max((write.done, write.digest), (before.done, before.digest))
        self._writes.append(write)
        self._writes.sort(key=lambda one: is_chunk(one.owner))  # chunks first: conversations then skip those
        self._looked = 0
        del self._writes[:-MOST_WRITES]
        self._tasks.put(partial(self._begin_file, owner))

    def forget(self, owner: str) -> None:
        """Write nothing more of this conversation."""
        self._writes = [write for write in self._writes if write.owner != owner]

    def go_on(self) -> bool:
        """Hand a block to the disk's thread, if there is one to be written. Return whether there may be another."""
        if self._folder is None or self._writing >= WRITING:
            self._finish()
            return False
        if not self._hangs and self.costs.differ(self._kept, KEPT_WITHIN):
            self._keep_costs(self._folder)
        if self._looked < len(self._writes):  # the latest first, and one per call, because a request may wait
            write = self._writes[-1 - self._looked]
            if not self._writer.next(self._folder, write) and not write.is_done:
                self._looked += 1
            if write.is_done:
                self._writes.remove(write)
        if self._looked < len(self._writes):
            return True
        self._looked = 0
        self._finish()
        return False

    @property
    def has_writes(self) -> bool:
        """Whether blocks are still to be written."""
        return bool(self._writes or self._writing)

    def finish(self) -> None:
        """Wait, on another thread, until everything that can be written is, but at most CLOSING_S."""
        finished = Event()

        def ask() -> None:
            self._finished = finished

        with suppress(EngineError):  # the loop has ended
            self._post(ask)
            finished.wait(CLOSING_S)

    def _finish(self) -> None:
        """End the wait of `finish` if nothing is left to be written. Called when nothing more can be handed over."""
        is_over = self._folder is None or not self._writing
        if self._finished is not None and is_over and self._early is None:
            self._finished.set()

    def _keep_costs(self, folder: Folder) -> None:
        costs = self._kept = replace(self.costs)

        def keep() -> None:
            with suppress(OSError):  # the next run measures
                cost_cache.keep(folder.costs, costs)

        self._tasks.put(keep)

    def _hand_over(self, owner: str, store: Store, slot: StagingBuffer, count: int) -> None:
        """Have `store` write a record, which adds `count` rows to a conversation's file, from a buffer."""
        self._writing += 1
        self._tasks.put(partial(self._write, owner, store, slot, count))

    def _begin_file(self, owner: str) -> None:
        """Create a conversation's file, on the disk's thread. If it had one that is gone, write all of it again."""
        if self._opened is None:
            return
        try:
            goes_on = self._opened.begin(owner)
        except OSError as error:
            self._fail(f"cannot be written ({error.strerror or error})")
            return
        if not goes_on:
            self._tell(lambda: self._write_again(owner))

    def _write_again(self, owner: str) -> None:
        """Start the paths of a conversation again, because what was written is gone."""
        for write in self._writes:
            if write.owner == owner:
                write.done, write.digest, write.state = 0, b"", None
                write.handed.clear()

    def _write(self, owner: str, store: Store, slot: StagingBuffer, count: int) -> None:
        try:
            slot.wait()
            wrote = store(slot.view[: self._buffers.block_bytes])
        except OSError as error:
            self._fail(f"cannot be written ({error.strerror or error})")
            return
        finally:
            self._buffers.give(slot)

        def told() -> None:
            self._writing -= 1
            self.written += count if wrote else 0
            if not wrote:
                self.forget(owner)

        self._tell(told)

    # -- restoring

    def bring(
        self,
        keys: Sequence[Key],
        until: int,
        idle: bool,
        wanted: Callable[[], bool],
        then: Callable[[], None],
    ) -> None:
        """Bring back the blocks of `keys` that are on disk and follow those in the cache, then call `then` on this
        thread: at once if there are none, or if reading them would take longer than computing.

        `until` is as in `request_write` and `idle` as in `BlockManager.reserve`; `wanted` says whether the caller
        still waits. Blocks that are already being read are not read twice.
        """
        is_long = len(keys) >= WORTH_WAITING[self._cache.device.type]
        if self._early is not None and (idle or is_long):
            self._early.append(lambda: self.bring(keys, until, idle, wanted, then))
            if not idle and not self._scan_timer.is_alive():
                self._scan_timer = self._after(PATIENCE_S[1], self._ready)
            return
        folder = self._folder
        if folder is None or not len(folder) or not self.costs.worth_it:
            then()
            return
        keys = list(keys)
        found = self._digests.missing(folder, keys, until)
        present, missing, end = found.present, [*found.digests, *found.pieces], found.end
        asked = end - (found.match if found.pieces else present * self._size)
        read = len(missing) * self._size / asked if found.pieces else 1.0
        if not missing or not pays(self.costs, read):
            then()
            return
        coming = next((one for one in self._restores if not one.is_over and missing[0] in one.missing), None)
        if coming is not None:
            coming.idle = coming.idle and idle
            coming.wanted.append(wanted)
            coming.then.append(lambda: self.bring(keys, until, idle, wanted, then))
            return
        try:
            table = self._blocks.open(keys[: found.held * self._size], idle)
            if present > found.held or found.pieces:
                self._blocks.go_along(table, keys[: present * self._size])
        except Exception:  # noqa: BLE001 - computing the prompt raises it again, and reports it
            then()
            return
        restore = RestoreRequest(
            table, keys[:end], idle, [wanted], [then], missing, found.is_bare, asked, read
        )
        self._restores.append(restore)
        if table.length != present * self._size:
            self._end(restore)
            return
        self._tasks.put(lambda: self._read(folder, restore))
        least, unknown = PATIENCE_S
        patience = max(self.costs.computed * restore.asked, least) if self.costs.computed else unknown
        restore.timer = self._after(patience, lambda: self._end(restore, too_slow=True))

    @property
    def is_reading(self) -> bool:
        """Whether blocks are being brought back for a request."""
        return bool(self._restores)

    def abandon(self) -> None:
        """Answer everyone who waits for the disk, because the loop ends or the disk is of no use."""
        self._folder = None
        self._ready()
        for restore in list(self._restores):
            self._end(restore)

    def _ready(self) -> None:
        """Answer the requests made before the folder was scanned."""
        self._scan_timer.cancel()
        early, self._early = self._early or [], None
        for ask in early:
            ask()

    def reach(self, keys: Sequence[Key]) -> int:
        """Return how many of the first rows of `keys` are cached or on disk; 0 while the disk is not in use."""
        return 0 if self._folder is None else self._digests.missing(self._folder, keys, 0).end

    def _read(self, folder: Folder, restore: RestoreRequest) -> None:
        """Read the missing blocks on the disk's thread, group by group, no further ahead than the buffers allow."""
        restore.is_cold = folder.is_cold(restore.missing)
        if restore.is_cold and not pays(
            self.costs.if_cold, restore.read
        ):  # computing is as fast as the disk itself
            self._tell(lambda: self._end(restore))
            return
        with suppress(EngineError), closing(self._buffers.read(folder, restore.missing)) as groups:
            try:
                for slot, count in groups:
                    self._post(partial(self._take, restore, slot, count))
                    if restore.is_over:
                        break
            except OSError as error:
                self._fail(f"cannot be read ({error.strerror or error})")
            folder.touch(restore.missing[0])
            self._post(lambda: self._end(restore))

    def _take(self, restore: RestoreRequest, slot: StagingBuffer, count: int) -> None:
        """Copy the first blocks and pieces of a buffer into the cache."""
        restore.is_over = restore.is_over or not any(wanted() for wanted in restore.wanted)
        before = restore.rows
        for place in range(count):
            if restore.is_over:
                break
            try:
                arrive(restore, self._cache, self._blocks, self._buffers.record(slot, place))
            except Exception:  # noqa: BLE001 - no room, or a failed copy: the rest is computed
                restore.is_over = True
        self.restored += restore.rows - before
        slot.note_copy(self._cache.device)
        self._buffers.give(slot)

    def _end(self, restore: RestoreRequest, too_slow: bool = False) -> None:
        if restore not in self._restores:
            return
        self._restores.remove(restore)
        restore.is_over = True
        restore.timer.cancel()
        self._blocks.close(restore.table)
        took = perf_counter() - restore.began
        if too_slow and not restore.rows:
            self.costs.brought, self._hangs = took / restore.asked, True
        elif restore.rows:
            self.costs.brought_back(round(restore.rows * restore.read), took, restore.is_cold)
        for then in restore.then:
            then()

    # -- figures

    def taken(self, owner: str) -> int:
        """Return the bytes in the file of a conversation."""
        return self._folder.taken(owner) if self._folder is not None else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people: why the tier is no longer used, if it is not."""
        return (self.problem,) if self.problem else ()

    def figures(self) -> DiskFigures:
        """Return what the tier holds, and what restoring a token costs."""
        folder = self._folder
        return DiskFigures(
            blocks=len(folder) if folder is not None else 0,
            written_tokens=self.written,
            restored_tokens=self.restored,
            brought_s=self.costs.brought,
            cold_s=self.costs.cold,
            computed_s=self.costs.computed,
            is_used=self.costs.worth_it,
            problem=self.problem,
        )

    def close(self) -> None:
        """End the thread after the writes handed to it, waiting 5 s at most. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
            self._thread.join(5.0)

    # -- helpers

    def _begin(
        self, folder: Path, fingerprint: Callable[[], Mapping[str, str]], most_bytes: int | None
    ) -> None:
        """Open the folder and the buffers, on the disk's thread."""
        try:
            start = root(fingerprint())
            found = Folder(folder, start.hex()[:24], most_bytes)
            self._buffers.open()
        except OSError as error:
            self._fail(f"cannot be used ({error.strerror or error})")
            return
        except RuntimeError:
            self._fail("cannot be used (the system gives no memory, or no thread)")
            return
        self._opened = found
        known = cost_cache.load_costs(found.costs)

        def begun() -> None:
            self._digests.root, self._folder, self._kept = start, found, known
            self.costs.learn(known)
            self._ready()

        self._tell(begun)

    def _count_pieces(self, row: int) -> int:
        """Return how many pieces the state after `row` rows has."""
        return -(-state_bytes(self._cache, row) // self._buffers.block_bytes)

    def _fail(self, why: str) -> None:
        def failed() -> None:
            self.problem = (
                self.problem or f"The KV cache on disk {why}; conversations are recomputed instead."
            )
            self._writes.clear()
            self.abandon()

        self._tell(failed)

    def _tell(self, job: Callable[[], None]) -> None:
        with suppress(EngineError):  # the loop has ended
            self._post(job)

    def _after(self, seconds: float, job: Callable[[], None]) -> Timer:
        """Start a timer that has `job` run on the loop's thread."""
        timer = Timer(seconds, self._tell, (job,))
        timer.daemon = True
        with suppress(RuntimeError):  # the system can start no more threads now
            timer.start()
        return timer

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whatever it is, the chat continues
                self._fail(f"cannot be used ({error!r:.100})")
        if self._opened is not None:
            self._opened.close()
        self._buffers.close()
