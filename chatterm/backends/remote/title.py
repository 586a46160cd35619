"""A title that a server generates beside the conversation."""

from queue import Empty, SimpleQueue

from chatterm.backends.remote.answer import RunningAnswer
from chatterm.backends.remote.client import Began, Client, Inbox, Over
from chatterm.backends.remote.dialects.base import AnswerRequest, Dialect


class Title:
    """A request for a title. `said` may be read from any thread, one at a time."""

    def __init__(self, client: Client, dialect: Dialect, asked: AnswerRequest, server: str) -> None:
        self.question = asked.messages
        self._inbox: Inbox = SimpleQueue()
        self._running = RunningAnswer(dialect, asked.model)
        self._is_over = False
        self._future = client.begin(dialect.path, dialect.body(asked, server), self._inbox)

    @property
    def said(self) -> str | None:
        """The whole title; "" if the request failed, None while it streams."""
        while not self._is_over:
            try:
                _, item = self._inbox.get_nowait()
            except Empty:
                return None
            if isinstance(item, bytes):
                events = self._running.feed(item)
            elif isinstance(item, Began):
                self._running.began(item)
                continue
            else:  # it ended, normally or not: a title is not worth a second attempt
                events = self._running.end() if isinstance(item, Over) else []
                self._is_over = True
            for event in events:
                self._running.take(event)
        return self._running.text if self._running.is_complete else ""

    def cancel(self) -> None:
        """Give up the title because an answer is wanted."""
        self._is_over = True
        self._future.cancel()
