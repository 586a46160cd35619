"""The responses API, without a state on the server: every request has the whole conversation."""

from collections.abc import Mapping
from typing import Any

from chatterm.backends.backend import FinishReason
from chatterm.backends.remote.dialects.base import (
    Asked,
    Heard,
    Listed,
    complaint,
    items,
    mapping,
    messages_of,
    schema_format,
    text,
)
from chatterm.backends.remote.dialects.chat import listed_models, usage_of
from chatterm.backends.remote.thinking import Piece

_THINKING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
_ANSWER = ("response.output_text.delta", "response.refusal.delta")
_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


class Responses:
    """Implements Dialect."""

    path = "/responses"
    models_path = "/models"
    is_lines = False
    unknown = (
        *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop"),
        *("logprobs", "logit_bias", "speculation"),
    )

    def body(self, asked: Asked, server: str) -> dict[str, Any]:
        messages = messages_of(asked)
        body: dict[str, Any] = {"model": asked.model, "stream": True, "store": False}
        if messages and messages[0]["role"] == "system":
            body["instructions"] = messages.pop(0)["content"]
        body["input"] = messages
        for name in ("temperature", "top_p"):
            if asked.sampling.get(name) is not None:
                body[name] = asked.sampling[name]
        if asked.sampling.get("max_tokens") is not None:
            body["max_output_tokens"] = asked.sampling["max_tokens"]
        if asked.constraint is not None:
            wanted = schema_format(asked.constraint)
            body["text"] = {"format": {"type": wanted["type"], **wanted.get("json_schema", {})}}
        if asked.think != "auto":
            body["reasoning"] = {"effort": "medium" if asked.think == "on" else "none"}
        if asked.cache_key:
            body["prompt_cache_key"] = asked.cache_key
        return body

    def can_go_on(self, server: str) -> bool:
        return False

    def heard(self, message: Mapping[str, Any]) -> Heard:
        kind = text(message.get("type"))
        if kind in _ANSWER:
            return Heard([Piece(text(message.get("delta")))])
        if kind in _THINKING:
            return Heard([Piece(text(message.get("delta")), "reasoning")])
        if kind == "error" or (not kind and message.get("error")):
            return Heard(problem=complaint(message) or "it did not say why")
        if kind in _ENDS:
            return _ended(kind, mapping(message.get("response")))
        if message.get("object") == "response":  # not streamed, whatever was asked for
            ended = _ended(f"response.{text(message.get('status'))}", message)
            return Heard(_said(message), ended.finish, ended.usage, ended.problem, ended.calls_tool, True)
        return Heard(calls_tool=kind.startswith("response.function_call"))

    def listed(self, document: Any) -> list[Listed] | None:
        return listed_models(document)


def _ended(kind: str, response: Mapping[str, Any]) -> Heard:
    usage = usage_of(response.get("usage"))
    calls = any(mapping(item).get("type") == "function_call" for item in items(response.get("output")))
    if kind in ("response.failed", "response.cancelled"):
        why = complaint({"error": response.get("error")}) or "it did not say why"
        return Heard(usage=usage, problem=why, is_last=True)
    if kind == "response.incomplete" or response.get("status") == "incomplete":  # vLLM says completed there
        why = text(mapping(response.get("incomplete_details")).get("reason")) or "max_output_tokens"
        if why != "max_output_tokens":
            problem = "its filter ended the answer" if why == "content_filter" else f"incomplete: {why}"
            return Heard((), FinishReason.CANCELLED, usage, problem, is_last=True)
        return Heard((), FinishReason.LENGTH, usage, is_last=True)
    return Heard((), FinishReason.EOS, usage, calls_tool=calls, is_last=True)


def _said(response: Mapping[str, Any]) -> list[Piece]:
    pieces = []
    for item in map(mapping, items(response.get("output"))):
        thinks = item.get("type") == "reasoning"
        parts = (
            [*items(item.get("summary")), *items(item.get("content"))]
            if thinks
            else items(item.get("content"))
        )
        for part in parts:
            if said := text(mapping(part).get("text")):
                pieces.append(Piece(said, "reasoning" if thinks else "answer"))
    return pieces
