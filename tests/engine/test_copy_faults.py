"""Copies of rows that fail, at random: afterwards there is the same text, or an error, and never other text."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from engine import EngineError, SamplingParams
from engine.cache import kv_needs
from engine.cache.block_table import OutOfBlocksError
from engine.cache.copies import Copy, Offload, OffloadStates, Restore, RestoreStates, RowCopy
from engine.cache.rows import Rows
from engine.schedule.sequence import Priority, Sequence
from tests.counting import until
from tests.engine.hybrid import hybrid_engine
from tests.engine.test_chat import CONFIG
from tests.engine.tiny import TinyEngine, tiny_engine
from tests.fresh import seeds
from tests.models.families import tiny_gpt_oss

STEPS = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Faults:
    """Some copies leave their target in pieces and raise."""

    def __init__(self, engine: TinyEngine, rng: Random) -> None:
        self.engine, self.rng, self.rate = engine, rng, 0.0
        self.failed = dict.fromkeys((RowCopy, Restore, Offload, RestoreStates, OffloadStates, list), 0)
        self.carry_out, self.copy_rows = engine.pieces.cache.carry_out, engine.pieces.cache.copy_rows
        engine.pieces.blocks.carry_out = self.carry_out_or_fail
        engine.pieces.cache.copy_rows = self.copy_rows_or_fail  # type: ignore[method-assign]

    def carry_out_or_fail(self, copy: Copy) -> None:
        if self.rng.random() >= self.rate:
            return self.carry_out(copy)
        self.failed[type(copy)] += 1
        for rows in self.target(copy):
            rows.fill_(30.0)
        raise RuntimeError("torn")

    def target(self, copy: Copy) -> list[Tensor]:
        """The memory that a copy writes to."""
        cache = self.engine.pieces.cache
        if isinstance(copy, RowCopy):
            pools = cache.pools
            groups = [0, *(group for group, pool in enumerate(pools, 1) if copy.target in pool)]
            return [rows for group in groups for rows in cache.block(copy.target, group)]
        if isinstance(copy, Restore):
            return cache.block(copy.block, copy.group)
        if isinstance(copy, RestoreStates):
            assert cache.states is not None
            return [states[copy.states.state] for states in cache.states.layers.values()]
        assert cache.host is not None
        return cache.host._places(copy.slots, 0, len(copy.slots) * cache.host.block_bytes)

    def copy_rows_or_fail(
        self, source: list[tuple[int, int]], target: list[tuple[int, int]], group: int = 0
    ) -> None:
        if len(source) > 1 and self.rng.random() < self.rate:  # the rows of a turn that move up
            self.failed[list] += 1
            for first, end in target:
                self.engine.pieces.cache.kv[:, :, first:end] = 30.0
            raise RuntimeError("torn")
        self.copy_rows(source, target, group)


def prompts(rng: Random) -> list[list[int]]:
    """Few beginnings, so that blocks are shared, copied, evicted and brought back."""
    stem = [rng.randint(0, 250) for _ in range(90)]
    return [stem[: rng.randint(1, 90)] + [i] * rng.randint(1, 30) for i in range(10)]


def hidden(engine: TinyEngine, prompt: list[int]) -> list[int]:
    """What follows a prompt of which a span was hidden, and one more message."""
    rows = engine.hide(Rows.of(prompt[:60]), [(11, 33)])
    rows.extend([7, 8, 9])
    return [event.token_id for event in engine.events(engine.start(rows, GREEDY))]


def answer(engine: TinyEngine, prompt: list[int]) -> list[int]:
    return [event.token_id for event in engine.stream(prompt, GREEDY)]


@pytest.mark.parametrize("seed", seeds(4))
def test_the_same_text_or_an_error(folder: Path, seed: int) -> None:
    rng = Random(seed)
    asked = prompts(rng)
    long = [p for p in asked if len(p) >= 60]
    with tiny_engine(folder, CONFIG, context=256, num_blocks=300) as engine:
        texts = {tuple(p): answer(engine, p) for p in asked}
        masked = {tuple(p): hidden(engine, p) for p in long}
    with tiny_engine(folder, CONFIG, context=128, num_blocks=44, offload=1 << 16) as engine:
        faults = Faults(engine, rng)
        right = wrong = 0

        def attempt(expected: list[int], text: Callable[[], list[int]]) -> None:
            nonlocal right, wrong
            try:
                assert text() == expected
                right += 1
            except (EngineError, OutOfBlocksError):
                wrong += 1

        for _ in range(STEPS):
            faults.rate = rng.choice((0.0, 0.1, 0.3))
            prompt = rng.choice(asked)
            kind = rng.random()
            if kind < 0.3:
                together = [(p, engine.start(Rows.of(p), GREEDY)) for p in rng.sample(asked, 3)]
                for p, sequence in together:
                    attempt(texts[tuple(p)], lambda s=sequence: [e.token_id for e in engine.events(s)])  # type: ignore[misc]
            elif kind < 0.5 and long:
                chosen = rng.choice(long)
                attempt(masked[tuple(chosen)], lambda p=chosen: hidden(engine, p))  # type: ignore[misc]
            elif kind < 0.6:
                engine.submit(Sequence(Rows.of(prompt), Priority.IDLE))
            else:
                attempt(texts[tuple(prompt)], lambda p=prompt: answer(engine, p))  # type: ignore[misc]
            engine.check()
        faults.rate = 0.0
        for prompt in asked:
            assert answer(engine, prompt) == texts[tuple(prompt)]
        until(lambda: engine.figures().blocks_held == 0)  # what was only warmed ends after the answers
        assert right > STEPS / 4
        assert wrong
        assert sum(count > 0 for count in faults.failed.values()) >= 2, faults.failed


def groups_engine(folder: Path, **options: Any) -> AbstractContextManager[TinyEngine]:
    config = tiny_gpt_oss(vocab_size=272, max_position_embeddings=1024, sliding_window=9)
    return tiny_engine(folder, config, max_chunk=16, **options)


def states_engine(_: Path, **options: Any) -> AbstractContextManager[TinyEngine]:
    return hybrid_engine(max_chunk=16, **options)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("make", [groups_engine, states_engine])
def test_so_it_is_with_the_rows_of_windows_and_with_states(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., AbstractContextManager[TinyEngine]],
    seed: int,
) -> None:
    monkeypatch.setattr(kv_needs, "BRANCH_WINDOWS", (1, 0))
    monkeypatch.setattr(kv_needs, "MOST_MARKS", 3)
    rng = Random(seed)
    with make(folder, context=256, num_blocks=300) as engine:
        asked = prompts(rng)
        asked += [[*p, *answer(engine, p), 7, 8] for p in asked]
        texts = [answer(engine, p) for p in asked]
    with make(folder, context=160, num_blocks=60, offload=1 << 20) as engine:
        faults = Faults(engine, rng)
        right = 0
        for _ in range(STEPS):
            faults.rate = rng.choice((0.0, 0.05, 0.2))
            prompt, text = rng.choice([*zip(asked, texts, strict=True)])
            with suppress(EngineError, OutOfBlocksError):
                assert answer(engine, prompt) == text
                right += 1
            engine.check()
        faults.rate = 0.0
        assert [answer(engine, prompt) for prompt in asked] == texts
        figures = engine.figures().offload
        assert figures is not None
        assert figures.restored_tokens > 100
        assert STEPS / 4 < right < STEPS
        assert (figures.states > 0) is (engine.pieces.cache.states is not None)
        assert faults.failed[Restore] + faults.failed[RestoreStates], faults.failed
        assert faults.failed[Offload] + faults.failed[OffloadStates], faults.failed


def test_a_copy_that_fails_ends_its_own_sequence_only(folder: Path) -> None:
    prompt = list(range(40))
    with tiny_engine(folder, CONFIG) as engine:
        expected = answer(engine, prompt[:30])
        engine.evict_all()
        engine.warm(prompt)
        faults = Faults(engine, Random(0))
        other = [99, *prompt]

        def both() -> list[Sequence]:  # in one step
            faults.rate = 1.0
            rows = [Rows.of(p) for p in ([*prompt[:30], 77], other)]
            sequences = [Sequence(r, Priority.PERSON, GREEDY, engine.output(GREEDY)) for r in rows]
            for sequence in sequences:
                engine.pieces.scheduler.add(sequence)
            return sequences

        copying, free = engine.loop.call(both)
        with pytest.raises(EngineError, match="torn"):
            list(engine.events(copying))
        assert len(list(engine.events(free))) == 6
        faults.rate = 0.0
        assert answer(engine, prompt[:30]) == expected
