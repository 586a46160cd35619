"""Documents that a conversation begins with: they stand in the system prompt, behind what a person wrote there."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the library."""

    name: str
    text: str
    """As the model sees it: each file as its name and a fenced block. It is never written in another way, so that all
    conversations on it begin with the same tokens."""

    @property
    def sha256(self) -> str:
        """Of the text; hexadecimal."""
        return sha256(self.text.encode("utf-8", "replace")).hexdigest()


def with_documents(system: str | None, documents: Sequence[Document]) -> str | None:
    """The system prompt that a model gets."""
    parts = [*([system] if system else []), *(document.text for document in documents)]
    return "\n\n".join(parts) or None


def names_of(documents: Sequence[Document]) -> str:
    """ "paper, notes"."""
    return ", ".join(document.name for document in documents)
