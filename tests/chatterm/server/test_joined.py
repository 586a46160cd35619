"""The HTTP API on the engine process: what a client asks arrives at the engine, and what it says at the client."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatterm.server.channel_service import ChannelService
from chatterm.server.http.app import make_app
from chatterm.server.http.ollama.models import running, tag
from chatterm.server.process.queries import Queries
from models.files import ModelFiles
from models.hub.sources import LocalModel
from tests.chatterm.server.conftest import Served

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    host = served.calls.host
    await asyncio.to_thread(lambda: host.release(host.acquire("tiny")))
    service = ChannelService()
    await service.connect()
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as made:
        yield made
    await service.close()


async def chat(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Name a river."}],
        "max_tokens": 12,
        "seed": 3,
        **more,
    }
    reply = await client.post("/v1/chat/completions", json=asked)
    found: dict[str, Any] = reply.json()
    assert reply.status_code == more.get("status", 200), found
    return found


async def test_a_second_turn_computes_what_is_new(client: httpx.AsyncClient, served: Served) -> None:
    served.engine.scripted.script = served.engine.tokenizer.encode("The Rhine.<|im_end|>")
    first = await chat(client)
    message = first["choices"][0]["message"]
    assert (message["content"], first["choices"][0]["finish_reason"]) == ("The Rhine.", "stop")
    messages = [{"role": "user", "content": "Name a river."}, message, {"role": "user", "content": "More."}]
    second = await chat(client, messages=messages)
    usage = second["usage"]
    new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert new < usage["prompt_tokens"] - first["usage"]["prompt_tokens"]


async def test_log_probabilities_biases_and_penalties(client: httpx.AsyncClient, served: Served) -> None:
    x = served.engine.tokenizer.encode("x")[0]
    found = await chat(
        client,
        logprobs=True,
        top_logprobs=2,
        logit_bias={str(x): 100},
        temperature=0,
        frequency_penalty=0.1,
        max_tokens=4,
    )
    choice = found["choices"][0]
    assert choice["message"]["content"] == "xxxx"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["x"] * 4
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)


async def test_an_answer_in_a_format(client: httpx.AsyncClient, served: Served) -> None:
    thinking = {str(served.engine.tokenizer.think_start): -100}  # before an answer it may think as it likes
    for seed in range(3):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        found = await chat(client, response_format=form, max_tokens=100, seed=seed, logit_bias=thinking)
        said = json.loads(found["choices"][0]["message"]["content"])
        assert said["n"] in (1, 22)
        assert isinstance(said["ok"], bool)


async def test_what_the_engine_refuses(client: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "river " * 1000}]
    found = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": long})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
    found = await client.post(
        "/v1/chat/completions", json={"model": "nobody", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_stream_and_what_is_served(client: httpx.AsyncClient) -> None:
    asked = {"model": "tiny", "prompt": "river", "max_tokens": 5, "seed": 1, "stream": True}
    async with client.stream("POST", "/v1/completions", json=asked) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    whole = await client.post("/v1/completions", json={**asked, "stream": False})
    said = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert said == whole.json()["choices"][0]["text"]
    models = (await client.get("/v1/models")).json()["data"]
    assert "tiny" in [model["id"] for model in models]
    assert "tiny" in (await client.get("/metrics")).text
    assert (await client.get("/health")).status_code == 200


def test_a_model_has_the_size_and_the_date_of_its_files_whether_it_is_loaded_or_not(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tiny.gguf"
    place.write_bytes(b"x" * 1234)
    os.utime(place, (1_600_000_000, 1_600_000_000))
    local = LocalModel("tiny", ModelFiles("tiny", gguf=place), 1234, "catalogue")
    monkeypatch.setattr("models.hub.sources.local_models", lambda: [local])
    host = served.calls.host
    looking = Queries(host)
    (before,) = looking.models()
    host.release(host.acquire("tiny"))
    (after,) = looking.models()
    assert (before.loaded, after.loaded) == (False, True)
    assert tag(before) | {"details": None} == tag(after) | {"details": None}
    assert tag(after)["size"] == 1234
    assert running(after)["size"] == after.bytes != 1234
