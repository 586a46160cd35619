"""BlockManager against a plain model of what must be true."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.blocks import BlockManager, BlockTable, OutOfBlocksError


def filled(manager: BlockManager, keys: list[int]) -> BlockTable:
    table, _ = manager.open(keys)
    rest = keys[table.length :]
    manager.reserve(table, len(rest))
    manager.commit(table, rest)
    return table


def test_a_full_prefix_is_shared_and_the_rest_is_copied_to_the_token() -> None:
    manager = BlockManager(8, 4)
    first = filled(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second, copies = manager.open([1, 2, 3, 4, 5, 6, 99])
    assert second.length == 6
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] not in first.blocks
    assert [(copy.source, copy.target, copy.rows) for copy in copies] == [
        (first.blocks[1], second.blocks[1], 2)
    ]
    manager.check()


def test_an_unfinished_tail_that_nobody_holds_is_written_on_in_place() -> None:
    manager = BlockManager(4, 4)
    first = filled(manager, [1, 2, 3, 4, 5, 6])
    blocks = list(first.blocks)
    manager.close(first)
    second, copies = manager.open([1, 2, 3, 4, 5, 6, 7])
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
    manager.keep(TALK)
    table, left = manager.open([])[0], []
    for rows in (2, 4, 6):
        manager.reserve(table, rows)
        left.append((manager.match(TALK), manager.match(SIBLING)))
        manager.check()
    assert left == [(6, 4), (4, 4), (2, 2)], "the sibling is the younger one, and yet it goes first"


def test_idle_work_does_without_blocks_rather_than_take_those_of_the_conversation_in_use() -> None:
    manager = BlockManager(5, 2)
    manager.keep(TALK)  # named before it is there
    manager.close(filled(manager, TALK))
    manager.close(filled(manager, SIBLING))
    table = manager.open([])[0]
    manager.reserve(table, 4, idle=True)
    assert (manager.match(TALK), manager.match(SIBLING)) == (6, 4)
    with pytest.raises(OutOfBlocksError):
        manager.reserve(table, 5, idle=True)
    assert manager.open([1, 2, 3, 9], idle=True)[0].length == 2, "there is no block for a copy"
    manager.reserve(table, 5)
    assert manager.match(TALK) == 4, "a person has it"
    manager.check()


def test_another_conversation_in_use_takes_the_place_of_the_one_before() -> None:
    manager = BlockManager(4, 2)
    for keys in (TALK, SIBLING):
        manager.close(filled(manager, keys))
    manager.keep(TALK)
    manager.keep(SIBLING)
    manager.reserve(manager.open([])[0], 2, idle=True)
    assert (manager.match(TALK), manager.match(SIBLING)) == (4, 6)


def test_equal_paths_share_their_blocks_once_they_are_full() -> None:
    manager = BlockManager(8, 2)
    first, second = manager.open([])[0], manager.open([])[0]
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
    table = manager.open([])[0]
    manager.reserve(table, 3)
    manager.commit(table, [1, (2, (7, 8)), 3])
    assert manager.match([1, 2, 3]) == 1
    assert manager.match([1, (2, (7, 8)), 3]) == 3


class Blocks(RuleBasedStateMachine):
    """Random use. The model: what each table must hold, and the rows that each block was last filled with."""

    tables: Bundle[BlockTable] = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, 4)
        self.content: dict[BlockTable, list[int]] = {}
        self.kept: list[int] = []
        self.memory = {block: [None] * 4 for block in range(12)}

    def _copy(self, copies: list) -> None:
        for copy in copies:
            self.memory[copy.target][: copy.rows] = self.memory[copy.source][: copy.rows]

    @rule(keys=st.lists(st.integers(0, 1), max_size=14))
    def keep(self, keys: list[int]) -> None:
        self.kept = keys
        self.manager.keep(keys)

    @contextmanager
    def _evicts_rightly(self, idle: bool) -> Iterator[None]:
        """The conversation in use loses nothing to idle work, and nothing while there is something else to evict."""
        before = self.manager.match(self.kept)
        yield
        if self.manager.match(self.kept) < before:
            assert not idle
            cached = {block.id for block in self.manager.every if block.keys and not block.refs}
            assert cached <= set(self.manager.path(self.kept))

    @rule(target=tables, keys=st.lists(st.integers(0, 1), max_size=14), idle=st.booleans())
    def open(self, keys: list[int], idle: bool) -> BlockTable:
        found = self.manager.match(keys)
        with self._evicts_rightly(idle):
            table, copies = self.manager.open(keys, idle)
        assert found - 3 <= table.length <= found
        self._copy(copies)
        self.content[table] = keys[: table.length]
        return table

    @rule(table=tables, keys=st.lists(st.integers(0, 1), min_size=1, max_size=9), idle=st.booleans())
    def append(self, table: BlockTable, keys: list[int], idle: bool) -> None:
        before = list(table.blocks)
        try:
            with self._evicts_rightly(idle):
                self.manager.reserve(table, len(keys), idle)
        except OutOfBlocksError:
            assert table.blocks == before
            return
        start = table.length
        # A step writes the rows before it notes them: the blocks may be swapped for equal ones on commit.
        for row, key in enumerate(keys, start):
            self.memory[table.blocks[row // 4]][row % 4] = key
        self.manager.commit(table, keys)
        self.content[table] += keys

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> object:
        try:
            with self._evicts_rightly(idle=False):
                twin, copies = self.manager.fork(table)
        except OutOfBlocksError:
            return multiple()
        self._copy(copies)
        self.content[twin] = list(self.content[table])
        return twin

    @rule(table=tables, extra=st.integers(1, 8))
    def reserve_and_give_back(self, table: BlockTable, extra: int) -> None:
        try:
            self.manager.reserve(table, extra)
        except OutOfBlocksError:
            return
        self.manager.truncate(table)

    @rule(table=consumes(tables))
    def close(self, table: BlockTable) -> None:
        self.manager.close(table)
        assert self.manager.match(self.content[table]) == len(self.content[table]), "closing loses nothing"
        del self.content[table]

    @rule(keys=st.lists(st.integers(0, 1), max_size=14), start=st.integers(0, 8))
    def forget(self, keys: list[int], start: int) -> None:
        kept = min(self.manager.match(keys), start // 4 * 4)
        self.manager.forget(keys, start)
        assert self.manager.match(keys) >= kept

    @rule()
    def evict(self) -> None:
        self.manager.evict_all()
        assert self.manager.num_cached == 0

    @invariant()
    def holds(self) -> None:
        self.manager.check()
        for table, keys in self.content.items():
            assert table.length == len(keys)
            rows = [self.memory[table.blocks[row // 4]][row % 4] for row in range(table.length)]
            assert rows == keys, "a table reads what others wrote"
            assert self.manager.match(keys) == len(keys)


Blocks.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
