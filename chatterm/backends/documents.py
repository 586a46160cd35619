"""Documents at the start of a conversation: they follow the user's text in the system prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the library."""

    name: str
    text: str
    """The text as the model sees it: each file as its name and a fenced block. The form never varies, so that all
    conversations on the document begin with the same tokens."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the text, in hexadecimal."""
        return sha256(self.text.encode("utf-8", "replace")).hexdigest()


def with_documents(system: str | None, documents: Sequence[Document]) -> str | None:
    """Return the system prompt that the model receives."""
    parts = [*([system] if system else []), *(document.text for document in documents)]
    return "\n\n".join(parts) or None


def list_names(documents: Sequence[Document]) -> str:
    """Return the names as a list in words: "paper, notes"."""
    return ", ".join(document.name for document in documents)
