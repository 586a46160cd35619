"""A backend that plays a script: what it answers, how fast, and what goes wrong is the test's choice."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal

from chatterm.backend import (
    EngineError,
    Figures,
    FinishReason,
    ModelInfo,
    OnProgress,
    Outcome,
    Progress,
    ThinkMode,
    TokenEvent,
    TurnStats,
)


@dataclass
class Script:
    """One answer."""

    text: str = "Hello there."
    reasoning: str = ""
    finish_reason: FinishReason = FinishReason.EOS
    tokens_per_s: float | None = None
    """None: as fast as possible."""
    error: BaseException | None = None
    """Raised before the first token, or after `error_after` tokens."""
    error_after: int = 0
    gate: threading.Event | None = None
    """Nothing is said before this is set (or the answer is stopped)."""
    gate_after: int = 0
    """Tokens said before the gate."""
    cached: int = 0
    prompt: int = 10


@dataclass
class ScriptedBackend:
    """Implements Backend. Every call of the worker is noted in `calls`."""

    scripts: list[Script] = field(default_factory=list)
    """Answers in order; the last one is repeated."""
    load_gate: threading.Event | None = None
    load_error: BaseException | None = None
    load_progress: tuple[Progress, ...] = ()
    thinks: bool = False
    context_length: int = 4096
    model: str = "scripted"
    info: ModelInfo | None = None
    system: str | None = None
    think: ThinkMode = "auto"
    calls: list[tuple[str, object]] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)
    last: Outcome | None = None
    closed: bool = False
    on_switch: Callable[[str], None] | None = None
    known_models: list[str] = field(default_factory=lambda: ["scripted", "other"])

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._turns = 0

    @property
    def used_tokens(self) -> int:
        return sum(len(q.split()) + len(a.split()) for q, a in self.history)

    def figures(self) -> Figures | None:
        if self.info is None:
            return None
        return Figures(
            model_name=self.info.name,
            device="cpu",
            dtype="float32",
            attention="sdpa",
            context_length=self.context_length,
            weight_bytes=98_000_000,
            kv_bytes=188_743_680,
            block_size=16,
            blocks_free=200,
            blocks_cached=20,
            blocks_held=36,
            prefill_done=0,
            prefill_total=0,
        )

    def stop(self) -> None:
        self._stop.set()

    def open(self, on_progress: OnProgress | None = None) -> None:
        self.calls.append(("open", self.model))
        for progress in self.load_progress:
            if on_progress is not None:
                on_progress(progress)
        if self.load_gate is not None:
            while not self.load_gate.wait(0.01):
                if on_progress is not None and self.load_progress:
                    on_progress(self.load_progress[-1])
        if self.load_error is not None:
            raise self.load_error
        self.info = ModelInfo(self.model, "cpu", "float32", self.context_length, self.thinks)

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        self.calls.append(("switch", model))
        if self.on_switch is not None:
            self.on_switch(model)
        self.history.clear()
        self.model, self.info = model, ModelInfo(model, "cpu", "float32", self.context_length, self.thinks)

    def send(self, text: str) -> Iterator[TokenEvent]:
        self.calls.append(("send", text))
        return self._answer(text)

    def retry(self) -> Iterator[TokenEvent]:
        self.calls.append(("retry", None))
        if not self.history:
            raise EngineError("There is nothing to answer once more.")
        return self._answer(self.history.pop()[0])

    def _answer(self, question: str) -> Iterator[TokenEvent]:
        script = self.scripts[min(self._turns, len(self.scripts) - 1)] if self.scripts else Script()
        self._turns += 1
        self._stop.clear()
        if script.error is not None and not script.error_after:
            raise script.error
        said: dict[Literal["reasoning", "answer"], str] = {"reasoning": "", "answer": ""}
        pieces = chain(
            zip(_pieces(script.reasoning), repeat("reasoning")), zip(_pieces(script.text), repeat("answer"))
        )
        begun = time.monotonic()
        reason = script.finish_reason
        count = reasoning_count = 0
        for number, (piece, kind) in enumerate(pieces):
            if script.gate is not None and number == script.gate_after:
                while not script.gate.wait(0.005) and not self._stop.is_set():
                    pass
            if script.tokens_per_s is not None:
                time.sleep(max(begun + number / script.tokens_per_s - time.monotonic(), 0.0))
            if self._stop.is_set():
                reason = FinishReason.CANCELLED
                break
            if script.error is not None and number == script.error_after:
                raise script.error
            kind = "reasoning" if kind == "reasoning" else "answer"
            said[kind] += piece
            count += 1
            reasoning_count += kind == "reasoning"
            stats = self._stats(script, count, reasoning_count, begun)
            self.last = Outcome(said["answer"], said["reasoning"], None, stats)
            yield TokenEvent(piece, number, kind)
        stats = self._stats(script, count, reasoning_count, begun)
        self.last = Outcome(said["answer"], said["reasoning"], reason, stats)
        self.history.append((question, said["answer"]))

    def _stats(self, script: Script, count: int, reasoning: int, begun: float) -> TurnStats:
        return TurnStats(
            prompt_tokens=script.prompt,
            cached_tokens=script.cached,
            prefilled_tokens=script.prompt - script.cached,
            generated_tokens=count,
            reasoning_tokens=reasoning,
            ttft_s=0.12,
            prefill_s=0.1,
            decode_s=time.monotonic() - begun,
        )

    def undo(self) -> bool:
        self.calls.append(("undo", None))
        return bool(self.history) and self.history.pop() is not None

    def reset(self) -> None:
        self.calls.append(("reset", None))
        self.history.clear()

    def set_system(self, system: str | None) -> None:
        self.calls.append(("set_system", system))
        self.system = system

    def set_think(self, think: ThinkMode) -> None:
        self.calls.append(("set_think", think))
        self.think = think

    def settle(self) -> None:
        self.calls.append(("settle", None))

    def prepare(self, draft: str) -> None:
        self.calls.append(("prepare", draft))

    def models(self) -> list[str]:
        return self.known_models

    def close(self) -> None:
        self.closed = True


def _pieces(text: str) -> Iterator[str]:
    """Four characters at a time, about what a token is."""
    return (text[start : start + 4] for start in range(0, len(text), 4))
