"""The recurrences of a step's spans by kernels, and what these read about the spans."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from engine.attention.recurring import RecurringStep
from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.kernels.convolution_rows import NONE
from engine.kernels.on_gpu import problem
from engine.kernels.walks import Walks
from models.network import DeltaNetWeights, Mamba2Weights
from models.recurrences import DeltaNet, Recurrence
from models.reference.attention import Attention, Walk


def walks(cache: KVCache, spans: tuple[Span, ...], group: int) -> Walks:
    """Return the walks of the spans of a step, whose log is in `group`."""
    places, slots, rows, saves = (
        each.to(cache.device, non_blocking=True) for each in host_walks(cache, spans, group)
    )
    return Walks(places, slots, rows, saves)


def host_walks(cache: KVCache, spans: tuple[Span, ...], group: int, token: int = 0) -> list[Tensor]:
    """Return the tensors of `Walks` in host memory, in order. `token` is the number of the first row of the spans."""
    assert cache.states is not None
    tail, begin = cache.states.tail, 0
    places, slots, rows = [], [], []
    saves: list[tuple[int, int]] = []
    for span in spans:
        moves = span.states
        assert moves is not None
        first = max(moves.row - tail, 0)
        seen = cache.every_slot(span.blocks, first, span.stop, group)
        given = (
            torch.full((max(tail - moves.row, 0),), NONE),
            seen[: span.start - first],
            NONE - 1 - torch.arange(token, token + span.count),
        )
        places.append(torch.cat(given).unfold(0, tail + 1, 1))
        slots.append(seen[span.start - first :])
        own, end = begin + span.start - moves.row, begin + span.stop - moves.row
        until = len(saves) + len(moves.saves)
        rows.append((begin, own, end, own - token, moves.source, len(saves), until, 0))
        saves += [(begin + row - moves.row, slot) for row, slot in moves.saves]
        begin, token = end, token + span.count
    found = torch.cat(places), torch.cat(slots), torch.tensor(rows), torch.tensor(saves).view(-1, 2)
    return [each.to(torch.int32).contiguous() for each in found]


class WalkStep(RecurringStep):
    """The attention of one step, whose recurrences kernels compute."""

    def __init__(
        self,
        attend: Attention,
        cache: KVCache,
        spans: tuple[Span, ...],
        walks: Mapping[int, Walks] = MappingProxyType({}),
    ) -> None:
        """Set up as `ConvolvingStep`. `walks` are those of each group with a log, where they are on the device already;
        then `spans` are not needed."""
        super().__init__(attend, cache, spans)
        self._walks = dict(walks)

    def recur(self, layer_index: int, rows: Tensor, walk: Walk) -> Tensor:
        """See `RecurringStep`."""
        parts = rows[:, : walk.spec.conv_size], rows[:, walk.spec.conv_size :]
        return self._walk_over(layer_index, parts, walk.spec, walk.weights)

    def mix(
        self,
        layer_index: int,
        spec: Recurrence,
        weights: DeltaNetWeights | Mamba2Weights,
        projected: Tensor,
        gates: Tensor | None,
    ) -> Tensor:
        """Compute what `between` of `models.reference.delta_net` or `mamba2` does."""
        from engine.kernels.triton.recurrence import gated_norm

        if isinstance(spec, DeltaNet):
            assert gates is not None
            z, rows = projected[:, spec.conv_size :], (projected, gates)
        else:
            sizes = [spec.output_size, spec.conv_size, spec.heads]
            z, inner, gates = torch.split(projected, sizes, dim=-1)
            rows = inner, gates
        return gated_norm(spec, weights, self._walk_over(layer_index, rows, spec, weights, True), z)

    def _walk_over(
        self,
        layer: int,
        rows: tuple[Tensor, Tensor],
        spec: Recurrence,
        weights: DeltaNetWeights | Mamba2Weights,
        multiplies: bool = False,
    ) -> Tensor:
        from engine.kernels.triton.recurrence import walk_rows

        group, states = self.cache.groups[layer], self.cache.states
        assert states is not None
        if group not in self._walks:  # the same in all such layers
            self._walks[group] = walks(self.cache, self._spans, group)
        log = self.cache.k[layer].flatten(1)
        return walk_rows(spec, weights, self._walks[group], rows, log, states.layers[layer], multiplies)


def recurrence_step(device: torch.device) -> type[RecurringStep]:
    """Return the kind of step for networks with recurrences on a device: with kernels, where these run."""
    return WalkStep if problem(device) is None else RecurringStep
