"""BlockManager against a plain model of what must be true."""

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
        self.memory = {block: [None] * 4 for block in range(12)}

    def _copy(self, copies: list) -> None:
        for copy in copies:
            self.memory[copy.target][: copy.rows] = self.memory[copy.source][: copy.rows]

    @rule(target=tables, keys=st.lists(st.integers(0, 1), max_size=14))
    def open(self, keys: list[int]) -> BlockTable:
        found = self.manager.match(keys)
        table, copies = self.manager.open(keys)
        assert found - 3 <= table.length <= found
        self._copy(copies)
        self.content[table] = keys[: table.length]
        return table

    @rule(table=tables, keys=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def append(self, table: BlockTable, keys: list[int]) -> None:
        before = list(table.blocks)
        try:
            self.manager.reserve(table, len(keys))
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
