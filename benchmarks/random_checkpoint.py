"""Write a checkpoint with the shapes of a published model and random weights, for chatterm, vLLM and transformers.

    python -m benchmarks.random_checkpoint 0.6B FOLDER [--device cuda] [--tokenizer FOLDER] [--layers N]

The shapes are those of the catalogue (gemma4:e2b, lfm2.5:8b-a1b, ...) and some smaller ones. transformers writes the
file, so the names of its tensors are those of the published checkpoints; images are left out. Its texts mean nothing:
its tokens are bytes and made-up words, unless the tokenizer of another checkpoint is given.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.machine.shapes import CONFIGS
from models.families.registry import FAMILIES


def qwen3(
    hidden: int, feed_forward: int, layers: int, heads: tuple[int, int], vocab_size: int
) -> dict[str, Any]:
    """Return the config of a dense Qwen3; `heads` are those of queries and of keys."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab_size,
    }
    return CONFIGS["qwen3:0.6b"] | sizes


_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
GRANITE_HYBRID: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "vocab_size": 100_352,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "layer_types": [
        "full_attention" if layer in (5, 15, 25, 35) else "linear_attention" for layer in range(40)
    ],
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
"""Granite-4.0-H-Tiny."""
NEMOTRON_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "layers_block_type": [
        _NEMOTRON_KINDS[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    ],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "vocab_size": 131_072,
    "max_position_embeddings": 262_144,
}
"""Nemotron-3-Nano-30B-A3B."""

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "tiny": qwen3(64, 128, 2, (4, 2), 272),
    # 50 million weights: a CPU computes it fast enough for many clients.
    "small": qwen3(512, 1536, 12, (8, 4), 32_000) | {"head_dim": 64, "max_position_embeddings": 8192},
    **{size: CONFIGS[f"qwen3:{size.lower()}"] for size in ("0.6B", "1.7B", "4B", "8B")},
    **CONFIGS,
    "granite4-h:tiny": GRANITE_HYBRID,
    "nemotron3:30b-a3b": NEMOTRON_NANO,
}
"""The configs by name: those of Qwen3 by size alone, too."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def write_checkpoint(
    folder: Path, raw: dict[str, Any], device: torch.device, tokenizer: Path | None = None, seed: int = 0
) -> None:
    """Write a model with the config `raw` in bfloat16; `tokenizer` is a folder that has one.

    The weights are drawn on `device`, normal with a deviation of 0.02; norms are 1.
    """
    from transformers import AutoModelForCausalLM

    end = raw["vocab_size"] - 1
    torch.manual_seed(seed)
    with device:
        network = AutoModelForCausalLM.from_config(
            hf_config(raw | {"eos_token_id": end, "bos_token_id": end - 2}), dtype=torch.bfloat16
        )
    network.save_pretrained(folder)
    if tokenizer is None:
        _write_tokenizer(folder, raw["vocab_size"])
        return
    for name in _FILES:
        if (source := tokenizer / name).exists():
            shutil.copy(source, folder / name)


def hf_config(raw: dict[str, Any]) -> Any:
    """Return transformers' config for the fields of a config.json."""
    from transformers import AutoConfig

    (name,) = raw["architectures"]
    family = next(family for family in FAMILIES if name in family.architectures)
    return AutoConfig.for_model(family.model_types[family.architectures.index(name)], **raw)


def shortened(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config with the first `layers` layers alone; the share of them that have no KV of their own stays."""
    before = raw["num_hidden_layers"]
    found = raw | {"num_hidden_layers": layers}
    for kinds in {"layer_types", "layers_block_type"} & raw.keys():
        found[kinds] = raw[kinds][:layers]
    if "num_kv_shared_layers" in raw:
        found["num_kv_shared_layers"] = raw["num_kv_shared_layers"] * layers // before
    return found


def with_vocabulary(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return a config with the vocabulary of another tokenizer."""
    keys = ("vocab_size", "vocab_size_per_layer_input")
    return raw | {key: size for key in keys if key in raw}


def _write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of bytes, made-up words that no text is tokenised to, and, at the end, the marks of turns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġword{number}" for number in range(size - len(letters) - len(_SPECIAL))]
    made = Tokenizer(models.BPE({token: id for id, token in enumerate([*letters, *words])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    assert made.get_vocab_size() == size
    made.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 1_000_000,
    }
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(told, indent=1))


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=CHECKPOINTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json and its configuration")
    parser.add_argument("--layers", type=int, help="write fewer layers")
    given = parser.parse_args()
    raw = CHECKPOINTS[given.shape]
    if given.layers is not None:
        raw = shortened(raw, given.layers)
    write_checkpoint(given.folder, raw, torch.device(given.device), given.tokenizer)


if __name__ == "__main__":
    main()
