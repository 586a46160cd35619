"""A chat of 20 turns with a thinking model: how much is computed from Enter to the first token, and how long it takes.

    python -m benchmarks.multi_turn --json benchmarks/results/multi_turn.json --svg benchmarks/results/multi_turn.svg
        [--turns 20] [--chats 3] [--llama-python python] [--think-cache exact]
    python -m benchmarks.multi_turn --varied --shapes gemma4-e2b,lfm2.5-1.2b [--layers 10]

The model is the default one, or has random weights in the shapes of another, in Q8_0 with the vocabulary of the default
model. With `--varied`, turns are also retries, edits of the third last message, undo, messages in another branch and
restarts of the program (see `WAYS` in `scripted_chat.py`). What is computed after Enter is *new* as far as no earlier
prompt or answer had it in the same place; ours is to compute nothing else. llama.cpp keeps nothing over a restart, and
reads the same file. `--wait` is for models that are too large for this machine: the person is as slow as it needs.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chart import Chart, Line, page
from benchmarks.cpu_chat import Side, cpu_name, serve
from benchmarks.machine import Record
from benchmarks.options import names
from benchmarks.our_chat import CONTEXT, our_side
from benchmarks.scripted_chat import WAYS, Turn, script, thinking_tokenizer

OURS, RECOMPUTE, KEPT, LLAMA = "chatterm", "transformers, anew", "transformers, kept cache", "llama.cpp"
COLOURS = {OURS: "#0b6e4f", RECOMPUTE: "#b0413e", KEPT: "#d98e04", LLAMA: "#3d5a98"}
THINK, ANSWER = 400, 150
READING_S, TYPING_S = 2.0, 2.0
"""Seconds from the end of an answer to the first key, and from there to Enter: a fast person."""
SHAPES = {
    "smollm2": "smollm2",
    "qwen3-0.6b": "qwen3:0.6b",
    "gemma4-e2b": "gemma4:e2b",
    "lfm2.5-1.2b": "lfm2.5:1.2b",
    "qwen3.5-0.8b": "qwen3.5:0.8b",
}
"""The models by their names in the catalogue."""
WIDTH = 12
"""Columns of the first column of the table."""
GOAL_FLAT, GOAL_TOKENS, GOAL_FEWER = 1.1, 16, 10.0


def transformers_side(pipe: Connection, gguf: Path, kept: bool, dtype: str) -> None:
    """Serve one of the two ways to use transformers."""
    import torch

    from benchmarks.peers.chats import KeptCache, Recompute, gguf_network

    network = gguf_network(gguf, getattr(torch, dtype))
    peer = KeptCache(network) if kept else Recompute(network)
    serve(pipe, {"open": peer.open, "ask": lambda prompt: _plain(peer.ask(prompt)), "hear": peer.hear})


def llama_side(pipe: Connection, gguf: Path, python: str, threads: int) -> None:
    """Serve llama.cpp; if it is missing, serve the reason."""
    from benchmarks.peers.chats import LlamaCppChat

    try:
        peer = LlamaCppChat(Path(python), gguf, CONTEXT, threads)
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


def again_verdict(again: dict[str, list[list[int]]]) -> tuple[str, str, bool]:
    """Return the goal on tokens that are not new, by side, chat and turn, as `verdicts` does."""
    most, told = max(map(sum, again[OURS])), f"{max(map(sum, again[OURS])):,} in a chat"
    others = [f"{name} {max(map(sum, chats)):,}" for name, chats in again.items() if name != OURS]
    return "no token computed after Enter that is not new", "; ".join([told, *others]), most == 0


def table(
    computed: dict[str, list[int]], ttft: dict[str, list[float | None]], ways: Sequence[str] = ()
) -> str:
    """Format one line per turn: tokens after Enter, and TTFT in milliseconds."""
    lines = [f"{'turn':<{WIDTH}}" + "".join(f"{name:>27}" for name in computed)]
    for turn in range(len(computed[OURS])):
        times = [ttft[name][turn] for name in computed]
        shown = ["-" if seconds is None else f"{seconds * 1e3:,.1f} ms" for seconds in times]
        cells = [
            f"{computed[name][turn]:,} tok{time:>14}" for name, time in zip(computed, shown, strict=True)
        ]
        label = " ".join([str(turn + 1), *ways[turn : turn + 1]])
        lines.append(f"{label:<{WIDTH}}" + "".join(f"{cell:>27}" for cell in cells))
    sums = [f"{sum(tokens):,} tok{'':>14}" for tokens in computed.values()]
    return "\n".join([*lines, f"{'all':<{WIDTH}}" + "".join(f"{cell:>27}" for cell in sums)])


def picture(computed: dict[str, list[int]], ttft: dict[str, list[float | None]], below: str) -> str:
    """Draw both figures over the turns, as SVG."""
    tokens = [Line(n, COLOURS[n], [*map(float, each)]) for n, each in computed.items()]
    times = [Line(n, COLOURS[n], [None if t is None else t * 1e3 for t in ttft[n]]) for n in computed]
    charts = [Chart("Tokens computed after Enter", tokens), Chart("Time to first token, ms", times)]
    return page("From Enter to the first token, turn by turn", charts, below)


@contextmanager
def model_file(shape: str, layers: int | None) -> Iterator[Path]:
    """Provide a GGUF file: the default model, or random weights in Q8_0 with its vocabulary, of fewer `layers`."""
    from gguf import GGMLQuantizationType

    from benchmarks.random_checkpoint import shortened, with_vocabulary
    from benchmarks.random_gguf import write_random_gguf
    from engine.machine.shapes import CONFIGS
    from models.families.registry import spec_of_hf
    from models.hub.sources import resolve
    from models.weights.gguf import read_gguf

    default = resolve("smollm2").gguf
    assert default is not None
    if shape == "smollm2":
        yield default
        return
    metadata = read_gguf(default).metadata
    raw = with_vocabulary(CONFIGS[SHAPES[shape]], len(metadata["tokenizer.ggml.tokens"]))
    if layers is not None:
        raw = shortened(raw, layers)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{shape}.gguf"
        write_random_gguf(path, spec_of_hf(raw)[1], GGMLQuantizationType.Q8_0, CONTEXT, metadata)
        yield path


class Bench:
    """The sides and the figures of one model: by side, a list of chats, each a list of turns."""

    def __init__(self, arguments: argparse.Namespace, gguf: Path, store: Path | None) -> None:
        """`store` is a folder for our cache on disk if the program is started again."""
        self.turns: int = arguments.turns
        self.chats: int = arguments.chats
        self.reading_s: float = arguments.reading
        self.typing_s: float = arguments.typing
        self.varied: bool = arguments.varied
        self.began = time.monotonic()
        self.ways: list[str] = []
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # for torch in the processes of the sides
        self.runs: dict[str, list[list[dict[str, Any]]]] = {}
        self._gguf = gguf
        given = gguf, store, arguments.think_cache, arguments.stride, not arguments.no_ahead, arguments.wait
        self.ours = Side(our_side, *given)
        self.dtype: str = self.ours("open", "hello")
        self.versions: dict[str, str | None] = {n: version(n) for n in ("torch", "transformers")}
        self._starts: dict[str, Callable[[], Side]] = {}
        if "transformers" in arguments.peers and gguf.stem in SHAPES:
            print("transformers is left out: it takes part with the default model alone", flush=True)
        elif "transformers" in arguments.peers:
            self._starts[RECOMPUTE] = partial(Side, transformers_side, gguf, False, self.dtype)
            self._starts[KEPT] = partial(Side, transformers_side, gguf, True, self.dtype)
        if "llama.cpp" in arguments.peers:
            self._starts[LLAMA] = partial(Side, llama_side, gguf, arguments.llama_python, arguments.threads)
        self.peers = {name: start() for name, start in self._starts.items()}
        if (llama := self.peers.get(LLAMA)) is not None:
            self.versions["llama-cpp-python"] = llama("version")
            if (why := llama("why")) is not None:
                print(f"{LLAMA} is left out: {why}", flush=True)
                self.peers.pop(LLAMA).close()

    def chat(self, seed: int, note: bool) -> None:
        """Play one conversation with all sides that take part; without `note` it only warms up."""
        turns = self.turns if note else min(self.turns, 2)
        ways = WAYS if self.varied else WAYS[:1]
        system, exchanges = script(thinking_tokenizer(self._gguf), turns, THINK, ANSWER, seed, ways)
        peers = [] if self.runs else list(self.peers)
        self.ours("open", system)
        for name in peers:
            self.peers[name]("open")
        notes: dict[str, list[dict[str, Any]]] = {name: [] for name in (OURS, *peers)}
        for turn in exchanges:
            mine = self.ours("ask", turn, self.reading_s, self.typing_s)
            if not mine.pop("same"):
                raise SystemExit(
                    "Our prompt or answer is not that of the script; the figures would not compare."
                )
            notes[OURS].append(mine)
            for name in peers:
                notes[name].append(self._ask(name, turn, len(notes[name]) + 1))
            for figures in notes.values():
                figures[-1]["again"] = max(figures[-1]["computed"] - turn.new, 0)
            if note:
                told = ", ".join(f"{name} {figures[-1]['computed']:,}" for name, figures in notes.items())
                print(
                    f"  turn {len(notes[OURS])}, {turn.way}: {told}  [{time.monotonic() - self.began:.0f} s]",
                    flush=True,
                )
        if note:
            self.ways = [turn.way for turn in exchanges]
            for name, figures in notes.items():
                self.runs.setdefault(name, []).append(figures)

    def _ask(self, name: str, turn: Turn, number: int) -> dict[str, Any]:
        """Return the figures of a peer; it keeps nothing when the program is started again."""
        if turn.way == "restart":
            self.peers[name].close()
            self.peers[name] = self._starts[name]()
            self.peers[name]("open")
        # Its number of tokens is known, and it takes minutes.
        if name == RECOMPUTE and number > 2 and number % 5:
            return {"computed": len(turn.prompt), "ttft_s": None}
        found: dict[str, Any] = self.peers[name]("ask", turn.prompt)
        self.peers[name]("hear", turn.stream)
        return found

    def tokens(self, what: str) -> dict[str, list[list[int]]]:
        """Return the tokens after Enter by side: for each of its chats, one number per turn.

        `what` is "computed" for all of them, or "again" for those that are not new.
        """
        return {
            name: [[figures[what] for figures in chat] for chat in chats] for name, chats in self.runs.items()
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
    parser.add_argument("--shapes", type=names, default=["smollm2"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="of shapes other than smollm2; default: all")
    parser.add_argument(
        "--varied", action="store_true", help="edits, retries, undo, other branches and restarts, too"
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
    parser.add_argument(
        "--wait", action="store_true", help="type each key when our side has prepared what it can"
    )
    parser.add_argument("--peers", type=lambda text: text.split(","), default=["transformers", "llama.cpp"])
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--json", type=Path, help="write the figures here after every chat")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    arguments = parser.parse_args()
    if arguments.turns < 1 or arguments.chats < 1:
        parser.error("--turns and --chats must be 1 or more")
    if unknown := [shape for shape in arguments.shapes if shape not in SHAPES]:
        parser.error(f"--shapes: there is no {unknown[0]!r}; choose from {', '.join(SHAPES)}")
    if arguments.svg and len(arguments.shapes) > 1:
        parser.error("--svg draws one shape")
    return arguments


def run(arguments: argparse.Namespace, shape: str, gguf: Path, store: Path | None, record: Record) -> None:
    """Measure one model and print its figures."""
    began = time.monotonic()
    bench = Bench(arguments, gguf, store)
    say: Callable[..., None] = lambda *what: print(*what, flush=True)  # noqa: E731
    layers = f" with {arguments.layers} layers" if arguments.layers and shape != "smollm2" else ""
    head = (
        f"{cpu_name()}, {arguments.threads} of {os.cpu_count()} cores, {bench.dtype}; {shape}{layers}, {THINK} tokens "
        f"of thinking and {ANSWER} of answer a turn; {bench.chats} chat(s), medians"
    )
    say(head)
    record.add({"dtype": bench.dtype, "versions": bench.versions}, shape, "facts")
    bench.chat(seed=1000, note=False)
    for seed in range(bench.chats):
        bench.chat(seed, note=True)
        say(f"  chat {seed + 1} of {bench.chats}  [{time.monotonic() - began:.0f} s]")
        record.add(bench.runs, shape, "runs")
    computed, ttft, again = bench.tokens("computed"), bench.ttft(), bench.tokens("again")
    bench.close()
    usual = {
        name: [round(statistics.median(turn)) for turn in zip(*chats, strict=True)]
        for name, chats in computed.items()
    }
    record.add({"tokens_after_enter": usual, "ttft_s": ttft}, shape, "medians")
    say(table(usual, ttft, bench.ways if bench.varied else ()))
    for goal, told, reached in (*verdicts(computed, ttft), again_verdict(again)):
        say(f"{'reached' if reached else 'NOT REACHED':<13}{goal}: {told}")
        record.add({"found": told, "reached": reached}, shape, "goals", goal)
    if arguments.svg:
        arguments.svg.write_text(picture(usual, ttft, head))
    say(f"{time.monotonic() - began:.0f} s in all")


def main() -> None:
    arguments = parse()
    facts = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "ahead": not arguments.no_ahead,
        "wait": arguments.wait,
        "varied": arguments.varied,
        "layers": arguments.layers,
        "think_cache": arguments.think_cache,
        "think_tokens": THINK,
        "answer_tokens": ANSWER,
        "reading_s": arguments.reading,
        "typing_s": arguments.typing,
        "chats": arguments.chats,
    }
    record = Record(arguments.json, facts, merge=False)
    for shape in arguments.shapes:
        with model_file(shape, arguments.layers) as gguf, TemporaryDirectory() as folder:
            run(arguments, shape, gguf, Path(folder) if arguments.varied else None, record)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
