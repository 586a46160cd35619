"""The native kernels for ARM without an ARM processor: instructions per multiplication, counted by an emulator.

    python -m benchmarks.arm_kernels [--counts 1 8 40] [--formats Q8_0 Q4_K] [--library LIBRARY]

Each product is counted with few and with many rows, once and twice: the differences leave what a row of a weight costs,
without rounding the inputs. The last column is how many times as many the portable kernels need. It takes Debian's
packages g++-aarch64-linux-gnu and qemu-user. Instructions are no times, but they are the same on a busy machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind

from engine.kernels.native import compile as compiling

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = (
    "qemu-aarch64",
    "-L",
    "/usr/aarch64-linux-gnu",
    "-singlestep",
    "-d",
    "exec,nochain",
    "-D",
    "/dev/stdout",
)
KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.MXFP4, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.BF16, Kind.F16)
SMALL_BLOCK = 32
"""Rows with blocks of so many numbers can be interleaved."""
VARIANTS = ("portable", "dotprod", "i8mm")
FEW, MANY, COLUMNS = 16, 48, 1024


def instructions(program: Path, words: Sequence[object]) -> int:
    """Return how many instructions a run of the program takes: the emulator prints a line for each."""
    command = [*EMULATOR, str(program), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        lines = sum(part.count(b"\n") for part in iter(lambda: run.stdout.read(1 << 20), b""))
    if run.returncode:
        raise SystemExit(f"{program.name} failed with code {run.returncode}")
    return lines


def per_weight(program: Path, variant: str, kind: Kind, count: int, interleaved: bool) -> float:
    """Return the instructions per weight and row of inputs, of `count` rows."""
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def product(rows: int) -> int:
        once, twice = (
            instructions(
                program,
                [variant, int(kind), block, size, rows, COLUMNS, count, repeats]
                + ["interleaved"] * interleaved,
            )
            for repeats in (1, 2)
        )
        return twice - once

    return (product(MANY) - product(FEW)) / ((MANY - FEW) * COLUMNS * count)


def build(folder: Path, library: Path | None) -> Path:
    """Compile the program, and the library for ARM unless there is one. Raises CompileError."""
    os.environ["CXX"] = COMPILER
    built = library or compiling.compile_library(folder / "library.so")
    program = folder / "arm_kernels"
    source = Path(__file__).with_suffix(".cpp")
    link = [
        f"-I{compiling.FOLDER}",
        str(source),
        str(built.resolve()),
        f"-Wl,-rpath,{built.resolve().parent}",
    ]
    subprocess.run([COMPILER, "-std=c++17", "-O1", *link, "-o", str(program)], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 40], help="rows of inputs")
    parser.add_argument("--formats", nargs="+", choices=[kind.name for kind in KINDS], default=None)
    parser.add_argument("--library", type=Path, help="a library for ARM; default: compile one")
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.formats is None or kind.name in chosen.formats]
    with tempfile.TemporaryDirectory() as name:
        try:
            program = build(Path(name), chosen.library)
        except (compiling.CompileError, subprocess.CalledProcessError, OSError) as error:
            sys.exit(f"The kernels for ARM were not built: {error}.")
        print(f"{'':22}" + "".join(f"{variant:>10}" for variant in VARIANTS) + "   portable / last")
        for kind in kinds:
            for interleaved in (False, True) if gguf.GGML_QUANT_SIZES[kind][0] == SMALL_BLOCK else (False,):
                for count in chosen.counts:
                    found = {
                        variant: per_weight(
                            program, variant, kind, count, interleaved and variant != "portable"
                        )
                        for variant in VARIANTS
                    }
                    label = f"{kind.name}{' interleaved' if interleaved else ''}"
                    numbers = "".join(f"{number:10.3f}" for number in found.values())
                    ratio = found["portable"] / found[VARIANTS[-1]]
                    print(f"{label:18}{count:>4}{numbers}{ratio:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
