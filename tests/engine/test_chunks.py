"""Beginnings of prompts that stay in the cache."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.blocks import BlockManager
from engine.cache.rows import Rows
from engine.conversation.chunks import Chunks
from engine.errors import ContextFullError, EngineError
from engine.params import SamplingParams
from engine.schedule.sequence import Priority, Sequence
from tests.engine.tiny import TinyEngine, tiny_engine
from tests.fresh import examples
from tests.models.checkpoints import tiny_qwen3

PAPER = [(11 * i) % 241 for i in range(200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TinyEngine]:
    """One whose cache holds 640 rows."""
    with tiny_engine(tmp_path, context=512, num_blocks=160) as found:
        yield found


@pytest.fixture
def chunks(engine: TinyEngine) -> Chunks:
    return Chunks(engine)


def others(start: int, length: int) -> list[int]:
    return [(start + 7 * i) % 251 for i in range(length)]


def answer(engine: TinyEngine, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt's were computed."""
    sequence = engine.start(Rows.of(prompt), GREEDY)
    found = [event.token_id for event in engine.events(sequence)]
    return found, sequence.stats().prefilled_tokens


def test_a_prompt_that_begins_with_it_computes_only_the_rest(engine: TinyEngine, chunks: Chunks) -> None:
    question = others(3, 9)
    expected, _ = answer(engine, PAPER + question)
    engine.evict_all()
    chunks.keep(PAPER, "paper", wait=True)
    found, computed = answer(engine, PAPER + question)
    assert (found, computed) == (expected, len(question))


def test_it_is_computed_in_idle_time_and_tells_how_far_it_is(engine: TinyEngine, chunks: Chunks) -> None:
    chunks.keep(PAPER, "paper")
    seen = []
    while (progress := chunks.progress("paper")) is not None:
        seen.append(progress)
    assert all(0 <= done <= total == len(PAPER) for done, total in seen)
    assert all(one <= two for (one, _), (two, _) in pairwise(seen))
    assert chunks.list()[0].present == len(PAPER)
    assert chunks.progress("another") is None


def test_it_stays_when_others_need_room_and_goes_when_it_is_let_go_of(
    engine: TinyEngine, chunks: Chunks
) -> None:
    chunks.keep(PAPER, "paper", wait=True)
    for start in range(0, 200, 20):
        engine.warm(others(start, 300))
    assert chunks.list()[0].present == len(PAPER), "everything else went first"
    chunks.pin("paper", False)
    for start in range(0, 200, 20):
        engine.warm(others(start, 300))
    (chunk,) = chunks.list()
    assert (chunk.present, chunk.pinned, chunk.bytes) == (0, False, 0)
    chunks.keep(PAPER, "paper", wait=True)
    assert chunks.drop("paper")
    assert not chunks.drop("paper")
    assert chunks.list() == []
    for start in range(0, 200, 20):
        engine.warm(others(start, 300))
    assert engine.cached_rows(Rows.of(PAPER)) == 0


def test_idle_work_takes_nothing_of_it_and_a_person_may(engine: TinyEngine, chunks: Chunks) -> None:
    chunks.keep(PAPER, "paper", wait=True)
    idle = Sequence(Rows.of(others(1, 500)), Priority.IDLE)
    engine.submit(idle)
    idle.finished.wait()
    assert idle.error is None
    assert chunks.list()[0].present == len(PAPER)
    engine.pin(Rows.of(others(1, 500)))
    engine.warm(others(1, 500))
    assert 0 < chunks.list()[0].present < len(PAPER), "its end went, as much as was needed"
    engine.check()


def test_chunks_share_what_they_begin_with_and_say_so(engine: TinyEngine, chunks: Chunks) -> None:
    longer = PAPER + others(5, 100)
    chunks.keep(PAPER, "paper", wait=True)
    chunks.keep(longer, "both", wait=True)
    for number in range(3):
        engine.warm(longer + others(40 * number, 8))
    paper, both = chunks.list()
    assert (paper.shared, both.shared) == (0, len(PAPER))
    assert both.bytes == (len(longer) - len(PAPER)) * both.token_bytes
    assert both.branches == 3
    assert both.saved_bytes == 2 * len(longer) * both.token_bytes


def test_eight_conversations_on_one_document_take_little_more_than_one(tmp_path: Path) -> None:
    """A document of 4,000 tokens and eight turns of 32: at most 1.15 times the memory of one, beside the turns."""
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=4200)
    with tiny_engine(tmp_path, config, context=4160, num_blocks=1400) as engine:
        chunks = Chunks(engine)
        document = [(13 * i) % 251 for i in range(800)] * 5
        chunks.keep(document, "document", wait=True)
        alone = engine.blocks_cached()
        for number in range(8):
            engine.warm(document + others(number, 32))
        assert engine.blocks_cached() <= 1.15 * alone + 8 * 32 / engine.block_size


@pytest.mark.parametrize(
    ("tokens", "name", "error", "words"),
    [
        ([], "paper", EngineError, "no tokens"),
        ([1, 2], "  ", EngineError, "needs a name"),
        ([1, 9999], "paper", EngineError, "no token 9999"),
        ([1] * 600, "paper", ContextFullError, "too long for the context"),
    ],
)
def test_what_cannot_be_kept_is_one_line_and_changes_nothing(
    chunks: Chunks, tokens: list[int], name: str, error: type[EngineError], words: str
) -> None:
    chunks.keep(PAPER[:20], "paper", wait=True)
    with pytest.raises(error, match=words) as failure:
        chunks.keep(tokens, name)
    assert "\n" not in str(failure.value)
    assert [chunk.tokens for chunk in chunks.list()] == [20]
    with pytest.raises(EngineError, match="no chunk 'none'"):
        chunks.pin("none")


steps = st.lists(
    st.tuples(
        st.sampled_from(["keep", "let go", "pin", "open", "idle", "close", "forget"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 2), max_size=14),
    ),
    max_size=40,
)


@examples(150)
@given(steps)
def test_whatever_is_kept_the_blocks_are_in_order(actions: list[tuple[str, int, list[int]]]) -> None:
    blocks = BlockManager(12, 2)
    tables = []
    for action, number, keys in actions:
        if action == "keep":
            blocks.keep(str(number), keys)
        elif action == "let go":
            blocks.keep(str(number), None)
        elif action == "pin":
            blocks.pin(keys)
        elif action == "close" and tables:
            blocks.close(tables.pop(number % len(tables)))
        elif action == "forget":
            blocks.forget(keys, number)
        elif action in ("open", "idle"):
            idle = action == "idle"
            table = blocks.open(keys, idle)
            missing = len(keys) - table.length
            if blocks.blocks_for(len(keys)) - len(table.blocks) <= blocks.room(idle):
                blocks.reserve(table, missing, idle)
                blocks.commit(table, keys[table.length :])
            tables.append(table)
        blocks.check()
        assert blocks.index.branches(keys) >= 0
