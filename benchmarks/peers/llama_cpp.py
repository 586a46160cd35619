"""llama.cpp: its own llama-bench, and `greedy`, a closed greedy loop with its sampler on the GPU.

Both run as separate programs with a GGUF file that has the shapes of Qwen3-0.6B.
"""

import json
import os
import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_cpp_python import how_it_ended

GREEDY_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Greedy:
    """The figures that `greedy` prints."""

    tokens_per_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """A folder with llama.cpp's programs and libraries, and a model."""

    folder: Path
    gguf: Path
    timeout_s: float = 240.0

    def decode(self, context: int, steps: int, repeats: int) -> list[float]:
        """Return tokens/s of decoding `steps` tokens after `context`, without sampling; one figure per repeat."""
        return self._bench("-p", "0", "-n", str(steps), "-d", str(context), "-r", str(repeats))

    def prefill(self, tokens: int, repeats: int) -> list[float]:
        """Return prompt tokens/s of a prompt of this length; one figure per repeat."""
        return self._bench("-p", str(tokens), "-n", "0", "-r", str(repeats))

    def greedy(self, context: int, repeats: int) -> Greedy:
        """Run a prompt of `context` tokens, then a closed loop with the sampler on the GPU."""
        command = ["greedy", str(self.gguf), str(context), str(GREEDY_TOKENS), "2", str(repeats)]
        return parse_greedy(self._run(command))

    def _bench(self, *options: str) -> list[float]:
        common = ["llama-bench", "-m", str(self.gguf), "-ngl", "99", "-fa", "1", "-o", "json"]
        return parse_bench(self._run([*common, *options]))

    def _run(self, command: list[str]) -> str:
        """Return the output of a program. Raises RuntimeError if it fails."""
        program = self.folder / command[0]
        environment = os.environ | {"LD_LIBRARY_PATH": self._libraries()}
        try:
            done = subprocess.run(
                [str(program), *command[1:]],
                capture_output=True,
                text=True,
                env=environment,
                timeout=self.timeout_s,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{program} did not run: {error}") from None
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"{command[0]} ended with {how_it_ended(done.returncode)}: {tail:.200}")
        # `greedy` may write its line to either stream.
        return done.stdout if command[0] == "llama-bench" else done.stdout + done.stderr

    def _libraries(self) -> str:
        # The CUDA libraries that llama.cpp was linked with come in torch's wheels or with the toolkit.
        wheels = (Path(sysconfig.get_paths()["purelib"]) / "nvidia").rglob("libcu*.so.*")
        toolkit = Path("/usr/local").glob("cuda*/lib64/libcu*.so.*")
        names = ("libcublas.so", "libcudart.so")
        found = {str(path.parent) for path in (*wheels, *toolkit) if path.name.startswith(names)}
        given = os.environ.get("LD_LIBRARY_PATH")
        return ":".join([str(self.folder), *([given] if given else []), *sorted(found)])


def parse_bench(text: str) -> list[float]:
    """Return tokens/s of each repeat of the only test in llama-bench's JSON. Raises RuntimeError for other output."""
    try:
        tests: list[dict[str, Any]] = json.loads(text)
        return [float(rate) for rate in tests[0]["samples_ts"]]
    except (ValueError, LookupError, TypeError):
        raise RuntimeError(f"llama-bench printed no figures: {text.strip()[:160]!r}") from None


def parse_greedy(text: str) -> Greedy:
    """Parse the line with the figures. Raises RuntimeError if there is none."""
    found = re.search(r"TTFT median ([\d.]+) ms.*decode median ([\d.]+) tok/s", text)
    if found is None:
        raise RuntimeError(f"greedy printed no figures: {text.strip()[-160:]!r}")
    return Greedy(tokens_per_s=float(found[2]), ttft_s=float(found[1]) / 1e3)
