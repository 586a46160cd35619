"""The methods of Backend that are called by name: as jobs of the worker, and as calls to the engine process."""

from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any, Literal

from chatterm.backends.backend import Backend

Kind = Literal["immediate", "load", "answer", "several", "aside", "history", "draft", "title", "plain"]
"""How a method is called.

- immediate: from any thread, while others run; all others run one after the other
- load: loads a model and reports the progress
- answer, several: yields the events of an answer, or the parts of several answers
- aside: as several, but the request is outside the conversation, and the next call ends it
- history: changes the history, and with it the latest answer
- draft: only the latest call is worth running
- title: only worth running while nothing else is to be done
"""

_METHODS: Mapping[Kind, tuple[str, ...]] = {
    "immediate": ("stop", "answer_now", "blocks", "token_text"),
    "load": ("open", "switch"),
    "answer": ("send", "tell", "resume"),
    "several": ("candidates", "compare"),
    "aside": ("answers",),
    "history": ("load_path", "reset"),
    "draft": ("prepare", "count"),
    "title": ("begin_title",),
    "plain": ("configure", "read", "know", "settle", "models", "catalogue"),
}
KINDS: Mapping[str, Kind] = {name: kind for kind, names in _METHODS.items() for name in names}


@cache
def arguments_type(method: str) -> Any:
    """Return the type of the arguments of a method, without `on_progress`, as a tuple."""
    given = list(signature(getattr(Backend, method)).parameters.values())[1:]
    return tuple[tuple(one.annotation for one in given if one.name != "on_progress")]  # type: ignore[misc]
