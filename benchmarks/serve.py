"""Servers under load compared with the engine alone, and the turns of a chat: chatterm and other OpenAI-style servers.

    python -m benchmarks.serve smollm2 --device cpu --clients 1,8,32 --inputs 32,64 --outputs 64,64
    python -m benchmarks.serve --shape 0.6B --device cuda --clients 1,8,64,256 --json FILE
    python -m benchmarks.serve FOLDER --device cpu --peer vLLM=http://127.0.0.1:8123/NAME

The model is the named one, or one with random weights is written (`--shape`). The workload is that of
`benchmarks.batch`: prompts of random tokens, answers of a given length. Each client sends one request after the other
to /v1/completions of `chatterm serve`, which this program starts, and reads the stream; with few clients, each sends
four requests. tokens/s are the tokens of all answers divided by the time from the first request to the last token,
prompts included. "of the engine" is the share of what the engine reaches with the same workload in a process of its
own without a server, as in `benchmarks.batch`. They take turns, `--repeats` times after a first round that is
discarded; medians are reported. No server gets the same prompt twice.

The first token is timed from sending the request. Gaps are those between reads of a stream, and the inter-token
latency is the gap divided by the tokens in it. The client is one process that only records what arrives when, and
parses it when all have their answers (`benchmarks/stream_client.py`), so that it measures itself as little as
possible; its share of a processor is printed.

The chat has `--turns` turns, by a client without a memory that sends everything back each time. "computed" are the
prompt tokens of a turn that were not in the cache. A model may think, but no thinking is sent back. Other servers
(`--peer`) get the same requests.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.serving import Server, Workload
from benchmarks.soak_server import chatterm_server
from benchmarks.stream_client import Answer, Received, received, request_of

_WORDS = Path(__file__).read_text("utf-8").split()


@dataclass(frozen=True, slots=True)
class Load:
    """The figures of a number of clients at once; times in seconds."""

    clients: int
    requests: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    token_p50_s: float
    """Between tokens."""
    token_p99_s: float
    client_share: float
    """The client's own share of a processor."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat."""

    number: int
    prompt_tokens: int
    computed_tokens: int
    first_s: float
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """A server, and the name of the model there."""

    name: str
    url: str
    model: str
    ignores_end: bool = False
    """Whether it supports `ignore_eos`, so that every answer has its full length."""

    @classmethod
    def of(cls, text: str) -> "Site":
        """Parse NAME=URL/MODEL; the URL is without /v1. Raises argparse.ArgumentTypeError."""
        name, _, rest = text.partition("=")
        place = urlsplit(rest)
        if place.scheme != "http" or not place.path.strip("/"):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT/MODEL")
        return cls(name, f"http://{place.netloc}", place.path[1:], True)


async def ask(url: str, path: str, body: dict[str, Any]) -> Answer:
    """Read one streamed answer over its own connection. Raises OSError, and ValueError if it is not a stream."""
    return (await received(url, request_of(url, path, body))).answer()


async def load(site: Site, work: Workload) -> Load:
    """Run a workload with as many clients as may run at once. Raises the errors of `ask`."""
    more = {"temperature": work.temperature} | ({"ignore_eos": True} if site.ignores_end else {})
    requests = list[bytes]()
    for number, (prompt, tokens) in enumerate(zip(work.prompts, work.tokens, strict=True)):
        asked = {"model": site.model, "prompt": prompt, "max_tokens": tokens, "seed": number, **more}
        requests.append(request_of(site.url, "/v1/completions", asked))
    left, came = iter(requests), list[Received]()

    async def client() -> None:
        for request in left:
            came.append(await received(site.url, request))

    began, own = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(work.at_once)))
    passed, own = time.perf_counter() - began, time.process_time() - own
    answers = [one.answer() for one in came]
    first = [answer.first_s for answer in answers if answer.first_s]
    gaps = [gap for answer in answers for gap in _of_tokens(answer)]
    return Load(
        clients=work.at_once,
        requests=len(answers),
        tokens_per_s=sum(answer.tokens for answer in answers) / passed,
        first_p50_s=percentile(first, 50),
        first_p99_s=percentile(first, 99),
        token_p50_s=percentile(gaps, 50),
        token_p99_s=percentile(gaps, 99),
        client_share=own / passed,
    )


def _of_tokens(answer: Answer) -> Iterator[float]:
    """Yield the gaps divided by the average number of tokens that follow each."""
    if answer.gaps_s:
        each = max((answer.tokens - 1) / len(answer.gaps_s), 1.0)
        yield from (gap / each for gap in answer.gaps_s)


async def chat(site: Site, turns: int, tokens: int) -> list[Turn]:
    """Chat as a client that sends back everything that was said, and pauses between turns as a person does."""
    random, messages, found = Random(1), list[dict[str, str]](), []
    for number in range(1, turns + 1):
        text = f"Turn {number}: " + " ".join(random.choices(_WORDS, k=20))
        messages.append({"role": "user", "content": text})
        asked = {"model": site.model, "messages": messages, "max_tokens": tokens, "seed": number}
        answer = await ask(site.url, "/v1/chat/completions", asked | {"temperature": 0.6})
        messages.append({"role": "assistant", "content": answer.text})
        computed = answer.prompt_tokens - answer.cached_tokens
        found.append(Turn(number, answer.prompt_tokens, computed, answer.first_s, answer.thinking_tokens))
        await asyncio.sleep(0.5)
    return found


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` per cent of the values do not exceed; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0.0


def middle(loads: Sequence[Load]) -> Load:
    """Return the median run by tokens/s."""
    return sorted(loads, key=lambda found: found.tokens_per_s)[len(loads) // 2]


class Bench:
    """One run over numbers of clients."""

    def __init__(self, given: argparse.Namespace, sites: Sequence[Site], engine: Server | None) -> None:
        self._given, self._sites, self._engine = given, sites, engine
        self._began = time.perf_counter()
        vocabulary = engine.about["vocabulary"] if engine is not None else 1000
        self._highest = min(10_000, vocabulary - 1)
        self.found: dict[str, Any] = {"clients": {}, "chat": {}}

    def run(self) -> None:
        """Measure everything that was asked for, and print it as it comes."""
        for clients in self._given.clients:
            if (spent := time.perf_counter() - self._began) > self._given.budget_s:
                print(f"{clients} clients: skipped, {spent:.0f} s are spent", flush=True)
                continue
            self._load(clients)
        for site in self._sites if self._given.turns else ():
            self._chat(site)
        print(f"{time.perf_counter() - self._began:.0f} s in all", flush=True)

    def _load(self, clients: int) -> None:
        from benchmarks.batch import workload

        given = self._given
        loads: dict[str, list[Load]] = {site.name: [] for site in self._sites}
        alone = list[float]()
        for attempt in range(given.repeats + 1):
            work = workload(clients, given.inputs, given.outputs, self._highest, 1000 * clients + attempt)
            seconds = self._engine.seconds(work) if self._engine is not None else 0.0
            runs = {site.name: asyncio.run(load(site, work)) for site in self._sites}
            if attempt:
                alone.append(work.generated / seconds if seconds else 0.0)
                for name, found in runs.items():
                    loads[name].append(found)
        engine = statistics.median(alone)
        figures: dict[str, Any] = {"engine_tokens_per_s": engine}
        if engine:
            print(f"{clients:4} clients, the engine alone: {engine:8,.0f} tokens/s", flush=True)
        for name, runs_of in loads.items():
            found = middle(runs_of)
            figures[name] = asdict(found) | {"of_engine": found.tokens_per_s / engine if engine else None}
            share = f" ({found.tokens_per_s / engine:.1%} of the engine)" if engine else ""
            print(
                f"{clients:4} clients, {name}: {found.tokens_per_s:8,.0f} tokens/s{share}, first token"
                f" {found.first_p50_s * 1e3:.0f} ms (p99 {found.first_p99_s * 1e3:.0f}), between tokens"
                f" {found.token_p50_s * 1e3:.1f} ms (p99 {found.token_p99_s * 1e3:.1f}),"
                f" client {found.client_share:.0%} of a processor",
                flush=True,
            )
        self.found["clients"][clients] = figures

    def _chat(self, site: Site) -> None:
        turns = asyncio.run(chat(site, self._given.turns, 24))
        self.found["chat"][site.name] = list(map(asdict, turns))
        print(told(site.name, turns), flush=True)


def told(name: str, turns: Sequence[Turn]) -> str:
    """Describe a chat in one line."""
    last, later = turns[-1], [turn.first_s * 1e3 for turn in turns[len(turns) // 2 :]]
    thought = sum(turn.thinking_tokens for turn in turns)
    return (
        f"{name}: turn {last.number} of a chat: {last.prompt_tokens:,} prompt tokens, {last.computed_tokens}"
        f" computed ({max(turn.computed_tokens for turn in turns[1:] or turns)} at most from turn 2 on), first token"
        f" {statistics.median(later):.1f} ms ({min(later):.1f} to {max(later):.1f}) in the later half;"
        f" {thought:,} tokens of thinking in all"
    )


def _engine(given: argparse.Namespace, model: str) -> Server:
    """Start the engine alone, as `benchmarks.batch` uses it."""
    from benchmarks.batch import HERE, most_rows, workload

    most = max(given.clients)
    rows = max(most_rows(workload(clients, given.inputs, given.outputs, 1, 0)) for clients in given.clients)
    arguments = ["--device", given.device, "--streams", str(most), "--rows", str(rows), "--model", model]
    arguments += ["--context", str(given.inputs[1] + given.outputs[1] + 64)]
    arguments += ["--threads", str(given.threads)] if given.threads else []
    return Server("the engine alone", "benchmarks.peers.our_streams", arguments, [HERE])


def _context(given: argparse.Namespace) -> int:
    """Return the context for a server's model: its KV cache has room for several, and thus for all requests at once."""
    from chatterm.cli.serve import long_ones

    each, clients = given.inputs[1] + given.outputs[1] + 64, max(given.clients)
    return max(-(-clients * each // long_ones(clients)), 4096 if given.turns else 0, each)


def main() -> None:
    """Parse the command line and measure."""
    from benchmarks.options import numbers

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="as for chatterm serve; without one, --shape or --peer")
    parser.add_argument(
        "--shape",
        help="write random weights of this shape (0.6B, gemma4:e2b, ...), and serve it",
    )
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer that gets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", type=Site.of, action="append", default=[], metavar="NAME=URL/MODEL")
    parser.add_argument("--clients", type=numbers, default=[1, 8, 64])
    parser.add_argument("--inputs", type=numbers, default=[64, 256], help="least and most tokens of a prompt")
    parser.add_argument("--outputs", type=numbers, default=[128, 128], help="least and most of an answer")
    parser.add_argument(
        "--threads", type=int, help="of a processor, for the engine; default: what it chooses"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20, help="of the chat; 0: none")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing after so many seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack:
        sites, engine, model = list(given.peer), None, given.model
        if given.shape is not None:
            from benchmarks.random_checkpoint import CHECKPOINTS, write_checkpoint

            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="random-"))
            write_checkpoint(Path(model), CHECKPOINTS[given.shape], _device(given.device), given.tokenizer)
        if model is not None:
            engine = _engine(given, model)
            stack.callback(engine.close)
            options = ("--device", given.device, "--max-running", str(max(given.clients)))
            context = ("--context", str(_context(given)))
            options += ("--threads", str(given.threads)) if given.threads else ()
            server = stack.enter_context(chatterm_server(model, *options, *context))
            sites.insert(0, Site("chatterm", server.url, server.model))
        if not sites:
            parser.error("name a model, a --shape or a --peer")
        bench = Bench(given, sites, engine)
        bench.run()
    if given.json is not None:
        given.json.write_text(json.dumps(bench.found, indent=1) + "\n")


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


if __name__ == "__main__":
    main()
