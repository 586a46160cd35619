"""Write a checkpoint folder with the shapes of a Qwen3 and random weights, for chatterm, vLLM and transformers.

    python -m benchmarks.random_checkpoint 0.6B FOLDER [--device cuda] [--tokenizer FOLDER]

Its texts mean nothing: its tokens are bytes and made-up words, unless the tokenizer of another checkpoint is given.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, random_model, shared_tensors
from models.spec import Attention, FeedForward, ModelSpec, Norm, Rope, pre_norm_layer, uniform

SMALL = uniform(
    "Qwen3ForCausalLM",
    layers=12,
    vocab_size=32_000,
    hidden_size=512,
    max_positions=8192,
    layer=pre_norm_layer(Attention(8, 4, 64, head_norm=Norm(), rope=Rope(1e6)), FeedForward(1536), Norm()),
    tied=True,
)
"""50 million weights: a CPU computes it fast enough for many clients."""
CHECKPOINTS: dict[str, ModelSpec] = {name: SHAPES[name] for name in ("tiny", "0.6B", "1.7B", "4B", "8B")}
CHECKPOINTS["small"] = SMALL

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def write_checkpoint(
    folder: Path, spec: ModelSpec, device: torch.device, tokenizer: Path | None = None, seed: int = 0
) -> None:
    """Write a model of `spec` (Qwen3, dense) in bfloat16; `tokenizer` is a folder that has one.

    The weights are drawn on `device`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    network = random_model(spec, torch.bfloat16, device, 16, seed)
    tensors = shared_tensors(network)
    if spec.tied:
        del tensors["lm_head.weight"]
    # One at a time: a single tensor of the network becomes several here.
    save_file(
        {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    folder.joinpath("config.json").write_text(json.dumps(config_of(spec), indent=1))
    if tokenizer is None:
        _write_tokenizer(folder, spec.vocab_size)
        return
    for name in _FILES:
        if (source := tokenizer / name).exists():
            shutil.copy(source, folder / name)


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a dense Qwen3."""
    attention, feed = spec.attention, spec.layers[0].feed_forward
    assert isinstance(feed, FeedForward)
    assert attention.rope is not None
    end = spec.vocab_size - 1
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "intermediate_size": feed.size,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.final_norm.eps,
        "rope_theta": attention.rope.theta,
        "attention_bias": False,
        "max_position_embeddings": spec.max_positions,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": end,
        "bos_token_id": end - 2,
    }


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
    given = parser.parse_args()
    write_checkpoint(given.folder, CHECKPOINTS[given.shape], torch.device(given.device), given.tokenizer)


if __name__ == "__main__":
    main()
