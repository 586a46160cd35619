"""chatterm's engine with many streams, as a server of `serving.py`; of this tree or of another one.

python -m benchmarks.peers.our_streams --shape 0.6B --rows 300000
python -m benchmarks.peers.our_streams --model smollm2 --device cpu
"""

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from benchmarks.peers.serving import Workload, answer, replies
from benchmarks.shapes import SHAPES, random_engine
from benchmarks.streams import Request, room_for, serve
from engine import Engine
from engine.attention.choose import choose_attention

try:
    from engine.execute.build_options import BuildOptions as Options
except ImportError:  # an older tree
    from engine.build import Options  # type: ignore[attr-defined,no-redef]


def head_dim_of(shape: Any) -> int:
    """Return the head size of a shape of this tree, or of an older one."""
    return int(shape.attention.head_dim if hasattr(shape, "attention") else shape.head_dim)


def nothing_offloaded() -> dict[str, Any]:
    """Return the option that turns offloading off in this tree, or in an older one."""
    names = getattr(Options, "__slots__", ())
    return {"offload" if "offload" in names else "spill": 0}


@contextmanager
def an_engine(arguments: argparse.Namespace) -> Iterator[Engine]:
    """Provide the engine that the arguments ask for; no token ends an answer."""
    device = torch.device(arguments.device)
    if arguments.model is not None:
        engine = Engine.load(
            arguments.model,
            device=arguments.device,
            context=arguments.context,
            **({"threads": arguments.threads} if arguments.threads else {}),
            **room_for(arguments.streams),
        )
        step = getattr(engine, "engine_step", None) or engine._engine_step  # of an older tree
        getattr(step, "answers", step).stop_ids = frozenset()
        try:
            yield engine
        finally:
            engine.close()
        return
    config = SHAPES[arguments.shape]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = arguments.attention or "auto"
    size = choose_attention(attention, device, dtype, head_dim_of(config)).block_size
    with random_engine(
        config,
        device=device,
        dtype=dtype,
        context=arguments.context,
        # Every stream may fill its last block in part.
        num_blocks=-(-arguments.rows // size) + arguments.streams + 1,
        attention=attention,
        **nothing_offloaded(),
        **room_for(arguments.streams),
    ) as (engine, _):
        yield engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention")
    parser.add_argument("--context", type=int, default=4096, help="the longest stream")
    parser.add_argument("--rows", type=int, default=8192, help="rows of all streams together")
    parser.add_argument("--streams", type=int, default=1, help="most that run at a time")
    parser.add_argument("--threads", type=int, help="of a processor, with --model")
    arguments = parser.parse_args()
    lines = replies()
    with an_engine(arguments) as engine:

        def seconds(workload: Workload) -> float:
            requests = [Request(*pair) for pair in zip(workload.prompts, workload.tokens, strict=True)]
            began = perf_counter()
            serve(engine, requests, workload.at_once, workload.temperature)
            return perf_counter() - began

        gc.freeze()  # as `chatterm batch` does
        figures = engine.figures()
        about = {name: getattr(figures, name) for name in ("attention", "decode", "kv_bytes", "notes")}
        answer(lines, about | {"vocabulary": engine.vocab_size}, seconds)


if __name__ == "__main__":
    main()
