"""The first token that `prepare` draws ahead: the answer is the same as without it, and nothing is left to compute."""

import pytest

from engine import FinishReason, SamplingParams
from engine.conversation.chat import Chat
from tests.engine.test_chat import rendered
from tests.engine.tiny import TinyEngine, close_to, say
from tests.models.checkpoints import run

SEEDED = SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.1, presence_penalty=0.5, max_tokens=24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def begun(engine: TinyEngine) -> Chat:
    """A chat with one turn that thought."""
    chat = engine.chat(system="Be brief.")
    engine.scripted.script = say(engine, "a thought", "first")
    list(chat.send("one", GREEDY))
    engine.scripted.script = []
    return chat


@pytest.mark.parametrize("wait", [True, False], ids=["drawn", "about to be drawn"])
@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_the_answer_is_the_one_that_comes_without_preparing(
    engine: TinyEngine, params: SamplingParams, wait: bool
) -> None:
    plain, ahead = begun(engine), begun(engine)
    expected = list(plain.send("and now two", params))
    engine.evict_all()
    ahead.prepare("and now two", wait=wait, params=params)
    assert list(ahead.send("and now two", params)) == expected
    assert plain.last is not None
    assert ahead.last is not None
    assert ahead.last.text == plain.last.text
    assert ahead.last.token_ids == plain.last.token_ids
    assert ahead.last.stats.generated_tokens == plain.last.stats.generated_tokens
    assert ahead.last.finish_reason is plain.last.finish_reason
    assert ahead.history == plain.history
    engine.check()


def test_nothing_is_computed_after_enter_and_the_logits_are_those_of_a_fresh_prefill(
    engine: TinyEngine,
) -> None:
    chat = begun(engine)
    chat.settle(wait=True)
    engine.scripted.script = say(engine, "more thoughts", "second")
    engine.scripted.logits_seen.clear()
    chat.prepare("and now two", wait=True, params=GREEDY)
    logits, rows = engine.scripted.logits_seen[0], engine.scripted.rows_computed
    events = chat.send("and now two", GREEDY)
    assert next(events).kind == "reasoning"
    assert chat.last is not None
    assert engine.scripted.rows_computed - rows <= len(say(engine, "more thoughts", "second"))
    list(events)
    stats = chat.last.stats
    assert (stats.prefilled_tokens, stats.cached_tokens) == (0, stats.prompt_tokens)
    assert stats.ttft_s > 0.0
    assert chat.last.reasoning == "more thoughts\n"
    assert stats.reasoning_tokens == chat.last.shown[0] - len(engine.tokenizer.encode("\n\n"))
    assert stats.generated_tokens == len(say(engine, "more thoughts", "second"))
    prompt = rendered(engine, [("one", "first")], "and now two", system="Be brief.")
    assert stats.prompt_tokens == len(prompt)
    assert close_to(logits, run(engine.scripted.model, prompt)[-1])


def test_a_draft_that_went_on_costs_its_end_and_the_glue(engine: TinyEngine) -> None:
    chat = begun(engine)
    chat.prepare("and now t", wait=True, params=GREEDY)
    engine.scripted.logits_seen.clear()
    list(chat.send("and now two", GREEDY))
    assert chat.last is not None
    assert chat.last.stats.prefilled_tokens == len(
        engine.tokenizer.encode("wo<|im_end|>\n<|im_start|>assistant\n")
    )
    prompt = rendered(engine, [("one", "first")], "and now two", system="Be brief.")
    assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, prompt)[-1])


def test_what_was_drawn_for_something_else_is_not_taken(engine: TinyEngine) -> None:
    for change in ("params", "system", "think", "undo", "policy"):
        chat = begun(engine)
        chat.prepare("two", wait=True, params=GREEDY)
        params = SEEDED if change == "params" else GREEDY
        if change == "system":
            chat.system = "Be long."
        elif change == "think":
            chat.think = "off"
        elif change == "undo":
            chat.undo()
        elif change == "policy":
            chat.think_cache = "mask"
        engine.scripted.logits_seen.clear()
        list(chat.send("two", params))
        turns = [] if change == "undo" else [("one", "first")]
        system = "Be long." if change == "system" else "Be brief."
        assert chat.last is not None
        assert chat.last.stats.prefilled_tokens > 0
        prompt = rendered(engine, turns, "two", system=system)
        if change == "think":
            prompt += engine.tokenizer.encode("<think>\n\n</think>\n\n")
        if change != "policy":
            assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, prompt)[-1])
        engine.check()


def test_the_same_draft_is_drawn_once(engine: TinyEngine) -> None:
    chat = begun(engine)
    chat.prepare("two", wait=True, params=GREEDY)
    rows = engine.scripted.rows_computed
    chat.prepare("two", wait=True, params=GREEDY)
    assert engine.scripted.rows_computed == rows


def test_an_answer_that_ends_with_its_first_token(engine: TinyEngine) -> None:
    chat = begun(engine)
    end = engine.tokenizer.token_id("<|im_end|>")
    assert end is not None
    engine.scripted.script = [end, end]
    chat.prepare("two", wait=True, params=GREEDY)
    list(chat.send("two", GREEDY))
    assert chat.last is not None
    assert chat.last.finish_reason is FinishReason.EOS
    assert chat.last.token_ids == [end]


def test_half_a_character_drawn_ahead_is_completed(engine: TinyEngine) -> None:
    chat = begun(engine)
    engine.scripted.script = say(engine, None, "é!")
    chat.prepare("two", wait=True, params=GREEDY)
    events = list(chat.send("two", GREEDY))
    assert "".join(event.text for event in events) == "é!"
    assert chat.last is not None
    assert chat.last.text == "é!"


def test_stopping_while_the_prompt_is_still_computed(engine: TinyEngine) -> None:
    chat = begun(engine)
    chat.prepare("word " * 60, params=GREEDY)
    events = chat.send("word " * 60, GREEDY)
    chat.stop()
    assert len(list(events)) <= 1
    assert chat.last is not None
    assert chat.last.finish_reason is FinishReason.CANCELLED
    engine.check()


def test_an_answer_of_one_token_is_not_drawn_ahead(engine: TinyEngine) -> None:
    chat = begun(engine)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    chat.prepare("two", wait=True, params=one)
    assert len(list(chat.send("two", one))) == 1
    assert chat.last is not None
    assert chat.last.finish_reason is FinishReason.LENGTH
