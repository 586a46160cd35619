"""Write a GGUF file with the shapes of Qwen3, Qwen3.5, Gemma 4, LFM2 or DeepSeek and random quantised weights. Any
program that reads GGUF can run it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from models.families.common import pre_norm_layer, uniform
from models.families.registry import FAMILIES
from models.recurrences import DeltaNet
from models.spec import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    ModelSpec,
    Norm,
    Rope,
    ShortConvolution,
)
from models.weights.slots import Slot, slots

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


def latent_moe(latent: LatentAttention, chosen: int, inner: int, layers: int, shared: int) -> ModelSpec:
    """Return a network with latent attention and 2,048 hidden numbers, as those of DeepSeek-V2-Lite and GLM-4.7-Flash:
    16 experts in all layers but the first, and `shared` more that every token uses."""
    expert = FeedForward(inner)
    experts = Experts(
        16,
        chosen,
        expert,
        exact_router=True,
        shared=FeedForward(shared * inner),
        scoring="sigmoid",
        scale=1.8,
    )
    experts = replace(experts, selection_bias=True, group_best=2)
    first = Layer(latent, FeedForward(10_240))
    rest = (Layer(latent, experts),) * (layers - 1)
    return ModelSpec("DeepseekV3ForCausalLM", 49_152, 2048, 32_768, (first, *rest))


_ROPE = Rope(1e6, interleaved=True)
LATENTS = {
    "glm": latent_moe(LatentAttention(20, 768, 512, 192, 64, 256, rope=_ROPE), 4, 1536, 12, 1),
    "deepseek": latent_moe(LatentAttention(16, None, 512, 128, 64, 128, rope=_ROPE), 6, 1408, 27, 2),
}
"""The layers of GLM-4.7-Flash, and those of DeepSeek-V2-Lite with the experts of V3; fewer experts to choose from, so
that the files are small, and a smaller vocabulary."""


def write_random_gguf(
    path: Path, spec: ModelSpec, kind: Kind, context: int, tokenizer: Mapping[str, Any] | None = None
) -> None:
    """Write a model of `spec` (Qwen3, Qwen3.5, Gemma 4, LFM2 or DeepSeek) with matrices of `kind`, Q8_0 or Q4_0.

    `tokenizer` is the metadata of a GGUF file whose tokenizer it gets; None: one that is made up. The router is random,
    too, so that experts are chosen by the content of a row.
    """
    family = next(family for family in FAMILIES if spec.architecture in family.architectures)
    assert family.gguf_architecture is not None
    writer = gguf.GGUFWriter(path, family.gguf_architecture)
    writer.add_name("random")
    for key, value in _fields(spec, context).items():
        _add(writer, f"{family.gguf_architecture}.{key}", value)
    if tokenizer is None:
        _add_tokenizer(writer, spec.vocab_size)
    else:
        for key, value in tokenizer.items():
            if key.startswith("tokenizer."):
                _add(writer, key, value)
    random = np.random.default_rng(0)
    packed = {parts[0]: (name, parts) for name, parts in family.gguf_packed.items() if _is_packed(parts)}
    inside = {part for _, parts in packed.values() for part in parts[1:]}
    for slot in slots(spec):
        if slot.expert:  # the first one stands for all those of its layer, which are one tensor
            continue
        if slot.part in inside:
            continue
        name, shape = slot.name(family.gguf_names), slot.shape
        if slot.expert == 0 and slot.layer is not None:
            experts = spec.layers[slot.layer].feed_forward
            assert isinstance(experts, Experts)
            name, shape = name.replace(".0.weight", "_exps.weight"), (experts.count, *shape)
        if slot.is_by_head and slot.layer is not None:
            latent = spec.layers[slot.layer].mixer
            assert isinstance(latent, LatentAttention)
            blocks = _blocks(random, kind, latent.heads, shape[0] // latent.heads, shape[1])
            writer.add_tensor(name, blocks, raw_dtype=kind)
        elif slot.part in packed:
            stem, parts = packed[slot.part]
            own = [one for one in slots(spec) if one.layer == slot.layer and one.part in parts]
            rows = sum(one.rows for one in own)
            name = f"blk.{slot.layer}.{stem.format(field=slot.field)}"
            writer.add_tensor(name, _blocks(random, kind, rows, shape[1]), raw_dtype=kind)
        elif slot.is_matrix:
            writer.add_tensor(name, _blocks(random, kind, *shape), raw_dtype=kind)
        elif len(shape) == 1:
            writer.add_tensor(name, np.full(shape, _fill(spec, slot), dtype=np.float32))
        else:
            writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) * _STD)
    rope = _widest(spec).rope if spec.attentions else None
    if rope is not None and rope.frequency_factors is not None:
        # llama.cpp divides by these, so a very large number takes the place of infinity.
        writer.add_tensor(
            "rope_freqs.weight", np.minimum(np.float32(rope.frequency_factors), np.float32(1e30))
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_packed(parts: Sequence[str]) -> bool:
    """Return whether files have these parts of a layer in one tensor: those of delta nets and of gated attention."""
    return "attention_gate" in parts or parts[0].startswith("delta_")


def _fill(spec: ModelSpec, slot: Slot) -> float:
    """Return what a vector consists of: 1 in norms and scalars, 0 in biases. Half of a state is left after seven rows.

    Norms of heads are smaller where scores are not scaled, so that attention is spread over many rows.
    """
    if slot.part == "decay":
        return -0.15
    if slot.field != "weight" or slot.part == "dt_bias":
        return 0.0
    head = (
        spec.attentions[slot.layer] if slot.layer is not None and slot.part in ("q_norm", "k_norm") else None
    )
    return head.head_dim**-0.25 if head is not None and head.scale == 1.0 else 1.0


def _widest(spec: ModelSpec) -> Attention:
    """Return the attention of a layer that sees all rows, if there is one."""
    return next((found for found in spec.attentions.values() if found.window is None), spec.attention)


def _fields(spec: ModelSpec, context: int) -> dict[str, Any]:
    """Return the metadata of the network, without the name of the architecture in the keys."""
    feeds = [layer.feed_forward for layer in spec.layers]
    mixtures = [feed for feed in feeds if isinstance(feed, Experts)]
    # What is dense in each layer: all of its feed-forward, or the shared expert.
    dense = [feed.shared if isinstance(feed, Experts) else feed for feed in feeds]
    sizes = [feed.size for feed in dense if feed is not None] or [feed.expert.size for feed in mixtures]
    found: dict[str, Any] = {
        "block_count": len(spec.layers),
        "context_length": context,
        "vocab_size": spec.vocab_size,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": sizes if len(set(sizes)) > 1 else sizes[0],
        "attention.layer_norm_rms_epsilon": spec.final_norm.eps,
        **_head_fields(spec),
    }
    if mixtures:
        found["expert_count"] = mixtures[0].count
        found["expert_used_count"] = mixtures[0].chosen
        found["expert_feed_forward_length"] = mixtures[0].expert.size
    if mixtures and mixtures[0].shared is not None and mixtures[0].shared_gate:
        found["expert_shared_feed_forward_length"] = mixtures[0].shared.size
    if mixtures and mixtures[0].scoring == "sigmoid":
        found["expert_gating_func"] = 2
        found["expert_weights_norm"] = mixtures[0].renormalise
        found["expert_weights_scale"] = mixtures[0].scale
        found["leading_dense_block_count"] = len(feeds) - len(mixtures)
    for layer in spec.layers:
        if isinstance(layer.mixer, ShortConvolution):
            found["shortconv.l_cache"] = layer.mixer.width
        if isinstance(layer.mixer, DeltaNet):
            found |= _delta_net_fields(layer.mixer)
    if spec.architecture.startswith("Gemma4"):
        found["embedding_length_per_layer_input"] = 0 if spec.layer_inputs is None else spec.layer_inputs.size
    if spec.logit_cap is not None:
        found["final_logit_softcapping"] = spec.logit_cap
    return found | _window_fields(spec)


def _head_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the metadata of heads, or of latents in all layers and what is beside them."""
    if isinstance(latent := spec.layers[0].mixer, LatentAttention):
        return _latent_fields(spec, latent)
    whole = _widest(spec)
    assert whole.rope is not None
    heads = [spec.attentions[i].kv_heads if i in spec.attentions else 0 for i in range(len(spec.layers))]
    rotated = whole.rope.dims or whole.head_dim
    sections = {}
    if any(isinstance(layer.mixer, DeltaNet) for layer in spec.layers):
        heads = [whole.kv_heads]
        sections = {"rope.dimension_sections": [rotated // 4, rotated // 8, rotated // 8, 0]}
    return sections | {
        "attention.head_count": whole.heads,
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "rope.freq_base": whole.rope.theta,
        "rope.dimension_count": rotated,
    }


def _delta_net_fields(net: DeltaNet) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": net.conv_width,
        "ssm.state_size": net.key_dim,
        "ssm.group_count": net.key_heads,
        "ssm.time_step_rank": net.value_heads,
        "ssm.inner_size": net.output_size,
        "full_attention_interval": 4,
    }


def _latent_fields(spec: ModelSpec, latent: LatentAttention) -> dict[str, Any]:
    first, last = (spec.layers[index].feed_forward for index in (0, -1))
    assert latent.rope is not None
    assert isinstance(first, FeedForward)
    assert isinstance(last, Experts)
    ranks = {} if latent.q_rank is None else {"attention.q_lora_rank": latent.q_rank}
    return ranks | {
        "feed_forward_length": first.size,
        "expert_shared_count": 0 if last.shared is None else last.shared.size // last.expert.size,
        "attention.head_count": latent.heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.key_length": latent.row_size,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": latent.head_dim,
        "attention.value_length_mla": latent.v_dim,
        "rope.freq_base": latent.rope.theta,
        "rope.dimension_count": latent.rope_dim,
    }


def _window_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the metadata of layers with a window, and of those that read the keys and values of others."""
    local = next((found for found in spec.attentions.values() if found.window is not None), None)
    if local is None or local.window is None or local.rope is None:
        return {}
    return {
        "attention.sliding_window": local.window,
        "attention.sliding_window_pattern": [layer.mixer.window is not None for layer in spec.layers],
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "attention.shared_kv_layers": sum(found.kv_from is not None for found in spec.attentions.values()),
        "rope.freq_base_swa": local.rope.theta,
        "rope.dimension_count_swa": local.head_dim,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        str: writer.add_string,
        float: writer.add_float32,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


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
