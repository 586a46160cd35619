"""Chats with models that think in a format of their own: what is shown, and what the next message computes."""

from pathlib import Path
from typing import Any, Literal

import pytest

from engine import SamplingParams
from engine.params import Constraint
from models.text.tokenizer import Tokenizer
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.engine.test_chat import CONFIG, GREEDY
from tests.engine.tiny import TinyEngine, tiny_engine, tiny_tokenizer

THINKERS = {str(format): format for format in FORMATS}
EXAONE = """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{{- '<think>\\n' }}
{%- if m.reasoning_content and loop.index0 > asked.last %}{{- m.reasoning_content }}{%- endif %}
{{- '\\n</think>\\n\\n' }}{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is not true %}{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
"""As EXAONE 4's: the history has an empty span before every answer."""
QWEN3_5 = """\
{%- set asked = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > asked.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
"""As Qwen3.5's: the prompt opens the span, and the history has none before the last question."""
OWN = {
    "exaone": EXAONE,
    "qwen3.5": QWEN3_5,
    "qwen3.5 small": QWEN3_5.replace(
        "is defined and enable_thinking is false", "is undefined or enable_thinking is false"
    ),
}
"""Templates of formats that have no other test. The smallest models of Qwen3.5 think only if they are asked to."""
GLUE = 40
"""What a template writes around a message, in letters at most."""
CASES: list[tuple[str, Literal["auto", "on", "off"], bool, str]] = [
    ("gemma4", "on", True, "<|channel>"),
    ("gemma4", "auto", False, "<|channel>"),
    ("gemma4", "off", False, "<|channel>"),
    ("glm", "auto", True, "<think>"),
    ("glm", "off", False, "<think>"),
    ("seed", "auto", True, "<seed:think>"),
    ("ministral", "auto", True, "[THINK]"),
    ("pythonic2.5", "auto", True, "<think>"),
    ("muse", "auto", True, "to=self"),
    ("muse", "off", False, "to=self"),
    ("exaone", "on", True, "<think>"),
    ("exaone", "auto", False, "<think>"),
    ("qwen3.5", "auto", True, "<think>"),
    ("qwen3.5", "off", False, "<think>"),
    ("qwen3.5 small", "on", True, "<think>"),
    ("qwen3.5 small", "auto", False, "<think>"),
]
"""The model, the setting, whether it thinks then, and how it begins to."""


def tokenizer_of(name: str) -> Tokenizer:
    return tiny_tokenizer(OWN[name]) if name in OWN else THINKERS[name].tokenizer()


def said(name: str, think: str, text: str, thought: str) -> str:
    """What the model writes after its prompt."""
    if name in OWN:
        return f"{thought}\n</think>\n\n{text}<|im_end|>" if thought else f"{text}<|im_end|>"
    format: Format = THINKERS[name]
    if name == "glm" and think == "off":
        return f"{text}<|user|>"
    whole = format.answered(text, thought)
    return whole.removeprefix(" to=user<|message|>") if think == "off" else whole


@pytest.mark.parametrize(("name", "think", "thinks", "opening"), CASES)
@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_thoughts_are_apart_and_no_part_of_the_history(
    tmp_path: Path, name: str, think: Any, thinks: bool, opening: str, think_cache: Any
) -> None:
    tokenizer = tokenizer_of(name)
    setting = {"auto": None, "on": True, "off": False}[think]
    with tiny_engine(tmp_path, CONFIG, tokenizer) as engine:
        chat = engine.chat(think=think, think_cache=think_cache)
        messages: list[Any] = []
        for number in range(3):
            thought = f"I wonder about {number}." if thinks else ""
            text = f"Answer {number}."
            engine.scripted.script = tokenizer.encode(said(name, think, text, thought))
            asked = f"Question {number}?"
            events = list(chat.send(asked, GREEDY))
            answer = chat.turns[-1].answer
            assert (answer.text.strip(), answer.reasoning.strip()) == (text, thought)
            assert "".join(event.text for event in events if event.kind == "answer") == answer.text
            if number:
                assert answer.stats.prefilled_tokens <= len(asked) + GLUE
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
            chat.settle(wait=True)
        written = tokenizer.render(
            [*messages, {"role": "user", "content": "And?"}],
            add_generation_prompt=True,
            enable_thinking=setting,
        )
        if name == "muse" and think == "off":  # its template has no switch
            written += " to=user<|message|>"
        rows = chat._history.prompt(chat.turns, "And?", setting)
        assert tokenizer.decode(rows.token_ids, skip_special=False) == written
        assert written.count("I wonder") == 0
        assert thinks or written.count(opening) <= 4
        engine.check()


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_budget_of_nothing_turns_the_thinking_off(tmp_path: Path, think_cache: Any) -> None:
    """The model then says so in its thinking, which the prompt opens."""
    tokenizer = THINKERS["seed"].tokenizer()
    with tiny_engine(tmp_path, CONFIG, tokenizer) as engine:
        chat = engine.chat(think="off", think_cache=think_cache)
        for number in range(2):
            script = f"I answer directly.</seed:think>\nAnswer {number}.<|im_end|>"
            engine.scripted.script = tokenizer.encode(script)
            list(chat.send(f"Question {number}?", GREEDY))
            answer = chat.turns[-1].answer
            assert (answer.text, answer.reasoning) == (f"Answer {number}.", "I answer directly.")
            chat.settle(wait=True)
        assert answer.stats.prefilled_tokens <= len("Question 1?") + GLUE + len("<seed:cot_budget_reflect>")
        assert "Your thinking budget is 0." in prompt_of(engine, chat)
        chat.think = "auto"
        assert "budget" not in prompt_of(engine, chat)


def prompt_of(engine: TinyEngine, chat: Any) -> str:
    rows = chat._history.prompt(chat.turns, "And?", chat._thinking)
    return engine.tokenizer.decode(rows.token_ids, skip_special=False)


def test_the_answer_may_be_hurried_in_every_format(tmp_path: Path) -> None:
    for name, think, thinks, _ in CASES:
        if not thinks:
            continue
        tokenizer = tokenizer_of(name)
        with tiny_engine(tmp_path / name, CONFIG, tokenizer) as engine:
            chat = engine.chat(think=think)
            engine.scripted.script = tokenizer.encode(said(name, think, "Yes.", "hm " * 30))
            events = chat.send("Well?", GREEDY)
            for _ in range(16):
                next(events)
            # The engine may be some tokens ahead of the events: wherever it is, the answer ends.
            last = tokenizer.encode(said(name, think, "Yes.", "hm")[-9:])
            engine.scripted.script = [*last, *[min(tokenizer.stop_ids)] * 400]
            chat.answer_now()
            list(events)
            answer = chat.turns[-1].answer
            assert answer.reasoning.startswith("hm hm")
            assert "think" not in answer.text, name
            closing = tokenizer.think_end if name != "muse" else tokenizer.token_id("<|eom|>")
            assert answer.token_ids.count(closing) == 1
            if name == "glm":  # its template writes no line breaks
                assert "\n" not in tokenizer.decode(answer.token_ids, skip_special=False)


def test_a_constraint_begins_where_the_thinking_ends(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, constraint=Constraint("regex", "yes|no"))
    for name, think, thinks, _ in CASES:
        tokenizer = tokenizer_of(name)
        with tiny_engine(tmp_path / name / think, CONFIG, tokenizer) as engine:
            chat = engine.chat(think=think)
            engine.scripted.script = tokenizer.encode(said(name, think, "no, for", "hm" if thinks else ""))
            list(chat.send("Well?", params))
            answer = chat.turns[-1].answer
            assert answer.text in ("yes", "no"), name
            assert answer.reasoning.strip() == ("hm" if thinks else "")
