"""From logits to a token, on the device of the logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import randbits

import torch
from torch import Tensor

from engine.params import SamplingParams


@dataclass(slots=True)
class SamplerState:
    """What sampling one sequence needs to remember."""

    params: SamplingParams
    seed: int
    step: int
    """Tokens of the answer so far; with the seed it determines the next draw."""
    generator: torch.Generator | None
    """None for greedy decoding."""
    seen: Tensor | None
    """bool [vocab]: tokens of the prompt and the answer; None without a repetition penalty."""
    generated: Tensor | None
    """bool [vocab]: tokens of the answer; None without a presence penalty."""

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
        generator = torch.Generator(device) if params.temperature > 0.0 else None
        seen = generated = None
        if params.repetition_penalty != 1.0:
            seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        if params.presence_penalty != 0.0:
            generated = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            generated[torch.tensor(earlier, dtype=torch.int64, device=device)] = True
        return cls(params, seed, len(earlier), generator, seen, generated)

    def note(self, token_id: int) -> None:
        """Remember a token of the answer."""
        for mask in (self.seen, self.generated):
            if mask is not None:
                mask[token_id] = True


def sample(logits: Tensor, state: SamplerState) -> Tensor:
    """The next token id, int64 [], for logits [vocab] of any float dtype. It counts as a step of `state`.

    In this order: repetition penalty, presence penalty, temperature, top-k, top-p, min-p; then one draw from
    what is left. Temperature 0 takes the most likely token after the penalties.
    """
    params = state.params
    if state.generator is not None:
        state.generator.manual_seed(draw_seed(state.seed, state.step))
    state.step += 1
    logits = logits.float()
    if state.seen is not None:
        logits = penalise_repetition(logits, state.seen, params.repetition_penalty)
    if state.generated is not None:
        logits = torch.where(state.generated, logits - params.presence_penalty, logits)
    if params.temperature == 0.0:
        return likeliest(logits)
    ids = None
    if 0 < params.top_k < logits.numel():
        # Whatever the temperature they are the same, and all that follows has k candidates instead of the vocabulary.
        logits, ids = logits.topk(params.top_k)
    # Relative to the likeliest, so that a tiny temperature gives 0 for it and not infinity for several.
    probabilities = ((logits - logits.max()) / max(params.temperature, 1e-30)).softmax(-1)
    if params.top_p < 1.0:
        probabilities = keep_top_p(probabilities, params.top_p, ordered=ids is not None)
    if params.min_p > 0.0:
        probabilities = keep_min_p(probabilities, params.min_p)
    choice = draw(probabilities, state.generator)
    return choice if ids is None else ids[choice]


def draw_seed(seed: int, step: int) -> int:
    """The generator's seed for the draw after `step` tokens: so an answer can go on without drawing again.

    Steele et al. 2014, SplitMix64: neighbouring seeds and steps give numbers (64 bits) that have nothing in common.
    """
    mixed = (seed + (step + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits of `seen` tokens (Keskar et al. 2019, CTRL)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def likeliest(logits: Tensor) -> Tensor:
    """The first index of the largest, int64 []."""
    if logits.device.type == "cpu":
        return torch.tensor(int(logits.numpy().argmax()))  # a tenth of what torch takes
    return logits.argmax()


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


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index with chances in proportion to `probabilities`, int64 []; one of 0 is never drawn.

    On a CPU it is where one random number falls among their sums. Elsewhere it is the largest p / e with e
    exponentially distributed (the exponential race), for which the host need not wait; a CPU takes a millisecond for
    as many random numbers as there are tokens.
    """
    if probabilities.device.type == "cpu":
        ends = probabilities.to(torch.float64).cumsum(-1)
        at = torch.rand((), dtype=torch.float64, generator=generator) * ends[-1]
        # Rounded up, `at` may be the end itself, behind which there is nothing.
        return torch.searchsorted(
            ends, torch.minimum(at, torch.nextafter(ends[-1], at.new_zeros(()))), right=True
        )
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise.clamp_min_(1e-20)).argmax()
