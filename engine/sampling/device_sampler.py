"""Sampling without the host: one sequence's settings, masks and token live on the device.

The plain twin, on any device, is `engine/sampling/sampler.py`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from engine.params import SamplingParams

Kind = Literal["race", "narrow", "wide"]
HISTORY = 64
"""Tokens that the host can still read."""


class DeviceSampler:
    """Turns logits into tokens by enqueuing work only, so that a CUDA graph can hold it.

    `load` fills buffers that stay where they are: a captured graph serves every later sequence of the same `kind`.
    On a CPU it runs in Triton's interpreter, for tests. Run every kind once before capturing it, which compiles it.
    """

    def __init__(self, vocab_size: int, device: torch.device, pdl: bool = False) -> None:
        """`pdl`: launch with programmatic dependent launch (sm_90 and later)."""
        import triton

        from engine.kernels.triton import sampling
        from engine.kernels.triton.launch import split_alike

        self._kernels = sampling
        self._split_alike = split_alike
        self.vocab_size = vocab_size
        self.pdl = pdl
        self.kind: Kind = "race"
        """Which graph serves the loaded sequence: greedy and plain draws, top_k up to 128, or everything else."""
        self.token = torch.full((1,), -1, dtype=torch.int64, device=device)
        """The last token; -1 where the logits held NaN or their maximum was not finite."""
        self.seen = torch.zeros(vocab_size, dtype=torch.uint8, device=device)
        """1 for tokens of the prompt and the answer; only kept from `load` on where a penalty needs it."""
        self.generated = torch.zeros_like(self.seen)
        """1 for tokens of the answer; likewise."""
        self.history = torch.full((HISTORY,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        """The token of step s (its number within the answer) at s % 64, in memory that the host reads directly."""
        self._settings = torch.zeros(5, dtype=torch.float32, device=device)
        self._numbers = torch.zeros(3, dtype=torch.int64, device=device)
        self.step = self._numbers[1:2]
        """int64 [1]: tokens of the answer so far; with the seed it determines the next draw."""
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        # A block is what one program reads: small for many programs, and enough for 16 bytes a thread.
        self._race_block, self._narrow_block = 1024, 2048
        self._race_grid = triton.cdiv(vocab_size, self._race_block)
        self._narrow_grid = triton.cdiv(vocab_size, self._narrow_block)
        self._blocks = triton.next_power_of_2(self._race_grid)
        self._groups = triton.next_power_of_2(self._narrow_grid * self._narrow_block // sampling.GROUP.value)
        entries = max(self._blocks, sampling.CANDIDATES.value)
        self._peaks = torch.zeros(max(self._blocks, self._groups), dtype=torch.float32, device=device)
        self._values = torch.zeros(entries, dtype=torch.float32, device=device)
        self._names = torch.zeros(entries, dtype=torch.int32, device=device)
        self._logits = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._ranks = torch.arange(vocab_size, device=device)

    def load(
        self, params: SamplingParams, prompt_ids: Sequence[int], generated_ids: Sequence[int], seed: int
    ) -> None:
        """Start serving a sequence. `seed` (0 to 2^63 - 1) is used whatever `params.seed` says."""
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        if params.temperature == 0.0 or (top_k == 0 and params.top_p >= 1.0):
            self.kind = "race"
        else:
            self.kind = "narrow" if 1 <= top_k <= self._kernels.MAX_NARROW.value else "wide"
        # 0 is greedy; what is above must not become 0 or divide to infinity in fp32.
        temperature = max(params.temperature, 1e-30) if params.temperature else 0.0
        settings = [temperature, params.top_p, params.min_p]
        settings += [params.repetition_penalty, params.presence_penalty]
        self._settings.copy_(torch.tensor(settings, dtype=torch.float32))
        self._numbers.copy_(torch.tensor([seed, len(generated_ids), top_k or self.vocab_size]))
        self._arrived.zero_()
        if params.repetition_penalty != 1.0:
            self._mark(self.seen, [*prompt_ids, *generated_ids])
        if params.presence_penalty != 0.0:
            self._mark(self.generated, generated_ids)

    def sample(self, logits: Tensor, counters: Tensor | None = None) -> None:
        """Enqueue: `token` from logits [vocab] (contiguous, any float dtype), in the masks, `history` and `step`.

        Adds 1 to every entry of `counters` (int64 [n]).
        """
        if self.kind == "narrow":
            self._narrow(logits, counters)
        elif self.kind == "wide":
            self._keep_nucleus(logits)
            # The penalties are in these logits. min_p, relative to the likeliest, which was kept, is not.
            self._race(self._logits, counters, penalise=False)
        else:
            self._race(logits, counters, penalise=True)

    def _mark(self, mask: Tensor, ids: Sequence[int]) -> None:
        mask.zero_()
        mask[torch.tensor(ids, dtype=torch.int64).to(mask.device)] = 1

    def _race(self, logits: Tensor, counters: Tensor | None, penalise: bool) -> None:
        kernel = self._kernels.race_kernel[(self._race_grid,)](
            *self._buffers(logits, counters),
            BLOCK=self._race_block,
            BLOCKS=self._blocks,
            PENALISE=penalise,
            num_warps=4,
            **self._constants(counters),
            **self._launch(),
        )
        self._split_alike(kernel)

    def _narrow(self, logits: Tensor, counters: Tensor | None) -> None:
        kernel = self._kernels.narrow_kernel[(self._narrow_grid,)](
            *self._buffers(logits, counters),
            BLOCK=self._narrow_block,
            GROUPS=self._groups,
            num_warps=16,
            **self._constants(counters),
            **self._launch(),
        )
        self._split_alike(kernel)

    def _keep_nucleus(self, logits: Tensor) -> None:
        """Put the penalised logits that top-k and top-p keep into `_logits`, -inf for the others."""
        self._kernels.penalise_kernel[(self._race_grid,)](
            logits,
            self.seen,
            self.generated,
            self._settings,
            self._logits,
            VOCAB=self.vocab_size,
            BLOCK=self._race_block,
            PDL=self.pdl,
            **self._launch(),
        )
        values, order = self._logits.sort(descending=True, stable=True)
        chances = ((values - values[0]) / self._settings[0]).exp()
        chances.masked_fill_(self._ranks >= self._numbers[2], 0.0)
        top_p = self._settings[1]
        before = chances.cumsum(0) - chances
        kept = (before < top_p * chances.sum()) | (top_p >= 1.0)
        kept = (kept & (self._ranks < self._numbers[2])) | (self._ranks == 0)
        self._logits.scatter_(0, order, values.masked_fill(~kept, -torch.inf))

    def _buffers(self, logits: Tensor, counters: Tensor | None) -> tuple[Tensor, ...]:
        """The arguments that both kernels take, in their order."""
        masks = (self.seen, self.generated, self._settings, self._numbers)
        scratch = (self._peaks, self._values, self._names, self._arrived)
        return (
            logits,
            *masks,
            *scratch,
            self.token,
            self.history,
            self.step if counters is None else counters,
        )

    def _constants(self, counters: Tensor | None) -> dict[str, Any]:
        count = 0 if counters is None else counters.numel()
        return {"VOCAB": self.vocab_size, "SLOTS": HISTORY, "COUNTERS": count, "PDL": self.pdl}

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.pdl else {}
