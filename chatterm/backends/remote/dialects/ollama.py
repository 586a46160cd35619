"""Ollama's own API: a JSON document a line."""

from collections.abc import Mapping
from typing import Any

from chatterm.backends.backend import FinishReason
from chatterm.backends.remote.dialects.base import (
    Asked,
    Heard,
    Listed,
    Usage,
    complaint,
    count,
    mapping,
    messages_of,
    schema_format,
    text,
)
from chatterm.backends.remote.thinking import Piece

_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


class Ollama:
    """Implements Dialect."""

    path = "/api/chat"
    models_path = "/api/tags"
    is_lines = True
    unknown = ("logprobs", "logit_bias", "speculation")

    def body(self, asked: Asked, server: str) -> dict[str, Any]:
        options = {
            _NAMES.get(name, name): list(value) if name == "stop" else value
            for name, value in asked.sampling.items()
            if value is not None and name not in self.unknown
        }
        if asked.context is not None:
            options["num_ctx"] = asked.context
        body: dict[str, Any] = {"model": asked.model, "messages": messages_of(asked), "stream": True}
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

    def heard(self, message: Mapping[str, Any]) -> Heard:
        if problem := complaint(message) if "error" in message else "":
            return Heard(problem=problem)
        said = mapping(message.get("message"))
        pieces = []
        if thought := text(said.get("thinking")):
            pieces.append(Piece(thought, "reasoning"))
        if content := text(said.get("content")):
            pieces.append(Piece(content))
        calls = bool(said.get("tool_calls"))
        if message.get("done") is not True:
            return Heard(pieces, calls_tool=calls)
        reason = FinishReason.LENGTH if message.get("done_reason") == "length" else FinishReason.EOS
        took = count(message.get("prompt_eval_duration")) or 0
        usage = Usage(
            count(message.get("prompt_eval_count")),
            None,
            count(message.get("eval_count")),
            None,
            took / 1e9,
        )
        return Heard(pieces, reason, usage, calls_tool=calls, is_last=True)

    def listed(self, document: Any) -> list[Listed] | None:
        data = mapping(document).get("models")
        if not isinstance(data, list):
            return None
        names = [text(mapping(entry).get("name")) for entry in data]
        return [Listed(name, server="ollama") for name in names if name and len(name) <= 300]
