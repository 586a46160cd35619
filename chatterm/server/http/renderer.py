"""A request as the rest of the server sees it, whichever API it came by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chatterm.server.http.answer_state import AnswerState, Part, Totals
from chatterm.server.service import Generation, RequestError


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a client wants to know."""

    generations: tuple[Generation, ...]
    """One for each prompt."""
    stream: bool
    renderer: "Renderer"


class Renderer(Protocol):
    """Turns what comes of a request into what its client reads. Answers of all prompts are numbered through."""

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        """Of a stream: what has come of one answer."""

    def begin(self, totals: Totals) -> list[bytes]:
        """Of a stream: the first that is sent, once the prompts are computed."""

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        """Of a stream: the last."""

    def failed(self, error: RequestError) -> list[bytes]:
        """Of a stream: it ends here, with an error."""

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        """Without a stream: everything."""
