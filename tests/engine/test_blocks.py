"""BlockManager against a plain model of what must be true."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.cache.block_table import BlockTable, OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.copies import Copy, Offload, Restore, RowCopy
from engine.cache.offload import HostTier, common_prefix
from engine.cache.window import Window
from tests.fresh import examples


def filled(manager: BlockManager, keys: list[int]) -> BlockTable:
    table = manager.open(keys)
    rest = keys[table.length :]
    manager.reserve(table, len(rest))
    manager.commit(table, rest)
    return table


def test_a_full_prefix_is_shared_and_the_rest_is_copied_to_the_token() -> None:
    copies: list[Copy] = []
    manager = BlockManager(8, 4, copies.append)
    first = filled(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = manager.open([1, 2, 3, 4, 5, 6, 99])
    assert second.length == 6
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] not in first.blocks
    assert copies == [RowCopy(first.blocks[1], second.blocks[1], 2)]
    manager.check()


def test_an_unfinished_tail_that_nobody_holds_is_written_on_in_place() -> None:
    copies: list[Copy] = []
    manager = BlockManager(4, 4, copies.append)
    first = filled(manager, [1, 2, 3, 4, 5, 6])
    blocks = list(first.blocks)
    manager.close(first)
    second = manager.open([1, 2, 3, 4, 5, 6, 7])
    assert (second.blocks, second.length, copies) == (blocks, 6, [])
    manager.check()


def test_blocks_of_one_sequence_are_contiguous() -> None:
    manager = BlockManager(16, 4)
    manager.close(filled(manager, [1, 2]))
    assert filled(manager, list(range(10, 40))).blocks == list(range(1, 9))


def test_the_oldest_leaf_is_evicted_first_and_an_ancestor_after_its_children() -> None:
    manager = BlockManager(4, 2)
    manager.close(filled(manager, [1, 2, 3, 4]))
    manager.close(filled(manager, [1, 2, 5, 6]))
    table = filled(manager, [7, 8, 9, 10])
    assert manager.match([1, 2, 3, 4]) == 2
    assert manager.match([1, 2, 5, 6]) == 4
    manager.reserve(table, 2)
    assert manager.match([1, 2, 5, 6]) == 2
    manager.check()


SYSTEM, TALK, SIBLING = [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]


def test_siblings_go_before_the_conversation_which_shrinks_from_its_end_the_system_prompt_last() -> None:
    manager = BlockManager(4, 2)
    manager.close(filled(manager, TALK))
    manager.close(filled(manager, SIBLING))
    manager.pin(TALK)
    table, left = manager.open([]), []
    for rows in (2, 4, 6):
        manager.reserve(table, rows)
        left.append((manager.match(TALK), manager.match(SIBLING)))
        manager.check()
    assert left == [(6, 4), (4, 4), (2, 2)], "the sibling is the younger one, and yet it goes first"


def test_idle_work_does_without_blocks_rather_than_take_those_of_the_conversation_in_use() -> None:
    manager = BlockManager(5, 2)
    manager.pin(TALK)  # named before it is there
    manager.close(filled(manager, TALK))
    manager.close(filled(manager, SIBLING))
    table = manager.open([])
    manager.reserve(table, 4, idle=True)
    assert (manager.match(TALK), manager.match(SIBLING)) == (6, 4)
    with pytest.raises(OutOfBlocksError):
        manager.reserve(table, 5, idle=True)
    assert manager.open([1, 2, 3, 9], idle=True).length == 2, "there is no block for a copy"
    manager.reserve(table, 5)
    assert manager.match(TALK) == 4, "a person has it"
    manager.check()


@pytest.mark.parametrize("idle", [False, True])
def test_a_block_that_matches_in_part_is_cut_before_the_conversation_in_use_makes_room_for_a_copy(
    idle: bool,
) -> None:
    copies: list[Copy] = []
    manager = BlockManager(3, 4, copies.append)
    manager.close(filled(manager, [7, 8, 9, 10]))
    manager.pin([1, 2, 3, 4])
    manager.close(filled(manager, [1, 2, 3, 4]))
    manager.reserve(manager.open([]), 4)
    assert manager.open([7, 8, 99], idle).length == 2
    assert (manager.match([1, 2, 3, 4]), manager.match([7, 8, 9, 10])) == (4, 2)
    assert copies == [], "its rows are in place"
    manager.check()


def test_of_blocks_that_match_equally_the_first_is_copied() -> None:
    copies: list[Copy] = []
    manager = BlockManager(40, 4, copies.append)
    first, *_ = [filled(manager, [1, 2, 3, last]) for last in range(10, 30)]
    copies.clear()
    manager.open([1, 2, 3, 4])
    assert [copy.source for copy in copies if isinstance(copy, RowCopy)] == first.blocks


def test_another_conversation_in_use_takes_the_place_of_the_one_before() -> None:
    manager = BlockManager(4, 2)
    for keys in (TALK, SIBLING):
        manager.close(filled(manager, keys))
    manager.pin(TALK)
    manager.pin(SIBLING)
    manager.reserve(manager.open([]), 2, idle=True)
    assert (manager.match(TALK), manager.match(SIBLING)) == (4, 6)


def test_equal_paths_share_their_blocks_once_they_are_full() -> None:
    manager = BlockManager(8, 2)
    first, second = manager.open([]), manager.open([])
    for table in (first, second):
        manager.reserve(table, 4)
        manager.commit(table, [1, 2, 3, 4])
    assert first.blocks == second.blocks
    assert manager.num_held == 2
    manager.check()


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(3, 2)
    table = filled(manager, [1, 2])
    with pytest.raises(OutOfBlocksError):
        manager.reserve(table, 5)
    assert (len(table.blocks), manager.num_free) == (1, 2)
    manager.check()


def test_forget_frees_a_path_but_not_what_others_need() -> None:
    manager = BlockManager(8, 2)
    manager.close(filled(manager, [1, 2, 3, 4, 5, 6, 7]))
    branch = filled(manager, [1, 2, 3, 4, 9])
    assert manager.forget([1, 2, 3, 4, 5, 6, 7], 2) == 2
    assert manager.match([1, 2, 3, 4, 5]) == 4
    manager.close(branch)
    assert manager.forget([1, 2, 3, 4], 0) == 0, "the branch still goes through these blocks"
    manager.check()


def test_a_key_with_a_mark_is_another_key() -> None:
    manager = BlockManager(4, 2)
    table = manager.open([])
    manager.reserve(table, 3)
    manager.commit(table, [1, (2, (7, 8)), 3])
    assert manager.match([1, 2, 3]) == 1
    assert manager.match([1, (2, (7, 8)), 3]) == 3


class CopyError(Exception):
    pass


class Blocks(RuleBasedStateMachine):
    """Random use. The model: what each table must hold, and the rows that each block was last filled with.

    A row is everything from the start up to its key: what its KV depends on.
    """

    tables: Bundle[BlockTable] = Bundle("tables")
    window: Window | None = None
    blocks = 12

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.blocks, 4, self._copy, self.tier(), self.window)
        self.content: dict[BlockTable, list[int]] = {}
        self.kept: list[int] = []
        self.memory = {block: [None] * 4 for block in range(self.blocks)}
        self.host: dict[int, list] = {}
        self.fails_in: int | None = None
        """So many copies from now on the one comes that fails."""

    def tier(self) -> HostTier | None:
        return None

    def _copy(self, copy: Copy) -> None:
        """Carry it out, or fail and leave the target in pieces."""
        target, place = (
            (self.host, copy.slots) if isinstance(copy, Offload) else (self.memory, self._target(copy))
        )
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                target[place] = [["torn"]] * 4
                raise CopyError
        if isinstance(copy, RowCopy):
            self.memory[copy.target][: copy.rows] = self.memory[copy.source][: copy.rows]
        else:
            target[place] = list(
                self.memory[copy.block] if isinstance(copy, Offload) else self.host[copy.slots]
            )

    def _target(self, copy: RowCopy | Restore) -> int:
        return copy.target if isinstance(copy, RowCopy) else copy.block

    def _on_device(self, keys: list[int]) -> int:
        path, _, rows = self.manager.index.find(keys)
        return len(path) * 4 + rows

    @rule(keys=st.lists(st.integers(0, 1), max_size=14))
    def pin(self, keys: list[int]) -> None:
        self.kept = keys
        self.manager.pin(keys)

    @contextmanager
    def _evicts_rightly(self, idle: bool) -> Iterator[None]:
        """The conversation in use loses nothing to idle work, and nothing while there is something else to evict."""
        before, path = self._on_device(self.kept), set(self.manager.path(self.kept))
        yield
        if self._on_device(self.kept) < before:
            assert not idle
            cached = {block.id for block in self.manager.every if block.keys and not block.refs}
            assert cached <= path

    @rule(copies=st.integers(0, 3))
    def one_of_the_next_copies_fails(self, copies: int) -> None:
        self.fails_in = copies

    @rule(target=tables, keys=st.lists(st.integers(0, 1), max_size=14), idle=st.booleans())
    def open(self, keys: list[int], idle: bool) -> object:
        there, found = self._on_device(keys), self.manager.match(keys)
        try:
            with self._evicts_rightly(idle):
                table = self.manager.open(keys, idle)
        except CopyError:
            return multiple()
        assert there - 3 <= table.length <= found
        self.content[table] = keys[: table.length]
        return table

    @rule(table=tables, keys=st.lists(st.integers(0, 1), min_size=1, max_size=9), idle=st.booleans())
    def append(self, table: BlockTable, keys: list[int], idle: bool) -> None:
        if table.since <= table.length:
            return
        before = list(table.blocks)
        try:
            with self._evicts_rightly(idle):
                self.manager.reserve(table, len(keys), idle)
        except (OutOfBlocksError, CopyError):
            assert table.blocks == before
            return
        start = table.length
        self.content[table] += keys
        # A step writes the rows before it notes them: the blocks may be swapped for equal ones on commit.
        for row in range(start, start + len(keys)):
            self.memory[table.blocks[row // 4]][row % 4] = self.content[table][: row + 1]
        self.manager.commit(table, keys)

    @rule(table=tables, extra=st.integers(1, 8))
    def reserve_what_may_never_be_written(self, table: BlockTable, extra: int) -> None:
        with suppress(OutOfBlocksError, CopyError):
            self.manager.reserve(table, extra)

    @rule(table=consumes(tables))
    def close(self, table: BlockTable) -> None:
        self.manager.close(table)
        assert self.manager.match(self.content[table]) == len(self.content[table]), "closing loses nothing"
        del self.content[table]

    @rule(keys=st.lists(st.integers(0, 1), max_size=14), start=st.integers(0, 8))
    def forget(self, keys: list[int], start: int) -> None:
        stays = [keys[:start], self.kept[: min(common_prefix(self.kept, keys), start)]]
        before = [self.manager.match(path) for path in stays]
        self.manager.forget(keys, start)
        assert [self.manager.match(path) for path in stays] == before

    @rule()
    def evict(self) -> None:
        self.manager.evict_all()
        assert (self.manager.num_cached, len(self.manager.tier)) == (0, 0)

    @invariant()
    def holds(self) -> None:
        self.manager.check()
        for table, keys in self.content.items():
            assert table.length == len(keys)
            seen = range(self._first_seen(table), table.length)
            rows = [self.memory[table.blocks[row // 4]][row % 4] for row in seen]
            assert rows == [keys[: row + 1] for row in seen], "a table reads what others wrote"
            assert self.manager.match(keys) == len(keys)

    def _first_seen(self, table: BlockTable) -> int:
        """The first row that its next one sees."""
        return max(table.length + 1 - self.window.rows, 0) if self.window is not None else 0


Blocks.TestCase.settings = settings(examples(120), stateful_step_count=40)
TestBlocks = Blocks.TestCase


class NarrowBlocks(Blocks):
    """All layers see the last three rows: a block is let go of as soon as the next one is full."""

    window = Window(3, 9)
    blocks = 7
    tables: Bundle[BlockTable] = Bundle("tables")

    @rule(table=tables, keys=st.lists(st.integers(0, 1), min_size=6, max_size=9))
    def append_much(self, table: BlockTable, keys: list[int]) -> None:
        self.append(table, keys, False)

    @rule(target=tables, table=tables, cut=st.integers(0, 9))
    def open_the_beginning_of_another(self, table: BlockTable, cut: int) -> object:
        return self.open(self.content[table][: max(len(self.content[table]) - cut, 0)], False)

    @rule(target=tables, table=tables, back=st.integers(0, 20), keys=st.lists(st.integers(0, 1), max_size=14))
    def open_from_a_row_on(self, table: BlockTable, back: int, keys: list[int]) -> object:
        """A table that holds more than its next row sees, for somebody who copies it."""
        keys = self.content[table] or keys
        since = max(len(keys) - back, 0)
        try:
            opened = self.manager.open(keys, since=since)
        except CopyError:
            return multiple()
        for row in range(since, opened.length):
            assert self.memory[opened.blocks[row // 4]][row % 4] == keys[: row + 1]
        self.content[opened] = keys[: opened.length]
        return opened


class WideBlocks(NarrowBlocks):
    """All layers see nine rows."""

    window = Window(9, 9)


def test_a_copy_with_a_window_leaves_the_conversation_in_use_alone() -> None:
    """A program of `NarrowBlocks`: the block that matches in part is the only one cached of another conversation."""
    state = NarrowBlocks()
    first: BlockTable = state.open([], False)  # type: ignore[assignment]
    state.pin([0])
    second: BlockTable = state.open_from_a_row_on(first, 0, [0] * 4)  # type: ignore[assignment]
    state.append(first, [1, *[0] * 6], False)
    state.append(second, [0] * 9, False)
    state.append_much(first, [0] * 6)
    state.open_the_beginning_of_another(first, 6)
    state.holds()


NarrowBlocks.TestCase.settings = WideBlocks.TestCase.settings = Blocks.TestCase.settings
TestNarrowBlocks = NarrowBlocks.TestCase
TestWideBlocks = WideBlocks.TestCase
