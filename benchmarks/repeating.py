"""A small model whose text repeats itself, so that there is something to guess, at any speed.

A letter is followed by one of two others, as in a sentence that is said over and over with small changes. The layers
have random weights and enough influence that what follows depends on everything before it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.random_checkpoint import qwen3, shortened, write_checkpoint
from engine import Engine
from engine.machine.shapes import CONFIGS

SENTENCE = "the old keeper climbed his stairs; you may find a joke, or quiz vow as a box. "
"""The sentence that is repeated: each letter leads to those that follow it here."""
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINKING = ("<think>", "</think>")
_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
_STEERING = (
    ("\n", "<think>", 1.0),
    ("\n", "t", 1.0),
    ("<think>", "m", 1.0),
    ("s", "</think>", 0.7),
    ("</think>", "t", 1.0),
    ("s", "<|im_end|>", 0.6),
    ("x", "<|im_end|>", 1.0),
)
"""Which mark follows which text, and how strongly."""
_LOUDNESS = 0.03 / 64
"""Deviation of the embedding relative to the width of the layers, which then add about as much to it."""
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_SURENESS = 0.4
"""A factor of the head: the logit of a letter that follows, for a row of size 1."""


def _tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, and of the marks of turns and of thinking."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: id for id, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    made.add_tokens([AddedToken(text, special=False) for text in _THINKING])
    return made


def write_repeating(
    folder: Path, hidden: int = 64, head_dim: int = 16, seed: int = 0, recurrent: bool = False
) -> None:
    """Write the checkpoint of a repeating model, with the layers of Qwen3 or, if `recurrent`, of Qwen3.5."""
    from safetensors.torch import load_file, save_file

    tokenizer = _tokenizer()
    size = tokenizer.get_vocab_size()
    raw = qwen3(hidden, 2 * hidden, 2, (4, 2), size)
    if recurrent:
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        dims = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), head_dim)
        same = {name: raw[name] for name in _SIZES}
        raw = shortened(CONFIGS["qwen3.5:0.8b"] | same, 4) | heads | dims
    raw |= {"head_dim": head_dim, "max_position_embeddings": 8192, "tie_word_embeddings": False}
    source = folder / "tokenizer"
    source.mkdir(parents=True)
    tokenizer.save(str(source / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "eos_token": "<|im_end|>",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    write_checkpoint(folder, raw, torch.device("cpu"), source, seed)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nn.functional.normalize(torch.randn(size, hidden, generator=generator))
    loud = _LOUDNESS * (hidden * raw["num_attention_heads"] * head_dim) ** 0.5
    tensors["model.embed_tokens.weight"] = (rows * loud * hidden**0.5).bfloat16()
    follows = torch.zeros(size, size)
    for first, second in zip(SENTENCE, SENTENCE[1:] + SENTENCE[0], strict=True):
        follows[_id(tokenizer, second), _id(tokenizer, first)] = 1.0
    for first, second, much in _STEERING:
        follows[_id(tokenizer, second), _id(tokenizer, first)] = much
    tensors["lm_head.weight"] = (follows @ rows * _SURENESS * hidden**0.5).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a text that is one token."""
    (found,) = tokenizer.encode(text).ids
    return int(found)


@contextmanager
def repeating_engine(
    streams: int = 8,
    seed: int = 0,
    draft: int | None = None,
    device: str = "cpu",
    recurrent: bool = False,
) -> Iterator[Engine]:
    """Load an engine with such a model and, if `draft` is given, a draft model of that seed, which is nearly always
    right if the seeds are the same. On a GPU the model's heads suit the fused kernels, and results do not depend on
    what else is in a step."""
    on_cpu = device == "cpu"
    sizes = {} if on_cpu else {"hidden": 320, "head_dim": 128}
    with TemporaryDirectory() as folder:
        path, other = Path(folder) / "repeating", Path(folder) / "draft"
        write_repeating(path, seed=seed, recurrent=recurrent, **sizes)
        if draft is not None:
            write_repeating(other, seed=draft, recurrent=recurrent, **sizes)
        engine = Engine.load(
            str(path),
            device=device,
            deterministic=not on_cpu,
            quantize="int8" if on_cpu else "auto",
            context=2048,
            streams=streams,
            draft=None if draft is None else str(other),
        )
    try:
        yield engine
    finally:
        engine.close()


def sentence(random: Random, words: int) -> str:
    """Return a message of words from SENTENCE."""
    return " ".join(random.choices(SENTENCE.split(), k=words))
