"""Grammars of tool calls (llguidance's Lark): for required calls, for calls or an answer in some format, and for calls
after any text.

A mark such as `<tool_call>` is one token for some models and plain text for others, so it is written as `⟦<tool_call>⟧`
here, and a rule of all text up to it as `⟦until <tool_call>⟧`; `spell_marks` replaces both once the tokenizer is known.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from chatterm.tool_calls.constraint import AnswerConstraint, ToolFormat
from chatterm.tool_calls.written import RULES, json_rule, written_call
from engine.sampling.expressible import without_annotations
from engine.sampling.expression import check_end
from engine.sampling.impossible import without_impossible

_MARK = re.compile("⟦([^⟦⟧]+)⟧")
_LEAD = re.compile("⟦until ([^⟦⟧]+)⟧")
_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)
_WRITTEN = {"/": "\\/", "\\\n": "\\n"}
"""What must be escaped in an expression between slashes; what is already escaped stays as it is."""
_REFUSED = "The grammar cannot be used: "
"""How the engine's message begins when it refuses a grammar."""
_AT_LINE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_FUNCTION = re.compile(
    r'"name": \{"const": "([\w.-]+)"\}|to=functions\.([\w.-]+) |^call\d+: (?:"<.*?" )?"([\w.-]+)"'
)
_APART: dict[ToolFormat, tuple[str, str, str, str]] = {
    "hermes": ("<tool_call>", '"\\n"', '"\\n" ⟦</tool_call>⟧', '"\\n" '),
    "ministral": ("[TOOL_CALLS]", "", "", ""),
    "gemma4": ("<|tool_call>", '"call:"', "⟦<tool_call|>⟧", ""),
    "seed": ("<seed:tool_call>", '"\\n"', '"\\n" ⟦</seed:tool_call>⟧', '"\\n" '),
    "qwen": ("<tool_call>", '"\\n"', '"\\n" ⟦</tool_call>⟧', '"\\n" '),
    "muse": ("<atem:function_calls>", '"\\n"', '"\\n</atem:function_calls>"', ""),
    "glm": ("<tool_call>", "", "⟦</tool_call>⟧", ""),
}
"""Formats with a mark before each call: the mark, what follows it, what ends the call, and what is between calls."""
_LISTED: dict[ToolFormat, tuple[str, str, str]] = {
    "mistral": ("[TOOL_CALLS]", '"["', '"]"'),
    "hunyuan": ("<tool_calls>", '/\\n?/ "["', '"]" /\\n?/ ⟦</tool_calls>⟧'),
    "pythonic": ("<|tool_call_start|>", '"["', '"]" ⟦<|tool_call_end|>⟧'),
}
"""Formats with one mark before a list of calls: the mark, and what is before and after the list."""
_TEXT = "TEXT: /(.|\\n)+/"
_FINAL = {"harmony": '⟦<|channel|>⟧ "final" ⟦<|message|>⟧ '}
"""How an answer begins that is not a call."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function without parameters."""


def forced_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> AnswerConstraint:
    """Return a constraint to a call of one of these tools; with `parallel`, to one or several calls."""
    return AnswerConstraint("calls", f"start: calls\n{_text(format)}{_calls(format, tools, parallel)}")


def calls_or(
    constraint: AnswerConstraint,
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    strict: Collection[str] | None = None,
) -> AnswerConstraint:
    """Return a constraint to an answer that matches `constraint` (not a grammar), or to calls.

    Arguments match their schemas; if `strict` is given, only for the tools named in it. Raises EngineError for a
    regular expression that ends in a lone backslash.
    """
    if constraint.kind == "regex":
        check_end(constraint.text)
        expression = _IN_SLASHES.sub(lambda found: _WRITTEN.get(found[0], found[0]), constraint.text)
        expression = expression.replace("⟦", "\\x{27e6}")
        answer = f"answer: /{expression}/"
    else:
        schema = json.loads(constraint.text) if constraint.text else {"type": "object"}
        answer = f"answer: {json_rule(without_impossible(without_annotations(schema)))}"
    known = tools if strict is None else _known(tools, strict)
    rules = f"{answer}\n{_text(format)}{_calls(format, known, parallel)}"
    return AnswerConstraint("calls", f"start: {_FINAL.get(format, '')}answer | calls\n{rules}")


def free_calls(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], strict: Collection[str], parallel: bool
) -> AnswerConstraint | None:
    """Return a constraint to text with optional calls; arguments match their schema for the tools named in `strict`.

    Return None if that forbids nothing: in the harmony format an answer is text or one call anyway.
    """
    if format == "harmony" and not strict:
        return None
    rules = _calls(format, _known(tools, strict), parallel)
    if format == "harmony":
        return AnswerConstraint("calls", f"start: {_FINAL[format]}TEXT? | calls\n{_TEXT}\n{rules}")
    if format == "llama3":
        return AnswerConstraint("calls", f"start: TEXT? | calls\nTEXT: /\\s*[^{{\\s](.|\\n)*/\n{rules}")
    mark = (_APART.get(format) or _LISTED[format])[0]
    text = f"{_TEXT} & ~/(.|\\n)*{re.escape(mark)}(.|\\n)*/"
    rest = _together(format, parallel, is_led=True)
    return AnswerConstraint("calls", f"start: TEXT? | lead {rest}\n{text}\nlead⟦until {mark}⟧\n{rules}")


def spell_marks(grammar: str, token_id: Callable[[str], int | None]) -> str:
    """Replace each mark in `grammar` by its token, or by its text if the tokenizer has no such token."""

    def lead(mark: re.Match[str]) -> str:
        if token_id(mark[1]) is None:
            return f"[suffix={json.dumps(mark[1])}]: /(.|\\n)*/"
        return f": TEXT? ⟦{mark[1]}⟧"

    def written(mark: re.Match[str]) -> str:
        id = token_id(mark[1])
        return json.dumps(mark[1]) if id is None else f"<[{id}]>"

    return _MARK.sub(written, _LEAD.sub(lead, grammar))


def explain_refusal(error: str, grammar: str) -> str | None:
    """Rephrase the engine's refusal of one of these grammars in the caller's terms; return None for other errors."""
    if not error.startswith(_REFUSED):
        return None
    why = error.removeprefix(_REFUSED)
    if (at := _AT_LINE.match(why)) is None:
        return f"The format of the answer or the parameters of a function cannot be used: {why}"
    function = _FUNCTION.search(grammar.split("\n")[int(at[1]) - 1])
    what = (
        f"parameters of {function[1] or function[2] or function[3]}"
        if function is not None
        else "JSON schema"
    )
    return f"The {what} cannot be used: {why[at.end() :]}"


def _text(format: ToolFormat) -> str:
    """Return the terminal of any text if the rules of the calls use it."""
    return f"{_TEXT}\n" if format in RULES else ""


def _together(format: ToolFormat, parallel: bool, is_led: bool = False) -> str:
    """Return how one call, or with `parallel` several, are written; `is_led`: their first mark has come."""
    if format in _APART:
        first, between = "body" if is_led else "call", _APART[format][3]
        return f"{first} ({between}call)*" if parallel else first
    if format in _LISTED:
        mark, opening, closing = _LISTED[format]
        lead = "" if is_led else f"⟦{mark}⟧ "
        many = 'call (", " call)*' if parallel else "call"
        return f"{lead}{opening} {many} {closing}"
    return 'call ("; " call)*' if parallel and format == "llama3" else "call"


def _calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """Return the rule `calls` and the rules it uses."""
    names = [f"call{number}" for number in range(len(tools))]
    lines = [
        line
        for name, tool in zip(names, tools, strict=True)
        for line in _call(format, name, tool["function"])
    ]
    lines += RULES.get(format, ())
    many, choice = _together(format, parallel), " | ".join(names)
    if format not in _APART:
        return "\n".join([f"calls: {many}", f"call: {choice}", *lines])
    mark, before, after, _ = _APART[format]
    return "\n".join([f"calls: {many}", f"call: ⟦{mark}⟧ body", f"body: {before} ({choice}) {after}", *lines])


def _call(format: ToolFormat, rule: str, function: Mapping[str, Any]) -> list[str]:
    """Return the rule called `rule` for one call of this function, and the rules that it uses."""
    if format in RULES:
        return written_call(format, rule, function["name"], function["parameters"])
    possible = without_impossible(without_annotations(function["parameters"]))
    parameters = {"enum": []} if possible is False else dict(possible)
    if parameters == NO_PARAMETERS:  # a model would invent some
        parameters["additionalProperties"] = False
    if format == "harmony":
        header = f'⟦<|channel|>⟧ "commentary to=functions.{function["name"]} " ⟦<|constrain|>⟧ "json" ⟦<|message|>⟧'
        return [f"{rule}: {header} {json_rule(parameters)} ⟦<|call|>⟧"]
    if format == "ministral":
        return [f'{rule}: "{function["name"]}" ⟦[ARGS]⟧ {json_rule(parameters)}']
    key = "parameters" if format == "llama3" else "arguments"
    parameters["$id"] = _schema_id(parameters)  # references in it are to it, not to what is around it
    parameters.pop("$schema", None)  # in older versions $id does not count where $ref is
    whole = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return [f"{rule}: {json_rule(whole)}"]


def _schema_id(schema: Mapping[str, Any]) -> str:
    """Return the id by which references name the schema."""
    given = schema.get("$id")
    return (given.partition("#")[0] if isinstance(given, str) else "") or "chatterm-parameters"


def _known(tools: Sequence[Mapping[str, Any]], strict: Collection[str]) -> list[Mapping[str, Any]]:
    return [tool if tool["function"]["name"] in strict else _lenient(tool) for tool in tools]


def _lenient(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}}
