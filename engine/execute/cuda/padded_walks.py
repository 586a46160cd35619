"""The recurrences of prompts that are recorded as CUDA graphs."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.walks import host_walks, walks
from engine.batch import Span, StateMoves
from engine.cache.kv_cache import KVCache
from engine.kernels.convolution_rows import NONE
from engine.kernels.walks import Walks
from models.network import DeltaNetWeights, Mamba2Weights, Network
from models.recurrences import Recurrence

SAVES = 64
"""States that a step saves at most."""


class PaddedWalks:
    """The `Walks` of padded steps. A step reads some rows of the log again, up to `replayed` for its spans."""

    def __init__(self, cache: KVCache, tokens: int, spans: int) -> None:
        """Prepare for steps with up to this many tokens and spans. Without recurrent layers, there is nothing to do."""
        self._cache = cache
        states = cache.states
        self._width = 0 if states is None else states.tail + 1
        self._group = 0 if states is None else cache.groups[min(states.layers)]
        self.sizes = (
            () if states is None else (self._width * (tokens + replayed(spans)), 8 * spans, 2 * SAVES)
        )
        """How many numbers each part of the inputs has."""

    def takes(self, spans: tuple[Span, ...], most: int) -> bool:
        """Return whether spans fit into a step for up to `most` spans."""
        moves = [span.states for span in spans if span.states is not None]
        again = sum(span.start - span.states.row for span in spans if span.states is not None)
        return again <= replayed(most) and sum(len(each.saves) for each in moves) <= SAVES

    def fill(self, parts: Items[NDArray[np.int32]], spans: tuple[Span, ...], token: int) -> None:
        """Write what a step needs into its inputs, where the rows of the spans begin with `token`."""
        if not self.sizes:
            return
        places, _, rows, saves = host_walks(self._cache, spans, self._group, token)
        for part, numbers, rest in zip(parts, (places, rows, saves), (NONE, 0, 0), strict=True):
            part[: numbers.numel()] = numbers.flatten().numpy()
            part[numbers.numel() :] = rest

    def read(self, parts: Items[Tensor], tokens: int, spans: int, slots: Items[Tensor]) -> dict[int, Walks]:
        """Return the walks of a step of this shape, by group, from its inputs on the device. `slots` are those of its
        tokens, by group."""
        if not self.sizes:
            return {}
        places, rows, saves = parts
        places = places.view(-1, self._width)[: tokens + replayed(spans)]
        own = slots[self._group][:tokens]
        return {self._group: Walks(places, own, rows.view(-1, 8)[:spans], saves.view(-1, 2), is_padded=True)}


def replayed(spans: int) -> int:
    """Return how many rows of the log a step of so many spans reads again at most."""
    return 128 if spans == 1 else 512


def replay(network: Network, cache: KVCache, span: Span) -> Span:
    """Enqueue the recurrences of the rows of the log before a span, which are more than a padded step reads again.

    Return the span that goes on from there, with the state in the slot of its last save.
    """
    from engine.kernels.triton.recurrence import walk_rows

    states, moves = cache.states, span.states
    assert states is not None
    assert moves is not None
    _, target = moves.saves[-1]
    before = replace(span, count=0, states=StateMoves(moves.source, moves.row, ((span.start, target),)))
    given = walks(cache, (before,), cache.groups[min(states.layers)])
    for index, numbers in states.layers.items():
        spec, weights, log = network.spec.layers[index].mixer, network.layers[index].mixer, cache.k[index]
        assert isinstance(spec, Recurrence)
        assert isinstance(weights, DeltaNetWeights | Mamba2Weights)
        none = log[:1].flatten(1)  # stands for the rows of the step, of which there are none
        walk_rows(spec, weights, given, (none, none[:, spec.conv_size :]), log.flatten(1), numbers)
    return replace(span, states=StateMoves(target, span.start, moves.saves))
