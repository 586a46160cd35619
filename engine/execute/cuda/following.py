"""The stand-in for a sampler on ranks other than 0: rank 0 draws tokens, the other ranks only count them."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling.device_sampler import ALL, DrawFeatures
from engine.sampling.sampler import SampledToken


class NullSampler:
    """Stands in for a `DeviceSampler` on a rank that draws no tokens."""

    def __init__(
        self, vocab_size: int, slots: int, device: torch.device, count: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Allocate the tokens; `count` is `AllReduce.count`."""
        self.vocab_size = vocab_size
        self.token = torch.full((slots,), -1, dtype=torch.int64, device=device)
        """The newest token of each slot, int64 [slots], which rank 0 sends at the start of a step."""
        self._count = count

    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Do nothing: rank 0 holds the sampling state."""

    def words(self, slot: int) -> NDArray[np.int32]:
        """Raise NotImplementedError: rank 0 holds the token masks."""
        raise NotImplementedError

    def row_words(self, row: int) -> NDArray[np.int32]:
        """Raise NotImplementedError: rank 0 also holds the masks of guessed tokens."""
        raise NotImplementedError

    def draw(self, slots: Iterable[int]) -> DrawFeatures:
        """Return the same `DrawFeatures` for all slots."""
        return DrawFeatures()

    def drawn(self, tokens: Sequence[tuple[int, int, int | None]]) -> list[SampledToken]:
        """Raise NotImplementedError: rank 0 holds the drawn tokens."""
        raise NotImplementedError

    def sample(
        self,
        logits: Tensor,
        active: Tensor,
        counters: Tensor | None = None,
        draw: DrawFeatures = ALL,
        overlaps: bool = True,
    ) -> None:
        """Enqueue an increment of the counters of the slots `active`, if there are counters."""
        if counters is not None:
            self._count(active, counters)
