"""Chatting on a CPU: chatterm beside transformers (fp32) on the same weights, in one run.

    python -m benchmarks.cpu_chat [--repeats 5] [--json benchmarks/results/cpu_chat.json]

Each side lives in a process of its own; the parent asks them in turn and quotes medians, so that both see the
same moments of a noisy machine. The model is the default one, dequantised to fp32 for transformers.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PREFILLS = (32, 512, 2048)
DECODE_CONTEXT, DECODE_TOKENS = 128, 48
QUESTIONS = {
    "10 words": "What do rivers have to do with towns, part {:02d}?",
    "20 words": "Tell me in a few sentences what rivers, bridges and towns have to do with each other, part {:02d}.",
}


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids: no two prompts share a prefix."""
    import torch

    return torch.randint(100, 49_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chatterm_side(pipe: Connection) -> None:
    from engine import Engine, SamplingParams

    engine = Engine.load("smollm2", device="cpu")

    def prefill(length: int, seed: int) -> float:
        began = time.perf_counter()
        engine.warm(prompt(length, seed))
        return length / (time.perf_counter() - began)

    def decode(seed: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS)
        while True:  # random prompts may end a turn at once; take the next one then
            stream = engine.stream(prompt(DECODE_CONTEXT, seed), params)
            next(stream)
            began, count = time.perf_counter(), 0
            for _ in stream:
                count += 1
            if count >= DECODE_TOKENS // 2:
                return count / (time.perf_counter() - began)
            seed += 1000

    def turns(question: str, typed: bool, seed: int) -> list[float]:
        chat = engine.chat(system=f"You answer in one or two sentences. ({seed})")
        times = []
        for turn in range(10):
            if typed:  # as the screen does it: the draft is warmed while a person types
                chat.prepare(question.format(turn), wait=True)
            for _ in chat.send(question.format(turn), SamplingParams(temperature=0.0, max_tokens=40)):
                pass
            assert chat.last is not None
            times.append(chat.last.stats.ttft_s)
            chat.settle(wait=True)
        return times

    serve(pipe, {"prefill": prefill, "decode": decode, "turns": turns})


def transformers_side(pipe: Connection) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.peers.transformers import fields_of
    from models.gguf import config_of, read_gguf
    from models.gguf_weights import stored_tensors
    from models.sources import resolve

    path = resolve("smollm2").gguf
    assert path is not None
    file = read_gguf(path)
    config = config_of(file)
    network = LlamaForCausalLM(LlamaConfig(**fields_of(config)))
    parameters = network.state_dict()
    for tensor in stored_tensors(file, config):
        tensor.copy_into(parameters[tensor.name])
    network.eval()

    @torch.inference_mode()
    def prefill(length: int, seed: int) -> float:
        ids = torch.tensor([prompt(length, seed)])
        began = time.perf_counter()
        network(ids, use_cache=True, logits_to_keep=1)
        return length / (time.perf_counter() - began)

    @torch.inference_mode()
    def decode(seed: int) -> float:
        out = network(torch.tensor([prompt(DECODE_CONTEXT, seed)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        began = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            out = network(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return DECODE_TOKENS / (time.perf_counter() - began)

    serve(pipe, {"prefill": prefill, "decode": decode})


def serve(pipe: Connection, functions: dict[str, Callable[..., Any]]) -> None:
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        name, *arguments = job
        pipe.send(functions[name](*arguments))


class Side:
    """One peer in its own process."""

    def __init__(self, target: Callable[..., None], *options: Any) -> None:
        """`target` gets its end of the pipe and the `options`."""
        self._pipe, theirs = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=target, args=(theirs, *options), daemon=True)
        self._process.start()
        self._pipe.recv()

    def __call__(self, *job: Any) -> Any:
        self._pipe.send(job)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def seconds_to_ready() -> float:
    """From the command to a loaded model: a fresh Python, imports and all."""
    code = "from engine import Engine; Engine.load('smollm2', device='cpu'); import os; os._exit(0)"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    import torch

    ours, theirs = Side(chatterm_side), Side(transformers_side)
    figures: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "repeats": arguments.repeats,
        "tokens_per_s": {},
        "ttft_s": {},
    }
    print(
        f"{figures['cpu']}, {figures['cores']} cores, {figures['capability']}; medians of {arguments.repeats}"
    )
    print(f"{'tokens/s':<16}{'chatterm':>12}{'transformers':>14}{'ratio':>8}")
    jobs: list[tuple[str, tuple[Any, ...]]] = [(f"prefill {n}", ("prefill", n)) for n in PREFILLS]
    jobs.append((f"decode at {DECODE_CONTEXT}", ("decode",)))
    for name, job in jobs:
        pairs = [(ours(*job, seed), theirs(*job, seed)) for seed in range(arguments.repeats + 1)][1:]
        mine, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        figures["tokens_per_s"][name] = {"chatterm": mine, "transformers": other, "ratio": mine / other}
        print(f"{name:<16}{mine:>12.1f}{other:>14.1f}{mine / other:>8.2f}")
    print(f"{'TTFT':<28}{'turn 2':>10}{'turn 10':>10}{'ratio':>8}")
    for index, (length, question) in enumerate(QUESTIONS.items()):
        for typed in (True, False):
            first = 1000 * index + 100 * typed  # another system prompt for every chat: nothing is cached yet
            chats = [ours("turns", question, typed, first + n) for n in range(arguments.repeats + 1)][1:]
            turn2, turn10 = (statistics.median(chat[turn] for chat in chats) for turn in (1, 9))
            name = f"{length}, {'typed' if typed else 'sent at once'}"
            figures["ttft_s"][name] = {"turn 2": turn2, "turn 10": turn10, "ratio": turn10 / turn2}
            print(f"{name:<28}{turn2 * 1e3:>7.0f} ms{turn10 * 1e3:>7.0f} ms{turn10 / turn2:>8.2f}")
    ours.close()
    theirs.close()
    figures["ready_s"] = statistics.median(seconds_to_ready() for _ in range(arguments.repeats))
    print(f"From command to ready model: {figures['ready_s']:.2f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
