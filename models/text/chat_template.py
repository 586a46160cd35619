"""Render a conversation as the text that a model was trained on, by its own Jinja template in a separate process."""

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
from models.system import own_group

SECONDS = 3.0
"""Processor time for a rendering. It normally takes milliseconds; beyond this limit it counts as endless."""
MEMORY = 512 * 2**20
"""Bytes for the process of a template; Python takes 30 MB of them."""
ADDED = 4 * 2**20
"""Bytes that a template may add to its input, which it may also repeat three times."""

_TOO_LARGE = "it produces too much text"
_TIME_IS_UP = {-getattr(signal, name, 0) for name in ("SIGPROF", "SIGALRM")}
"""Exit codes of a process that took too long."""


class Message(TypedDict):
    """One turn of a conversation, as chat templates expect it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class ChatTemplate:
    """A chat template and its process, which is started by the first rendering. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Keep the template; `special_tokens` has the text of bos_token, eos_token, ..., which it may use."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None
        """Ends the process; this also happens when the template is garbage-collected and when Python exits."""

    @property
    def source(self) -> str:
        """The source of the template."""
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
        """Return the conversation as text. If `enable_thinking` is None, the template decides. `tools` are the tools
        that the model may call; `more` are further variables of the template.

        Raises ModelError if the template is invalid, fails, refuses the conversation, or takes too long or too
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
        if enable_thinking is False:
            names.setdefault("thinking_budget", 0)  # what Seed-OSS's template asks
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
        """Start the process ahead of the first rendering, without waiting for it. `render` reports its failures."""
        with self._lock, suppress(OSError):
            if self._process is None:
                self._start()

    def close(self) -> None:
        """End the process, and with it a running rendering. Another rendering starts a new process."""
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
        with suppress(OSError):  # the process may end meanwhile
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
            **own_group(),
        )
        self._process, self._stop = process, weakref.finalize(self, _kill, process)
        assert process.stdin is not None
        with suppress(OSError):  # the next request notices that the process has ended
            process.stdin.write(json.dumps(self._source).encode() + b"\n")
        return process


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError):  # input that it has not read yet
        process.communicate()


def _template_message(message: Message) -> dict[str, Any]:
    # As in transformers: omit keys without a value, and give the reasoning under its older name, too.
    present = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in present:
        present.setdefault("thinking", present["reasoning_content"])
    return present
