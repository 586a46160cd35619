"""A backend that plays a script: what it answers, how fast, and what goes wrong is the test's choice."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Literal

from chatterm.backends.backend import (
    ChatOptions,
    ContextFullError,
    ConversationSettings,
    Document,
    DraftCost,
    EngineError,
    Exchange,
    Figures,
    FinishReason,
    ModelChoice,
    ModelInfo,
    OnProgress,
    Outcome,
    Part,
    Progress,
    Request,
    ThinkCache,
    ThinkMode,
    TokenEvent,
    ToolCall,
    ToolResult,
    TurnStats,
)
from engine.cache.block_map import BlockMap
from engine.events import CachedChunk


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
    guessed: range = range(0)
    """The tokens that speculation had right."""
    cached: int = 0
    prompt: int = 10
    calls: tuple[ToolCall, ...] = ()
    """What it asks for in the end."""


@dataclass
class ScriptedBackend:
    """Implements Backend. Every call of the worker is noted in `calls`."""

    scripts: list[Script] = field(default_factory=list)
    """Answers in order; the last one is repeated."""
    load_gate: threading.Event | None = None
    load_error: BaseException | None = None
    load_progress: tuple[Progress, ...] = ()
    thinks: bool = False
    calls_tools: bool = True
    context_length: int = 4096
    model: str = "scripted"
    info: ModelInfo | None = None
    system: str | None = None
    documents: tuple[Document, ...] = ()
    is_remote: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    """Tokens of documents, by name; others cannot be read before they are needed."""
    chunks: tuple[CachedChunk, ...] = ()
    """What `figures` tells of what is kept."""
    think: ThinkMode = "auto"
    think_cache: ThinkCache = "exact"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)
    kept_as: list[str | None] = field(default_factory=list)
    known: list[Exchange] = field(default_factory=list)
    """What was said elsewhere."""
    history: list[tuple[str, str]] = field(default_factory=list)
    last: Outcome | None = None
    closed: bool = False
    on_switch: Callable[[str], None] | None = None
    known_models: list[str] = field(default_factory=lambda: ["scripted", "other"])
    loaded_elsewhere: tuple[str, ...] = ()
    """What its server has loaded."""
    choices: list[ModelChoice] = field(
        default_factory=lambda: [
            ModelChoice("scripted", 98_362_432, True, True),
            ModelChoice("other", 1_503_300_328, True, True),
            ModelChoice("huge", 65_500_000_000, False, False),
            ModelChoice("unknown", None, False, None),
        ]
    )
    map: BlockMap | None = None
    """What `blocks` shows."""
    load_path_error: BaseException | None = None
    title: str | None = None
    """What it says when it is asked for one; None: it is too small to be asked."""
    waits: str = ""
    """What a running answer waits for."""
    warmed: int | None = None
    """What `figures` tells of idle work."""
    prefill: tuple[int, int] = (0, 0)
    """What `figures` tells of a prompt: tokens that are read, of how many."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._but: int | None = None
        self._answer_now = threading.Event()
        self._turns = 0
        self._titled = False

    @property
    def options(self) -> ChatOptions:
        return ChatOptions(
            system=self.system,
            documents=self.documents,
            think=self.think,
            think_cache=self.think_cache,
            sampling=self.sampling,
        )

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
            prefill_done=self.prefill[0],
            prefill_total=self.prefill[1],
            warmed=self.warmed,
            chunks=self.chunks,
        )

    def notes(self) -> Sequence[str]:
        figures = self.figures()
        return figures.notes if figures is not None else ()

    def waiting(self, index: int = 0) -> str:
        return self.waits

    def blocks(self) -> BlockMap | None:
        return self.map

    def token_text(self, token_id: int) -> str | None:
        return (
            {1: "<think>", 2: "Water", 3: " gauge", 4: " river"}.get(token_id)
            if self.info is not None
            else None
        )

    def stop(self, but: int | None = None) -> None:
        self._but = but
        self._stop.set()

    def answer_now(self) -> None:
        """Drops the rest of the reasoning; a gate that stands within it opens."""
        self._answer_now.set()

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
        self.info = ModelInfo(
            self.model,
            "cpu",
            "float32",
            self.context_length,
            self.thinks,
            calls_tools=self.calls_tools,
            is_remote=self.is_remote,
        )

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        self.calls.append(("switch", model))
        if self.on_switch is not None:
            self.on_switch(model)
        self.history.clear()
        self.model = model
        self.info = ModelInfo(
            model, "cpu", "float32", self.context_length, self.thinks, calls_tools=self.calls_tools
        )

    def send(self, text: str) -> Iterator[TokenEvent]:
        self.calls.append(("send", text))
        return self._answer(text)

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        self.calls.append(("tell", tuple(results)))
        return self._answer("")

    def resume(self) -> Iterator[TokenEvent]:
        """The next script is what is added; complete is what ended with `eos`."""
        self.calls.append(("resume", None))
        if not self.history or self.last is None:
            raise EngineError("There is no answer to continue; send a message first.")
        if self.last.finish_reason is FinishReason.EOS:
            raise EngineError("The answer is complete; /retry generates another one.")
        return self._answer(self.history.pop()[0], self.last)

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        """The next scripts, a token of each in turn. A gate holds up its own, and an error ends its own."""
        self.calls.append(("candidates", (text, count)))
        self._stop.clear()
        running = {index: self._several(self._next_script(), index) for index in range(count)}
        while running:
            for index in list(running):
                for part in running[index]:
                    if part is not None:
                        yield index, part
                    break
                else:
                    del running[index]
            time.sleep(0.001)

    def compare(self, text: str, model: str, path: Sequence[Exchange]) -> Iterator[tuple[int, Part]]:
        """Two candidates, the second by `model`."""
        self.calls.append(("compare", (text, model, tuple(exchange.id for exchange in path))))
        for index, part in self.candidates(text, 2):
            yield index, replace(part, model=model) if index and isinstance(part, Outcome) else part

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        """The last message is answered with the next script; `calls` notes the requests."""
        self._stop.clear()
        running: dict[int, Iterator[Part | None]] = {}
        source = enumerate(requests)
        while True:
            while len(running) < 8 and (taken := next(source, None)) is not None:
                self.calls.append(("answer", taken[1]))
                running[taken[0]] = self._several(self._next_script(), taken[0])
            if not running:
                return
            for index in list(running):
                for part in running[index]:
                    if part is not None:
                        yield index, part
                    break
                else:
                    del running[index]

    def _next_script(self) -> Script:
        self._turns += 1
        return self.scripts[min(self._turns, len(self.scripts)) - 1] if self.scripts else Script()

    def _several(self, script: Script, index: int) -> Iterator[Part | None]:
        """One of several answers, a part at a time; None: not yet."""
        said = {"reasoning": "", "answer": ""}
        ids: list[int] = []
        reason = script.finish_reason
        begun = time.monotonic()
        pieces = [(piece, "reasoning") for piece in _pieces(script.reasoning)]
        pieces += [(piece, "answer") for piece in _pieces(script.text)]
        for number, (piece, kind) in enumerate(pieces):
            is_stopped = False
            while not is_stopped and script.gate is not None and number == script.gate_after:
                if script.gate.is_set():
                    break
                is_stopped = self._stop.is_set() and self._but != index
                yield None
            while not is_stopped and script.tokens_per_s is not None:
                if time.monotonic() >= begun + number / script.tokens_per_s:
                    break
                is_stopped = self._stop.is_set() and self._but != index
                yield None
            if is_stopped or (self._stop.is_set() and self._but != index):
                reason = FinishReason.CANCELLED
                break
            if script.error is not None and number == script.error_after:
                error = script.error
                yield error if isinstance(error, EngineError) else EngineError(str(error))
                return
            if not number:
                yield Outcome("", "", None, self._stats(script, 0, 0, begun), [])
            said[kind] += piece
            ids.append(number)
            yield TokenEvent(piece, number, "reasoning" if kind == "reasoning" else "answer")
        thought = min(len(ids), len(_pieces(script.reasoning)))
        stats = self._stats(script, len(ids), thought, begun)
        yield Outcome(said["answer"], said["reasoning"], reason, stats, ids, (thought, len(ids)))

    def _answer(self, question: str, before: Outcome | None = None) -> Iterator[TokenEvent]:
        script = self._next_script()
        self._stop.clear()
        self._answer_now.clear()
        if script.error is not None and not script.error_after:
            raise script.error
        said: dict[Literal["reasoning", "answer"], str] = {
            "reasoning": before.reasoning if before else "",
            "answer": before.text if before else "",
        }
        ids = list(before.token_ids) if before else []
        pieces = chain(
            zip(_pieces(script.reasoning), repeat("reasoning")), zip(_pieces(script.text), repeat("answer"))
        )
        begun = time.monotonic()
        reason = script.finish_reason
        count = reasoning_count = thought = 0
        for number, (piece, kind) in enumerate(pieces):
            if script.gate is not None and number == script.gate_after:
                while not script.gate.wait(0.005) and not self._stop.is_set():
                    if kind == "reasoning" and self._answer_now.is_set():
                        break
            if script.tokens_per_s is not None:
                time.sleep(max(begun + number / script.tokens_per_s - time.monotonic(), 0.0))
            if self._stop.is_set():
                reason = FinishReason.CANCELLED
                break
            if script.error is not None and number == script.error_after:
                raise script.error
            kind = "reasoning" if kind == "reasoning" else "answer"
            if kind == "reasoning" and self._answer_now.is_set():
                continue
            said[kind] += piece
            count += 1
            reasoning_count += kind == "reasoning"
            ids.append(number)
            thought = len(ids) if kind == "reasoning" else thought
            stats = self._stats(script, count, reasoning_count, begun)
            self.last = Outcome(said["answer"], said["reasoning"], None, stats, ids)
            try:
                yield TokenEvent(piece, number, kind, guessed=number in script.guessed)
            except GeneratorExit:  # whoever listened has gone
                reason = FinishReason.CANCELLED
                break
        calls = script.calls if reason is FinishReason.EOS else ()
        for call in calls:
            ids.append(len(ids))
            self.last = Outcome(
                said["answer"], said["reasoning"], None, self._stats(script, count, 0, begun), ids
            )
            yield TokenEvent(call.arguments, ids[-1], "call")
        stats = self._stats(script, count, reasoning_count, begun)
        shown = (thought, len(ids))
        self.last = Outcome(said["answer"], said["reasoning"], reason, stats, ids, shown, calls=calls)
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

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        """`calls` notes the ids of the exchanges."""
        self.calls.append(("load_path", tuple(exchange.id for exchange in exchanges)))
        if self.load_path_error is not None:
            raise self.load_path_error
        self.history = [(exchange.user, exchange.text) for exchange in exchanges]
        self.last = None
        for latest in exchanges[-1:]:
            reason = FinishReason(latest.finish_reason or "cancelled")
            ids, opening = list(latest.token_ids), list(latest.opening)
            self.last = Outcome(
                latest.text, latest.reasoning, reason, TurnStats(), ids, latest.shown, opening
            )

    def count(self, draft: str) -> DraftCost | None:
        self.calls.append(("count", draft))
        if self.info is None:
            return None
        tokens = len(draft.split())
        return DraftCost(tokens, tokens + 5, self.context_length - self.used_tokens - tokens - 5)

    def reset(self) -> None:
        self.calls.append(("reset", None))
        self.history.clear()

    def read(self, document: Document) -> int | None:
        self.calls.append(("read", document.name))
        return self.counts.get(document.name)

    def know(self, exchanges: Sequence[Exchange]) -> None:
        self.known = list(exchanges)

    def configure(self, settings: ConversationSettings) -> None:
        """`calls` notes each setting, except for the name of the cache."""
        noted: dict[str, Any] = {**settings}
        if "tools" in settings:
            noted["tools"] = tuple(tool.name for tool in settings["tools"])
        if "kept_as" in settings:
            self.kept_as.append(noted.pop("kept_as"))
        self.calls += [(f"set_{name}", value) for name, value in noted.items()]
        documents = settings.get("documents", ())
        if sum(self.counts.get(document.name, 0) for document in documents) > self.context_length:
            raise ContextFullError(
                "It is too long.", needed=self.context_length + 1, available=self.context_length
            )
        for name in noted.keys() - {"tools"}:
            setattr(self, name, noted[name])

    def settle(self) -> None:
        self.calls.append(("settle", None))

    def prepare(self, draft: str) -> None:
        self.calls.append(("prepare", draft))

    def begin_title(self, question: str, answer: str) -> bool:
        self.calls.append(("begin_title", (question, answer)))
        self._titled = True
        return self.title is not None

    def made_title(self) -> str | None:
        return self.title if self._titled else None

    def models(self) -> list[str]:
        return self.known_models

    def has_loaded(self, model: str) -> bool:
        return model in self.loaded_elsewhere

    def catalogue(self) -> list[ModelChoice]:
        self.calls.append(("catalogue", None))
        return self.choices

    def close(self) -> None:
        self.closed = True


def _pieces(text: str) -> list[str]:
    """Four characters at a time, about what a token is."""
    return [text[start : start + 4] for start in range(0, len(text), 4)]
