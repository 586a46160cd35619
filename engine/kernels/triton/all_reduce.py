"""Exchange sums, logits and tokens between the GPUs of a divided model in a decode step, with one launch each.

Every rank writes into the memory of the other ranks and waits for their data in its own. No signals or fences are
needed, because a reader sees in each word of 32 bits whether it is there: it is not 0, and the reader sets it back to
0. A thread sends one word at a time, and adjacent threads adjacent words: a GPU sends these together, so blocks have as
many words as threads. For sums, two buffers alternate. A rank reuses a buffer only after it has received every rank's
data of the exchange in between, which each rank sent after reading the buffer's old contents. Tokens and logits need
one buffer: there are sums between those of one step and of the next.

The plain twin is `engine/execute/group.py`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,var-annotated"
import triton
import triton.language as tl

from engine.kernels.triton.gluon import constexpr_function
from engine.kernels.triton.launch import gdc_launch_dependents, gdc_wait

LOOKS = tl.constexpr(1024)
"""How often a rank polls for a word before it checks the time and whether a rank is lost."""


@triton.jit
def exchange_tag(epoch, number):
    """Return the tag of an exchange: 31 bits of epoch int64 [1] + `number`. Its last bit says which of two buffers."""
    return (tl.load(epoch) + number) & 0x7FFFFFFF


@triton.jit
def send(base, place, word, inside, CUDA: tl.constexpr):
    """Write `word` int32, which is not 0, to the words `place` int64 of the memory at address `base`."""
    at = base + place * 4
    if CUDA:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [at, word, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at.to(tl.pointer_type(tl.int32)), word, mask=inside)


@constexpr_function
def _poll(words):
    """Return PTX with which a thread waits until none of its `words` is 0.

    For each word it takes its address, whether it is wanted, the address of `lost`, and `patience`.
    """
    at = [range(words * place, words * (place + 1)) for place in range(5)]
    given = "".join(
        f".reg .pred in{i}; setp.ne.b32 in{i}, ${at[2][i]}, 0; mov.b32 ${i}, 1; " for i in range(words)
    )
    loads = "".join(f"@in{i} ld.relaxed.sys.global.b32 ${i}, [${at[1][i]}]; " for i in range(words))
    least = "mov.b32 t, $0; " + "".join(f"min.u32 t, t, ${i}; " for i in range(1, words))
    lost, patience = at[3][0], at[4][0]
    return (
        "{ .reg .pred p; .reg .b32 n, t; .reg .b64 began, now; mov.b32 n, 0; mov.b64 began, 0; "
        f"{given}LOOK: {loads}{least}setp.ne.u32 p, t, 0; @p bra DONE; "
        f"add.u32 n, n, 1; and.b32 t, n, {LOOKS.value - 1}; setp.ne.u32 p, t, 0; @p bra LOOK; "
        "mov.u64 now, %globaltimer; setp.eq.u64 p, began, 0; @p mov.b64 began, now; sub.u64 now, now, began; "
        f"mov.b32 t, 1; setp.gt.u64 p, now, ${patience}; @p st.relaxed.sys.global.b32 [${lost}], t; "
        f"ld.relaxed.sys.global.b32 t, [${lost}]; setp.eq.u32 p, t, 0; @p bra LOOK; DONE: }}"
    )


@constexpr_function
def _constraints(words):
    """Return the operands of `_poll`."""
    return ",".join(["=&r"] * words + ["l"] * words + ["r"] * words + ["l"] * 2 * words)


@triton.jit
def receive(base, place, inside, lost, patience, CUDA: tl.constexpr, WORDS: tl.constexpr = 1):
    """Wait until no word `place` of the memory at `base` is 0, set them to 0, and return them, int32.

    A thread has a multiple of WORDS words, and no other thread has them. Set `lost` to 1 after a wait longer than
    `patience`: nanoseconds, or polls in the interpreter. Once `lost` is not 0, return whatever is there.
    """
    at = base + place * 4
    pointers = at.to(tl.pointer_type(tl.int32))
    if CUDA:
        # Every thread polls its own words, without a sum over all threads after each look.
        word = tl.inline_asm_elementwise(
            _poll(WORDS),
            _constraints(WORDS),
            [at, inside.to(tl.int32), lost.to(tl.int64) + place * 0, patience + place * 0],
            dtype=tl.int32,
            is_pure=False,
            pack=WORDS,
        )
    else:
        word = wait_for(pointers, None, inside, lost, patience, CUDA)
    tl.store(pointers, word * 0, mask=inside)
    return word


@triton.jit
def wait_for(at, tag, inside, lost, patience, CUDA: tl.constexpr):
    """Wait until the words int32 at `at` are the tag (None: are not 0), and return them.

    Every thread must have words. `lost` and `patience` are as for `receive`.
    """
    word, waits = _look(at, tag, inside)
    looks = 0
    began = patience * 0
    while waits > 0:
        word, waits = _look(at, tag, inside)
        looks += 1
        if looks % LOOKS == 0:
            now = patience * 0 + looks
            if CUDA:
                now = tl.extra.cuda.globaltimer()
            began = tl.where(began == 0, now, began)
            tl.store(lost, 1, mask=now - began > patience)
            # Every thread loads `lost`, so that all take the same branch.
            given_up = tl.max(tl.load(lost + word * 0, mask=inside, other=0, volatile=True), 0)
            waits = tl.where(given_up != 0, 0, waits)
    return word


@triton.jit
def _look(at, tag, inside):
    """Return the words at `at`, and 1 if one is not there yet."""
    word = tl.load(at, mask=inside, other=0, volatile=True)
    missing = word == 0 if tag is None else word != tag
    return word, tl.max((inside & missing).to(tl.int32), 0)


@triton.jit
def sendable(bits):
    """Return bits int32 of numbers, of which none is 0: the last (or only) number of a word +0 becomes -0."""
    return tl.where(bits == 0, -0x80000000, bits)


@triton.jit(do_not_specialize=["number"])
def sum_kernel(
    x,
    residual,
    out,
    peers,
    epoch,
    number,
    lost,
    patience,
    COUNT,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    CUDA: tl.constexpr,
):
    """Compute out [COUNT] = residual (None: 0) + the sum over all ranks of x [PARTS, COUNT], in fp32, in rank order.

    RANK is this rank. peers int64 [RANKS] holds the address of each rank's memory: two buffers of RANKS * ROOM words.
    epoch int64 [1] plus the `number` of the exchange says which of them it is. lost int32 [1] and patience int64 [1]
    are as in `receive`. `out` may be `x` or `residual`. Programs: cdiv(COUNT, BLOCK); BLOCK is the number of threads.
    """
    gdc_launch_dependents(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < COUNT
    gdc_wait(PDL)
    own = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own += tl.load(x + part * COUNT + at, mask=inside, other=0.0).to(tl.float32)
    buffer = (exchange_tag(epoch, number) & 1) * (RANKS * ROOM)
    bits = sendable(own.to(tl.int32, bitcast=True))
    for other in tl.static_range(RANKS):
        if other != RANK:
            send(tl.load(peers + other), buffer + RANK * ROOM + at, bits, inside, CUDA)
    mine, longest = tl.load(peers + RANK), tl.load(patience)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        found = bits
        if other != RANK:
            found = receive(mine, buffer + other * ROOM + at, inside, lost, longest, CUDA)
        total += found.to(tl.float32, bitcast=True)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank"])
def join_kernel(
    x,
    out,
    peers,
    rank,
    lost,
    patience,
    START,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    CUDA: tl.constexpr,
):
    """Join x int32 [rows, COLUMNS] of all ranks side by side in out int32 [rows, TOTAL], on rank 0 only.

    The memory of rank 0 reserves RANKS * ROOM words for this, from word START on. The other ranks' zeros become -0.
    Other arguments are as in `sum_kernel`. Programs: [cdiv(COLUMNS, BLOCK), rows].
    """
    gdc_launch_dependents(PDL)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    at = row * COLUMNS + column
    gdc_wait(PDL)
    first = tl.load(peers)
    inside = column < COLUMNS
    own = tl.load(x + at, mask=inside, other=0)
    if rank == 0:
        longest = tl.load(patience)
        tl.store(out + row * TOTAL + column, own, mask=inside)
        for other in tl.static_range(1, RANKS):
            target = other * COLUMNS + column
            there = inside & (target < TOTAL)
            found = receive(first, START + other * ROOM + at, there, lost, longest, CUDA)
            tl.store(out + row * TOTAL + target, found, mask=there)
    else:
        send(first, START + rank * ROOM + at, sendable(own), inside, CUDA)


@triton.jit(do_not_specialize=["rank"])
def begin_kernel(
    active,
    token,
    own_row,
    own_token,
    peers,
    epoch,
    rank,
    lost,
    patience,
    START,
    FIRST,
    LAST,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    EXCHANGES: tl.constexpr,
    BLOCK: tl.constexpr,
    CUDA: tl.constexpr,
):
    """Begin a step: add EXCHANGES to `epoch`, and copy the newest tokens of rank 0 to every rank.

    active int32 [ROWS] is the slot of each row, -1 for none; token is int64 [slots]. Every memory reserves ROWS words
    for this, from word START on. own_row int32 [ROWS] becomes the row's index where its token is in FIRST to LAST - 1,
    else -1; own_token int64 [ROWS] becomes the token minus FIRST. One program; it does not overlap the kernel before.
    """
    now = tl.load(epoch) + EXCHANGES
    row = tl.arange(0, BLOCK)
    slot = tl.load(active + row, mask=row < ROWS, other=-1)
    inside = slot >= 0
    if rank == 0:
        newest = tl.load(token + slot, mask=inside, other=0)
        for other in tl.static_range(1, RANKS):
            # A token may be 0, or -1.
            send(tl.load(peers + other), START + row.to(tl.int64), newest.to(tl.int32) + 2, inside, CUDA)
    else:
        mine, longest = tl.load(peers + rank), tl.load(patience)
        newest = receive(mine, START + row.to(tl.int64), inside, lost, longest, CUDA).to(tl.int64) - 2
        tl.store(token + slot, newest, mask=inside)
    newest = tl.maximum(newest, 0)
    held = inside & (newest >= FIRST) & (newest < LAST)
    tl.store(own_row + row, tl.where(held, row, -1), mask=row < ROWS)
    tl.store(own_token + row, newest - FIRST, mask=row < ROWS)
    tl.debug_barrier()  # every thread has read the epoch
    tl.store(epoch, now)


@triton.jit
def count_kernel(active, counters, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add 1 to counters int64 [slots, WIDTH] of the slots `active` int32 [ROWS], on ranks that have no sampler.

    One program.
    """
    row = tl.arange(0, BLOCK)
    slot = tl.load(active + row, mask=row < ROWS, other=-1)
    for place in tl.static_range(WIDTH):
        at = counters + slot * WIDTH + place
        tl.store(at, tl.load(at, mask=slot >= 0, other=0) + 1, mask=slot >= 0)
