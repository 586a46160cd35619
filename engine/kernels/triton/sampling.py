"""From logits to a token in one launch: penalties, temperature, top-k, top-p, min-p, one draw, bookkeeping.

The plain twin is `engine/sampling/sampler.py`. Every kernel is a grid over blocks of the vocabulary; the program that
arrives last (a counter in device memory) finishes alone with what the others left, so no second launch is needed.

Settings are read from device memory: `settings` fp32 [5]: temperature, top_p, min_p, repetition and presence
penalty; `numbers` int64 [3]: seed, step, top_k. Among equal logits the lower token id comes first. Logits that are
NaN are taken as +inf, and a likeliest logit that is not finite gives token -1.

One draw is the largest of scaled logit + Gumbel noise (the logarithm of the exponential race of the plain
sampler). The noise of a token is philox (Salmon et al. 2011) of key seed and counter (token id, step), so a seed
gives the same tokens however the work is split.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl

from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

GROUP = tl.constexpr(32)
"""Neighbouring logits that the narrow kernel first knows by their maximum alone."""
MAX_NARROW = tl.constexpr(128)
"""Largest top_k of the narrow kernel: so many groups hold the likeliest top_k tokens."""
CANDIDATES = tl.constexpr(256)
"""Tokens that the narrow kernel ranks exactly."""
CHUNK = tl.constexpr(32)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def penalised(logits, seen, generated, settings, ids, VOCAB: tl.constexpr, PENALISE: tl.constexpr):
    """The logits of `ids` in fp32 after both penalties; -inf beyond the vocabulary, NaN as +inf."""
    inside = ids < VOCAB
    x = tl.load(logits + ids, mask=inside, other=-INFINITY).to(tl.float32)
    if PENALISE:
        repetition = tl.load(settings + 3)
        if repetition != 1.0:
            known = tl.load(seen + ids, mask=inside, other=0) != 0
            x = tl.where(known, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        presence = tl.load(settings + 4)
        if presence != 0.0:
            known = tl.load(generated + ids, mask=inside, other=0) != 0
            x = tl.where(known, x - presence, x)
    return tl.where(x != x, INFINITY, x)


@triton.jit
def gumbel(ids, numbers):
    """Standard Gumbel noise fp32 for the token `ids`: minus the logarithm of an exponential number."""
    counter = ids.to(tl.uint32)
    zero = counter * 0
    step = zero + tl.load(numbers + 1).to(tl.uint32)
    bits, _, _, _ = tl.philox(tl.load(numbers).to(tl.uint64), counter, step, zero, zero)
    chance = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log(1 - chance); the series where the difference would lose the digits that decide who wins.
    series = chance * (1.0 + chance * (0.5 + chance * (1.0 / 3.0)))
    return -tl.log(tl.where(chance < 0.01, series, -tl.log(1.0 - chance)))


@triton.jit
def _scaled(x, peak, settings):
    """Logits relative to the likeliest, over the temperature: a tiny one gives 0 for it, not infinity for several."""
    temperature = tl.load(settings)
    return (x - peak) / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _score(scaled, ids, settings, numbers):
    """What the winner has most of: scaled logits, with noise unless decoding is greedy."""
    score = scaled
    if tl.load(settings) > 0:
        score = scaled + gumbel(ids, numbers)
    return score


@triton.jit
def _last_to_arrive(arrived):
    """Whether all other programs have been here; what they stored before can then be read."""
    tl.debug_barrier()  # the stores of every thread come before the one atomic
    return tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _commit(
    chosen, peak, token, numbers, seen, generated, history, counters, arrived,
    SLOTS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """Write the token (-1 when the peak is not finite) and everything that goes one further with it."""
    finite = (peak > -INFINITY) & (peak < INFINITY)
    chosen = tl.where(finite, chosen, -1)
    step = tl.load(numbers + 1)
    tl.store(token, chosen.to(tl.int64))
    tl.store(history + step % SLOTS, chosen)
    tl.store(seen + chosen, 1, mask=finite)
    tl.store(generated + chosen, 1, mask=finite)
    tl.store(numbers + 1, step + 1)
    for i in tl.static_range(COUNTERS):
        tl.store(counters + i, tl.load(counters + i) + 1)
    tl.store(arrived, 0)


@triton.jit
def _entry(x, at):
    """x[at] of an fp32 vector without NaN."""
    return tl.max(tl.where(tl.arange(0, x.shape[0]) == at, x, -INFINITY), 0)


@triton.jit
def _best_of_blocks(
    logits, seen, generated, settings, numbers, peaks, values, names,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PENALISE: tl.constexpr,
):  # fmt: skip
    """The token that wins among the winners of the blocks, and the largest logit."""
    i = tl.arange(0, BLOCKS)
    there = i < tl.num_programs(0)
    min_p = tl.load(settings + 2)
    peak = tl.max(tl.load(peaks + i, mask=there, other=-INFINITY, cache_modifier=".cg"), 0)
    winners = tl.load(names + i, mask=there, other=0, cache_modifier=".cg")
    scaled = _scaled(tl.load(values + i, mask=there, other=-INFINITY, cache_modifier=".cg"), peak, settings)
    scores = _score(scaled, winners, settings, numbers)
    best = tl.argmax(scores, 0)
    # The winner of a block may fail min_p next to the likeliest of all. Its score still bounds the block, so
    # only where it would win everything is the block searched again, for its best token that passes. Without a
    # finite peak nothing would ever pass.
    finite = (peak > -INFINITY) & (peak < INFINITY)
    while finite & (tl.exp(_entry(scaled, best)) < min_p):
        ids = best * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(penalised(logits, seen, generated, settings, ids, VOCAB, PENALISE), peak, settings)
        score = tl.where(tl.exp(x) >= min_p, _score(x, ids, settings, numbers), -INFINITY)
        inner = tl.argmax(score, 0)
        winners = tl.where(i == best, best * BLOCK + inner, winners)
        scaled = tl.where(i == best, _entry(x, inner), scaled)
        scores = tl.where(i == best, _entry(score, inner), scores)
        best = tl.argmax(scores, 0)
    return tl.sum(tl.where(i == best, winners, 0), 0), peak


@triton.jit
def race_kernel(
    logits, seen, generated, settings, numbers, peaks, values, names, arrived, token, history, counters,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, COUNTERS: tl.constexpr,
    PENALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Greedy decoding, or a draw from all tokens that pass min_p.

    logits [VOCAB], any float dtype; seen, generated uint8 [VOCAB]. Scratch: peaks, values fp32 and names int32
    [BLOCKS], BLOCKS a power of two of at least the number of programs. `_commit` says what is written.
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    min_p = tl.load(settings + 2)
    x = penalised(logits, seen, generated, settings, block * BLOCK + lane, VOCAB, PENALISE)
    peak = tl.max(x, 0)
    # What min_p excludes next to the likeliest of the block, it excludes next to the likeliest of all.
    scaled = _scaled(x, peak, settings)
    score = tl.where(
        tl.exp(scaled) >= min_p, _score(scaled, block * BLOCK + lane, settings, numbers), -INFINITY
    )
    best = tl.argmax(score, 0)
    tl.store(peaks + block, peak)
    tl.store(values + block, _entry(x, best))
    tl.store(names + block, block * BLOCK + best)
    if _last_to_arrive(arrived):
        chosen, top = _best_of_blocks(
            logits, seen, generated, settings, numbers, peaks, values, names, VOCAB, BLOCK, BLOCKS, PENALISE
        )
        _commit(chosen, top, token, numbers, seen, generated, history, counters, arrived, SLOTS, COUNTERS)


@triton.jit
def _key(value):
    """An int64 that orders as the fp32 scalar does, one apart for neighbouring numbers."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    """The fp32 scalar of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _likeliest(x, k, floor, LIMIT: tl.constexpr):
    """A mask of at most LIMIT entries of x [n] that holds the k largest (k <= LIMIT), and their lower bound.

    Lower indices come first among equals. `floor` is a lower bound known before: k entries reach it, or all do.
    """
    low = _key(floor)
    high = _key(tl.max(x, 0)) + 1
    count = tl.sum((x >= floor).to(tl.int32), 0)
    tries = 0
    while (count > LIMIT) & (high - low > 1):
        # At least k entries reach low, fewer reach high. Halve the logits, no more than 32 below high; where
        # that does not end soon (ties, huge values), halve the keys, which ends after 32 more.
        top = _number(high - 1)
        middle = _key(0.5 * (tl.maximum(_number(low), top - 32.0) + top))
        middle = tl.where(tries < 12, middle, (low + high) >> 1)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        reached = tl.sum((x >= _number(middle)).to(tl.int32), 0)
        enough = reached >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
        tries += 1
    edge = _number(low)
    above = (x > edge).to(tl.int32)
    tied = (x == edge).to(tl.int32)
    # More than LIMIT reach the bound only where they equal it: then those with the lowest indices are enough.
    take = (above + tied * (tl.cumsum(tied, 0) + tl.sum(above, 0) <= LIMIT).to(tl.int32)) > 0
    return take, edge


@triton.jit
def _gather(take, labels, out):
    """Store the labels that are taken, in order, and let the whole program read them. Returns how many."""
    taken = take.to(tl.int32)
    tl.store(out + tl.cumsum(taken, 0) - 1, labels, mask=take)
    tl.debug_barrier()
    return tl.sum(taken, 0)


@triton.jit
def _draw_narrow(
    logits, seen, generated, settings, numbers, peaks, values, names,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A token from the likeliest top_k, and the largest logit, given the maxima of all groups.

    The top_k groups with the largest maxima hold the top_k largest logits: every other token has one token
    of each of them before it.
    """
    k = tl.load(numbers + 2).to(tl.int32)
    group = tl.arange(0, GROUPS)
    there = group < tl.num_programs(0) * (BLOCK // GROUP)
    maxima = tl.load(peaks + group, mask=there, other=-INFINITY, cache_modifier=".cg")
    peak = tl.max(maxima, 0)
    take, edge = _likeliest(maxima, k, tl.full([], -float("inf"), tl.float32), MAX_NARROW)
    count = _gather(take, group, names)

    i = tl.arange(0, MAX_NARROW * GROUP)
    group = tl.load(names + i // GROUP, mask=i // GROUP < count, other=VOCAB // GROUP + 1)
    ids = group * GROUP + i % GROUP
    x = penalised(logits, seen, generated, settings, ids, VOCAB, True)
    take, edge = _likeliest(x, k, edge, CANDIDATES)
    tl.debug_barrier()  # the groups have been read by all before the candidates take their place
    count = _gather(take, ids, names)
    _gather(take, x, values)

    i = tl.arange(0, CANDIDATES)
    ids = tl.load(names + i, mask=i < count, other=0)
    x = tl.load(values + i, mask=i < count, other=-INFINITY)
    ranks = tl.zeros([CANDIDATES, CHUNK], tl.int32)
    masses = tl.zeros([CANDIDATES, CHUNK], tl.float32)
    for start in tl.static_range(0, CANDIDATES, CHUNK):
        j = start + tl.arange(0, CHUNK)
        y = tl.load(values + j, mask=j < count, other=-INFINITY)
        chance = tl.exp(_scaled(y, peak, settings))
        equal = (y[None, :] == x[:, None]) & (j[None, :] < i[:, None])
        before = (y[None, :] > x[:, None]) | equal
        ranks += before.to(tl.int32)
        masses += tl.where(before, chance[None, :], 0.0)
    rank = tl.sum(ranks, 1)
    mass = tl.sum(masses, 1)
    scaled = _scaled(x, peak, settings)
    chance = tl.exp(scaled)
    top_p = tl.load(settings + 1)
    total = tl.sum(tl.where(rank < k, chance, 0.0), 0)
    # A token stays while those before it have not reached top_p; the first one always stays.
    nucleus = (mass < tl.where(top_p < 1.0, top_p * total, INFINITY)) | (rank == 0)
    kept = (rank < k) & nucleus & (chance >= tl.load(settings + 2))
    best = tl.argmax(tl.where(kept, _score(scaled, ids, settings, numbers), -INFINITY), 0)
    return tl.sum(tl.where(i == best, ids, 0), 0), peak


@triton.jit
def narrow_kernel(
    logits, seen, generated, settings, numbers, peaks, values, names, arrived, token, history, counters,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, COUNTERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A draw from the likeliest top_k tokens, 1 <= top_k <= MAX_NARROW, after top-p and min-p. Never greedy.

    Arguments as for `race_kernel`, but peaks is fp32 [GROUPS], the maxima of groups of GROUP logits (GROUPS a
    power of two that covers the grid), and values, names [CANDIDATES].
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    block = tl.program_id(0)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = penalised(logits, seen, generated, settings, ids, VOCAB, True)
    tl.store(peaks + group, tl.max(x, 1))
    if _last_to_arrive(arrived):
        chosen, peak = _draw_narrow(
            logits, seen, generated, settings, numbers, peaks, values, names, VOCAB, BLOCK, GROUPS
        )
        _commit(chosen, peak, token, numbers, seen, generated, history, counters, arrived, SLOTS, COUNTERS)


@triton.jit
def penalise_kernel(
    logits, seen, generated, settings, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out fp32 [VOCAB] = `penalised` logits."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + ids, penalised(logits, seen, generated, settings, ids, VOCAB, True), mask=ids < VOCAB)
