"""llama.cpp through llama-cpp-python, on the CPU, in a separate process. Run as a program, this file is that process.

It answers every line of JSON with one line. {"context": c, "tokens": n}: the seconds of n decode steps that begin at
row c. {"prefill": n}: the seconds of a prompt of n tokens in an empty context. {"greedy": ids, "tokens": n}: the
logits of the likeliest few tokens in each of n greedy steps. {"logits": ids, "prompt": p, "file": f}: writes the
logits after each token to f in fp32, then answers (p: computed at once, else one by one). {"peak": 1}: its peak
memory. Only the standard library and llama_cpp are imported, so that any Python with llama_cpp can run it.
"""

import heapq
import json
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from time import perf_counter
from types import TracebackType
from typing import Any, Self


class PeerError(RuntimeError):
    """The process did not start, or ended; the message is one line."""


def how_it_ended(code: int) -> str:
    """Return the name of the signal that ended a process, else its exit code; `code` is that of `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name} ({signal.strsignal(-code)})"


class LlamaCppPython:
    """The process, seen from the benchmark. A context manager."""

    def __init__(self, python: str, gguf: Path, threads: int, context: int, logits: bool = False) -> None:
        """Start the process and wait until it has loaded the model of the file `gguf`.

        `python` is an interpreter that has llama_cpp. `context` is in tokens. With `logits`, the logits of every
        position are kept, so that they can be requested. Raises PeerError if the process cannot be started, and,
        like all methods, once it has ended.
        """
        command = [
            python,
            "-P",
            __file__,
            str(gguf),
            str(threads),
            str(context),
            *(["logits"] if logits else []),
        ]
        self._said = TemporaryFile()  # noqa: SIM115 - closed when the process is
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
            )
        except OSError as error:
            raise PeerError(f"{python} does not start: {error.strerror}") from None
        ready = self._answer()
        self.version = str(ready["version"])
        self.built_for = str(ready["built_for"])
        self.load_s = float(ready["seconds"])
        """Seconds to load the model, without imports."""

    def decode(self, context: int, tokens: int) -> float:
        """Return seconds per token for `tokens` decode steps from row `context` on."""
        return float(self._ask({"context": context, "tokens": tokens})["seconds"]) / tokens

    def prefill(self, tokens: int) -> float:
        """Return seconds from a prompt of `tokens` tokens to its logits."""
        return float(self._ask({"prefill": tokens})["seconds"])

    def greedy(self, prompt: list[int], tokens: int) -> list[dict[int, float]]:
        """Decode `tokens` greedy steps; return the logits of the likeliest few tokens of each, likeliest first."""
        steps = self._ask({"greedy": prompt, "tokens": tokens})["steps"]
        return [dict(step) for step in steps]

    def logits(self, tokens: list[int], prompt: bool) -> bytearray:
        """Return the logits after each of the tokens, fp32 [tokens, vocabulary]; a `prompt` is computed at once."""
        with NamedTemporaryFile() as file:
            self._ask({"logits": tokens, "prompt": prompt, "file": file.name})
            return bytearray(Path(file.name).read_bytes())

    def peak_bytes(self) -> int:
        """Return the peak memory of the process (its resident set)."""
        return int(self._ask({"peak": 1})["bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        self._said.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return dict(json.loads(line))

    def _ended(self) -> PeerError:
        code = self._process.wait()
        self._said.seek(0)
        last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
        return PeerError(": ".join([f"llama-cpp-python ended with {how_it_ended(code)}", *last]))


def serve(gguf: str, threads: int, context: int, *options: str) -> None:
    """Run the process itself."""
    import llama_cpp

    began = perf_counter()
    model = llama_cpp.Llama(
        gguf,
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        verbose=False,
        logits_all="logits" in options,
    )
    seconds = perf_counter() - began
    features = llama_cpp.llama_print_system_info().decode().replace("CPU : ", "").split(" | ")
    built_for = " ".join(
        feature.split(" = ")[0] for feature in features if feature.startswith(("AVX", "NEON"))
    )
    print(
        json.dumps({"version": llama_cpp.__version__, "built_for": built_for, "seconds": seconds}), flush=True
    )
    for line in sys.stdin:
        print(json.dumps(_reply(model, json.loads(line))), flush=True)


def _reply(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    if "peak" in asked:
        return {"bytes": peak_bytes()}
    if "greedy" in asked:
        return {"steps": _greedy(model, asked["greedy"], asked["tokens"])}
    if "logits" in asked:
        model.n_tokens, tokens = 0, asked["logits"]
        for part in [tokens] if asked["prompt"] else [[token] for token in tokens]:
            model.eval(part)
        model.scores[: len(tokens)].tofile(asked["file"])
        return {}
    if "prefill" in asked:
        model.n_tokens = 0
        prompt = [1000 + i % 1000 for i in range(asked["prefill"])]
        began = perf_counter()
        model.eval(prompt)
        return {"seconds": perf_counter() - began}
    start, tokens = asked["context"], asked["tokens"]
    if start < model.n_tokens:
        # The next call drops the rows beyond; a network with a state, such as a short convolution, can drop only all.
        model.n_tokens = 0 if _has_state(model) else start
    if start > model.n_tokens:
        model.eval([1000 + i % 1000 for i in range(start - model.n_tokens)])
    began = perf_counter()
    for i in range(tokens):
        model.eval([2000 + i])
    return {"seconds": perf_counter() - began}


def _has_state(model: Any) -> bool:
    """Return whether some layers keep a state instead of rows."""
    import llama_cpp

    own = model._model.model
    return bool(llama_cpp.llama_model_is_recurrent(own) or llama_cpp.llama_model_is_hybrid(own))


def _greedy(model: Any, prompt: list[int], tokens: int) -> list[list[tuple[int, float]]]:
    model.n_tokens = 0
    steps: list[list[tuple[int, float]]] = []
    for _ in range(tokens):
        model.eval([steps[-1][0][0]] if steps else prompt)
        logits = model._ctx.get_logits()
        few = heapq.nlargest(50, ((logits[i], i) for i in range(model.n_vocab())))
        steps.append([(i, logit) for logit, i in few])
    return steps


def peak_bytes() -> int:
    """Return the peak memory of this process (its resident set), on Linux."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
