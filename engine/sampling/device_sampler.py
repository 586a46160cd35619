"""Sampling without the host: the settings, the masks and the newest token of every slot live on the device.

The plain twin, on any device, is `engine/sampling/sampler.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.params import SamplingParams

Draw = Literal["race", "any"]
HISTORY = 64
"""Tokens of a slot that the host can still read."""

ONE_LAUNCH = 8
"""Rows of any kind up to which looking and finishing are one launch."""


class DeviceSampler:
    """Turns logits into tokens by enqueuing work only, so that a CUDA graph can hold it.

    A slot holds a sequence. `load` fills buffers that stay where they are: a captured graph serves whichever
    sequences come later. A row's token depends on its logits and its slot alone: not on other rows, nor on which
    row it is. On a CPU it runs in Triton's interpreter, for tests. Draw once of every sort before capturing it,
    which compiles it.
    """

    def __init__(self, vocab_size: int, slots: int, device: torch.device, pdl: bool = False) -> None:
        """For batches of up to as many rows as the power of two from `slots` on.

        `pdl`: launch with programmatic dependent launch (sm_90 and later).
        """
        import triton

        from engine.kernels.triton import ranking, sampling
        from engine.kernels.triton.launch import split_alike

        self._kernels = sampling
        self._most_ranked = ranking.MAX_NARROW.value
        self._split_alike = split_alike
        self.vocab_size = vocab_size
        self.pdl = pdl
        self.token = torch.full((slots,), -1, dtype=torch.int64, device=device)
        """The newest token of each slot; -1 where the logits held NaN or their maximum was not finite."""
        self.history = torch.full((slots, HISTORY), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        """The token of step s (its number within the answer) of a slot at [slot, s % 64], in memory that the host
        reads directly once that step has ended."""
        self.marks = torch.zeros(slots, vocab_size, dtype=torch.uint8, device=device)
        """1 for tokens of prompt and answer, 3 for tokens of the answer; only kept where a penalty needs it."""
        # One row of bytes a slot, so that one copy loads it: three int64, then six fp32.
        self._state = torch.zeros(slots, sampling.NUMBERS.value, dtype=torch.int64, device=device)
        self._settings = self._state.view(torch.float32)[:, 6:]
        self.step = self._state[:, 1]
        """int64 [slots]: tokens of the answer so far; with the seed it determines the next draw."""
        self._races = [True] * slots
        # A block is what one program reads: small for many programs, and enough for 16 bytes a thread.
        self._block = 2048
        self._parts = triton.cdiv(vocab_size, sampling.PART.value)
        self._blocks = triton.cdiv(vocab_size, self._block)
        self._places = triton.next_power_of_2(max(2 * self._blocks, ranking.CANDIDATES.value))
        self._groups = triton.next_power_of_2(self._blocks * self._block // ranking.GROUP.value)
        rows = triton.next_power_of_2(slots)
        self._peaks = torch.zeros(rows, self._groups, dtype=torch.float32, device=device)
        self._values = torch.zeros(rows, self._places, dtype=torch.float32, device=device)
        self._names = torch.zeros(rows, self._places, dtype=torch.int32, device=device)
        self._masses = torch.zeros(rows, triton.next_power_of_2(self._blocks), device=device)
        self._arrived = torch.zeros(rows, dtype=torch.int32, device=device)

    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Serve a sequence in a slot from the next `sample` on; what was enqueued before is not touched.

        It only enqueues, on the current stream. `seed` (0 to 2^63 - 1) is used whatever `params.seed` says.
        """
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        if params.temperature == 0.0 or (top_k == 0 and params.top_p >= 1.0):
            kind = self._kernels.RACE
        else:
            kind = self._kernels.NARROW if 1 <= top_k <= self._most_ranked else self._kernels.WIDE
        self._races[slot] = kind is self._kernels.RACE
        # 0 is greedy; what is above must not become 0 or divide to infinity in fp32.
        temperature = max(params.temperature, 1e-30) if params.temperature else 0.0
        settings = [temperature, params.top_p, params.min_p]
        settings += [params.repetition_penalty, params.presence_penalty, kind.value]
        state = torch.tensor([seed, len(generated_ids), top_k or self.vocab_size, 0, 0, 0])
        state.view(torch.float32)[6:] = torch.tensor(settings)
        self._send(state, self._state[slot])
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0:
            self._mark(self.marks[slot], prompt_ids, generated_ids)

    def draw(self, slots: Iterable[int]) -> Draw:
        """Which draw serves these slots fastest; "any" is always right."""
        return "race" if all(self._races[slot] for slot in slots) else "any"

    def sample(
        self, logits: Tensor, active: Tensor, counters: Tensor | None = None, draw: Draw = "any"
    ) -> None:
        """Enqueue: the tokens of the slots `active` int32 [rows] from logits [rows, vocab], any float dtype.

        A slot of -1 is a row that is nobody's; no slot comes twice, and nothing that overlaps this kernel writes
        `active`. The tokens also go into the marks and `history`, and `step` and every entry of a slot's counters
        (int64 [slots, n], contiguous) go up by 1. `draw` "race": every slot here draws from all tokens, or greedily.
        """
        rows = logits.shape[0]
        if rows > len(self._arrived):
            raise ValueError(f"There are {rows} rows to sample, and room for {len(self._arrived)}.")
        arguments = (
            logits,
            logits.stride(0) if rows > 1 else 0,  # 0: loads of 16 bytes, whatever the vocabulary
            active,
            self.marks,
            self._settings,
            self._state,
            self._peaks,
            self._values,
            self._names,
            self._masses,
            self._arrived,
            self.token,
            self.history,
            self.step if counters is None else counters,
        )
        constants = {
            "VOCAB": self.vocab_size,
            "PLACES": self._places,
            "GROUPS": self._groups,
            "SLOTS": HISTORY,
            "COUNTERS": 0 if counters is None else counters.shape[1],
            "PDL": self.pdl,
            **({"launch_pdl": True} if self.pdl else {}),
        }
        if draw == "race":
            kernel = self._kernels.race_kernel[(self._parts, rows)](*arguments, **constants, num_warps=4)
            self._split_alike(kernel)
            return
        for look, finish in [(True, True)] if rows <= ONE_LAUNCH else [(True, False), (False, True)]:
            kernel = self._kernels.sampling_kernel[(self._blocks if look else 1, rows)](
                *arguments, **constants, BLOCK=self._block, LOOK=look, FINISH=finish, num_warps=16
            )
            self._split_alike(kernel)

    def _mark(self, marks: Tensor, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        from engine.kernels.triton import scores

        ids = torch.tensor([*prompt_ids, *generated_ids], dtype=torch.int64)
        there = torch.empty_like(ids, device=marks.device)
        self._send(ids, there)
        marks.zero_()
        marks.index_fill_(0, there[: len(prompt_ids)], scores.SEEN.value)
        marks.index_fill_(0, there[len(prompt_ids) :], scores.GENERATED.value)

    def _send(self, values: Tensor, to: Tensor) -> None:
        """Copy to the device without waiting. Pinned memory is not used again before the copy has been made."""
        to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)
