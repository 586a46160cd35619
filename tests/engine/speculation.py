"""Guesses for tests: always offered, right and wrong ones."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.conversations import Eager
from engine import Engine
from engine.schedule.speculating import Speculating
from engine.speculation.sources import Guess
from engine.speculation.texts import ConversationText, Texts


@dataclass(slots=True)
class Oracle(Texts):
    """Guesses what `answers` say, by the first tokens of a prompt, and now and then something else."""

    answers: dict[Hashable, list[int]] = field(default_factory=dict)
    random: Random = field(default_factory=lambda: Random(0))
    vocab: int = 256

    def guess(self, text: ConversationText, most: int) -> Guess:
        known = next((one for one in self.answers.values() if starts(one, text.path)), [])
        coming = known[len(text.path) :][: self.random.randint(0, most)]
        tokens = [
            token if self.random.random() < 0.8 else self.random.randrange(self.vocab) for token in coming
        ]
        return Guess(tuple(tokens), len(tokens))


def starts(whole: Sequence[int], first: Sequence[int]) -> bool:
    return list(whole[: len(first)]) == list(first)


def speculate(engine: Engine, texts: Texts | None = None) -> Speculating:
    """Have `engine` check every guess from now on, those of its draft model included."""
    speculating = Speculating(engine.pieces.scheduler, Eager(), texts or Texts(), drafts=engine.drafts)
    engine.engine_step.speculating = speculating
    return speculating
