"""How models of each format write calls of tools: templates that do what theirs do, and what a model says."""

from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import AddedToken

from chatterm.server.service import ToolFormat
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import THINK_MARKERS, ThinkMarkers, TokenizerParts
from tests.chatterm.tool_calls.writing import written
from tests.engine.tiny import harmony_tokenizer, tiny_parts, with_shared_template

_SYSTEM = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool|tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
)
HERMES = (
    _SYSTEM
    + """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content and loop.index0 > asked.last %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content.lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
)
"""As Qwen3's: thinking is shown after the last question only."""
_CALL = HERMES.index("{{- '<tool_call>"), HERMES.rindex("{%- endfor %}{{- '<|im_end|>")
QWEN = (
    HERMES[: _CALL[0]]
    + """\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, given in call.function.arguments.items() %}{{- '<parameter=' + key + '>\\n' }}
{{- given if given is string else given|tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}"""
    + HERMES[_CALL[1] :].removesuffix("{%- endif %}{%- endif %}")
    + "{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
"""As Qwen3.5's: calls in tags, each on a line of its own; the prompt opens the thinking."""
LLAMA3 = (
    _SYSTEM
    + """\
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>ipython\\n' + m.content|tojson + '<|im_end|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls|length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}
{{- '<|im_start|>assistant\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments|tojson + '}<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content|trim + '<|im_end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{#- <|python_tag|> -#}"""
)
"""As Llama 3.1's: one call a message."""
MISTRAL = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and messages|selectattr('role', 'equalto', 'user')|list|last == m %}
{{- '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + m.content|tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id|length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + ', "id": "' + call.id + '"}' }}{%- endfor %}{{- ']<|im_end|>' }}
{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"""
"""As Mistral 7B v0.3's: nothing begins an answer, and ids are checked."""


MINISTRAL = (
    _SYSTEM
    + """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments|tojson }}{%- endfor %}{{- '<|im_end|>' }}
{%- endif %}{%- endfor %}"""
)
"""As Ministral 3's."""
HUNYUAN = (
    _SYSTEM
    + """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_responses><tool_response>' + m.content + '</tool_response></tool_responses><|im_end|>' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if m.tool_calls %}{{- '<tool_calls>\\n[' }}
{%- for call in m.tool_calls %}
{{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + '}' }}{%- endfor %}{{- ']\\n</tool_calls>' }}{%- endif %}{{- '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""As Hunyuan's: one list of calls."""
GEMMA4 = """\
{%- macro value(given) %}
{%- if given is string %}{{- '<|"|>' + given + '<|"|>' }}
{%- elif given is boolean %}{{- 'true' if given else 'false' }}
{%- elif given is mapping %}{{- '{' }}{%- for key, inner in given|dictsort %}
{{- (',' if not loop.first else '') + key + ':' + value(inner) }}{%- endfor %}{{- '}' }}
{%- elif given is sequence %}{{- '[' }}{%- for inner in given %}
{{- (',' if not loop.first else '') + value(inner) }}{%- endfor %}{{- ']' }}
{%- else %}{{- 'null' if given is none else given }}{%- endif %}{%- endmacro %}
{%- set state = namespace(asked=-1, open=false, results=false) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set state.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- set has_system = messages[0].role == 'system' %}
{%- if enable_thinking or tools or has_system %}{{- '<|im_start|>system\\n' }}
{%- if enable_thinking %}{{- '<|think|>\\n' }}{%- endif %}
{%- if has_system %}{{- messages[0].content|trim }}{%- endif %}
{%- for tool in tools or [] %}{{- value(tool) }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{%- set at = loop.index0 %}
{%- if m.role == 'assistant' %}
{%- if not state.open %}{{- '<|im_start|>model\\n' }}{%- endif %}
{%- if m.tool_calls and m.reasoning_content and at > state.asked %}
{{- '<|channel>thought\\n' + m.reasoning_content.strip() + '\\n<channel|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + value(call.function.arguments) + '<tool_call|>' }}{%- endfor %}
{%- set state.results = m.tool_calls|length > 0 %}
{%- for other in messages[at + 1:] %}
{%- if state.results and other.role == 'tool' %}
{%- for call in m.tool_calls %}{%- if call.id == other.tool_call_id %}
{{- '<|tool_response>response:' + call.function.name + '{value:' + value(other.content) + '}<tool_response|>' }}
{%- endif %}{%- endfor %}
{%- else %}{%- set state.results = false %}{%- endif %}{%- endfor %}
{{- m.content|trim }}
{%- set state.open = m.tool_calls|length > 0 and not m.content %}
{%- if not state.open %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content|trim + '<|im_end|>\\n' }}{%- set state.open = false %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not state.open %}{{- '<|im_start|>model\\n' }}
{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}{%- endif %}"""
"""As Gemma 4's: results are part of the model's turn, which goes on after them, and an answer's text comes last. It
thinks when asked to; otherwise the prompt has an empty span, which the history has not."""
LFM2 = (
    _SYSTEM
    + """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'tool' %}{{- '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""As the first ones of LFM2: calls are part of an answer's text."""
LFM25 = (
    _SYSTEM
    + """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- if m.thinking is defined and loop.index0 > asked.last %}{{- '<think>' + m.thinking + '</think>' }}{%- endif %}
{{- m.content }}
{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}
{%- for call in m.tool_calls %}
{{- (', ' if not loop.first else '') + call.function.name + '(' }}
{%- for key, given in call.function.arguments.items() %}{{- (', ' if not loop.first else '') + key + '=' }}
{%- if given is string %}{{- "'" + given + "'" }}
{%- elif given is mapping %}{{- given|tojson }}{%- else %}{{- given|string }}{%- endif %}{%- endfor %}
{{- ')' }}{%- endfor %}{{- ']<|tool_call_end|>' }}{%- endif %}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
"""As LFM2.5's."""
SEED = (
    _SYSTEM
    + """\
{%- if thinking_budget == 0 %}{{- '<|im_start|>system\\nYour thinking budget is 0.<|im_end|>' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}{{- '\\n<seed:think>' + m.reasoning_content|trim + '</seed:think>' }}{%- endif %}
{%- if m.content %}{{- '\\n' + m.content|trim + ('\\n' if m.tool_calls else '') }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, given in call.function.arguments.items() %}
{{- '<parameter=' + key + '>' + given|string + '</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</seed:tool_call>' }}{%- endfor %}
{%- else %}{{- '\\n' + m.content }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if thinking_budget == 0 %}{{- '<seed:think><seed:cot_budget_reflect>' }}{%- endif %}{%- endif %}"""
)
"""As Seed-OSS's: thoughts stay in the history."""
GLM = (
    _SYSTEM.replace("<|im_start|>", "<|system|>").replace("<|im_end|>", "")
    + """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>' }}
{%- if m.reasoning_content and loop.index0 > asked.last %}
{{- '<think>' + m.reasoning_content.strip() + '</think>' }}{%- else %}{{- '</think>' }}{%- endif %}
{{- m.content.strip() }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}
{%- for key, given in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key><arg_value>' }}
{{- given if given is string else given|tojson }}{{- '</arg_value>' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{{- '</think>' if enable_thinking is false else '<think>' }}{%- endif %}"""
)
"""As GLM-4.7's: prompts open the thinking, and where the history leaves it out, it has only its end."""


MUSE = """\
{{- '<|start|>system<|message|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' + tool|tojson }}{%- endfor %}{{- '<|eot|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>tool<|message|><tool_output>\\n' + m.content + '\\n</tool_output><|eot|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|eot|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}
{{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{%- endif %}
{%- if m.content or not m.tool_calls %}
{{- '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '<|start|>assistant to=' + call.function.name + '<|message|><atem:function_calls>\\n<atem:invoke name="' }}
{{- call.function.name + '">\\n' }}{%- for key, given in call.function.arguments.items() %}
{{- '<atem:parameter name="' + key + '">' }}{{- given if given is string else given|tojson }}
{{- '</atem:parameter>\\n' }}{%- endfor %}{{- '</atem:invoke>\\n</atem:function_calls>' }}
{{- '<|eot|>' if loop.last else '<|eom|>' }}{%- endfor %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""As Muse Glimmer's: messages have recipients, and thoughts stay in the history."""


@dataclass(frozen=True, slots=True)
class Format:
    """A model that calls tools."""

    name: ToolFormat
    thinks: bool
    template: str
    markers: ThinkMarkers = THINK_MARKERS[0]
    special: tuple[str, ...] = ()
    think: Literal["auto", "on"] = "auto"
    """The setting with which it thinks."""
    shows: Literal["last", "all", "none"] = "last"
    """Which thoughts its template writes into the history: those after the last question, all, or none."""
    is_open: bool = False
    """Whether its prompts open the thinking."""
    variant: str = ""

    def __str__(self) -> str:
        return self.name + self.variant

    @property
    def setting(self) -> bool | None:
        """The thinking setting for templates."""
        return True if self.think == "on" else None

    def tokenizer(self) -> Tokenizer:
        if self.name == "harmony":
            return harmony_tokenizer()
        if self.name == "muse":
            backend = tiny_parts(self.template).backend
            backend.add_special_tokens([AddedToken(text, special=True) for text in self.special])
            return with_shared_template(TokenizerParts(backend, {}, frozenset(), self.template))
        parts = tiny_parts(self.template, self.markers, self.special)
        if self.name == "glm":  # the next message ends an answer
            ends = (parts.backend.token_to_id("<|user|>"), parts.backend.token_to_id("<|observation|>"))
            parts = replace(parts, stop_ids=frozenset(ends))
        return with_shared_template(parts)

    def called(self, name: str, arguments: str, thought: str = "") -> str:
        """What the model writes to call a function."""
        if self.name == "harmony":
            said = (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
            )
            return f"{self.thought(thought)}{said}"
        if self.name == "muse":
            said = f" to={name}<|message|>{written(self.name, [(name, arguments)])}<|eot|>"
            return f"{self.thought(thought)}{said}"
        end = {"gemma4": "<|tool_response>", "glm": "<|observation|>"}.get(self.name, "<|im_end|>")
        return f"{self.thought(thought)}{written(self.name, [(name, arguments)])}{end}"

    def answered(self, text: str, thought: str = "") -> str:
        """What it writes to answer."""
        if self.name == "harmony":
            return f"{self.thought(thought)}<|channel|>final<|message|>{text}<|return|>"
        if self.name == "muse":
            return f"{self.thought(thought)} to=user<|message|>{text}<|eot|>"
        return f"{self.thought(thought)}{text}{'<|user|>' if self.name == 'glm' else '<|im_end|>'}"

    def thought(self, thought: str) -> str:
        """What it writes before a call or an answer."""
        marks = self.markers
        if not self.thinks or (not thought and not self.is_open):
            return ""
        if self.name == "harmony":
            return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        if self.name == "muse":
            return f" to=self<|message|>{thought}<|eom|><|start|>assistant"
        if self.is_open:
            return f"{thought}{marks.before_close}{marks.close}{marks.after_close}"
        lead = marks.label or marks.before_close
        return f"{marks.open}{lead}{thought}{marks.before_close}{marks.close}{marks.after_close}"


_CLOSE = ThinkMarkers("<think>", "</think>", "", "")
"""Marks without line breaks around them."""
_BRACKETS = ("[TOOL_CALLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_PYTHON = ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>")
_GEMMA = ("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>")
_GLM = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
FORMATS = [
    Format("hermes", True, HERMES),
    Format("llama3", False, LLAMA3),
    Format("mistral", False, MISTRAL, special=_BRACKETS),
    Format("harmony", True, ""),
    Format("ministral", True, MINISTRAL, THINK_MARKERS[1], (*_BRACKETS, "[ARGS]"), shows="none"),
    Format("hunyuan", False, HUNYUAN),
    Format("gemma4", True, GEMMA4, THINK_MARKERS[3], _GEMMA, think="on"),
    Format("pythonic", False, LFM2, special=_PYTHON),
    Format("pythonic", True, LFM25, _CLOSE, _PYTHON, variant="2.5"),
    Format("seed", True, SEED, THINK_MARKERS[2], shows="all"),
    Format("qwen", True, QWEN, is_open=True),
    Format("glm", True, GLM, _CLOSE, _GLM, is_open=True),
    Format("muse", True, MUSE, special=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), shows="all"),
]
