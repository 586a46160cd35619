"""Time from the command to the first token: `chatterm run -p` through a running server, and with an engine of its own.

    python -m benchmarks.attach [MODEL] [--runs 10]

Each run is a fresh process, timed until the first byte of the answer; the median is reported. The processor time is
that of the command alone: on a busy machine it says more than the clock.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

_QUESTION = ("-p", "Name a river.", "--max-tokens", "4", "--temperature", "0")
_CHATTERM = (sys.executable, "-c", "from chatterm.cli.main import main; main()")


def first_token(model: str, *options: str) -> tuple[float, float]:
    """Return wall-clock seconds until the first byte of the answer, and seconds of processor time in all."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = subprocess.Popen(
        [*_CHATTERM, "run", model, *_QUESTION, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.read(1)
    waited = time.perf_counter() - began
    process.stdout.read()
    if process.wait():
        raise SystemExit("chatterm run failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return waited, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report(name: str, runs: list[tuple[float, float]]) -> None:
    clock, processor = (statistics.median(values) for values in zip(*runs, strict=True))
    print(
        f"{name:22} first token after {clock:.3f} s (best {min(runs)[0]:.3f}), processor time {processor:.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--runs", type=int, default=10)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ct") as folder:
        os.environ["CHATTERM_RUNTIME"] = folder
        server = subprocess.Popen(
            [*_CHATTERM, "serve", chosen.model, "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if line.startswith("Ready"):
                    break
            else:
                raise SystemExit("the server did not start")
            first_token(chosen.model)
            report("on a warm server", [first_token(chosen.model) for _ in range(chosen.runs)])
            alone = [first_token(chosen.model, "--no-server") for _ in range(max(chosen.runs // 3, 1))]
            report("with its own engine", alone)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
