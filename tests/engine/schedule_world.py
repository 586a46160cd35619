"""The engine's step with a model that needs no network, and what must hold after each."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.cache.block_table import OutOfBlocksError
from engine.cache.blocks import BlockManager
from engine.cache.offload import HostTier
from engine.cache.rows import Rows
from engine.cache.window import Window
from engine.events import FinishReason
from engine.params import SamplingParams
from engine.schedule.answers import Answers
from engine.schedule.chunk_pace import ChunkPace
from engine.schedule.computing import Computing
from engine.schedule.guide import Guide
from engine.schedule.idle_pace import IdlePace
from engine.schedule.output import Output
from engine.schedule.reasoning import ThinkTracker
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Priority, Sequence, SequenceStatus
from engine.schedule.speculating import Speculating
from engine.schedule.step import EngineStep
from tests.engine.fake_decoding import FakeRunner, HashModel, mixed
from tests.engine.inside import offload
from tests.engine.speculation import Eager, Oracle
from tests.engine.tiny import tiny_tokenizer

VOCAB, SIZE, CONTEXT, EOS = 40, 4, 48, 39
PROMPT_TOKENS = 20
MOST_CHUNK = 10
MOST_STEPS = 4000


class Fixed(IdlePace):
    """Says the same whatever was measured: a schedule must not depend on the machine."""

    def saw(self, *_: Any) -> None:
        pass


class FixedChunks(ChunkPace):
    def saw(self, *_: Any) -> None:
        pass


@dataclass
class Request:
    sequence: Sequence
    prompt: list[int]
    promoted: bool = False
    preemptions: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def listen(self) -> None:
        while not self.sequence.events.empty():
            event = self.sequence.events.get()
            if event is not None:
                self.text += event.text
                self.tokens.append(event.token_id)


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


@dataclass
class Rule:
    """In place of a `Matcher`: what may follow depends on every token before; now and then several are forced."""

    state: int = 1

    def copy(self) -> "Rule":
        return Rule(self.state)

    def allows(self, token: int) -> bool:
        return token in self._allowed()

    def push(self, token: int) -> None:
        assert token in self._allowed(), "it may not follow"
        self.state = mixed(self.state, token)

    def fill(self, words: Any) -> None:
        words.fill(0)
        for token in self._allowed():
            words[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)

    def forced(self) -> list[int]:
        rule, tokens = self.copy(), list[int]()
        while len(allowed := rule._allowed()) == 1 and len(tokens) < 20:
            tokens += allowed
            rule.push(*allowed)
        return tokens

    def _allowed(self) -> list[int]:
        number = self.state // 7
        if number % 5 < 3:
            return [PROMPT_TOKENS + number % (EOS - PROMPT_TOKENS)]
        return [token for token in range(PROMPT_TOKENS, VOCAB) if mixed(number, token) % 3 or token == 25]


def output(params: SamplingParams) -> Output:
    guide = None
    if params.constraint is not None:
        rule: Any = Rule()
        guide = Guide(rule, lambda: ThinkTracker(None, None), (EOS,), None, (), frozenset())
    return Output(tokenizer().stream(), ThinkTracker(None, None), params.stop, guide=guide)


def prompt_of(family: int, length: int) -> list[int]:
    """Prompts of one family begin alike, and the first two families begin with the same 9 tokens."""
    return [(i if i < 9 and family < 2 else 7 * i + family) % PROMPT_TOKENS for i in range(length)]


def sees(window: int | None) -> Window | None:
    return Window(window, MOST_CHUNK) if window is not None else None


def needed_blocks(window: int | None) -> int:
    """What a sequence alone needs at most."""
    there = -(-CONTEXT // SIZE)
    return there if window is None else min(there, Window(window, MOST_CHUNK).most_blocks(SIZE))


class World:
    """The engine's step with a model that needs no network."""

    def __init__(
        self,
        slots: int,
        blocks: int,
        host: int,
        ends: bool = True,
        window: int | None = None,
        guesses: bool = False,
    ) -> None:
        """`ends`: the model ends its answers by itself. With `guesses` sequences in slots have right and wrong ones."""
        self.ends = ends
        self.model = HashModel(
            VOCAB, blocks, SIZE, prompts=PROMPT_TOKENS, has_runner=slots > 0, window=window
        )
        more = [host] if host else []
        self.tier = HostTier(lambda: more.pop() if more else 0)
        self.blocks = BlockManager(blocks, SIZE, self.model.carry_out, self.tier, sees(window))
        self.model.blocks = self.blocks
        self.scheduler = Scheduler(
            self.blocks, max_chunk=MOST_CHUNK, idle_chunk=3, context_length=CONTEXT, max_positions=CONTEXT
        )
        runner: Any = SimpleNamespace(
            run=self.model.run, uses_torch=lambda _: True, leave_cores=lambda *_: None, is_divided=False
        )
        cache: Any = SimpleNamespace(host=None)
        computing = Computing(
            torch.device("cpu"),
            self.scheduler,
            cache,
            runner,
            torch.get_num_threads(),
            pace=Fixed(3),
            pace_alone=Fixed(3),
            chunk_pace=FixedChunks(4),
            others=SimpleNamespace(are_busy=lambda: False, free=1),  # type: ignore[arg-type]
        )
        answers = Answers(self.scheduler, frozenset([EOS] if ends else []))
        self.engine_step = EngineStep(self.scheduler, computing, answers)
        if slots:
            self.engine_step.decode_with(FakeRunner(self.model, slots, words=-(-VOCAB // 32)))
            self.engine_step.jumps = False  # the rows of a prompt have other bits
        self.oracle: Oracle | None = None
        if slots and guesses:
            self.oracle = Oracle(vocab=VOCAB)
            self.engine_step.speculating = Speculating(self.scheduler, Eager(), self.oracle)
        self.requests: list[Request] = []

    def arrive(self, prompt: list[int], priority: str, params: SamplingParams | None) -> Request:
        kind = Priority.PERSON if priority == "person" else Priority.IDLE
        if params is not None and self.oracle is not None:
            params = replace(params, speculation="auto")
        sequence = Sequence(Rows.of(prompt), kind, params, output(params) if params else None)
        if params is not None and self.oracle is not None:
            tokens, _, _ = self.alone(prompt, params, sequence.seed)
            self.oracle.answers[len(self.requests)] = [*prompt, *tokens]
        self.requests.append(Request(sequence, prompt))
        self.scheduler.add(sequence)
        return self.requests[-1]

    def do(self, op: str, *values: Any) -> None:
        match op, values:
            case "arrive", (family, length, priority, params):
                self.arrive(prompt_of(family, length), priority, params)
            case "warm", (family, length, priority):
                self.arrive(prompt_of(family, length), priority, None)
            case "steps", (count,):
                for _ in range(count):
                    self.step()
            case "cancel", (index,) if index < len(self.requests):
                self.requests[index].sequence.cancelled = True
            case "promote", (index,) if index < len(self.requests):
                request = self.requests[index]
                request.promoted |= request.sequence.priority is Priority.IDLE
                request.sequence.priority = Priority.PERSON
            case "evict", (count,):
                offload(self.blocks, count)
            case "pin", (family, length):
                self.blocks.pin(prompt_of(family, length))
            case "borrow", (family, length, rows):
                table = self.blocks.open(prompt_of(family, length))
                with suppress(OutOfBlocksError):
                    self.scheduler.reserve(table, rows)
                self.blocks.close(table)
        self.check()

    def step(self) -> None:
        if self.scheduler.has_work:
            self.engine_step.step()
            self.check()

    def check(self) -> None:
        """Everything that holds between two steps."""
        scheduler = self.scheduler
        self.blocks.check()
        if self.engine_step.decoding is not None:
            self.engine_step.decoding.check(scheduler.running)
            runner: Any = self.engine_step.decoding.runner
            assert set(runner.slots) == self.engine_step.decoding.joined
        tables = [s.table for s in scheduler.running]
        assert {id(t) for t in tables} == {id(t) for t in self.blocks._tables}, (
            "blocks are held by nobody that runs"
        )
        assert len(scheduler.running) <= 2 * scheduler.most_running, (
            "persons and idle work have so many at most"
        )
        assert [s.arrival for s in scheduler.waiting] == sorted(s.arrival for s in scheduler.waiting)
        for request in self.requests:
            s = request.sequence
            assert s.error is None, s.error
            queues = (s in scheduler.waiting) + (s in scheduler.running) + s.finished.is_set()
            assert queues + (s in scheduler.finished) == 1, f"a sequence is in {queues} places"
            assert (s in scheduler.waiting) == (
                s.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            )
            assert (s in scheduler.running) == (s.status is SequenceStatus.RUNNING) == (s.table is not None)
        self._check_order()

    def _check_order(self) -> None:
        """Nobody is passed over by somebody younger, nor preempted for one."""
        persons = [s for s in self.scheduler.running if s.priority is Priority.PERSON]
        waiting = [s for s in self.scheduler.waiting if s.priority is Priority.PERSON]
        if any(r.promoted for r in self.requests):
            return
        youngest = max((s.arrival for s in persons), default=-1)
        assert all(s.arrival > youngest for s in waiting), "somebody is passed over"

    def finish(self) -> None:
        """Run until everybody is done, and compare."""
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "somebody never finishes"
        if self.engine_step.decoding is not None:
            assert not any(self.engine_step.decoding.in_flight)
        assert self.blocks.num_held == 0
        for request in self.requests:
            request.listen()
            self._compare(request)

    def _compare(self, request: Request) -> None:
        sequence, params = request.sequence, request.sequence.params
        if params is None:
            assert sequence.finish_reason in (None, FinishReason.CANCELLED, FinishReason.CONTEXT_FULL)
            return
        tokens, text, reason = self.alone(request.prompt, params, sequence.seed)
        text_of_all = request.text + sequence.tail
        cut = sequence.finish_reason is FinishReason.CANCELLED or (
            sequence.priority is Priority.IDLE and sequence.finish_reason is FinishReason.CONTEXT_FULL
        )
        if cut:
            assert request.tokens == tokens[: len(request.tokens)]
            assert text.startswith(request.text)
        else:
            assert (request.tokens, text_of_all, sequence.finish_reason) == (tokens, text, reason)

    def alone(
        self, prompt: list[int], params: SamplingParams, seed: int
    ) -> tuple[list[int], str, FinishReason]:
        most = min(params.max_tokens or CONTEXT, CONTEXT - len(prompt))
        out, text, tokens = output(params), "", []
        for token in self.model.alone(prompt, params, seed, most, output(params).guide):
            tokens.append(token)
            if token == EOS and self.ends:
                return tokens, text + out.end(token).text, FinishReason.EOS
            text += out.push(token).text
            if out.stopped:
                return tokens, text, FinishReason.STOP
        full = len(tokens) < (params.max_tokens or CONTEXT + 1)
        return tokens, text + out.flush(), FinishReason.CONTEXT_FULL if full else FinishReason.LENGTH
