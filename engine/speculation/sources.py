"""The guess types that all sources share: tokens that may follow, and how sure they are."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.params import SamplingParams


class Guess(NamedTuple):
    """Tokens that may come next."""

    tokens: tuple[int, ...] = ()
    length: int = 0
    """Length of the match: tokens before the guess that are the same as before its earlier occurrence."""
    agreed: bool = True
    """Whether all places with a match of this length continue with the same first token."""
    chances: tuple[float, ...] = ()
    """The probability that a draft model gives each token; empty for guesses from texts."""


NOTHING = Guess()


class Drawing(NamedTuple):
    """How tokens of an answer are drawn on a device."""

    params: "SamplingParams"
    seed: int
    said: int
    """Number of tokens of the answer so far; they are the last ones of its text."""


class DraftRequest(NamedTuple):
    """A request to guess the next tokens of a text."""

    whom: Hashable
    """Identifies the text, until `Source.end`."""
    tokens: Sequence[int]
    """All of the text so far."""
    most: int
    """The most tokens to guess."""
    draw: "Callable[[Tensor, Sequence[int]], int] | None" = None
    """Returns the token that would be drawn after the text and the given tokens if logits [vocab] were the model's own;
    -1 if they are not numbers. None: unknown, and the likeliest token is as good a guess as any."""
    drawing: Drawing | None = None
    """How the tokens are drawn, if a device draws them."""


GoesOn = Callable[[int, Guess, int], bool]
"""Whether to guess one more token. Arguments: the number of the text, its guess so far, and how many texts still go on.
"""


class DraftSource(Protocol):
    """A model that guesses. Only the loop thread may use it. Any error it raises ends its guesses and nothing else."""

    @property
    def told(self) -> str:
        """Its description for the user."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its KV cache."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights that were copied since loading."""

    @property
    def cost(self) -> float:
        """Estimated time of one of its steps, in steps of the model that it guesses for."""

    def guess(
        self, asked: Sequence[DraftRequest], goes_on: GoesOn, saw: Callable[[int, float], None]
    ) -> list[Guess]:
        """Guess what follows each of these texts; the guess is empty until the model has read the text.

        `saw` is called after each step with its number of rows and the seconds it took, and after a chain with 0 and
        the seconds that it took besides its steps, if it took any.
        """

    def end(self, whom: Hashable) -> None:
        """Release this text: no more guesses are asked for it."""

    def wish(self, tokens: Sequence[int]) -> None:
        """Read these tokens in idle time, as a text is likely to begin with them. This replaces an earlier wish."""

    def while_idle(self) -> bool:
        """Read part of the wished tokens, for some milliseconds. Return whether more is left."""
