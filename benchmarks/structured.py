"""Answers that match a schema, and free text: tokens/s of both in turns, and the cost of a constrained neighbour.

    python -m benchmarks.structured                                          a model of the catalogue, on this machine
    python -m benchmarks.structured --shape 8B --tokenizer shared/qwen3-tokenizer --streams 1 8      random weights
    python -m benchmarks.structured --shape tiny --tokenizer shared/qwen3-tokenizer --tokens 40      tries it out

- free: no constraint. All other figures are ratios to it, of the medians of rounds that take turns.
- string: one JSON string that may not end: every token is drawn under a mask, and nothing is forced.
- records: a list of objects with names, choices and numbers, as schemas have them: much of it is forced.
- records, one by one: the same with log-probabilities, for which no token can be skipped.
- beside: all streams but one are free; tokens/s of the free ones, compared with the same without a constrained one.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter

import torch

from benchmarks.shapes import SHAPES, random_engine
from engine import Constraint, Engine, SamplingParams
from engine.cache.rows import Rows
from engine.schedule.sequence import Sequence
from models.text.folder_tokenizer import parts_from_folder
from models.text.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "minLength": 3, "maxLength": 12},
        "last_name": {"type": "string", "minLength": 3, "maxLength": 12},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "status": {"enum": ["employed", "retired", "in training", "looking for work"]},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "year_of_birth", "status", "is_member"],
    "additionalProperties": False,
}
STRING = Constraint("json_schema", json.dumps({"type": "string", "minLength": 100_000}))
RECORDS = Constraint("json_schema", json.dumps({"type": "array", "items": RECORD, "minItems": 10_000}))
KINDS = {
    "free": SamplingParams(temperature=0.8, top_k=40),
    "string": SamplingParams(temperature=0.8, top_k=40, constraint=STRING),
    "records": SamplingParams(temperature=0.8, top_k=40, constraint=RECORDS),
    "records, one by one": SamplingParams(temperature=0.8, top_k=40, constraint=RECORDS, logprobs=0),
}
PROMPT = "Write a very long list of people, with all that is known of them, and do not stop."


def rates(engine: Engine, params: list[SamplingParams], tokens: int, seed: int) -> list[float]:
    """Return tokens/s after the first of answers that are asked for at once, each of at most `tokens` tokens."""
    prompt = engine.tokenizer.encode_plain(PROMPT)
    sequences: list[Sequence] = []

    def ask() -> None:
        for index, one in enumerate(params):
            given = {name: getattr(one, name) for name in SamplingParams.__slots__}
            mine = SamplingParams(**given | {"seed": seed + index, "max_tokens": tokens})
            sequences.append(
                engine.start(Rows.of([*prompt, *engine.tokenizer.encode_plain(f" {index}")]), mine)
            )

    engine.loop.call(ask)
    found = [0.0] * len(sequences)

    def listen(index: int) -> None:
        count, began = 0, 0.0
        for _ in engine.events(sequences[index]):
            began = began or perf_counter()
            count += 1
        found[index] = (count - 1) / max(perf_counter() - began, 1e-9)

    threads = [Thread(target=listen, args=(index,)) for index in range(len(sequences))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def compare(engine: Engine, tokens: int, rounds: int, streams: int) -> None:
    """Print tokens/s of all streams together by kind, and of free streams beside a constrained one."""
    print(f"\n{streams} stream{'s' * (streams > 1)}, {tokens} tokens each, {rounds} rounds")
    measured: dict[str, list[float]] = {name: [] for name in KINDS}
    beside: dict[str, list[float]] = {"free": [], "records": []}
    for seed in range(rounds + 1):
        for name, params in KINDS.items():
            total = sum(rates(engine, [params] * streams, tokens, seed))
            measured[name] += [total] if seed else []  # the first round compiles
        for name in beside if streams > 1 else ():
            mixed = rates(engine, [KINDS[name], *[KINDS["free"]] * (streams - 1)], tokens, seed)
            beside[name] += [sum(mixed[1:])] if seed else []
    free = statistics.median(measured["free"])
    for name, values in measured.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(
            f"{name:<22} {statistics.median(values):9.1f} tok/s   {statistics.median(values) / free:6.2f}   {spread}"
        )
    if streams > 1:
        ratio = statistics.median(beside["records"]) / statistics.median(beside["free"])
        print(
            f"{'beside':<22} {statistics.median(beside['records']):9.1f} tok/s   {ratio:6.2f}   of the free ones"
        )


@contextmanager
def engine_of(arguments: argparse.Namespace) -> Iterator[Engine]:
    """Provide the engine to measure."""
    context, streams = arguments.tokens + 64, max(arguments.streams)
    if arguments.shape is None:
        engine = Engine.load(arguments.model, device=arguments.device, context=context, streams=streams)
        try:
            yield engine
        finally:
            engine.close()
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer(parts_from_folder(Path(arguments.tokenizer)))
    spec = SHAPES[arguments.shape]
    if spec.vocab_size < tokenizer.vocab_size:
        spec = replace(spec, vocab_size=-(-tokenizer.vocab_size // 64) * 64)
    with random_engine(
        spec,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        context=context,
        tokenizer=tokenizer,
        streams=streams,
    ) as (engine, _):
        yield engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--shape", choices=SHAPES, help="random weights of this shape, on a GPU where there is one"
    )
    parser.add_argument("--tokenizer", default="shared/qwen3-tokenizer", help="its folder, for --shape")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    with engine_of(arguments) as engine:
        began = perf_counter()
        engine.output(KINDS["string"])
        figures = engine.figures()
        print(f"{figures.model_name}, {figures.decode}; vocabulary of {engine.vocab_size:,}, ", end="")
        print(f"read in {perf_counter() - began:.2f} s")
        for streams in arguments.streams:
            compare(engine, arguments.tokens, arguments.rounds, streams)


if __name__ == "__main__":
    main()
