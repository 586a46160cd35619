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
from engine.sampling.expression import check_end
from engine.sampling.impossible import without_impossible
from engine.sampling.json_form import json_form

_MARK = re.compile("⟦([^⟦⟧]+)⟧")
_LEAD = re.compile("⟦until ([^⟦⟧]+)⟧")
_IN_SLASHES = re.compile(r"\\.|/", re.DOTALL)
_WRITTEN = {"/": "\\/", "\\\n": "\\n"}
"""What must be escaped in an expression between slashes; what is already escaped stays as it is."""
_REFUSED = "The grammar cannot be used: "
"""How the engine's message begins when it refuses a grammar."""
_AT_LINE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_FUNCTION = re.compile(r'"name": \{"const": "([\w.-]+)"\}|to=functions\.([\w.-]+) ')
_SEVERAL = {
    "hermes": 'call ("\\n" call)*',
    "llama3": 'call ("; " call)*',
    "mistral": '⟦[TOOL_CALLS]⟧ "[" call (", " call)* "]"',
    "harmony": "call",
}
_ONE = {**dict.fromkeys(_SEVERAL, "call"), "mistral": '⟦[TOOL_CALLS]⟧ "[" call "]"'}
_FINAL = {"harmony": '⟦<|channel|>⟧ "final" ⟦<|message|>⟧ '}
"""How an answer begins that is not a call."""
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function without parameters."""


def forced_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> AnswerConstraint:
    """Return a constraint to a call of one of these tools; with `parallel`, to one or several calls."""
    return AnswerConstraint("calls", f"start: calls\n{_calls(format, tools, parallel)}")


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
        answer = f"answer: {_json(without_impossible(schema))}"
    known = tools if strict is None else _known(tools, strict)
    rules = f"{answer}\n{_calls(format, known, parallel)}"
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
        return AnswerConstraint("calls", f"start: {_FINAL[format]}TEXT? | calls\nTEXT: /(.|\\n)+/\n{rules}")
    if format == "llama3":
        return AnswerConstraint("calls", f"start: TEXT? | calls\nTEXT: /\\s*[^{{\\s](.|\\n)*/\n{rules}")
    mark, rest = {
        "hermes": ("<tool_call>", 'body ("\\n" call)*' if parallel else "body"),
        "mistral": ("[TOOL_CALLS]", '"[" call (", " call)* "]"' if parallel else '"[" call "]"'),
    }[format]
    found = re.escape(mark)
    text = f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{found}(.|\\n)*/"
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
    what = f"parameters of {function[1] or function[2]}" if function is not None else "JSON schema"
    return f"The {what} cannot be used: {why[at.end() :]}"


def _calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
    """Return the rule `calls` and the rules it uses."""
    rules = [_call(format, tool["function"]) for tool in tools]
    names = [f"call{number}" for number in range(len(rules))]
    lines = [f"{name}: {rule}" for name, rule in zip(names, rules, strict=True)]
    many, choice = (_SEVERAL if parallel else _ONE)[format], " | ".join(names)
    if format != "hermes":
        return "\n".join([f"calls: {many}", f"call: {choice}", *lines])
    body = f'"\\n" ({choice}) "\\n" ⟦</tool_call>⟧'
    return "\n".join([f"calls: {many}", "call: ⟦<tool_call>⟧ body", f"body: {body}", *lines])


def _call(format: ToolFormat, function: Mapping[str, Any]) -> str:
    """Return the rule for one call of this function."""
    possible = without_impossible(function["parameters"])
    parameters = {"enum": []} if possible is False else dict(possible)
    if parameters == NO_PARAMETERS:  # a model would invent some
        parameters["additionalProperties"] = False
    if format == "harmony":
        header = f'⟦<|channel|>⟧ "commentary to=functions.{function["name"]} " ⟦<|constrain|>⟧ "json" ⟦<|message|>⟧'
        return f"{header} {_json(parameters)} ⟦<|call|>⟧"
    key = "parameters" if format == "llama3" else "arguments"
    parameters["$id"] = _schema_id(parameters)  # references in it are to it, not to what is around it
    parameters.pop("$schema", None)  # in older versions $id does not count where $ref is
    whole = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return _json(whole)


def _schema_id(schema: Mapping[str, Any]) -> str:
    """Return the id by which references name the schema."""
    given = schema.get("$id")
    return (given.partition("#")[0] if isinstance(given, str) else "") or "chatterm-parameters"


def _known(tools: Sequence[Mapping[str, Any]], strict: Collection[str]) -> list[Mapping[str, Any]]:
    return [tool if tool["function"]["name"] in strict else _lenient(tool) for tool in tools]


def _lenient(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": {"name": tool["function"]["name"], "parameters": {"type": "object"}}}


def _json(schema: Any) -> str:
    """Write a schema into a grammar. JSON escapes its text, so nothing in it is taken for a mark."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": json_form(json.dumps(schema))}
    return f"%json {json.dumps(schema)}"
