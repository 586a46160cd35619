"""Draws from the likeliest tokens only: top-k and top-p, by one program once all logits have been read.

The rule is that of `engine/sampling/sampler.py`; among equal logits the lower token id comes first. The remaining
tokens are nearly always among the likeliest MAX_NARROW tokens, which are ranked exactly. Otherwise, the smallest
remaining logit is found by repeatedly counting or weighing the whole vocabulary.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl

from engine.kernels.triton.scores import INFINITY, gumbel_of_block, passes, penalised, scaled, score

GROUP = tl.constexpr(32)
"""Neighbouring logits that are first represented by their maximum alone."""
MAX_NARROW = tl.constexpr(128)
"""The number of likeliest tokens that are sure to be ranked: that many groups contain them."""
CANDIDATES = tl.constexpr(256)
"""The number of tokens that are ranked exactly."""
CHUNK = tl.constexpr(32)
TILE = tl.constexpr(2048)
"""Logits read at once when the whole vocabulary is searched."""
WAYS = tl.constexpr(8)
"""Edges that are tried in one pass over the vocabulary."""


@triton.jit
def _key(value):
    """Return an int64 that orders like the fp32 number; the keys of neighbouring numbers differ by one."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):
    """Return the fp32 number of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _likeliest(x, k, floor, LIMIT: tl.constexpr):
    """Return a mask of at most LIMIT entries of x [n] that include the k largest (k <= LIMIT), and their lower bound.

    Among equals, lower indices come first. `floor` is a known lower bound: at least k entries reach it, or all do.
    """
    low = _key(floor)
    high = _key(tl.max(x, 0)) + 1
    count = tl.sum((x >= floor).to(tl.int32), 0)
    tries = 0
    while (count > LIMIT) & (high - low > 1):
        # At least k entries reach low, fewer reach high. Bisect by the logits, no more than 32 below high. If that does
        # not end soon (ties, huge values), bisect by the keys, which ends after 32 more steps.
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
    # More than LIMIT entries reach the bound only if some equal it: then those with the lowest indices are enough.
    take = (above + tied * (tl.cumsum(tied, 0) + tl.sum(above, 0) <= LIMIT).to(tl.int32)) > 0
    return take, edge


@triton.jit
def _gather(take, labels, out):
    """Store the taken labels in order, and make them visible to the whole program. Return their number."""
    taken = take.to(tl.int32)
    tl.store(out + tl.cumsum(taken, 0) - 1, labels, mask=take)
    tl.debug_barrier()
    return tl.sum(taken, 0)


@triton.jit
def store_groups(
    logits, marks, settings, peaks, masses, block, wide,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the maxima of a block's groups; if `wide`, also the sum of its chances relative to its likeliest token."""
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = penalised(logits, marks, settings, ids, VOCAB)
    maxima = tl.max(x, 1)
    tl.store(peaks + group, maxima)
    if wide:
        tl.store(masses + block, tl.sum(tl.sum(_chance(x, tl.max(maxima, 0), settings), 1), 0))


@triton.jit
def _chance(x, peak, settings):
    """Return the chance relative to the likeliest token; 0 for -inf, even if no token is likelier."""
    return tl.where(x == -INFINITY, 0.0, tl.exp(scaled(x, peak, settings)))


@triton.jit
def draw_from_groups(
    logits, marks, settings, numbers, peaks, values, names, masses, wide,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Draw a token after top-k, top-p and min-p from what `store_groups` stored; return the largest logit, too.

    The k groups with the largest maxima contain the k largest logits: every other token has one token of each of them
    before it. `wide` means that top_k is above MAX_NARROW or off.
    """
    top_k = tl.load(numbers + 2).to(tl.int32)
    top_p = tl.load(settings + 1)
    k = tl.minimum(top_k, MAX_NARROW)
    BLOCKS: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    group = tl.arange(0, GROUPS)
    there = group < BLOCKS * (BLOCK // GROUP)
    maxima = tl.load(peaks + group, mask=there, other=-INFINITY, cache_modifier=".cg")
    peak = tl.max(maxima, 0)
    finite = (peak > -INFINITY) & (peak < INFINITY)
    whole = tl.full([], 0.0, tl.float32)
    if wide:
        block = tl.arange(0, GROUPS // (BLOCK // GROUP))
        mass = tl.load(masses + block, mask=block < BLOCKS, other=0.0, cache_modifier=".cg")
        tops = tl.max(tl.reshape(maxima, [GROUPS // (BLOCK // GROUP), BLOCK // GROUP]), 1)
        whole = tl.sum(mass * _chance(tops, peak, settings), 0)
    take, edge = _likeliest(maxima, k, tl.full([], -float("inf"), tl.float32), MAX_NARROW)
    count = _gather(take, group, names)

    i = tl.arange(0, MAX_NARROW * GROUP)
    group = tl.load(names + i // GROUP, mask=i // GROUP < count, other=VOCAB // GROUP + 1)
    ids = group * GROUP + i % GROUP
    x = penalised(logits, marks, settings, ids, VOCAB)
    take, edge = _likeliest(x, k, edge, CANDIDATES)
    tl.debug_barrier()  # all must have read the groups before the candidates overwrite them
    count = _gather(take, ids, names)
    _gather(take, x, values)

    i = tl.arange(0, CANDIDATES)
    ids = tl.load(names + i, mask=i < count, other=0)
    x = tl.load(values + i, mask=i < count, other=-INFINITY)
    ranks = tl.zeros([CANDIDATES, CHUNK], tl.int32)
    weights = tl.zeros([CANDIDATES, CHUNK], tl.float32)
    for start in tl.static_range(0, CANDIDATES, CHUNK):
        j = start + tl.arange(0, CHUNK)
        y = tl.load(values + j, mask=j < count, other=-INFINITY)
        chance = tl.exp(scaled(y, peak, settings))
        equal = (y[None, :] == x[:, None]) & (j[None, :] < i[:, None])
        before = (y[None, :] > x[:, None]) | equal
        ranks += before.to(tl.int32)
        weights += tl.where(before, chance[None, :], 0.0)
    rank = tl.sum(ranks, 1)
    mass = tl.sum(weights, 1)
    relative = scaled(x, peak, settings)
    chance = tl.exp(relative)
    ranked = tl.sum(tl.where(rank < k, chance, 0.0), 0)
    total = tl.where(wide, whole, ranked)
    # A token stays while those before it have not reached top_p; the first one always stays.
    nucleus = (mass < tl.where(top_p < 1.0, top_p * total, INFINITY)) | (rank == 0)
    kept = (rank < k) & nucleus & (chance >= tl.load(settings + 2))
    best = tl.argmax(tl.where(kept, score(relative, ids, settings, numbers), -INFINITY), 0)
    chosen = tl.sum(tl.where(i == best, ids, 0), 0)
    # With a large top_k, or a nucleus that extends beyond the ranked tokens, these do not determine the edge.
    if wide & finite & ((top_k < VOCAB) | (ranked < top_p * whole)):
        chosen = _draw_from_all(logits, marks, settings, numbers, peak, whole, VOCAB)
    return chosen, peak


@triton.jit
def _amounts(logits, marks, settings, peak, edges, weigh, VOCAB: tl.constexpr):
    """Return for each of edges fp32 [n] how many logits reach it (exact in fp32), or the sum of their chances.

    The result is fp32 [n], added in one order whatever the edges, so that a lower edge never has less.
    """
    sums = tl.zeros([edges.shape[0], TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        x = penalised(logits, marks, settings, start + tl.arange(0, TILE), VOCAB)
        weight = tl.where(weigh, _chance(x, peak, settings), 1.0)
        sums += tl.where(x[None, :] >= edges[:, None], weight[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _search(logits, marks, settings, peak, low, goal, weigh, VOCAB: tl.constexpr):
    """Return the highest edge, from the key `low` on, that an amount of `goal` reaches, and the amount above it."""
    high = _key(peak) + 1
    above = tl.full([], 0.0, tl.float32)
    while high - low > 1:
        stride = (high - low + WAYS) // (WAYS + 1)
        keys = tl.minimum(low + (tl.arange(0, WAYS) + 1) * stride, high - 1)
        amounts = _amounts(logits, marks, settings, peak, _number(keys), weigh, VOCAB)
        enough = amounts >= goal
        # The larger the amount, the lower the edge.
        above = tl.maximum(above, tl.max(tl.where(enough, 0.0, amounts), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), 0))
    return _number(low), above


@triton.jit
def _draw_from_all(logits, marks, settings, numbers, peak, whole, VOCAB: tl.constexpr):
    """Draw a token after top-k, top-p and min-p, given the largest logit, finite, and the sum of all chances."""
    top_k = tl.load(numbers + 2).to(tl.int32)
    top_p = tl.load(settings + 1)
    # All tokens above the edge stay, and the first `ties` of those that equal it.
    edge = tl.full([], -float("inf"), tl.float32)
    ties = tl.full([], VOCAB, tl.int32)
    total = whole
    if top_k < VOCAB:
        edge, above = _search(logits, marks, settings, peak, _key(edge), top_k.to(tl.float32), False, VOCAB)
        ties = top_k - above.to(tl.int32)
        edges = tl.full([1], 0.0, tl.float32) + _number(_key(edge) + 1)
        total = tl.sum(_amounts(logits, marks, settings, peak, edges, True, VOCAB), 0)
        total += ties.to(tl.float32) * _chance(edge, peak, settings)
    if top_p < 1.0:
        goal = top_p * total
        inner, above = _search(logits, marks, settings, peak, _key(edge), goal, True, VOCAB)
        chance = _chance(inner, peak, settings)
        wanted = tl.ceil((goal - above) / tl.where(chance > 0, chance, 1.0))
        wanted = tl.where(chance > 0, tl.minimum(tl.maximum(wanted, 1.0), VOCAB), VOCAB).to(tl.int32)
        ties = tl.where(inner > edge, wanted, tl.minimum(wanted, ties))
        edge = inner
    place = tl.arange(0, TILE)
    highest = tl.full([TILE], -float("inf"), tl.float32)
    winner = tl.zeros([TILE], tl.int32)
    known = 0
    for start in range(0, VOCAB, TILE):
        x = penalised(logits, marks, settings, start + place, VOCAB)
        tied = (x == edge).to(tl.int32)
        earlier = known + tl.cumsum(tied, 0) - tied
        relative = scaled(x, peak, settings)
        kept = ((x > edge) | ((tied > 0) & (earlier < ties))) & passes(relative, settings)
        noise = tl.reshape(gumbel_of_block(start, numbers, 1, TILE), [TILE])
        mine = tl.where(kept, relative + noise, -INFINITY)
        winner = tl.where(mine > highest, start + place, winner)
        highest = tl.maximum(highest, mine)
        known += tl.sum(tied, 0)
    best = tl.max(highest, 0)
    return tl.min(tl.where(highest == best, winner, VOCAB), 0)
