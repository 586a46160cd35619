"""Small models for tests of programs that want a file with a tokenizer."""

from pathlib import Path

from gguf import GGMLQuantizationType

from benchmarks.random_checkpoint import shortened, with_vocabulary
from benchmarks.random_gguf import write_random_gguf
from engine.machine.shapes import CONFIGS
from models.families.registry import spec_of_hf
from models.weights.gguf import read_gguf

TOKENS, BASE = 4096, 252
"""How many tokens are kept, and how many of the default model's no merge makes; from there each merge makes one."""


def small_model(name: str, smollm2: Path, folder: Path) -> Path:
    """One with random weights and the tokenizer of the default model, but for its rarer tokens."""
    metadata = read_gguf(smollm2).metadata
    for key, count in (("tokens", TOKENS), ("token_type", TOKENS), ("merges", TOKENS - BASE)):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:count]
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    nets = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    raw = with_vocabulary(shortened(CONFIGS[name], 4), len(metadata["tokenizer.ggml.tokens"]))
    spec = spec_of_hf({**raw, **small, **nets, **dims})[1]
    write_random_gguf(folder / "small.gguf", spec, GGMLQuantizationType.Q8_0, 8192, metadata)
    return folder / "small.gguf"
