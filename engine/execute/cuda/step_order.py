"""The parts of a decode step in their order: each mixer and each feed-forward, and which product reads x after it.

The plain twin is the loop of `Decoder.forward` in `models/reference/decoder.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from engine.execute.cuda.add_norm import Normed, normed
from models.network import FeedForwardWeights, Linear, Network


@dataclass(frozen=True, slots=True)
class StepReader:
    """What reads x."""

    norm: Normed | None
    """Applied to x first."""
    product: Linear | None
    """None if it is several, as those of experts."""


@dataclass(frozen=True, slots=True)
class Part:
    """A mixer or a feed-forward."""

    layer: int
    is_mixer: bool
    reads: StepReader | None
    """None: what the part before read, which has computed its first product, too."""
    then: StepReader | None
    """What reads x next; None if the next part adds to x without reading it."""
    is_last: bool
    """Whether nothing of its layer follows."""


def step_parts(network: Network) -> tuple[Part, ...]:
    """Return all parts of a network."""
    head = StepReader((network.spec.final_norm, network.final_norm), network.head)
    parts = [*_readers(network), (len(network.layers), True, head)]
    return tuple(
        Part(layer, is_mixer, reads, then, layer != following)
        for (layer, is_mixer, reads), (following, _, then) in pairwise(parts)
    )


def _readers(network: Network) -> Iterator[tuple[int, bool, StepReader | None]]:
    """Yield the layer of each part, whether it is a mixer, and what it begins with, unless that is not its own."""
    for index, (spec, layer) in enumerate(zip(network.spec.layers, network.layers, strict=True)):
        if layer.mixer is not None:
            norm = normed(spec.attention_norm, layer.attention_norm)
            yield index, True, None if spec.beside else StepReader(norm, layer.projections)
        if (feed := layer.feed_forward) is not None:
            product = feed.gate_up if isinstance(feed, FeedForwardWeights) else None
            yield index, False, StepReader(normed(spec.feed_forward_norm, layer.feed_forward_norm), product)
