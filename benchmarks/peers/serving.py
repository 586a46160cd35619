"""Engines that answer many requests, each in a process of its own, which take turns and communicate by lines of JSON.

Such a program prints one line when it is ready, then answers each line with one line. A process whose turn it is not
waits for a line and computes nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, and how many tokens to generate after each, whatever they are; `at_once` run at a time."""

    prompts: list[list[int]]
    tokens: list[int]
    at_once: int
    temperature: float

    @property
    def generated(self) -> int:
        """Number of tokens of all answers."""
        return sum(self.tokens)


class Server:
    """A program that serves one engine."""

    def __init__(self, name: str, module: str, arguments: list[str], path: list[Path]) -> None:
        """Run a module, with `path` before all other places for imports, and wait until it is ready.

        Raises RuntimeError with one line if it ends before that.
        """
        self.name = name
        places = [str(place.resolve()) for place in path] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._process = subprocess.Popen(
            # -P leaves out the current folder: another tree of chatterm must come from `path` alone.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        )
        self.about: dict[str, Any] = self._read()

    def seconds(self, workload: Workload) -> float:
        """Return seconds from the first request to the last token of all. Raises RuntimeError if the program ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}; see above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {reply['error']}")
        return reply


def replies() -> TextIO:
    """Return the stream for replies. Call it first: everything else that is printed from now on goes to stderr."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lines


def answer(lines: TextIO, about: dict[str, Any], seconds: Callable[[Workload], float]) -> None:
    """Serve as such a program: print `about`, then the result of `seconds` for every workload, until input ends."""
    print(json.dumps(about), file=lines, flush=True)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = {"seconds": seconds(Workload(**json.loads(line)))}
        except Exception as error:  # noqa: BLE001 - report it to the benchmark
            reply = {"error": (str(error).splitlines() or [repr(error)])[0][:300]}
        print(json.dumps(reply), file=lines, flush=True)
