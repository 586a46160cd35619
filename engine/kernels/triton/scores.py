"""The score by which a token wins: its logit after the penalties, over the temperature, plus noise.

One draw is the largest of scaled logit + Gumbel noise (the logarithm of the exponential race of the plain sampler). The
noise of a token is philox (Salmon et al. 2011) with the seed as key and (token id / 4, step) as counter, which gives
four numbers for four neighbours. So a seed gives the same tokens however the work is split.

Settings are read from device memory: `settings` fp32: temperature, top_p, min_p, repetition and presence penalty, the
kind, frequency penalty; `numbers` int64: seed, step, top_k. `marks` int16 [vocab] is SEEN plus GENERATED for each time
that a token is in the answer; it is read only if a penalty needs it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INFINITY = tl.constexpr(float("inf"))
SEEN = tl.constexpr(1)
"""The token is in the prompt or the answer."""
GENERATED = tl.constexpr(2)
"""Added for each time that the token is in the answer; the token is then SEEN, too."""
ROUNDS = tl.constexpr(7)
"""Rounds of philox: as many as its authors found to pass every test of randomness."""


@triton.jit
def penalised(logits, marks, settings, ids, VOCAB: tl.constexpr):
    """Return the logits of `ids` in fp32 after the penalties; -inf beyond the vocabulary, NaN as +inf."""
    inside = ids < VOCAB
    x = tl.load(logits + ids, mask=inside, other=-INFINITY).to(tl.float32)
    repetition = tl.load(settings + 3)
    presence = tl.load(settings + 4)
    if repetition != 1.0:
        known = tl.load(marks + ids, mask=inside, other=0) != 0
        x = tl.where(known, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    frequency = tl.load(settings + 6)
    if (presence != 0.0) | (frequency != 0.0):
        count = (tl.load(marks + ids, mask=inside, other=0) // GENERATED).to(tl.float32)
        x = tl.where(count > 0, x - presence - frequency * count, x)
    return tl.where(x != x, INFINITY, x)


@triton.jit
def _bits(quads, numbers):
    """Return four random uint32, for the tokens from 4 * quads on."""
    counter = quads.to(tl.uint32)
    zero = counter * 0
    step = zero + tl.load(numbers + 1).to(tl.uint32)
    return tl.philox(tl.load(numbers).to(tl.uint64), counter, step, zero, zero, ROUNDS)


@triton.jit
def _log(x):
    """Return the logarithm of a normal fp32 number to 2e-7, in two instructions; the usual one takes 30."""
    return libdevice.fast_logf(x)


@triton.jit
def _gumbel_of_bits(bits):
    """Return minus the logarithm of an exponentially distributed number, fp32."""
    chance = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log(1 - chance); by its series where the difference would lose the digits that decide who wins.
    series = chance * (1.0 + chance * (0.5 + chance * (1.0 / 3.0)))
    return -_log(tl.where(chance < 0.01, series, -_log(1.0 - chance)))


@triton.jit
def gumbel(ids, numbers):
    """Return standard Gumbel noise, fp32, for any tokens `ids`."""
    a, b, c, d = _bits(ids // 4, numbers)
    place = ids % 4
    return _gumbel_of_bits(tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d))))


@triton.jit
def gumbel_of_block(first, numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return `gumbel` [ROWS, COLUMNS] of the tokens from `first` on, a multiple of 4: four for the work of one."""
    a, b, c, d = _bits(first // 4 + tl.arange(0, ROWS * COLUMNS // 4), numbers)
    return _gumbel_of_bits(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLUMNS]))


@triton.jit
def scaled(x, peak, settings):
    """Return logits relative to the largest, over the temperature: a tiny one gives one 0, not several infinities."""
    temperature = tl.load(settings)
    return (x - peak) * tl.where(temperature > 0, 1.0 / temperature, 1.0)


@triton.jit
def passes(relative, settings):
    """Return whether min_p keeps a token, by its chance relative to the likeliest (see `scaled`)."""
    return relative >= tl.log(tl.load(settings + 2))


@triton.jit
def score(relative, ids, settings, numbers):
    """Return the score that the winner maximises: scaled logits, with noise unless decoding is greedy."""
    result = relative
    if tl.load(settings) > 0:
        result = relative + gumbel(ids, numbers)
    return result


@triton.jit
def entry(x, at):
    """Return x[at] of an fp32 vector without NaN."""
    return tl.max(tl.where(tl.arange(0, x.shape[0]) == at, x, -INFINITY), 0)


if knobs.runtime.interpret:

    @triton.jit
    def _log(x):
        """See above; the interpreter does not know the fast logarithm."""
        return tl.log(x)
