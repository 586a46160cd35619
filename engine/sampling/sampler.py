"""From logits to a token, on the device of the logits.

On a CPU the native kernels draw it (kernels/native/sampling.cpp); the functions here are their plain torch version.
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
"""int32 [(vocab + 31) / 32]: one bit per token, set if it may follow."""
_TEMPERATURES = 1e-30, 1e30
"""Temperatures beyond these have the same effect; in fp32 they would be 0 and infinity."""


class SampledToken(NamedTuple):
    """A token that was drawn, and the figures for `SamplingParams.logprobs`."""

    token_id: int
    """-1 if the logits are not finite numbers."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SamplerState:
    """The sampling state of one sequence."""

    params: SamplingParams
    seed: int
    step: int
    """The number of tokens of the answer so far; with the seed, it determines the next draw."""
    generator: torch.Generator | None
    """None for greedy decoding, and on a CPU, which needs only one random number per token."""
    seen: Tensor | None
    """bool [vocab]: tokens of the prompt and the answer; None without a repetition penalty."""
    generated: Tensor | None
    """int32 [vocab]: how often each token is in the answer; None without a presence or frequency penalty."""
    biased: tuple[Tensor, Tensor] | None
    """int64 [n], fp32 [n]: tokens, and the numbers added to their logits; None without a bias."""
    natively: tuple[native.Sampling, Tensor] | None
    """The arguments of the native kernels, and their scratch memory fp32 [2 * vocab]; None if they do not draw."""
    words: tuple[Tensor, Words] | None = None
    """Memory for a mask, and the same memory as an array. It is kept because making it anew in each step takes longer
    than filling it."""

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        device: torch.device,
        earlier: Sequence[int] = (),
    ) -> "SamplerState":
        """Return the state for a request; without a seed, one is drawn from the system's entropy.

        `earlier` are the tokens at the end of `prompt` that belong to an answer to be continued.
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
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            biased = ids, values
        if device.type == "cpu" and native.problem() is None:
            room = torch.empty(2 * vocab_size)
            how = native.Sampling(
                room=room.data_ptr(),
                seen=None if seen is None else seen.data_ptr(),
                generated=None if generated is None else generated.data_ptr(),
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                temperature=safe_temperature(params),
                top_p=params.top_p,
                min_p=params.min_p,
                top_k=min(params.top_k, vocab_size),
                count=vocab_size,
            )
            natively = how, room
        return cls(params, seed, len(earlier), generator, seen, generated, biased, natively)

    def room_of_mask(self, vocab_size: int) -> tuple[Tensor, Words]:
        """Return int32 [(vocab + 31) / 32] on the CPU, and the same memory as an array."""
        if self.words is None:
            words = torch.empty(-(-vocab_size // 32), dtype=torch.int32)
            self.words = words, words.numpy()
        return self.words

    def note(self, token_id: int) -> None:
        """Record a token of the answer, whose id is at least 0."""
        if self.seen is not None:
            _numbers(self.seen)[token_id] = True
        if self.generated is not None:
            _numbers(self.generated)[token_id] += 1

    @contextmanager
    def after(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Within the context, behave as if these tokens had been drawn, too."""
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
        """Take this token as the next one without drawing."""
        self.step += 1
        self.note(token_id)


def sample(logits: Tensor, state: SamplerState, mask: Tensor | None = None) -> int:
    """Return the next token id for logits [vocab] of any float dtype; -1 if they are not finite. Advances `state`.

    The order is: bias, mask, repetition penalty, presence penalty, frequency penalty, temperature, top-k, top-p,
    min-p; then one draw from what is left. `mask` is int32 [(vocab + 31) / 32] on the same device: a token is allowed
    if its bit is set. Temperature 0 takes the likeliest token after the penalties. Raises NativeError if memory is
    short.
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


def log_chances(logits: Tensor, token_id: int, count: int) -> SampledToken:
    """Return the token, its log-probability by the unchanged logits [vocab], and the `count` likeliest with theirs.

    Among equals, the lower id comes first.
    """
    if token_id < 0:
        return SampledToken(token_id)
    logits = logits.float()
    whole = logits.logsumexp(-1)
    chosen = float(logits[token_id] - whole)
    if count == 0:
        return SampledToken(token_id, chosen)
    # Look at all tokens equal to the last one, because topk returns any of them.
    ids = (logits >= logits.topk(min(count, len(logits))).values[-1]).nonzero().squeeze(1)
    values, order = logits[ids].sort(descending=True, stable=True)
    top = zip(ids[order[:count]].tolist(), (values[:count] - whole).tolist(), strict=True)
    return SampledToken(token_id, chosen, tuple(top))


def biased(logits: Tensor, state: SamplerState) -> Tensor:
    """Return fp32 logits [vocab] with the bias of `state`."""
    if state.biased is None:
        return logits
    ids, bias = state.biased
    return logits.index_add(0, ids, bias)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits [vocab] with -inf where the mask does not allow the token."""
    return logits if mask is None else logits.masked_fill(~allowed(mask, len(logits)), -math.inf)


def allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """Return the bits of a mask as bool [vocab_size]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> bits) & 1).bool().flatten()[:vocab_size]


def penalise(logits: Tensor, state: SamplerState) -> Tensor:
    """Return logits [vocab] with the repetition, presence and frequency penalties of `state`."""
    if state.seen is not None:
        logits = penalise_repetition(logits, state.seen, state.params.repetition_penalty)
    if state.generated is not None:
        ids = state.generated.nonzero().squeeze(1)
        # One penalty after the other, as in the kernels.
        left = logits[ids] - state.params.presence_penalty
        logits = logits.index_copy(0, ids, left - state.params.frequency_penalty * state.generated[ids])
    return logits


def safe_temperature(params: SamplingParams) -> float:
    """Return a temperature that fp32 can hold; 0 is greedy."""
    least, most = _TEMPERATURES
    return params.temperature and min(max(params.temperature, least), most)


def choices(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities, not normalised, that temperature, top-k, top-p and min-p leave of logits [vocab], and
    their token ids, or None if there is one probability for every token."""
    ids = None
    if 0 < params.top_k < logits.numel():
        # The top k are the same at any temperature, so everything below has k candidates instead of the vocabulary.
        logits, ids = logits.topk(params.top_k)
    # Relative to the likeliest, so that a tiny temperature gives 0 for that one and not infinity for several.
    probabilities = (logits - logits.max()).div_(safe_temperature(params)).softmax(-1)
    if params.top_p < 1.0:
        probabilities = keep_top_p(probabilities, params.top_p, ordered=ids is not None)
    if params.min_p > 0.0:
        probabilities = keep_min_p(probabilities, params.min_p)
    if ids is not None:
        # Order by id, because rounding may swap two that are nearly equal.
        ids, order = ids.sort()
        probabilities = probabilities[order]
    return probabilities, ids


def draw_seed(seed: int, step: int) -> int:
    """Return the generator's seed for the draw after `step` tokens, so that an answer can continue without redrawing.

    Steele et al. 2014, SplitMix64: neighbouring seeds and steps give unrelated 64-bit numbers.
    """
    mixed = (seed + (step + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _chance(seed: int) -> float:
    """Return a number in [0, 1) of 53 bits."""
    return (seed >> 11) / 2**53


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits of `seen` tokens (Keskar et al. 2019, CTRL)."""
    ids = seen.nonzero().squeeze(1)
    found = logits[ids]
    return logits.index_copy(0, ids, torch.where(found > 0, found / penalty, found * penalty))


def _numbers(values: Tensor) -> Any:
    """Return the same memory as a numpy array on a CPU, where numpy reads a number in a tenth of torch's time."""
    return values.numpy() if values.device.type == "cpu" else values


def likeliest(logits: Tensor) -> int:
    """Return the first index of the largest value; -1 if that is not finite."""
    index = int(_numbers(logits).argmax())
    return index if math.isfinite(logits[index]) else -1


def keep_top_p(probabilities: Tensor, top_p: float, ordered: bool = False) -> Tensor:
    """Zero everything outside the smallest set of likeliest tokens that reaches `top_p` (Holtzman et al. 2020).

    `ordered`: the likeliest come first. The result is not normalised.
    """
    if not ordered:
        sorted_ones, order = probabilities.sort(descending=True)
        return probabilities.scatter(0, order, keep_top_p(sorted_ones, top_p, ordered=True))
    # A token stays while those before it have not reached top_p; the first stays even if top_p rounds to 0.
    outside = probabilities.cumsum(-1) - probabilities >= top_p * probabilities.sum()
    outside[0] = False
    return probabilities.masked_fill(outside, 0.0)


def keep_min_p(probabilities: Tensor, min_p: float) -> Tensor:
    """Zero tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024). The result is not normalised."""
    return probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0.0)


def draw(probabilities: Tensor, generator: torch.Generator | None, seed: int) -> int:
    """Draw one index with chances in proportion to `probabilities`; an index with probability 0 is never drawn.

    On a CPU, find where one random number falls among the cumulative sums. Elsewhere, take the largest p / e with e
    exponentially distributed (the exponential race); on a CPU, that many random numbers would take a millisecond.
    """
    if generator is None:
        sums = probabilities.to(torch.float64).cumsum(-1)
        most = float(sums[-1])
        # Rounding up may give the end itself, where no token is left.
        at = min(_chance(seed) * most, math.nextafter(most, 0.0))
        return int(torch.searchsorted(sums, at, right=True))
    generator.manual_seed(seed)
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return int((probabilities / noise.clamp_min_(1e-20)).argmax())
