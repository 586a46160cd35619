"""The shapes of Qwen3 with random weights, and what one token of them moves and computes.

Speed does not depend on the values of the weights, so no checkpoint is needed: they are drawn on the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine import Engine
from engine.machine.expected import MODELS
from engine.schedule.loop import Loop
from models.families.config import ModelConfig
from models.load import build_model, fill_model
from models.reference.decoder import DecoderModel
from models.reference.layers import choose_product
from models.text.text_stream import TextStream, TokenBytes
from models.weights.checkpoint import StoredTensor

SHAPES = {
    "tiny": replace(
        MODELS["qwen3:0.6b"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=272,
    ),
    "0.6B": MODELS["qwen3:0.6b"],
    "1.7B": MODELS["qwen3:1.7b"],
    "4B": MODELS["qwen3:4b"],
    "8B": MODELS["qwen3:8b"],
}
"""Qwen3's published shapes; "tiny" is for trying a program out."""


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int, seed: int = 0
) -> DecoderModel:
    """The model of a config with normal weights of deviation 0.02 and norms of 1, drawn on the device."""
    model = build_model(config, choose_product(dtype, device))
    generator = torch.Generator(device).manual_seed(seed)

    def draw(target: Tensor) -> None:
        target.normal_(0.0, 0.02, generator=generator)

    def one(target: Tensor) -> None:
        target.fill_(1.0)

    tensors = []
    for name, _, slot in model.slots():
        count = torch.Size(slot.shape).numel()
        copy_into = one if len(slot.shape) == 1 else draw
        tensors.append(StoredTensor(name, slot.shape, count * dtype.itemsize, copy_into))
    fill_model(model, tensors, dtype, device, None, positions)
    return model


def shared_tensors(model: DecoderModel) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its Hugging Face name, as a view of the model's own memory."""
    tensors = {}
    for name, module, slot in model.slots():
        rows = getattr(module, slot.parameter).detach().narrow(0, slot.start, slot.rows)
        # Where a checkpoint's vector is repeated in every row, one row is the vector.
        tensors[name] = rows if rows.shape == slot.shape else rows[0]
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def parameter_count(config: ModelConfig) -> int:
    """All parameters without the embedding and without the head."""
    model = build_model(config, choose_product(torch.float32, torch.device("cpu")))
    unique = {id(p): p.numel() for name, p in model.named_parameters() if "embed" not in name}
    tied = config.tie_word_embeddings
    return sum(unique.values()) - (0 if tied else model.lm_head.weight.numel())


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Weights that one decoded token reads: all layers and the head (of an untied embedding, only a row)."""
    return (parameter_count(config) + config.vocab_size * config.hidden_size) * dtype.itemsize


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """K and V of one token, all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def moved_bytes(config: ModelConfig, dtype: torch.dtype, context: int, steps: int) -> float:
    """Bytes that a decoded token must move, the mean of `steps` tokens after `context`: weights and KV."""
    return weight_bytes(config, dtype) + kv_bytes(config, dtype) * (context + (steps + 1) / 2)


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """2 * parameters * T for the products of all layers, 2 * 2 * T^2 / 2 * Hq * D * L for causal attention.

    The head is left out: only the prompt's last position goes through it.
    """
    attention = 2 * tokens**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return 2.0 * parameter_count(config) * tokens + attention


class WordTokenizer:
    """Stands in for a tokenizer where weights are random: every token is a word, and none ends a turn."""

    generation_defaults: dict[str, float | int]
    stop_ids: frozenset[int] = frozenset()
    think_start: int | None = None
    think_end: int | None = None

    def __init__(self) -> None:
        self.generation_defaults = {}
        self._bytes = TokenBytes(lambda token_id: f"word{token_id} ", str.encode)

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self._bytes, frozenset())

    def close(self) -> None:
        """There is no template to end."""


@contextmanager
def random_engine(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    **options: Any,
) -> Iterator[tuple[Engine, DecoderModel]]:
    """An engine over a random model, and the model; `options` go to Engine as they are."""
    loop = Loop()

    def build() -> tuple[Engine, DecoderModel]:
        model = random_model(config, dtype, device, context)
        tokenizer: Any = WordTokenizer()
        made = Engine(
            loop, model, tokenizer, name="random", device=device, dtype=dtype, context=context, **options
        )
        return made, model

    try:
        engine, model = loop.call(build)
    except BaseException:
        loop.close()
        raise
    try:
        yield engine, model
    finally:
        engine.close()


def random_prompt(config: ModelConfig, tokens: int, seed: int) -> list[int]:
    """Random token ids: prompts of different seeds share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (tokens,), generator=generator).tolist()
