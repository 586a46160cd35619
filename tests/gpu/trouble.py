"""An engine on a GPU in trouble, as a program: `python -m tests.gpu.trouble FOLDER MODE` prints as JSON what happened.

FOLDER gets a quantised checkpoint with random weights, unless it has one; SHAPE in the environment names its shape.
The modes: `usual`; `unfused`: the fused kernels fail; `lost`: a kernel fails, and with it the GPU; `short`: memory
runs out in a step.
"""

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import engine.build
from benchmarks.random_checkpoint import CHECKPOINTS, write_checkpoint
from engine import SamplingParams
from engine.engine import Engine
from engine.errors import EngineError
from tests.engine.inside import evict_all

PROMPT = list(range(7, 207))
COUNT = 128
PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, max_tokens=COUNT)
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


def write_quantized(folder: Path, shape: str) -> None:
    """Write a checkpoint whose layers are in int8 with one scale for each row."""
    write_checkpoint(folder, CHECKPOINTS[shape], torch.device("cuda"))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".layers." in name and name.endswith("proj.weight"):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))


def tokens(engine: Engine) -> list[int]:
    return [event.token_id for event in engine.stream(PROMPT, PARAMS)]


def usual(engine: Engine) -> dict[str, Any]:
    tokens(engine)
    began = perf_counter()
    said = tokens(engine)
    return {"tokens": said, "rate": len(said) / (perf_counter() - began)}


def lost(engine: Engine) -> dict[str, Any]:
    """Have a kernel fail on the loop's thread, then ask three times, and load the model again."""

    def fail() -> None:
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]

    engine.loop.post(fail)
    errors = []
    for ask in [lambda: tokens(engine)] * 3 + [lambda: Engine.load(sys.argv[1], device="cuda")]:
        try:
            ask()
        except EngineError as error:
            errors.append(str(error))
    return {"errors": errors, "closed": engine.is_closed, "lost": engine.lost_gpu}


def short(engine: Engine) -> dict[str, Any]:
    """Answer, and answer again while memory runs out in a step of the prompt and in one that decodes."""
    before = tokens(engine)
    chunks: list[int] = []
    launches: list[int] = []
    run, runner = engine.pieces.runner.run, engine.pieces.decode_runner
    assert runner is not None
    launch = runner.launch

    def narrow(batch: Any) -> Any:
        chunks.append(sum(span.count for span in batch.spans))
        if chunks[-1] > 150:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return run(batch)

    def fail_once(sequences: Any) -> Any:
        launches.append(len(sequences))
        if len(launches) == 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return launch(sequences)

    evict_all(engine)
    engine.pieces.runner.run, runner.launch = narrow, fail_once  # type: ignore[method-assign]
    return {"chunks": chunks, "before": before, "tokens": tokens(engine)}


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("no kernel image is available")


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if not (folder / "config.json").exists():
        write_quantized(folder, os.environ.get("SHAPE", "small"))
    if mode == "unfused":
        engine.build.make_decode_runner = refuse  # type: ignore[assignment]
    model = Engine.load(str(folder), device="cuda", context=2048)
    figures, packed = model.figures(), model.pieces.network.is_packed
    found = {"usual": usual, "unfused": usual, "lost": lost, "short": short}[mode](model)
    model.close()
    told = {"notes": figures.notes, "decode": figures.decode, "packed": packed, "bytes": figures.weight_bytes}
    print(json.dumps(told | found))


if __name__ == "__main__":
    main()
