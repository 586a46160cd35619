"""Documents as chunks of an engine: computed in idle time, and kept for all conversations that begin with them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from chatterm.backends.documents import Document, list_names, with_documents
from engine.errors import ContextFullError, EngineError
from engine.store.folder import chunk_owner
from models.units import counted

if TYPE_CHECKING:
    from engine.engine import Engine

MOST_ORDERED = 6
"""Most documents for which a better order is searched: each step tokenises all that are left."""


class DocumentPrefill:
    """The documents that an engine reads for one conversation. `tokens` returns the tokens that a conversation with a
    given system prompt begins with.
    """

    def __init__(self, engine: "Engine", tokens: Callable[[str | None], list[int]]) -> None:
        self._engine = engine
        self._tokens = tokens
        self._open = ""
        """The chunk of the documents at the start of the conversation; "": none."""
        self._ahead: set[str] = set()
        """Names of documents that are read for later conversations."""
        self.note = ""
        """A note for the user about the order of the documents, or why they cannot be used; "" for none."""

    def check(self, system: str | None, documents: Sequence[Document]) -> None:
        """Raise ContextFullError if these documents would leave no room for a message."""
        if documents:
            self._fitting(system, documents)

    def open(self, system: str | None, documents: Sequence[Document]) -> None:
        """Start the conversation with these documents: they are read in idle time and evicted late.

        Raises ContextFullError as `check` does.
        """
        chunks, before = self._engine.chunks, self._open
        self.note, self._open = "", list_names(documents)
        if before and before != self._open:
            if chunks.progress(before) is not None and before not in self._ahead:  # it is no longer needed
                chunks.drop(before)
            else:
                with suppress(EngineError):  # it was dropped
                    chunks.pin(before, False)
        if documents:
            self.note = self._better(system, documents)
            self._keep(documents, self._fitting(system, documents))

    def read(self, system: str | None, document: Document) -> int:
        """Read a document in idle time; return its number of tokens. Raises ContextFullError."""
        tokens = self._fitting(system, [document])
        self._ahead.add(document.name)
        if document.name != self._open:
            self._keep([document], tokens)
        return len(tokens) - len(self._tokens(system) if system else [])

    def reached(self) -> int | None:
        """Return how many tokens of the conversation's documents are computed, while they are read; otherwise None."""
        progress = self._engine.chunks.progress(self._open) if self._open else None
        return None if progress is None else progress[0]

    def _keep(self, documents: Sequence[Document], tokens: Sequence[int]) -> None:
        self._engine.chunks.keep(tokens, list_names(documents), owner=chunk_owner(documents[-1].text))

    def _fitting(self, system: str | None, documents: Sequence[Document]) -> list[int]:
        tokens, room = self._tokens(with_documents(system, documents)), self._engine.context_length
        if len(tokens) >= room:
            raise ContextFullError(
                f"{list_names(documents)}: {counted(len(tokens), 'token')} do not fit into a context of "
                f"{room:,}; open fewer documents, or start with a larger --context.",
                needed=len(tokens),
                available=room,
            )
        return tokens

    def _better(self, system: str | None, documents: Sequence[Document]) -> str:
        """Describe in a sentence an order of the documents of which more is cached; "" if there is none."""
        if not 1 < len(documents) <= MOST_ORDERED:
            return ""
        kept = self._kept(system, documents)
        order, left, most = list[Document](), list(documents), 0
        while left:
            found = [(self._kept(system, [*order, document]), document) for document in left]
            reached, following = max(found, key=lambda one: one[0])
            if reached <= most:
                break
            order, most = [*order, following], reached
            left.remove(following)
        names = ",".join(document.name for document in [*order, *left])
        if most - kept < self._engine.block_size:
            return ""
        return f"In the order {names}, {counted(most - kept, 'token')} more would already be in the cache."

    def _kept(self, system: str | None, documents: Sequence[Document]) -> int:
        return self._engine.kept_tokens(self._tokens(with_documents(system, documents)))
