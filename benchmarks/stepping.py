"""Single steps of an engine's decode runner, for measurements and tests; no other module reaches so far into it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from engine import EngineError, SamplingParams
from engine.cache.rows import Rows
from engine.engine import Engine

if TYPE_CHECKING:
    from engine.execute.cuda.decode_runner import DecodeRunner

T = TypeVar("T")


def on_runner(engine: Engine, function: Callable[["DecodeRunner"], T]) -> T:
    """Call `function` on the loop thread between two steps. Raises EngineError if there is no runner or it is busy."""

    def job() -> T:
        runner = engine.pieces.decode_runner
        if runner is None or engine.pieces.scheduler.has_work:
            raise EngineError(
                "There is no decode runner to measure, or it is busy; it needs a GPU and Triton."
            )
        return function(runner)

    return engine.loop.call(job)


@contextmanager
def blocks_for(engine: Engine, texts: list[list[int]], more: int) -> Iterator[list[list[int]]]:
    """Provide blocks for the cached rows of every text and `more` new ones, then release them. For the loop thread."""
    with ExitStack() as stack:
        tables = []
        for text in texts:
            keys = Rows.of(text).keys
            tables.append(engine.pieces.blocks.open(keys))
            stack.callback(engine.pieces.blocks.close, tables[-1])
            engine.pieces.blocks.reserve(tables[-1], len(keys) - tables[-1].length + more)
        yield [table.blocks for table in tables]


def bare_seconds(engine: Engine, context: int, steps: int, streams: int = 1) -> float:
    """Return seconds per step of the decode loop alone: `steps` greedy steps of all streams from row `context` on.

    The tokens are not read. This empties the prefix cache. Raises EngineError as `on_runner` does, and OutOfBlocksError
    if the cache is too small.
    """

    def job(runner: "DecodeRunner") -> float:
        engine.pieces.blocks.evict_all()
        slots = list(range(streams))
        with blocks_for(engine, [[] for _ in slots], context + steps) as tables:
            for slot in slots:
                runner.sampler.load(slot, SamplingParams(temperature=0.0), [], [], 0)
            seconds = 0.0
            for measured in (False, True):  # the first round compiles and records
                runner.slots.given.token.zero_()
                for slot, blocks in zip(slots, tables, strict=True):
                    runner.slots.put(slot, context, context)
                    runner.slots.show(slot, blocks)
                runner.slots.send()
                torch.cuda.synchronize()
                began = perf_counter()
                for step in range(steps):
                    runner.step(slots, context + step)
                torch.cuda.synchronize()
                seconds = perf_counter() - began if measured else seconds
        return seconds / steps

    return on_runner(engine, job)


def forced_logits(engine: Engine, texts: list[list[int]], count: int) -> Tensor:
    """Return the logits [texts, count, vocab] after each of the last `count` tokens of every text, from common steps.

    The tokens before are prefilled one text after the other; the rows of the steps are dropped. Raises EngineError as
    `on_runner` does.
    """
    for text in texts:
        engine.warm(text[:-count])

    def job(runner: "DecodeRunner") -> Tensor:
        slots, found = list(range(len(texts))), []
        with blocks_for(engine, [text[:-count] for text in texts], count) as tables:
            for step in range(count):
                rows = [len(text) - count + step for text in texts]
                for slot, row in zip(slots, rows, strict=True):
                    runner.slots.put(slot, row, row)
                    runner.slots.show(slot, tables[slot])
                given = runner.slots.given.token
                given[: len(texts)] = torch.tensor(
                    [text[row] for text, row in zip(texts, rows, strict=True)], device=given.device
                )
                found.append(runner.logits(slots, max(rows)))
        return torch.stack(found, dim=1)

    return on_runner(engine, job)
