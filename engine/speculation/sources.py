"""What a guess is, whoever makes it: tokens that may follow, and how sure they are."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from engine.params import SamplingParams


class Guess(NamedTuple):
    """What may come next."""

    tokens: tuple[int, ...] = ()
    length: int = 0
    """Tokens before it that were the same where it came before."""
    agreed: bool = True
    """All places with so long a match went on with its first token."""
    chances: tuple[float, ...] = ()
    """Of a draft model: what it gives each of the tokens."""


NOTHING = Guess()


class Drawing(NamedTuple):
    """How tokens of an answer are drawn on a device."""

    params: "SamplingParams"
    seed: int
    said: int
    """Tokens of the answer so far, the last ones of its text."""


class Asked(NamedTuple):
    """Whose next tokens are to be guessed."""

    whom: Hashable
    tokens: Sequence[int]
    """All of the text so far."""
    most: int
    """Guess no more tokens."""
    draw: "Callable[[Tensor, Sequence[int]], int] | None" = None
    """The token that would be drawn behind the text and these tokens, were logits [vocab] the model's own; -1: they are
    no numbers. None: nobody knows, and the likeliest is as good a guess as any."""
    drawing: Drawing | None = None
    """Where a device draws."""


GoesOn = Callable[[int, Guess, int], bool]
"""Whether one more token is to be guessed, for the text with this number, after these; so many texts go on."""


class Source(Protocol):
    """A model that guesses. It belongs to the loop thread, and whatever it raises ends its guesses and nothing else."""

    @property
    def told(self) -> str:
        """What a person is told of it."""

    @property
    def nbytes(self) -> int:
        """Of its weights and of its KV cache."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of mapped weights that were copied since they were loaded."""

    @property
    def cost(self) -> float:
        """What a step of it is believed to take, in steps of the model that it guesses for."""

    def guess(
        self, asked: Sequence[Asked], goes_on: GoesOn, saw: Callable[[int, float], None]
    ) -> list[Guess]:
        """What may follow each of these texts; nothing as long as it has not read what comes before.

        `saw` is told of each step: its rows, and the seconds that it took.
        """

    def end(self, whom: Hashable) -> None:
        """Nobody asks for this text any more."""

    def wish(self, tokens: Sequence[int]) -> None:
        """A text is likely to begin so: read it while nobody waits. It takes the place of an earlier wish."""

    def while_idle(self) -> bool:
        """Read some of what was wished for, for some milliseconds. Returns whether more is left."""
