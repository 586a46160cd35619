"""How the next token is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from engine.errors import EngineError

UNRECOMMENDED: Mapping[str, float | int] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What holds for a model whose authors recommend nothing."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of one request; every default means "off" but for `temperature`.

    Raises EngineError when a value is out of range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide (multiply, where negative) the logits of every token seen in prompt or answer, as in CTRL."""
    presence_penalty: float = 0.0
    """Subtract from the logits of every token already generated in this answer."""
    seed: int | None = None
    """The same seed on the same machine gives the same text; None draws a fresh one."""
    max_tokens: int | None = None
    """Tokens to generate at most; None means as many as the context holds."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; they are not part of it and may span tokens."""

    def __post_init__(self) -> None:
        rules = (
            (0.0 <= self.temperature < inf, "temperature", self.temperature, "0 (greedy) or more"),
            (0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or more, below 2^31"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1"),
            (0.0 < self.repetition_penalty < inf, "repetition_penalty", self.repetition_penalty, "above 0"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "from -2 to 2"),
            (self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more"),
            (self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1"),
            (all(self.stop), "stop", self.stop, "strings that are not empty"),
        )
        for valid, name, value, allowed in rules:
            if not valid:
                raise EngineError(f"{name} is {value!r}; it must be {allowed}.")


def seeds(first: int | None, count: int) -> list[int | None]:
    """The seeds of `count` answers to one prompt: `first` and those after it; None each where there is none."""
    return [None if first is None else (first + number) % 2**63 for number in range(count)]
