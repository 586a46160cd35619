"""A network as data: the description, and the weights that it names. What computes it is an executor."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
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
"""The formats of plain numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [rows, columns]: plain numbers, in blocks (weights/quantized.py) or in planes (weights/packing.py)."""

    data: Tensor
    """Plain numbers in that shape, or uint8 [rows, bytes a row]: perhaps memory that must not be written; of planes the
    first one."""
    format: Kind
    rows: int
    columns: int
    scales: Tensor | None = None
    """Where a format keeps them apart from the data."""
    split: Axis = "rows"
    """Along which axis devices may share it: its outputs, or its inputs (their results are then added up)."""
    planes: Planes | None = None
    """Where it is packed for a GPU."""
    is_mapped: bool = False
    """Whether the data are memory of a mapped file, whose pages may be given back to the system at any time."""

    @classmethod
    def packed(cls, planes: Planes, kind: Kind, rows: int, columns: int) -> "Weight":
        """A quantised matrix in planes."""
        return cls(planes.codes[0], kind, rows, columns, planes=planes)

    @classmethod
    def plain(cls, data: Tensor, split: Axis = "rows") -> "Weight":
        """Plain numbers [rows, columns]. Raises KeyError for a dtype that is no format."""
        return cls(data, PLAIN[data.dtype], data.shape[-2], data.shape[-1], split=split)

    @property
    def is_plain(self) -> bool:
        """Whether the data are the numbers themselves."""
        return self.format.block == 1

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        if self.planes is not None:
            return self.planes.nbytes
        return self.data.nbytes + (self.scales.nbytes if self.scales is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Layers over the same input, their outputs side by side: x [T, columns] -> [T, rows of all parts]."""

    parts: tuple[Weight, ...]
    """Plain ones lie in one weight; quantised ones each have a format of their own."""
    bias: Tensor | None = None
    """[rows of all parts], in the dtype of the activations."""

    @property
    def rows(self) -> int:
        """Outputs of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.parts[0].columns

    @property
    def weight(self) -> Tensor:
        """The numbers [rows, columns] of a plain layer."""
        (part,) = self.parts
        return part.data

    @property
    def is_plain(self) -> bool:
        """Whether `weight` is there."""
        return len(self.parts) == 1 and self.parts[0].is_plain


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """The weight [size] as it is stored, and the bias [size], of a norm."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """q, k and v in one layer, and the output."""

    qkv: Linear
    out: Linear
    head_norm: Tensor | None = None
    """[q heads + k heads, head_dim]: repeated for each head, so that q and k, side by side, take one pass;
    [the numbers of all of them] where one norm is of all heads (norms_all_heads)."""
    sinks: Tensor | None = None
    """[q heads]"""
    rotary: Tensor | None = None
    """[positions, rotated numbers]: cos and sin side by side (see reference/rope.py), shared by layers alike."""


@dataclass(frozen=True, slots=True, eq=False)
class FeedForwardWeights:
    """Gate above up in one layer (without a gate: up), and down."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The router, and all experts. Plain ones are views of one tensor [experts, rows, columns] each; in host memory
    blocks are, too."""

    router: Linear
    experts: tuple[FeedForwardWeights, ...]
    selection_bias: Tensor | None = None
    """fp32 [experts]"""
    shared: FeedForwardWeights | None = None
    shared_gate: Linear | None = None
    on_host: bool = False
    """Whether `experts` lie in host memory while all else is on the device; they may be in blocks though that is
    not."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer; a norm is None where the spec has none."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights | ExpertWeights
    attention_norm: NormWeights | None
    feed_forward_norm: NormWeights | None
    attention_post_norm: NormWeights | None = None
    feed_forward_post_norm: NormWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A decoder with its weights on one device."""

    spec: ModelSpec
    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Linear
    """Its weight is the embedding where they are tied."""
    positions: int
    """Positions that the network can tell apart: rows of the rotary tables."""
    position_embedding: Tensor | None = None
    """[positions, hidden]"""
    share: Share | None = None
    """Which part of a larger network it is, that several ranks compute; `spec` is then the part's."""

    @property
    def whole(self) -> ModelSpec:
        """The description of what all ranks compute together."""
        return self.spec if self.share is None else self.share.whole

    def parts(self, kind: type[T]) -> list[T]:
        """Every tensor, or weight, or layer of products in it, each once; but for the rotary tables."""
        return list({id(part): part for part in _parts(self, kind)}.values())

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are in blocks: then all of them are. Experts in host memory are not asked."""
        return not self.embedding.is_plain and self.embedding.planes is None

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are in planes for a GPU."""
        return any(weight.planes is not None for weight in self.parts(Weight))

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and norms."""
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.final_norm.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each once."""
        return sum(tensor.nbytes for tensor in self.parts(Tensor))

    @property
    def on_host(self) -> dict[int, ExpertWeights]:
        """The layers whose experts lie in host memory, by their number."""
        feeds = (layer.feed_forward for layer in self.layers)
        return {i: feed for i, feed in enumerate(feeds) if isinstance(feed, ExpertWeights) and feed.on_host}


def _parts(whole: object, kind: type[T]) -> Iterator[T]:
    if isinstance(whole, kind):
        yield whole
    elif isinstance(whole, tuple):
        for part in whole:
            yield from _parts(part, kind)
    elif is_dataclass(whole):
        for field in fields(whole):
            if field.name not in ("spec", "rotary", "share"):
                yield from _parts(getattr(whole, field.name), kind)
