"""What the screen asks of the thread that talks to the backend (`worker.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatterm.backends.backend import Document, Exchange, Request, ThinkCache, ThinkMode, Tool, ToolResult


@dataclass(frozen=True, slots=True)
class Open:
    """Load the model the backend was made for."""


@dataclass(frozen=True, slots=True)
class Switch:
    model: str


@dataclass(frozen=True, slots=True)
class Send:
    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Go on with what came of the last answer's calls."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class SetTools:
    tools: tuple[Tool, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    pass


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with the last answer."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Answer a message several times at once. The history stays as it is."""

    text: str
    count: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Answer a message, and have another model answer it at the same time. The history stays as it is."""

    text: str
    model: str
    path: tuple[Exchange, ...]
    """The history."""


@dataclass(frozen=True, slots=True)
class LoadPath:
    """The history becomes these exchanges."""

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
    """Have a document read in idle time. Done with its tokens, or None where nobody can."""

    document: Document


@dataclass(frozen=True, slots=True)
class Know:
    """What was said elsewhere may be guessed from."""

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
    """Done with a DraftCost, or with None where a later Count waits already."""

    draft: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Done with a list of ModelChoice."""


@dataclass(frozen=True, slots=True)
class ListModels:
    pass


@dataclass(frozen=True, slots=True)
class MakeTitle:
    """Begin with a title, where there is nothing else to do. Done with whether the model can."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Aside:
    """Answer something that is no part of the conversation; whatever is asked for next ends it."""

    request: Request


Job = (
    Open | Switch | Send | Tell | SetTools | Retry | Resume | Draw | Compare | LoadPath | Undo | Reset | SetSystem
    | SetDocuments | Read | Know | KeepAs | SetThink | SetThinkCache | SetSampling | Prepare | Count | MakeTitle | Aside
    | ListModels | Catalogue
)  # fmt: skip
