"""Sampling without the host: the settings, the masks and the newest token of every slot live on the device.

The plain version, for any device, is `engine/sampling/sampler.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.params import SamplingParams
from engine.sampling.sampler import SampledToken, safe_temperature


class DrawFeatures(NamedTuple):
    """The features that the launches of a draw support, by default all. A feature left out costs nothing."""

    race: bool = False
    """Every slot draws from all tokens, or greedily; no other slots are supported."""
    edits: bool = True
    """Some slots have a bias or a constraint."""
    tells: bool = True
    """Some slots ask for log-probabilities."""


ALL = DrawFeatures()
HISTORY = 64
"""How many of a slot's latest tokens the host can still read."""

FEWEST_ROWS = 8
"""The fewest rows to have room for: a slot has several rows in a step that checks guesses."""

ONE_LAUNCH = 8
"""Up to this many rows, one launch of `sampling_kernel` both looks and finishes."""

RACE_BLOCK, MANY_RACE_BLOCK = 1024, 2048
RACE_WARPS = 4
"""How many tokens a program reads if all rows are races, for one row and for more: greedy draws of one row take 4.4 us
with 1,024 and 4.7 with 2,048 on an H200, of eight 7.5 and 6.5, of 64 32.6 and 22.6 (with 4,096 6.1 and 23.0)."""


class DeviceSampler:
    """Turns logits into tokens by only enqueuing work, so that a CUDA graph can hold it.

    A slot holds a sequence. `load` fills buffers that stay where they are, so a captured graph serves any later
    sequence. A row's token depends only on its logits and its slot: not on other rows, nor on the index of the row. On
    a CPU it runs in Triton's interpreter, for tests. Before capturing a draw, run one of every kind, which compiles it.
    """

    def __init__(self, vocab_size: int, slots: int, device: torch.device, pdl: bool = False) -> None:
        """Allocate buffers for batches of up to the next power of two from max(`slots`, FEWEST_ROWS) on, in rows.

        `pdl`: launch with programmatic dependent launch (sm_90 and later).
        """
        import triton

        from engine.kernels.triton import logit_processors, ranking, sampling
        from engine.kernels.triton.launch import split_alike

        self._kernels = sampling
        self._edits = logit_processors
        self._most_ranked = ranking.MAX_NARROW.value
        self._split_alike = split_alike
        self.vocab_size = vocab_size
        self.pdl = pdl
        self.token = torch.full((slots,), -1, dtype=torch.int64, device=device)
        """The newest token of each slot; -1 if the logits held NaN or their maximum was not finite."""
        pinned = device.type == "cuda"
        self.history = torch.full((slots, HISTORY), -1, dtype=torch.int32, pin_memory=pinned)
        """The token of step s (its number within the answer) of a slot, at [slot, s % 64], in memory that the host
        reads directly once that step has ended."""
        self.marks = torch.zeros(slots, vocab_size, dtype=torch.int16, device=device)
        """1 for tokens of prompt and answer, plus 2 for each time in the answer; kept only if a penalty needs it."""
        self.masks = torch.zeros(slots, -(-vocab_size // 32), dtype=torch.int32, pin_memory=pinned)
        """One bit for each token that may be drawn, for slots with a constraint; kernels read it from host memory."""
        self._row_masks = torch.zeros(FEWEST_ROWS, self.masks.shape[1], dtype=torch.int32, pin_memory=pinned)
        """The same for each row of a step that checks guesses, if its slot has a constraint."""
        self._row_words: NDArray[np.int32] = self._row_masks.numpy()
        self._read: NDArray[np.int32] = self.history.numpy()
        self._words: NDArray[np.int32] = self.masks.numpy()
        told = (slots, HISTORY, logit_processors.PLACES.value)
        self._chances = torch.zeros(told, pin_memory=pinned)
        self._others = torch.zeros(told, dtype=torch.int32, pin_memory=pinned)
        self._told = self._chances.numpy(), self._others.numpy()
        self._biased = torch.zeros(slots, logit_processors.BIASED.value, dtype=torch.int32, device=device)
        self._bias = torch.zeros(slots, logit_processors.BIASED.value, device=device)
        # One row of bytes per slot, so that one copy loads it: three int64, then ten fp32.
        self._state = torch.zeros(slots, sampling.NUMBERS.value, dtype=torch.int64, device=device)
        self._settings = self._state.view(torch.float32)[:, 6:]
        self.numbers = self._state
        """int64 [slots, 8]: seed, `step`, top_k; then the other settings."""
        self.step = self._state[:, 1]
        """int64 [slots]: tokens of the answer so far; with the seed, it determines the next draw."""
        self._needs = [DrawFeatures(True, False, False)] * slots
        # A block is what one program reads: small, for many programs, and enough for 16 bytes a thread.
        self._block = 2048
        self._blocks = triton.cdiv(vocab_size, self._block)
        self._places = triton.next_power_of_2(max(2 * self._blocks, ranking.CANDIDATES.value))
        self._groups = triton.next_power_of_2(self._blocks * self._block // ranking.GROUP.value)
        rows = triton.next_power_of_2(max(slots, FEWEST_ROWS))
        self._peaks = torch.zeros(rows, self._groups, dtype=torch.float32, device=device)
        self._values = torch.zeros(rows, self._places, dtype=torch.float32, device=device)
        self._names = torch.zeros(rows, self._places, dtype=torch.int32, device=device)
        self._masses = torch.zeros(rows, triton.next_power_of_2(self._blocks), device=device)
        self._arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self._parts_told = triton.cdiv(vocab_size, logit_processors.BLOCK.value)
        self._room_told = triton.next_power_of_2(self._parts_told * logit_processors.MOST.value)
        parts = rows * self._parts_told
        self._told_parts = torch.zeros(2, parts, device=device)
        self._told_values = torch.zeros(parts * logit_processors.MOST.value, device=device)
        self._told_names = torch.zeros(parts * logit_processors.MOST.value, dtype=torch.int32, device=device)

    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        seed: int,
    ) -> None:
        """Serve a sequence in a slot from the next `sample` on; work already enqueued is not affected.

        It only enqueues, on the current stream. `seed` (0 to 2^63 - 1) is used, whatever `params.seed` is. With a
        constraint, its `words` must be written before each `sample`.
        """
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        if params.temperature == 0.0 or (top_k == 0 and params.top_p >= 1.0):
            kind = self._kernels.RACE
        else:
            kind = self._kernels.NARROW if 1 <= top_k <= self._most_ranked else self._kernels.WIDE
        edits = bool(params.logit_bias) or params.constraint is not None
        self._needs[slot] = DrawFeatures(kind is self._kernels.RACE, edits, params.logprobs is not None)
        settings = [safe_temperature(params), params.top_p, params.min_p]
        settings += [params.repetition_penalty, params.presence_penalty, kind.value, params.frequency_penalty]
        settings += [len(params.logit_bias), params.constraint is not None]
        settings += [-1 if params.logprobs is None else min(params.logprobs, self.vocab_size)]
        state = torch.tensor([seed, len(generated_ids), top_k or self.vocab_size, 0, 0, 0, 0, 0])
        state.view(torch.float32)[6:] = torch.tensor(settings)
        self._send(state, self._state[slot])
        if params.logit_bias:
            count = len(params.logit_bias)
            self._send(torch.tensor([*params.logit_bias], dtype=torch.int32), self._biased[slot, :count])
            self._send(torch.tensor([*params.logit_bias.values()]).float(), self._bias[slot, :count])
        if params.penalises:
            self._mark(self.marks[slot], prompt_ids, generated_ids)

    def words(self, slot: int) -> NDArray[np.int32]:
        """Return the mask of a slot. Writing to it affects every `sample` that has not run."""
        words: NDArray[np.int32] = self._words[slot]
        return words

    def row_words(self, row: int) -> NDArray[np.int32]:
        """Return the mask of a row, for a `sample` with `by_row`."""
        words: NDArray[np.int32] = self._row_words[row]
        return words

    def draw(self, slots: Iterable[int]) -> DrawFeatures:
        """Return the draw that serves these slots fastest; `DrawFeatures()` is always correct."""
        needs = [self._needs[slot] for slot in slots]
        return DrawFeatures(
            all(need.race for need in needs),
            any(need.edits for need in needs),
            any(need.tells for need in needs),
        )

    def drawn(self, tokens: Sequence[tuple[int, int, int | None]]) -> list[SampledToken]:
        """Return tokens whose steps have ended, given the slot, the number in the answer and the `logprobs` of each."""
        slots = [slot for slot, _, _ in tokens]
        places = [number % HISTORY for _, number, _ in tokens]
        ids = self._read[slots, places].tolist()
        return [
            SampledToken(id)
            if count is None or id < 0
            else SampledToken(id, *self._slot_logprobs(slot, place, count))
            for id, slot, place, (_, _, count) in zip(ids, slots, places, tokens, strict=True)
        ]

    def _slot_logprobs(
        self, slot: int, place: int, count: int
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        chances, others = (told[slot, place].tolist() for told in self._told)
        last = 1 + min(count, self.vocab_size)
        return chances[0], tuple(zip(others[1:last], chances[1:last], strict=True))

    def sample(
        self,
        logits: Tensor,
        active: Tensor,
        counters: Tensor | None = None,
        draw: DrawFeatures = ALL,
        overlaps: bool = True,
        by_row: bool = False,
    ) -> None:
        """Enqueue the draw of tokens for the slots `active` int32 [rows] from logits [rows, vocab], any float dtype.

        A row with slot -1 belongs to none; no slot occurs twice, and nothing that overlaps this kernel writes `active`.
        The tokens also go into the marks and `history`, and `step` and every entry of a slot's counters (int64
        [slots, n], contiguous) go up by 1. `draw` must support every slot here. If the launch never `overlaps` the
        kernel before it, that kernel may write `active`. `by_row`: constraints use the row's mask, not the slot's.
        Raises ValueError for more rows than there is room for.
        """
        rows, overlapping = logits.shape[0], self._overlapping(overlaps)
        if rows > len(self._arrived):
            raise ValueError(f"There are {rows} rows to sample, and room for {len(self._arrived)}.")
        edited = self._edit(logits, active, overlapping, by_row) if draw.edits else logits
        arguments = (
            edited,
            edited.stride(0) if rows > 1 else 0,  # 0: loads of 16 bytes, whatever the vocabulary
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
            **overlapping,
        }
        block, warps = self._block, 16
        if draw.race:
            block, warps = RACE_BLOCK if rows == 1 else MANY_RACE_BLOCK, RACE_WARPS
        in_one = draw.race or rows <= ONE_LAUNCH
        for look, finish in [(True, True)] if in_one else [(True, False), (False, True)]:
            kernel = self._kernels.sampling_kernel[(-(-self.vocab_size // block) if look else 1, rows)](
                *arguments,
                **constants,
                BLOCK=block,
                RACES=draw.race,
                LOOK=look,
                FINISH=finish,
                num_warps=warps,
            )
            self._split_alike(kernel)
        if draw.tells:
            self._tell(logits, active, overlapping)

    def _overlapping(self, overlaps: bool) -> dict[str, Any]:
        pdl = self.pdl and overlaps
        return {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}

    def _edit(self, logits: Tensor, active: Tensor, overlapping: dict[str, Any], by_row: bool) -> Tensor:
        """Return logits fp32 [rows, vocab] with the biases of their slots, and the masks of the slots or the rows."""
        edited = torch.empty(logits.shape, device=logits.device)
        kernels, rows = self._edits, logits.shape[0]
        kernel = kernels.edit_kernel[(self._parts_told, rows)](
            logits,
            logits.stride(0) if rows > 1 else 0,
            active,
            self._settings,
            self._biased,
            self._bias,
            self._row_masks if by_row else self.masks,
            edited,
            VOCAB=self.vocab_size,
            WORDS=self.masks.shape[1],
            PITCH=2 * self._kernels.NUMBERS.value,
            BY_ROW=by_row,
            **overlapping,
            num_warps=4,
        )
        self._split_alike(kernel)
        return edited

    def _tell(self, logits: Tensor, active: Tensor, overlapping: dict[str, Any]) -> None:
        """Write the log-probabilities of the tokens just drawn."""
        kernels, rows, numbers = self._edits, logits.shape[0], self._kernels.NUMBERS.value
        stride = logits.stride(0) if rows > 1 else 0
        parts = (*self._told_parts, self._told_values, self._told_names)
        constants = {"PITCH": 2 * numbers, "BLOCKS": self._parts_told, **overlapping}
        kernel = kernels.chances_kernel[(self._parts_told, rows)](
            logits, stride, active, self._settings, *parts, VOCAB=self.vocab_size, **constants, num_warps=8
        )
        self._split_alike(kernel)
        kernel = kernels.tell_kernel[(rows,)](
            logits,
            stride,
            active,
            self._settings,
            self._state,
            *parts,
            self.token,
            self._chances,
            self._others,
            NUMBERS=numbers,
            SLOTS=HISTORY,
            ROOM=self._room_told,
            **constants,
            num_warps=8,
        )
        self._split_alike(kernel)

    def _mark(self, marks: Tensor, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        from engine.kernels.triton import scores

        ids = torch.tensor([*prompt_ids, *generated_ids], dtype=torch.int64)
        there = torch.empty_like(ids, device=marks.device)
        self._send(ids, there)
        marks.zero_()
        marks.index_fill_(0, there, scores.SEEN.value)
        generated = there[len(prompt_ids) :]
        marks.index_add_(0, generated, torch.full_like(generated, scores.GENERATED.value, dtype=torch.int16))

    def _send(self, values: Tensor, to: Tensor) -> None:
        """Copy to the device without waiting. Pinned memory is not reused before the copy has been made."""
        to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)
