"""A parsed request and its renderer, independent of the API that it came by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chatterm.server.http.answer_state import AnswerState, Part, Totals
from chatterm.server.service import Generation, RequestError


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A client's request: what to generate, and how to render it."""

    generations: tuple[Generation, ...]
    """One for each prompt."""
    stream: bool
    renderer: "Renderer"


class Renderer(Protocol):
    """Renders answers as the client expects them. Answers are numbered consecutively across all prompts."""

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        """Render new parts of one answer in a stream."""

    def begin(self, totals: Totals) -> list[bytes]:
        """Render the start of a stream, once the prompts are computed."""

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        """Render the end of a stream."""

    def failed(self, error: RequestError) -> list[bytes]:
        """Render an error that ends a stream."""

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        """Render the whole response, without a stream."""
