"""What each attention backend costs at the start of a program, and what it gains afterwards: in one run, in turn.

    python -m benchmarks.attention_start --model FOLDER [--attention flash,triton,sdpa] [--prompts 300,2000,8000]

FOLDER may come from `python -m benchmarks.random_checkpoint 0.6B FOLDER --device cuda`. Every row is a fresh process:
seconds from its start until the engine is loaded and until the first token of a first prompt, then tokens per second of
new prompts (the best of a few) and of decoding after the last one. Medians of `--repeats` processes are printed, after
one round that fills the caches of files and kernels. A backend that does not work here says why. The first line is the
time that importing flash-attn takes once torch is there: the package, and only its compiled functions.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from benchmarks.options import names, numbers

IMPORT = "import time, torch; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"
TRIES, DECODED = 5, 256


def measure(model: str, attention: str, prompts: list[int], began: float) -> dict[str, float]:
    """Return the seconds of the start and the speeds of this process, which began at `began` (`time.time`)."""
    from benchmarks.prefill import first_token_seconds
    from benchmarks.shapes import random_prompt
    from engine import SamplingParams
    from engine.engine import Engine

    with closing(
        Engine.load(model, attention=attention, tune=False, context=max(prompts) + 2 * DECODED)
    ) as engine:
        spec, found = engine.spec, {"loaded s": time.time() - began}
        first_token_seconds(engine, random_prompt(spec, 300, 0))
        found["first token s"] = time.time() - began
        for length in prompts:
            times = [first_token_seconds(engine, random_prompt(spec, length, 1 + i)) for i in range(TRIES)]
            found[f"{length}: t/s"] = length / min(times)
        stream = engine.stream(random_prompt(spec, prompts[-1], 99), SamplingParams(max_tokens=DECODED))
        next(stream)
        before = time.perf_counter()
        count = sum(1 for _ in stream)
        found["decode t/s"] = count / (time.perf_counter() - before)
        return found


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--attention", type=names, default=["flash", "triton", "sdpa"])
    parser.add_argument("--prompts", type=numbers, default=[300, 2000, 8000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(measure(given.model, given.attention[0], given.prompts, given.child)))
        return
    for module in ("flash_attn", "flash_attn_2_cuda"):
        ran = subprocess.run([sys.executable, "-c", IMPORT.format(module)], capture_output=True, text=True)
        print(f"import {module}: {f'{float(ran.stdout):.3f} s' if ran.returncode == 0 else 'not installed'}")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in given.attention}
    prompts = ",".join(map(str, given.prompts))
    for round in range(given.repeats + 1):
        for name in list(rows):
            command = [sys.executable, "-m", "benchmarks.attention_start", "--model", given.model]
            command += ["--attention", name, "--prompts", prompts, "--child", str(time.time())]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode != 0:
                print(f"{name}: {(ran.stderr.strip().splitlines() or ['failed'])[-1][:300]}")
                del rows[name]
            elif round > 0:
                rows[name].append(json.loads(ran.stdout.splitlines()[-1]))
    found = {name: {key: median(row[key] for row in each) for key in each[0]} for name, each in rows.items()}
    for name, figures in found.items():
        print(f"{name:<8}" + "   ".join(f"{key} {value:,.2f}" for key, value in figures.items()), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
