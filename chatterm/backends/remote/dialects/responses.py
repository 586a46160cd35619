"""The responses API without state on the server: every request has the whole conversation."""

from collections.abc import Mapping
from typing import Any

from chatterm.backends.backend import FinishReason
from chatterm.backends.remote.dialects.base import (
    AnswerRequest,
    Entry,
    ListedModel,
    ParsedMessage,
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
from chatterm.backends.remote.dialects.chat import listed_models, parse_usage
from chatterm.backends.remote.thinking import AnswerPiece

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
        *("logprobs", "logit_bias", "stop_repetition", "speculation"),
    )

    def body(self, asked: AnswerRequest, server: str) -> dict[str, Any]:
        messages = [item for entry in asked.messages for item in _items(entry, asked.pictures)]
        body: dict[str, Any] = {"model": asked.model, "stream": True, "store": False}
        if messages and messages[0].get("role") == "system":
            body["instructions"] = messages.pop(0)["content"]
        body["input"] = messages
        if asked.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                    "strict": False,  # true is the default there, and few schemas meet its rules
                }
                for tool in asked.tools
            ]
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

    def heard(self, message: Mapping[str, Any]) -> ParsedMessage:
        kind = text(message.get("type"))
        if kind in _ANSWER:
            return ParsedMessage([AnswerPiece(text(message.get("delta")))])
        if kind in _THINKING:
            return ParsedMessage([AnswerPiece(text(message.get("delta")), "reasoning")])
        if kind == "error" or (not kind and message.get("error")):
            return ParsedMessage(problem=complaint(message) or "it did not say why")
        if kind in _ENDS:
            return _ended(kind, mapping(message.get("response")))
        if message.get("object") == "response":  # not streamed, although that was requested
            ended = _ended(f"response.{text(message.get('status'))}", message)
            return ParsedMessage(_said(message), ended.finish, ended.usage, ended.problem, ended.calls, True)
        return ParsedMessage(calls=_call(kind, message))

    def listed(self, document: Any) -> list[ListedModel] | None:
        return listed_models(document)


def _ended(kind: str, response: Mapping[str, Any]) -> ParsedMessage:
    usage = parse_usage(response.get("usage"))
    if kind in ("response.failed", "response.cancelled"):
        why = complaint({"error": response.get("error")}) or "it did not say why"
        return ParsedMessage(usage=usage, problem=why, is_last=True)
    if kind == "response.incomplete" or response.get("status") == "incomplete":  # vLLM says completed there
        why = text(mapping(response.get("incomplete_details")).get("reason")) or "max_output_tokens"
        if why != "max_output_tokens":
            problem = "its filter ended the answer" if why == "content_filter" else f"incomplete: {why}"
            return ParsedMessage((), FinishReason.CANCELLED, usage, problem, is_last=True)
        return ParsedMessage((), FinishReason.LENGTH, usage, is_last=True)
    output = map(mapping, items(response.get("output")))
    calls = [_whole(number, item, is_again=True) for number, item in enumerate(output) if _is_call(item)]
    return ParsedMessage((), FinishReason.EOS, usage, calls=calls, is_last=True)


def _items(entry: Entry, pictures: Mapping[str, bytes]) -> list[dict[str, Any]]:
    match entry:
        case CallingMessage():
            said = [{"role": "assistant", "content": entry.content}] if entry.content else []
            calls = [
                {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
                for call in entry.calls
            ]
            return [*said, *calls]
        case CallResult():
            return [{"type": "function_call_output", "call_id": entry.id, "output": entry.content}]
        case _:
            words, shown = seen(entry, pictures)
            urls = [f"data:{kind};base64,{data}" for kind, data in shown]
            parts = [
                {"type": "input_text", "text": words},
                *({"type": "input_image", "image_url": url} for url in urls),
            ]
            return [to_message(entry, parts if shown else words)]


def _call(kind: str, message: Mapping[str, Any]) -> list[CallPart]:
    """Return the parts of a call in an event; [] if it has none."""
    place = count(message.get("output_index"))
    key = place if place is not None else text(message.get("item_id")) or None
    if kind == "response.function_call_arguments.delta":
        return [CallPart(key, arguments=text(message.get("delta")))]
    if kind == "response.function_call_arguments.done":
        return [CallPart(key, arguments=text(message.get("arguments")), is_whole=True)]
    item = mapping(message.get("item"))
    if kind not in ("response.output_item.added", "response.output_item.done") or not _is_call(item):
        return []
    return [_whole(key if key is not None else text(item.get("id")), item)]


def _is_call(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "function_call"


def _whole(key: int | str, item: Mapping[str, Any], *, is_again: bool = False) -> CallPart:
    """Return an item as a part that has all arguments so far."""
    given = arguments_text(item.get("arguments"))
    return CallPart(key, "", text(item.get("name")), given, is_whole=True, is_again=is_again)


def _said(response: Mapping[str, Any]) -> list[AnswerPiece]:
    pieces = []
    for item in map(mapping, items(response.get("output"))):
        thinks = item.get("type") == "reasoning"
        parts = (
            [*items(item.get("summary")), *items(item.get("content"))]
            if thinks
            else items(item.get("content"))
        )
        for part in parts:
            if said := text(mapping(part).get("text")) or text(mapping(part).get("refusal")):
                pieces.append(AnswerPiece(said, "reasoning" if thinks else "answer"))
    return pieces
