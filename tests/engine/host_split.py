"""Networks whose experts lie in host memory beside a "GPU", which is the CPU where there is none."""

from dataclasses import replace

import torch
from torch import Tensor

from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, Weight
from models.weights.block_formats import Kind
from models.weights.quantize import quantize


def split(network: Network, layers: set[int], kind: Kind | None = None) -> Network:
    """The experts of these layers in host memory: plain ones as they are, or in blocks of Q8_0 or Q4_1."""

    def moved(index: int) -> ExpertWeights:
        weights = network.layers[index].feed_forward
        assert isinstance(weights, ExpertWeights)
        gate_ups, downs = ([e.gate_up for e in weights.experts], [e.down for e in weights.experts])
        if kind is None:
            made = [_copied(linears) for linears in (gate_ups, downs)]
        else:
            made = [_blocks(gate_ups, 2, kind), _blocks(downs, 1, kind)]
        experts = tuple(FeedForwardWeights(*pair) for pair in zip(*made, strict=True))
        return replace(weights, experts=experts, on_host=True)

    found = [
        replace(layer, feed_forward=moved(index)) if index in layers else layer
        for index, layer in enumerate(network.layers)
    ]
    return replace(network, layers=tuple(found))


def joined(network: Network) -> Network:
    """The same experts, blocks or not, where the reference multiplies with them."""
    found = []
    for layer in network.layers:
        feed = layer.feed_forward
        found.append(replace(layer, feed_forward=replace(feed, on_host=False)) if _is_moved(feed) else layer)
    return replace(network, layers=tuple(found))


def _is_moved(feed: object) -> bool:
    return isinstance(feed, ExpertWeights) and feed.on_host


def _copied(linears: list[Linear]) -> list[Linear]:
    stack = torch.stack([linear.weight for linear in linears]).cpu()
    return [Linear((Weight.plain(data),), linear.bias) for data, linear in zip(stack, linears, strict=True)]


def _blocks(linears: list[Linear], parts: int, kind: Kind) -> list[Linear]:
    """`parts` matrices above each other, each with blocks of its own; of all experts side by side."""
    rows, columns = linears[0].rows // parts, linears[0].columns

    def stack(part: int) -> Tensor:
        numbers = [linear.weight[part * rows : (part + 1) * rows].float().cpu() for linear in linears]
        return torch.stack([quantize(each, kind) for each in numbers])

    stacks = [stack(part) for part in range(parts)]
    return [
        Linear(tuple(Weight(stack[number], kind, rows, columns) for stack in stacks), linear.bias)
        for number, linear in enumerate(linears)
    ]
