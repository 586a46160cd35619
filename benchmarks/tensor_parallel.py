"""Several GPUs that compute one model together, compared with one GPU in the same run; random weights.

    python -m benchmarks.tensor_parallel --json benchmarks/results/tensor_parallel.json
        [--ranks auto] [--shapes 0.6B,8B,32B,70B,30B-A3B,235B-A22B] [--formats bf16,q4_0] [--rows 1,64]
        [--context 512] [--prompt 4096] [--budget-s 1500] [--merge]

Consecutive decode steps are timed with `--rows` streams of `--context` tokens each, and a prompt of `--prompt` tokens
is timed as it is cut for a single user; medians of `--repeats` are reported. All ranks know the same steps
beforehand, so the host's cost of messages is not included. "Of copy" is the bytes that a token must move, divided by
its time and the number of GPUs, as a share of what a large copy on one of them reads and writes. Models that do not
fit, on one GPU or on all, are left out with a line. A sum is one all-reduce, by the library and by our kernels. With
`--ranks auto`, the numbers of ranks are the powers of two up to the number of GPUs.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.formats import BLOCK, FORMATS, random_quantized, read_bytes, stored_bytes
from benchmarks.machine import Budget, Record, copy_bandwidth, describe
from benchmarks.options import names, numbers, parse, parser_of
from benchmarks.shapes import SHAPES, cache_bytes, kv_bytes, random_model
from engine.batch import Span, StepBatch
from engine.build import Pieces, build
from engine.device import has_pdl
from engine.execute.build_options import BuildOptions
from engine.execute.group import Group
from engine.kernels.recording import wait_for
from engine.params import SamplingParams
from models.network import Network
from models.spec import ModelSpec
from models.weights.share import UNIT, Share

_STEPS = 32
"""Decode steps between two looks at the clock."""
_LAYERS = 16
"""Half the number of our sums that are timed together."""
_BESIDE = 4 << 30
"""Bytes that a GPU needs besides the weights and the KV cache."""
_START_S = 30.0
"""The longest time that processes take to start."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What each rank has to measure."""

    shape: str
    form: str
    device: str
    ranks: int
    rows: tuple[int, ...]
    context: int
    prompt: int
    repeats: int

    @property
    def spec(self) -> ModelSpec:
        """The description of the whole network."""
        return SHAPES[self.shape]

    @property
    def positions(self) -> int:
        """The number of rows that a stream may have."""
        return max(self.context + _STEPS * (self.repeats + 2) + 64, self.prompt + 64)

    @property
    def has_room(self) -> bool:
        """Whether a part fits on a GPU."""
        if self.device != "cuda":
            return True
        unit = UNIT if self.form == "bf16" else BLOCK
        part = Share(0, self.ranks, self.spec, unit).spec if self.ranks > 1 else self.spec
        kv = kv_bytes(part, torch.bfloat16) * (self.context + 1024) * max(self.rows)
        needed = stored_bytes(part, self.form) + kv + _BESIDE
        return needed < torch.cuda.get_device_properties(0).total_memory


@dataclass(slots=True)
class Figures:
    """Times in seconds."""

    ranks: int
    decode: dict[int, float] = field(default_factory=dict)
    """A decode step, by its rows."""
    prompt: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """One sum, by method and rows."""
    program: str = ""
    moved: float = 0.0
    """Bytes that a token moves on all GPUs: weights and KV."""


def measure(asked: Asked, meeting: str, rank: int) -> Figures:
    """Return the figures of `rank`; all ranks do the same."""
    device, ranks = torch.device("cpu"), asked.ranks
    if asked.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    group = Group.join(Path(meeting), rank, ranks, device) if ranks > 1 else None
    network = make(asked, rank, device)
    options = BuildOptions(context=asked.positions, streams=max(asked.rows), group=group, tune=False)
    with torch.inference_mode():
        pieces = build(network, device, options)
        found = Figures(ranks, program=pieces.decode_name, moved=ranks * moved(network, asked.context))
        if rank == 0:
            print(
                f"  {asked.shape} {asked.form}, {ranks}: {found.program}", *pieces.notes, sep="; ", flush=True
            )
        if asked.prompt:
            found.prompt = prompt_s(pieces, asked, device)
        for rows in asked.rows:
            found.decode[rows] = decode_s(pieces, rows, asked, device)
        if group is not None:
            for rows in sorted({*asked.rows, *filter(None, [min(asked.prompt, pieces.scheduler.max_chunk)])}):
                found.sums[f"library, {rows} rows"] = library_s(group, rows, asked.spec.hidden_size, device)
            if device.type == "cuda":
                found.sums |= ours_s(group, asked, pieces.scheduler.max_chunk, device)
    return found


def make(asked: Asked, rank: int, device: torch.device) -> Network:
    """Return a rank's part of the network."""
    place = rank, asked.ranks
    if asked.form == "bf16":
        return random_model(asked.spec, torch.bfloat16, device, asked.positions, rank=place)
    return random_quantized(asked.spec, asked.form, torch.bfloat16, device, asked.positions, rank=place)


def moved(network: Network, context: int) -> float:
    """Return the bytes that a decoded token moves on one GPU."""
    return read_bytes(network) + cache_bytes(network.spec, torch.bfloat16, context + _STEPS / 2)


def prompt_s(pieces: Pieces, asked: Asked, device: torch.device) -> float:
    """Return the seconds of a prompt, cut as the scheduler cuts it."""
    most, tokens = pieces.scheduler.max_chunk, tuple(range(1, asked.prompt + 1))
    blocks = tuple(range(-(-asked.prompt // pieces.blocks.block_size)))
    vocab = asked.spec.vocab_size

    def run() -> None:
        for start in range(0, asked.prompt, most):
            part = tuple(token % vocab for token in tokens[start : start + most])
            end = start + len(part)
            wanted = int(end == asked.prompt)
            pieces.runner.run(
                StepBatch((Span(blocks, start, len(part), part, tuple(range(start, end)), wanted),))
            )

    return median_s(run, asked.repeats, device)


def decode_s(pieces: Pieces, rows: int, asked: Asked, device: torch.device) -> float:
    """Return the seconds of a step of `rows` rows, each with a context of its own."""
    size, each = pieces.blocks.block_size, pieces.context_length
    blocks = [
        [(row * (each // size) + at) % pieces.blocks.num_blocks for at in range(-(-each // size))]
        for row in range(rows)
    ]
    runner, row = pieces.decode_runner, asked.context
    if runner is None:
        spans = [
            Span(tuple(table), asked.context, 1, (1,), (asked.context,), 1, asked.context) for table in blocks
        ]
        return median_s(partial(pieces.runner.run, StepBatch(tuple(spans))), asked.repeats, device)
    for slot in range(rows):
        runner.sampler.load(slot, SamplingParams(temperature=0.0), [], [], slot)
        runner.slots.put(slot, row, row)
        runner.slots.show(slot, blocks[slot])
    runner.slots.given.token.fill_(1)

    def run() -> None:
        nonlocal row
        for _ in range(_STEPS):
            runner.step(range(rows), row)
            row += 1

    return median_s(run, asked.repeats, device) / _STEPS


def library_s(group: Group, rows: int, size: int, device: torch.device) -> float:
    """Return the seconds of a sum over the ranks by the library, as in prompts."""
    x = torch.ones(rows, size, dtype=torch.bfloat16, device=device)
    return median_s(lambda: group.sum(x), 20, device)


def ours_s(group: Group, asked: Asked, prompt: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of a sum by our kernels, with the residual, and with the norm if there are more than FEW rows.

    Sums of decode steps are replayed from a graph; those of a prompt are not.
    """
    from engine.execute.cuda.add_norm import AddNorm
    from engine.execute.cuda.all_reduce import AllReduce
    from engine.execute.cuda.all_reduce_layout import AllReduceLayout
    from engine.execute.cuda.peer_memory import share_memory
    from engine.execute.cuda.prefill_all_reduce import PromptSums
    from engine.execute.cuda.slots import StepInput
    from engine.execute.cuda.tiles import FEW
    from models.network import NormWeights
    from models.spec import Norm

    most, size = max(asked.rows), asked.spec.hidden_size
    plan = AllReduceLayout(group.ranks, most, size, 2, 2 * group.ranks, _LAYERS, prompt)
    memory = share_memory(plan.nbytes, group.rank, device, lambda data: group.swap("sums", data))
    pdl = has_pdl(device)
    peers = AllReduce(memory, plan, group.rank, device, torch.bfloat16, pdl)
    nothing = torch.zeros(most, dtype=torch.int32, device=device)
    token = torch.zeros(most, dtype=torch.int64, device=device)
    active = torch.arange(most, dtype=torch.int32, device=device)
    given = StepInput(active, token, nothing, (nothing,), nothing, nothing, nothing)
    between = AddNorm(None, 1.0, (Norm(), NormWeights(torch.ones(size, dtype=torch.bfloat16, device=device))))
    logits = torch.zeros(most, 2, dtype=torch.bfloat16, device=device)

    def numbers(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(rows, size, dtype=dtype, device=device)

    def recorded(rows: int) -> Callable[[], object]:
        part, x, here, out = numbers(rows, torch.float32), numbers(rows), numbers(rows), numbers(rows)

        def step() -> None:
            peers.begin(given, rows, 0, 1)
            for _ in range(plan.sums):
                if rows <= FEW:
                    peers.add(part, here, here)
                else:
                    peers.add_norm(x, here, between, out, here)
            peers.join_columns(logits[:rows])

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    found = {}
    for rows in asked.rows:
        found[f"ours, {rows} rows"] = median_s(recorded(rows), 20, device) / (plan.sums + 2)
    if asked.prompt:
        sums, rows = PromptSums(peers, group, device, torch.bfloat16), min(asked.prompt, prompt)
        here, out = numbers(rows), numbers(rows)

        def prompts() -> None:
            for _ in range(_LAYERS):
                place = sums.place(rows)
                assert place is not None
                sums.add_norm(place, here, between, out, here)

        found[f"ours, {rows} rows"] = median_s(prompts, 20, device) / _LAYERS
    if peers.is_lost:
        raise RuntimeError("the GPUs did not hear of each other")
    group.least(0)  # no rank may release the memory before all are done
    peers.close()
    return found


def median_s(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median seconds of `run`, after two discarded calls."""
    times = []
    for number in range(repeats + 2):
        wait_for(device)
        began = time.perf_counter()
        run()
        wait_for(device)
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def together(asked: Asked) -> Figures:
    """Measure with a process for each rank; end them all, and return the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(asked.ranks, get_context("spawn"))
        try:
            meeting = str(Path(folder) / "meeting")
            results = [pool.submit(measure, asked, meeting, rank) for rank in range(asked.ranks)]
            done, _ = wait(results, return_when=FIRST_EXCEPTION)
            for result in done:
                result.result()
            return results[0].result()
        finally:
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(wait=True)


def compare(asked: Asked, counts: list[int], budget: Budget, record: Record, copied: float) -> None:
    """Measure a shape in a format on one GPU, if it fits, and on each number of GPUs."""
    one, name = None, f"{asked.shape:>9} {asked.form:6}"
    for ranks in [1, *counts]:
        here = replace(asked, ranks=ranks)
        if not here.has_room:
            print(f"{name} {ranks}: no room", flush=True)
            continue
        if not budget.allows(_START_S):
            print(f"{name} {ranks}: no time", flush=True)
            return
        try:
            found = together(here)
        except Exception as error:  # noqa: BLE001 - the others are still measured
            print(
                f"{name} {ranks}: failed: {(str(error).splitlines() or [repr(error)])[0][:300]}", flush=True
            )
            continue
        record.add(asdict(found), asked.shape, asked.form, str(ranks))
        one = found if ranks == 1 else one
        show(found, one if ranks > 1 else None, f"{name} {ranks}", asked, copied)


def show(found: Figures, one: Figures | None, name: str, asked: Asked, copied: float) -> None:
    """Print a line for each figure."""
    for rows, taken in found.decode.items():
        beside = f"  {one.decode[rows] / taken:5.2f}x of one" if one else ""
        told = f"  {found.moved / taken / found.ranks / copied:.0%} of copy" if rows == 1 else ""
        print(f"{name}: {rows:3} rows  {rows / taken:8,.0f} tok/s  {taken * 1e6:9,.0f} us{beside}{told}")
    if asked.prompt:
        beside = f"  {one.prompt / found.prompt:5.2f}x of one" if one else ""
        print(f"{name}: prompt of {asked.prompt}  {found.prompt * 1e3:8.1f} ms{beside}")
    for what, taken in found.sums.items():
        print(f"{name}: sum, {what}: {taken * 1e6:.1f} us")


def counts_of(text: str) -> list[int]:
    """Parse `--ranks`."""
    if text != "auto":
        return [count for count in numbers(text) if count > 1]
    return [1 << power for power in range(1, torch.cuda.device_count().bit_length())]


def main() -> None:
    """Compare the requested shapes and formats."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--ranks", default="auto", help="numbers of GPUs; auto: 2, 4, 8, as many as there are"
    )
    parser.add_argument("--shapes", type=names, default=["0.6B", "8B", "32B", "70B", "30B-A3B", "235B-A22B"])
    parser.add_argument("--formats", type=names, default=["bf16", "q4_0"], help=", ".join(FORMATS))
    parser.add_argument("--rows", type=numbers, default=[1, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=4096)
    arguments = parse(parser, (), tuple(FORMATS))
    device, counts = torch.device(arguments.device), counts_of(arguments.ranks)
    if device.type == "cuda" and (there := torch.cuda.device_count()) < max(counts, default=2):
        parser.error(f"--ranks: this machine has {there} GPUs")
    budget = Budget(arguments.budget_s)
    record = Record(arguments.json, describe(device), arguments.merge)
    copied = copy_bandwidth(device)
    print(f"a copy reads and writes {copied / 1e9:,.0f} GB/s", flush=True)
    for shape in arguments.shapes:
        for form in arguments.formats:
            asked = Asked(
                shape, form, arguments.device, 1, tuple(arguments.rows), arguments.context,
                arguments.prompt, arguments.repeats,
            )  # fmt: skip
            compare(asked, counts, budget, record, copied)
    print(f"{budget.spent:.0f} s in all")


if __name__ == "__main__":
    main()
