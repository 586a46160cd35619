"""The processor time per token of a server's processes, in microseconds: this tree compared with an older one.

    python -m benchmarks.serve_cpu [--older TREE] [--streams 1,8,64,256] [--pace none] [--json FILE]

The engine process, the channel, the web process and the clients are real, and communicate over loopback. The model is
replaced by a clock (`benchmarks/scripted_server.py`), which makes the tokens of all streams at the pace of an H200
with Qwen3-0.6B. With `--pace none` it never waits, and tokens/s are the maximum that the server reaches. The requests
are those of `benchmarks.serve`, streams of /v1/completions. "the engine" is the thread that takes the steps, "its
neighbours" are all other threads of its process, whose time delays the next step. "alone" is an engine without a
server that answers the same requests.

Trees take turns, `--repeats` times after a first round that is discarded; medians are reported. Linux only.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.batch import workload
from benchmarks.options import numbers
from benchmarks.peers.serving import Workload
from benchmarks.stream_client import Received, received, request_of

HERE = Path(__file__).resolve().parents[1]
PACE = "1:1670,8:7800,64:17000,256:25000"
"""Tokens/s of an H200 with Qwen3-0.6B, by streams."""
WORDS = 4000
_ROLES = Path(__file__).with_name("scripted_server.py")


@dataclass(frozen=True, slots=True)
class Figures:
    """One round; processor times are in microseconds per token."""

    tokens_per_s: float
    alone_tokens_per_s: float
    engine_us: float
    alone_us: float
    """Time of the engine's thread without a server."""
    neighbours_us: float
    web_us: float
    client_us: float
    first_ms: float
    """The median time from sending a request to its first token."""
    request_ms: float
    """Time of the web process and the engine's neighbours together, per request."""


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the seconds of processor time of each thread of a process; threads of the same name are added up."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, used = (task / "comm").read_text().strip(), (task / "schedstat").read_text().split()[0]
        except OSError:  # it has just ended
            continue
        found[name] = found.get(name, 0.0) + int(used) / 1e9
    return found


class Program:
    """A role of `scripted_server.py`, with the modules of a tree."""

    def __init__(self, tree: Path, runtime: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_ROLES), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tree), "CHATTERM_RUNTIME": runtime, "CHATTERM_DATA": runtime},
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """Return the next line of its output. Raises RuntimeError if it ends."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{' '.join(self._process.args)} ended with code {self._process.wait()}")  # type: ignore[arg-type]
        return line

    def ask(self, line: str) -> Any:
        """Send a line, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self.line())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Tree:
    """The servers of a tree, and its engine alone."""

    def __init__(self, tree: Path, folder: Path, streams: int, pace: str, stack: ExitStack) -> None:
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="ct"))
        self.engine = self._program(stack, tree, runtime, "engine", folder, streams, pace)
        self.engine.line()
        self.web = self._program(stack, tree, runtime, "web", streams, folder)
        self.place = json.loads(self.web.line())
        self.alone = self._program(stack, tree, runtime, "alone", folder, streams, pace)
        self.alone.line()

    def _program(self, stack: ExitStack, tree: Path, runtime: str, *arguments: object) -> Program:
        made = Program(tree, runtime, *arguments)
        stack.callback(made.end)
        return made

    def round(self, work: Workload) -> Figures:
        """Run one workload on the engine alone and on the server. Raises ValueError if an answer is too short."""
        before = thread_seconds(self.alone.pid)
        alone_s = self.alone.ask(json.dumps(asdict(work)))["seconds"]
        alone = _passed(before, thread_seconds(self.alone.pid))
        earlier = [thread_seconds(program.pid) for program in (self.engine, self.web)]
        own, began = time.process_time(), time.perf_counter()
        came = asyncio.run(_clients(self.place, work))
        seconds, own = time.perf_counter() - began, time.process_time() - own
        later = [thread_seconds(program.pid) for program in (self.engine, self.web)]
        engine, web = (_passed(*pair) for pair in zip(earlier, later, strict=True))
        answers = [one.answer() for one in came]
        tokens = sum(answer.tokens for answer in answers)
        if tokens != work.generated:
            raise ValueError(f"{work.generated} tokens were to come, and {tokens} did")
        neighbours = sum(engine.values()) - engine.get("engine", 0.0)
        each = 1e6 / tokens
        return Figures(
            tokens_per_s=tokens / seconds,
            alone_tokens_per_s=tokens / alone_s,
            engine_us=engine.get("engine", 0.0) * each,
            alone_us=alone.get("engine", 0.0) * each,
            neighbours_us=neighbours * each,
            web_us=sum(web.values()) * each,
            client_us=own * each,
            first_ms=statistics.median(answer.first_s for answer in answers) * 1e3,
            request_ms=(neighbours + sum(web.values())) / len(answers) * 1e3,
        )


def _passed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: max(used - before.get(name, 0.0), 0.0) for name, used in after.items()}


async def _clients(place: dict[str, str], work: Workload) -> list[Received]:
    bodies = [
        {"model": place["model"], "prompt": prompt, "max_tokens": tokens, "temperature": 0.6, "seed": number}
        for number, (prompt, tokens) in enumerate(zip(work.prompts, work.tokens, strict=True))
    ]
    left = iter([request_of(place["url"], "/v1/completions", body) for body in bodies])

    async def client() -> list[Received]:
        return [await received(place["url"], request) for request in left]

    return [one for each in await asyncio.gather(*(client() for _ in range(work.at_once))) for one in each]


def median(rounds: list[Figures]) -> Figures:
    """Return the median of each figure."""
    names = asdict(rounds[0])
    return Figures(**{name: statistics.median(getattr(one, name) for one in rounds) for name in names})


def told(name: str, streams: int, found: Figures) -> str:
    """Format the figures in one line."""
    return (
        f"{streams:4} streams, {name}: {found.tokens_per_s:8,.0f} tokens/s"
        f" ({found.tokens_per_s / found.alone_tokens_per_s:.1%} of {found.alone_tokens_per_s:,.0f} alone);"
        f" us/token: engine {found.engine_us:.1f} (alone {found.alone_us:.1f}),"
        f" neighbours {found.neighbours_us:.1f}, web {found.web_us:.1f}, client {found.client_us:.1f};"
        f" first token {found.first_ms:.1f} ms, a request {found.request_ms:.2f} ms"
    )


@contextmanager
def checkpoint() -> Iterator[Path]:
    """Provide a model that loads at once, with tokens that are words."""
    import torch

    from benchmarks.random_checkpoint import CHECKPOINTS, write_checkpoint

    with tempfile.TemporaryDirectory(prefix="random-") as folder:
        write_checkpoint(Path(folder), CHECKPOINTS["tiny"] | {"vocab_size": WORDS}, torch.device("cpu"))
        yield Path(folder)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--older", type=Path, action="append", default=[], help="another tree; may be repeated"
    )
    parser.add_argument("--streams", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--inputs", type=numbers, default=[64, 256], help="least and most tokens of a prompt")
    parser.add_argument("--outputs", type=numbers, default=[128, 128], help="least and most of an answer")
    parser.add_argument("--pace", default=PACE, help="STREAMS:TOKENS/S,...; none: no waiting")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds: dict[int, dict[str, list[Figures]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint())
        places = {"this tree": HERE} | {f"older tree {tree}": tree.resolve() for tree in given.older}
        most = max(given.streams)
        trees = {name: Tree(place, folder, most, given.pace, stack) for name, place in places.items()}
        for streams in given.streams:
            for attempt in range(given.repeats + 1):
                work = workload(streams, given.inputs, given.outputs, WORDS - 4, 1000 * streams + attempt)
                # The first tree finds a cooler machine, so a different one is first each time.
                turns = deque(trees.items())
                turns.rotate(attempt)
                for name, tree in turns:
                    found = tree.round(work)
                    if attempt:
                        rounds.setdefault(streams, {}).setdefault(name, []).append(found)
            for name in trees:
                print(told(name, streams, median(rounds[streams][name])), flush=True)
    if given.json is not None:
        figures = {
            streams: {name: asdict(median(several)) for name, several in by_name.items()}
            for streams, by_name in rounds.items()
        }
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
