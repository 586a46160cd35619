"""Chat completions, as OpenAI, vLLM, SGLang, llama-server, LM Studio, OpenRouter and `chatterm serve` speak them."""

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

_REASONS = {
    "stop": FinishReason.EOS,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CANCELLED,
    "tool_calls": FinishReason.EOS,
    "function_call": FinishReason.EOS,
}
_PREFIXES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},
}
"""Servers that continue a final message of the assistant, with the fields that tell them to."""

_TAKES_THOUGHTS = ("vllm", "sglang", "llamacpp", "chatterm", "deepseek")
"""Servers that accept the thinking before a call; others may reject the field."""


class ChatCompletions:
    """Implements Dialect."""

    path = "/chat/completions"
    models_path = "/models"
    is_lines = False
    unknown = ("logprobs", "logit_bias", "stop_repetition", "speculation")

    def body(self, asked: AnswerRequest, server: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": asked.model,
            "messages": [_message(entry, server, asked.pictures) for entry in asked.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sampling = {k: v for k, v in asked.sampling.items() if v is not None and k not in self.unknown}
        if "stop" in sampling:
            sampling["stop"] = list(sampling["stop"])
        if server == "openai" and "max_tokens" in sampling:
            sampling["max_completion_tokens"] = sampling.pop("max_tokens")
        body |= sampling
        if asked.tools:
            body["tools"] = [tool.as_function() for tool in asked.tools]
        if asked.constraint is not None:
            body["response_format"] = schema_format(asked.constraint)
        if asked.think != "auto":
            if server == "openai":
                body["reasoning_effort"] = "medium" if asked.think == "on" else "none"
            elif server == "openrouter":
                body["reasoning"] = {"enabled": asked.think == "on"}
            else:
                body["chat_template_kwargs"] = {"enable_thinking": asked.think == "on"}
        if asked.cache_key:
            body["prompt_cache_key"] = asked.cache_key
        return {**body, **(_PREFIXES[server] if asked.goes_on else {})}

    def can_go_on(self, server: str) -> bool:
        return server in _PREFIXES

    def heard(self, message: Mapping[str, Any]) -> ParsedMessage:
        choices = items(message.get("choices"))
        problem = complaint(message) if "error" in message or not choices else ""
        choice = mapping(choices[0]) if choices else {}
        said = mapping(choice.get("delta") or choice.get("message"))
        pieces = []
        thought = text(said.get("reasoning_content")) or text(said.get("reasoning"))
        if thought:
            pieces.append(AnswerPiece(thought, "reasoning"))
        for part in ("content", "refusal"):  # a refusal is shown like an answer
            if content := _content(said.get(part)):
                pieces.append(AnswerPiece(content))
        reason = text(choice.get("finish_reason"))
        if reason == "content_filter" and not problem:
            problem = "its filter ended the answer"
        if reason == "error" and not problem:
            problem = complaint(choice) or "it did not say why"
        return ParsedMessage(
            pieces,
            (_REASONS.get(reason, FinishReason.EOS) if reason else None),
            parse_usage(message.get("usage")),
            problem,
            calls=_calls(said),
        )

    def listed(self, document: Any) -> list[ListedModel] | None:
        return listed_models(document)


def _message(entry: Entry, server: str, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    match entry:
        case CallingMessage():
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in entry.calls
            ]
            # Between a call and the next user message, templates show the thinking.
            thought = {"reasoning_content": entry.reasoning} if server in _TAKES_THOUGHTS else {}
            return {
                "role": "assistant",
                "content": entry.content or None,
                **(thought if entry.reasoning else {}),
                "tool_calls": calls,
            }
        case CallResult():
            return {"role": "tool", "tool_call_id": entry.id, "content": entry.content}
        case _:
            said, shown = seen(entry, pictures)
            urls = [{"url": f"data:{kind};base64,{data}"} for kind, data in shown]
            parts = [
                {"type": "text", "text": said},
                *({"type": "image_url", "image_url": url} for url in urls),
            ]
            return to_message(entry, parts if shown else said)


def _calls(said: Mapping[str, Any]) -> list[CallPart]:
    parts = []
    for entry in map(mapping, items(said.get("tool_calls"))):
        function = mapping(entry.get("function"))
        parts.append(
            CallPart(
                count(entry.get("index")),
                text(entry.get("id")),
                text(function.get("name")),
                arguments_text(function.get("arguments")),
            )
        )
    old = mapping(said.get("function_call"))
    if old and not parts:  # some servers repeat it in the old form
        parts.append(CallPart(0, "", text(old.get("name")), arguments_text(old.get("arguments"))))
    return parts


def _content(value: object) -> str:
    """Return the text of a content, which may come in parts."""
    if isinstance(value, list):
        return "".join(
            text(mapping(part).get("text")) or text(mapping(part).get("refusal")) for part in value
        )
    return text(value)


def parse_usage(value: object) -> ReportedUsage | None:
    """Parse `usage`, with the field names of either API of OpenAI; None if there is none."""
    told = mapping(value)
    if not told:
        return None
    prompt = told.get("prompt_tokens", told.get("input_tokens"))
    inside = mapping(told.get("prompt_tokens_details") or told.get("input_tokens_details"))
    made = mapping(told.get("completion_tokens_details") or told.get("output_tokens_details"))
    cached = inside.get("cached_tokens", told.get("prompt_cache_hit_tokens"))
    return ReportedUsage(
        count(prompt),
        count(cached),
        count(told.get("completion_tokens", told.get("output_tokens"))),
        count(made.get("reasoning_tokens")),
    )


_KINDS = ("vllm", "sglang", "llamacpp", "chatterm", "openai", "openrouter")


def listed_models(document: Any) -> list[ListedModel] | None:
    """Parse the list of `/models`; None if it is no such list."""
    data = mapping(document).get("data")
    if not isinstance(data, list):
        return None
    found: list[ListedModel] = []
    for entry in map(mapping, data):
        name = text(entry.get("id"))
        if not name or len(name) > 300:
            continue
        meta = mapping(entry.get("meta"))
        lengths = (entry.get("max_model_len"), entry.get("context_length"), meta.get("n_ctx"))
        length = next((size for value in lengths if (size := count(value))), 0)
        owner = text(entry.get("owned_by")).lower()
        found.append(ListedModel(name, length, owner if owner in _KINDS else ""))
    return found
