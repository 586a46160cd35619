"""Exactness under fire: whatever people do in whatever order, every logit is that of a plain forward of the prompt.

Two conversations share one engine whose cache is too small for them; most engines have a tier in host memory for
what they evict. Random steps are done to them, and every logit that a token was drawn from is compared with a
reference that knows nothing of blocks, chunks or caches: one forward of the prompt that the template renders
(`exact`), or of everything that was ever said with the think spans masked out for the turns after them (`mask`).
Few different texts make for many equal beginnings, so that rows which must not be shared would be found if they
could be.

A failure names its seed and step. Idle work runs beside the steps, so that another run of the same seed may take
another turn; what must hold holds for all of them.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ContextFullError, EngineError, FinishReason, SamplingParams, TokenEvent
from engine.cache.rows import Rows
from engine.cache.window import Window
from engine.conversation.chat import Chat, Turn
from engine.schedule.prompt_logits import PromptLogits
from engine.schedule.sequence import Sequence
from tests.covering import each_value_once
from tests.engine.hybrid import hybrid_engine
from tests.engine.tiny import TinyEngine, close_to, tiny_engine
from tests.fresh import seeds
from tests.models.checkpoints import PlainAttention, run, tiny_qwen3
from tests.models.families import tiny_deepseek, tiny_lfm2

STEPS = int(os.environ.get("CHATTERM_FIRE_STEPS", "50"))
SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
CONFIG = tiny_qwen3(**SIZES)
WINDOW = 20
CONTEXT = 256
TEXTS = ("a", "ab", "ab é", "a 😀", "abba " * 6)
SYSTEMS = (None, "s", "S" * 20)


@dataclass
class Said:
    """A turn as the test saw it."""

    user: str
    opening: list[int]
    ids: list[int] = field(default_factory=list)
    ended: bool = False
    """The last of the ids is the end of turn."""


@dataclass
class Talk:
    """A conversation and what the test knows of it."""

    chat: Chat
    said: list[Said] = field(default_factory=list)


def reference(model: Any, stream: list[int], hidden: list[tuple[int, int, int]], first: int) -> Tensor:
    """Logits from row `first` on; rows from `until` on do not see rows `start` to `end` of a (start, end, until)."""
    seen = torch.ones(len(stream), len(stream), dtype=torch.bool)
    for start, end, until in hidden:
        seen[until:, start:end] = False
    return run(model, stream, PlainAttention(model.network, seen))[first:]


class Fire:
    """Random steps on two conversations of one engine."""

    def __init__(self, engine: TinyEngine, seed: int) -> None:
        self.engine = engine
        self.rng = Random(seed)
        self.talks = [Talk(engine.chat(think_cache=policy)) for policy in ("exact", "mask")]  # type: ignore[arg-type]
        self.talk = self.talks[0]
        self.saved: list[tuple[list[Turn], list[Said]]] = [([], [])]
        self.compared = {"exact": 0, "mask": 0}
        self.started: list[tuple[Rows, int]] = []
        """The rows of every prompt of this step, and how many logits had been seen before."""
        start = engine.start

        def record(rows: Rows, *rest: Any) -> Sequence:
            self.started.append((rows.copy(), len(engine.scripted.logits_seen)))
            if len(self.started) == 1 and self.rng.random() < 0.1:
                self.evict(self.talk)  # what was there a moment ago is gone when the prompt runs
            return start(rows, *rest)

        engine.start = record  # type: ignore[method-assign]
        encode = engine.tokenizer.encode
        self.encode = encode
        self.think, self.think_end, self.newline = (encode(text)[0] for text in ("<think>", "</think>", "\n"))

    # -- what must come out

    def shown(self, said: Said) -> tuple[int, int]:
        """Which ids of an answer later turns show: neither the thinking nor what the template trims."""
        stop = len(said.ids) - said.ended
        start = 0
        if said.ids[:1] == [self.think]:
            start = said.ids.index(self.think_end) + 1 if self.think_end in said.ids else stop
        first = start
        while first < stop and said.ids[first] == self.newline:
            first += 1
        return (first, stop) if first < stop else (start, start)

    def opening(self, think: str) -> list[int]:
        return self.encode("<think>\n\n</think>\n\n") if think == "off" else []

    def prompt(
        self, talk: Talk, before: list[Said], user: str, opening: list[int], masked: bool
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The stream that asks for an answer, and which of it is hidden from what: (start, end, until)."""
        system = talk.chat.system
        stream = self.encode(f"<|im_start|>system\n{system}<|im_end|>\n") if system else []
        hidden = []
        for said in before:
            stream += self.encode(f"<|im_start|>user\n{said.user}<|im_end|>\n<|im_start|>assistant\n")
            first, stop = self.shown(said)
            if masked:
                start = len(stream)
                stream += said.opening
                end = len(stream) + first
                stream += said.ids if said.ended else said.ids[:stop]
                if end > start:
                    hidden.append((start, end, len(stream)))
                stream += self.encode("\n" if said.ended else "<|im_end|>\n")
            else:
                stream += said.ids[first:stop] + self.encode("<|im_end|>\n")
        stream += self.encode(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        return stream + opening, hidden

    def must_fall_back(
        self, talk: Talk, before: list[Said], user: str, opening: list[int], earlier: int
    ) -> bool:
        """Whether `mask` may answer this as `exact` does: its positions run out, or a turn has no room.

        With a window a turn has to be there from where its thinking began, which nobody holds. From host memory, groups
        with a window come back at the end of a turn alone.
        """
        blocks, host = self.engine.pieces.blocks, self.engine.pieces.cache.host
        if self.engine.spec.window is not None or (blocks.groups and host):
            return True
        stream, hidden = self.prompt(talk, before, user, opening, masked=True)
        gone = 0
        for start, end, until in hidden:
            rows, kept = until - gone, until - gone - (end - start)
            size = self.engine.pieces.blocks.block_size
            needed = -(-rows // size) + -(-kept // size) - (start - gone) // size + 1
            if rows > self.engine.context_length or needed > blocks.num_blocks:
                return True
            gone += end - start
        return len(stream) + earlier >= self.engine.max_positions

    def compare(self, talk: Talk, before: list[Said], said: Said, earlier: int) -> None:
        """Every prompt of this step is the right one, and so is every logit."""
        seen = self.engine.scripted.logits_seen
        for (rows, begin), (_, end) in zip(self.started, [*self.started[1:], (None, len(seen))], strict=True):
            if begin == end:
                continue  # stopped before it gave anything
            masked = talk.chat.think_cache == "mask"
            if masked and not rows.masked_until:
                masked = not self.must_fall_back(talk, before, said.user, said.opening, earlier)
            stream, hidden = self.prompt(talk, before, said.user, said.opening, masked)
            visible = [i for i in range(len(stream)) if not any(s <= i < e for s, e, _ in hidden)]
            asked = [stream[i] for i in visible]
            assert rows.token_ids[: len(asked)] == asked
            given = len(rows) - len(asked)
            assert rows.token_ids[len(asked) :] == said.ids[:given]
            assert rows.positions == [*visible, *range(len(stream), len(stream) + given)]
            assert rows.positions[-1] < self.engine.max_positions
            first = len(stream) + given - 1
            logits = reference(
                self.engine.scripted.model, stream + said.ids[: given + end - begin - 1], hidden, first
            )
            for index, row in enumerate(logits):
                assert close_to(seen[begin + index], row), f"token {index} after {len(rows)} rows"
            self.compared["mask" if masked else "exact"] += len(logits)

    # -- steps

    def step(self) -> str:
        if self.rng.random() < 0.15:
            self.talk = self.rng.choice(self.talks)
        operation = self.rng.choice(OPERATIONS)
        self.started.clear()
        self.engine.scripted.logits_seen.clear()
        operation(self, self.talk)
        self.engine.scripted.script.clear()
        chat = self.talk.chat
        assert [(turn.user, turn.answer.token_ids) for turn in chat.turns] == [
            (said.user, said.ids) for said in self.talk.said
        ]
        self.engine.check()
        return operation.__name__

    def answered(
        self,
        talk: Talk,
        events: Callable[[], Iterator[TokenEvent]],
        before: list[Said],
        said: Said,
        take: int | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Take an answer, all of it or `take` tokens, and compare. `said` has what was there before."""
        earlier, script = list(said.ids), list(self.engine.scripted.script)
        got = []
        try:
            answer = events()
            for event in answer:
                got.append(event.token_id)
                if len(got) == take:
                    if then is None:
                        break
                    then()
            answer.close()  # type: ignore[attr-defined]
        except ContextFullError:
            assert not got
            talk.said = talk.said[: len(talk.said) // 2]
            talk.chat.load(talk.chat.turns[: len(talk.said)])
            return
        last = talk.chat.last
        assert last is not None
        new = last.token_ids[len(earlier) :]
        assert last.token_ids[: len(earlier)] == earlier
        assert new[: len(got)] == got
        assert len(new) == len(got) or (take is not None and then is None)
        assert new == script[: len(new)] or then is not None
        said.ids = list(last.token_ids)
        said.ended = last.finish_reason is FinishReason.EOS
        talk.said = [*before, said]
        stats = last.stats
        assert stats.prompt_tokens == stats.reused_tokens + stats.warmed_tokens + stats.prefilled_tokens
        assert min(stats.reused_tokens, stats.warmed_tokens, stats.prefilled_tokens) >= 0
        if new and stats.parting is not None:
            assert stats.parting.wanted == self.started[-1][0].token_ids[stats.parting.row]
            assert stats.parting.cached != stats.parting.wanted
        self.compare(talk, before, said, len(earlier))
        if self.rng.random() < 0.3:
            turns = [Turn(t.user, replace(t.answer), list(t.opening)) for t in talk.chat.turns]
            self.saved = [*self.saved[-8:], (turns, [replace(s) for s in talk.said])]

    def ask(
        self,
        talk: Talk,
        before: list[Said],
        user: str,
        events: Callable[[], Iterator[TokenEvent]],
        **how: Any,
    ) -> None:
        said = Said(user, self.opening(talk.chat.think))
        thinks = talk.chat.think != "off" and self.rng.random() < 0.6
        thought = f"<think>\n{self.rng.choice(TEXTS)}\n</think>\n\n" if thinks else ""
        self.engine.scripted.script = self.encode(f"{thought}{self.rng.choice(TEXTS)}<|im_end|>")
        self.answered(talk, events, before, said, **how)

    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.rng.choice((None, None, 3, 12)))

    def send(self, talk: Talk) -> None:
        user, params = self.rng.choice(TEXTS), self.params()
        self.ask(talk, talk.said, user, lambda: talk.chat.send(user, params))

    def retry(self, talk: Talk) -> None:
        if not talk.said:
            with pytest.raises(EngineError, match="no message"):
                next(talk.chat.retry())
            return
        params = self.params()
        self.ask(talk, talk.said[:-1], talk.said[-1].user, lambda: talk.chat.retry(params))

    def edit(self, talk: Talk) -> None:
        keep = self.rng.randint(0, len(talk.said))
        talk.said = talk.said[:keep]
        talk.chat.load(talk.chat.turns[:keep])
        self.send(talk)

    def resume(self, talk: Talk) -> None:
        if not talk.said or talk.chat.turns[-1].answer.is_complete:
            with pytest.raises(EngineError, match=r"complete|no answer"):
                next(talk.chat.resume())
            return
        said = replace(talk.said[-1], ids=list(talk.said[-1].ids))
        inside = said.ids[:1] == [self.think] and self.think_end not in said.ids
        rest = f"{'</think>' if inside else ''}{self.rng.choice(TEXTS)}<|im_end|>"
        self.engine.scripted.script = self.encode(rest)
        params = self.params()
        self.answered(talk, lambda: talk.chat.resume(params), talk.said[:-1], said)

    def cancel(self, talk: Talk) -> None:
        user = self.rng.choice(TEXTS)
        self.ask(talk, talk.said, user, lambda: talk.chat.send(user, GREEDY), take=self.rng.randint(1, 9))

    def stop_at_once(self, talk: Talk) -> None:
        def events() -> Iterator[TokenEvent]:
            answer = talk.chat.send("a", GREEDY)
            talk.chat.stop()
            return answer

        self.ask(talk, talk.said, "a", events)

    def answer_now(self, talk: Talk) -> None:
        talk.chat.think = "auto"
        self.engine.scripted.script = self.encode("<think>\n" + "thoughts " * 12)
        params = SamplingParams(temperature=0.0, max_tokens=self.rng.randint(8, 40))
        self.answered(
            talk,
            lambda: talk.chat.send("b", params),
            talk.said,
            Said("b", []),
            take=self.rng.randint(1, 7),
            then=talk.chat.answer_now,
        )

    def undo(self, talk: Talk) -> None:
        assert talk.chat.undo() == bool(talk.said)
        talk.said = talk.said[:-1]

    def reset(self, talk: Talk) -> None:
        if self.rng.random() < 0.3:
            talk.chat.reset()
            talk.said = []
        else:
            self.send(talk)

    def branch(self, talk: Talk) -> None:
        turns, said = self.rng.choice(self.saved)
        talk.chat.load([Turn(t.user, replace(t.answer), list(t.opening)) for t in turns])
        talk.said = [replace(s) for s in said]

    def settle(self, talk: Talk) -> None:
        talk.chat.settle()

    def draft(self, talk: Talk) -> None:
        talk.chat.prepare(self.rng.choice(TEXTS))

    def stop_the_other(self, talk: Talk) -> None:
        """Idle work takes no blocks from other idle work."""
        for other in self.talks:
            if other is not talk:
                other.chat._idle.stop()

    def settle_and_wait(self, talk: Talk) -> None:
        self.stop_the_other(talk)
        talk.chat.settle(wait=True)
        self.is_there(talk)

    def draft_and_wait(self, talk: Talk) -> None:
        self.stop_the_other(talk)
        draft = self.rng.choice(TEXTS)
        talk.chat.prepare(draft, wait=True)
        # What cannot be sent is not warmed, and a window may have gone past what comes before the draft.
        if talk.chat.count(draft).free >= 0 and self.engine.spec.window is None:
            self.is_there(talk)

    def is_there(self, talk: Talk) -> None:
        """However small the cache: idle work ends with the history in it."""
        rows = talk.chat.history
        if talk.chat.think_cache == "exact" and 0 < len(rows) <= self.engine.context_length:
            assert self.engine.cached_rows(rows) == len(rows)

    def evict(self, _: Talk) -> None:
        if self.rng.random() < 0.7:
            self.engine.offload_all()
        else:
            self.engine.evict_all()

    def crowd(self, _: Talk) -> None:
        """Somebody else needs room."""
        self.engine.warm([self.rng.randint(0, 255) for _ in range(self.rng.randint(1, CONTEXT))])

    def change_policy(self, talk: Talk) -> None:
        talk.chat.think_cache = self.rng.choice(("exact", "mask"))

    def change_thinking(self, talk: Talk) -> None:
        talk.chat.think = self.rng.choice(("auto", "on", "off"))

    def change_system(self, talk: Talk) -> None:
        talk.chat.system = self.rng.choice(SYSTEMS)


GREEDY = SamplingParams(temperature=0.0)
OPERATIONS = (
    *(Fire.send,) * 6,
    *(Fire.resume,) * 2,
    *(Fire.settle, Fire.draft, Fire.settle_and_wait, Fire.draft_and_wait),
    *(Fire.retry, Fire.edit, Fire.branch, Fire.branch, Fire.cancel, Fire.stop_at_once, Fire.answer_now),
    *(Fire.undo, Fire.reset, Fire.evict, Fire.crowd),
    *(Fire.change_policy, Fire.change_thinking, Fire.change_system),
)


@pytest.mark.parametrize("seed", seeds(8))
def test_every_logit_is_that_of_a_plain_forward(folder: Path, seed: int) -> None:
    rng = Random(1000 + seed)
    size = rng.choice((1, 4, 4, 16))
    tight = CONTEXT // size + 1
    options = {
        "context": CONTEXT,
        "block_size": size,
        "num_blocks": rng.choice((tight, tight, 3 * tight)),
        "max_chunk": rng.choice((7, 64)),
        "offload": (0, 1 << 24, 1 << 24, 1 << 16)[seed % 4],
    }
    with tiny_engine(folder, CONFIG, **options) as engine:
        if seed % 3 == 0:
            engine.max_positions = CONTEXT
        compared = under_fire(engine, seed, str(options))
        offload = engine.figures().offload
        assert offload is None or offload.restored_tokens > 0
    assert min(compared.values()) > 0


@pytest.mark.parametrize("seed", seeds(4))
def test_so_it_is_where_no_layer_sees_further_than_a_window(tmp_path: Path, seed: int) -> None:
    """The cache holds little more than the window, or several of them: masked turns need what lies before it."""
    rng = Random(2000 + seed)
    size, chunk = rng.choice((1, 4, 4)), rng.choice((16, 64))
    config = tiny_qwen3(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0)
    options = {
        "context": CONTEXT,
        "block_size": size,
        "num_blocks": (Window(WINDOW, chunk).most_blocks(size) + 1) * (1 + 2 * (seed % 2)),
        "max_chunk": chunk,
        "offload": (0, 0, 1 << 24, 1 << 16)[seed % 4],
    }
    with tiny_engine(tmp_path, config, **options) as engine:
        assert engine.spec.window == WINDOW
        compared = under_fire(engine, seed, str(options), STEPS // 2)
    assert compared["exact"] > 0
    assert compared["mask"] > 0 or seed % 2 == 0


@each_value_once
@pytest.mark.parametrize("make", [tiny_lfm2, tiny_deepseek], ids=["convolutions", "latents"])
@pytest.mark.parametrize("seed", seeds(3))
def test_so_it_is_where_layers_keep_no_values(tmp_path: Path, make: Callable[..., Any], seed: int) -> None:
    """A convolution is wider than a block, or narrower; what a row sees was cached, brought back or just computed."""
    more = {"conv_L_cache": (3, 7, 3)[seed % 3]} if make is tiny_lfm2 else {}
    config = make(vocab_size=272, max_position_embeddings=1024, **more)
    options = {
        "context": CONTEXT,
        "block_size": (4, 4, 1)[seed % 3],
        "num_blocks": CONTEXT // (4, 4, 1)[seed % 3] + 1,
        "max_chunk": (7, 64, 7)[seed % 3],
        "offload": 1 << 24,
    }
    with tiny_engine(tmp_path, config, **options) as engine:
        compared = under_fire(engine, seed, str(options), STEPS // 2)
    assert min(compared.values()) > 0


@pytest.mark.parametrize("seed", seeds(3))
def test_so_it_is_where_layers_are_recurrent(seed: int) -> None:
    """A state cannot forget thinking: that of the next turn is found beside it, from the log of the answer."""
    options = {
        "context": CONTEXT,
        "num_blocks": CONTEXT // 4 * (1 + 2 * (seed % 2)) + 1,
        "max_chunk": (7, 64)[seed % 2],
    }
    with hybrid_engine(**options) as engine:
        compared = under_fire(engine, seed, str(options))
    assert min(compared.values()) > 0


def under_fire(engine: TinyEngine, seed: int, options: str, steps: int = STEPS) -> dict[str, int]:
    """How many logits were compared, by policy."""
    fire = Fire(engine, seed)
    engine.pieces.scheduler.logits = PromptLogits(0)  # all of an answer's are looked at
    done = []
    for step in range(steps):
        try:
            done.append(fire.step())
        except BaseException as error:
            error.add_note(f"seed {seed}, {options}, step {step} after {done[-8:]}")
            raise
    assert sum(fire.compared.values()) > steps
    return fire.compared
