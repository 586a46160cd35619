"""A network all of whose layers have a window: answers far longer than the cache, the text that they have with room."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.cache.block_map import BlockState, block_map
from engine.cache.block_table import BlockTable
from engine.cache.blocks import BlockManager
from engine.cache.kv_needs import KVNeeds
from engine.cache.prefix_hit import PrefixHit, prefix_hit
from engine.cache.rows import Rows
from engine.cache.sizing import plan_kv
from engine.cache.window import Window
from engine.errors import EngineError
from tests.engine.test_blocks import filled
from tests.engine.tiny import TinyEngine, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import random_model, run_reference
from tests.models.families import MistralConfig, tiny, tiny_gemma2

WINDOW, SIZE, CHUNK, CONTEXT = 12, 4, 8, 512
CONFIG = tiny(
    MistralConfig, sliding_window=WINDOW, head_dim=32, vocab_size=272, max_position_embeddings=CONTEXT
)
LEAST = Window(WINDOW, CHUNK).most_blocks(SIZE) + 1
"""Blocks of what one sequence holds, and of a copy: 32 rows."""
PROMPTS = [
    torch.randint(250, (70,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(3)
]


class Pair:
    """Two engines with the same weights: the cache of one holds hardly more than the window."""

    def __init__(self, small: TinyEngine, large: TinyEngine) -> None:
        self.small, self.large = small, large


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(*(an_engine(stack, folder, num_blocks=blocks) for blocks in (LEAST, 4 * CONTEXT // SIZE)))


def an_engine(stack: ExitStack, folder: Path, **options: Any) -> TinyEngine:
    """Rows that nobody wrote are NaN: whoever lets them into a sum finds out."""
    tokenizer = tiny_tokenizer()
    tokenizer.stop_ids = frozenset()
    engine = stack.enter_context(
        tiny_engine(folder, CONFIG, tokenizer, context=CONTEXT, max_chunk=CHUNK, **options)
    )
    engine.pieces.cache.kv[:, :, : engine.pieces.blocks.num_blocks * SIZE] = float("nan")
    return engine


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def answer(engine: TinyEngine, prompt: list[int], tokens: int) -> list[int]:
    return [event.token_id for event in engine.stream(prompt, greedy(tokens))]


def cached(engine: TinyEngine, tokens: list[int]) -> int:
    return engine.cached_rows(Rows.of(tokens))


def test_an_answer_far_longer_than_the_cache_is_that_of_transformers(pair: Pair) -> None:
    prompt = PROMPTS[0]
    said = answer(pair.small, prompt, 256)
    assert len(said) == 256 > LEAST * SIZE
    logits = run_reference(random_model(CONFIG), prompt + said)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == said
    assert answer(pair.large, prompt, 256) == said
    assert cached(pair.large, prompt + said[:-1]) == len(prompt) + 255


def test_what_goes_on_from_the_end_is_there_and_what_goes_on_from_elsewhere_is_computed(pair: Pair) -> None:
    """The beginning has been evicted long ago: it is part of what the rows at the end are, and nobody reads it."""
    small, prompt = pair.small, PROMPTS[0]
    said = answer(small, prompt, 200)
    whole = prompt + said[:-1]
    assert cached(small, whole) == len(whole)
    assert cached(small, whole[:-20]) == 0
    assert cached(small, [*prompt[:-1], 0, *said[:-1]]) == 0, "the same end behind another beginning"
    before = small.scripted.rows_computed
    on = answer(small, [*whole, 7, 8, 9], 40)
    assert small.scripted.rows_computed - before == 3 + 39
    assert on == answer(pair.large, [*whole, 7, 8, 9], 40)
    assert answer(small, [*whole[:-20], 5], 30) == answer(pair.large, [*whole[:-20], 5], 30)


def test_many_at_once_that_preempt_each_other_say_what_each_says_alone(folder: Path, pair: Pair) -> None:
    expected = [answer(pair.large, prompt, 150) for prompt in PROMPTS]
    with ExitStack() as stack:
        engine = an_engine(stack, folder, num_blocks=2 * LEAST)
        running = [engine.start(Rows.of(prompt), greedy(150)) for prompt in PROMPTS]
        said = [[event.token_id for event in engine.events(sequence)] for sequence in running]
        assert said == expected


def test_a_preempted_sequence_goes_on_with_the_same_text(pair: Pair) -> None:
    small = pair.small
    sequence = small.start(Rows.of(PROMPTS[1]), greedy(120))
    events = small.events(sequence)
    said = [next(events).token_id for _ in range(60)]

    def preempt() -> None:
        if sequence in small.pieces.scheduler.running:
            small.pieces.scheduler.preempt(sequence)
            small.pieces.blocks.evict_all()

    small.loop.call(preempt)
    said += [event.token_id for event in events]
    assert sequence.preemptions == 1
    assert said == answer(pair.large, PROMPTS[1], 120)


def test_the_second_turn_of_a_long_conversation_computes_what_is_new(pair: Pair) -> None:
    texts = []
    for engine in (pair.small, pair.large):
        chat = engine.chat()
        list(chat.send("hello", greedy(180)))
        chat.settle(wait=True)
        list(chat.send("and on", greedy(90)))
        assert chat.last is not None
        assert chat.last.stats.prompt_tokens > 180
        assert chat.last.stats.prefilled_tokens < 60
        list(chat.retry(greedy(90)))
        texts.append([turn.answer.token_ids for turn in chat.turns])
    assert texts[0] == texts[1]


def test_mixed_layers_let_go_of_nothing(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, tiny_gemma2(vocab_size=272)) as engine:
        assert engine.spec.window is None
        assert engine.pieces.blocks.window is None
        assert len(answer(engine, PROMPTS[0], 40)) == 40


def test_the_context_is_not_bound_by_the_memory_once_the_window_fits() -> None:
    window = Window(4096, 512)
    needs = KVNeeds(1000, window=window)
    room = window.most_blocks(32) * 32
    for tokens, context in ((room + 32, 32_768), (room + 31, room - 32)):
        plan = plan_kv(needs, tokens * 1000, 32_768, None, 1.0)
        assert plan.context_length == context
        assert plan.num_blocks * 32 <= tokens
    with pytest.raises(EngineError, match=f"Use --context {room - 32} or less"):
        plan_kv(needs, (room + 31) * 1000, 32_768, 30_000, 1.0)


def test_blocks_go_in_the_order_in_which_they_were_let_go_of_and_the_path_is_found_at_its_end() -> None:
    manager = BlockManager(7, 2, window=Window(4, 2))
    manager.close(filled(manager, [90, 91]))
    table = filled(manager, list(range(8)))
    assert table.blocks == [7, 7, 3, 4], "the next row sees rows 5 to 7"
    assert (manager.num_held, manager.num_cached, manager.num_free) == (2, 3, 2)
    manager.reserve(table, 6)
    assert manager.match([90, 91]) == 0, "it was used longest ago"
    assert [manager.match(list(range(rows))) for rows in range(0, 9, 2)] == [0, 2, 4, 6, 8]
    manager.commit(table, range(8, 14))
    manager.reserve(table, 4)
    assert [manager.match(list(range(rows))) for rows in range(0, 15, 2)] == [0, 0, 0, 0, 8, 10, 12, 14]
    manager.check()


def grown(manager: BlockManager, rows: int) -> BlockTable:
    """A table that was written row by row; the third and all after it were computed in pause 3."""
    table = manager.open([])
    for row in range(rows):
        manager.reserve(table, 1)
        manager.commit(table, [row], [3 if row >= 2 else 0])
    return table


def test_the_picture_of_the_blocks_shows_what_is_left_of_a_path() -> None:
    manager = BlockManager(6, 2, window=Window(4, 2))
    table = grown(manager, 16)
    found = block_map(manager, list(range(16)))
    assert (found.tokens, found.present) == (16, 16)
    assert len(found.path) == found.count(BlockState.HELD) == 6
    assert found.path[-2:] == tuple(table.blocks[table.first :])


def test_who_had_the_rows_computed_that_are_gone_is_still_known() -> None:
    manager = BlockManager(6, 2, window=Window(4, 2))
    manager.close(grown(manager, 16))
    opened = manager.open(list(range(16)))
    assert prefix_hit(manager, opened, list(range(17)), -3) == PrefixHit(16, 14, 0)
    assert manager.origins(opened) == [0, 0, *[3] * 14]
