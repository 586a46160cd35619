"""From a conversation to the text that a model was trained on: its own Jinja template, run in a process of its own."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from models.errors import ModelError

SECONDS = 3.0
"""Processor time for a rendering; one takes milliseconds, and what takes longer than this never ends."""
MEMORY = 512 * 2**20
"""Bytes for the process of a template, of which Python takes 30 MB."""
ADDED = 4 * 2**20
"""Bytes that a template may add to what it is given, which it may repeat three times."""

_TOO_LARGE = "it produces too much text"
_TIME_IS_UP = {-getattr(signal, name, 0) for name in ("SIGPROF", "SIGALRM")}
"""How a process ends that took too long."""


class Message(TypedDict):
    """One turn of a conversation, as chat templates know it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class ChatTemplate:
    """A chat template and, from the first rendering on, the process that it runs in. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: the names the template may use (bos_token, eos_token, ...) with their text."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        """Ends the process; it happens by itself when nobody has the template any more, and when Python ends."""

    @property
    def source(self) -> str:
        """The template itself."""
        return self._source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `enable_thinking` None leaves the choice to the template; `tools` are those that
        the model may call, `more` are names of the template's own.

        Raises ModelError when the template is not valid, fails, refuses the conversation, or takes too long or too
        much memory.
        """
        names: dict[str, Any] = {
            **(more or {}),
            **self._special_tokens,
            "messages": [_template_message(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if enable_thinking is not None:
            names["enable_thinking"] = enable_thinking
        request = json.dumps(names).encode() + b"\n"
        with self._lock:
            reply = self._ask(request)
        text = reply.get("text")
        if isinstance(text, str):
            return text
        what = "is not valid" if "template" in reply else "cannot render this conversation"
        reason = " ".join(str(reply.get("template") or reply.get("error")).split())[:300]
        raise ModelError(
            f"The model's chat template {what}: {reason}. Change the conversation, or use a model with another "
            "template."
        )

    def start(self) -> None:
        """Start the process ahead of the first rendering; returns at once. What fails then is told by `render`."""
        with self._lock, suppress(OSError):
            if self._process is None:
                self._start()

    def close(self) -> None:
        """End the process, and a rendering that runs. Another rendering starts a new one."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
        except OSError as error:
            return {"error": f"no process can be started for it ({error.strerror})"}
        assert process.stdin is not None
        assert process.stdout is not None
        most, line = ADDED + 4 * len(request), b""
        with suppress(OSError):  # it ends while it is asked
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline(most)
        if line.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(line)
            return reply
        reason = _TOO_LARGE
        if len(line) < most:
            reason = "it takes too long" if process.wait() in _TIME_IS_UP else "its process has ended"
        self._stop()
        return {"error": reason}

    def _start(self) -> "subprocess.Popen[bytes]":
        self._stop()
        program = Path(__file__).with_name("template_sandbox.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(program), str(SECONDS), str(MEMORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C in the terminal is not for it
        )
        self._process, self._stop = process, weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        with suppress(OSError):  # whoever asks it something sees that it has ended
            process.stdin.write(json.dumps(self._source).encode() + b"\n")
        return process


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError):  # what it was not given yet
        process.communicate()


def _template_message(message: Message) -> dict[str, Any]:
    # As transformers does: no key without a value, and the reasoning also under its older name.
    present = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in present:
        present.setdefault("thinking", present["reasoning_content"])
    return present
