"""The rows of a step's spans that a short convolution sees, read from the KV cache."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Span
from engine.cache.kv_cache import KVCache
from engine.kernels.convolution_rows import COMPUTED_HERE, NONE
from models.reference.attention import Attention


class ConvolvingStep:
    """The attention of one step for a network some of whose layers are convolutions (`ConvolutionRows`)."""

    def __init__(
        self,
        attend: Attention,
        cache: KVCache,
        spans: tuple[Span, ...],
        seen: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """`attend` computes the layers with attention; `spans` are the rows of the step. `seen` is what the method of
        that name would return for each group, where it is on the device already; then `spans` are not needed."""
        self._attend = attend
        self.cache = cache
        self._spans = spans
        self._slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._seen = dict(seen)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        return self._attend(layer_index, q, k, v)

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        """See `models.reference.attention.ConvolutionRows`."""
        key = width, self.cache.groups[layer_index]
        if key not in self._slots:  # the same in all such layers
            self._slots[key] = self._look_up(*key)
        slots, missing = self._slots[key]
        self.cache.keep(layer_index, slots[-1], x)
        earlier = self.cache.k[layer_index][slots[:-1]].squeeze(2).masked_fill_(missing, 0)
        return [*earlier, x]

    def seen(self, most: int, layer_index: int) -> Tensor:
        """Return `seen_rows` of all spans in the group of a layer, int32 [T, most] on the device; `most` is the same in
        all calls."""
        group = self.cache.groups[layer_index]
        if group not in self._seen:
            places = torch.cat([seen_rows(self.cache, span, most, group) for span in self._spans])
            self._seen[group] = places.to(self.cache.device, non_blocking=True)
        return self._seen[group]

    def _look_up(self, width: int, group: int) -> tuple[Tensor, Tensor]:
        """Return the slots int64 [width, T] in a group that each row sees, and which of the earlier ones there are not,
        bool [width - 1, T, 1]: those before the first row of a sequence, which have the slot 0."""
        slots = torch.cat([_slots(self.cache, span, width, group).T for span in self._spans], dim=1)
        slots = slots.to(self.cache.device, non_blocking=True)
        return slots.clamp(min=0), (slots[:-1] < 0).unsqueeze(-1)


def convolving(
    attend: Attention, cache: KVCache, spans: tuple[Span, ...], step: type[ConvolvingStep] = ConvolvingStep
) -> Attention:
    """Return `attend`, made a `step` if some layers of the cache keep something other than K and V."""
    return step(attend, cache, spans) if cache.lacks_v else attend


def seen_rows(cache: KVCache, span: Span, most: int, group: int) -> Tensor:
    """Return where each row of a span finds itself and the rows before it: int32 [count, most] in host memory.

    First comes the slot of the row itself in a group, then that of the row before it, and so on. Earlier rows of the
    span are COMPUTED_HERE; where there is no row, there is NONE.
    """
    seen = _slots(cache, span, most, group).flip(1)
    back, row = torch.arange(most), torch.arange(span.count)[:, None]
    return seen.masked_fill((back > 0) & (back <= row), COMPUTED_HERE).int()


def _slots(cache: KVCache, span: Span, width: int, group: int) -> Tensor:
    """Return the slots in a group of the `width` rows up to each row of a span, int64 [count, width]; NONE before the
    first row of the sequence."""
    first = max(span.start - (width - 1), 0)
    slots = cache.every_slot(span.blocks, first, span.stop, group)
    slots = F.pad(slots, (width - 1 - (span.start - first), 0), value=NONE)
    return slots.unfold(0, width, 1)
