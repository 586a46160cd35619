"""Why an answer ended abnormally, and whether /continue resumes it."""

from collections.abc import Container, Mapping
from dataclasses import dataclass

from chatterm.backends.backend import FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    why: str = ""
    way_on: str = ""

    def said(self, *, has_text: bool, has_thought: bool, resumes: Container[str]) -> str:
        """Describe the ending in a line; `resumes` is as in ModelInfo."""
        come_to = "text" if has_text else "thinking" if has_thought else "nothing"
        return f"{self.why}; {self.way_on}" if self.way_on and come_to in resumes else self.why


_ENDINGS: Mapping[FinishReason, Ending] = {
    FinishReason.CANCELLED: Ending("stopped", "/continue resumes it"),
    FinishReason.LENGTH: Ending("cut off at the token limit", "/continue resumes it"),
    FinishReason.REPETITION: Ending("stopped, the answer was repeating itself", "/continue goes on"),
    FinishReason.CONTEXT_FULL: Ending("the context is full; /compact makes room"),
}


def describe_ending(reason: FinishReason | None) -> Ending:
    return _ENDINGS.get(reason, Ending()) if reason is not None else Ending()
