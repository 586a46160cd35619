"""The memory of one conversation's KV cache, compared with that of transformers, from the shapes of models alone.

    python -m benchmarks.kv_memory [--tokens 32768] [--models gemma4:31b,lfm2.5:1.2b] [--json FILE]

Both keep K and V in bf16. For transformers it is what `DynamicCache` holds after a prompt of that many tokens: layers
with a window hold only that window, as with chatterm. Nothing is computed, and no tensor takes memory.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.options import names
from benchmarks.random_checkpoint import hf_config
from engine.cache.kv_needs import kv_needs
from engine.machine.shapes import CONFIGS, known_shape
from models.spec import ModelSpec, ShortConvolution
from models.units import bytes_text

MODELS = (
    "gemma4:e2b",
    "gemma4:e4b",
    "gemma4:12b",
    "gemma4:26b-a4b",
    "gemma4:31b",
    "lfm2.5:1.2b",
    "lfm2.5:8b-a1b",
    "ministral3:3b",
    "ministral3:8b",
    "ministral3:14b",
    "granite4:1b",
    "granite4:3b",
    "exaone4:1.2b",
    "exaone4:32b",
    "seed-oss:36b",
    "hunyuan:1.8b",
    "hunyuan:4b",
    "hunyuan:7b",
    "command-r:7b",
)


def our_bytes(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of the rows of a conversation, without room for a chunk of a prompt or for branches."""
    return kv_needs(spec, torch.bfloat16).conversation_bytes(tokens)


def transformers_bytes(name: str, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of a cache of transformers after a prompt of `tokens` tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=hf_config(CONFIGS[name]))
    for index, layer in enumerate(spec.layers):
        if isinstance(mixer := layer.mixer, ShortConvolution):
            cache.update_conv_state(_meta(1, mixer.size, mixer.width), index)
        elif mixer.kv_from is None:
            rows = _meta(1, mixer.kv_heads, tokens, mixer.head_dim)
            cache.update(rows, rows, index)
    parts = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
    states = [state for layer in cache.layers for state in getattr(layer, "conv_states", {}).values()]
    return sum(tensor.nbytes for tensor in (*parts, *states) if tensor is not None)


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def main() -> None:
    """Parse the command line and print one line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="also write the bytes to this file")
    given = parser.parse_args()
    if unknown := [name for name in given.models if name not in CONFIGS]:
        parser.error(f"--models: there is no {unknown[0]!r}; choose from {', '.join(CONFIGS)}")
    found: dict[str, dict[str, int]] = {}
    print(f"{f'{given.tokens:,} tokens':<18}{'chatterm':>12}{'transformers':>14}")
    for name in given.models:
        spec = known_shape(name)
        tokens = min(given.tokens, spec.max_positions)
        ours, theirs = our_bytes(spec, tokens), transformers_bytes(name, spec, tokens)
        found[name] = {"chatterm": ours, "transformers": theirs}
        print(f"{name:<18}{bytes_text(ours):>12}{bytes_text(theirs):>14}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
