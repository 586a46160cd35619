"""An engine in this process as a Backend; the engine belongs to one conversation or is shared."""

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from chatterm.backends.backend import (
    ChatOptions,
    ConversationSettings,
    DraftCost,
    EngineError,
    Exchange,
    Figures,
    ModelChoice,
    ModelError,
    ModelInfo,
    OnProgress,
    Outcome,
    Part,
    Request,
    TokenEvent,
    ToolResult,
)
from chatterm.backends.base import OURS, BackendBase, changed, no_guesses, no_model, no_tools
from chatterm.backends.battery import Power
from chatterm.backends.document_prefill import DocumentPrefill
from chatterm.backends.documents import Document
from chatterm.backends.engine_adapter import exchange_tokens, to_outcome, to_part, to_turn
from chatterm.backends.title import TITLE_TOKENS, title_question
from chatterm.backends.tool_calls import CallFilter, Calling
from engine.params import SamplingParams
from engine.store.folder import default_folder

if TYPE_CHECKING:
    from engine.cache.block import Key
    from engine.cache.block_map import BlockMap
    from engine.conversation.aside import AsideRunner
    from engine.conversation.batch_generation import BatchGenerator, Prompt
    from engine.conversation.chat import Chat
    from engine.conversation.requests import Requests
    from engine.engine import Engine
    from engine.machine.memory_check import MemoryNeed
    from models.files import ModelFiles


_LEAST_FOR_TITLES = 500_000_000
"""Parameters of the smallest model whose titles are better than the first words of the message."""

_COMPLETION = 256
"""Default limit of a text completion, in tokens."""


class Engines(Protocol):
    """The source of a conversation's engine. Raises ModelError and EngineError."""

    def find(self, model: str, on_progress: OnProgress | None) -> "ModelFiles":
        """Return the files of a model that can run here; download them if necessary."""

    def load(
        self, model: str, files: "ModelFiles", options: ChatOptions, on_progress: OnProgress | None
    ) -> "Engine": ...

    def close(self, engine: "Engine") -> None:
        """Release the engine: the conversation no longer uses it. Closing twice is fine."""


class OwnEngines:
    """Engines in this process."""

    def __init__(self) -> None:
        self._engines: set[Engine] = set()

    def need(self, files: "ModelFiles", options: ChatOptions) -> "MemoryNeed":
        from engine.machine.memory_check import memory_need

        return memory_need(files, options, self._mapped_bytes)

    def find(self, model: str, on_progress: OnProgress | None) -> "ModelFiles":
        from models.families.registry import load_spec
        from models.hub.sources import resolve

        files = resolve(model, on_progress=on_progress)
        load_spec(files)
        return files

    def load(
        self, model: str, files: "ModelFiles", options: ChatOptions, on_progress: OnProgress | None
    ) -> "Engine":
        from engine.engine import Engine  # brings torch: not before the first frame is drawn

        disk = None if options.disk_gb == 0 else default_folder()
        engine = Engine.load(files, options, taken=self._mapped_bytes, disk=disk, on_progress=on_progress)
        if options.tune and not options.deterministic:
            engine.tune_when_idle()
        self._engines.add(engine)
        return engine

    def close(self, engine: "Engine") -> None:
        self._engines.discard(engine)
        engine.close()

    @property
    def _mapped_bytes(self) -> int:
        """Mapped weights of all engines: the system counts them as free memory, but they are in use."""
        return sum(engine.mapped_bytes for engine in list(self._engines))


class LocalBackend(BackendBase):
    """Implements Backend. `open` is the first call that reads, downloads or imports anything slow."""

    def __init__(self, model: str, options: ChatOptions, engines: Engines | None = None) -> None:
        super().__init__(model, options)
        self._engines: Engines = engines or OwnEngines()
        self.engine: Engine | None = None
        self.chat: Chat | None = None
        """The conversation; like its engine None until `open`."""
        self._params: SamplingParams | None = None
        self._reading: DocumentPrefill | None = None
        self._power = Power()
        self._aside: AsideRunner | None = None
        self._keys: list[Key] = []
        self._map: BlockMap | None = None
        self._looking = False
        self._calling: Calling | None = None
        """The tool support of the model; None: it has none."""
        self._said: CallFilter | None = None
        """The running answer without its calls, if tools are on."""
        self._several: BatchGenerator | None = None
        """The answers to requests, while they run."""

    @property
    def last(self) -> Outcome | None:
        chat = self.chat
        answer = chat.last if chat is not None else None
        if answer is None:
            return None
        outcome = to_outcome(answer, chat.turns[-1].opening if chat is not None and chat.turns else ())
        said = self._said
        return (
            replace(outcome, text=said.text) if said is not None and answer.finish_reason is None else outcome
        )

    def figures(self) -> Figures | None:
        engine, chat, reading = self.engine, self.chat, self._reading
        if engine is None or chat is None or reading is None:
            return None
        figures, warmed, reached = engine.figures(), chat.present_tokens, reading.reached()
        of_library = (reading.note,) if reading.note else ()
        return replace(
            figures,
            warmed=max(warmed or 0, reached or 0) if warmed is not None or reached is not None else None,
            notes=(*figures.notes, *chat.notes, *no_guesses(self.options.sampling, figures), *of_library),
        )

    def blocks(self) -> "BlockMap | None":
        engine = self.engine
        if engine is not None and not self._looking:
            self._looking = True
            try:
                engine.look_at_blocks(self._keys, self._seen)
            except EngineError:  # it was closed at this moment
                self._looking = False
        return self._map

    def _seen(self, found: "BlockMap") -> None:
        self._map, self._looking = found, False

    def token_text(self, token_id: int) -> str | None:
        engine = self.engine
        if engine is None or not 0 <= token_id < engine.tokenizer.vocab_size:
            return None
        return engine.tokenizer.decode([token_id], skip_special=False)

    def stop(self, but: int | None = None) -> None:
        if (chat := self.chat) is not None:
            chat.stop(but)
        if (several := self._several) is not None:
            several.stop()

    def answer_now(self) -> None:
        if (chat := self.chat) is not None:
            chat.answer_now()

    def open(self, on_progress: OnProgress | None = None) -> None:
        self._load(self._engines.find(self.model, on_progress), on_progress)

    def switch(self, model: str, on_progress: OnProgress | None = None) -> None:
        # Refuse a model that cannot run while the present one is still loaded.
        files = self._engines.find(model, on_progress)
        self.close()
        self.model = model
        self._load(files, on_progress)

    def _load(self, files: "ModelFiles", on_progress: OnProgress | None) -> None:
        engine = self._engines.load(self.model, files, self.options, on_progress)
        from engine.conversation.aside import AsideRunner

        try:
            calling = Calling.of(engine.tokenizer, self.options.tools)
            params = self._merge_sampling(engine, self.options.sampling, calling)
            chat = engine.chat(
                system=self._begins, think=self.options.think, think_cache=self.options.think_cache
            )
            chat.tools = calling.use if calling is not None else None
            chat.owner = self.options.kept_as
        except BaseException:
            self._engines.close(engine)
            raise
        self.engine, self.chat, self._params, self._calling = engine, chat, params, calling
        self._aside, self._reading = AsideRunner(engine), DocumentPrefill(engine, chat.begun_with)
        self.info = ModelInfo(
            name=engine.model_name,
            device=str(engine.device),
            dtype=str(engine.dtype).removeprefix("torch."),
            context_length=engine.context_length,
            thinks=chat.thinks,
            calls_tools=calling is not None,
            sampling=dict(engine.generation_defaults),
        )
        path, self._path = self._path, ()
        if path:
            self.load_path(path)
        if self.options.documents:
            self._begin_again()
        self._count()

    def send(self, text: str) -> Iterator[TokenEvent]:
        return self._counted(self._loaded().send(text, self._params))

    def tell(self, results: Sequence[ToolResult]) -> Iterator[TokenEvent]:
        return self._counted(self._loaded().tell([result.text for result in results], self._params))

    def resume(self) -> Iterator[TokenEvent]:
        return self._counted(self._loaded().resume(self._params), goes_on=True)

    def candidates(self, text: str, count: int) -> Iterator[tuple[int, Part]]:
        from engine.conversation.batch_generation import AnswerEnd

        chat = self._loaded()
        opening = chat.opening
        calling = self._calling if self.options.tools else None
        said = [CallFilter(calling) for _ in range(count)] if calling is not None else []
        for index, part in chat.candidates(text, count, self._params):
            if said and isinstance(part, TokenEvent):
                yield index, said[index].taken(part)
                continue
            if isinstance(part, AnswerEnd) and part.sequence is not None:
                self._keys = part.sequence.rows.keys  # the cache map shows this candidate until one is kept
            yield index, to_part(part, opening)

    def answers(self, requests: Iterable[Request]) -> Iterator[tuple[int, Part]]:
        from engine.conversation.batch_generation import BatchGenerator
        from engine.conversation.requests import Requests

        self._loaded()
        assert self.engine is not None
        prompts = self._prompts(Requests(self.engine), requests)
        self._several = BatchGenerator(self.engine)
        try:
            with closing(self._several.run(prompts)) as parts:
                for index, part in parts:
                    yield index, to_part(part)
        finally:
            self._several = None

    def _prompts(
        self, asking: "Requests", requests: Iterable[Request]
    ) -> "Iterator[Prompt | EngineError | ModelError]":
        from engine.conversation.batch_generation import make_prompt

        engine = self.engine
        assert engine is not None
        for request in requests:
            messages = [{"role": message.role, "content": message.content} for message in request.messages]
            if messages[0]["role"] != "system" and (system := self._begins):
                messages.insert(0, {"role": "system", "content": system})
            think = {"auto": None, "on": True, "off": False}[request.think or self.options.think]
            try:
                params = self._merge_sampling(
                    engine, {"speculation": "off", **self.options.sampling, **request.sampling}
                )
                yield make_prompt(asking, messages, think, params)
            except (EngineError, ModelError) as error:
                yield error

    def load_path(self, exchanges: Sequence[Exchange]) -> None:
        chat, info = self._person(), self.info
        if chat is None or info is None:
            self._path = tuple(exchanges)
            return
        turns = [to_turn(exchange, exchange.model in (info.name, self.model)) for exchange in exchanges]
        chat.load(turns, self._params)
        self._count()
        self.settle()

    def count(self, draft: str) -> DraftCost | None:
        return self.chat.count(draft) if self.chat is not None else None

    def reset(self) -> None:
        self._path = ()
        if (chat := self._person()) is not None:
            chat.reset()
            self._count()

    def read(self, document: Document) -> int | None:
        return self._reading.read(self.options.system, document) if self._reading is not None else None

    def _begin_again(self) -> None:
        """Apply a change of the system prompt or the documents."""
        if (chat := self._person()) is not None and self._reading is not None:
            chat.system = self._begins
            self._count()
            try:
                self._reading.open(self.options.system, self.options.documents)
            except (EngineError, ModelError) as error:
                self._reading.note = str(error)
            self.settle()

    def know(self, exchanges: Sequence[Exchange]) -> None:
        if (engine := self.engine) is not None and self.info is not None:
            names = (self.info.name, self.model)
            engine.know(
                exchange_tokens(engine, exchange) for exchange in exchanges if exchange.model in names
            )

    def configure(self, settings: ConversationSettings) -> None:
        options, given = changed(self.options, settings), settings.keys()
        engine, chat, reading, calling = self.engine, self.chat, self._reading, self._calling
        if engine is None or chat is None or reading is None:
            self.options = options
            return
        if given & {"system", "documents", "think_cache", "tools"}:
            self._person()
        if "documents" in given:
            reading.check(options.system, options.documents)
        if "tools" in given:
            calling = Calling.of(engine.tokenizer, options.tools)
            if options.tools and calling is None:
                raise no_tools(self.info)
        if given & {"sampling", "tools"}:
            self._params = self._merge_sampling(engine, options.sampling, calling)
        if "tools" in given:
            self._calling, chat.tools = calling, calling.use if calling is not None else None
        before, self.options = self._begins, options
        chat.owner, chat.think, chat.think_cache = options.kept_as, options.think, options.think_cache
        if self._begins != before:
            self._begin_again()
        elif given & {"think_cache", "tools"}:
            self._count()
            self.settle()

    def settle(self) -> None:
        if (chat := self._person()) is not None:
            with suppress(EngineError, ModelError):  # the next message reports the problem
                chat.settle()

    def prepare(self, draft: str) -> None:
        if (chat := self._person()) is not None and not self._power.is_low(time.monotonic()):
            with suppress(EngineError):  # the next message reports what is wrong with a constraint
                chat.prepare(draft, params=self._params)

    def begin_title(self, question: str, answer: str) -> bool:
        engine, chat, aside = self.engine, self.chat, self._aside
        if engine is None or chat is None or aside is None:
            return True
        from models.weights.slots import parameters

        if not engine.tokenizer.has_chat_template:
            return False  # a completion model does not answer questions
        # With `mask`, rows are restored one turn after another, so the end of idle work cannot be known.
        if parameters(engine.spec) < _LEAST_FOR_TITLES or chat.think_cache == "mask":
            return False
        busy = chat.present_tokens is not None or aside.is_running or self._power.is_low(time.monotonic())
        if not busy and aside.said is None:
            with suppress(EngineError, ModelError):
                aside.ask(title_question(question, answer), chat.history, TITLE_TOKENS)
        return True

    def made_title(self) -> str | None:
        return aside.said if (aside := self._aside) is not None else None

    def catalogue(self) -> list[ModelChoice]:
        from chatterm.backends.model_list import choices

        figures = self.figures()
        given_back = 0
        if figures is not None:
            given_back = figures.weight_bytes - figures.host_bytes + figures.kv_bytes
        bandwidth = figures.bandwidth if figures is not None else None
        return choices(self.options.device, self.options.dtype, given_back, bandwidth)

    def close(self) -> None:
        engine, chat, reading = self.engine, self._person(), self._reading
        self.engine = self.chat = self._params = self.info = self._map = self._aside = self._reading = None
        self.used_tokens, self._keys, self._looking = 0, [], False
        if chat is not None:  # the engine may go on with other conversations
            chat.stop()
            with suppress(EngineError, ModelError):  # then the next start computes it
                if engine is not None:
                    engine.save(chat.owner, chat.history)
            chat.reset()
        if reading is not None:
            reading.open(None, ())
        if engine is not None:
            self._engines.close(engine)

    def _counted(self, events: Iterator[TokenEvent], goes_on: bool = False) -> Iterator[TokenEvent]:
        """Yield the events of an answer or of its continuation."""
        try:
            if self._calling is None or not self.options.tools:
                return (yield from events)
            with closing(cast("Generator[TokenEvent, None, None]", events)):
                for event in events:
                    if self._said is None:
                        answer = self.chat.last if goes_on and self.chat is not None else None
                        before = answer.text.removesuffix(event.text) if answer is not None else ""
                        self._said = CallFilter(self._calling, before if event.kind == "answer" else "")
                    yield self._said.taken(event)
        finally:
            self._said = None
            self._count()

    def _count(self) -> None:
        """Count the history once per change: counting renders it, which would make a screen wait."""
        if self.chat is not None:
            self._keys = self.chat.history.keys
            self.used_tokens = len(self._keys)

    def _merge_sampling(
        self, engine: "Engine", sampling: Mapping[str, Any], calling: Calling | None = None
    ) -> SamplingParams:
        """Return the model's own sampling with overrides. A text completion gets a limit, as it has no end of turn."""
        constraint = self.options.constraint
        # An answer in a format may have to repeat itself, and is useless if it is cut short.
        is_free = sampling.get("constraint", constraint) is None
        ours = OURS if is_free else {**OURS, "stop_repetition": False}
        if calling is not None:
            constraint = calling.constraint(engine, constraint)
        limit = {} if engine.tokenizer.has_chat_template else {"max_tokens": _COMPLETION}
        return engine.default_params(**{**limit, "constraint": constraint, **ours, **sampling})

    def _loaded(self) -> "Chat":
        if (chat := self._person()) is None:
            raise no_model()
        return chat

    def _person(self) -> "Chat | None":
        """Return the chat for a job of the conversation; end the model's background work first."""
        if self._aside is not None:
            self._aside.stop()
        return self.chat
