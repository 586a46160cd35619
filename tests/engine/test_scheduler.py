"""Who runs next, and what happens when blocks run out. No model: the steps are noted as done."""

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.blocks import BlockManager
from engine.cache.offload import HostTier
from engine.cache.rows import Rows
from engine.events import FinishReason
from engine.params import SamplingParams
from engine.schedule.scheduler import MaskedRowsEvictedError, Scheduler, Step
from engine.schedule.sequence import Priority, Sequence, SequenceStatus
from tests.fresh import examples


def prompt(tokens: list[int], priority: Priority = Priority.PERSON, generate: bool = True) -> Sequence:
    return Sequence(Rows.of(tokens), priority, SamplingParams() if generate else None)


def asked(client: str, first: int, tokens: int = 8) -> Sequence:
    """A prompt of a client's, whose rows nobody else has."""
    return Sequence(Rows.of(range(first, first + tokens)), Priority.PERSON, SamplingParams(), client=client)


def scheduler(blocks: int = 64, max_chunk: int = 8, idle_chunk: int = 2) -> Scheduler:
    return Scheduler(BlockManager(blocks, 4), max_chunk, idle_chunk)


def play(scheduler: Scheduler, token: int = 1000) -> Step:
    """One step, as the engine does it: every sequence that samples gets a token."""
    step = scheduler.next_step()
    scheduler.done(step)
    for chunk in step.chunks:
        if chunk.samples:
            chunk.sequence.rows.append(token)
            chunk.sequence.generated.append(token)
    scheduler.blocks.check()
    scheduler.finished.clear()
    return step


def counts(step: Step) -> list[int]:
    return [chunk.count for chunk in step.chunks]


def test_a_prompt_is_prefilled_in_chunks_and_then_decodes() -> None:
    s = scheduler()
    sequence = prompt(list(range(20)))
    s.add(sequence)
    assert sequence.status is SequenceStatus.WAITING
    assert [counts(play(s)) for _ in range(5)] == [[8], [8], [4], [1], [1]]
    assert sequence.status is SequenceStatus.RUNNING
    s.finish(sequence, FinishReason.EOS)
    assert (sequence.status, s.blocks.num_held) == (SequenceStatus.FINISHED, 0)


def test_decoding_goes_before_another_prompt_in_the_same_step() -> None:
    s = scheduler()
    reader = prompt([1, 2])
    s.add(reader)
    play(s)
    s.add(prompt(list(range(50, 70))))
    step = play(s)
    assert [(chunk.sequence is reader, chunk.count) for chunk in step.chunks] == [(True, 1), (False, 7)]


def test_idle_work_waits_for_people_and_goes_on_where_it_was() -> None:
    s = scheduler()
    idle = prompt(list(range(12)), Priority.IDLE, generate=False)
    s.add(idle)
    assert counts(play(s)) == [2]
    person = prompt(list(range(100, 110)))
    s.add(person)
    assert [chunk.sequence for chunk in play(s).chunks] == [person]
    assert idle.computed == 2
    s.finish(person, FinishReason.EOS)
    assert [chunk.start for chunk in play(s).chunks] == [2]


def test_idle_work_is_dropped_when_a_person_needs_its_blocks() -> None:
    s = scheduler(blocks=5, max_chunk=64, idle_chunk=64)
    idle = prompt(list(range(16)), Priority.IDLE, generate=False)
    idle.rows.extend(range(16, 18))
    s.add(idle)
    s.idle_chunk = 16
    play(s)
    assert idle.computed == 16
    person = prompt(list(range(100, 118)))
    s.add(person)
    assert [chunk.sequence for chunk in play(s).chunks] == [person]
    assert idle.status is SequenceStatus.PREEMPTED


def test_idle_work_waits_when_a_persons_rows_come_back_from_host_memory_and_find_no_room() -> None:
    """In 4 blocks idle work holds 3; of the person's two offloaded blocks only one would find room beside it."""
    slots = [16]
    s = Scheduler(BlockManager(4, 4, tier=HostTier(lambda: slots.pop() if slots else 0)), 64, 12)
    person = prompt(list(range(8)), generate=False)
    s.add(person)
    play(s)
    play(s)
    assert person.status is SequenceStatus.FINISHED
    filler = prompt(list(range(100, 116)), generate=False)
    s.add(filler)
    play(s)
    play(s)
    assert (len(s.blocks.tier), s.blocks.match(list(range(8)))) == (2, 8), "both blocks were offloaded"
    idle = prompt(list(range(200, 213)), Priority.IDLE, generate=False)
    s.add(idle)
    play(s)
    assert (idle.status, idle.computed) == (SequenceStatus.RUNNING, 12)
    again = prompt([*range(8), 50])
    s.add(again)
    step = play(s)
    assert [(chunk.sequence is again, chunk.start) for chunk in step.chunks] == [(True, 8)], (
        "nothing is computed anew"
    )
    assert idle.status is SequenceStatus.PREEMPTED
    s.finish(again, FinishReason.EOS)
    while idle.status is not SequenceStatus.FINISHED:
        play(s)
    assert idle.error is None


def test_idle_work_ends_rather_than_take_blocks_of_the_conversation_in_use() -> None:
    s = scheduler(blocks=5, idle_chunk=64)
    talk, idle = prompt(list(range(12)), generate=False), prompt([50] * 12, Priority.IDLE, generate=False)
    s.blocks.pin(talk.rows.keys)
    for sequence in (talk, idle):
        s.add(sequence)
        while s.has_work:
            play(s)
    assert (idle.status, idle.finish_reason) == (SequenceStatus.FINISHED, FinishReason.CONTEXT_FULL)
    assert s.blocks.match(talk.rows.keys) == 12


def test_a_person_takes_blocks_of_idle_work_before_those_of_the_conversation_in_use() -> None:
    s = scheduler(blocks=6, max_chunk=64, idle_chunk=64)
    talk, idle = prompt(list(range(8)), generate=False), prompt([50] * 12, Priority.IDLE, generate=False)
    s.blocks.pin(talk.rows.keys)
    s.add(talk)
    while s.has_work:
        play(s)
    idle.rows.extend([50] * 4)
    s.add(idle)
    s.idle_chunk = 12
    play(s)
    assert idle.computed == 12
    person = prompt(list(range(100, 108)))
    s.add(person)
    assert [chunk.sequence for chunk in play(s).chunks] == [person]
    assert (idle.status, s.blocks.match(talk.rows.keys)) == (SequenceStatus.PREEMPTED, 8)


def test_the_youngest_gives_way_when_blocks_run_out_and_loses_nothing_it_was_given() -> None:
    s = scheduler(blocks=4, max_chunk=64)
    old, young = prompt([1] * 3), prompt([2] * 3)
    for sequence in (old, young):
        s.add(sequence)
    play(s)
    while young.status is SequenceStatus.RUNNING:
        play(s)
    assert (young.status, young.preemptions, old.preemptions) == (SequenceStatus.PREEMPTED, 1, 0)
    assert old.status is SequenceStatus.RUNNING
    before = len(young.generated)
    s.finish(old, FinishReason.EOS)
    play(s)
    assert young.status is SequenceStatus.RUNNING
    assert len(young.generated) == before + 1


def test_idle_work_never_takes_blocks_from_other_idle_work() -> None:
    """Else two of them would push each other out for ever, at full speed."""
    s = scheduler(blocks=7, idle_chunk=3)
    both = [prompt([*range(start, start + 28)], Priority.IDLE, generate=False) for start in (0, 100)]
    for sequence in both:
        s.add(sequence)
    for _ in range(40):
        play(s)
    assert not s.has_work
    assert sorted(str(sequence.finish_reason) for sequence in both) == ["None", "context_full"]


def test_alone_and_out_of_blocks_means_the_context_is_full() -> None:
    s = scheduler(blocks=2)
    sequence = prompt([1] * 7)
    s.add(sequence)
    for _ in range(4):
        play(s)
    assert (sequence.status, sequence.finish_reason) == (SequenceStatus.FINISHED, FinishReason.CONTEXT_FULL)
    assert not s.has_work


def test_a_cancelled_sequence_ends_before_the_next_step_wherever_it_stands() -> None:
    s = scheduler()
    running, waiting = prompt([1] * 30), prompt([2] * 30)
    s.add(running)
    play(s)
    s.add(waiting)
    running.cancelled = waiting.cancelled = True
    assert play(s).chunks == []
    assert running.finish_reason is waiting.finish_reason is FinishReason.CANCELLED
    assert s.blocks.match([1] * 30) == 8, "what was computed stays as cache"


def test_what_is_already_warm_ends_without_a_step() -> None:
    s = scheduler()
    for _ in range(2):
        sequence = prompt([1, 2, 3], generate=False)
        s.add(sequence)
        play(s)
        play(s)
        assert sequence.status is SequenceStatus.FINISHED
    assert sequence.cached_tokens == 3


def test_masked_rows_that_are_gone_end_the_sequence_with_that_error() -> None:
    rows = Rows.of([1, 2, 3, 4, 5]).hide([(2, 4)])
    rows.extend([6])
    s = scheduler()
    sequence = Sequence(rows, Priority.PERSON, SamplingParams())
    s.add(sequence)
    play(s)
    assert isinstance(sequence.error, MaskedRowsEvictedError)


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 6)),
        max_size=8,
    )
)
@examples(200)
def test_everything_ends_whatever_comes_in(jobs: list[tuple[int, int, bool, bool, int]]) -> None:
    """Prompts, idle work and cancels at random times in few blocks: nothing is lost, stuck or run twice."""
    s = scheduler(blocks=8, max_chunk=6, idle_chunk=3)
    pending = list(jobs)
    wanted: dict[Sequence, int] = {}
    for time in range(600):
        while pending and pending[0][4] <= time:
            length, answer, idle, cancel, _ = pending.pop(0)
            sequence = prompt([length % 3] * length, Priority.IDLE if idle else Priority.PERSON, not idle)
            wanted[sequence] = answer
            s.add(sequence)
            sequence.cancelled = cancel
        step = play(s, token=time)
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks)
        assert len({chunk.sequence.priority for chunk in step.chunks}) <= 1
        for sequence, answer in wanted.items():
            if sequence.status is SequenceStatus.RUNNING and len(sequence.generated) >= answer:
                s.finish(sequence, FinishReason.LENGTH)
        if not pending and not s.has_work:
            break
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in wanted)
    for sequence, answer in wanted.items():
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(sequence.generated) == answer
    assert s.blocks.num_held == 0


def test_a_long_prompt_is_done_in_its_turn_however_many_short_ones_keep_coming() -> None:
    s = scheduler(blocks=4000, max_chunk=8)
    long = prompt(list(range(80)), generate=False)
    s.add(long)
    for time in range(80 // 8 + 1):
        s.add(prompt([1000 + time] * 8, generate=False))
        play(s)
    assert long.status is SequenceStatus.FINISHED


def test_who_was_preempted_runs_again_once_there_is_room_for_it_and_before_who_came_later() -> None:
    s = scheduler(blocks=8, max_chunk=64)
    old, young, late = (prompt([i] * 10) for i in (1, 2, 3))
    for sequence in (old, young):
        s.add(sequence)
    play(s)
    assert young.status is SequenceStatus.RUNNING
    while young.status is SequenceStatus.RUNNING:
        play(s)
    s.add(late)
    while len(old.rows) < 30:
        assert [chunk.sequence for chunk in play(s).chunks] == [old], "it would be preempted at once"
    s.finish(old, FinishReason.EOS)
    assert play(s).chunks[0].sequence is young


def test_one_request_is_not_behind_the_sixty_of_another_client() -> None:
    s = scheduler(blocks=30, max_chunk=8)
    sixty = [asked("busy", 100 * i) for i in range(60)]
    for sequence in sixty:
        s.add(sequence)
    for _ in range(20):
        play(s)
    began = {sequence for sequence in sixty if sequence.generated}
    assert 0 < len(s.running) < 60, "there is no room for all"
    one = asked("other", 10_000)
    s.add(one)
    while not one.generated:
        s.finish(min(s.running, key=lambda sequence: sequence.place), FinishReason.LENGTH)
        play(s)
    assert len({sequence for sequence in sixty if sequence.generated} - began) <= 1


def test_prompts_of_many_requests_do_not_hold_up_the_one_of_another_client() -> None:
    s = scheduler(blocks=4000, max_chunk=64)
    sixty = [asked("busy", 1000 * i, tokens=200) for i in range(60)]
    for sequence in sixty:
        s.add(sequence)
    play(s)
    assert len(s.running) == 60
    one = asked("other", 100_000, tokens=200)
    s.add(one)
    while not one.generated:
        play(s)
    assert [sequence for sequence in sixty if sequence.generated] == sixty[:2]


def test_clients_take_turns_and_each_of_them_is_served_in_its_order() -> None:
    s = scheduler(blocks=4000, max_chunk=8)
    given = {name: [asked(name, 1000 * at + 100 * i) for i in range(4)] for at, name in enumerate("abc")}
    for sequence in (one for name in "abc" for one in given[name]):
        s.add(sequence)
    served: list[Sequence] = []
    while len(served) < 12:
        play(s)
        for sequence in list(s.running):
            if sequence.generated:
                served.append(sequence)
                s.finish(sequence, FinishReason.LENGTH)
    assert served == [given[name][i] for i in range(4) for name in "abc"]


def test_a_client_with_many_requests_is_not_left_behind_by_new_clients() -> None:
    s = scheduler(blocks=4000, max_chunk=8)
    many = [asked("many", 100 * i) for i in range(5)]
    for sequence in many:
        s.add(sequence)
    for number in range(100):
        s.add(asked(f"new {number}", 10_000 + 100 * number))
        play(s)
        for sequence in list(s.running):
            if sequence.generated:
                s.finish(sequence, FinishReason.LENGTH)
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in many)


@examples(30)
@given(
    st.lists(st.tuples(st.sampled_from("aabbcd-"), st.integers(1, 50), st.integers(1, 30)), max_size=25),
    st.lists(st.integers(0, 4), max_size=25),
    st.integers(25, 60),
)
def test_whoever_asks_and_however_often_everybody_finishes_in_turn(
    jobs: list[tuple[str, int, int]], pauses: list[int], blocks: int
) -> None:
    s = scheduler(blocks, max_chunk=8)
    answers: dict[Sequence, int] = {}
    for number, (client, tokens, answer) in enumerate(jobs):
        sequence = asked(client, 1000 * number, tokens)
        sequence.client = None if client == "-" else client
        answers[sequence] = answer
        s.add(sequence)
        for _ in range(pauses[number] if number < len(pauses) else 0):
            step_in_turn(s, answers)
    for _ in range(20_000):
        if not s.has_work:
            break
        step_in_turn(s, answers)
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in answers)
    assert s.blocks.num_held == 0


def step_in_turn(s: Scheduler, answers: dict[Sequence, int]) -> None:
    """A step; nobody is admitted before one whose turn is sooner, and nobody is preempted for one behind."""
    before = set(s.running)
    play(s)
    waiting = [sequence.place for sequence in s.waiting]
    began = [sequence.place for sequence in s.running if sequence not in before]
    assert not began or not waiting or max(began) < min(waiting)
    lost = [sequence.place for sequence in before if sequence.status is SequenceStatus.PREEMPTED]
    assert not lost or all(sequence.place < min(lost) for sequence in s.running)
    for sequence in list(s.running):
        if len(sequence.generated) >= answers[sequence]:
            s.finish(sequence, FinishReason.LENGTH)
    s.finished.clear()


class Load:
    """Prompts at random times in few blocks, each with an answer of its own length."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.rng = Random(seed)
        self.s = scheduler(blocks, max_chunk=16)
        self.answers: dict[Sequence, int] = {}
        self.waited: dict[Sequence, int] = {}
        self.before: dict[Sequence, int] = {}
        self.computed = 0

    def arrive(self) -> None:
        first = 100 * self.rng.randint(0, 10**6)
        length = self.rng.choice((3, 8, 20, 60))
        sequence = prompt(list(range(first, first + length)))
        alive = [s for s in self.answers if s.status is not SequenceStatus.FINISHED]
        # One after the other, with a step for each row, and every row computed twice.
        self.before[sequence] = 2 * sum(s.prompt_tokens + self.answers[s] for s in alive) + length
        self.answers[sequence], self.waited[sequence] = self.rng.randint(1, 60), 0
        self.s.add(sequence)

    def step(self) -> None:
        running = {s for s in self.answers if s.status is SequenceStatus.RUNNING}
        step = play(self.s)
        self.computed += sum(chunk.count for chunk in step.chunks)
        prompts = [c for c in step.chunks if not (c.count == 1 and len(c.sequence.generated) > 1)]
        for earlier, later in pairwise(prompts):
            assert earlier.sequence.arrival < later.sequence.arrival, (
                "prompts run in the order in which they came"
            )
            assert earlier.sequence.pending <= 1, "and a later one gets only what the earlier ones leave"
        waiting = [s.arrival for s in self.s.waiting]
        assert all(s.arrival < min(waiting, default=10**9) for s in self.s.running), "nobody is passed over"
        assert step.chunks or not running
        for sequence, answer in self.answers.items():
            if not sequence.generated:
                self.waited[sequence] += 1
                assert self.waited[sequence] <= self.before[sequence]
            if sequence.status is SequenceStatus.RUNNING and len(sequence.generated) >= answer:
                self.s.finish(sequence, FinishReason.LENGTH)

    def run(self, arrivals: int) -> None:
        for _ in range(arrivals):
            self.arrive()
            for _ in range(self.rng.choice((0, 0, 2, 5, 20))):
                self.step()
        while self.s.has_work:
            self.step()
            self.s.finished.clear()
        assert all(len(sequence.generated) == answer for sequence, answer in self.answers.items())

    @property
    def needed(self) -> int:
        return sum(len(sequence.rows) - 1 for sequence in self.answers)


def test_prompts_run_in_their_order_nobody_waits_for_ever_and_few_rows_are_computed_twice() -> None:
    for blocks, share in ((40, 0.16), (80, 0.04)):
        loads = [Load(seed, blocks) for seed in range(8)]
        for load in loads:
            load.run(25)
        wasted = sum(load.computed - load.needed for load in loads) / sum(load.needed for load in loads)
        assert wasted < share
