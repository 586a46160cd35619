"""chatterm's engine: the bare decode loop, and the stream that a caller sees."""

import time

from benchmarks.shapes import random_prompt
from engine import Engine, SamplingParams
from models.spec import ModelSpec


class BareLoop:
    """Decode steps one after the other, as the engine launches them, without a consumer."""

    name = "ours"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self, context: int, steps: int) -> str | None:
        """Capture the graphs for this context."""
        self.decode(context, steps)
        return None

    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token of `steps` tokens after `context`."""
        from benchmarks.stepping import bare_seconds

        return bare_seconds(self._engine, context, steps)


class Stream:
    """Tokens as `engine.stream()` yields them in the caller's thread, from the first to the last."""

    name = "ours, stream"

    def __init__(self, engine: Engine, spec: ModelSpec) -> None:
        self._engine = engine
        self._spec = spec

    def prepare(self, context: int, steps: int) -> str | None:
        """Fill the cache with the prompt, so that decoding starts at once."""
        self.decode(context, steps)
        return None

    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token of `steps` tokens after the first."""
        params = SamplingParams(temperature=0.0, max_tokens=steps + 1)
        stream = self._engine.stream(random_prompt(self._spec, context, context), params)
        next(stream)
        began, count = time.perf_counter(), 0
        for _ in stream:
            count += 1
        ended = time.perf_counter()
        if count != steps:
            raise RuntimeError(f"the stream ended after {count} of {steps} tokens")
        return (ended - began) / steps
