"""The tensors that a network needs, and where each of them goes, derived from its description alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from models.recurrences import DeltaNet, Mamba2
from models.spec import (
    AltUp,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    ModelSpec,
    Norm,
    ShortConvolution,
)

Names = Mapping[str, str]
"""The checkpoint's names for each `Slot.part`. "layers" is the prefix of a layer, with {} for its number; names of a
layer's parts omit this prefix. In names of experts, {} stands for the expert's number."""

Packed = Mapping[str, tuple[str, ...]]
"""Tensors that hold several parts, one above the other (experts: the parts of the first, those of the second, ...).
Names omit the prefix of a layer. {field} stands for weight or bias; a name without it has only weights."""

OF_VOCABULARY = ("embedding", "layer_embedding", "head")
"""Parts with a row for each token."""

_WHOLE_NAMES = (
    *("sinks", "selection_bias", "router_norm", "expert_scales", "scalar"),
    *("alpha_p", "alpha_n", "altup_scale", "dt_bias", "decay", "skip"),
)
"""Parts whose names in a checkpoint are whole, without a field to be added."""

_PLAIN = (
    *("position_embedding", "router", "shared_gate", "filters", "k_b", "v_b", "delta_b", "delta_a"),
    *("altup_router", "altup_predict", "altup_correct"),
)
"""Matrices that are never held in blocks, as they are small or not multiplied, or only where others are."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of a checkpoint goes."""

    part: str
    """The role of the tensor: "embedding", "q", "down", ...; see `_layer`."""
    field: str
    """weight or bias"""
    group: str
    """The network's tensor that contains it: "layers.3.qkv.weight"."""
    start: int
    """The first row of the group that it fills."""
    rows: int
    """The number of rows that it fills."""
    shape: tuple[int, ...]
    """The shape that the tensor must have."""
    repeated: bool = False
    """Whether each of these rows gets a copy of the whole tensor."""
    layer: int | None = None
    expert: int | None = None
    exact: bool = False
    """Whether it is kept in fp32, whatever the dtype of the network."""

    @property
    def is_matrix(self) -> bool:
        """Whether it may be held in blocks: not those in `_PLAIN`."""
        return self.field == "weight" and len(self.shape) == 2 and self.part not in _PLAIN

    @property
    def is_by_head(self) -> bool:
        """Whether it is multiplied head by head: it may be in blocks where all matrices are."""
        return self.part in ("k_b", "v_b")

    @property
    def split(self) -> Literal["rows", "columns"]:
        """The axis along which devices may share it (see `models.network.Weight`)."""
        return (
            "columns"
            if self.part.removeprefix("experts.").removeprefix("shared.")
            in ("out", "down", "conv_out", "delta_out", "ssm_out")
            else "rows"
        )

    def name(self, names: Names) -> str:
        """Return its name in a checkpoint."""
        name = names[self.part]
        if self.expert is not None:
            name = name.format(self.expert)
        if self.layer is not None:
            name = names["layers"].format(self.layer) + name
        return name if self.part in _WHOLE_NAMES else f"{name}.{self.field}"


def slots(spec: ModelSpec) -> Iterator[Slot]:
    """Yield a slot for every tensor, from the first to the last."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield Slot("embedding", "weight", "embedding.weight", 0, vocab, (vocab, hidden))
    if spec.learned_positions:
        rows = spec.max_positions
        yield Slot("position_embedding", "weight", "position_embedding.weight", 0, rows, (rows, hidden))
    if (inputs := spec.layer_inputs) is not None:
        rows = len(spec.layers) * inputs.size
        yield from _linear("layer_embedding", {"layer_embedding": inputs.vocab_size or vocab}, rows)
        yield from _linear("layer_projection", {"layer_projection": rows}, hidden)
        yield from _norm("layer_input_norm", inputs.norm, inputs.size)
    for index in range(spec.altup.count - 1 if spec.altup is not None else 0):
        for part in (f"stream_in.{index}", f"stream_out.{index}"):
            yield from _linear(part, {part: hidden}, hidden)
    for index, layer in enumerate(spec.layers):
        for slot in _layer(layer, spec, hidden):
            yield replace(slot, group=f"layers.{index}.{slot.group}", layer=index)
    yield from _norm("final_norm", spec.final_norm, hidden)
    if not spec.tied:
        yield from _linear("head", {"head": vocab}, hidden)


def group_shapes(found: Iterator[Slot] | list[Slot]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every group: [rows of its slots, width], or [experts, rows, width] for experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in found:
        rows, before = slot.start + slot.rows, shapes.get(slot.group)
        width = slot.shape if slot.repeated else slot.shape[1:]
        if slot.expert is None:
            shapes[slot.group] = (max(rows, before[0] if before else 0), *width)
        else:
            experts = max(slot.expert + 1, before[0] if before else 0)
            shapes[slot.group] = (experts, max(rows, before[1] if before else 0), *width)
    return shapes


@lru_cache(maxsize=256)  # a list of models asks several times for each
def parameters(spec: ModelSpec) -> int:
    """Return the number of a network's weights; a head that is tied to the embedding counts once."""
    return sum(prod(slot.shape) for slot in slots(spec))


def layer_parameters(spec: ModelSpec) -> int:
    """Return how many weights compute a row: all but embedding and head, and only the experts chosen for a row."""
    chosen = [feed.chosen if isinstance(feed := layer.feed_forward, Experts) else 0 for layer in spec.layers]

    def computes(slot: Slot) -> bool:
        if slot.expert is not None:
            assert slot.layer is not None
            return slot.expert < chosen[slot.layer]  # all experts have the same size
        return slot.part not in (*OF_VOCABULARY, "position_embedding")

    return sum(prod(slot.shape) for slot in slots(spec) if computes(slot))


def _layer(layer: Layer, spec: ModelSpec, hidden: int) -> Iterator[Slot]:
    inputs, laurel = spec.layer_inputs, layer.laurel
    yield from _norm("attention_norm", layer.attention_norm, hidden)
    if isinstance(layer.mixer, ShortConvolution):
        yield from _convolution(layer.mixer, hidden)
    elif isinstance(layer.mixer, LatentAttention):
        yield from _latent(layer.mixer, hidden)
    elif isinstance(layer.mixer, DeltaNet):
        yield from _delta_net(layer.mixer, hidden)
    elif isinstance(layer.mixer, Mamba2):
        yield from _mamba2(layer.mixer, hidden)
    elif isinstance(layer.mixer, Attention):
        yield from _attention(layer.mixer, hidden)
    yield from _norm("attention_post_norm", layer.attention_post_norm, hidden)
    yield from _norm("feed_forward_norm", layer.feed_forward_norm, hidden)
    if isinstance(layer.feed_forward, Experts):
        yield from _experts(layer.feed_forward, hidden)
    elif layer.feed_forward is not None:
        yield from _feed_forward("", layer.feed_forward, hidden)
    yield from _norm("feed_forward_post_norm", layer.feed_forward_post_norm, hidden)
    if inputs is not None:
        yield from _linear("input_gate", {"input_gate": inputs.size}, hidden)
        yield from _linear("input_out", {"input_out": hidden}, inputs.size)
        yield from _norm("input_post_norm", inputs.post_norm, hidden)
    if laurel is not None:
        yield from _linear("laurel_left", {"laurel_left": laurel.rank}, hidden)
        yield from _linear("laurel_right", {"laurel_right": hidden}, laurel.rank)
        yield from _norm("laurel_norm", laurel.norm, hidden)
    if spec.altup is not None:
        yield from _altup(spec.altup, hidden)
    if layer.scalar:
        yield Slot("scalar", "weight", "scalar", 0, 1, (1,))


def _altup(spec: AltUp, hidden: int) -> Iterator[Slot]:
    count = spec.count
    yield from _norm("altup_norm", spec.norm, hidden)
    yield from _linear("altup_router", {"altup_router": count}, hidden)
    yield from _linear("altup_predict", {"altup_predict": count * count}, count)
    yield from _linear("altup_correct", {"altup_correct": count}, count)
    yield Slot("altup_scale", "weight", "altup_scale", 0, hidden, (hidden,))


def _attention(spec: Attention, hidden: int) -> Iterator[Slot]:
    dim = spec.head_dim
    q, kv = spec.heads * dim, spec.own_kv_heads * dim
    parts = {"q": q, "k": kv, "v": 0 if spec.v_is_k else kv}
    yield from _linear("qkv", {part: rows for part, rows in parts.items() if rows}, hidden, spec.qkv_bias)
    if spec.head_norm is None or not spec.head_norm.weighted:
        pass
    elif spec.norms_all_heads:
        yield Slot("q_norm", "weight", "head_norm.weight", 0, q, (q,))
        if kv:
            yield Slot("k_norm", "weight", "head_norm.weight", q, kv, (kv,))
    else:
        yield Slot("q_norm", "weight", "head_norm.weight", 0, spec.heads, (dim,), True)
        if kv:
            yield Slot("k_norm", "weight", "head_norm.weight", spec.heads, spec.own_kv_heads, (dim,), True)
    if spec.sinks:
        yield Slot("sinks", "weight", "sinks", 0, spec.heads, (spec.heads,))
    if spec.gate is not None:
        rows = spec.heads if spec.gate == "heads" else q
        yield from _linear("attention_gate", {"attention_gate": rows}, hidden)
    yield from _linear("out", {"out": hidden}, q, spec.out_bias)


def _latent(spec: LatentAttention, hidden: int) -> Iterator[Slot]:
    q = spec.heads * spec.head_dim
    if spec.q_rank is None:
        yield from _linear("q", {"q": q}, hidden)
    else:
        yield from _linear("q", {"q_a": spec.q_rank}, hidden, spec.bias)
        yield from _norm("q_a_norm", spec.norm, spec.q_rank)
        yield from _linear("q_b", {"q_b": q}, spec.q_rank)
    yield from _linear("kv_a", {"kv_a": spec.row_size}, hidden, spec.bias)
    yield from _norm("kv_a_norm", spec.norm, spec.kv_rank)
    yield from _linear("k_b", {"k_b": spec.heads * spec.kv_rank}, spec.nope_dim)
    yield from _linear("v_b", {"v_b": spec.heads * spec.v_dim}, spec.kv_rank)
    yield from _linear("out", {"out": hidden}, spec.heads * spec.v_dim, spec.bias)


def _convolution(spec: ShortConvolution, hidden: int) -> Iterator[Slot]:
    yield from _linear("conv_in", {"conv_in": 3 * spec.size}, hidden, spec.bias)
    yield from _linear("filters", {"filters": spec.size}, spec.width, spec.bias)
    yield from _linear("conv_out", {"conv_out": hidden}, spec.size, spec.bias)


def _delta_net(spec: DeltaNet, hidden: int) -> Iterator[Slot]:
    heads, size = spec.value_heads, spec.output_size
    parts = {"delta_q": spec.key_size, "delta_k": spec.key_size, "delta_v": size, "delta_z": size}
    yield from _linear("delta_in", parts, hidden)
    yield from _linear("delta_gates", {"delta_b": heads, "delta_a": heads}, hidden)
    yield from _linear("filters", {"filters": spec.conv_size}, spec.conv_width)
    yield Slot("dt_bias", "bias", "dt_bias", 0, heads, (heads,), exact=True)
    yield Slot("decay", "weight", "decay", 0, heads, (heads,), exact=True)
    yield from _norm("gated_norm", Norm(spec.norm_eps), spec.value_dim)
    yield from _linear("delta_out", {"delta_out": hidden}, size)


def _mamba2(spec: Mamba2, hidden: int) -> Iterator[Slot]:
    heads = spec.heads
    yield from _linear("ssm_in", {"ssm_in": spec.output_size + spec.log_size}, hidden, spec.in_bias)
    yield from _linear("filters", {"filters": spec.conv_size}, spec.conv_width, spec.conv_bias)
    yield Slot("dt_bias", "bias", "dt_bias", 0, heads, (heads,), exact=True)
    for part in ("decay", "skip"):
        yield Slot(part, "weight", part, 0, heads, (heads,), exact=True)
    if spec.norm_eps is not None:
        yield from _norm("gated_norm", Norm(spec.norm_eps), spec.output_size)
    yield from _linear("ssm_out", {"ssm_out": hidden}, spec.output_size, spec.out_bias)


def _feed_forward(prefix: str, spec: FeedForward, hidden: int) -> Iterator[Slot]:
    parts = {f"{prefix}gate": spec.size} if spec.gated else {}
    yield from _linear(f"{prefix}gate_up", {**parts, f"{prefix}up": spec.size}, hidden, spec.bias)
    yield from _linear(f"{prefix}down", {f"{prefix}down": hidden}, spec.size, spec.bias)
    if spec.activation == "xielu" and spec.alphas is None:
        for start, part in enumerate(("alpha_p", "alpha_n")):
            yield Slot(part, "weight", f"{prefix}alphas", start, 1, (1,))


def _experts(spec: Experts, hidden: int) -> Iterator[Slot]:
    for slot in _linear("router", {"router": spec.count}, hidden, spec.router_bias):
        yield replace(slot, exact=spec.exact_router)
    if spec.selection_bias:
        yield Slot("selection_bias", "bias", "selection_bias", 0, spec.count, (spec.count,), exact=True)
    if spec.expert_scales:
        yield Slot("expert_scales", "weight", "expert_scales", 0, spec.count, (spec.count,), exact=True)
    for part, norm in spec.norms.items():
        yield from _norm(part, norm, hidden)
    if spec.latent is not None:
        yield from _linear("latent_in", {"latent_in": spec.latent}, hidden, spec.latent_bias)
        yield from _linear("latent_out", {"latent_out": hidden}, spec.latent, spec.latent_bias)
    for index in range(spec.count):
        for slot in _feed_forward("experts.", spec.expert, spec.latent or hidden):
            yield replace(slot, expert=index)
    if spec.shared is not None:
        yield from _feed_forward("shared.", spec.shared, hidden)
        if spec.shared_gate:
            yield from _linear("shared_gate", {"shared_gate": 1}, hidden)


def _norm(part: str, spec: Norm | None, size: int) -> Iterator[Slot]:
    if spec is not None:
        yield Slot(part, "weight", f"{part}.weight", 0, size, (size,))
        if spec.bias:
            yield Slot(part, "bias", f"{part}.bias", 0, size, (size,))


def _linear(group: str, parts: dict[str, int], columns: int, bias: bool = False) -> Iterator[Slot]:
    start = 0
    for part, rows in parts.items():
        yield Slot(part, "weight", f"{group}.weight", start, rows, (rows, columns))
        if bias:
            yield Slot(part, "bias", f"{group}.bias", start, rows, (rows,))
        start += rows
