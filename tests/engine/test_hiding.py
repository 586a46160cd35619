"""Rows that move up where a think span is hidden, in a network that also remembers states of recurrent layers."""

import pytest

from engine.cache.rows import Rows
from tests.engine.hybrid import hybrid_engine
from tests.engine.inside import check_blocks, evict_all
from tests.engine.keeping import GREEDY
from tests.engine.test_hybrid_engine import native, text

__all__ = ["native"]

SPANS = [(40, 60), (100, 110)]


def said(context: int, streams: int, native: bool, forget: bool) -> tuple[list[int], bool]:
    """What is said after hidden rows, and whether the log has room for all rows that moved up, twice."""
    rows = Rows.of(text(9, 250))
    with hybrid_engine(native=native, context=context, streams=streams, max_chunk=32) as engine:
        engine.warm_rows(rows)
        if forget:
            evict_all(engine)
        hidden = engine.hide(rows, SPANS)
        assert engine.cached_rows(hidden) == len(hidden) == 220
        check_blocks(engine)
        hidden.extend(text(10, 5))
        sequence = engine.start(hidden, GREEDY)
        found = [event.token_id for event in engine.events(sequence)]
        assert sequence.cached_tokens == 220
        marks = engine.pieces.blocks.marks
        assert marks is not None
        return found, marks.log.num_slots * engine.block_size > 2 * (len(rows) - SPANS[0][1])


@pytest.mark.parametrize("forget", [False, True])
def test_what_follows_hidden_rows_is_the_same_whatever_the_log_has_room_for(
    native: bool, forget: bool
) -> None:
    found, has_room = said(1020, 2, native, forget)
    assert has_room
    assert said(260, 1, native, forget) == (found, False)


def test_a_state_in_host_memory_lacks_the_log_that_rows_need_to_move_up() -> None:
    rows = Rows.of(text(9, 150))
    with hybrid_engine(offload=1 << 24) as engine:
        engine.warm_rows(rows)
        blocks = engine.pieces.blocks
        marks = blocks.marks
        assert marks is not None

        def lose() -> None:
            for mark in list(marks):
                marks.lose(mark)
                marks.drop(mark)
            for block in blocks.path(rows.keys)[:10]:
                marks.log.drop(block)

        engine.loop.call(lose)
        assert engine.cached_rows(rows) == 150
        assert engine.warm_rows(rows, since=60) == 150
        check_blocks(engine)
