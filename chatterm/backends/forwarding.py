"""A Backend that hands every call on to another one, which can be exchanged while the conversation goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from chatterm.backends.backend import Backend, ChatOptions, ModelInfo, Outcome

P = ParamSpec("P")
T = TypeVar("T")


def _to_present(
    method: Callable[Concatenate[Any, P], T], *, answers: bool = False
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the same method of the present backend, or of the one that `answers`."""

    def call(self: "ForwardingBackend", /, *arguments: P.args, **named: P.kwargs) -> T:
        backend = self._answering() if answers else self._now
        result: T = getattr(backend, method.__name__)(*arguments, **named)
        return result

    return call


_to_answering = partial(_to_present, answers=True)


class ForwardingBackend:
    """Implements Backend. Subclasses define again what is more than handing on."""

    def __init__(self, backend: Backend) -> None:
        self._now = backend
        """The present backend."""

    def _answering(self) -> Backend:
        """Return the backend for what needs a loaded model; this may load it elsewhere."""
        return self._now

    @property
    def model(self) -> str:
        return self._now.model

    @property
    def info(self) -> ModelInfo | None:
        return self._now.info

    @property
    def last(self) -> Outcome | None:
        return self._now.last

    @property
    def used_tokens(self) -> int:
        return self._now.used_tokens

    @property
    def options(self) -> ChatOptions:
        return self._now.options

    figures = _to_present(Backend.figures)
    notes = _to_present(Backend.notes)
    waiting = _to_present(Backend.waiting)
    blocks = _to_present(Backend.blocks)
    token_text = _to_present(Backend.token_text)
    made_title = _to_present(Backend.made_title)
    stop = _to_present(Backend.stop)
    answer_now = _to_present(Backend.answer_now)
    has_loaded = _to_present(Backend.has_loaded)
    open = _to_present(Backend.open)
    switch = _to_present(Backend.switch)
    load_path = _to_present(Backend.load_path)
    reset = _to_present(Backend.reset)
    settle = _to_present(Backend.settle)
    prepare = _to_present(Backend.prepare)
    count = _to_present(Backend.count)
    begin_title = _to_present(Backend.begin_title)
    compare = _to_present(Backend.compare)
    close = _to_present(Backend.close)

    send = _to_answering(Backend.send)
    tell = _to_answering(Backend.tell)
    resume = _to_answering(Backend.resume)
    candidates = _to_answering(Backend.candidates)
    answers = _to_answering(Backend.answers)
    configure = _to_answering(Backend.configure)
    read = _to_answering(Backend.read)
    know = _to_answering(Backend.know)
    models = _to_answering(Backend.models)
    catalogue = _to_answering(Backend.catalogue)
