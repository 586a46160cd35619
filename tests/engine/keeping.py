"""An engine with a tier on disk, over anything that tests have for weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

from engine.cache.rows import Rows
from engine.engine import Engine
from engine.params import SamplingParams
from engine.schedule.sequence import Sequence
from engine.store import disk
from engine.store.disk import DiskTier
from tests.counting import PATIENCE, until
from tests.engine.tiny import TinyEngine, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def keep(
    engine: Engine,
    store: Path,
    fingerprint: str = "as it is",
    most: int | None = 10**9,
    late: Event | None = None,
) -> DiskTier:
    """Have an engine keep blocks in `store`, which it has looked at then, or looks at when it is `late`."""

    def facts() -> dict[str, str]:
        assert late is None or late.wait(PATIENCE)
        return {"all": fingerprint}

    def begin() -> DiskTier:
        tier = DiskTier(store, most, engine.pieces.cache, engine.pieces.blocks, engine.loop.post, facts)
        engine.disk = engine.engine_step.disk = tier
        return tier

    tier = engine.loop.call(begin)
    done = Event()
    tier._tasks.put(done.set)
    assert late is not None or done.wait(PATIENCE)
    engine.loop.call(lambda: None)  # what it said of that is heard
    return tier


@contextmanager
def on_disk(
    model: Path,
    store: Path,
    fingerprint: str = "as it is",
    most: int = 10**9,
    late: Event | None = None,
    patience: float = PATIENCE,
    **options: Any,
) -> Iterator[TinyEngine]:
    """An engine with a tier on disk, which has begun, or begins when it is `late`. Nobody waits for it longer than
    `patience`."""
    with patch.object(disk, "PATIENCE_S", (patience, patience)), tiny_engine(model, **options) as engine:
        keep(engine, store, fingerprint, most, late)
        yield engine


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams = GREEDY
) -> tuple[list[tuple[int, float]], int]:
    """The tokens of an answer with their log-probabilities, and how many of its prompt's were computed."""
    sequence = engine.start(Rows.of(prompt), params)
    return heard(engine, sequence), sequence.stats().prefilled_tokens


def heard(engine: Engine, sequence: Sequence) -> list[tuple[int, float]]:
    """The tokens of an answer with their log-probabilities."""
    return [(event.token_id, event.logprob or 0.0) for event in engine.events(sequence)]


def saved(engine: Engine, owner: str, tokens: list[int]) -> None:
    """Wait until the full blocks of `tokens` are written."""
    engine.save(owner, Rows.of(tokens))
    until_written(engine)


def until_written(engine: Engine) -> None:
    """Wait until everything that is to be kept is written."""
    disk = engine.disk
    assert disk is not None
    until(lambda: not engine.loop.call(lambda: disk.has_writes))


def pause_disk(engine: Engine) -> Callable[[], None]:
    """Have the disk's thread wait until what is returned is called."""
    go, disk = Event(), engine.disk
    assert disk is not None
    disk._tasks.put(lambda: go.wait(PATIENCE) and None)
    return go.set
