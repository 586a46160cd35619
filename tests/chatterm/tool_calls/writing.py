"""Calls as models of each format write them, and as the parser finds them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from chatterm.server.service import ToolFormat
from chatterm.tool_calls.parser import Parser
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan, CallEnded, Event

MARKED: tuple[ToolFormat, ...] = ("gemma4", "pythonic", "seed", "qwen", "glm", "muse")
"""The formats whose calls are not in JSON: they are passed on when they are complete."""

TOOLS = {name: {"type": "object", "properties": {"x": {"type": "string"}}} for name in ("get_weather", "add")}
"""In tags, a text has no quotes: the schema says which argument is one."""


def parse(
    format: ToolFormat, pieces: list[str], is_forced: bool = False, is_cut: bool = False
) -> list[Event]:
    """The events, with neighbours that belong together put together."""
    parser = Parser(format, TOOLS, is_forced)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.end(is_cut)
    merged: list[Event] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case AnswerText(before), AnswerText(more):
                merged[-1] = AnswerText(before + more)
            case CallArguments(number, before), CallArguments(same, more) if number == same:
                merged[-1] = CallArguments(number, before + more)
            case _:
                merged.append(event)
    return merged


def calls(events: list[Event]) -> list[tuple[str, str]]:
    names = {event.number: event.name for event in events if isinstance(event, CallBegan)}
    given = {event.number: event.text for event in events if isinstance(event, CallArguments)}
    assert [event.number for event in events if isinstance(event, CallEnded)] == list(range(len(names)))
    return [(name, given.get(number, "")) for number, name in names.items()]


def values(events: list[Event]) -> list[tuple[str, object]]:
    return [(name, json.loads(given)) for name, given in calls(events)]


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, AnswerText))


def written(format: ToolFormat, made: Sequence[tuple[str, str]], text: str = "") -> str:
    """An answer with these calls, whose arguments are given as JSON, after `text`."""
    match format:
        case "hermes":
            calls = [
                f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'
                for name, given in made
            ]
            return "\n".join([*([text] if text else []), *calls])
        case "llama3":
            return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in made) or text
        case "mistral" | "hunyuan":
            items = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in made)
            before, after = (
                ("[TOOL_CALLS]", "") if format == "mistral" else ("<tool_calls>\n", "\n</tool_calls>")
            )
            return f"{text}{before}[{items}]{after}" if made else text
        case "ministral":
            return text + "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in made)
        case "harmony":
            parts = [
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}<|call|>"
                for name, given in made
            ]
            return f"<|channel|>final<|message|>{text}" + "<|start|>assistant".join(["", *parts])
    known = [(name, json.loads(given)) for name, given in made]
    match format:
        case "gemma4":
            return text + "".join(
                f"<|tool_call>call:{name}{_gemma(given)}<tool_call|>" for name, given in known
            )
        case "pythonic":
            calls = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
                for name, given in known
            ]
            return f"{text}<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>" if made else text
        case "seed":
            calls = [
                f"<seed:tool_call>\n<function={name}>\n"
                + _tags(given, lambda key, value: f"<parameter={key}>{value}</parameter>\n")
                + "</function>\n</seed:tool_call>"
                for name, given in known
            ]
            return "\n".join([*([text] if text else []), *calls])
        case "qwen":
            calls = [
                f"<tool_call>\n<function={name}>\n"
                + _tags(given, lambda key, value: f"<parameter={key}>\n{value}\n</parameter>\n")
                + "</function>\n</tool_call>"
                for name, given in known
            ]
            return "\n".join([*([text] if text else []), *calls])
        case "muse":
            blocks = [
                f'<atem:function_calls>\n<atem:invoke name="{name}">\n'
                + _tags(
                    given,
                    lambda key, value: f'<atem:parameter name="{key}">{value}</atem:parameter>\n',
                )
                + "</atem:invoke>\n</atem:function_calls>"
                for name, given in known
            ]
            return text + "".join(blocks)
        case "glm":
            return text + "".join(
                f"<tool_call>{name}"
                + _tags(
                    given,
                    lambda key, value: f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
                )
                + "</tool_call>"
                for name, given in known
            )


def _gemma(value: Any) -> str:
    """A value as Gemma 4's template writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _tags(given: dict[str, Any], tag: Callable[[str, str], str]) -> str:
    return "".join(
        tag(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in given.items()
    )
