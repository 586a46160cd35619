"""Tool calls and their results as JSON. Nothing read from a file is trusted."""

import json
from collections.abc import Iterable
from typing import Any, get_args

from chatterm.backends.backend import Exchange, ToolCall, ToolResult
from chatterm.backends.exchange import ResultState
from chatterm.sessions.records import SessionError

_TEXTS = ("name", "arguments")


def format_calls(exchange: Exchange) -> str:
    """Return the tool calls and results of an exchange as JSON; "" if it has none."""
    if not exchange.calls and not exchange.results:
        return ""
    calls = [[call.name, call.arguments] for call in exchange.calls]
    results = [[r.name, r.arguments, r.text, r.state, r.seconds] for r in exchange.results]
    return json.dumps({"calls": calls, "results": results})


def parse_calls(text: str) -> tuple[list[ToolCall], list[ToolResult]]:
    """Parse the output of `format_calls`; invalid entries are left out."""
    try:
        data = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        data = {}
    found: dict[str, Any] = data if isinstance(data, dict) else {}
    calls = [ToolCall(*item) for item in _rows(found.get("calls")) if _are_texts(item, 2)]
    results = [
        ToolResult(*item)
        for item in _rows(found.get("results"))
        if len(item) == 5
        and _are_texts(item[:4], 4)
        and item[3] in get_args(ResultState)
        and _is_number(item[4])
    ]
    return calls, results


def checked_called(record: dict[str, Any], where: str) -> tuple[list[ToolCall], list[ToolResult]]:
    """Return the tool calls and results of an exported exchange, checked. Raises SessionError."""
    calls, results = record.get("calls", []), record.get("results", [])
    for name, items in (("calls", calls), ("results", results)):
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise SessionError(f"{where}: {name} must be a list of objects.")
        for item in items:
            texts = (*_TEXTS, "text") if name == "results" else _TEXTS
            if not all(isinstance(item.get(key), str) for key in texts):
                raise SessionError(f"{where}: {name}: {', '.join(texts)} must be text.")
    for item in results:
        if item.get("state", "done") not in get_args(ResultState):
            raise SessionError(f"{where}: results: state must be one of {', '.join(get_args(ResultState))}.")
        if not _is_number(item.get("seconds", 0.0)):
            raise SessionError(f"{where}: results: seconds must be a number.")
    return [ToolCall(item["name"], item["arguments"]) for item in calls], [
        ToolResult(
            item["name"],
            item["arguments"],
            item["text"],
            item.get("state", "done"),
            float(item.get("seconds", 0.0)),
        )
        for item in results
    ]


def results_text(results: Iterable[ToolResult]) -> str:
    """Return tool results as text, which is the message of their exchange."""
    return "\n\n".join(f"{result.name} {result.arguments}\n{result.text}" for result in results)


def _rows(items: Any) -> list[list[Any]]:
    return [item for item in items if isinstance(item, list)] if isinstance(items, list) else []


def _are_texts(items: list[Any], count: int) -> bool:
    return len(items) == count and all(isinstance(item, str) for item in items)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
