"""The native CPU kernels: bytes of weights per second in every format; prefill and decode compared with llama.cpp.

    python -m benchmarks.native_kernels                                    formats and variants
    python -m benchmarks.native_kernels --gguf FILE [--llama-python PYTHON] [--threads 2] [--contexts 16 512 2048]
                                        [--prompts 32 512 2048] [--streams 1 2 4 8]

The rate of a format is shown beside that of plain reading by the same threads in the same round. Below it are the
multiplications per second with several rows of activations at once. Prompts and decode steps of both programs take
turns, with the same file and the same threads. Reported are medians, the median of the ratios of the rounds, and the
quickest rounds, which a busy machine disturbs least. Last is the total of tokens/s of several sequences that decode
together. `--llama-python` is an interpreter with llama-cpp-python if this one has none.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.peers.llama_cpp_python import LlamaCppPython, PeerError
from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native import library as native
from engine.kernels.native.library import Matrix, Pool
from models.files import ModelFiles
from models.loading.load import load_model

KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.BF16, Kind.F32)
BYTES = 96 << 20
"""The size of a matrix: more than most machines' caches hold, and about what SmolLM2 reads for a token."""
COLUMNS = 1536
BLOCK = 32


def formats(pool: Pool, repeats: int) -> None:
    """Print GB/s of a product in every format and variant; the first column is plain reading."""
    functions = pool.library.functions
    names = list(pool.library.variants)
    torch.set_num_threads(pool.threads)
    print(f"{'GB/s':8}{'reading':>10}" + "".join(f"{name:>10}" for name in names) + "   best / reading")
    for kind in KINDS:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = COLUMNS // block * size
        rows = BYTES // row_bytes
        # Random bytes are valid digits; scales that are not finite cost no more than others.
        data = np.random.default_rng(0).integers(0, 60, rows * row_bytes, dtype=np.uint8)
        matrix = Matrix(data.ctypes.data, row_bytes, int(kind), rows, COLUMNS)
        numbers = torch.from_numpy(data.view(np.float32))
        x, out = np.ones(COLUMNS, dtype=np.float32), np.empty(rows, dtype=np.float32)
        rates: dict[str, list[float]] = {name: [] for name in ("reading", *names)}
        with pool.held() as handle:
            for _ in range(repeats):
                for name, found in rates.items():
                    began = perf_counter()
                    if name == "reading":
                        numbers.sum()
                    else:
                        variant = pool.library.variants[name]
                        functions.ct_products(handle, variant, matrix, 1, x.ctypes.data, out.ctypes.data)
                    found.append(data.nbytes / (perf_counter() - began) / 1e9)
        medians = {name: statistics.median(found) for name, found in rates.items()}
        share = medians[names[-1]] / medians["reading"]
        print(f"{kind.name:8}" + "".join(f"{rate:10.1f}" for rate in medians.values()) + f"{share:13.2f}")


def many_rows(pool: Pool, counts: Sequence[int], repeats: int) -> None:
    """Print 10^9 multiplications per second with several rows of activations at once; the quickest of the repeats."""
    functions = pool.library.functions
    variants = pool.library.variants
    print("\n10^9/s  rows" + "".join(f"{count:>8}" for count in counts))
    for kind in KINDS:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = 1536
        data = np.random.default_rng(0).integers(0, 60, rows * COLUMNS // block * size, dtype=np.uint8)
        matrix = Matrix(data.ctypes.data, len(data) // rows, int(kind), rows, COLUMNS)
        for name, variant in variants.items():
            rates = []
            for count in counts:
                x, out = np.ones((count, COLUMNS), np.float32), np.empty((count, rows), np.float32)
                times = []
                with pool.held() as handle:
                    for _ in range(repeats):
                        began = perf_counter()
                        functions.ct_products(handle, variant, matrix, count, x.ctypes.data, out.ctypes.data)
                        times.append(perf_counter() - began)
                rates.append(count * rows * COLUMNS / min(times) / 1e9)
            print(f"{kind.name} {name:<9}" + "".join(f"{rate:8.0f}" for rate in rates))


class Ours:
    """Prompts and decode steps of chatterm, on a cache with arbitrary content."""

    def __init__(self, path: Path, pool: Pool, variant: int, context: int, streams: int = 1) -> None:
        model = load_model(ModelFiles(path.name, gguf=path), dtype=torch.bfloat16, device=torch.device("cpu"))
        attention, blocks = model.spec.attention, -(-context // BLOCK)
        shape = (len(model.layers), streams * blocks, BLOCK, attention.kv_heads, attention.head_dim)
        cache = KVCache.uniform(*shape, torch.bfloat16, torch.device("cpu"))
        cache.kv.normal_()
        self._decoder = NativeDecoder(model, cache, pool, variant)
        self._tables = [list(range(first * blocks, (first + 1) * blocks)) for first in range(streams)]

    def decode(self, context: int, tokens: int, streams: int = 1) -> float:
        """Return seconds per step for `tokens` decode steps of `streams` sequences from row `context` on."""
        began = perf_counter()
        for i in range(tokens):
            row, tables = context + i, self._tables[:streams]
            self._decoder.run([Span(tuple(t), row, 1, [row + 1000], [row], True) for t in tables])
        return (perf_counter() - began) / tokens

    def prefill(self, tokens: int) -> float:
        """Return seconds from a prompt of `tokens` tokens to its logits."""
        ids = [1000 + i % 1000 for i in range(tokens)]
        began = perf_counter()
        self._decoder.run([Span(tuple(self._tables[0]), 0, tokens, ids, range(tokens), True)])
        return perf_counter() - began


def rounds(
    ours: Ours, peer: LlamaCppPython | None, context: int, tokens: int, repeats: int
) -> Iterator[tuple[float, float]]:
    """Yield seconds per token of both programs, in turns."""
    for _ in range(repeats):
        yield ours.decode(context, tokens), of_peer(peer, lambda peer: peer.decode(context, tokens))


def of_peer(peer: LlamaCppPython | None, ask: Callable[[LlamaCppPython], float]) -> float:
    """Return what `ask` measures of the peer; NaN if there is none or it has ended."""
    try:
        return ask(peer) if peer is not None else math.nan
    except PeerError as error:
        print(error, file=sys.stderr)
        return math.nan


def compared(name: str, tokens: int, pairs: list[tuple[float, float]]) -> None:
    """Print the tokens/s of rounds of `tokens` tokens and their ratio; `pairs` has the seconds of both."""
    mine, its = (tokens / statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    best, quickest = (min(side) for side in zip(*pairs, strict=True))
    print(
        f"{name}: {mine:7.1f} tokens/s, llama.cpp {its:7.1f}, ratio {ratio:.2f} "
        f"(of the quickest rounds: {tokens / best:.1f} tokens/s, {quickest / best:.2f})"
    )


def streams_together(arguments: argparse.Namespace, ours: Ours) -> None:
    """Print the total of tokens/s of sequences that decode together, in turns, also relative to one alone."""
    for context in arguments.contexts:
        taken: dict[int, list[float]] = {count: [] for count in arguments.streams}
        for _ in range(arguments.repeats):
            for count, found in taken.items():
                found.append(ours.decode(context, arguments.tokens, count))
        rates = {count: count / statistics.median(found) for count, found in taken.items()}
        least = rates[min(rates)] / min(rates)
        line = ", ".join(f"{count}: {rate:.1f} ({rate / least:.2f})" for count, rate in rates.items())
        print(f"streams at {context:5}, tokens/s in total (of one stream): {line}")


def side_by_side(arguments: argparse.Namespace, pool: Pool) -> None:
    """Print tokens/s of prompts, and of decode steps at every context."""
    most = max(*arguments.prompts, max(arguments.contexts) + arguments.tokens) + BLOCK
    variant = pool.library.variants[arguments.variant or list(pool.library.variants)[-1]]
    ours = Ours(arguments.gguf, pool, variant, most, max(arguments.streams))
    peer = None
    if arguments.llama_python is not None:
        peer = LlamaCppPython(arguments.llama_python, arguments.gguf, pool.threads, most)
        print(f"llama-cpp-python {peer.version}, {pool.threads} threads")
    for prompt in arguments.prompts:
        pairs = []
        for _ in range(arguments.repeats + 1):
            theirs = of_peer(peer, lambda peer, prompt=prompt: peer.prefill(prompt))  # type: ignore[misc]
            pairs.append((ours.prefill(prompt), theirs))
        compared(f"prompt  {prompt:5}", prompt, pairs[1:])
    for context in arguments.contexts:
        list(rounds(ours, peer, context, 4, 2))  # warms up pages, clocks and caches
        compared(
            f"context {context:5}", 1, list(rounds(ours, peer, context, arguments.tokens, arguments.repeats))
        )
    streams_together(arguments, ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="a model to decode with; without one only the formats")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python to compare with")
    parser.add_argument("--threads", type=int, help="default: physical cores, less one for the screen")
    parser.add_argument("--variant", choices=native.VARIANT_NAMES, help="of the kernels; default: the best")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 512, 2048])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512, 2048])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8], help="that decode together")
    parser.add_argument("--tokens", type=int, default=32, help="of a round")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if (reason := native.problem()) is not None:
        sys.exit(f"There is nothing to measure: {reason}.")
    pool = Pool(arguments.threads)
    name = native.VARIANT_NAMES[arguments.variant] if arguments.variant else pool.library.best_name
    print(f"{name}, {pool.threads} threads")
    if arguments.gguf is None:
        formats(pool, arguments.repeats)
        many_rows(pool, (2, 4, 8, 16, 32, 128), arguments.repeats)
    else:
        side_by_side(arguments, pool)


if __name__ == "__main__":
    main()
