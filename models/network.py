"""A network as data: a description and the weights that it names. Executors compute it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from models.spec import ModelSpec
from models.weights.block_formats import Kind
from models.weights.packing import Planes
from models.weights.share import Share

T = TypeVar("T")
Axis = Literal["rows", "columns"]

PLAIN = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
"""The formats of unquantised weights, by dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [rows, columns] of plain numbers, of blocks (weights/quantized.py) or of planes (weights/packing.py)."""

    data: Tensor
    """Plain numbers [rows, columns], blocks as uint8 [rows, bytes per row], or the first plane; perhaps read-only."""
    format: Kind
    rows: int
    columns: int
    split: Axis = "rows"
    """The axis along which devices may share it: outputs (rows), or inputs (columns; the results are then added up)."""
    planes: Planes | None = None
    """The planes, if the matrix is packed for a GPU."""
    is_mapped: bool = False
    """Whether `data` is memory of a mapped file, whose pages may be given back to the system at any time."""

    @classmethod
    def packed(cls, planes: Planes) -> "Weight":
        """Wrap a quantised matrix in planes."""
        return cls(planes.codes[0], planes.kind, planes.rows, planes.columns, planes=planes)

    @classmethod
    def plain(cls, data: Tensor, split: Axis = "rows") -> "Weight":
        """Wrap plain numbers [rows, columns]. Raises KeyError for a dtype that is not in PLAIN."""
        return cls(data, PLAIN[data.dtype], data.shape[-2], data.shape[-1], split=split)

    @property
    def is_plain(self) -> bool:
        """Whether `data` holds unquantised numbers."""
        return self.format.block == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the data or the planes."""
        return self.data.nbytes if self.planes is None else self.planes.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Linear layers with the same input and their outputs side by side: x [T, columns] -> [T, rows of all parts]."""

    parts: tuple[Weight, ...]
    """A plain layer is a single weight that holds all its parts; quantised parts are weights with their own formats."""
    bias: Tensor | None = None
    """[rows of all parts], in the dtype of the activations"""

    @property
    def rows(self) -> int:
        """Number of outputs of all parts together."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Number of inputs."""
        return self.parts[0].columns

    @property
    def weight(self) -> Tensor:
        """The numbers [rows, columns] of a plain layer."""
        (part,) = self.parts
        return part.data

    @property
    def is_plain(self) -> bool:
        """Whether the layer has a single plain weight, so that `weight` can be read."""
        return len(self.parts) == 1 and self.parts[0].is_plain


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm's weight [size], as stored, and its bias [size]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights of an attention: q, k and v in one layer, and the output."""

    qkv: Linear
    out: Linear
    head_norm: Tensor | None = None
    """[q heads + k heads, head_dim]: repeated for each head, so that one pass norms q and k side by side. If one norm
    covers all heads (`norms_all_heads`): [numbers of all q and k heads]."""
    sinks: Tensor | None = None
    """[q heads]"""
    gate: Linear | None = None
    """hidden -> q heads, or their numbers"""
    rotary: Tensor | None = None
    """[positions, rotated numbers]: cos and sin side by side (see reference/rope.py); layers with one rope share it."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """The weights of latent attention (see `models.spec.LatentAttention`)."""

    q: Linear
    """hidden -> q_rank, or with no rank -> q heads * (nope_dim + rope_dim)"""
    kv_a: Linear
    """hidden -> kv_rank + rope_dim"""
    kv_norm: NormWeights
    """[kv_rank]"""
    k_b: Linear
    """For each head, nope_dim -> kv_rank, one above the other: queries are multiplied by it, or latents by its
    transpose"""
    v_b: Linear
    """For each head, kv_rank -> v_dim, one above the other"""
    out: Linear
    q_norm: NormWeights | None = None
    """[q_rank]"""
    q_b: Linear | None = None
    """q_rank -> q heads * (nope_dim + rope_dim)"""
    rotary: Tensor | None = None
    """[positions, rope_dim], as in `AttentionWeights`"""


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionWeights:
    """The weights of a short convolution."""

    inputs: Linear
    """The projections b, c and x, side by side."""
    filters: Tensor
    """[size, width]"""
    out: Linear
    bias: Tensor | None = None
    """[size], that of the convolution"""


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Weights:
    """The weights of a Mamba-2 mixer (see `models.recurrences.Mamba2`)."""

    inputs: Linear
    """hidden -> z, x, B, C and dt, side by side"""
    filters: Tensor
    """[conv_size, conv_width]"""
    dt_bias: Tensor
    """fp32 [heads]"""
    decay: Tensor
    """fp32 [heads]: -exp(A_log)"""
    skip: Tensor
    """fp32 [heads]: D"""
    out: Linear
    conv_bias: Tensor | None = None
    """[conv_size]"""
    norm: NormWeights | None = None
    """[output_size]"""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """The weights of a gated delta net (see `models.recurrences.DeltaNet`)."""

    inputs: Linear
    """hidden -> q, k, v and z, side by side"""
    gates: Linear
    """hidden -> b and a, side by side"""
    filters: Tensor
    """[conv_size, conv_width]"""
    dt_bias: Tensor
    """fp32 [value_heads]"""
    decay: Tensor
    """fp32 [value_heads]: A, less than 0"""
    norm: NormWeights
    """[value_dim]"""
    out: Linear


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardWeights:
    """gate and up as one layer, gate first (only up if there is no gate), and down."""

    gate_up: Linear
    down: Linear
    alphas: Tensor | None = None
    """[2]: xIELU's alpha_p and alpha_n, before their softplus; None if the spec has them."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The router and all experts.

    Plain experts are views of one tensor [experts, rows, columns]; in host memory, so are experts in blocks.
    """

    router: Linear
    experts: tuple[FeedForwardWeights, ...]
    selection_bias: Tensor | None = None
    """fp32 [experts]"""
    shared: FeedForwardWeights | None = None
    shared_gate: Linear | None = None
    expert_scales: Tensor | None = None
    """fp32 [experts]"""
    latent_in: Linear | None = None
    """hidden -> latent"""
    latent_out: Linear | None = None
    """latent -> hidden"""
    norms: Mapping[str, NormWeights] = field(default_factory=dict)
    """The norms inside the mixture, by the names of their fields in the spec."""
    on_host: bool = False
    """Whether `experts` lie in host memory while everything else is on the device. They may be in blocks even if the
    rest of the network is not."""


@dataclass(frozen=True, slots=True, eq=False)
class InputWeights:
    """The weights with which a layer adds its own input to its result (see `models.spec.LayerInputs`)."""

    gate: Linear
    out: Linear
    post_norm: NormWeights


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputWeights:
    """The weights that make the inputs of all layers."""

    embedding: Weight
    """[vocabulary, layers * size]"""
    projection: Linear
    """hidden -> layers * size"""
    norm: NormWeights
    """[size]"""


@dataclass(frozen=True, slots=True, eq=False)
class LaurelWeights:
    """The weights of a residual beside the mixer."""

    left: Linear
    right: Linear
    norm: NormWeights


@dataclass(frozen=True, slots=True, eq=False)
class AltUpWeights:
    """The weights with which a layer predicts and corrects the streams of AltUp."""

    norm: NormWeights
    router: Linear
    """hidden -> streams"""
    predict: Linear
    """streams -> streams * streams"""
    correct: Linear
    """streams -> streams"""
    scale: Tensor
    """[hidden]: multiplies the first stream for the input of its own that a layer has"""


@dataclass(frozen=True, slots=True, eq=False)
class StreamWeights:
    """The projections that make the streams of AltUp but the first, and those that join them again."""

    inputs: tuple[Linear, ...]
    outputs: tuple[Linear, ...]


MixerWeights = AttentionWeights | LatentWeights | ConvolutionWeights | DeltaNetWeights | Mamba2Weights


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer; a part is None where the spec has none."""

    mixer: MixerWeights | None
    feed_forward: FeedForwardWeights | ExpertWeights | None
    attention_norm: NormWeights | None
    feed_forward_norm: NormWeights | None
    attention_post_norm: NormWeights | None = None
    feed_forward_post_norm: NormWeights | None = None
    input: InputWeights | None = None
    scalar: Tensor | None = None
    """[1]"""
    laurel: LaurelWeights | None = None
    altup: AltUpWeights | None = None

    @property
    def attention(self) -> AttentionWeights:
        """The attention of a layer that is known to have one."""
        assert isinstance(self.mixer, AttentionWeights)
        return self.mixer

    @property
    def projections(self) -> Linear:
        """The first product of the mixer: q, k and v, that of a convolution or a recurrence, or q for latents."""
        if isinstance(self.mixer, LatentWeights):
            return self.mixer.q
        if isinstance(self.mixer, ConvolutionWeights | DeltaNetWeights | Mamba2Weights):
            return self.mixer.inputs
        return self.attention.qkv

    @property
    def gates(self) -> Linear | None:
        """A second product of what the first one of the mixer reads: the gate of an attention, b and a, or kv_a."""
        mixer = self.mixer
        if isinstance(mixer, LatentWeights):
            return mixer.kv_a
        if isinstance(mixer, DeltaNetWeights):
            return mixer.gates
        return mixer.gate if isinstance(mixer, AttentionWeights) else None

    @property
    def out(self) -> Linear:
        """The last product of a mixer that is known to be there."""
        assert self.mixer is not None
        return self.mixer.out


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A decoder with its weights on one device."""

    spec: ModelSpec
    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Linear
    """Its weight is the embedding if the two are tied."""
    positions: int
    """The number of positions that the network supports: the rows of its rotary tables."""
    position_embedding: Tensor | None = None
    """[positions, hidden]"""
    layer_inputs: LayerInputWeights | None = None
    streams: StreamWeights | None = None
    share: Share | None = None
    """Which part of a larger network this is, if several ranks compute one; `spec` then describes this part."""

    @property
    def whole(self) -> ModelSpec:
        """The description of the network that all ranks compute together."""
        return self.spec if self.share is None else self.share.whole

    def parts(self, kind: type[T]) -> list[T]:
        """Return every instance of `kind` (Tensor, Weight, Linear) in the network once; rotary tables are left out."""
        return list({id(part): part for part in _parts(self, kind)}.values())

    @property
    def is_quantized(self) -> bool:
        """Whether the matrices are in blocks; if one is, all are. Experts in host memory are not considered."""
        return not self.embedding.is_plain and self.embedding.planes is None

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are in planes for a GPU."""
        return any(weight.planes is not None for weight in self.parts(Weight))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and norms."""
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        return self.final_norm.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(tensor.nbytes for tensor in self.parts(Tensor))

    @property
    def on_host(self) -> dict[int, ExpertWeights]:
        """The layers whose experts lie in host memory, by layer number."""
        feeds = (layer.feed_forward for layer in self.layers)
        return {i: feed for i, feed in enumerate(feeds) if isinstance(feed, ExpertWeights) and feed.on_host}


def _parts(whole: object, kind: type[T]) -> Iterator[T]:
    if isinstance(whole, kind):
        yield whole
    elif isinstance(whole, tuple | Mapping):
        for part in whole.values() if isinstance(whole, Mapping) else whole:
            yield from _parts(part, kind)
    elif is_dataclass(whole):
        for each in fields(whole):
            if each.name not in ("spec", "rotary", "share"):
                yield from _parts(getattr(whole, each.name), kind)
