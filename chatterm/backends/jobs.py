"""The jobs that the screen gives to the thread that talks to the backend (`worker.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatterm.backends.backend import Document, Exchange, Request, ThinkCache, ThinkMode, Tool, ToolResult


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Load the model that the backend was made for."""


@dataclass(frozen=True, slots=True)
class Switch:
    model: str


@dataclass(frozen=True, slots=True)
class Send:
    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Continue with the results of the last answer's calls."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class SetTools:
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    pass


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue the last answer."""


@dataclass(frozen=True, slots=True)
class DrawCandidates:
    """Answer a message several times at once. The history does not change."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Answer a message while another model answers it too. The history does not change."""

    text: str
    model: str
    path: tuple[Exchange, ...]
    """The history."""


@dataclass(frozen=True, slots=True)
class LoadPath:
    """Replace the history with these exchanges."""

    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class Undo:
    pass


@dataclass(frozen=True, slots=True)
class Reset:
    pass


@dataclass(frozen=True, slots=True)
class SetSystem:
    text: str | None


@dataclass(frozen=True, slots=True)
class SetDocuments:
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Read a document in idle time. The result is its number of tokens, or None if the backend cannot do that."""

    document: Document


@dataclass(frozen=True, slots=True)
class Know:
    """Let speculation draw on exchanges of other conversations."""

    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class KeepAs:
    name: str | None


@dataclass(frozen=True, slots=True)
class SetThink:
    mode: ThinkMode


@dataclass(frozen=True, slots=True)
class SetThinkCache:
    mode: ThinkCache


@dataclass(frozen=True, slots=True)
class SetSampling:
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prepare:
    draft: str


@dataclass(frozen=True, slots=True)
class Count:
    """The result is a DraftCost, or None if a later Count is already waiting."""

    draft: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The result is a list of ModelChoice."""


@dataclass(frozen=True, slots=True)
class ListModels:
    pass


@dataclass(frozen=True, slots=True)
class MakeTitle:
    """Start to generate a title if nothing else is to be done. The result is whether the model can."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class AsideJob:
    """Answer a request outside the conversation; the next job ends it."""

    request: Request


Job = (
    OpenJob | Switch | Send | Tell | SetTools | Retry | Resume | DrawCandidates | Compare | LoadPath | Undo
    | Reset | SetSystem | SetDocuments | Read | Know | KeepAs | SetThink | SetThinkCache | SetSampling | Prepare
    | Count | MakeTitle | AsideJob | ListModels | Catalogue
)  # fmt: skip
