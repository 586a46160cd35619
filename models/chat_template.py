"""From a conversation to the text that a model was trained on: its own Jinja template, run in a sandbox."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict

from models.errors import ModelError
from models.template_limits import check_size
from models.template_sandbox import Sandbox

MAX_SECONDS = 5.0
"""A rendering takes milliseconds; one that takes longer than this never ends."""


class Message(TypedDict):
    """One turn of a conversation, as chat templates know it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]


class ChatTemplate:
    """A compiled chat template. Thread-safe: one rendering at a time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the names the template may use (bos_token, eos_token, ...) with their text.

        Raises ModelError when `source` is no valid template.
        """
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        self._lock = threading.Lock()
        with _one_line_errors("The model's chat template is not valid"):
            self._sandbox.deadline = time.monotonic() + MAX_SECONDS
            self._template = self._sandbox.from_string(source)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, enable_thinking: bool | None = None
    ) -> str:
        """The conversation as text. `enable_thinking` None leaves the choice to the template.

        Raises ModelError when the template fails, refuses the conversation, or takes too long.
        """
        names: dict[str, Any] = {
            **self._special_tokens,
            "messages": [_template_message(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            names["enable_thinking"] = enable_thinking
        with self._lock, _one_line_errors("The model's chat template cannot render this conversation"):
            self._sandbox.deadline = time.monotonic() + MAX_SECONDS
            parts: list[str] = []
            size = 0
            for part in self._template.generate(names):
                self._sandbox.check_time()
                size += len(part)
                check_size(size)
                parts.append(part)
            return "".join(parts)


def _template_message(message: Message) -> dict[str, Any]:
    # As transformers does: no key without a value, and the reasoning also under its older name.
    present = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in present:
        present.setdefault("thinking", present["reasoning_content"])
    return present


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a template is foreign code: whatever it raises is its failure, not ours
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{what}: {reason[:300]}. Change the conversation, or use a model with another template."
        ) from error
