"""A server under load, and the turns of a chat through it: chatterm, vLLM, or whatever else speaks OpenAI's API.

    chatterm serve smollm2 --port 8642 &
    python -m benchmarks.serve --url http://127.0.0.1:8642 --model smollm2 [--clients 1,8,64] [--turns 20]
        [--thinking-model qwen3-0.6b] [--json FILE]

Every client sends one request after the other, each with a prompt of its own, and reads the stream. tokens/s are the
tokens of all answers (as the server counts them) over the time from the first request to the last token. The first
token is timed from the moment the request is sent, the gaps between the events of a stream. The client is one process
with asyncio and hardly looks at what it reads, so that it does not measure itself.

The chat is one of so many turns by a client without a memory, which sends everything back each time; "computed" are the
prompt tokens of a turn that were not in the cache. A model that thinks has a chat of its own, whose client sends no
thinking back.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from benchmarks.options import numbers

_WORDS = Path(__file__).read_text("utf-8").split()


@dataclass(slots=True)
class Answer:
    """One answer; times in seconds."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What so many clients at once were like; times in seconds."""

    clients: int
    requests: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float
    gap_p99_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat."""

    number: int
    prompt_tokens: int
    computed_tokens: int
    first_s: float
    thinking_tokens: int = 0


async def ask(url: str, model: str, messages: list[dict[str, str]], tokens: int, seed: int) -> Answer:
    """One streamed answer over a connection of its own. Raises OSError, and ValueError for anything but a stream."""
    place = urlsplit(url)
    asked = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 0.6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(asked).encode()
    head = f"POST {place.path}/v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    began = latest = time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    answer, events = Answer(), list[bytes]()
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status.decode().strip()} {(await reader.read()).decode('utf-8', 'replace')}")
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            events.append(line)
            if b'"usage":{"' in line or b'"usage": {"' in line or not _says(line):
                continue
            now = time.perf_counter()
            if answer.first_s:
                answer.gaps_s.append(now - latest)
            else:
                answer.first_s = now - began
            latest = now
    finally:
        writer.close()
    _read(answer, events)
    return answer


def _says(line: bytes) -> bool:
    """Whether an event has text: the first has only a role."""
    return b'"content":""' not in line and (b'"content":"' in line or b'"reasoning' in line)


def _read(answer: Answer, events: Sequence[bytes]) -> None:
    for line in events:
        event = json.loads(line[6:])
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
        if (usage := event.get("usage")) is not None:
            answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            details = usage.get("completion_tokens_details") or {}
            answer.thinking_tokens = details.get("reasoning_tokens") or 0
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def load(url: str, model: str, clients: int, requests: int, words: int, tokens: int) -> Load:
    """So many clients, each with so many requests."""

    async def client(number: int) -> list[Answer]:
        found = []
        for request in range(requests):
            random = Random(f"{clients} {number} {request}")
            text = " ".join(random.choices(_WORDS, k=random.randint(words // 2, words)))
            found.append(await ask(url, model, [{"role": "user", "content": text}], tokens, number))
        return found

    began = time.perf_counter()
    of_clients = await asyncio.gather(*map(client, range(clients)))
    passed = time.perf_counter() - began
    answers = [answer for found in of_clients for answer in found]
    first = [answer.first_s for answer in answers if answer.first_s]
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    return Load(
        clients=clients,
        requests=len(answers),
        tokens_per_s=sum(answer.tokens for answer in answers) / passed,
        first_p50_s=percentile(first, 50),
        first_p99_s=percentile(first, 99),
        gap_p50_s=percentile(gaps, 50),
        gap_p99_s=percentile(gaps, 99),
    )


async def chat(url: str, model: str, turns: int, tokens: int) -> list[Turn]:
    """A chat whose client sends back all that was said, and pauses between turns as people do."""
    random, messages, found = Random(1), list[dict[str, str]](), []
    for number in range(1, turns + 1):
        text = f"Turn {number}: " + " ".join(random.choices(_WORDS, k=20))
        messages.append({"role": "user", "content": text})
        answer = await ask(url, model, messages, tokens, number)
        messages.append({"role": "assistant", "content": answer.text})
        computed = answer.prompt_tokens - answer.cached_tokens
        found.append(Turn(number, answer.prompt_tokens, computed, answer.first_s, answer.thinking_tokens))
        await asyncio.sleep(0.5)
    return found


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many per cent do not exceed; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, printed as it comes."""
    url, model = arguments.url.rstrip("/"), arguments.model
    await load(url, model, 1, 1, arguments.words, arguments.tokens)
    loads, chats = [], dict[str, list[Turn]]()
    for clients in arguments.clients:
        found = await load(url, model, clients, arguments.requests, arguments.words, arguments.tokens)
        loads.append(found)
        print(
            f"{clients:4} clients: {found.tokens_per_s:8,.0f} tokens/s, first token"
            f" {found.first_p50_s * 1e3:7.0f} ms (p99 {found.first_p99_s * 1e3:7.0f}), gap"
            f" {found.gap_p50_s * 1e3:6.1f} ms (p99 {found.gap_p99_s * 1e3:6.1f})",
            flush=True,
        )
    asked = [(model, arguments.tokens)]
    if arguments.thinking_model is not None:
        asked.append((arguments.thinking_model, arguments.thinking_tokens))
    for name, tokens in asked if arguments.turns else ():
        chats[name] = turns = await chat(url, name, arguments.turns, tokens)
        print(told(name, turns))
    return {
        "url": url,
        "model": model,
        "load": list(map(asdict, loads)),
        "chats": {name: list(map(asdict, turns)) for name, turns in chats.items()},
    }


def told(model: str, turns: Sequence[Turn]) -> str:
    """A chat in one line."""
    last, later = turns[-1], turns[len(turns) // 2 :]
    thought = sum(turn.thinking_tokens for turn in turns)
    return (
        f"turn {last.number} of a chat with {model}: {last.prompt_tokens:,} prompt tokens, {last.computed_tokens}"
        f" computed ({max(turn.computed_tokens for turn in turns[1:] or turns)} at most from turn 2 on), first token"
        f" {statistics.median(turn.first_s for turn in later) * 1e3:.0f} ms (median of the later half);"
        f" {thought:,} tokens of thinking in all"
    )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8642", help="without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=numbers, default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--words", type=int, default=100, help="of a prompt at most")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--turns", type=int, default=20, help="of the chat; 0: none")
    parser.add_argument("--thinking-model", help="one that thinks, for a chat of its own")
    parser.add_argument("--thinking-tokens", type=int, default=1024, help="of an answer of it at most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
