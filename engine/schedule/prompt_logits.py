"""The logits after the latest prompts: the same prompt is answered again without computing a row."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from engine.cache.block import Key

PROMPTS = 4
"""So many prompts are remembered, at the size of the vocabulary each."""


class PromptLogits:
    """Remembers logits [vocab] by the keys of a prompt's rows. It belongs to the scheduler."""

    def __init__(self, most: int = PROMPTS) -> None:
        """Remember up to `most` prompts."""
        self._held: deque[tuple[Sequence[Key], Tensor]] = deque(maxlen=most)

    def note(self, keys: Sequence[Key], logits: Tensor) -> None:
        """Remember the logits after a prompt, which may be overwritten afterwards."""
        if self.find(keys) is None:
            self._held.append((list(keys), logits.clone()))

    def find(self, keys: Sequence[Key]) -> Tensor | None:
        """Return the logits after a prompt; None if they are not remembered."""
        return next((logits for held, logits in self._held if held == keys), None)

    def clear(self) -> None:
        """Forget all prompts."""
        self._held.clear()
