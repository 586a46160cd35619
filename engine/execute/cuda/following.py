"""What other ranks have in a decode step in the place of a sampler: rank 0 draws, and they only count."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling.device_sampler import ALL, Draw
from engine.sampling.sampler import Drawn


class Counting:
    """Takes the place of a `DeviceSampler` on a rank that nobody asks for tokens."""

    def __init__(
        self, vocab_size: int, slots: int, device: torch.device, count: Callable[[Tensor, Tensor], None]
    ) -> None:
        """`count` is that of `Exchange`."""
        self.vocab_size = vocab_size
        self.token = torch.full((slots,), -1, dtype=torch.int64, device=device)
        """The newest token of each slot, as rank 0 tells at the beginning of a step."""
        self._count = count

    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Nothing: rank 0 knows."""

    def words(self, slot: int) -> NDArray[np.int32]:
        """None: rank 0 has the masks."""
        raise NotImplementedError

    def row_words(self, row: int) -> NDArray[np.int32]:
        """None: rank 0 has those of guesses, too."""
        raise NotImplementedError

    def draw(self, slots: Iterable[int]) -> Draw:
        """The same for all."""
        return Draw()

    def drawn(self, tokens: Sequence[tuple[int, int, int | None]]) -> list[Drawn]:
        """None: rank 0 has them."""
        raise NotImplementedError

    def sample(
        self,
        logits: Tensor,
        active: Tensor,
        counters: Tensor | None = None,
        draw: Draw = ALL,
        overlaps: bool = True,
    ) -> None:
        """Enqueue that the counters of `active` go up, where there are some."""
        if counters is not None:
            self._count(active, counters)
