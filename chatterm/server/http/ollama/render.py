"""/api/chat and /api/generate: renders answers, one line of JSON for each piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from chatterm.server.http.answer_state import AnswerItem, AnswerState, Likelihoods, Part, Thought, Totals
from chatterm.server.http.openai.chat import logprob_object
from chatterm.server.http.sse import line
from chatterm.server.service import Logprob, RequestError
from chatterm.tool_calls.reader import AnswerText, CallEnded


def stamp() -> str:
    """Return the current time in RFC 3339's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class _Renderer:
    model: str

    def begin(self, totals: Totals) -> list[bytes]:
        return []

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        lines: list[dict[str, Any]] = []
        logprobs: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Likelihoods(tokens):
                    logprobs += map(_likelihood, tokens)
                case Thought(text):
                    lines.append(self._line({"thinking": text}))
                case AnswerText(text):
                    lines.append(self._line({"content": text}))
                case CallEnded(number):
                    lines.append(self._line(_called(state.calls[number])))
                case _:
                    pass
        if logprobs:
            lines = lines or [self._line({})]
            lines[0]["logprobs"] = logprobs
        return list(map(line, lines))

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        return [line({**self._line({}), **_figures(states[0], totals)})]

    def failed(self, error: RequestError) -> list[bytes]:
        return [line({"error": error.message})]

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        state = states[0]
        said: dict[str, Any] = {"content": state.text}
        if state.reasoning:
            said["thinking"] = state.reasoning
        for call in state.calls:
            called = _called(call)
            said["content"] += called.get("content", "")
            said.setdefault("tool_calls", []).extend(called.get("tool_calls", ()))
        made = {**self._line(said), **_figures(state, totals)}
        if state.logprobs:
            made["logprobs"] = list(map(_likelihood, state.logprobs))
        return msgspec.json.encode(made)

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": stamp()}


class OllamaChatRenderer(_Renderer):
    """Renders answers of /api/chat."""

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "message": {"role": "assistant", "content": "", **said}, "done": False}


class GenerateRenderer(_Renderer):
    """Renders answers of /api/generate."""

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in said.items() if name == "thinking"}
        return {**self._head(), "response": said.get("content", ""), **others, "done": False}


def _likelihood(entry: Logprob) -> dict[str, Any]:
    """Return the logprob object of OpenAI's chats without its empty lists."""
    return {name: value for name, value in logprob_object(entry).items() if value != []}


def _called(call: AnswerItem) -> dict[str, Any]:
    """Render a call: nothing if its arguments were cut off, and its text if they are no object."""
    try:
        arguments = msgspec.json.decode(call.text or "{}")
    except msgspec.DecodeError:
        return {}
    if not isinstance(arguments, dict):
        return {"content": call.text}
    return {"tool_calls": [{"function": {"name": call.name, "arguments": arguments}}]}


def _figures(state: AnswerState, totals: Totals) -> dict[str, Any]:
    """Return how the answer ended, and its statistics; durations in nanoseconds."""
    used = state.usage
    seconds = (used.load_s, used.prefill_s, used.decode_s) if used is not None else (0.0, 0.0, 0.0)
    load, prefill, decode = (int(value * 1e9) for value in seconds)
    waited = int((totals.queue_s + (used.queue_s if used is not None else 0.0)) * 1e9)
    return {
        "done": True,
        "done_reason": "length" if state.is_incomplete else "stop",
        "total_duration": waited + load + prefill + decode,
        "load_duration": load,
        "prompt_eval_count": totals.prompt_tokens,
        "prompt_eval_duration": prefill,
        "eval_count": used.completion_tokens if used is not None else 0,
        "eval_duration": decode,
    }
