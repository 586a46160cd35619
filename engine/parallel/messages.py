"""The messages of rank 0 to the other ranks about a step: int64 numbers, nothing pickled."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.batch import NONE, Span, StateMoves, StepBatch
from engine.cache.copies import Logged, Offload, OffloadStates, Restore, RestoreStates
from engine.cache.kv_cache import Runs
from engine.execute.cuda.slots import Changes, DividedCheck, DividedStep

STEP, COPY, DECODE, CHECK, OFFLOAD, RESTORE, END, OFFLOAD_STATES, RESTORE_STATES = range(1, 10)
_SPAN = 8
"""How many numbers come before the lists of a span."""


@dataclass(frozen=True, slots=True)
class GivenStep:
    """A step, and for each pool of a group of layers the slots of the blocks that its rows see."""

    batch: StepBatch
    slots: Sequence[Mapping[int, int]] = ()


@dataclass(frozen=True, slots=True)
class GivenCopy:
    """A copy of rows of a group of layers from slots to others."""

    source: Runs
    target: Runs
    group: int = 0


@dataclass(frozen=True, slots=True)
class GivenBlock:
    """A copy of a block from or to host memory, and where it lies in its group."""

    copy: Offload | Restore
    slot: int


@dataclass(frozen=True, slots=True)
class GivenStates:
    """A copy of states from or to host memory, and where its blocks lie in the log."""

    copy: OffloadStates | RestoreStates
    slots: Mapping[int, int]


Message = GivenStep | GivenCopy | GivenBlock | GivenStates | DividedStep | DividedCheck | None
"""A step to compute; KV rows to copy; a step of the decode runner; a block or states to copy from or to host memory;
None: free that memory."""


def of_step(step: GivenStep) -> bytes:
    """Encode a step to compute."""
    numbers = array("q", (STEP, len(step.slots)))
    for slots in step.slots:
        numbers.append(len(slots))
        numbers.extend(slots)
        numbers.extend(slots.values())
    for span in step.batch.spans:
        moves = span.states
        states = () if moves is None else (moves.source, moves.row, *chain(*moves.saves))
        lists = (span.blocks, span.tokens, span.positions, states)
        numbers.extend((span.start, span.count, span.wanted, span.answer, *map(len, lists)))
        for each in lists:
            numbers.extend(each)
    return numbers.tobytes()


def of_copy(copy: GivenCopy) -> bytes:
    """Encode a copy of KV cache rows."""
    head = COPY, len(copy.source), copy.group
    return array("q", chain(head, chain(*copy.source), chain(*copy.target))).tobytes()


def of_decode(step: DividedStep | DividedCheck) -> bytes:
    """Encode a step of the decode runner."""
    words, counters = step.changes.words, step.changes.counters
    if isinstance(step, DividedStep):
        numbers = array("q", (DECODE, len(words), step.rows, step.limit, step.own))
    else:
        spans = [number for slot, guesses in step.spans for number in (slot, len(guesses), *guesses)]
        numbers = array("q", (CHECK, len(words), step.rows, step.limit, len(spans), *spans))
    for changed in (words, counters):
        numbers.extend(changed)
        numbers.extend(changed.values())
    return numbers.tobytes()


def of_host(given: GivenBlock | GivenStates | None) -> bytes:
    """Encode a copy of a block or of states from or to host memory; None: there will be no more."""
    if given is None:
        return array("q", (END, 0)).tobytes()
    copy = given.copy
    if isinstance(copy, OffloadStates | RestoreStates):
        assert isinstance(given, GivenStates)
        kind, states = OFFLOAD_STATES if isinstance(copy, OffloadStates) else RESTORE_STATES, copy.states
        places = [given.slots.get(block, NONE) for block in states.blocks]
        numbers = (kind, len(places), states.state, states.row, *states.blocks, *places, *copy.slots)
        return array("q", numbers).tobytes()
    assert isinstance(given, GivenBlock)
    kind = OFFLOAD if isinstance(copy, Offload) else RESTORE
    return array("q", (kind, copy.block, copy.group, given.slot, *copy.slots)).tobytes()


def read_message(message: bytes) -> Message:
    """Decode a message. Raises ValueError for an unknown kind of message."""
    numbers = array("q")
    numbers.frombytes(message)
    kind, count = numbers[:2]
    if kind == STEP:
        slots, at = [], 2
        for _ in range(count):
            end = at + 1 + 2 * numbers[at]
            slots.append(_pairs(numbers[at + 1 : end]))
            at = end
        return GivenStep(StepBatch(tuple(_spans(numbers[at:]))), slots)
    if kind == COPY:
        pairs = list(zip(numbers[3::2], numbers[4::2], strict=True))
        return GivenCopy(pairs[:count], pairs[count:], numbers[2])
    if kind == DECODE:
        rows, limit, own = numbers[2:5]
        return DividedStep(_changes(numbers[5:], count), rows, limit, own)
    if kind == CHECK:
        rows, limit, length = numbers[2:5]
        spans = tuple(_guessed(numbers[5 : 5 + length]))
        return DividedCheck(_changes(numbers[5 + length :], count), rows, limit, spans)
    if kind in (OFFLOAD, RESTORE):
        make = Offload if kind == OFFLOAD else Restore
        return GivenBlock(make(block=count, slots=tuple(numbers[4:]), group=numbers[2]), numbers[3])
    if kind in (OFFLOAD_STATES, RESTORE_STATES):
        return _given_states(kind, numbers[2:], count)
    if kind == END:
        return None
    raise ValueError(f"a message of kind {kind}")


def _given_states(kind: int, numbers: "array[int]", count: int) -> GivenStates:
    state, row, *rest = numbers
    blocks, places, slots = tuple(rest[:count]), rest[count : 2 * count], tuple(rest[2 * count :])
    states = Logged(state, blocks, row)
    copy = OffloadStates(states, slots) if kind == OFFLOAD_STATES else RestoreStates(slots, states)
    found = {block: place for block, place in zip(blocks, places, strict=True) if block != NONE}
    return GivenStates(copy, found)


def _changes(numbers: "array[int]", words: int) -> Changes:
    return Changes(_pairs(numbers[: 2 * words]), _pairs(numbers[2 * words :]))


def _guessed(numbers: "array[int]") -> Iterator[tuple[int, tuple[int, ...]]]:
    at = 0
    while at < len(numbers):
        slot, count = numbers[at : at + 2]
        at += 2 + count
        yield slot, tuple(numbers[at - count : at])


def _pairs(numbers: "array[int]") -> dict[int, int]:
    half = len(numbers) // 2
    return dict(zip(numbers[:half], numbers[half:], strict=True))


def _moves(numbers: Sequence[int]) -> StateMoves | None:
    if not numbers:
        return None
    source, row, *saves = numbers
    return StateMoves(source, row, tuple(zip(saves[::2], saves[1::2], strict=True)))


def _spans(numbers: "array[int]") -> list[Span]:
    found, at = list[Span](), 0
    while at < len(numbers):
        start, rows, wanted, answer, *sizes = numbers[at : at + _SPAN]
        at += _SPAN
        lists = []
        for size in sizes:
            lists.append(tuple(numbers[at : at + size]))
            at += size
        blocks, tokens, positions, states = lists
        found.append(Span(blocks, start, rows, tokens, positions, wanted, answer, _moves(states)))
    return found
