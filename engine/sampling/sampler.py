"""From logits to a token, on the device of the logits.

On a CPU the native kernels draw it (kernels/native/sampling.cpp); what follows is their plain twin.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import randbits
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.native import library as native
from engine.params import SamplingParams

Words = NDArray[np.int32]
"""int32 [(vocab + 31) / 32]: one bit a token, set where it may follow."""
LEAST_TEMPERATURE = 1e-30
"""What a smaller one does is the same."""


class Drawn(NamedTuple):
    """A token that was drawn, and what `SamplingParams.logprobs` asks for."""

    token_id: int
    """-1 where the logits are no numbers."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SamplerState:
    """What sampling one sequence needs to remember."""

    params: SamplingParams
    seed: int
    step: int
    """Tokens of the answer so far; with the seed it determines the next draw."""
    generator: torch.Generator | None
    """None for greedy decoding and on a CPU, which needs one random number a token."""
    seen: Tensor | None
    """bool [vocab]: tokens of the prompt and the answer; None without a repetition penalty."""
    generated: Tensor | None
    """int32 [vocab]: how often each token is in the answer; None without a presence or frequency penalty."""
    biased: tuple[Tensor, Tensor] | None
    """int64 [n], fp32 [n]: tokens, and what is added to their logits; None without a bias."""
    natively: tuple[native.Sampling, Tensor] | None
    """How the native kernels draw, and room for them; None where they do not."""
    words: tuple[Tensor, Words] | None = None
    """Room for a mask, and the same memory as an array. It is kept: in a step's time, making it anew takes longer than
    filling it."""

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        device: torch.device,
        earlier: Sequence[int] = (),
    ) -> "SamplerState":
        """State for a request; without a seed one is drawn from the system's entropy.

        `earlier` are the tokens at the end of `prompt` that belong to the answer: it is one that goes on.
        """
        seed = randbits(63) if params.seed is None else params.seed
        generator = seen = generated = biased = natively = None
        if params.temperature > 0.0 and device.type != "cpu":
            generator = torch.Generator(device)
        if params.repetition_penalty != 1.0:
            seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            ids = torch.tensor(earlier, dtype=torch.int64)
            generated = torch.bincount(ids, minlength=vocab_size).to(device, torch.int32)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            biased = ids, torch.tensor(list(params.logit_bias.values()), device=device)
        if device.type == "cpu" and native.problem() is None:
            room = torch.empty(2 * vocab_size)
            how = native.Sampling(
                room=room.data_ptr(),
                seen=None if seen is None else seen.data_ptr(),
                generated=None if generated is None else generated.data_ptr(),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                temperature=params.temperature and max(params.temperature, LEAST_TEMPERATURE),
                top_p=params.top_p,
                min_p=params.min_p,
                top_k=min(params.top_k, vocab_size),
                count=vocab_size,
            )
            natively = how, room
        return cls(params, seed, len(earlier), generator, seen, generated, biased, natively)

    def room_of_mask(self, vocab_size: int) -> tuple[Tensor, Words]:
        """int32 [(vocab + 31) / 32] on the CPU, and the same memory as an array."""
        if self.words is None:
            words = torch.empty(-(-vocab_size // 32), dtype=torch.int32)
            self.words = words, words.numpy()
        return self.words

    def note(self, token_id: int) -> None:
        """Remember a token of the answer, at least 0."""
        if self.seen is not None:
            _numbers(self.seen)[token_id] = True
        if self.generated is not None:
            _numbers(self.generated)[token_id] += 1

    @contextmanager
    def after(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Meanwhile it is as if these had been drawn, too."""
        step, fresh = self.step, list[int]()
        if self.seen is not None:
            fresh = [token_id for token_id in {*token_ids} if not _numbers(self.seen)[token_id]]
        for token_id in token_ids:
            self.skip(token_id)
        try:
            yield
        finally:
            self.step = step
            if self.seen is not None:
                _numbers(self.seen)[fresh] = False
            if self.generated is not None:
                for token_id in token_ids:
                    _numbers(self.generated)[token_id] -= 1

    def skip(self, token_id: int) -> None:
        """The next token is this one, and nothing is drawn."""
        self.step += 1
        self.note(token_id)


def sample(logits: Tensor, state: SamplerState, mask: Tensor | None = None) -> int:
    """The next token id for logits [vocab] of any float dtype; -1 where they are no numbers. It is a step of `state`.

    In this order: bias, mask, repetition penalty, presence penalty, frequency penalty, temperature, top-k, top-p,
    min-p; then one draw from what is left. `mask` is int32 [(vocab + 31) / 32] on the same device: a token is allowed
    where its bit is set. Temperature 0 takes the most likely token after the penalties. Raises NativeError when memory
    is short.
    """
    params = state.params
    seed = draw_seed(state.seed, state.step)
    state.step += 1
    logits = biased(logits.float(), state)
    if state.natively is not None:
        how, _ = state.natively
        how.chance = _chance(seed)
        return native.sample(logits, how, mask)
    logits = penalise(masked(logits, mask), state)
    if params.temperature == 0.0:
        return likeliest(logits)
    if not math.isfinite(logits.max()):
        return -1
    probabilities, ids = choices(logits, params)
    choice = draw(probabilities, state.generator, seed)
    return choice if ids is None else int(ids[choice])


def log_chances(logits: Tensor, token_id: int, count: int) -> Drawn:
    """The token, its log-probability in logits [vocab] as they are, and the `count` likeliest ones and theirs.

    Of equals the lower id comes first.
    """
    if token_id < 0:
        return Drawn(token_id)
    logits = logits.float()
    whole = logits.logsumexp(-1)
    chosen = float(logits[token_id] - whole)
    if count == 0:
        return Drawn(token_id, chosen)
    # All that equal the last one are looked at: topk takes any of them.
    ids = (logits >= logits.topk(min(count, len(logits))).values[-1]).nonzero().squeeze(1)
    values, order = logits[ids].sort(descending=True, stable=True)
    top = zip(ids[order[:count]].tolist(), (values[:count] - whole).tolist(), strict=True)
    return Drawn(token_id, chosen, tuple(top))


def biased(logits: Tensor, state: SamplerState) -> Tensor:
    """fp32 logits [vocab] with the bias of `state`."""
    if state.biased is None:
        return logits
    ids, bias = state.biased
    return logits.index_add(0, ids, bias)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits [vocab], -inf where the mask allows nothing."""
    return logits if mask is None else logits.masked_fill(~allowed(mask, len(logits)), -math.inf)


def allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab_size] of the bits of a mask."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> bits) & 1).bool().flatten()[:vocab_size]


def penalise(logits: Tensor, state: SamplerState) -> Tensor:
    """Logits [vocab] with the repetition, the presence and the frequency penalty of `state`."""
    if state.seen is not None:
        logits = penalise_repetition(logits, state.seen, state.params.repetition_penalty)
    if state.generated is not None:
        ids = state.generated.nonzero().squeeze(1)
        # One after the other, as the kernels do it.
        left = logits[ids] - state.params.presence_penalty
        logits = logits.index_copy(0, ids, left - state.params.frequency_penalty * state.generated[ids])
    return logits


def choices(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """What temperature, top-k, top-p and min-p leave of logits [vocab]: probabilities, not normalised, and their
    tokens, or None where there is one for every token."""
    ids = None
    if 0 < params.top_k < logits.numel():
        # Whatever the temperature they are the same, and all that follows has k candidates instead of the vocabulary.
        logits, ids = logits.topk(params.top_k)
    # Relative to the likeliest, so that a tiny temperature gives 0 for it and not infinity for several.
    probabilities = (logits - logits.max()).div_(max(params.temperature, LEAST_TEMPERATURE)).softmax(-1)
    if params.top_p < 1.0:
        probabilities = keep_top_p(probabilities, params.top_p, ordered=ids is not None)
    if params.min_p > 0.0:
        probabilities = keep_min_p(probabilities, params.min_p)
    if ids is not None:
        # In an order that does not turn around where rounding does it to two that are nearly alike.
        ids, order = ids.sort()
        probabilities = probabilities[order]
    return probabilities, ids


def draw_seed(seed: int, step: int) -> int:
    """The generator's seed for the draw after `step` tokens: so an answer can go on without drawing again.

    Steele et al. 2014, SplitMix64: neighbouring seeds and steps give numbers (64 bits) that have nothing in common.
    """
    mixed = (seed + (step + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _chance(seed: int) -> float:
    """A number from 0 to 1, without 1, of 53 bits."""
    return (seed >> 11) / 2**53


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits of `seen` tokens (Keskar et al. 2019, CTRL)."""
    ids = seen.nonzero().squeeze(1)
    found = logits[ids]
    return logits.index_copy(0, ids, torch.where(found > 0, found / penalty, found * penalty))


def _numbers(values: Tensor) -> Any:
    """The same memory as an array where it is the CPU's: numpy takes a tenth of what torch takes for one number."""
    return values.numpy() if values.device.type == "cpu" else values


def likeliest(logits: Tensor) -> int:
    """The first index of the largest; -1 where that is not finite."""
    index = int(_numbers(logits).argmax())
    return index if math.isfinite(logits[index]) else -1


def keep_top_p(probabilities: Tensor, top_p: float, ordered: bool = False) -> Tensor:
    """Zero everything outside the smallest set of likeliest tokens that reaches `top_p` (Holtzman et al. 2020).

    `ordered`: the likeliest come first. The result is not normalised.
    """
    if not ordered:
        sorted_ones, order = probabilities.sort(descending=True)
        return probabilities.scatter(0, order, keep_top_p(sorted_ones, top_p, ordered=True))
    # A token stays while those before it have not reached top_p; the first one stays even where top_p rounds to 0.
    outside = probabilities.cumsum(-1) - probabilities >= top_p * probabilities.sum()
    outside[0] = False
    return probabilities.masked_fill(outside, 0.0)


def keep_min_p(probabilities: Tensor, min_p: float) -> Tensor:
    """Zero what is less likely than `min_p` times the likeliest token (Nguyen et al. 2024). Not normalised."""
    return probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0.0)


def draw(probabilities: Tensor, generator: torch.Generator | None, seed: int) -> int:
    """One index with chances in proportion to `probabilities`; one of 0 is never drawn.

    On a CPU it is where one random number falls among their sums. Elsewhere it is the largest p / e with e
    exponentially distributed (the exponential race); a CPU takes a millisecond for as many random numbers.
    """
    if generator is None:
        sums = probabilities.to(torch.float64).cumsum(-1)
        most = float(sums[-1])
        # Rounded up, it may be the end itself, behind which there is nothing.
        at = min(_chance(seed) * most, math.nextafter(most, 0.0))
        return int(torch.searchsorted(sums, at, right=True))
    generator.manual_seed(seed)
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return int((probabilities / noise.clamp_min_(1e-20)).argmax())
