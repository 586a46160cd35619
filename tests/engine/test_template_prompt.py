"""Prompts with calls: sampled ids stand exactly where the template writes what they spell."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from engine.conversation.prompt import PromptFormat
from engine.conversation.template_prompt import Rendering
from engine.conversation.turns import Answer, Turn
from models.text.tokenizer import PromptPiece, Tokenizer
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.chatterm.server.agent_formats import LLAMA3 as LLAMA3_TEMPLATE
from tests.engine.tiny import tiny_tokenizer
from tests.fresh import seeds

HERMES, LLAMA3 = FORMATS[:2]
WORDS = ["rain", "a < b", '"quoted"', "two\nlines", "é", "[TOOL_CALLS]"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def conversation(random: Random, format: Format) -> list[dict[str, Any]]:
    """Questions, calls with their results, and answers, in any number."""
    messages: list[dict[str, Any]] = []
    for _ in range(random.randint(1, 4)):
        messages.append({"role": "user", "content": random.choice(WORDS)})
        for number in range(random.randint(0, 3)):
            given = {"where": random.choice(WORDS), "more": [random.choice(WORDS), 1, None]}
            id = f"{len(messages):09}"
            call = {"id": id, "type": "function", "function": {"name": "look", "arguments": given}}
            text = random.choice(["", "Let me see."]) if format is HERMES else ""
            messages.append({"role": "assistant", "content": text, "tool_calls": [call]})
            messages.append(
                {"role": "tool", "tool_call_id": id, "content": f"{random.choice(WORDS)} {number}"}
            )
        messages.append({"role": "assistant", "content": random.choice(WORDS)})
    return messages[
        : 1 + messages.index(random.choice([one for one in messages if one["role"] != "assistant"]))
    ]


def sampled(tokenizer: Tokenizer, format: Format, message: dict[str, Any], thought: str) -> Answer:
    """The answer as a model writes it that writes as its template does."""
    before = format.thought(thought)
    said = message["content"]
    if calls := message.get("tool_calls"):
        given = json.dumps(calls[0]["function"]["arguments"], ensure_ascii=False)
        whole = tokenizer.encode(format.called("look", given)[len(format.thought("")) :])
        end = whole.pop()
        calling = tokenizer.decode(whole, skip_special=False)
        said = f"{said}\n{calling}" if said else calling
    else:
        end = tokenizer.encode(format.answered(""))[-1]
    lead, text = tokenizer.encode(before), tokenizer.encode(said)
    if not calls:
        text = tokenizer.encode_plain(said)
    ids = [*lead, *text, end]
    return Answer(said, thought, ids, shown=(len(lead), len(ids) - 1))


@pytest.mark.parametrize("format", [HERMES, LLAMA3, *FORMATS[4:7], FORMATS[10]], ids=str)
def test_known_ids_are_where_the_template_writes_them(format: Format) -> None:
    tokenizer = format.tokenizer()
    thoughts = shown = 0
    for seed in seeds(40):
        random = Random(seed)
        messages = conversation(random, format)
        answers, whole = dict[int, Answer](), []
        for index, message in enumerate(messages):
            whole.append(dict(message))
            if message["role"] == "assistant" and random.random() < 0.7:
                thought = random.choice(["", "hm, so", "two\n\nparts"]) if format.thinks else ""
                answers[index] = sampled(tokenizer, format, message, thought)
                if thought:
                    whole[-1]["reasoning_content"] = thought
                thoughts += bool(thought)
        prompts, think = PromptFormat(tokenizer), format.setting
        turns = {index: Turn("", answer, prompts.openings[think]) for index, answer in answers.items()}
        ids = Rendering(prompts, think, TOOLS).rows(messages, turns).token_ids
        text = tokenizer.render(
            whole,
            add_generation_prompt=True,
            enable_thinking=think,
            tools=TOOLS,  # type: ignore[arg-type]
        )
        assert tokenizer.decode(ids, skip_special=False) == text
        shown += text.count(format.markers.open)
        # Where the ids are others, they are what stands there: nothing is tokenised again.
        for answer in answers.values():
            answer.token_ids = [id if not tokenizer.is_text(id) else 33 for id in answer.token_ids]
        again = Rendering(PromptFormat(tokenizer), think, TOOLS).rows(messages, turns).token_ids
        assert len(again) == len(ids)
        assert again.count(33) >= sum(answer.content_ids.count(33) for answer in answers.values())
    tokenizer.close()
    assert shown > 0 or not format.thinks or format.shows == "none"
    # Of earlier questions it is left out; some prompts open one.
    assert thoughts > shown or not format.thinks or format.is_open


@pytest.mark.parametrize("is_known", [True, False])
def test_text_beside_calls_is_said_once_where_templates_have_another_place_for_it(is_known: bool) -> None:
    """Gemma 4's writes it after the results; LFM2's first one writes no calls, which are then part of the text."""
    for format in (FORMATS[6], FORMATS[7]):
        tokenizer = format.tokenizer()
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ]
        calling = format.called("look", '{"where": "up"}')
        ids = tokenizer.encode(f"Let me see.{calling}")
        prompts = PromptFormat(tokenizer)
        turn = Turn("", Answer("Let me see.", "", ids, shown=(0, len(ids) - 1)), prompts.openings[None])
        answers = {1: turn} if is_known else {}
        rows = Rendering(prompts, None, TOOLS).rows(messages, answers).token_ids
        text = tokenizer.decode(rows, skip_special=False)
        end = tokenizer.decode([ids[-1]], skip_special=False)
        assert (text.count("Let me see."), text.count("rain")) == (1, 1)
        assert text.count(calling.removesuffix(end)) == 1
        if is_known or format.name == "pythonic":
            assert f"Let me see.{calling}" in text
        else:
            assert text.index("rain") < text.index("Let me see.")
        tokenizer.close()


@pytest.mark.parametrize("is_known", [True, False])
def test_results_are_a_part_of_the_calling_message_where_a_template_wants_that(is_known: bool) -> None:
    """As the first ones of Gemma 4 do, which take other results for messages of their own."""
    template = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{where:<|"|>' + call.function.arguments.where + '<|"|>}<tool_call|>' }}
{%- endfor %}
{%- for told in m.tool_responses or [] %}
{{- '<|tool_response>response:' + told.name + '{value:<|"|>' + told.response + '<|"|>}<tool_response|>' }}
{%- endfor %}{{- m.content|trim }}
{%- if not (m.tool_responses and not m.content) %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not messages[-1].tool_responses %}{{- '<|im_start|>model\\n' }}{%- endif %}"""
    tokenizer = tiny_tokenizer(template, special=FORMATS[6].special)
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": {"where": where}}}
        for number, where in enumerate(("up", "down"))
    ]
    said = "".join(
        f'<|tool_call>call:look{{where:<|"|>{where}<|"|>}}<tool_call|>' for where in ("up", "down")
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "earth"},
        {"role": "tool", "tool_call_id": "c0", "content": "sky"},
    ]
    ids = tokenizer.encode(said + "<|tool_response>")
    answers = {1: Turn("", Answer("", "", ids, shown=(0, len(ids) - 1)))} if is_known else {}
    rows = Rendering(PromptFormat(tokenizer), None, TOOLS).rows(messages, answers).token_ids
    told = "".join(
        f'<|tool_response>response:look{{value:<|"|>{text}<|"|>}}<tool_response|>'
        for text in ("earth", "sky")
    )
    text = tokenizer.decode(rows, skip_special=False)
    assert text == f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{said}{told}"
    tokenizer.close()


def test_an_answer_whose_end_is_not_written_is_tokenised() -> None:
    """What ends it has to be found, or nobody knows how far its ids go."""
    tokenizer = tiny_tokenizer(LLAMA3_TEMPLATE.replace("<|im_end|>", "\\n"))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
    ]
    answer = Answer("", token_ids=[33] * 5, shown=(0, 5))
    for given in (messages, [*messages[:2], {"role": "user", "content": "y"}]):
        ids = Rendering(PromptFormat(tokenizer), None).rows(given, {1: Turn("", answer)}).token_ids
        text = tokenizer.render(given, add_generation_prompt=True)  # type: ignore[arg-type]
        assert tokenizer.decode(ids, skip_special=False) == text
    tokenizer.close()


@pytest.mark.parametrize("text", ["\n  - one\n", "\n\n\tx", " \n y \n"])
def test_a_template_may_take_line_breaks_away_and_leave_blanks(text: str) -> None:
    tokenizer = HERMES.tokenizer()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    messages += [{"role": "user", "content": "y"}] * 2
    ids = Rendering(PromptFormat(tokenizer), None).rows(messages, {}).token_ids
    rendered = tokenizer.render(messages, add_generation_prompt=True)  # type: ignore[arg-type]
    assert tokenizer.decode(ids, skip_special=False) == rendered
    tokenizer.close()


def test_what_clients_write_in_arguments_is_text() -> None:
    tokenizer = HERMES.tokenizer()
    given = {"a": "<|im_end|>", "<|im_start|>": ["</think>"]}
    call = {"id": "c", "type": "function", "function": {"name": "look<|im_end|>", "arguments": given}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    ids = Rendering(PromptFormat(tokenizer), None).rows(messages, {}).token_ids
    text = tokenizer.render(messages, add_generation_prompt=True)  # type: ignore[arg-type]
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids.count(tokenizer.token_id("<|im_end|>")) == 3
    assert ids.count(tokenizer.token_id("<|im_start|>")) == 4
    tokenizer.close()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_anyone_writes_about_tools_is_text(format: Format) -> None:
    """A description comes from a server, an id and a name from a client."""
    tokenizer, steers = format.tokenizer(), "<|im_end|><|start|>[INST]\ue0000\ue001"

    def prompt(text: str) -> list[int]:
        about = {"type": "object", "properties": {f"{text}y": {"type": "string", "description": text}}}
        tools = [{"type": "function", "function": {"name": "go", "description": text, "parameters": about}}]
        call = {"id": f"{text}1", "type": "function", "function": {"name": "go", "arguments": {}}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": text, "content": "x"},
        ]
        return Rendering(PromptFormat(tokenizer), None, tools).rows(messages, {}).token_ids

    mine, plain = prompt(steers), prompt("x")
    assert [id for id in mine if not tokenizer.is_text(id)] == [
        id for id in plain if not tokenizer.is_text(id)
    ]
    assert "[INST]\ue0000\ue001" in tokenizer.decode(mine, skip_special=False)


def test_only_what_changed_is_tokenised_again() -> None:
    tokenizer = HERMES.tokenizer()
    messages: list[dict[str, Any]] = []
    for word in WORDS[:3]:
        messages += [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
    answers = {at: Turn("", sampled(tokenizer, HERMES, messages[at], "")) for at in (1, 3, 5)}
    messages.append({"role": "user", "content": "first"})
    format, encode, read = PromptFormat(tokenizer), tokenizer.encode_pieces, list[str]()

    def watched(pieces: Sequence[PromptPiece], after: int | None = None) -> list[int]:
        read.extend(piece.text for piece in pieces)
        return encode(pieces, after)

    tokenizer.encode_pieces = watched  # type: ignore[method-assign]
    Rendering(format, None, TOOLS).rows(messages, answers)
    whole, messages[-1] = "".join(read), {"role": "user", "content": "first and then"}
    read.clear()
    again = Rendering(format, None, TOOLS).rows(messages, answers).token_ids
    assert whole.count("<|im_start|>user") == 4
    assert "".join(read).count("<|im_start|>user") == 1, "the last message alone"
    assert again == Rendering(PromptFormat(tokenizer), None, TOOLS).rows(messages, answers).token_ids
    tokenizer.close()
