"""From real clients to the engine and back: HTTP, the channel, the engine process, a tiny model."""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

import httpx
import ollama
import openai
import pytest
from langchain_openai import ChatOpenAI

from chatterm.cli.servers import command_link
from chatterm.cli.top import look
from chatterm.server.channel_service import ChannelService
from chatterm.server.http.app import make_app
from chatterm.server.http.limits import Limits
from chatterm.server.http.web import listen, make_server
from tests.chatterm.server.conftest import Gate, Served
from tests.counting import PATIENCE, until

HELLO = [{"role": "user", "content": "Name a river."}]


@dataclass
class Site:
    """The HTTP API of an engine process."""

    served: Served
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def script(self, *answers: str) -> None:
        """What the model says next."""
        engine = self.served.engine
        engine.scripted.script = [
            id for answer in answers for id in engine.tokenizer.encode(f"{answer}<|im_end|>")
        ]


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def site(served: Served, limits: Limits) -> Iterator[Site]:
    host = served.calls.host
    host.release(host.acquire("tiny"))
    service = ChannelService()
    app = make_app(service, limits)
    sock = listen(app, "127.0.0.1", 0)
    server = make_server(app)

    async def run() -> None:
        await service.connect()
        await server.serve(sockets=[sock])
        await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    found = Site(served, f"http://127.0.0.1:{sock.getsockname()[1]}")
    until(lambda: service.health().is_there)
    yield found
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_chat_computes_only_what_is_new(site: Site) -> None:
    messages, sizes = [], []
    with site.client as client:
        for turn in range(3):
            messages.append({"role": "user", "content": f"Turn {turn}"})
            site.script(f"Answer {turn}")
            stream = client.chat.completions.create(
                model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == f"Answer {turn}"
            messages.append({"role": "assistant", "content": text})
            usage = chunks[-1].usage
            sizes.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
    new = sizes[1][0] - sizes[0][0]
    for before, (prompt, cached) in pairwise(sizes):
        assert prompt - cached < new
        assert cached >= before[0]


def test_a_client_that_goes_away_frees_the_engine(site: Site) -> None:
    gate = Gate(site.served.engine)
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{site.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        assert len(site.served.running) == 1
    gate.open()
    until(lambda: not site.served.running)


def test_a_grammar_that_turns_out_too_complex_is_the_request_s_fault(site: Site) -> None:
    rules = "\n".join(f'r{i}: r{i + 1} | "x"' for i in range(1500))
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "extra_body": {"structured_outputs": {"grammar": f'start: "y" | r0\n{rules}\nr1500: "x"'}},
    }
    with site.client as client:
        site.script("x")
        with pytest.raises(openai.BadRequestError, match="cannot follow the grammar any further"):
            client.chat.completions.create(**asked)
        site.script("x")
        with pytest.raises(openai.APIError, match="cannot follow the grammar any further") as caught:
            list(client.chat.completions.create(**asked, stream=True))
        assert caught.value.type == "invalid_request_error"


def test_what_ollama_is_told_of_the_weights(site: Site) -> None:
    native = ollama.Client(host=site.url)
    native.chat("tiny", HELLO, options={"num_predict": 1})
    for details in (native.show("tiny").details, native.list().models[0].details):
        assert (details.family, details.families, details.quantization_level) == ("qwen3", ["qwen3"], "F32")


def test_each_client_gets_the_same_answer(site: Site) -> None:
    question = HELLO[0]["content"]
    native = ollama.Client(host=site.url)
    chain = ChatOpenAI(base_url=f"{site.url}/v1", api_key="none", model="tiny", max_retries=0)
    with site.client as client:
        asks = [
            lambda: client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content,
            lambda: client.responses.create(model="tiny", input=question).output_text,
            lambda: "".join(
                event.delta
                for event in client.responses.create(model="tiny", input=question, stream=True)
                if event.type == "response.output_text.delta"
            ),
            lambda: client.completions.create(model="tiny", prompt=question, max_tokens=99).choices[0].text,
            lambda: native.chat("tiny", HELLO).message.content,
            lambda: "".join(part.response for part in native.generate("tiny", question, stream=True)),
            lambda: chain.invoke(question).content,
            lambda: "".join(part.content for part in chain.stream(question)),
        ]
        for ask in asks:
            site.script("The Rhine, I think.")
            assert ask() == "The Rhine, I think."
    assert [model.model for model in native.ps().models] == ["tiny"]
    assert native.show("tiny").modelinfo["general.parameter_count"] > 0
    found = httpx.post(
        f"{site.url}/tokenize", json={"model": "tiny", "prompt": "river", "return_token_strs": True}
    )
    assert "".join(found.json()["token_strs"]) == "river"
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in httpx.get(f"{site.url}/metrics").text


def test_what_is_loaded_is_told_as_it_is_now(site: Site) -> None:
    native = ollama.Client(host=site.url)
    for keep_alive, most in (("5m", 301), (-1, None), ("1h", 3601)):
        site.script("Yes.")
        native.chat("tiny", HELLO, keep_alive=keep_alive)
        (loaded,) = native.ps().models
        left = (loaded.expires_at - datetime.now(UTC)).total_seconds()
        assert left > 10**6 if most is None else most - 200 < left < most


def test_a_bias_for_a_token_that_there_is_not_is_named(site: Site) -> None:
    with site.client as client, pytest.raises(openai.BadRequestError, match="token 99999;") as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, logit_bias={"99999": 1})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("limits", [Limits(context=60)])
def test_a_request_keeps_to_its_share_of_the_context(site: Site) -> None:
    with site.client as client:
        site.script("x" * 200)
        answer = client.completions.create(model="tiny", prompt="y" * 50, max_tokens=100)
        assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (60, "length")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="y" * 60)
        assert caught.value.code == "context_length_exceeded"
        assert client.models.retrieve("tiny").max_model_len == 60


@pytest.mark.parametrize("limits", [Limits(running=1)])
def test_what_waits_in_the_web_process_is_waiting(site: Site) -> None:
    """For /metrics and for `chatterm top`, which asks the engine process."""
    gate = Gate(site.served.engine)
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 20}
    link = command_link()
    assert link is not None

    def waiting() -> set[str]:
        (model,) = look(link).metrics.models
        page = httpx.get(f"{site.url}/metrics").text
        return {str(model.waiting), *re.findall(r'vllm:num_requests_waiting{model_name="tiny"} (\d+)', page)}

    def ask() -> None:
        assert httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=60).status_code == 200

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: waiting() == {"2"})
    gate.open()
    for thread in threads:
        thread.join()
    until(lambda: waiting() == {"0"})
    link.close()
