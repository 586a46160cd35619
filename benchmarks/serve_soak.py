"""Clients of all kinds for half an hour: nothing may leak, no text may be wrong, and every client gets its answers.

    python -m benchmarks.serve_soak [MODEL] [--minutes 30] [--clients 50] [--seed 0] [--max-running 16] [--json FILE]

`chatterm serve` runs with the real engine. Most clients speak HTTP: they ask for chats, several answers,
log-probabilities, schemas, tools, completions, responses and Ollama's chats, streamed or not. They read to the end,
disconnect in the middle or before the answer, read slowly, or send garbage. One in ten is a terminal that attaches,
chats, and now and then dies in the middle of an answer; some of these are processes that are killed. One client asks
for /health all the time.

Every answer that is read to its end must equal the one that the same request gets alone with the same seed. Some
requests are asked alone beforehand; a sample of the others (each of which is unique) is asked alone afterwards.
Equality holds for quantised weights on a CPU. In the middle and at the end all clients pause. Then nothing may run,
and no block of the KV cache may be held. At the end, neither process may have more file descriptors, sockets, threads
or memory than in the middle.
"""

import argparse
import asyncio
import json
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve import percentile
from benchmarks.soak_plans import Plan, essence, garbage, plan
from benchmarks.soak_server import RunningServer, chatterm_server
from benchmarks.soak_terminals import Talk, killed_run, noise, talk

KNOWN = 64
"""Plans that many clients ask for; each is asked alone beforehand."""
SAMPLED = 100
"""How many answers to plans of single clients are compared afterwards."""
PATIENCE = 180.0
"""Seconds within which an answer has to come. The limit detects missing answers, not a slow machine."""
MOST_GROWTH = 24 * 2**20
"""Bytes that the second half may add to a process: gaps of the allocator, and the answers that the engine remembers to
recognise them later (`engine.conversation.token_recall`)."""

POOLED = 4 + min(32, (os.cpu_count() or 1) + 4)
"""Threads that the pools of a process may start late: those for requests, and those of the event loop."""


class NoAnswer(Exception):
    """The server sent nothing, or stopped in the middle."""


@dataclass(slots=True)
class Seen:
    """The results of the soak."""

    did: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    faults: list[str] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    held: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    """Counters of the engine at the end."""
    unsampled: dict[int, Any] = field(default_factory=dict)
    """Essences of plans that only one client asks for, by number."""


class Wire:
    """A connection to the server that speaks just enough HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Wire":
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port))

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the server's reply tells why
            self._writer.write(data)
            await self._writer.drain()

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Send a request."""
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        await self.send(head.encode() + data)

    async def answer(self, most: int | None = None, pause_s: float = 0.0) -> tuple[int, bytes]:
        """Return the status and the body, or `most` chunks of it. Raises NoAnswer."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._answer(most, pause_s)
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise NoAnswer(f"no whole answer: {error!r}") from None
        except TimeoutError:
            raise NoAnswer(f"no answer in {PATIENCE:.0f} s") from None

    async def _answer(self, most: int | None, pause_s: float) -> tuple[int, bytes]:
        status = int((await self._reader.readuntil(b"\r\n")).split()[1])
        headers = {}
        while (line := (await self._reader.readuntil(b"\r\n")).strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if headers.get(b"transfer-encoding") != b"chunked":
            return status, await self._reader.readexactly(int(headers.get(b"content-length", b"0")))
        chunks = list[bytes]()
        while most is None or len(chunks) < most:
            size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
            chunk = await self._reader.readexactly(size + 2)
            if not size:
                break
            chunks.append(chunk[:-2])
            await asyncio.sleep(pause_s)
        return status, b"".join(chunks)

    async def rest(self, seconds: float) -> bytes:
        """Return the bytes that arrive before the server closes the connection; b"" if that takes longer."""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                return await self._reader.read(65_536)
        return b""

    async def close(self, abruptly: bool = False) -> None:
        if abruptly:
            peer = self._writer.get_extra_info("socket")
            with suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Soak:
    """All clients of one server."""

    def __init__(
        self,
        server: RunningServer,
        clients: int,
        seed: int,
        *,
        tools: bool = True,
        garbage_s: float = 60.0,
        rest_s: float = 1.0,
        known: int = KNOWN,
    ) -> None:
        self.server, self.seen = server, Seen()
        self._garbage_s = garbage_s
        self._rest_s, self._known = rest_s, known
        self._clients, self._seed, self._tools = clients, seed, tools
        self._alone: dict[int, Any] = {}
        """Essences of the known plans."""
        self._talks: dict[int, list[str]] = {}
        self._next = 10_000
        self._until = 0.0

    def plan(self, number: int) -> Plan:
        return plan(number, self.server.model, tools=self._tools)

    # -- one request

    async def alone(self, number: int) -> Any:
        """Ask a plan and return the essence of its answer. Raises NoAnswer, and ValueError for an invalid answer."""
        asked = self.plan(number)
        wire = await Wire.to(self.server.url)
        try:
            await wire.ask(asked.path, asked.body)
            status, data = await wire.answer()
            if status != 200:
                raise ValueError(f"status {status}: {data[:200]!r}")
            return essence(asked, data)
        finally:
            await wire.close()

    async def _request(self, wire: Wire, random: Random, *, known: bool, pause_s: float = 0.0) -> None:
        """Ask, read to the end, and compare."""
        if known:
            number = random.randrange(self._known)
        else:
            number, self._next = self._next, self._next + 1
        asked = self.plan(number)
        await wire.ask(asked.path, asked.body)
        status, data = await wire.answer(pause_s=pause_s)
        self.seen.statuses[f"{asked.kind} {status}"] += 1
        if status != 200:
            self._fault(f"plan {number} ({asked.kind}): status {status}: {data[:200]!r}")
            return
        try:
            found = essence(asked, data)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self._fault(f"plan {number} ({asked.kind}): {error!r:.200}")
            return
        if known:
            self._compare(f"plan {number} ({asked.kind})", found, self._alone[number])
        else:
            self.seen.unsampled[number] = found

    def _compare(self, what: str, found: Any, alone: Any) -> None:
        self.seen.compared += 1
        if found != alone:
            self._fault(f"{what}: {found!r:.400} in company, {alone!r:.400} alone")

    def _fault(self, text: str) -> None:
        self.seen.faults.append(text)
        print(f"FAULT: {text}", flush=True)

    # -- clients

    async def _web(self, number: int) -> None:
        """Run a client that comes and goes until the time is over."""
        random = Random(f"{self._seed} {number} {self._until == 0.0}")
        wire, before = await Wire.to(self.server.url), "nothing"
        while time.monotonic() < self._until:
            what = random.choices(
                ("whole", "leaves", "shy", "garbage", "slow", "looks", "crowd"), (50, 18, 8, 8, 4, 8, 4)
            )[0]
            self.seen.did[what] += 1
            keeps = False
            try:
                keeps = await self._act(what, wire, random)
            except NoAnswer as error:
                self._fault(f"client {number}, {what} after {before}: {error}")
            before = what
            if not keeps or random.random() < 0.4:
                await wire.close(abruptly=random.random() < 0.3)
                await asyncio.sleep(random.random() * 0.2)
                wire, before = await Wire.to(self.server.url), "nothing"
        await wire.close()

    async def _act(self, what: str, wire: Wire, random: Random) -> bool:
        """Do something; return whether the connection can be used again."""
        match what:
            case "whole" | "slow":
                await self._request(
                    wire, random, known=random.random() < 0.7, pause_s=0.05 if what == "slow" else 0
                )
                return True
            case "crowd":  # several at once
                wires = [await Wire.to(self.server.url) for _ in range(3)]
                await asyncio.gather(*(self._request(each, random, known=True) for each in wires))
                for each in wires:
                    await each.close()
            case "leaves":  # in the middle of the answer
                asked = self.plan(random.randrange(self._known))
                await wire.ask(asked.path, asked.body | ({"stream": True} if "stream" in asked.body else {}))
                await wire.answer(most=random.randrange(1, 6))
            case "shy":  # before the answer
                asked = self.plan(random.randrange(self._known))
                await wire.ask(asked.path, asked.body)
                await asyncio.sleep(random.choice((0.0, 0.005, 0.1)))
            case "garbage":
                await wire.send(garbage(random, self.server.model))
                if random.random() < 0.5:
                    said = await wire.rest(self._garbage_s)
                    if said and not said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")):
                        self._fault(f"garbage was answered with {said[:80]!r}")
            case "looks":
                for path, status in (
                    ("/v1/models", 200),
                    ("/metrics", 200),
                    ("/api/tags", 200),
                    ("/nothing", 404),
                ):
                    await wire.ask(path)
                    if (found := (await wire.answer())[0]) != status:
                        self._fault(f"{path}: {found}")
        return False

    async def _terminal(self, number: int) -> None:
        random = Random(f"{self._seed} terminal {number}")
        while time.monotonic() < self._until:
            what = random.choices(("chats", "dies", "killed", "noise"), (50, 25, 15, 10))[0]
            self.seen.did[f"terminal {what}"] += 1
            which = random.randrange(8)
            asked = Talk.of(which, self.server.given)
            try:
                async with asyncio.timeout(PATIENCE):
                    match what:
                        case "chats":
                            found = await asyncio.to_thread(talk, asked)
                            self._compare(f"terminal chat {which}", found, self._talks[which])
                        case "dies":
                            await asyncio.to_thread(talk, asked, random.randrange(1, 20))
                        case "killed":
                            await killed_run(self.server.given, random)
                        case "noise":
                            await asyncio.to_thread(noise, random)
            except Exception as error:  # noqa: BLE001 - any error is a fault
                self._fault(f"terminal {number}, {what}: {error!r:.300}")

    async def _health(self) -> None:
        while time.monotonic() < self._until:
            began = time.monotonic()
            wire = await Wire.to(self.server.url)
            try:
                await wire.ask("/health")
                status, _ = await wire.answer()
                if status != 200:
                    self._fault(f"/health: {status}")
            except NoAnswer as error:
                self._fault(f"/health: {error}")
            await wire.close()
            self.seen.health_s.append(time.monotonic() - began)
            await asyncio.sleep(0.25)

    # -- the whole

    async def prepare(self) -> None:
        """Ask the known plans alone."""
        for number in range(self._known):
            self._alone[number] = await self.alone(number)
        for number in range(8):
            self._talks[number] = await asyncio.to_thread(talk, Talk.of(number, self.server.given))

    async def half(self, seconds: float, name: str) -> None:
        """Run all clients for `seconds`, then pause and check that nothing is left."""
        self._until = time.monotonic() + seconds
        terminals = max(self._clients // 10, 1)
        clients = [self._terminal(number) for number in range(terminals)]
        clients += [self._web(number) for number in range(self._clients - terminals)]
        await asyncio.gather(self._health(), *clients)
        await self._pause(name)

    async def _pause(self, name: str) -> None:
        left = ""
        for _ in range(600):
            left = await asyncio.to_thread(self._left)
            if not left:
                break
            await asyncio.sleep(0.1)
        else:
            self._fault(f"{name}: a minute later there is still {left}")
        # Connections may close later than reported, and memory is given back only now and then.
        await asyncio.sleep(self._rest_s)
        self.seen.held[name] = {which: asdict(held) for which, held in self.server.held().items()}

    def _left(self) -> str:
        """Describe the work that is still running; "" if there is none."""
        from chatterm.backends.failover import connect_to_server
        from chatterm.server.service import Metrics

        found = connect_to_server("command")
        if found is None:
            return "no engine process"
        try:
            metrics = found[0].ask("metrics", None, Metrics, PATIENCE)
        finally:
            found[0].close()
        counters = ("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")
        self.seen.engine = {name: sum(getattr(model, name) for model in metrics.models) for name in counters}
        names = ("running", "waiting", "preempted", "kv_usage", "users")
        left = [
            f"{name} {getattr(model, name)}"
            for model in metrics.models
            for name in names
            if getattr(model, name)
        ]
        if metrics.terminals:
            left.append(f"terminals {metrics.terminals}")
        return ", ".join(left)

    async def afterwards(self, most: int) -> None:
        """Ask a sample of the other plans again, alone, and compare."""
        numbers = sorted(self.seen.unsampled)
        for number in Random(self._seed).sample(numbers, min(most, len(numbers))):
            self._compare(f"plan {number}", self.seen.unsampled[number], await self.alone(number))

    def check(self) -> None:
        """Check that nothing has grown, and that the log has no errors."""
        middle, end = self.seen.held["middle"], self.seen.held["end"]
        for process, held in end.items():
            before = middle[process]
            for what in ("files", "sockets", "threads"):
                if held[what] > before[what] + (POOLED if what == "threads" else 0):
                    self._fault(
                        f"the {process} process has {held[what]} {what}, {before[what]} in the middle"
                    )
            if held["bytes"] > before["bytes"] + MOST_GROWTH:
                grown = (held["bytes"] - before["bytes"]) / 2**20
                self._fault(f"the {process} process has grown by {grown:.1f} MiB in the second half")
        said = self.server.said()
        if "Traceback" in said or "ended unexpectedly" in said:
            self._fault(f"the server's log: {said[-3000:]}")


def report(seen: Seen) -> str:
    """Describe what was done and checked."""
    lines = [
        "did: " + ", ".join(f"{name} {count:,}" for name, count in sorted(seen.did.items())),
        "answers: " + ", ".join(f"{name} {count:,}" for name, count in sorted(seen.statuses.items())),
        f"{seen.compared:,} answers were compared with those that the same requests got alone",
        "the engine: " + ", ".join(f"{name} {count:,}" for name, count in seen.engine.items()),
        f"/health answered {len(seen.health_s):,} times, p99 {percentile(seen.health_s, 99) * 1e3:.0f} ms, slowest"
        f" {max(seen.health_s, default=0.0) * 1e3:.0f} ms",
    ]
    for name, processes in seen.held.items():
        for process, held in processes.items():
            lines.append(
                f"{name:>7}, {process:>6} process: {held['bytes'] / 2**20:7.1f} MiB, {held['files']} files,"
                f" {held['sockets']} sockets, {held['threads']} threads"
            )
    lines.append(f"{len(seen.faults)} faults")
    return "\n".join(lines)


async def soak(
    server: RunningServer,
    seconds: float,
    clients: int,
    seed: int = 0,
    *,
    sampled: int = SAMPLED,
    tools: bool = True,
    garbage_s: float = 60.0,
    rest_s: float = 1.0,
    known: int = KNOWN,
    tell: Callable[[str], None] = print,
) -> Seen:
    """Run for `seconds`, and return what was seen, including faults."""
    found = Soak(server, clients, seed, tools=tools, garbage_s=garbage_s, rest_s=rest_s, known=known)
    await found.prepare()
    await found._pause("begin")
    tell(f"{known} requests were asked alone; {clients} clients begin")
    for name in ("middle", "end"):
        await found.half(seconds / 2, name)
        tell(f"--- {name}\n{report(found.seen)}")
    await found.afterwards(sampled)
    found.check()
    return found.seen


def main() -> None:
    """Parse the command line, run, and print the results; exit with code 1 if there are faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-running", type=int, default=16, help="fewer than clients: some wait for their turn"
    )
    parser.add_argument("--context", type=int, default=320, help="small: the KV cache is full now and then")
    parser.add_argument("--no-tools", action="store_true", help="the model cannot call any")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = ("--max-running", str(given.max_running), "--context", str(given.context))
    with chatterm_server(given.model, *options) as server:
        seen = asyncio.run(
            soak(
                server,
                given.minutes * 60,
                given.clients,
                given.seed,
                tools=not given.no_tools,
                rest_s=25.0,
            )
        )
    print(f"--- all\n{report(seen)}")
    if given.json is not None:
        figures = {
            name: getattr(seen, name) for name in ("did", "statuses", "compared", "engine", "held", "faults")
        }
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if seen.faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
