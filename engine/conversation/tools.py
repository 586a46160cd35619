"""Conversations in which a model calls tools: turns as messages for chat templates."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from engine.conversation.token_recall import Calls
from engine.conversation.turns import Turn

_UNANSWERED = "This was not run."
"""The result of a call for which none was given: templates want one for each call."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a model knows of tools."""

    functions: tuple[Mapping[str, Any], ...]
    """The functions that it may call, in the form templates expect; () for none."""
    shown: frozenset[int]
    """Special tokens around calls, which count as text in an answer."""
    read: Callable[[str], tuple[str, Calls]]
    """Splits the text of an answer into the text without its calls, and the calls."""


def has_calls(turns: Items[Turn], results: Items[str] = ()) -> bool:
    """Return whether there are calls or results in these turns or in what follows them."""
    return bool(results) or any(turn.results or turn.answer.calls for turn in turns)


def to_messages(
    system: str | None, turns: Items[Turn], text: str | None = None, results: Items[str] = ()
) -> tuple[list[dict[str, Any]], dict[int, Turn]]:
    """Return the conversation as messages, and the turns whose ids are known, by the index of their answer.

    The last message is `text`, or the results of the last answer's calls; without either, the last answer.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    answers: dict[int, Turn] = {}
    count = 0
    open_calls: list[dict[str, Any]] = []

    def tell(told: Items[str]) -> None:
        for number, call in enumerate(open_calls):
            said = told[number] if number < len(told) else _UNANSWERED
            made = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": said,
            }
            messages.append(made)
        open_calls.clear()

    for turn in turns:
        tell(turn.results)
        if not turn.results:
            messages.append({"role": "user", "content": turn.user})
        message: dict[str, Any] = {"role": "assistant", "content": turn.answer.text}
        for name, arguments in turn.answer.calls:
            function = {"name": name, "arguments": arguments}
            open_calls.append({"id": f"call{count:05}", "type": "function", "function": function})
            count += 1
        if open_calls:
            message["tool_calls"] = list(open_calls)
        if turn.answer.content_ids:
            answers[len(messages)] = turn
        messages.append(message)
    if results or text is not None:
        tell(results)
    if text is not None and not results:
        messages.append({"role": "user", "content": text})
    return messages, answers
