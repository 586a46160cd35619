"""Lookups in a thread, for what a person is typing."""

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

from textual.widget import Widget

Query = TypeVar("Query")
Result = TypeVar("Result")


class Lookup(Generic[Query, Result]):
    """Looks up what is asked, one query at a time; of those that come meanwhile, only the latest."""

    def __init__(
        self,
        owner: Widget,
        name: str,
        look_up: Callable[[Query], Result],
        show: Callable[[Query, Result], None],
    ) -> None:
        """`look_up` runs in a thread of this name; `show` gets what is still wanted, as a callback of `owner`."""
        self._owner = owner
        self._name = name
        self._look_up = look_up
        self._show = show
        self._is_running = False
        self.wanted: Query | None = None
        """The latest query; None if its result is not wanted any more."""

    def ask(self, query: Query | None) -> None:
        """Look `query` up as soon as the query before it is done; None: nothing more is wanted."""
        self.wanted = query
        if query is None or self._is_running:
            return
        self._is_running = True

        def run() -> None:
            self._owner.call_later(self._done, query, self._look_up(query))

        Thread(target=run, name=self._name, daemon=True).start()

    def _done(self, query: Query, result: Result) -> None:
        self._is_running = False
        if query == self.wanted:
            self._show(query, result)
        else:
            self.ask(self.wanted)
