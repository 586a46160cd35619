"""A network with its weights held in other formats, for `benchmarks.quality`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import shared_tensors
from models.families.family import NAMES
from models.loading.load import fill_network
from models.loading.plan import Target, plan_tensors
from models.network import Network
from models.spec import FeedForward, ModelSpec
from models.weights.block_formats import Kind
from models.weights.checkpoint import StoredTensor
from models.weights.matching import match
from models.weights.quantize import choose_kinds
from models.weights.slots import Slot

CPU = torch.device("cpu")
HEAD = ("model.embed_tokens.weight", "lm_head.weight")

Kinds = Callable[[list[StoredTensor], Mapping[str, Slot]], dict[str, Kind]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to hold the weights."""

    name: str
    kinds: Kinds
    """The type of every matrix; empty: plain numbers."""


def option(value: str) -> Kinds:
    """Return the types that `--quantize` chooses."""
    return lambda tensors, places: choose_kinds(tensors, places, value, CPU)


def uniform(body: Kind, head: Kind) -> Kinds:
    """Return one type for the layers, and one for the embedding and the head."""
    return lambda tensors, places: {
        t.name: head if t.name in HEAD else body
        for t in tensors
        if t.name in places and places[t.name].is_matrix
    }


WAYS = (
    Way("unquantised", option("none")),
    Way("int8", option("int8")),
    Way("int4", option("int4")),
    Way("Q4_1, Q8_0 head", uniform(Kind.Q4_1, Kind.Q8_0)),
    Way("Q4_1", uniform(Kind.Q4_1, Kind.Q4_1)),
)


def requantized(exact: Network, way: Way, dtype: torch.dtype, positions: int, shuffle: bool) -> Network:
    """Return a network of plain numbers with its weights held in some way, and activations of `dtype`.

    `shuffle` reorders the channels first, for weights that lie on the grid of other blocks.
    """
    tensors = shared_tensors(exact)
    if shuffle:
        tensors = shuffled(tensors, exact.spec)
    stored = [_stored(name, t) for name, t in tensors.items() if not (exact.spec.tied and name == HEAD[1])]
    kinds = way.kinds(stored, match(exact.spec, stored, NAMES))
    target = Target(dtype, CPU, context_length=positions)
    return fill_network(plan_tensors(exact.spec, stored, target, kinds=kinds))


def shuffled(tensors: Mapping[str, Tensor], spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Return the same network with its channels in another order: those of the residual stream, inside every MLP, and
    inside every head's values.
    """
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> Tensor:
        return torch.randperm(size, generator=generator)

    attention, feed_forward = spec.attention, spec.layers[0].feed_forward
    assert isinstance(feed_forward, FeedForward)
    dim = attention.head_dim
    stream, inner, head = order(spec.hidden_size), order(feed_forward.size), order(dim)
    values = torch.arange(attention.kv_heads * dim).view(-1, dim)[:, head].flatten()
    mixed = torch.arange(attention.heads * dim).view(-1, dim)[:, head].flatten()
    # The order of the channels of rows (or of a vector's numbers) and of columns; None: unchanged.
    channels: dict[str, tuple[Tensor | None, Tensor | None]] = {
        "embed_tokens": (None, stream),
        "lm_head": (None, stream),
        "norm": (stream, None),
        "input_layernorm": (stream, None),
        "post_attention_layernorm": (stream, None),
        "q_proj": (None, stream),
        "k_proj": (None, stream),
        "v_proj": (values, stream),
        "o_proj": (stream, mixed),
        "gate_proj": (inner, stream),
        "up_proj": (inner, stream),
        "down_proj": (stream, inner),
        "q_norm": (None, None),
        "k_norm": (None, None),
    }
    result = {}
    for name, tensor in tensors.items():
        rows, columns = channels[name.split(".")[-2]]
        tensor = tensor if rows is None else tensor[rows]
        result[name] = tensor if columns is None or tensor.ndim == 1 else tensor[:, columns]
    return result


def _stored(name: str, tensor: Tensor) -> StoredTensor:
    def parts() -> Iterable[tuple[int, Tensor]]:
        step = max(1, (1 << 15) // tensor.shape[1])
        return ((start, tensor[start : start + step]) for start in range(0, len(tensor), step))

    return StoredTensor(name, tuple(tensor.shape), tensor.nbytes, lambda out: out.copy_(tensor), parts=parts)
