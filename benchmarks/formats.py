"""Networks with random quantised weights, made on the device, with the types of llama.cpp's recipes for each matrix."""

from collections.abc import Callable
from functools import cache, partial
from math import prod

import torch
from torch import Tensor

from benchmarks.shapes import names_of
from models.loading.load import fill_network
from models.loading.plan import Target, plan_tensors
from models.network import ExpertWeights, Network, Weight
from models.spec import Experts, ModelSpec
from models.weights.block_formats import Kind
from models.weights.checkpoint import Blocks, StoredTensor
from models.weights.share import Share
from models.weights.slots import Slot, slots

_STD = 0.02
BLOCK = 256
"""Numbers of the widest block of FORMATS."""
_HALVES: dict[Kind, tuple[int, tuple[float, ...]]] = {
    Kind.Q8_0: (0, (_STD / 74,)),
    Kind.Q4_0: (0, (_STD / 4.6,)),
    Kind.Q4_K: (0, (_STD / 200, _STD / 26)),
    Kind.Q6_K: (208, (_STD / 1360,)),
    Kind.MXFP4: (0, ()),
}
"""Where a block has its halves, and their values with which random digits have the deviation of a fresh layer."""


def _q4_k_m(slot: Slot, layers: int) -> Kind:
    if slot.part in ("embedding", "head"):
        return Kind.Q6_K
    layer = slot.layer or 0
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return Kind.Q6_K if more and slot.part in ("v", "down") else Kind.Q4_K


def _q4_0(slot: Slot, layers: int) -> Kind:
    return Kind.Q6_K if slot.part in ("embedding", "head") else Kind.Q4_0


FORMATS: dict[str, Callable[[Slot, int], Kind] | None] = {
    "bf16": None,
    "q8_0": lambda slot, layers: Kind.Q8_0,
    "q4_0": _q4_0,
    "q4_k_m": _q4_k_m,
    "mxfp4": lambda slot, layers: Kind.Q8_0 if slot.expert is None else Kind.MXFP4,
}
"""The type of each matrix, by its slot and the number of layers; None: plain numbers."""


def random_blocks(
    kind: Kind, rows: int, columns: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Return blocks of random digits, uint8 [rows, bytes per row]."""
    shape = rows, columns // kind.block, kind.block_bytes
    data = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    start, values = _HALVES[kind]
    scales = torch.tensor(values, dtype=torch.float16).view(torch.uint8)
    data[..., start : start + len(scales)] = scales.to(device)
    if kind == Kind.MXFP4:
        data[..., 0] = 119  # 2 ** -9; the values that it multiplies have a deviation of 6
    return data.view(rows, -1)


def random_quantized(
    spec: ModelSpec,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    seed: int = 0,
    rank: tuple[int, int] = (0, 1),
) -> Network:
    """Return a network with matrices quantised as `name`, one of FORMATS, says, packed for a GPU; norms are 1.
    `rank` is as in `random_model`.

    Experts of one shape and type have the same numbers, because there are thousands.
    """
    choose = FORMATS[name]
    assert choose is not None
    share = Share(*rank, spec, BLOCK) if rank[1] > 1 else None
    spec = spec if share is None else share.spec
    generator, layers = torch.Generator(device).manual_seed(seed), len(spec.layers)
    tensors, packed, names = [], {}, names_of(spec)
    made = cache(lambda kind, rows, columns: random_blocks(kind, rows, columns, device, generator))
    for slot in slots(spec):
        called, blocks = slot.name(names), None
        if slot.is_matrix or slot.is_by_head:
            kind = choose(slot, layers)
            kind = Kind.Q8_0 if slot.shape[1] % kind.block else kind
            packed[called] = kind
            draw = partial(random_blocks, device=device, generator=generator) if slot.expert is None else made
            blocks = Blocks(kind, _ignoring_device(partial(draw, kind, *slot.shape)))
        fill = partial(torch.Tensor.fill_, value=1.0)
        if slot.part == "router":
            fill = partial(torch.Tensor.normal_, std=_STD, generator=generator)
        tensors.append(StoredTensor(called, slot.shape, 2 * prod(slot.shape), fill, blocks=blocks))
    target = Target(dtype, device, context_length=positions)
    return fill_network(plan_tensors(spec, tensors, target, names, packed=packed, share=share))


def _ignoring_device(draw: Callable[[], Tensor]) -> Callable[[torch.device], Tensor]:
    return lambda _: draw()


def stored_bytes(spec: ModelSpec, name: str) -> float:
    """Return the approximate bytes of all weights in a format; `spec` may be that of one part."""
    choose, layers, total = FORMATS[name], len(spec.layers), 0.0
    for slot in slots(spec):
        kind = choose(slot, layers) if choose is not None and (slot.is_matrix or slot.is_by_head) else None
        total += prod(slot.shape) * (2.0 if kind is None else kind.block_bytes / kind.block)
    return total


def read_bytes(network: Network) -> int:
    """Return the bytes of weights that a decoded token reads, without unchosen experts and embeddings.

    A tied embedding is read by the head.
    """
    unread = 0 if network.spec.tied else network.embedding.nbytes
    if network.layer_inputs is not None:
        unread += network.layer_inputs.embedding.nbytes
    for layer, weights in zip(network.spec.layers, network.layers, strict=True):
        feed = layer.feed_forward
        if isinstance(feed, Experts) and isinstance(weights.feed_forward, ExpertWeights):
            first = weights.feed_forward.experts[0]
            each = sum(part.nbytes for part in (*first.gate_up.parts, *first.down.parts))
            unread += (feed.count - feed.chosen) * each
    return sum(weight.nbytes for weight in network.parts(Weight)) - unread
