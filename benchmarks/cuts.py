"""Whole decode steps with different cuts of their kernels, measured in turn in one process; random weights.

python -m benchmarks.cuts --shape 8B --format q4_0 --rows 1,2,4,8 --context 512 [--kv-dtype fp8] [--ranks 2]
    "12288 x 4096 gated = 1,4,2,2,4" "6144 x 4096 = 1,8,1,2,4; attention = 0,32,2"

Each argument is one way to cut the steps: a part of an operation's name, and the numbers of its cut in the order of
`Tile` or `AttentionSplit` in `engine/execute/cuda/tiles.py`. The names are printed first, with the cuts that are
the default. Only candidates of the tuner are possible. With `--ranks`, the network is one GPU's part of that many,
without the communication between them. Steps come without sampling. This is how `configs/default.json` was found.
"""

import argparse
import os
from functools import partial
from statistics import median

import torch

from benchmarks.formats import FORMATS, random_quantized
from benchmarks.options import numbers
from benchmarks.shapes import SHAPES, random_model
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.kernel_configs import Chosen, describe
from engine.execute.cuda.step_bench import GraphStopwatch, StepBench
from engine.kernels.triton.precompile import Compilers
from models.weights.share import Share

BLOCK = 32


def parsed(text: str, known: dict[str, tuple[tuple[int, ...], ...]]) -> Chosen:
    """Return the cuts that an argument names. Raises SystemExit if there is no such operation or candidate."""
    chosen = dict[str, tuple[int, ...]]()
    for part in text.split(";"):
        wanted, _, values = part.partition("=")
        try:
            cut = tuple(int(value) for value in values.split(","))
        except ValueError:
            raise SystemExit(f"{part.strip()!r} is not of the form 'name = 1,2,3'.") from None
        names = [name for name in known if wanted.strip() in name]
        if not names:
            raise SystemExit(
                f"No operation has {wanted.strip()!r} in its name; there are: {', '.join(known)}."
            )
        for name in names:
            if cut not in known[name]:
                raise SystemExit(f"{cut} is no candidate for {name!r}; there are: {known[name]}.")
            chosen[name] = cut
    return chosen


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--format", choices=list(FORMATS), default="bf16")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--kv-dtype", choices=["auto", "bf16", "fp8", "int8"], default="auto")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("cuts", nargs="*")
    given = parser.parse_args()
    device, dtype, spec = torch.device("cuda"), torch.bfloat16, SHAPES[given.shape]
    if given.ranks > 1:
        spec = Share(0, given.ranks, spec).spec
    make = random_model if given.format == "bf16" else partial(random_quantized, name=given.format)
    network = make(spec, dtype=dtype, device=device, positions=given.context + 1)
    heads = spec.attention
    like = KVCache.uniform(
        len(spec.layers), 1, BLOCK, heads.kv_heads, heads.head_dim, dtype, device, kind=given.kv_dtype
    )
    compilers = Compilers(max(len(os.sched_getaffinity(0)) - 1, 1))
    bench = StepBench(network, like, lambda job: job(), compilers, GraphStopwatch(), row=given.context - 1)
    known = bench.candidates(1)
    print(f"{given.shape} {given.format}, {torch.cuda.get_device_name()}, context {given.context}")
    for name, cuts in known.items():
        print(f"    {name}: {','.join(map(str, cuts[0]))} ({describe(name, cuts[0])})")
    ways = {"default": dict[str, tuple[int, ...]](), **{text: parsed(text, known) for text in given.cuts}}
    for count in given.rows:  # all are compiled while the first ones are measured
        bench.compile(count, list(ways.values()))
    for count in given.rows:
        times = bench.seconds(count, [*ways.values(), {}], given.rounds)
        usual = median(times[0])
        for name, found in zip([*ways, "default again"], times, strict=True):
            result = f"{median(found) * 1e6:>9.1f} us, {usual / median(found):.4f}x" if found else "fails"
            print(f"{count:>3} rows {result}  {name}", flush=True)
    bench.close()


if __name__ == "__main__":
    main()
