"""Conversations in which a model calls tools: turns as messages for chat templates."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from engine.conversation.token_recall import Calls
from engine.conversation.turns import Turn

_UNANSWERED = "This was not run."
"""The result of a call for which none was given: templates want one for each call."""
CALL_START, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"
"""The tokens around the calls of LFM2."""


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


def to_message(text: str, calls: Calls, first: int = 0) -> dict[str, Any]:
    """Return an answer as a message for templates; the ids of its calls count from `first`."""
    if not calls:
        return {"role": "assistant", "content": text}
    made = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, first)
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def said_calls(calls: Items[Mapping[str, Any]]) -> str:
    """Return the calls of a message as LFM2 writes them in an answer's text."""
    said = []
    for call in calls:
        given = call["function"]["arguments"]
        values = given.items() if isinstance(given, Mapping) else ()
        said.append(f"{call['function']['name']}({', '.join(f'{key}={value!r}' for key, value in values)})")
    return f"{CALL_START}[{', '.join(said)}]{CALL_END}"


def with_results(messages: Items[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with results as a part of the message that calls, as the first templates of Gemma 4 want."""
    made: list[Mapping[str, Any]] = []
    for message in messages:
        calls = made[-1].get("tool_calls") if made else None
        if message["role"] != "tool" or not calls:
            made.append(message)
            continue
        names = {call["id"]: call["function"]["name"] for call in calls}
        name = names.get(message.get("tool_call_id"), message.get("name", "unknown"))
        told = [*made[-1].get("tool_responses", ()), {"name": name, "response": message["content"]}]
        made[-1] = {**made[-1], "tool_responses": told}
    return made


def to_messages(
    system: str | None,
    turns: Items[Turn],
    text: str | None = None,
    results: Items[str] = (),
    with_calls: bool = True,
) -> tuple[list[Mapping[str, Any]], dict[int, Turn]]:
    """Return the conversation as messages, and the turns by the index of their answer.

    The last message is `text`, or the results of the last answer's calls; without either, the last answer. Unless
    `with_calls`, calls and results are left out.
    """
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    answers: dict[int, Turn] = {}
    count = 0
    open_calls: list[dict[str, Any]] = []

    def ask(message: str, told: Items[str]) -> None:
        for number, call in enumerate(open_calls):
            said = told[number] if number < len(told) else _UNANSWERED
            made = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": said,
            }
            messages.append(made)
        if not (told and with_calls):
            messages.append({"role": "user", "content": message})

    for turn in turns:
        ask(turn.user, turn.results)
        message = to_message(turn.answer.text, turn.answer.calls if with_calls else (), count)
        open_calls = message.get("tool_calls", [])
        count += len(open_calls)
        answers[len(messages)] = turn
        messages.append(message)
    if results or text is not None:
        ask(text or "", results)
    return messages, answers
