"""A server that was killed: what its clients' conversations had computed is brought back by the next one."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import httpx
import pytest

from engine.store.records import scan
from tests.chatterm.server.conftest import ROOT
from tests.counting import PATIENCE, until
from tests.engine.test_restarts import model  # noqa: F401 - a fixture

BLOCK = 32
BESIDE_ASCII = {str(token): -100 for token in range(94, 256)}
"""Bytes that are no characters alone, as logit_bias: what a client sends back of an answer is then what was said."""
TURNS = (
    "Which of the two lights in the harbour is the white one, and why? " * 3,
    "And the other? " * 5,
    "Why?",
)


@contextmanager
def server(model: Path, folder: Path, ends_by: signal.Signals) -> Iterator[str]:  # noqa: F811
    """The address of a real one."""
    options = ["--device", "cpu", "--threads", "1", "--context", "1000", "--quantize", "int8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "chatterm", "serve", str(model), "--port", "0", *options],
        cwd=ROOT,
        env=os.environ | {"CHATTERM_RUNTIME": str(folder / "run"), "CHATTERM_DATA": str(folder / "data")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            said += line
            if line.startswith("Ready"):
                break
        address = re.search(r"http://[\d.]+:\d+", said)
        assert address is not None, said
        until(lambda: process.poll() is not None or listens(address[0]))
        assert process.poll() is None, said + process.stderr.read()
        yield address[0]
    finally:
        process.send_signal(ends_by)
        process.stderr.close()
        process.wait(PATIENCE)


def listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def asked(url: str, said: list[str]) -> tuple[dict[str, str], int, int]:
    """The answer to the last of `said`, how long the prompt was and how much of it was cached."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    body = {"model": "model0", "messages": messages, "temperature": 0.8, "seed": 7, "max_tokens": 90}
    body["logit_bias"] = BESIDE_ASCII
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        body["model"] = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        found = client.post(f"{url}/v1/chat/completions", json=body).json()
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["message"], usage["prompt_tokens"], cached


def records(folder: Path) -> int:
    """How many whole blocks, and pieces of states, are on disk."""
    count = 0
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            count += len(list(scan(file.fileno())))
    return count


def is_written(folder: Path, least: int) -> bool:
    """Whether there are so many records, and no more come: states follow the blocks. Looks are counted, because a busy
    machine that holds up the server also holds up these."""
    before = records(folder)
    for _ in range(50):
        sleep(0.02)
        if records(folder) != before:
            return False
    return least <= before


@pytest.mark.parametrize("model", ["qwen3.5"], indirect=True)
def test_a_client_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:  # noqa: F811
    said: list[str] = []
    with server(model, tmp_path, signal.SIGKILL) as url:
        for text in TURNS:
            said.append(text)
            answer, prompt, cached = asked(url, said)
            said.append(answer["content"] or "")
        assert cached > BLOCK
        until(lambda: is_written(tmp_path / "data", prompt // BLOCK))
    for measured in tmp_path.rglob("costs.json"):  # by which a slow disk may not be asked
        measured.unlink()
    with server(model, tmp_path, signal.SIGTERM) as url:
        again, _, brought = asked(url, said[:-1])
    assert again == answer
    assert brought >= cached // BLOCK * BLOCK, "what was cached in the first one is there, but for a rest"
