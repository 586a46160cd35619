"""The rows of a step's spans that a short convolution sees, read from the KV cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Span
from engine.cache.kv_cache import KVCache
from models.reference.attention import Attention


class ConvolvingStep:
    """The attention of one step for a network some of whose layers are convolutions (`ConvolutionRows`)."""

    def __init__(self, attend: Attention, cache: KVCache, spans: tuple[Span, ...]) -> None:
        """`attend` computes the layers with attention; `spans` are the rows of the step."""
        self._attend = attend
        self._cache = cache
        self._spans = spans
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `models.reference.attention.Attention`."""
        return self._attend(layer_index, q, k, v)

    def last_rows(self, layer_index: int, x: Tensor, width: int) -> list[Tensor]:
        """See `models.reference.attention.ConvolutionRows`."""
        if width not in self._slots:  # the same in all layers
            self._slots[width] = self._seen(width)
        slots, missing = self._slots[width]
        self._cache.keep(layer_index, slots[-1], x)
        earlier = self._cache.k[layer_index][slots[:-1]].squeeze(2).masked_fill_(missing, 0)
        return [*earlier, x]

    def _seen(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the slots int64 [width, T] that each row sees, and which of the earlier ones there are not, bool
        [width - 1, T, 1]: those before the first row of a sequence, which have the slot 0."""
        found = []
        for span in self._spans:
            first = max(span.start - (width - 1), 0)
            slots = self._cache.every_slot(span.blocks, first, span.stop)
            slots = F.pad(slots, (width - 1 - (span.start - first), 0), value=-1)
            found.append(slots.unfold(0, span.count, 1))
        slots = torch.cat(found, dim=1).to(self._cache.device, non_blocking=True)
        return slots.clamp(min=0), (slots[:-1] < 0).unsqueeze(-1)
