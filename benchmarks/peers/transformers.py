"""transformers: Qwen3ForCausalLM with the same weights, a static cache and a compiled forward (reduce-overhead).

The decode loop is the one that its documentation shows for a static cache: forward and argmax in one compiled
function, with the token fed back. It is faster than generate(), which adds work to every token. The cache is as long
as the context needs, because its attention reads all of it. torch.compile makes lengths dynamic when it sees a second
one, so the first context measured is compiled for its own length.
"""

import time
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from engine.kernels.recording import wait_for
from models.spec import FeedForward, ModelSpec


def fields_of(spec: ModelSpec) -> dict[str, Any]:
    """Return a transformers configuration with the same shapes, as keyword arguments."""
    attention, feed_forward = spec.attention, spec.layers[0].feed_forward
    assert isinstance(feed_forward, FeedForward)
    assert attention.rope is not None
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": feed_forward.size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.final_norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope.theta},
        "tie_word_embeddings": spec.tied,
    }


def network_of(spec: ModelSpec, tensors: dict[str, Tensor], device: torch.device) -> Qwen3ForCausalLM:
    """Build the model around these tensors (by Hugging Face name, used by reference)."""
    theirs = Qwen3Config(**fields_of(spec), attn_implementation="sdpa")
    with torch.device("meta"):
        network = Qwen3ForCausalLM(theirs)
    network.load_state_dict(tensors, assign=True)
    # Its frequencies are not part of a checkpoint and are still on the meta device.
    network.model.rotary_emb = Qwen3RotaryEmbedding(theirs).to(device)
    return network.requires_grad_(False).eval()


class Transformers:
    """Decoding with a static cache and a compiled step."""

    name = "transformers"

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._network = network_of(spec, tensors, device)
        self._step = torch.compile(self._next, mode="reduce-overhead")
        self._cache: StaticCache | None = None

    def _next(self, token: Tensor, cache: StaticCache) -> Tensor:
        out = self._network(token, past_key_values=cache, use_cache=True)
        chosen: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    def prepare(self, context: int, steps: int) -> str | None:
        """Make a cache for this context with random contents, and compile the step for it."""
        length = -(-(context + steps) // 64) * 64
        attention = self._spec.attention
        self._cache = None
        cache = StaticCache(config=self._network.config, max_cache_len=length)
        cache.early_initialization(
            1, attention.kv_heads, attention.head_dim, self._network.dtype, self._device
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self._cache = cache
        # The first runs compile and record a graph; later ones replay it.
        self.decode(context, 4)
        return f"cache of {length}"

    @torch.no_grad()
    def decode(self, context: int, steps: int) -> float:
        """Return seconds per token of `steps` tokens after `context`."""
        assert self._cache is not None
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(context)
        token = torch.ones(1, 1, dtype=torch.int64, device=self._device)
        wait_for(self._device)
        began = time.perf_counter()
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            token = self._step(token, self._cache).clone()
        wait_for(self._device)
        return (time.perf_counter() - began) / steps


class Prefill:
    """Prompts through the eager model with its default, growing cache; logits of the last position only."""

    name = "transformers"

    def __init__(self, spec: ModelSpec, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._network = network_of(spec, tensors, device)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Return seconds for the whole prompt."""
        ids = torch.tensor([prompt], device=self._device)
        wait_for(self._device)
        began = time.perf_counter()
        self._network(ids, use_cache=True, logits_to_keep=1)
        wait_for(self._device)
        return time.perf_counter() - began


@torch.inference_mode()
def all_logits(network: Qwen3ForCausalLM, token_ids: list[int], device: torch.device) -> Tensor:
    """Return the fp32 logits [T, vocab] after each of T `token_ids`, computed in one pass."""
    logits: Tensor = network(torch.tensor([token_ids], device=device), use_cache=False).logits[0]
    return logits.float()
