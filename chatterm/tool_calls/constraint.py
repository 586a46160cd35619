"""The required form of an answer, as sent between processes, and the formats in which models write tool calls."""

from typing import Literal

from msgspec import Struct

ToolFormat = Literal[
    "hermes",
    "llama3",
    "mistral",
    "ministral",
    "hunyuan",
    "harmony",
    "gemma4",
    "pythonic",
    "seed",
    "qwen",
    "glm",
    "muse",
]
"""How a model writes tool calls.

hermes: `<tool_call>{json}</tool_call>` (Qwen, EXAONE 4).
llama3: the answer is one JSON object with "name" and "parameters", maybe after `<|python_tag|>`.
mistral: `[TOOL_CALLS][{json}, ...]`. ministral: `[TOOL_CALLS]name[ARGS]{json}` (Ministral 3, Devstral 2).
hunyuan: `<tool_calls>[{json}, ...]</tool_calls>`.
harmony: messages of the commentary channel with `to=functions.NAME` in their header.
gemma4: `<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>`.
pythonic: `<|tool_call_start|>[name(key='text')]<|tool_call_end|>` (LFM2).
seed: `<seed:tool_call><function=name><parameter=key>text</parameter></function></seed:tool_call>`.
qwen: `<tool_call><function=name><parameter=key>text</parameter></function></tool_call>`, each tag and text on a line of
its own (Qwen3.5, Qwen3-Coder).
glm: `<tool_call>name<arg_key>key</arg_key><arg_value>text</arg_value></tool_call>`.
muse: `<atem:function_calls><atem:invoke name="f"><atem:parameter name="key">text</atem:parameter></atem:invoke>
</atem:function_calls>` in a message with ` to=f` in its header (Muse Glimmer)."""


class AnswerConstraint(Struct, frozen=True):
    """The required form of an answer. It applies to the answer, not to the thinking before it."""

    kind: Literal["json_schema", "json_object", "regex", "lark", "calls"]
    text: str = ""
    """The schema as JSON text, the expression, or the grammar (llguidance's Lark). For "calls" it is a grammar of ours
    with marks such as `⟦<tool_call>⟧`; the service turns it into "lark" with `grammar.spell_marks` and the tokenizer's
    `token_id`."""
