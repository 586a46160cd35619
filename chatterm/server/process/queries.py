"""Queries about the models of this machine and about the engines: lists, tokens, metrics."""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from chatterm.backends.backend import ModelError
from chatterm.server.process.generation_task import no_model, request_error
from chatterm.server.process.model_pool import KnownModel, ModelPool, PooledModel
from chatterm.server.process.request_parsing import check_length, message_texts, template_message
from chatterm.server.service import ChatMessage, Latency, Metrics, ModelMetrics, RequestError, ServedModel
from engine.errors import EngineError

if TYPE_CHECKING:
    from models.hub.sources import LocalModel

_FRESH = 10.0
"""Seconds for which the list of models on this machine is cached."""


class Tokenize(Struct, frozen=True):
    """A text or a conversation to tokenise."""

    model: str
    text: str | tuple[ChatMessage, ...]


class TokenTexts(Struct, frozen=True):
    """Tokens to decode, one by one."""

    model: str
    ids: list[int]


class Queries:
    """Answers queries. Most may read files, so call them from a worker thread."""

    def __init__(self, host: ModelPool) -> None:
        self._host = host
        self._local: list[ServedModel] = []
        self._looked_at = -_FRESH
        self._lock = threading.Lock()

    def models(self) -> list[ServedModel]:
        """Return the available models, loaded ones first. Raises ModelError."""
        with self._lock:
            if time.monotonic() >= self._looked_at + _FRESH:
                from models.hub.sources import local_models

                self._local = [_on_disk(model) for model in local_models()]
                self._looked_at = time.monotonic()
        held, now = self._host.held, time.monotonic()
        names = {name for one in held for name in one.aliases}
        files = {model.name: model for model in self._local}
        left = [one for one in self._host.known if not one.aliases & names and one.is_there]
        again = {name: one for one in self._host.known[::-1] for name in one.aliases}
        return [
            *(
                _served(one, now, next((files[name] for name in one.aliases & files.keys()), None))
                for one in held
            ),
            *(_unloaded(one) for one in left if not one.aliases & files.keys()),
            *(_named(model, again.get(model.name)) for model in self._local if model.name not in names),
        ]

    def tokenize(self, wanted: Tokenize) -> list[int]:
        """Return the token ids of a text or a conversation. Raises RequestError."""
        with self._using(wanted.model) as held:
            try:
                if isinstance(wanted.text, str):
                    check_length(held.engine, [wanted.text])
                    return held.requests.completes(wanted.text).rows.token_ids
                check_length(held.engine, message_texts(wanted.text))
                messages = [template_message(message) for message in wanted.text]
                return held.requests.asked(messages, think=held.thinks("auto")).rows.token_ids
            except (EngineError, ModelError) as error:
                raise request_error(error) from error

    def token_texts(self, wanted: TokenTexts) -> list[str]:
        """Return the text of each token. Raises RequestError for an unknown id."""
        with self._using(wanted.model) as held:
            size = held.engine.vocab_size
            for id in wanted.ids:
                if not 0 <= id < size:
                    raise RequestError(
                        400, "invalid_request_error", f"There is no token {id}; {held.name} has {size:,}."
                    )
            return [held.engine.tokenizer.decode([id], skip_special=False, goes_on=True) for id in wanted.ids]

    def metrics(self, terminals: int, queued: Mapping[str, int]) -> Metrics:
        """Return the metrics. `queued` counts the answers by model that have not reached the engine. Never waits."""
        return Metrics(
            models=tuple(_metrics(held, queued) for held in self._host.held),
            terminals=terminals,
            process_bytes=_resident(),
        )

    def check(self, name: str) -> None:
        """Raise RequestError unless requests may use this model: it is loaded or on this machine."""
        if self._host.find(name) is None and not self._host.is_here(name):
            raise no_model(name)

    def _using(self, name: str) -> AbstractContextManager[PooledModel]:
        self.check(name)
        return self._host.using(name)


def _served(held: PooledModel, now: float, files: ServedModel | None) -> ServedModel:
    """Describe a loaded model; `files` is its entry among the models on disk."""
    from models.weights.slots import parameters

    engine = held.engine
    figures = engine.figures()
    return ServedModel(
        name=held.name,
        aliases=tuple(sorted(held.aliases - {held.name})),
        created=files.created if files is not None else int(held.loaded_at),
        context_length=engine.context_length,
        thinks=held.requests.thinks,
        chats=engine.tokenizer.has_chat_template,
        tool_format=held.tool_format,
        file_bytes=files.file_bytes if files is not None else None,
        bytes=figures.weight_bytes + figures.kv_bytes + figures.draft_bytes,
        loaded=True,
        expires_in_s=held.left(now),
        family=engine.spec.architecture.removesuffix("ForCausalLM").lower(),
        format=engine.weight_format,
        parameters=parameters(engine.spec),
        template=engine.tokenizer.template,
    )


def _unloaded(model: KnownModel) -> ServedModel:
    """Describe a model that was loaded before, such as one from a file outside chatterm's folders."""
    aliases = tuple(sorted(model.aliases - {model.name}))
    return ServedModel(name=model.name, aliases=aliases, created=int(model.loaded_at), context_length=None)


def _named(model: ServedModel, known: KnownModel | None) -> ServedModel:
    """Return the model with the aliases that it had while it was loaded."""
    if known is None:
        return model
    return replace(model, aliases=tuple(sorted(known.aliases - {model.name})))


def _on_disk(model: "LocalModel") -> ServedModel:
    place = model.files.gguf or model.files.folder
    created = 0
    if place is not None:
        with suppress(OSError):
            created = int(place.stat().st_mtime)
    return ServedModel(name=model.name, created=created, context_length=None, file_bytes=model.bytes)


def _metrics(held: PooledModel, queued: Mapping[str, int]) -> ModelMetrics:
    figures = held.engine.figures()
    blocks = max(figures.blocks_held + figures.blocks_cached + figures.blocks_free, 1)
    traffic = held.engine.traffic()
    tally, guesses = traffic.tally, not figures.speculation.startswith("off: ")
    return ModelMetrics(
        model=held.name,
        running=traffic.running,
        waiting=traffic.waiting
        + len(held.waiting_for_prefix)
        + sum(queued.get(name, 0) for name in held.aliases),
        preempted=traffic.preempted,
        users=held.users,
        busy_s=held.engine.loop.busy_s,
        kv_usage=figures.blocks_held / blocks,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        generated_tokens=tally.generated_tokens,
        preemptions=tally.preemptions,
        drafted_tokens=tally.guessed_tokens if guesses else None,
        accepted_tokens=tally.accepted_tokens if guesses else None,
        first_token=_latency(tally.first_waits),
        between_tokens=_latency(tally.token_waits),
        weight_bytes=figures.weight_bytes,
        kv_bytes=figures.kv_bytes,
    )


def _latency(waits: Iterable[float]) -> Latency | None:
    from engine.schedule.metrics import percentile

    waits = list(waits)  # copied first: the engine's thread appends to them
    p50, p99 = percentile(waits, 0.5), percentile(waits, 0.99)
    return Latency(p50, p99) if p50 is not None and p99 is not None else None


def _resident() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):  # AttributeError: no sysconf on Windows
        return 0
