"""Ollama's own client against a real server."""

import asyncio

import httpx
import ollama
import pytest

from chatterm.server.http.ollama.requests import parse_keep_alive
from tests.chatterm.server.fake import FakeService, echo, serving

HELLO = [{"role": "user", "content": "Hello there, you"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def add(a: int) -> int:
    """Add one.

    Args:
        a: A number.
    """
    return a + 1


@pytest.fixture(scope="module")
def running():
    with serving(FakeService()) as server:
        yield server


@pytest.fixture
def client(running):
    running.service.__init__()
    return ollama.Client(host=running.url)


def test_models(client, running):
    assert [model.model for model in client.list().models] == ["tiny", "other"]
    shown = client.show("tiny")
    assert shown.details.quantization_level == "Q8_0"
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert [model.model for model in client.ps().models] == ["tiny"]
    assert httpx.get(f"{running.url}/api/version").json()["version"]


def test_null_is_content_that_is_not_given(client, running):
    asked = {
        "model": "tiny",
        "messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO],
        "stream": False,
    }
    assert httpx.post(f"{running.url}/api/chat", json=asked).status_code == 200
    assert [message.content for message in running.service.asked[-1].messages][1] == ""


def test_a_chat_with_options(client, running):
    options = {"temperature": 0, "num_predict": 3, "num_ctx": 2048, "repeat_penalty": 1.1, "stop": ["END"]}
    answer = client.chat(
        "tiny:latest", HELLO, options={**options, "num_thread": 4}, keep_alive="5m", think=True
    )
    assert answer.message.content == "Hello there, you"
    assert (answer.done, answer.done_reason, answer.eval_count, answer.prompt_eval_count) == (
        True,
        "stop",
        3,
        3,
    )
    assert answer.eval_duration == 500_000_000
    asked = running.service.asked[-1]
    expected = {"temperature": 0, "max_tokens": 3, "repetition_penalty": 1.1, "stop": ("END",)}
    assert (asked.model, asked.sampling, asked.think, asked.keep_alive_s) == ("tiny", expected, "on", 300.0)


@pytest.mark.parametrize("unbounded", [0, -1, -2])
def test_num_predict_may_be_no_limit(client, running, unbounded):
    client.chat("tiny", HELLO, options={"num_predict": unbounded})
    assert running.service.asked[-1].sampling == {}


def test_a_stream_with_thinking(client, running):
    running.service.say = lambda request, index: [("reasoning", "Let me see."), ("answer", "Yes, it is.")]
    parts = list(client.chat("tiny", HELLO, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Let me see."
    assert "".join(part.message.content or "" for part in parts) == "Yes, it is."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_stream_of_every_line_end(client, running):
    said = 'a\u2028b\u2029c\x85d\r\ne\x0bf\x0cg\x1ch "é"'
    running.service.say = lambda request, index: [("answer", said)]
    parts = list(client.chat("tiny", HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == said


def test_tools(client, running):
    running.service.say = lambda request, index: [("answer", CALL)]
    answer = client.chat("tiny", HELLO, tools=[add])
    call = answer.message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
    running.service.say = echo
    result = {"role": "tool", "tool_name": "add", "content": "2"}
    assert client.chat("tiny", [*HELLO, answer.message, result], tools=[add]).message.content == "2"
    history = running.service.asked[-1].messages
    assert history[2].tool_call_id == history[1].tool_calls[0].id


def test_a_schema(client, running):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat("tiny", HELLO, format=schema)
    assert running.service.asked[-1].constraint.kind == "json_schema"
    client.generate("tiny", "Hello", format="json")
    assert running.service.asked[-1].constraint.kind == "json_object"


def test_generate(client, running):
    assert client.generate("tiny", "Hello there", system="Be kind.").response == "Hello there"
    assert [message.role for message in running.service.asked[-1].messages] == ["system", "user"]
    assert client.generate("tiny", "Hello", raw=True).response == " after Hello"
    assert "".join(part.response for part in client.generate("tiny", "Hello you", stream=True)) == "Hello you"


def test_a_model_is_loaded_and_unloaded(client, running):
    assert client.generate("other").done_reason == "load"
    assert client.chat("other", [], keep_alive=0).done_reason == "unload"
    assert running.service.held == [("other", None), ("other", 0.0)]
    assert running.service.asked == []


def test_likelihoods_of_tokens(client):
    """They stand beside the message, as Ollama writes them: streamed, whole, and without alternatives."""
    asked = {"model": "tiny", "logprobs": True}
    whole = client.chat(messages=HELLO, top_logprobs=2, **asked).model_dump()
    assert [entry["token"] for entry in whole["logprobs"]]
    for entry in whole["logprobs"]:
        assert entry["logprob"] == -0.5
        assert [one["token"] for one in entry["top_logprobs"]] == ["t0", "t1"]
    parts = [part.model_dump() for part in client.chat(messages=HELLO, top_logprobs=2, stream=True, **asked)]
    streamed = [entry for part in parts for entry in part["logprobs"] or ()]
    assert streamed == whole["logprobs"]
    assert parts[-1]["done"]
    generated = client.generate(prompt="Hello you", **asked).model_dump()
    assert "".join(entry["token"] for entry in generated["logprobs"]) == "Hello you"
    assert not any(entry.get("top_logprobs") for entry in generated["logprobs"])
    assert not client.chat("tiny", HELLO).model_dump().get("logprobs")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": {"temperature": "warm"}}, "options.temperature"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"think": "huge"}, "think"),
        ({"model": "nothing"}, "nothing"),
    ],
)
def test_what_is_wrong_is_named(client, options, said):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(**{"model": "tiny", "messages": HELLO, **options})
    assert said in caught.value.error
    assert caught.value.status_code in (400, 404)


async def test_many_at_once(running):
    running.service.__init__()
    client = ollama.AsyncClient(host=running.url)
    asks = (client.chat("tiny", [{"role": "user", "content": f"Number {n}"}]) for n in range(10))
    answers = await asyncio.gather(*asks)
    assert [answer.message.content for answer in answers] == [f"Number {n}" for n in range(10)]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("10", 10),
        (3, 3),
        ("-1", -1),
        (-5, -1),
        ("-1s", -1),
        ("0", 0),
        (None, None),
    ],
)
def test_durations(given, seconds):
    assert parse_keep_alive(given) == seconds
