"""OpenAI's own client against a real server."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from chatterm.server.http.fields import Ignored, json_object
from chatterm.server.http.openai.chat import TABLE
from chatterm.server.service import AnswerConstraint, RequestError
from engine.params import SamplingParams
from tests.chatterm.server.fake import FakeService, echo, serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello there, you"}]


@pytest.fixture(scope="module")
def running():
    with serving(FakeService()) as server:
        yield server


@pytest.fixture
def client(running):
    running.service.__init__()
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "other"]
    assert client.models.retrieve("tiny").created == 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_a_completion_with_its_usage(client, running):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be kind."}, *HELLO],
        temperature=0.5,
        seed=3,
        stop=["END"],
        max_completion_tokens=10,
        logit_bias={"5": -100},
        frequency_penalty=0.5,
        presence_penalty=0.25,
        prompt_cache_key="k",
        reasoning_effort="low",
        user="me",
    )
    assert answer.choices[0].message.content == "Hello there, you"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        3,
        8,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    asked = running.service.asked[-1]
    assert asked.sampling == {
        "temperature": 0.5,
        "seed": 3,
        "stop": ("END",),
        "max_tokens": 10,
        "logit_bias": {5: -100},
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
    }
    assert (asked.think, asked.template, asked.cache_key) == ("on", {"reasoning_effort": "low"}, "k")
    assert [message.role for message in asked.messages] == ["system", "user"]


def test_a_stream_with_usage_says_the_same(client):
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == "Hello there, you"
        assert mine[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in mine][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_thinking_is_apart_from_the_answer(client, running):
    running.service.say = lambda request, index: [("reasoning", "Let me see."), ("answer", "Yes.")]
    message = client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    )
    assert (running.service.asked[-1].think, running.service.asked[-1].template) == ("off", {"x": 1})


def test_logprobs(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    assert "".join(token.token for token in found) == "Hello there, you"
    assert [top.token for top in found[0].top_logprobs] == ["t0", "t1"]
    stream = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
    assert [one.token for part in streamed for one in part.content] == [token.token for token in found]


def test_a_tool_is_called_and_its_result_comes_back(client, running):
    running.service.say = lambda request, index: [("reasoning", "Hm."), ("answer", CALL)]
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    running.service.say = echo
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    again = client.chat.completions.create(
        model="tiny", messages=[*HELLO, choice.message, result], tools=TOOLS
    )
    assert again.choices[0].message.content == "2"
    history = running.service.asked[-1].messages
    assert history[1].tool_calls[0].name == "add"
    assert history[1].reasoning == "Hm."
    assert history[2].tool_call_id == call.id


def test_a_call_streams(client, running):
    running.service.say = lambda request, index: [("answer", f"Look: {CALL}")]
    stream = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)
    text, calls, finish = "", {}, None
    for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            call["arguments"] += part.function.arguments
    assert (text, finish) == ("Look:", "tool_calls")
    assert json.loads(calls[0]["arguments"]) == {"a": 1}
    assert calls[0]["name"] == "add"
    assert calls[0]["id"]


@pytest.mark.parametrize("cut", [False, True])
def test_a_stop_string_within_a_call_is_what_ended_the_answer(client, running, cut):
    running.service.say = lambda request, index: [("answer", CALL[: CALL.index("1")] if cut else CALL)]
    running.service.reason = "stop"
    options = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "stop": ["1" if cut else "END"]}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.message.tool_calls[0].function.name == "add"
    finish = [
        chunk.choices[0].finish_reason for chunk in client.chat.completions.create(**options, stream=True)
    ]
    assert choice.finish_reason == finish[-1] == ("stop" if cut else "tool_calls")


def test_what_a_choice_of_tools_means(client, running):
    def ask(**options):
        client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, **options)
        return running.service.asked[-1]

    assert ask(tool_choice="none").tools == ()
    forced = ask(tool_choice="required")
    assert forced.constraint.kind == "calls"
    assert "<tool_call>" in forced.constraint.text
    named = ask(tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.tool_choice == "add"
    assert ask().constraint is None
    assert ask(parallel_tool_calls=False).constraint.text.startswith("start: TEXT? | lead body\n")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    client.chat.completions.create(model="tiny", messages=HELLO, tools=strict)
    assert "integer" in running.service.asked[-1].constraint.text
    assert "strict" not in running.service.asked[-1].tools[0]["function"]
    besides = ask(response_format={"type": "json_object"})
    assert besides.constraint.text.startswith("start: answer | calls")


def test_outputs_that_are_structured_otherwise(client, running):
    def ask(**kinds):
        client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": kinds})
        return running.service.asked[-1].constraint

    assert ask(regex="a+") == AnswerConstraint("regex", "a+")
    assert ask(grammar='start: "a"') == AnswerConstraint("lark", 'start: "a"')
    assert ask(choice=["a b", 'c"']) == AnswerConstraint("lark", 'start: CHOICE\nCHOICE: "a b" | "c\\""')
    assert ask(json={"type": "object"}).kind == "json_schema"
    assert ask(regex="a+", json_object=False) == AnswerConstraint("regex", "a+")
    with pytest.raises(openai.BadRequestError, match="exactly one field"):
        ask(json_object=False)
    with pytest.raises(openai.BadRequestError):
        ask(regex="a+", choice=["b"])
    with pytest.raises(openai.BadRequestError, match="200,000"):
        ask(regex="a" * 200_001)


def test_an_expression_beside_tools_that_ends_in_a_backslash(client):
    extra = {"structured_outputs": {"regex": "ab\\"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, extra_body=extra)
    assert caught.value.param == "structured_outputs.regex"
    message = "The regular expression cannot be used: it ends in a backslash that escapes nothing."
    assert caught.value.body["message"] == message


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e400", "1" + "0" * 400])
@pytest.mark.parametrize("field", ['"temperature": {}', '"top_p": {}', '"logit_bias": {{"1": {}}}'])
def test_numbers_without_an_end_are_refused(field, number):
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": "x"}}], {field.format(number)}}}'
    with pytest.raises(RequestError) as caught:
        TABLE.of(json_object(body.encode()), Ignored())
    assert caught.value.status == 400
    assert len(str(caught.value).splitlines()) == 1


def test_seeds_of_any_sign(client, running):
    client.chat.completions.create(model="tiny", messages=HELLO, seed=-5)
    assert running.service.asked[-1].sampling["seed"] == 2**63 - 5


def test_repetition_is_stopped_only_where_a_request_asks_for_it_and_is_told_as_a_limit(client, running):
    running.service.reason = "repetition"
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"stop_repetition": True}
    )
    assert running.service.asked[-1].sampling == {"stop_repetition": True}
    assert answer.choices[0].finish_reason == "length"


def test_a_top_p_of_zero_keeps_the_likeliest_token(client, running):
    client.chat.completions.create(model="tiny", messages=HELLO, top_p=0)
    top_p = running.service.asked[-1].sampling["top_p"]
    assert SamplingParams(top_p=top_p).top_p < 1e-6


class Answer(BaseModel):
    value: int


def test_a_schema(client, running):
    running.service.say = lambda request, index: [("answer", '{"value": 3}')]
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(value=3)
    constraint = running.service.asked[-1].constraint
    assert constraint.kind == "json_schema"
    assert json.loads(constraint.text)["properties"]["value"]["type"] == "integer"


def test_completions_of_several_prompts(client):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [" after a", " after a", " after b", " after b"]
    assert answer.choices[0].logprobs.tokens == [" after", " a"]
    assert answer.usage.completion_tokens == 8
    stream = client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " after (1, 2, 3)"


def test_responses(client, running):
    running.service.say = lambda request, index: [("reasoning", "Hm."), ("answer", "Yes.")]
    answer = client.responses.create(
        model="tiny",
        input="Really?",
        instructions="Be kind.",
        max_output_tokens=9,
        reasoning={"effort": "none"},
    )
    assert answer.output_text == "Yes."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage.input_tokens_details.cached_tokens == 1
    asked = running.service.asked[-1]
    assert (asked.think, asked.sampling) == ("off", {"max_tokens": 9})
    assert [message.role for message in asked.messages] == ["system", "user"]
    running.service.reason = "length"
    cut = client.responses.create(model="tiny", input="Really?")
    assert (cut.status, [item.status for item in cut.output]) == ("incomplete", ["completed", "incomplete"])
    with client.responses.stream(model="tiny", input="Really?") as stream:
        items = [event.item for event in stream if event.type == "response.output_item.done"]
    assert [item.status for item in items] == ["completed", "incomplete"]


def test_responses_stream_as_the_client_expects(client, running):
    running.service.say = lambda request, index: [("reasoning", "Hm."), ("answer", f"Look. {CALL}")]
    tool = {"type": "function", **TOOLS[0]["function"]}
    with client.responses.stream(model="tiny", input="Really?", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert final.output_text == "Look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"a": 1}
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [event.text for event in done] == ["Look."]
    running.service.say = echo
    output = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "2"}
    again = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "Really?"}, *final.output, output], tools=[tool]
    )
    assert again.output_text == "2"
    history = running.service.asked[-1].messages
    assert [message.role for message in history] == ["user", "assistant", "tool"]
    assert (history[1].content, history[1].reasoning, history[1].tool_calls[0].name) == (
        "Look.",
        "Hm.",
        "add",
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([("answer", CALL[: CALL.index("}}")])], [("function_call", '{"a": 1', "incomplete")]),
        (
            [("answer", f"{CALL}\n And")],
            [("function_call", '{"a": 1}', "completed"), ("message", "And", "incomplete")],
        ),
        (
            [("answer", "Look."), ("reasoning", "Hm."), ("answer", CALL)],
            [
                ("message", "Look.", "completed"),
                ("reasoning", "Hm.", "completed"),
                ("function_call", '{"a": 1}', "completed"),
            ],
        ),
        ([("reasoning", "Hm.")], [("reasoning", "Hm.", "incomplete")]),
        ([], [("message", "", "incomplete")]),
    ],
)
def test_responses_cut_by_the_limit_are_the_same_as_a_stream(client, running, said, expected):
    def items(response):
        return [
            (
                item.type,
                item.arguments if item.type == "function_call" else item.content[0].text,
                item.status,
            )
            for item in response.output
        ]

    running.service.say = lambda request, index: said
    running.service.reason = "length"
    asked = {"model": "tiny", "input": "Really?", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    assert (whole.status, events[-1].type) == ("incomplete", "response.incomplete")
    assert items(whole) == items(events[-1].response) == expected
    assert done == [status for _, _, status in expected]


@pytest.mark.parametrize("size", [1, 5, 11, 20, 30, 40, 47, 55])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_required_call_that_is_cut_is_no_text_and_what_cut_it_is_told(client, running, size, reason):
    running.service.say = lambda request, index: [("answer", CALL[:size])]
    running.service.reason = reason
    asked = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    choice = client.chat.completions.create(**asked).choices[0]
    assert not choice.message.content
    assert choice.finish_reason == reason or (size == 55 and choice.finish_reason == "tool_calls")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == choice.finish_reason


def test_a_schema_by_responses(client, running):
    running.service.say = lambda request, index: [("answer", '{"value": 3}')]
    parsed = client.responses.parse(model="tiny", input="Really?", text_format=Answer)
    assert parsed.output_parsed == Answer(value=3)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x " * 100_000}]}, "messages"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0].prefix"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"model": 3}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(client, options, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "stream": stream, **options})
    error = caught.value.body
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_null_is_a_field_that_is_not_given(client, running):
    client.chat.completions.create(model="tiny", messages=HELLO, temperature=None, stop=None, tools=[])
    assert running.service.asked[-1].sampling == {}


def test_an_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nothing", messages=HELLO)
    assert caught.value.code == "model_not_found"


async def test_many_at_once_without_blocking(running):
    running.service.__init__()
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        asks = (
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": f"Number {n}"}]
            )
            for n in range(20)
        )
        answers = await asyncio.gather(*asks)
    assert [answer.choices[0].message.content for answer in answers] == [f"Number {n}" for n in range(20)]
