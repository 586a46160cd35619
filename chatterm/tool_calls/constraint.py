"""What an answer has to be, as it is said between processes, and the ways in which models write calls."""

from typing import Literal

from msgspec import Struct

ToolFormat = Literal["hermes", "llama3", "mistral", "harmony"]
"""How a model writes tool calls. hermes: `<tool_call>{json}</tool_call>` (Qwen, Hermes). llama3: the answer is one JSON
object with "name" and "parameters", maybe after `<|python_tag|>`. mistral: `[TOOL_CALLS][{json}, ...]` or
`[TOOL_CALLS]name[ARGS]{json}`. harmony: messages of the commentary channel with `to=functions.NAME` in their header."""


class AnswerConstraint(Struct, frozen=True):
    """What the answer has to be. It holds for the answer, not for the thinking before it."""

    kind: Literal["json_schema", "json_object", "regex", "lark", "calls"]
    text: str = ""
    """The schema as JSON text, the expression, or the grammar (llguidance's Lark). Of "calls" it is a grammar of ours
    with marks such as `⟦<tool_call>⟧`, of which the service makes "lark": `grammar.spelled` with the tokenizer's
    `token_id`."""
