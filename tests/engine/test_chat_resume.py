"""Going on with an answer: the same tokens, nothing computed again, and the logits of one that never stopped."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import ContextFullError, EngineError, FinishReason, SamplingParams, TokenEvent
from engine.conversation.chat import Answer, Chat, Turn
from tests.covering import each_value_once
from tests.engine.test_chat import CONFIG, GREEDY, ask
from tests.engine.test_chat_edges import OPENING
from tests.engine.test_chat_paths import copies
from tests.engine.tiny import TinyEngine, close_to, say, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import run


def begin(
    engine: TinyEngine, chat: Chat, text: str, thought: str | None, answer: str, count: int
) -> list[int]:
    """A scripted answer that is cut off after `count` tokens. Returns what was not said."""
    whole = say(engine, thought, answer)
    engine.scripted.script = whole[:count]
    list(chat.send(text, SamplingParams(temperature=0.0, max_tokens=count)))
    assert chat.last.finish_reason is FinishReason.LENGTH
    assert chat.last.token_ids == whole[:count]
    return whole[count:]


def think(engine: TinyEngine, chat: Chat, count: int) -> Iterator[TokenEvent]:
    """An answer that thinks on and on, and of which `count` tokens were taken."""
    engine.scripted.script = engine.tokenizer.encode("<think>\n" + "thoughts and more " * 20)
    events = chat.send("go", GREEDY)
    for _ in range(count):
        next(events)
    return events


def hurry(engine: TinyEngine, chat: Chat, answer: list[int]) -> None:
    """Answer now: what the model then says is `answer`."""
    thinking = chat._running
    chat.answer_now()
    thinking.finished.wait()
    engine.scripted.script = list(answer)
    engine.scripted.logits_seen.clear()


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@pytest.mark.parametrize("count", [3, 9, 40])
def test_what_stopped_goes_on_as_if_it_had_not(engine: TinyEngine, think_cache: str, count: int) -> None:
    chat = engine.chat(think_cache=think_cache)
    ask(engine, chat, "one", "a thought", "first")
    rest = begin(engine, chat, "two", "some longer thoughts", "the answer that was cut", count)
    said, thought = chat.last.text, chat.last.reasoning
    stopped = list(chat.last.token_ids)
    computed = engine.scripted.rows_computed
    engine.scripted.script = list(rest)
    engine.scripted.logits_seen.clear()
    events = list(chat.resume(GREEDY))
    assert (
        chat.last.token_ids
        == [*stopped, *rest]
        == say(engine, "some longer thoughts", "the answer that was cut")
    )
    assert [event.token_id for event in events] == rest
    assert chat.last.reasoning == thought + "".join(e.text for e in events if e.kind == "reasoning")
    assert chat.last.text == said + "".join(e.text for e in events if e.kind == "answer")
    assert chat.last.text == "the answer that was cut"
    assert chat.last.finish_reason is FinishReason.EOS
    assert len(chat.turns) == 2
    stats = chat.last.stats
    assert stats.prefilled_tokens == 1
    assert stats.cached_tokens == stats.prompt_tokens - 1
    assert stats.generated_tokens == len(rest)
    if think_cache == "exact":
        assert engine.scripted.rows_computed - computed == len(rest)
        prompt = chat._history.prompt(chat.turns[:1], "two", None).token_ids
        reference = run(engine.scripted.model, [*prompt, *stopped])
        assert close_to(engine.scripted.logits_seen[0], reference[-1])


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_the_turn_after_a_resumed_answer_sees_it_whole(engine: TinyEngine, think_cache: str) -> None:
    logits = []
    for cut in (False, True):
        engine.evict_all()
        chat = engine.chat(think_cache=think_cache)
        if cut:
            engine.scripted.script = begin(engine, chat, "one", "thoughts", "an answer in two", 25)
            list(chat.resume(GREEDY))
        else:
            ask(engine, chat, "one", "thoughts", "an answer in two")
        chat.settle(wait=True)
        logits.append(ask(engine, chat, "two", None, "second"))
        engine.check()
    assert close_to(logits[1], logits[0])


def test_max_tokens_counts_what_is_added_and_the_answer_may_go_on_again(engine: TinyEngine) -> None:
    chat = engine.chat()
    engine.scripted.script = say(engine, None, "abcdefghijkl")
    five = SamplingParams(temperature=0.0, max_tokens=5)
    list(chat.send("go", five))
    for text in ("abcde", "abcdefghij", "abcdefghijkl"):
        assert chat.last.text == text
        if text != "abcdefghijkl":
            assert chat.last.finish_reason is FinishReason.LENGTH
            assert chat.last.stats.generated_tokens == 5
            list(chat.resume(five))
    assert chat.last.finish_reason is FinishReason.EOS


def test_a_sampled_answer_goes_on_with_the_draws_it_would_have_had(engine: TinyEngine) -> None:
    for top_k in (0, 20):
        for seed in range(40):
            params = SamplingParams(
                top_k=top_k, seed=seed, presence_penalty=1.5, repetition_penalty=1.2, max_tokens=40
            )
            whole, cut = engine.chat(), engine.chat()
            list(whole.send("go", params))
            if whole.last.finish_reason is FinishReason.LENGTH:
                break
        list(cut.send("go", replace(params, max_tokens=9)))
        assert len(cut.last.token_ids) == 9
        list(cut.resume(replace(params, max_tokens=31)))
        assert cut.last.token_ids == whole.last.token_ids


def test_a_character_that_was_cut_in_two_is_whole_again(engine: TinyEngine) -> None:
    chat = engine.chat()
    rest = begin(engine, chat, "go", None, "caf\u00e9!", 4)
    assert chat.last.text == "caf\ufffd"
    engine.scripted.script = rest
    list(chat.resume(GREEDY))
    assert chat.last.text == "caf\u00e9!"
    assert engine.tokenizer.decode(chat.last.content_ids) == "caf\u00e9!"


def test_a_stop_string_that_had_begun_is_still_found(engine: TinyEngine) -> None:
    chat = engine.chat()
    whole = say(engine, None, "before STOP after")
    engine.scripted.script = whole[:9]
    params = SamplingParams(temperature=0.0, stop=("STOP",))
    list(chat.send("go", replace(params, max_tokens=9)))
    assert chat.last.text == "before ST"
    engine.scripted.script = whole[len(chat.last.token_ids) :]
    list(chat.resume(params))
    assert (chat.last.text, chat.last.finish_reason) == ("before ", FinishReason.STOP)


def test_a_complete_answer_says_so_and_stays(engine: TinyEngine) -> None:
    chat = engine.chat()
    with pytest.raises(EngineError, match="no answer"):
        next(chat.resume())
    ask(engine, chat, "one", None, "first")
    with pytest.raises(EngineError, match="complete"):
        next(chat.resume())
    assert chat.last.text == "first"


def test_an_answer_that_was_stopped_before_its_first_token_begins(engine: TinyEngine) -> None:
    chat = engine.chat()
    events = chat.send("go", GREEDY)
    chat.stop()
    assert list(events) == []
    engine.scripted.script = say(engine, "hm", "here")
    list(chat.resume(GREEDY))
    assert (chat.last.reasoning.strip(), chat.last.text) == ("hm", "here")


def test_a_resume_that_is_stopped_or_fails_at_once_leaves_the_answer(engine: TinyEngine) -> None:
    chat = engine.chat()
    rest = begin(engine, chat, "go", "hm", "a long answer", 12)
    before = chat.last
    events = chat.resume(GREEDY)
    chat.stop()
    assert list(events) == []
    assert chat.last is before
    engine.scripted.fail_next = RuntimeError("boom")
    with pytest.raises(EngineError, match="boom"):
        list(chat.resume(GREEDY))
    assert chat.last is before
    engine.scripted.script = rest
    list(chat.resume(GREEDY))
    assert chat.last.text == "a long answer"


def test_a_full_context_cannot_go_on_and_says_why(folder: Path) -> None:
    with tiny_engine(folder, CONFIG, context=64) as engine:
        chat = engine.chat()
        engine.scripted.script = say(engine, None, "x" * 60)
        list(chat.send("go", GREEDY))
        assert chat.last.finish_reason is FinishReason.CONTEXT_FULL
        said = chat.last.text
        with pytest.raises(ContextFullError, match=r"cannot continue: the context of 64 tokens is full"):
            next(chat.resume(GREEDY))
        assert chat.last.text == said


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_evicted_rows_are_computed_again_with_the_same_logits(engine: TinyEngine, think_cache: str) -> None:
    logits = []
    for evict in (False, True):
        engine.evict_all()
        chat = engine.chat(think_cache=think_cache)
        ask(engine, chat, "one", "first thoughts", "first")
        rest = begin(engine, chat, "two", "second thoughts", "second", 25)
        if evict:
            engine.evict_all()
        engine.scripted.script = rest
        engine.scripted.logits_seen.clear()
        list(chat.resume(GREEDY))
        logits.append(torch.stack(engine.scripted.logits_seen[-len(rest) :]))
    assert close_to(logits[1], logits[0])


# -- answer now


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_answer_now_closes_the_span_and_the_same_iterator_answers(
    engine: TinyEngine, think_cache: str
) -> None:
    chat = engine.chat(think_cache=think_cache)
    events = think(engine, chat, 12)
    hurry(engine, chat, say(engine, None, "at last"))
    before = list(chat.last.token_ids)
    taken = [event.token_id for event in events]
    ids = chat.last.token_ids
    text = engine.tokenizer.decode(ids, skip_special=False)
    thought, _, answer = text.partition("</think>")
    assert thought.startswith("<think>\nthoughts")
    assert thought.endswith("\n")
    assert answer == "\n\nat last<|im_end|>"
    assert [*before, *taken] == ids
    assert (chat.last.text, chat.last.finish_reason) == ("at last", FinishReason.EOS)
    assert engine.tokenizer.decode(chat.last.content_ids) == "at last"
    stats = chat.last.stats
    assert stats.prompt_tokens == len(chat._history.prompt([], "go", None))
    assert stats.generated_tokens == len(ids) - len(engine.tokenizer.encode("\n</think>\n\n"))
    prompt = chat._history.prompt([], "go", None).token_ids
    given = len(ids) - len(say(engine, None, "at last"))
    assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, [*prompt, *ids[:given]])[-1])
    engine.check()
    ask(engine, chat, "next", None, "fine")


def test_answer_now_where_the_prompt_opened_the_span(folder: Path) -> None:
    with tiny_engine(folder, CONFIG, tiny_tokenizer(OPENING)) as engine:
        chat = engine.chat()
        engine.scripted.script = engine.tokenizer.encode("thoughts that never end " * 15)
        events = chat.send("go", GREEDY)
        for _ in range(5):
            next(events)
        hurry(engine, chat, say(engine, None, "yes"))
        list(events)
        assert chat.last.text == "yes"
        assert chat.last.reasoning.startswith("thoug")
        assert "</think>" not in chat.last.reasoning


def test_answer_now_does_nothing_unless_it_thinks(engine: TinyEngine) -> None:
    chat = engine.chat()
    chat.answer_now()
    engine.scripted.script = say(engine, "short", "the answer")
    events = chat.send("go", GREEDY)
    while not chat.turns or not chat.last.text:
        next(events)
    chat.answer_now()
    list(events)
    assert chat.last.token_ids == say(engine, "short", "the answer")


def test_a_stop_after_answer_now_counts(engine: TinyEngine) -> None:
    chat = engine.chat()
    events = think(engine, chat, 6)
    chat.answer_now()
    chat.stop()
    list(events)
    assert chat.last.finish_reason is FinishReason.CANCELLED
    assert chat.last.text == ""
    engine.scripted.script.clear()
    ask(engine, chat, "next", None, "fine")


def test_what_was_answered_now_can_go_on(engine: TinyEngine) -> None:
    chat = engine.chat()
    events = think(engine, chat, 6)
    hurry(engine, chat, engine.tokenizer.encode("on and on " * 30))
    while not chat.last.text:
        next(events)
    events.close()  # type: ignore[attr-defined]
    said = chat.last.text
    engine.scripted.script = say(engine, None, " and so on")
    list(chat.resume(GREEDY))
    assert chat.last.text == said + " and so on"
    assert chat.last.stats.prefilled_tokens == 1


# -- after a crash


def cut_off(chat: Chat, count: int, ends_at: int | None) -> list[Turn]:
    """The turns as a journal has them that saw `count` tokens of the last answer."""
    *before, turn = copies(chat.turns)
    turn.answer = Answer(token_ids=turn.answer.token_ids[:count], seed=turn.answer.seed, ends_at=ends_at)
    return [*before, turn]


@each_value_once
@pytest.mark.parametrize("seed", [None, 3, 27])  # 27: stray markers of a think span
@pytest.mark.parametrize("top_k", [0, 20])
def test_a_crash_at_any_token_changes_nothing(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, seed: int | None, top_k: int
) -> None:
    # With that one two of the tokens are likely alike but for rounding.
    monkeypatch.setattr("engine.schedule.sequence.randbits", lambda _: 5333016265608649930)
    params = SamplingParams(
        temperature=0.8, top_k=top_k, seed=seed, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=30
    )
    whole, cut = engine.chat(), engine.chat()
    list(whole.send("go", params))
    assert whole.last.ends_at is None
    for count in range(1, len(whole.last.token_ids)):
        engine.evict_all()
        cut.load(cut_off(whole, count, ends_at=30), params)
        assert cut.last.finish_reason is FinishReason.CANCELLED
        assert len([*cut.resume(params)]) == len(whole.last.token_ids) - count
        assert cut.last.token_ids == whole.last.token_ids
        assert (cut.last.text, cut.last.finish_reason) == (whole.last.text, whole.last.finish_reason)


def test_the_limit_of_a_running_answer_counts_what_it_went_on_from(engine: TinyEngine) -> None:
    chat, cut = engine.chat(), engine.chat()
    five = SamplingParams(temperature=0.0, max_tokens=5)
    engine.scripted.script = engine.tokenizer.encode("abcdefghij")
    list(chat.send("go", five))
    events = chat.resume(five)
    for _ in range(3):
        next(events)
    assert chat.last.ends_at == 10
    turns = cut_off(chat, 8, ends_at=10)
    events.close()  # type: ignore[attr-defined]
    cut.load(turns, five)
    engine.scripted.script = engine.tokenizer.encode("ij and on")
    list(cut.resume(five))
    assert (cut.last.text, cut.last.finish_reason) == ("abcdefghij", FinishReason.LENGTH)
    cut.load(cut_off(cut, 10, ends_at=10), five)
    assert cut.last.finish_reason is FinishReason.LENGTH, "killed between the last token and the end"
    engine.scripted.script = engine.tokenizer.encode("klmnop")
    list(cut.resume(five))
    assert cut.last.text == "abcdefghijklmno"


def test_a_crash_within_a_thought_a_character_or_a_stop_string(engine: TinyEngine) -> None:
    whole = say(engine, "caf\u00e9 thoughts", "caf\u00e9 before STOP")
    params = SamplingParams(temperature=0.0, stop=("STOP",))
    full = engine.chat()
    engine.scripted.script = list(whole)
    events = list(full.send("go", params))
    assert full.last.finish_reason is FinishReason.STOP
    for count in range(1, len(events)):
        cut = engine.chat()
        cut.load(cut_off(full, count, None), params)
        engine.scripted.script = whole[count:]
        added = list(cut.resume(params))
        for kind, text in (("answer", full.last.text), ("reasoning", full.last.reasoning)):
            said = "".join(event.text for event in [*events[:count], *added] if event.kind == kind)
            assert said == text == (cut.last.text if kind == "answer" else cut.last.reasoning)
    cut = engine.chat()
    cut.load(cut_off(full, len(events), None), params)
    assert (cut.last.text, cut.last.finish_reason) == ("caf\u00e9 before ", FinishReason.STOP)


def test_a_token_drawn_ahead_and_answer_now_keep_the_draws(engine: TinyEngine) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=12)
    chat = engine.chat()
    chat.prepare("go", wait=True, params=params)
    list(chat.send("go", params))
    again = engine.chat()
    list(again.send("go", replace(params, seed=chat.last.seed)))
    assert again.last.token_ids == chat.last.token_ids
    events = think(engine, chat, 6)
    seed = chat.last.seed
    chat.answer_now()
    engine.scripted.script.clear()
    events.close()  # type: ignore[attr-defined]
    assert chat.last.seed == seed is not None
