"""Ollama's own API: one JSON document per line."""

from collections.abc import Mapping
from typing import Any

from chatterm.backends.backend import FinishReason
from chatterm.backends.remote.dialects.base import (
    AnswerRequest,
    Entry,
    ListedModel,
    ParsedMessage,
    ReportedUsage,
    complaint,
    count,
    items,
    mapping,
    schema_format,
    seen,
    text,
    to_message,
)
from chatterm.backends.remote.dialects.calls import CallingMessage, CallPart, CallResult, arguments_text
from chatterm.backends.remote.thinking import AnswerPiece

_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


class Ollama:
    """Implements Dialect."""

    path = "/api/chat"
    models_path = "/api/tags"
    is_lines = True
    unknown = ("logprobs", "logit_bias", "stop_repetition", "speculation")

    def body(self, asked: AnswerRequest, server: str) -> dict[str, Any]:
        options = {
            _NAMES.get(name, name): list(value) if name == "stop" else value
            for name, value in asked.sampling.items()
            if value is not None and name not in self.unknown
        }
        if asked.context is not None:
            options["num_ctx"] = asked.context
        body: dict[str, Any] = {
            "model": asked.model,
            "messages": [_message(entry, asked.pictures) for entry in asked.messages],
            "stream": True,
        }
        if asked.tools:
            body["tools"] = [tool.as_function() for tool in asked.tools]
        if options:
            body["options"] = options
        if asked.think != "auto":
            body["think"] = asked.think == "on"
        if (constraint := asked.constraint) is not None:
            wanted = schema_format(constraint)
            body["format"] = wanted["json_schema"]["schema"] if "json_schema" in wanted else "json"
        return body

    def can_go_on(self, server: str) -> bool:
        return True

    def heard(self, message: Mapping[str, Any]) -> ParsedMessage:
        if problem := complaint(message) if "error" in message else "":
            return ParsedMessage(problem=problem)
        said = mapping(message.get("message"))
        pieces = []
        if thought := text(said.get("thinking")):
            pieces.append(AnswerPiece(thought, "reasoning"))
        if content := text(said.get("content")):
            pieces.append(AnswerPiece(content))
        calls = [_call(entry) for entry in map(mapping, items(said.get("tool_calls")))]
        if message.get("done") is not True:
            return ParsedMessage(pieces, calls=calls)
        reason = FinishReason.LENGTH if message.get("done_reason") == "length" else FinishReason.EOS
        # The time for the prompt gives no speed, because how much of it was cached is not reported.
        usage = ReportedUsage(
            count(message.get("prompt_eval_count")), generated=count(message.get("eval_count"))
        )
        return ParsedMessage(pieces, reason, usage, calls=calls, is_last=True)

    def listed(self, document: Any) -> list[ListedModel] | None:
        data = mapping(document).get("models")
        if not isinstance(data, list):
            return None
        names = [text(mapping(entry).get("name")) for entry in data]
        return [ListedModel(name, server="ollama") for name in names if name and len(name) <= 300]


def _message(entry: Entry, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    match entry:
        case CallingMessage():
            calls = [{"function": {"name": call.name, "arguments": call.given}} for call in entry.calls]
            thought = {"thinking": entry.reasoning} if entry.reasoning else {}
            return {"role": "assistant", "content": entry.content, **thought, "tool_calls": calls}
        case CallResult():
            return {"role": "tool", "content": entry.content, "tool_name": entry.name}
        case _:
            said, shown = seen(entry, pictures)
            return {**to_message(entry, said), **({"images": [data for _, data in shown]} if shown else {})}


def _call(entry: Mapping[str, Any]) -> CallPart:
    """Return a call; Ollama always sends it whole."""
    function = mapping(entry.get("function"))
    given = arguments_text(function.get("arguments"))
    return CallPart(None, text(entry.get("id")), text(function.get("name")) or "?", given)
