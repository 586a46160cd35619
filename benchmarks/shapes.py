"""The shapes of Qwen3 and other models with random weights, and the bytes and FLOPs of one of their tokens.

Speed does not depend on the values of the weights, so no checkpoint is needed: they are drawn on the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine import Engine
from engine.cache.kv_rows import token_bytes
from engine.cache.layer_groups import layer_groups
from engine.cache.states import state_sizes
from engine.execute.build_options import BuildOptions
from engine.machine.shapes import known_shape
from engine.schedule.loop import Loop
from models.families.common import pre_norm_layer, uniform
from models.families.family import NAMES
from models.loading.load import fill_network
from models.loading.plan import Target, plan_tensors
from models.network import FeedForwardWeights, Network
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope, each_attention
from models.text.text_stream import TextStream, TokenBytes
from models.weights.checkpoint import StoredTensor
from models.weights.share import Share
from models.weights.slots import Slot, layer_parameters, slots

SHAPES = {
    "tiny": uniform(
        "Qwen3ForCausalLM",
        layers=2,
        vocab_size=272,
        hidden_size=64,
        max_positions=40_960,
        layer=pre_norm_layer(
            Attention(4, 2, 128, head_norm=Norm(), rope=Rope(1e6)), FeedForward(128), Norm()
        ),
        tied=True,
    ),
    "0.6B": known_shape("qwen3:0.6b"),
    "1.7B": known_shape("qwen3:1.7b"),
    "4B": known_shape("qwen3:4b"),
    "8B": known_shape("qwen3:8b"),
    "30B-A3B": known_shape("qwen3:30b-a3b"),
    "235B-A22B": uniform(
        "Qwen3MoeForCausalLM",
        layers=94,
        vocab_size=151_936,
        hidden_size=4096,
        max_positions=40_960,
        layer=pre_norm_layer(
            Attention(64, 4, 128, head_norm=Norm(), rope=Rope(1e6)),
            Experts(128, 8, FeedForward(1536)),
            Norm(),
        ),
        tied=False,
    ),
    "32B": uniform(
        "Qwen3ForCausalLM",
        layers=64,
        vocab_size=151_936,
        hidden_size=5120,
        max_positions=40_960,
        layer=pre_norm_layer(
            Attention(64, 8, 128, head_norm=Norm(), rope=Rope(1e6)), FeedForward(25_600), Norm()
        ),
        tied=False,
    ),
    "70B": uniform(
        "LlamaForCausalLM",
        layers=80,
        vocab_size=128_256,
        hidden_size=8192,
        max_positions=8192,
        layer=pre_norm_layer(Attention(64, 8, 128, rope=Rope(5e5)), FeedForward(28_672), Norm()),
        tied=False,
    ),
    "Qwen3.5-0.8B": known_shape("qwen3.5:0.8b"),
    "Qwen3.5-4B": known_shape("qwen3.5:4b"),
    "Qwen3.5-9B": known_shape("qwen3.5:9b"),
    "Qwen3.5-35B-A3B": known_shape("qwen3.5:35b-a3b"),
    "Qwen2.5-0.5B": known_shape("qwen2.5:0.5b"),
    "Gemma-2-2B": known_shape("gemma2:2b"),
    "Gemma-3-1B": known_shape("gemma3:1b"),
    "Gemma-4-E2B": known_shape("gemma4:e2b"),
    "Gemma-4-E4B": known_shape("gemma4:e4b"),
    "Gemma-4-12B": known_shape("gemma4:12b"),
    "Gemma-4-26B-A4B": known_shape("gemma4:26b-a4b"),
    "LFM2.5-1.2B": known_shape("lfm2.5:1.2b"),
    "GLM-4.7-Flash": known_shape("glm4.7-flash"),
    "Llama-3.2-1B": known_shape("llama3.2:1b"),
    "Mistral-7B-v0.1": each_attention(
        known_shape("mistral:7b"), lambda _, attention: replace(attention, window=4096)
    ),
    "Phi-4-mini": known_shape("phi4-mini:3.8b"),
}
"""Published shapes, those of Qwen3 by size alone; "tiny" is for trying a program out."""


def names_of(spec: ModelSpec) -> dict[str, str]:
    """Return Qwen3's names for the parts that Qwen3 has, and made-up names for the others."""
    parts = {slot.part: slot for slot in slots(spec)}
    names = {"layers": NAMES["layers"]}
    for part, slot in parts.items():
        name = NAMES.get(part)
        if name is None or name in names.values():  # several families share one table
            name = part + (".{}" if slot.expert is not None else "")
        names[part] = name
    return names


def random_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    seed: int = 0,
    rank: tuple[int, int] = (0, 1),
) -> Network:
    """Draw a network on the device, with normal weights of deviation 0.02, norms of 1 and states that decay.

    `rank` is (index, number of parts) for one part of a divided network; each part has its own random weights.
    """
    share = Share(*rank, spec) if rank[1] > 1 else None
    if share is not None:
        spec = share.spec
    generator = torch.Generator(device).manual_seed(seed)

    def draw(target: Tensor) -> None:
        target.normal_(0.0, 0.02, generator=generator)

    def one(target: Tensor) -> None:
        target.fill_(1.0)

    def decaying(target: Tensor) -> None:
        target.fill_(-1.0)

    def values(slot: Slot) -> Callable[[Tensor], None]:
        return decaying if slot.part == "decay" else one if len(slot.shape) == 1 else draw

    names = names_of(spec)
    tensors = [
        StoredTensor(
            slot.name(names),
            slot.shape,
            prod(slot.shape) * dtype.itemsize,
            values(slot),
        )
        for slot in slots(spec)
    ]
    target = Target(dtype, device, context_length=positions)
    return fill_network(plan_tensors(spec, tensors, target, names, share=share))


def shared_tensors(network: Network) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its Hugging Face name, as a view of the network's own memory."""
    tensors = {}
    for slot in slots(network.spec):
        rows = _group(network, slot).narrow(0, slot.start, slot.rows)
        # If a checkpoint's vector is repeated in every row, any row is the vector.
        tensors[slot.name(NAMES)] = rows[0] if slot.repeated else rows
    if network.spec.tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def _group(network: Network, slot: Slot) -> Tensor:
    """Return the tensor that a slot is a part of."""
    if slot.layer is None:
        whole = {
            "embedding": network.embedding.data,
            "final_norm": network.final_norm.weight,
            "head": network.head.weight,
        }
        return whole[slot.part]
    layer = network.layers[slot.layer]
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(feed_forward, FeedForwardWeights)
    norms = {"attention_norm": layer.attention_norm, "feed_forward_norm": layer.feed_forward_norm}
    if (norm := norms.get(slot.part)) is not None:
        return norm.weight
    if slot.part in ("q_norm", "k_norm"):
        assert attention.head_norm is not None
        return attention.head_norm
    linears = {
        "qkv": attention.qkv,
        "out": attention.out,
        "gate_up": feed_forward.gate_up,
        "down": feed_forward.down,
    }
    linear = linears[slot.group.split(".")[-2]]
    if slot.field == "weight":
        return linear.weight
    assert linear.bias is not None
    return linear.bias


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of weights that a decoded token reads: all layers and the head, without an untied embedding."""
    return (layer_parameters(spec) + spec.vocab_size * spec.hidden_size) * dtype.itemsize


def kv_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of one token in all layers."""
    return token_bytes(spec, dtype)


def cache_bytes(spec: ModelSpec, dtype: torch.dtype, context: float, kind: str = "auto") -> float:
    """Return the bytes of the KV cache that a decoded token moves after `context` others: the rows that its layers see
    of K and V in `kind`, and states of recurrent layers, which are read and written."""
    groups = layer_groups(spec, dtype, kind)
    primary = token_bytes(spec, dtype, kind) - sum(group.token_bytes for group in groups)
    total = primary * min(context, spec.window or context) + 2.0 * sum(state_sizes(spec).values())
    for group in groups:
        total += group.token_bytes * min(context, group.window if group.tail is None else group.tail)
    return total


def prefill_flops(spec: ModelSpec, tokens: int) -> float:
    """Return 2 * parameters * T for the products of all layers, plus 2 * 2 * T^2 / 2 * Hq * D for causal attention.

    A layer with a window W < T counts T^2 - (T - W)^2 instead of T^2. Recurrences and convolutions are left out, and so
    is the head: only the prompt's last position goes through it.
    """
    flops = 2.0 * layer_parameters(spec) * tokens
    for each in spec.attentions.values():
        seen = tokens**2 - max(tokens - (each.window or tokens), 0) ** 2
        flops += 2 * seen * each.heads * each.head_dim
    return flops


class WordTokenizer:
    """Replaces the tokenizer of random weights: every token is a word, and none ends a turn."""

    generation_defaults: dict[str, float | int]
    stop_ids: frozenset[int] = frozenset()
    suppressed_ids: frozenset[int] = frozenset()
    think_start: int | None = None
    think_end: int | None = None
    think_markers: None = None
    channels: None = None

    def __init__(self) -> None:
        self.generation_defaults = {}
        self._bytes = TokenBytes(lambda token_id: f"word{token_id} ", str.encode)

    def stream(self, shown: frozenset[int] = frozenset(), goes_on: bool = False) -> TextStream:
        """Return a new incremental decoder; no token is special, and words stand for themselves."""
        return TextStream(self._bytes, frozenset())

    def close(self) -> None:
        """Do nothing, because there is no template to end."""


@contextmanager
def random_engine(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    network: Network | None = None,
    make: Callable[[], Network] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Iterator[tuple[Engine, Network]]:
    """Provide an engine with a random model (`network`, or the result of `make`), and the model.

    `options` are those of its building. Without a `tokenizer` every token is a word.
    """
    loop = Loop()
    words = tokenizer or WordTokenizer()

    def build() -> tuple[Engine, Network]:
        model = network or (make() if make is not None else random_model(spec, dtype, device, context))
        given = BuildOptions(context=context, **options)
        made = Engine(loop, model, words, given, name="random", device=device)
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


def random_prompt(spec: ModelSpec, tokens: int, seed: int) -> list[int]:
    """Return random token ids; prompts of different seeds share no prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab_size, (tokens,), generator=generator).tolist()
