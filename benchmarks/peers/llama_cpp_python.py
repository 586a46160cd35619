"""llama.cpp through llama-cpp-python, on the CPU, in a process of its own. Run as a program it is that process.

It answers one JSON line for every JSON line it reads: {"context": c, "tokens": n} with the seconds of n decode steps
that begin at row c, {"prefill": n} with the seconds of a prompt of n tokens in an empty context. Only the standard
library and llama_cpp are imported, so that any Python with llama_cpp will do.
"""

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self


class LlamaCppPython:
    """The process, seen from the benchmark. A context manager."""

    def __init__(self, python: str, gguf: Path, threads: int, context: int) -> None:
        """`python` is an interpreter that has llama_cpp. Raises RuntimeError when it does not start."""
        command = [python, "-P", __file__, str(gguf), str(threads), str(context)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = str(self._answer()["version"])

    def decode(self, context: int, tokens: int) -> float:
        """Seconds a token of `tokens` decode steps from row `context` on."""
        return self._ask({"context": context, "tokens": tokens}) / tokens

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt of `tokens` to its logits."""
        return self._ask({"prefill": tokens})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _ask(self, question: dict[str, int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama-cpp-python did not start or ended; is it installed for that Python?")
        return dict(json.loads(line))


def serve(gguf: str, threads: int, context: int) -> None:
    """The process itself."""
    import llama_cpp

    model = llama_cpp.Llama(
        gguf, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
    )
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    present = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if "prefill" in asked:
            model.n_tokens = 0
            prompt = [1000 + i % 1000 for i in range(asked["prefill"])]
            began = perf_counter()
            model.eval(prompt)
            print(json.dumps({"seconds": perf_counter() - began}), flush=True)
            present = len(prompt)
            continue
        start, tokens = asked["context"], asked["tokens"]
        if start < present:
            model.n_tokens = present = start  # what lies beyond is dropped by the next call
        if start > present:
            model.eval([1000 + i % 1000 for i in range(start - present)])
        began = perf_counter()
        for i in range(tokens):
            model.eval([2000 + i])
        print(json.dumps({"seconds": perf_counter() - began}), flush=True)
        present = start + tokens


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
