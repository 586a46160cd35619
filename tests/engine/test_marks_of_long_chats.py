"""How many states of a long conversation can be gone on from, with the shapes and the memory of a real model."""

import pytest
import torch

from engine.cache.blocks import BlockManager
from engine.cache.group_pool import GroupPool
from engine.cache.kv_needs import kv_needs
from engine.cache.marks import Marks
from engine.cache.rows import Rows
from engine.cache.sizing import plan_kv
from engine.cache.window import Window
from engine.machine.shapes import known_shape
from engine.params import SamplingParams
from engine.schedule.scheduler import PromptChunk, Scheduler, Step
from engine.schedule.sequence import Priority, Sequence

CONTEXT, TURNS, QUESTION, ANSWER = 17_000, 20, 200, 600
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER)


class Chat:
    """A scheduler without a model: rows count as computed when they are chosen."""

    def __init__(self, memory: int, block_size: int, step: int) -> None:
        needs = kv_needs(known_shape("qwen3.5:9b"), torch.bfloat16, step=step, block_size=block_size)
        self.plan = plan_kv(needs, memory, 262_144, CONTEXT, share=0.9, branches=0.5)
        (group,), (slots,) = needs.groups, self.plan.slots
        log = GroupPool(slots, Window(group.window, step))
        assert group.tail is not None
        self.marks = Marks(self.plan.states, group.tail, log, block_size)
        blocks = BlockManager(
            self.plan.num_blocks, block_size, lambda copy: None, pools=[log], marks=self.marks
        )
        self.scheduler = Scheduler(blocks, step, step, context_length=CONTEXT)
        self.rows = Rows()

    def compute(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        while not self.scheduler.finished:
            for chunk in self.scheduler.next_step().chunks:
                self._done(chunk)
        self.scheduler.finished.clear()
        assert sequence.error is None

    def _done(self, chunk: PromptChunk) -> None:
        sequence = chunk.sequence
        self.scheduler.done(Step(chunks=[chunk]))
        if chunk.samples and len(sequence.generated) == ANSWER:
            self.scheduler.finish(sequence, None)
        elif chunk.samples:
            sequence.generated.append(0)
            sequence.rows.append(len(sequence.rows))

    def turn(self, question: int) -> None:
        """A message, the answer to it, and the idle work after that."""
        edges = [*self.rows.edges, len(self.rows)]
        self.rows.extend(range(len(self.rows), len(self.rows) + question))
        self.rows.edges = [*edges, len(self.rows)]
        self.scheduler.blocks.pin(self.rows.keys)
        asked = Sequence(self.rows, Priority.PERSON, GREEDY)
        self.compute(asked)
        self.rows = asked.rows
        self.scheduler.blocks.pin(self.rows.keys)
        self.compute(Sequence(self.rows, Priority.PERSON))


@pytest.mark.parametrize(("block_size", "step"), [(32, 512), (64, 512), (64, 2048)])
def test_a_long_chat_goes_on_from_every_state_that_has_a_slot(block_size: int, step: int) -> None:
    chat = Chat(16 * 10**9, block_size, step)
    for _ in range(TURNS):
        chat.turn(QUESTION)
    assert len(chat.rows) == TURNS * (QUESTION + ANSWER)
    usable = [mark.row for mark in chat.marks if chat.marks.is_usable(mark)]
    assert len(usable) == len(chat.marks) > 1.5 * TURNS
    assert min(usable) < QUESTION + ANSWER, "the second message can be edited"
