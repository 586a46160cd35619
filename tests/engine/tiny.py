"""A tiny Qwen3-shaped model with a thinking chat template, in fp32, and an engine around it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PretrainedConfig

from engine.engine import Engine
from engine.execute.build_options import BuildOptions
from engine.schedule.loop import Loop
from models.loading.load import load_model
from models.network import Network
from models.reference.decoder import Decoder
from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_parts import THINK_MARKERS, ThinkMarkers, TokenizerParts
from tests.engine.inside import check_blocks, evict_all, offload
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""What Qwen3's template does with system, user and assistant messages."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if first or tools %}{{- '<|start|>developer<|message|>' }}
{%- if first %}{{- '# Instructions\n\n' + first + '\n\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for tool in tools %}{%- set given = tool.function.parameters.properties or {} %}
{{- '// ' + (tool.function.description or '') + '\ntype ' + tool.function.name + ' = (' }}
{%- if given %}{{- '_: {\n' }}
{%- for name, value in given.items() %}{{- name + ': ' + (value.type or 'any') + ',\n' }}{%- endfor %}{{- '}' }}
{%- endif %}{{- ') => any;\n\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}
{{- '<|end|>' }}{%- endif %}
{%- set called = namespace(name=none) %}
{%- for m in rest %}
{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if called.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' + m.content|tojson }}
{{- '<|end|>' }}
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
{%- set later = namespace(final=false) %}
{%- for other in rest[loop.index:] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}{%- set later.final = true %}{%- endif %}{%- endfor %}
{%- if (m.content or m.thinking) and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments|tojson + '<|call|>' }}
{%- set called.name = call.name %}
{%- else %}
{%- if '<|channel|>final<|message|>' in m.content %}{{- raise_exception('channels in an answer') }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- set called.name = none %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""What gpt-oss's template does with them, and with tools."""


def with_markers(template: str, markers: ThinkMarkers) -> str:
    """A template of ours that writes other markers around thinking."""
    between = markers.label or markers.before_close * 2
    empty = f"{markers.open}{between}{markers.close}{markers.after_close}".replace("\n", "\\n")
    template = template.replace("<think>\\n\\n</think>\\n\\n", empty)
    return template.replace("<think>", markers.open).replace("</think>", markers.close)


def tiny_parts(
    template: str = TEMPLATE,
    markers: ThinkMarkers = THINK_MARKERS[0],
    special: tuple[str, ...] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> TokenizerParts:
    """Bytes are tokens, and so is what `merges` make of them; the markers are added as Qwen3's and Magistral's are, and
    so are more `special` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL, *special)])
    backend.add_tokens(
        [AddedToken(text, special=text[0] == "[" or "|" in text) for text in (markers.open, markers.close)]
    )
    end = backend.token_to_id("<|im_end|>")
    names = {"eos_token": "<|im_end|>"}
    return TokenizerParts(backend, names, frozenset([end]), with_markers(template, markers))


def tiny_tokenizer(
    template: str = TEMPLATE,
    markers: ThinkMarkers = THINK_MARKERS[0],
    special: tuple[str, ...] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> Tokenizer:
    """The tokenizer of `tiny_parts`."""
    return with_shared_template(tiny_parts(template, markers, special, merges))


def harmony_tokenizer() -> Tokenizer:
    """Bytes are tokens; what steers is special, as in gpt-oss."""
    backend = tiny_parts(HARMONY).backend
    names = ("start", "end", "message", "channel", "return", "call", "constrain")
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    return with_shared_template(TokenizerParts(backend, {}, frozenset(), HARMONY))


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Write the files of a tokenizer as `tiny_tokenizer` makes it."""
    parts = tiny_parts(template)
    parts.backend.save(str(folder / "tokenizer.json"))
    config = {**parts.special_tokens, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class SharedTemplate(ChatTemplate):
    """One process for all tests of this one: starting it takes longer than many a test."""

    def close(self) -> None:
        pass


@cache
def shared_template(source: str, **names: str) -> ChatTemplate:
    return SharedTemplate(source, names)


def with_shared_template(parts: TokenizerParts) -> Tokenizer:
    """A tokenizer that keeps the process of its template to itself no longer than the tests run."""
    tokenizer = Tokenizer(parts)
    assert parts.chat_template is not None
    tokenizer._template = shared_template(parts.chat_template, **parts.special_tokens)
    return tokenizer


class ScriptedModel:
    """A real network whose choices are scripted: its KV and its logits are its own, the next token is not.

    `logits_seen` keeps the true logits of every sampled position. Without a script it chooses for itself.
    """

    def __init__(self, network: Network) -> None:
        self.model = Decoder(network)
        self.script: list[int] = []
        self.logits_seen: list[Tensor] = []
        self.rows_computed = 0
        self.fail_next: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.rows_computed += token_ids.numel()
        return self.model.forward(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        self.logits_seen += list(logits)
        if self.script and len(logits):
            assert len(logits) == 1, "a script is for one sequence"
            forced = torch.full_like(logits, -1e9)
            forced[0, self.script.pop(0)] = 0.0
            return forced
        return logits


class TinyEngine(Engine):
    """An engine over a ScriptedModel, with what tests want to see."""

    scripted: ScriptedModel

    def check(self) -> None:
        """The invariants of the blocks, with the loop between two steps."""
        check_blocks(self)

    def blocks_cached(self) -> int:
        return self.loop.call(lambda: self.pieces.blocks.num_cached)

    def evict_all(self) -> None:
        evict_all(self)

    def offload_all(self) -> None:
        """Evict what is cached as if somebody needed room for it: it goes to the host tier, where there is one."""
        self.loop.call(lambda: offload(self.pieces.blocks))


@contextmanager
def tiny_engine(
    folder: Path,
    config: PretrainedConfig | None = None,
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    network: Network | None = None,
    **options: Any,
) -> Iterator[TinyEngine]:
    """Write a random checkpoint into `folder` (unless it holds one) and run an engine on it, or on a `network`."""
    tokenizer = tokenizer or tiny_tokenizer()
    if network is None and not (folder / "config.json").exists():
        write_checkpoint(folder, config or tiny_qwen3(vocab_size=272, max_position_embeddings=1024))
    network = network or load_model(files_of(folder), dtype=dtype, device=torch.device(device))
    small = {"block_size": 4, "max_chunk": 64, "attention": "sdpa", "fused": False, "threads": 1}
    engine = TinyEngine(
        Loop(),
        network,
        tokenizer,
        BuildOptions(decode_runner=False, **(small | options)),  # a script is followed on the host
        name="tiny",
        device=torch.device(device),
    )
    engine.scripted = ScriptedModel(network)
    engine.pieces.runner._model = engine.scripted
    try:
        yield engine
        if not engine.is_closed:
            engine.check()
    finally:
        engine.close()


def say(engine: TinyEngine, thought: str | None, answer: str) -> list[int]:
    """The token ids of an answer as a thinking model writes it, end of turn included."""
    if engine.tokenizer.channels is not None:
        span = "" if thought is None else f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        return engine.tokenizer.encode(f"{span}<|channel|>final<|message|>{answer}<|return|>")
    marks = engine.tokenizer.think_markers
    assert marks is not None
    lead, end = marks.label or marks.before_close, f"{marks.before_close}{marks.close}{marks.after_close}"
    span = f"{marks.open}{lead}{thought}{end}"
    text = answer if thought is None else f"{span}{answer}"
    return engine.tokenizer.encode(text + "<|im_end|>")


def close_to(logits: Tensor, reference: Tensor, tolerance: float = 1e-4) -> bool:
    """Relative to the largest logit."""
    return bool((logits - reference).abs().max() <= tolerance * reference.abs().max())
