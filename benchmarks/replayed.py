"""The gain of suffix matching in a real answer, token by token, to be replayed with random weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.speculation.cost_model import MOST_ROWS
from engine.speculation.sources import NOTHING, Guess
from engine.speculation.texts import ConversationText, Texts


class Worth(NamedTuple):
    """The worth of the guess before one token."""

    guessed: int
    held: int
    length: int
    agreed: bool


def worth(tokens: Sequence[int], prompt: int) -> list[Worth]:
    """Return the worth of the guess before each token after the first `prompt` tokens, which are the prompt."""
    texts = Texts()
    text, found = texts.take(None, tokens[:prompt]), list[Worth]()
    for at in range(prompt, len(tokens)):
        guess = texts.guess(text, 2 * MOST_ROWS)
        pairs = enumerate(zip(guess.tokens, tokens[at:], strict=False))
        end = min(len(guess.tokens), len(tokens) - at)
        held = next((place for place, (token, said) in pairs if token != said), end)
        found.append(Worth(len(guess.tokens), held, guess.length, guess.agreed))
        text.go_on(tokens[at : at + 1])
    return found


def partly(coming: Sequence[int], right: int, length: int, agreed: bool = True) -> Guess:
    """Guess the first `right` of the coming tokens correctly, and the rest wrongly."""
    return Guess((*coming[:right], *((token + 1) % 100 for token in coming[right:])), length, agreed)


@dataclass(slots=True)
class Replayed(Texts):
    """Guesses that hold in an answer with random weights as they held in another answer."""

    answer: list[int] = field(default_factory=list)
    """The answer, including its prompt."""
    prompt: int = 0
    worth: list[Worth] = field(default_factory=list)

    def guess(self, text: ConversationText, most: int) -> Guess:
        at = len(text.path)
        if not self.prompt <= at < self.prompt + len(self.worth):
            return NOTHING
        one = self.worth[at - self.prompt]
        coming = self.answer[at : at + min(one.guessed, most)]
        return partly(coming, one.held, one.length, one.agreed) if coming else NOTHING
