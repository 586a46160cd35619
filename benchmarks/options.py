"""Common parts of the GPU benchmarks: command line options, and the loops over shapes and rounds."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.machine import Budget, Record, describe
from benchmarks.shapes import SHAPES

Run = Callable[[str, argparse.Namespace, Budget, Record], None]
"""(shape, arguments, budget, record): measures one shape"""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows `description` as written and has the common options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", help="our attention backend; default: what the engine chooses")
    parser.add_argument("--llama-cpp", type=Path, help="the folder of llama-bench and greedy")
    parser.add_argument("--gguf", type=Path, help="a model with the shapes of Qwen3-0.6B for llama.cpp")
    parser.add_argument("--budget-s", type=float, help="skip what no longer fits into this many seconds")
    parser.add_argument("--json", type=Path, help="write the figures here after every measurement")
    parser.add_argument("--merge", action="store_true", help="add to the figures that the file holds")
    return parser


def parse(
    parser: argparse.ArgumentParser, peers: tuple[str, ...], formats: tuple[str, ...] = ()
) -> argparse.Namespace:
    """Parse the arguments; exit with one line for an unknown shape, peer or format."""
    arguments = parser.parse_args()
    check_names(parser, arguments, peers=peers, formats=formats)
    if (arguments.llama_cpp is None) != (arguments.gguf is None):
        parser.error("--llama-cpp and --gguf go together")
    return arguments


def check_names(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, **known: tuple[str, ...]
) -> None:
    """Exit with one line if the lists in `arguments` have a shape, or another name, that is not `known`."""
    for option, choices in {"shapes": tuple(SHAPES), **known}.items():
        if unknown := [given for given in getattr(arguments, option, ()) if given not in choices]:
            parser.error(f"--{option}: there is no {unknown[0]!r}; choose from {', '.join(choices)}")


def names(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    """Split a comma-separated list of numbers."""
    return [int(name) for name in names(text)]


def every_shape(arguments: argparse.Namespace, run: Run, *facts: str) -> None:
    """Measure one shape after the other; the record describes the machine and the arguments named in `facts`."""
    budget, device = Budget(arguments.budget_s), torch.device(arguments.device)
    told = describe(device) | {name: getattr(arguments, name) for name in (*facts, "repeats")}
    record = Record(arguments.json, told, arguments.merge)
    print(f"{told['device']}, driver {told['driver']}, {told['versions']}", flush=True)
    for shape in arguments.shapes:
        run(shape, arguments, budget, record)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"{budget.spent:.0f} s in all")


def rounds(repeats: int, budget: Budget) -> Iterator[int]:
    """Yield the numbers of the rounds while there is time; round 0 only warms up."""
    for number in range(repeats + 1):
        if not budget.allows(0.0):
            print(f"  stopped after {max(number - 1, 0)} rounds: no time", flush=True)
            return
        yield number
