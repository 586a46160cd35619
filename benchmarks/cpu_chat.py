"""chatterm compared with llama.cpp on a CPU: the same file, the same threads, taking turns.

    python -m benchmarks.cpu_chat --llama-python PYTHON [--models smollm2 moe_q4_0] [--repeats 5] [--quick]
                                  [--threads 2] [--variant avx2] [--json benchmarks/results/cpu_chat.json]

The models are SmolLM2-135M-Instruct Q4_1 and random ones in Q8_0 and in Q4_0: one with the shapes of Qwen3-0.6B, a
small mixture of experts (16, of which a token uses 4) built like Qwen3-30B-A3B, and some with the shapes of LFM2.5-1.2B
and Qwen3.5-0.8B, or like those of GLM-4.7-Flash and DeepSeek-V2-Lite.
Each side is a process of its own; they take turns, and the idle one waits for a line of input and computes nothing.
Reported are medians, and the median of the ratios of the rounds. For chatterm, everything that a stream does counts
(scheduling, sampling, text); for llama.cpp (llama-cpp-python) only its `eval`. The first turn starts once both have
arranged their weights. Loading is measured in fresh processes, without imports, with the file in memory. Memory is the
largest resident set, including mapped weights and a KV cache for the longest context. Other programs on the same cores
distort the figures: the load before the run is printed.
`--llama-python` is an interpreter with llama-cpp-python if this one has none; without any, only chatterm is measured.
`--variant` makes chatterm use kernels for an older CPU; llama.cpp uses those it was built with, which are printed.
"""

import argparse
import importlib.util
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.llama_cpp_python import LlamaCppPython, PeerError, peak_bytes

if TYPE_CHECKING:
    from engine import Engine

CONTEXTS = (16, 512, 2048)
PREFILLS = (32, 512, 2048)
DECODE_TOKENS = 32
PAUSE = 0.1
"""Seconds between two turns: the threads of the previous side may spin for some milliseconds more."""
MODELS = (
    *("smollm2", "q8_0", "q4_0", "moe_q8_0", "moe_q4_0", "lfm2_q8_0", "lfm2_q4_0"),
    *("glm_q8_0", "glm_q4_0", "deepseek_q8_0", "deepseek_q4_0", "qwen35_q8_0", "qwen35_q4_0"),
)


def use_variant(name: str | None) -> None:
    """Make this process use the native kernels of variant `name` from now on; None: the best ones."""
    from engine.kernels.native import library as native

    if name is not None:
        number = native.library().variants[name]
        vars(native)["NativeLibrary"].best = property(lambda _: number)


def chatterm_side(pipe: Connection, path: Path, context: int, threads: int, variant: str | None) -> None:
    """Serve measurements of an engine on a GGUF file."""
    from engine import Engine, SamplingParams

    use_variant(variant)
    engine = Engine.load(str(path), device="cpu", context=context, threads=threads)
    wait_for_copies(engine)
    prompts: dict[int, list[int]] = {}

    def prefill(length: int, seed: int) -> float:
        ids = random_tokens(length, seed)
        began = time.perf_counter()
        next(engine.stream(ids, SamplingParams(temperature=0.0, max_tokens=1)))
        return time.perf_counter() - began

    def decode(length: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS + 1)
        seed = 10_000
        while True:
            ids = prompts.setdefault(length, random_tokens(length, seed))
            stream = engine.stream(ids, params)
            next(stream)
            began = time.perf_counter()
            count = sum(1 for _ in stream)
            if count == DECODE_TOKENS:
                return (time.perf_counter() - began) / count
            del prompts[length]  # the model ended its turn; ask something else
            seed += 1

    serve(
        pipe,
        {
            "prefill": prefill,
            "decode": decode,
            "peak": peak_bytes,
            "program": lambda: engine.figures().decode,
        },
    )


def wait_for_copies(engine: "Engine") -> None:
    """Wait until the idle engine has copied its weights as far as it will; it would take the other side's cores."""
    before = -1
    while (copied := engine.copied_bytes) != before:
        before = copied
        time.sleep(0.5)


def random_tokens(length: int, seed: int) -> list[int]:
    """Return random token ids; no two prompts share a prefix."""
    import torch

    return torch.randint(100, 49_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def serve(pipe: Connection, functions: dict[str, Callable[..., Any]]) -> None:
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        name, *arguments = job
        pipe.send(functions[name](*arguments))


class Side:
    """One side of the comparison, in its own process."""

    def __init__(self, target: Callable[..., None], *options: Any) -> None:
        """`target` receives its end of the pipe and the `options`."""
        self._pipe, theirs = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=target, args=(theirs, *options), daemon=True)
        self._process.start()
        self._pipe.recv()

    def __call__(self, *job: Any) -> Any:
        self._pipe.send(job)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def load_seconds(path: Path, threads: int) -> float:
    """Return the time that loading takes in a fresh process that has imported everything."""
    code = (
        "import os, sys, time; from engine import Engine; import torch; began = time.perf_counter();"
        f"Engine.load({str(path)!r}, device='cpu', context=2304, threads={threads});"
        "print(time.perf_counter() - began, flush=True); os._exit(0)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)


def ready_seconds(path: Path) -> float:
    """Return the time from the command to a loaded model, including Python's start and all imports."""
    code = f"from engine import Engine; Engine.load({str(path)!r}, device='cpu'); import os; os._exit(0)"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


@contextmanager
def model_file(name: str) -> Iterator[Path]:
    """Provide the GGUF file of one of MODELS; random ones exist only while they are needed."""
    if name == "smollm2":
        from models.hub.sources import resolve

        path = resolve(name).gguf
        assert path is not None
        yield path
        return
    from gguf import GGMLQuantizationType

    from benchmarks.random_gguf import LATENTS, MOE, write_random_gguf
    from benchmarks.shapes import SHAPES
    from engine.machine.shapes import known_shape

    *families, number, part = name.split("_")
    family, kind = families[0] if families else "qwen3", f"{number}_{part}"
    shapes = {"qwen3": SHAPES["0.6B"], "moe": MOE, "lfm2": known_shape("lfm2.5:1.2b")} | LATENTS
    shapes["qwen35"] = known_shape("qwen3.5:0.8b")
    spec = shapes[family]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{family}-{kind}.gguf"
        write_random_gguf(path, spec, GGMLQuantizationType[kind.upper()], 4096)
        yield path


class Bench:
    """One model on both sides."""

    def __init__(self, path: Path, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._path = path
        self._arguments = arguments
        self._context = max(*arguments.prefills, *arguments.contexts) + 4 * DECODE_TOKENS
        self._ours = Side(chatterm_side, path, self._context, arguments.threads, arguments.variant)
        stack.callback(self._ours.close)
        self._peer: LlamaCppPython | None = None
        if arguments.llama_python is not None:
            try:
                self._peer = stack.enter_context(self._start_peer())
            except PeerError as error:
                print(error, file=sys.stderr)
        self.program: str = self._ours("program")
        self.peer = self._peer and f"llama-cpp-python {self._peer.version}, {self._peer.built_for}"

    def run(self) -> dict[str, Any]:
        """Measure and print everything."""
        arguments, ours = self._arguments, self._ours
        print(f"{'':16}{'chatterm':>12}{'llama.cpp':>12}{'ratio':>8}")
        found: dict[str, Any] = {"decode": self.program, "peer": self.peer}
        for length in arguments.prefills:
            found[f"prefill {length}"] = self._prefill(length)
        for length in arguments.contexts:
            found[f"decode at {length}"] = self._decode(length)
        memory = [ours("peak") / 1e6, self._of_peer(lambda peer: peer.peak_bytes() / 1e6)]
        found["peak memory, MB"] = _line("peak memory, MB", *memory, digits=0)
        pairs = self._rounds(
            lambda _: load_seconds(self._path, arguments.threads), lambda _: self._peer_load_seconds()
        )
        found["load, s"] = _line("load, s", *_medians(pairs), digits=2)
        found["command to ready, s"] = statistics.median(
            ready_seconds(self._path) for _ in range(arguments.repeats)
        )
        print(f"{'command to ready, s':19}{found['command to ready, s']:9.2f}")
        return found

    def _prefill(self, length: int) -> dict[str, float | None]:
        pairs = self._rounds(
            lambda seed: self._ours("prefill", length, seed), lambda peer: peer.prefill(length)
        )
        return _rates(f"prefill {length}", length, pairs)

    def _decode(self, length: int) -> dict[str, float | None]:
        pairs = self._rounds(
            lambda _: self._ours("decode", length), lambda peer: peer.decode(length, DECODE_TOKENS)
        )
        return _rates(f"decode at {length}", 1, pairs)

    def _rounds(
        self, ours: Callable[[int], float], theirs: Callable[[LlamaCppPython], float]
    ) -> list[tuple[float, float | None]]:
        """Measure both in turns; the first round is discarded."""
        pairs: list[tuple[float, float | None]] = []
        for repeat in range(self._arguments.repeats + 1):
            mine = ours(repeat)
            time.sleep(PAUSE)
            pairs.append((mine, self._of_peer(theirs)))
            time.sleep(PAUSE)
        return pairs[1:]

    def _of_peer(self, ask: Callable[[LlamaCppPython], float]) -> float | None:
        """Return what `ask` measures of the peer; None if there is none or it has ended."""
        try:
            return ask(self._peer) if self._peer is not None else None
        except PeerError as error:
            print(error, file=sys.stderr)
            self._peer = None
            return None

    def _start_peer(self) -> LlamaCppPython:
        arguments = self._arguments
        return LlamaCppPython(arguments.llama_python, self._path, arguments.threads, self._context)

    def _peer_load_seconds(self) -> float:
        with self._start_peer() as peer:
            return peer.load_s


def _medians(pairs: list[tuple[float, float | None]]) -> tuple[float, float | None]:
    theirs = [b for _, b in pairs if b is not None]
    return statistics.median(a for a, _ in pairs), statistics.median(theirs) if theirs else None


def _rates(name: str, tokens: int, pairs: list[tuple[float, float | None]]) -> dict[str, float | None]:
    mine, theirs = _medians(pairs)
    ratios = [b / a for a, b in pairs if b is not None]
    ratio = statistics.median(ratios) if ratios else None
    return _line(name, tokens / mine, tokens / theirs if theirs else None, ratio, digits=1)


def _line(
    name: str, mine: float, theirs: float | None, ratio: float | None = None, *, digits: int
) -> dict[str, float | None]:
    """Print a row; the ratio is ours to theirs unless given."""
    if theirs is None:
        print(f"{name:16}{mine:12.{digits}f}")
        return {"chatterm": mine, "llama.cpp": None, "ratio": None}
    ratio = mine / theirs if ratio is None else ratio
    print(f"{name:16}{mine:12.{digits}f}{theirs:12.{digits}f}{ratio:8.2f}", flush=True)
    return {"chatterm": mine, "llama.cpp": theirs, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-python", help="an interpreter with llama-cpp-python; default: this one, if it has it"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="by default one model; short prompts, three repeats"
    )
    parser.add_argument(
        "--threads", type=int, help="default: physical cores, less one where there are more than two"
    )
    parser.add_argument(
        "--variant", help="of our native kernels: portable, avx2, ...; default: the best here"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    from engine.kernels.native import library as native
    from engine.kernels.native.library import default_threads

    known = tuple(native.library().variants)
    if arguments.variant not in (None, *known):
        parser.error(f"--variant: {arguments.variant!r} does not run here; choose from {', '.join(known)}")

    if arguments.llama_python is None and importlib.util.find_spec("llama_cpp") is not None:
        arguments.llama_python = sys.executable
    arguments.threads = arguments.threads or default_threads()
    arguments.prefills, arguments.contexts = PREFILLS, CONTEXTS
    if arguments.quick:
        arguments.models, arguments.repeats = arguments.models or MODELS[:1], 3
        arguments.prefills, arguments.contexts = PREFILLS[:2], CONTEXTS[:2]
    figures: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "torch": version("torch"),
        "repeats": arguments.repeats,
    }
    load = os.getloadavg()[0]
    figures["load before"] = load
    print(f"{cpu_name()}, {arguments.threads} threads on {os.cpu_count()} cores, load before {load:.1f}")
    print(f"Medians of {arguments.repeats}")
    for name in arguments.models or MODELS:
        with model_file(name) as path, ExitStack() as stack:
            bench = Bench(path, arguments, stack)
            print(f"\n{path.name}: {bench.program}" + (f"; {bench.peer}" if bench.peer else ""))
            figures[name] = bench.run()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
