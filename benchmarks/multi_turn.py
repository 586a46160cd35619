"""A chat of 20 turns with a thinking model: how much is computed from Enter to the first token, and how long it takes.

    python -m benchmarks.multi_turn --json benchmarks/results/multi_turn.json --svg benchmarks/results/multi_turn.svg
        [--turns 20] [--chats 3] [--llama-python python] [--think-cache exact]

All sides get the same prompts as token ids and the same stream of answers: 400 tokens of thinking and 150 of answer
(see `scripted_chat.py`). They take turns message by message, so that all are affected equally by a noisy machine.
Medians over our chats are reported, except for the goal on computed tokens, which counts the maximum over all turns
of all chats: all rows of all steps, including idle ones, that ended between Enter and the first token. A first token
that was drawn before Enter leaves none. Our side uses `engine.chat` as the screen does: `settle` when an answer ends,
`prepare` with the growing draft while a person types for two seconds, then `send`. That person reads for two seconds,
types six characters a second and presses Enter as the next key; the rest of a longer message was there (pasted) when
typing began. The peers cannot use that time: they get the prompt at Enter. They take minutes and compute the same
tokens in every chat, so they only take part in the first one, and transformers that recomputes every prompt is timed
at turns 1, 2 and every fifth.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.chart import Chart, Line, page
from benchmarks.cpu_chat import Side, cpu_name, serve
from benchmarks.machine import Record

OURS, RECOMPUTE, KEPT, LLAMA = "chatterm", "transformers, anew", "transformers, kept cache", "llama.cpp"
COLOURS = {OURS: "#0b6e4f", RECOMPUTE: "#b0413e", KEPT: "#d98e04", LLAMA: "#3d5a98"}
THINK, ANSWER = 400, 150
READING_S, TYPING_S, RATE = 2.0, 2.0, 6.0
"""Seconds from the end of an answer to the first key, from there to Enter, and characters per second: a fast person."""
CONTEXT = 8192
GOAL_FLAT, GOAL_TOKENS, GOAL_FEWER = 1.1, 16, 10.0


def our_side(pipe: Connection, think_cache: str, stride: int, ahead: bool) -> None:
    """Serve chats with the engine; the parent process says what is typed and what is answered."""
    from benchmarks.scripted_chat import follow_script, strokes, thinking_tokenizer
    from engine import Engine, SamplingParams
    from engine.conversation.chat import Chat
    from models.hub.sources import resolve

    files = resolve("smollm2")
    assert files.gguf is not None
    engine = Engine.load(files, device="cpu", context=CONTEXT)
    engine.tokenizer = thinking_tokenizer(files.gguf)
    scripted = follow_script(engine, stride)
    chats: list[Chat] = []
    params = SamplingParams(temperature=0.0, speculation="auto")  # as the screen sets it

    def open_chat(system: str) -> str:
        chats[:] = [engine.chat(system=system, think_cache="mask" if think_cache == "mask" else "exact")]
        return str(engine.dtype).removeprefix("torch.")

    def ask(
        user: str, stream: list[int], prompt: list[int], reading_s: float, typing_s: float
    ) -> dict[str, Any]:
        chat, scripted.answer = chats[0], stream
        time.sleep(reading_s)
        began = time.perf_counter()
        for at, draft in strokes(user, typing_s, RATE):
            time.sleep(max(at - (time.perf_counter() - began), 0.0))
            chat.prepare(draft, params=params if ahead else None)
        time.sleep(max(typing_s - (time.perf_counter() - began), 0.0))
        began = time.perf_counter()
        events = chat.send(user, params)
        next(events)
        ttft_s = time.perf_counter() - began
        asked = chat._asked
        assert asked is not None
        for _ in events:
            pass
        chat.settle()
        assert chat.last is not None
        same = chat.last.token_ids == stream and chat.history.token_ids[: len(prompt)] == prompt
        computed = scripted.rows_between(began, asked.first_token)
        scripted.steps.clear()
        return {"computed": computed, "ttft_s": ttft_s, "same": same}

    serve(pipe, {"open": open_chat, "ask": ask})
    engine.close()


def transformers_side(pipe: Connection, kept: bool, dtype: str) -> None:
    """Serve one of the two ways to use transformers."""
    import torch

    from benchmarks.peers.chats import KeptCache, Recompute, gguf_network
    from models.hub.sources import resolve

    path = resolve("smollm2").gguf
    assert path is not None
    network = gguf_network(path, getattr(torch, dtype))
    peer = KeptCache(network) if kept else Recompute(network)
    serve(pipe, {"open": peer.open, "ask": lambda prompt: _plain(peer.ask(prompt)), "hear": peer.hear})


def llama_side(pipe: Connection, python: str, threads: int) -> None:
    """Serve llama.cpp; if it is missing, serve the reason."""
    from benchmarks.peers.chats import LlamaCppChat
    from models.hub.sources import resolve

    path = resolve("smollm2").gguf
    assert path is not None
    try:
        peer = LlamaCppChat(Path(python), path, CONTEXT, threads)
    except RuntimeError as error:
        why = str(error)
        return serve(pipe, {"open": lambda: None, "why": lambda: why, "version": lambda: None})
    serve(
        pipe,
        {
            "open": peer.open,
            "ask": lambda prompt: _plain(peer.ask(prompt)),
            "hear": peer.hear,
            "why": lambda: None,
            "version": lambda: peer.version,
        },
    )
    return peer.close()


def _plain(asked: Any) -> dict[str, Any]:
    return {"computed": asked.computed, "ttft_s": asked.ttft_s}


def verdicts(
    computed: dict[str, list[list[int]]], ttft: dict[str, list[float | None]]
) -> list[tuple[str, str, bool]]:
    """Return the goals as (goal, result, whether it was reached), without goals that need more turns.

    `computed` is by side, chat and turn; `ttft` by side and turn.
    """
    mine, found = computed[OURS], []
    times = [seconds for seconds in ttft[OURS] if seconds is not None]
    if len(times) >= 2:
        ratio = times[-1] / times[1]
        name = f"TTFT at turn {len(times)} at most {GOAL_FLAT} times turn 2"
        told = f"{ratio:.2f} times ({times[1] * 1e3:.2f} ms, {times[-1] * 1e3:.2f} ms)"
        found.append((name, told, ratio <= GOAL_FLAT))
    most = max(max(tokens) for tokens in mine)
    chat, turn = next((c, tokens.index(most)) for c, tokens in enumerate(mine) if most in tokens)
    name = f"tokens computed after Enter at most {GOAL_TOKENS} in every turn"
    found.append((name, f"{most} at most, in turn {turn + 1} of chat {chat + 1}", most <= GOAL_TOKENS))
    sums = {peer: min(map(sum, chats)) for peer, chats in computed.items() if peer != OURS}
    if sums:
        best, ours = min(sums, key=lambda peer: sums[peer]), max(map(sum, mine))
        name = f"at least {GOAL_FEWER:.0f} times fewer than the best peer over the chat"
        times_fewer = f", {sums[best] / ours:.1f} times fewer" if ours else ""
        told = f"{ours:,} where {best} computes {sums[best]:,}{times_fewer}"
        found.append((name, told, sums[best] >= GOAL_FEWER * ours))
    return found


def table(computed: dict[str, list[int]], ttft: dict[str, list[float | None]]) -> str:
    """Format one line per turn: tokens after Enter, and TTFT in milliseconds."""
    lines = [f"{'turn':<6}" + "".join(f"{name:>27}" for name in computed)]
    for turn in range(len(computed[OURS])):
        times = [ttft[name][turn] for name in computed]
        shown = ["-" if seconds is None else f"{seconds * 1e3:,.1f} ms" for seconds in times]
        cells = [
            f"{computed[name][turn]:,} tok{time:>14}" for name, time in zip(computed, shown, strict=True)
        ]
        lines.append(f"{turn + 1:<6}" + "".join(f"{cell:>27}" for cell in cells))
    sums = [f"{sum(tokens):,} tok{'':>14}" for tokens in computed.values()]
    return "\n".join([*lines, f"{'all':<6}" + "".join(f"{cell:>27}" for cell in sums)])


def picture(computed: dict[str, list[int]], ttft: dict[str, list[float | None]], below: str) -> str:
    """Draw both figures over the turns, as SVG."""
    tokens = [Line(n, COLOURS[n], [*map(float, each)]) for n, each in computed.items()]
    times = [Line(n, COLOURS[n], [None if t is None else t * 1e3 for t in ttft[n]]) for n in computed]
    charts = [Chart("Tokens computed after Enter", tokens), Chart("Time to first token, ms", times)]
    return page("From Enter to the first token, turn by turn", charts, below)


class Bench:
    """The sides and the figures of one run: by side, a list of chats, each a list of turns."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.turns: int = arguments.turns
        self.chats: int = arguments.chats
        self.reading_s: float = arguments.reading
        self.typing_s: float = arguments.typing
        self.began = time.monotonic()
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # for torch in the processes of the sides
        self.runs: dict[str, list[list[dict[str, Any]]]] = {}
        self.ours = Side(our_side, arguments.think_cache, arguments.stride, not arguments.no_ahead)
        self.dtype: str = self.ours("open", "hello")
        self.peers: dict[str, Side] = {}
        self.versions: dict[str, str | None] = {n: version(n) for n in ("torch", "transformers")}
        if "transformers" in arguments.peers:
            self.peers[RECOMPUTE] = Side(transformers_side, False, self.dtype)
            self.peers[KEPT] = Side(transformers_side, True, self.dtype)
        if "llama.cpp" in arguments.peers:
            llama = Side(llama_side, arguments.llama_python, arguments.threads)
            if (why := llama("why")) is not None:
                print(f"{LLAMA} is left out: {why}", flush=True)
                llama.close()
            else:
                self.peers[LLAMA], self.versions["llama-cpp-python"] = llama, llama("version")

    def chat(self, seed: int, note: bool) -> None:
        """Play one conversation with all sides that take part; without `note` it only warms up."""
        from benchmarks.scripted_chat import script, thinking_tokenizer
        from models.hub.sources import resolve

        path = resolve("smollm2").gguf
        assert path is not None
        turns = self.turns if note else min(self.turns, 2)
        system, exchanges = script(thinking_tokenizer(path), turns, THINK, ANSWER, seed)
        peers = {} if self.runs else self.peers
        self.ours("open", system)
        for peer in peers.values():
            peer("open")
        notes: dict[str, list[dict[str, Any]]] = {name: [] for name in (OURS, *peers)}
        for turn in exchanges:
            mine = self.ours("ask", turn.user, turn.stream, turn.prompt, self.reading_s, self.typing_s)
            if not mine.pop("same"):
                raise SystemExit(
                    "Our prompt or answer is not that of the script; the figures would not compare."
                )
            notes[OURS].append(mine)
            for name, peer in peers.items():
                number = len(notes[name]) + 1
                # Its number of tokens is known, and it takes minutes.
                if name == RECOMPUTE and number > 2 and number % 5:
                    notes[name].append({"computed": len(turn.prompt), "ttft_s": None})
                    continue
                notes[name].append(peer("ask", turn.prompt))
                peer("hear", turn.stream)
            if note:
                told = ", ".join(f"{name} {figures[-1]['computed']:,}" for name, figures in notes.items())
                print(
                    f"  turn {len(notes[OURS])}: {told}  [{time.monotonic() - self.began:.0f} s]", flush=True
                )
        if note:
            for name, figures in notes.items():
                self.runs.setdefault(name, []).append(figures)

    def computed(self) -> dict[str, list[list[int]]]:
        """Return the tokens after Enter by side: for each of its chats, one number per turn."""
        return {
            name: [[figures["computed"] for figures in chat] for chat in chats]
            for name, chats in self.runs.items()
        }

    def ttft(self) -> dict[str, list[float | None]]:
        """Return the median seconds to the first token by side and turn; None where it was not measured."""
        found: dict[str, list[float | None]] = {}
        for name, chats in self.runs.items():
            each = [[chat[turn]["ttft_s"] for chat in chats] for turn in range(self.turns)]
            found[name] = [None if None in times else statistics.median(times) for times in each]
        return found

    def close(self) -> None:
        for side in (self.ours, *self.peers.values()):
            side.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--chats", type=int, default=3, help="medians over so many chats of ours")
    parser.add_argument("--reading", type=float, default=READING_S, help="seconds until the first key")
    parser.add_argument("--typing", type=float, default=TYPING_S, help="seconds from the first key to Enter")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of everybody; 1 on a busy machine"
    )
    parser.add_argument("--stride", type=int, default=64, help="tokens of our stream that one step takes in")
    parser.add_argument("--think-cache", choices=("exact", "mask"), default="exact")
    parser.add_argument(
        "--no-ahead", action="store_true", help="our drafts are only warmed, no token is drawn ahead"
    )
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["transformers", "llama.cpp"])
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--json", type=Path, help="write the figures here after every chat")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    arguments = parser.parse_args()
    if arguments.turns < 1 or arguments.chats < 1:
        parser.error("--turns and --chats must be 1 or more")
    return arguments


def main() -> None:
    arguments, began = parse(), time.monotonic()
    bench = Bench(arguments)
    facts = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "ahead": not arguments.no_ahead,
        "dtype": bench.dtype,
        "versions": bench.versions,
        "think_cache": arguments.think_cache,
        "think_tokens": THINK,
        "answer_tokens": ANSWER,
        "reading_s": bench.reading_s,
        "typing_s": bench.typing_s,
        "chats": bench.chats,
    }
    record = Record(arguments.json, facts, merge=False)
    say: Callable[..., None] = lambda *what: print(*what, flush=True)  # noqa: E731
    head = (
        f"{cpu_name()}, {arguments.threads} of {os.cpu_count()} cores, {bench.dtype}; SmolLM2-135M, {THINK} tokens of "
        f"thinking and {ANSWER} of answer a turn; {bench.chats} chat(s), medians"
    )
    say(head)
    bench.chat(seed=1000, note=False)
    for seed in range(bench.chats):
        bench.chat(seed, note=True)
        say(f"  chat {seed + 1} of {bench.chats}  [{time.monotonic() - began:.0f} s]")
        record.add(bench.runs, "runs")
    computed, ttft = bench.computed(), bench.ttft()
    bench.close()
    usual = {
        name: [round(statistics.median(turn)) for turn in zip(*chats, strict=True)]
        for name, chats in computed.items()
    }
    record.add({"tokens_after_enter": usual, "ttft_s": ttft}, "medians")
    say(table(usual, ttft))
    for goal, told, reached in verdicts(computed, ttft):
        say(f"{'reached' if reached else 'NOT REACHED':<13}{goal}: {told}")
        record.add({"found": told, "reached": reached}, "goals", goal)
    if arguments.svg:
        arguments.svg.write_text(picture(usual, ttft, head))
    say(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
