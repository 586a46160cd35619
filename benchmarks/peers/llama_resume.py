"""llama.cpp through llama-cpp-python with its KV cache in a file, as `--prompt-cache` of its programs does.

Run as a program (model, context, threads, file), it is a separate process that answers every line of JSON with one
line. {"read": ids} computes the tokens and writes the file; {"load": 1} loads the file; {"ask": ids} computes the
first token after them. Each answer has the seconds. It imports nothing of chatterm, so that any Python with llama_cpp
can run it.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self


class LlamaResumed:
    """The process, seen from the benchmark. A context manager."""

    def __init__(self, python: str, gguf: Path, context: int, threads: int, file: Path) -> None:
        """Start the process and load the model. Raises RuntimeError if it does not start."""
        command = [python, "-P", __file__, str(gguf), str(context), str(threads), str(file)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = str(self._answer()["version"])

    def ask(self, what: str, value: object = 1) -> float:
        """Send a request and return the seconds that it took. Raises RuntimeError if the process ends."""
        assert self._process.stdin is not None
        print(json.dumps({what: value}), file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama.cpp has ended; look at what its program says.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    import llama_cpp

    gguf, context, threads, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
    llama = llama_cpp.Llama(gguf, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    inner = llama._ctx.ctx
    llama.eval([1] * 16)  # warms up: later steps are faster
    llama.reset()
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = perf_counter()
        if "read" in asked:
            ids = asked["read"]
            llama.reset()
            llama.eval(ids)
            took = perf_counter() - began
            tokens = (llama_cpp.llama_token * len(ids))(*ids)
            assert llama_cpp.llama_state_save_file(inner, file, tokens, len(ids))
        elif "load" in asked:
            held, count = (llama_cpp.llama_token * context)(), ctypes.c_size_t()
            assert llama_cpp.llama_state_load_file(inner, file, held, context, ctypes.byref(count))
            llama.input_ids[: count.value] = held[: count.value]
            llama.n_tokens = count.value
            took = perf_counter() - began
        else:
            answer = llama.generate(asked["ask"], temp=0.0)  # it finds the longest common prefix itself
            next(answer)
            took = perf_counter() - began
            answer.close()
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
