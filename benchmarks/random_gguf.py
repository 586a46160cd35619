"""Write a GGUF file with the shapes of Qwen3, dense or with experts, and random quantised weights. Any program that
reads GGUF can run it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from models.families.common import pre_norm_layer, uniform
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope

_STD = 0.02
_SCALES = {Kind.Q8_0: _STD / 74, Kind.Q4_0: _STD / 4.6}
"""The block scales with which uniform digits have the deviation of a fresh layer."""

MOE = uniform(
    "Qwen3MoeForCausalLM",
    layers=16,
    vocab_size=49_152,
    hidden_size=1024,
    max_positions=40_960,
    layer=pre_norm_layer(
        Attention(16, 4, 128, head_norm=Norm(), rope=Rope(1e6)), Experts(16, 4, FeedForward(768)), Norm()
    ),
    tied=True,
)
"""A small mixture of experts: 0.74 billion weights, of which a token reads 0.29 billion."""


def write_random_qwen3(path: Path, spec: ModelSpec, kind: Kind, context: int) -> None:
    """Write a model of `spec` (tied embeddings, identical layers) whose matrices are of `kind`, Q8_0 or Q4_0.

    The router is random, too, so that experts are chosen by the content of a row.
    """
    feed = spec.layers[0].feed_forward
    experts = feed if isinstance(feed, Experts) else None
    inner = feed.size if isinstance(feed, FeedForward) else feed.expert.size
    writer = gguf.GGUFWriter(path, "qwen3" if experts is None else "qwen3moe")
    writer.add_name("random")
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(context)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(inner)
    if experts is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.chosen)
        writer.add_expert_feed_forward_length(inner)
    writer.add_head_count(spec.attention.heads)
    writer.add_head_count_kv(spec.attention.kv_heads)
    writer.add_key_length(spec.attention.head_dim)
    writer.add_value_length(spec.attention.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(spec.final_norm.eps)
    _add_tokenizer(writer, spec.vocab_size)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, count: int | None = None) -> None:
        shape = (rows, columns) if count is None else (count, rows, columns)
        writer.add_tensor(f"{name}.weight", _blocks(random, kind, *shape), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    hidden, head = spec.hidden_size, spec.attention.head_dim
    q, kv = spec.attention.heads * head, spec.attention.kv_heads * head
    matrix("token_embd", spec.vocab_size, hidden)
    for layer in range(len(spec.layers)):
        at = f"blk.{layer}."
        for name, size in (("attn_norm", hidden), ("attn_q_norm", head), ("attn_k_norm", head)):
            norm(at + name, size)
        for name, rows, columns in (("attn_q", q, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden)):
            matrix(at + name, rows, columns)
        matrix(at + "attn_output", hidden, q)
        norm(at + "ffn_norm", hidden)
        count, each = (None, "") if experts is None else (experts.count, "_exps")
        if experts is not None:
            router = random.standard_normal((experts.count, hidden), dtype=np.float32) * _STD
            writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        for name, rows, columns in (
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            matrix(f"{at}{name}{each}", rows, columns, count)
    norm("output_norm", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, kind: Kind, *shape: int) -> Any:
    """Return random digits with one scale, uint8 [..., rows, bytes per row], for a shape in numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    data[..., :2] = np.frombuffer(np.float16(_SCALES[kind]).tobytes(), dtype=np.uint8)
    return data.reshape(*shape[:-1], -1)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a tokenizer of bytes and made-up words: texts mean nothing here, but both programs need a tokenizer."""
    letters = [chr(code) for code in range(33, 127)]
    tokens = letters + [f"{letter}{number}" for number in range(1 + size // 94) for letter in letters]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens[: size - 1], "<|im_end|>"])
    writer.add_token_types([1] * (size - 1) + [3])
    writer.add_token_merges(["! 0"])
    writer.add_eos_token_id(size - 1)
    writer.add_bos_token_id(size - 1)
    writer.add_add_bos_token(False)
