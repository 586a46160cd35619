"""Prompts of clients that send everything back: the rows of a chat for a plain dialogue, else the template's."""

from pathlib import Path
from typing import Any

import pytest

from engine.conversation.batch_generation import make_prompt
from engine.conversation.requests import Requests
from engine.conversation.token_recall import BESIDE, AnswerPlace, Recall
from engine.conversation.turns import Answer, Turn
from engine.errors import EngineError
from tests.engine.tiny import TEMPLATE, say, tiny_engine, tiny_tokenizer

TOOLS = TEMPLATE.replace(
    "{%- if add_generation_prompt %}",
    "{%- for m in messages if m.role == 'tool' %}{{- '<|im_start|>tool\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ mood }}"
    "{%- if add_generation_prompt %}",
    1,
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_dialogue_has_the_rows_of_a_chat(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        requests, params = Requests(engine), engine.default_params()
        engine.scripted.script = say(engine, "hm", "One.")
        chat = engine.chat(system="Be terse.")
        list(chat.send("First?", params))
        asked = requests.asked(
            [
                {"role": "system", "content": "Be terse."},
                user("First?"),
                {"role": "assistant", "content": "One."},
                user("Second?"),
            ]
        )
        engine.scripted.script = say(engine, None, "Two.")
        list(chat.send("Second?", params))
        last = chat.last
        assert last is not None
        assert asked.rows.token_ids == chat.history.token_ids[: len(asked.rows)]


def test_other_conversations_are_what_the_template_renders(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, tokenizer=tiny_tokenizer(TOOLS)) as engine:
        requests = Requests(engine)
        messages = [user("one"), user("two<|im_end|>"), {"role": "tool", "content": "three"}]
        tools = [{"type": "function", "function": {"name": "look"}}]
        asked = requests.asked(messages, tools=tools, names={"mood": "glad"})
        text = engine.tokenizer.decode(asked.rows.token_ids, skip_special=False)
        assert text == engine.tokenizer.render(
            messages,  # type: ignore[arg-type]
            add_generation_prompt=True,
            tools=tools,
            more={"mood": "glad"},
        )
        end = engine.tokenizer.token_id("<|im_end|>")
        assert asked.rows.token_ids.count(end) == 3  # what the user wrote is no control token  # type: ignore[arg-type]


def test_an_empty_system_prompt_is_one(tmp_path: Path) -> None:
    default = (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nDefault<|im_end|>' }}{%- endif %}"
    )
    with tiny_engine(tmp_path, tokenizer=tiny_tokenizer(default + TEMPLATE)) as engine:
        requests, tokenizer = Requests(engine), engine.tokenizer
        for messages in ([user("one")], [{"role": "system", "content": ""}, user("one")]):
            text = tokenizer.decode(requests.asked(messages).rows.token_ids, skip_special=False)
            assert text == tokenizer.render(messages, add_generation_prompt=True)  # type: ignore[arg-type]
            assert ("Default" in text) == (len(messages) == 1)
            among_many = make_prompt(requests, messages, None, engine.default_params())
            assert among_many.rows.token_ids == requests.asked(messages).rows.token_ids
    refusing = "{%- if messages[0].role == 'system' %}{{- raise_exception('no system prompt') }}{%- endif %}"
    with tiny_engine(tmp_path / "other", tokenizer=tiny_tokenizer(refusing + TEMPLATE)) as engine:
        requests = Requests(engine)
        assert requests.asked(messages).rows.token_ids == requests.asked(messages[1:]).rows.token_ids


@pytest.mark.parametrize("before", [[user("one")], [user("one"), user("two")]], ids=["dialogue", "other"])
def test_what_was_sampled_stands_for_what_is_sent_back(tmp_path: Path, before: list[dict[str, Any]]) -> None:
    with tiny_engine(tmp_path) as engine:
        requests, params = Requests(engine), engine.default_params(max_tokens=40)
        asked = requests.asked(before)
        engine.scripted.script = say(engine, "hm", "Odd")
        sequence = requests.begin(asked, params, 0, lambda number, event: None)
        sequence.finished.wait()
        requests.over(asked, sequence, Answer("Odd"))
        known = next(iter(requests._recall._turns.values())).answer
        known.token_ids[known.shown[0]] = engine.tokenizer.encode("0")[
            0
        ]  # as if the model spelled it otherwise
        more = [*before, {"role": "assistant", "content": "Odd"}, user("three")]
        text = engine.tokenizer.decode(requests.asked(more).rows.token_ids)
        assert ("0dd" in text, "Odd" in text, "hm" in text) == (True, False, False)
        text = engine.tokenizer.decode(requests.asked([user("zero"), *more[1:]]).rows.token_ids)
        assert "Odd" in text


@pytest.mark.parametrize("messages", [[], [user("x"), {"role": "assistant", "content": "y"}]])
def test_what_asks_for_nothing_is_refused(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    with tiny_engine(tmp_path) as engine, pytest.raises(EngineError, match="nothing to answer"):
        Requests(engine).asked(messages)


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine, pytest.raises(EngineError, match="leaves out"):
        Requests(engine).asked([user("x"), {"role": "tool", "content": "y"}])


def test_answers_are_known_by_their_place_and_forgotten_in_the_end() -> None:
    recall, place = Recall(most_tokens=3 * BESIDE), AnswerPlace()
    place.add(user("one"))
    here = place.key("text")
    there = AnswerPlace()
    there.add(user("one"))
    there.add_ids([1, 2])
    assert there.key("text") != here
    assert AnswerPlace(tools=[{"a": 1}]).key("text") != AnswerPlace().key("text")
    first = Turn("", Answer("text", token_ids=[1, 2, 3]))
    recall.note(here, first)
    assert recall.find(here) is first
    assert recall.find(there.key("text")) is None
    for number in range(10):
        recall.note(place.key(str(number)), Turn("", Answer(token_ids=[number])))
    assert recall.find(here) is None
    assert recall.find(place.key("9")) is not None


def test_calls_are_known_by_what_their_arguments_say() -> None:
    place = AnswerPlace()
    calls = [("f", {"a": 1.0, "b": [True, None, {"c": "d"}]}), ("g", {})]
    same = [("f", {"b": [True, None, {"c": "d"}], "a": 1}), ("g", {})]
    assert place.key("text ", calls) == place.key("text", same)
    others = [
        [("f", {"a": 1, "b": [1, None, {"c": "d"}]}), ("g", {})],
        [("f", {"a": 1.5, "b": [True, None, {"c": "d"}]}), ("g", {})],
        [("g", {}), calls[0]],
        calls[:1],
        [],
    ]
    keys = {place.key("text", other) for other in others}
    assert len(keys) == len(others)
    assert place.key("text", calls) not in keys
