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

import torch

from engine.cache.block import Block, Key
from engine.cache.blocks import BlockManager
from engine.cache.host_memory import PromptCosts
from engine.cache.kv_cache import KVCache
from engine.errors import EngineError
from engine.events import DiskFigures
from engine.store import cost_cache
from engine.store.buffers import Buffers
from engine.store.digests import Digest, after, root, without_windows
from engine.store.folder import Folder, is_chunk
from engine.store.jobs import RestoreRequest, WriteRequest
from engine.store.path_digests import PathDigests
from models.weights.staging import StagingBuffer

MOST_WRITES = 32
"""The most paths that are remembered to be written."""
WRITING = 2
"""The most blocks handed to the disk's thread and not written yet."""
WORTH_WAITING = {"cpu": 1024, "cuda": 8192}
"""The rows from which a prompt waits for the folder to be scanned (about 20 ms, more if a GPU's buffers are pinned)."""
KEPT_WITHIN = 0.1
"""The measured times are saved again when they have changed by this share."""
PATIENCE_S = 0.5, 5.0
"""The least seconds that a request waits for the disk, and the seconds if the time of computing is unknown."""
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
        self._digests = PathDigests(blocks)
        self._folder: Folder | None = None
        """None until it has been scanned, and once it is of no use."""
        self._writes: list[WriteRequest] = []
        """The paths to be written; the last one is next."""
        self._looked = 0
        """How many of them, from the end, were found to have nothing to write at the moment."""
        self._restores: list[RestoreRequest] = []
        self._early: list[Callable[[], None]] | None = []
        """Requests made before the folder was scanned; None from then on."""
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

    def request_write(self, owner: str, keys: Sequence[Key], until: int = 0) -> None:
        """Have the full blocks of a conversation written in idle time, as far as they are still cached then.

        Rows before `until` are masked (see `Rows.masked_until`); they are written even if the last block is not full.
        """
        if self.problem:
            return
        write = WriteRequest(owner, list(keys), until)
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
            if not self._next(self._folder, write) and write in self._writes:
                self._looked += 1
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

    def _next(self, folder: Folder, write: WriteRequest) -> bool:
        """Hand over the next block of a path. Return False if none is ready."""
        owner = write.owner
        path = self._blocks.index.chain(write.keys)
        for block in path[write.done :]:
            if block.is_gone:
                return False
            digest = self._digests.digest(block, write.digest or self._digests.root)
            is_whole = self._blocks.groups.have(block.id)
            name = digest if is_whole else without_windows(digest)
            has = folder.holds(owner, digest) or folder.holds(owner, name)
            if not has and not self._hand_over(folder, owner, name, block, self._size):
                return False
            write.done, write.digest = write.done + 1, digest
            if not has:
                return True
        if write.done < len(write.keys) // self._size:
            return False
        tail = write.keys[write.done * self._size : write.until]
        if tail:
            held = self._blocks.path(write.keys[: write.until])
            if len(held) <= write.done:  # it, or the rows before it that it needs, is not there now
                return False
            block = self._blocks.every[held[-1]]
            if block.keys[: len(tail)] != tail:
                return False
            digest = after(write.digest or self._digests.root, tail)
            has = folder.holds(owner, digest)
            if not has and not self._hand_over(folder, owner, digest, block, len(tail)):
                return False
        self._writes.remove(write)
        return bool(tail)

    def _hand_over(self, folder: Folder, owner: str, digest: Digest, block: Block, count: int) -> bool:
        """Have the first `count` rows of a block written, with zeros in place of the rest, which may belong to others.
        Return False if there is no memory for that now."""
        slot = self._buffers.take_now()
        if slot is None:
            return False
        try:
            stored = self._cache.block(block.id)
            for rows, held in zip(stored, self._buffers.block(slot, 0, stored), strict=True):
                # Gathered on the GPU, they cross the bus in one copy.
                whole = torch.empty_like(held, device=rows.device) if rows.is_cuda else held
                whole.copy_(rows)[:, :, count:] = 0
                if whole is not held:
                    held.copy_(whole, non_blocking=True)
        except RuntimeError:  # the device has no room for `whole`
            self._buffers.give(slot)
            return False
        slot.note_copy(self._cache.device)
        self._writing += 1
        self._tasks.put(partial(self._write, folder, owner, digest, slot, count))
        return True

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
                write.done, write.digest = 0, b""

    def _write(self, folder: Folder, owner: str, digest: Digest, slot: StagingBuffer, count: int) -> None:
        try:
            slot.wait()
            wrote = folder.append(owner, digest, slot.view[: self._buffers.block_bytes])
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
            return
        folder = self._folder
        if folder is None or not len(folder) or not self.costs.worth_it:
            then()
            return
        keys = list(keys)
        found = self._digests.missing(folder, keys, until)
        present, missing, end = found.present, found.digests, found.end
        if not missing:
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
            if present > found.held:
                self._blocks.go_along(table, keys[: present * self._size])
        except Exception:  # noqa: BLE001 - computing the prompt raises it again, and reports it
            then()
            return
        asked = end - present * self._size
        restore = RestoreRequest(table, keys[:end], idle, [wanted], [then], missing, found.is_bare, asked)
        self._restores.append(restore)
        if table.length != present * self._size:
            self._end(restore)
            return
        self._tasks.put(lambda: self._read(folder, restore))
        least, unknown = PATIENCE_S
        patience = max(self.costs.computed * restore.asked, least) if self.costs.computed else unknown
        restore.timer = Timer(patience, lambda: self._tell(lambda: self._end(restore, too_slow=True)))
        restore.timer.daemon = True
        with suppress(RuntimeError):  # the system can start no more threads now
            restore.timer.start()

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
        early, self._early = self._early or [], None
        for ask in early:
            ask()

    def reach(self, keys: Sequence[Key]) -> int:
        """Return how many of the first rows of `keys` are cached or on disk; 0 while the disk is not in use."""
        return 0 if self._folder is None else self._digests.missing(self._folder, keys, 0).end

    def _read(self, folder: Folder, restore: RestoreRequest) -> None:
        """Read the missing blocks on the disk's thread, group by group, no further ahead than the buffers allow."""
        restore.is_cold = folder.is_cold(restore.missing)
        if restore.is_cold and not self.costs.if_cold.worth_it:  # computing is as fast as the disk itself
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
        """Copy the first blocks of a buffer into the cache."""
        table, size = restore.table, self._size
        restore.is_over = restore.is_over or not any(wanted() for wanted in restore.wanted)
        for place in range(count):
            if restore.is_over:
                break
            rows = min(size, len(restore.keys) - table.length)
            try:
                is_bare = restore.is_bare[restore.rows // size]
                self._blocks.reserve(table, rows, restore.idle, is_bare)
                targets = self._cache.block(table.blocks[table.length // size])
                for target, held in zip(targets, self._buffers.block(slot, place, targets), strict=True):
                    target.copy_(held, non_blocking=True)  # zeros, where the block has only the blank slot
            except Exception:  # noqa: BLE001 - no room, or a failed copy: the rest is computed
                restore.is_over = True
                break
            self._blocks.commit(table, restore.keys[table.length : table.length + rows])
            self.restored += rows
            restore.rows += rows
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
            self.costs.brought_back(restore.rows, took, restore.is_cold)
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

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whatever it is, the chat continues
                self._fail(f"cannot be used ({error!r:.100})")
        if self._opened is not None:
            self._opened.close()
        self._buffers.close()
