"""How models of each format write calls of tools: templates that do what theirs do, and what a model says."""

from dataclasses import dataclass

from chatterm.server.service import ToolFormat
from models.text.tokenizer import Tokenizer
from tests.engine.tiny import harmony_tokenizer, tiny_tokenizer

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


@dataclass(frozen=True, slots=True)
class Format:
    """A model that calls tools."""

    name: ToolFormat
    thinks: bool

    def tokenizer(self) -> Tokenizer:
        if self.name == "harmony":
            return harmony_tokenizer()
        if self.name == "hermes":
            return tiny_tokenizer(HERMES)
        if self.name == "llama3":
            return tiny_tokenizer(LLAMA3)
        marks = ("[TOOL_CALLS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
        return tiny_tokenizer(MISTRAL, special=marks)

    def called(self, name: str, arguments: str, thought: str = "") -> str:
        """What the model writes to call a function."""
        match self.name:
            case "hermes":
                said = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            case "llama3":
                said = f'{{"name": "{name}", "parameters": {arguments}}}'
            case "mistral":
                said = f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'
            case "harmony":
                said = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
                return f"{self._thought(thought)}{said}"
        return f"{self._thought(thought)}{said}<|im_end|>"

    def answered(self, text: str, thought: str = "") -> str:
        """What it writes to answer."""
        if self.name == "harmony":
            return f"{self._thought(thought)}<|channel|>final<|message|>{text}<|return|>"
        return f"{self._thought(thought)}{text}<|im_end|>"

    def _thought(self, thought: str) -> str:
        if not thought or not self.thinks:
            return ""
        if self.name == "harmony":
            return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return f"<think>\n{thought}\n</think>\n\n"


FORMATS = [
    Format("hermes", True),
    Format("llama3", False),
    Format("mistral", False),
    Format("harmony", True),
]
