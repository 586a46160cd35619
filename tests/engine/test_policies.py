"""Both think_cache policies in one session, and what the exactness test found at their edges."""

from pathlib import Path
from typing import Any

import pytest

from engine import EngineError, FinishReason, SamplingParams
from engine.cache.rows import Rows
from engine.conversation.chat import Answer, Turn
from tests.engine.test_chat import CONFIG, GREEDY, ask, masked_reference, rendered
from tests.engine.test_chat_paths import copies
from tests.engine.tiny import TinyEngine, close_to, say, tiny_engine
from tests.models.checkpoints import run


def test_both_policies_live_in_one_session_on_different_branches(engine: TinyEngine) -> None:
    """A mask branch beside an exact one: each has the logits of its own reference, and going back costs nothing."""
    encode = engine.tokenizer.encode
    chat = engine.chat(think_cache="exact")
    ask(engine, chat, "shared", "thoughts", "first")
    shared = copies(chat.turns)
    heads = {}
    for policy in ("exact", "mask"):
        chat.load(copies(shared))
        chat.think_cache = policy  # type: ignore[assignment]
        for i in range(2):
            ask(engine, chat, f"on {policy} {i}", f"thoughts {i}", f"answer {i}")
        chat.settle(wait=True)
        heads[policy] = copies(chat.turns)
        engine.check()
    for policy in ("exact", "mask", "exact"):
        chat.think_cache = policy  # type: ignore[assignment]
        chat.load(copies(heads[policy]))
        logits = ask(engine, chat, "and now?", None, "x")
        assert chat.last is not None
        new = encode("and now?<|im_end|>\n<|im_start|>assistant\n")
        assert chat.last.stats.prefilled_tokens <= len(new), "the other branch has pushed nothing out"
        if policy == "exact":
            turns = [(turn.user, turn.answer.text) for turn in chat.turns[:-1]]
            expected = run(engine.scripted.model, rendered(engine, turns, "and now?"))[-1]
        else:
            stream: list[int] = []
            hidden = []
            for turn in chat.turns[:-1]:
                stream += encode(("\n" if stream else "") + f"<|im_start|>user\n{turn.user}<|im_end|>\n")
                stream += encode("<|im_start|>assistant\n")
                start = len(stream)
                stream += turn.answer.token_ids
                hidden.append((start, start + turn.answer.shown[0], len(stream)))
            stream += encode("\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")
            expected = masked_reference(CONFIG, stream, hidden)[-1]
        assert close_to(logits, expected)


def test_a_policy_that_does_not_exist_is_refused_and_changes_nothing(engine: TinyEngine) -> None:
    chat = engine.chat(think_cache="mask")
    with pytest.raises(EngineError, match="exact or mask"):
        chat.think_cache = "both"  # type: ignore[assignment]
    assert chat.think_cache == "mask"


def test_the_policy_may_change_while_idle_work_runs(engine: TinyEngine) -> None:
    chat = engine.chat(think_cache="mask")
    for i in range(3):
        ask(engine, chat, f"question {i}", "thoughts " * 4, f"answer {i}")
    engine.evict_all()
    for policy in ("exact", "mask", "exact", "mask", "exact"):
        chat.settle()
        chat.think_cache = policy  # type: ignore[assignment]
    turns = [(turn.user, turn.answer.text) for turn in chat.turns]
    logits = ask(engine, chat, "and now?", None, "x")
    assert close_to(logits, run(engine.scripted.model, rendered(engine, turns, "and now?"))[-1])
    engine.check()


def test_an_answer_without_a_token_keeps_what_its_prompt_had_opened(engine: TinyEngine) -> None:
    chat = engine.chat(think="off")
    events = chat.send("go", GREEDY)
    chat.stop()
    assert list(events) == []
    opening = list(chat.turns[0].opening)
    assert opening
    again = engine.chat(think="auto")
    again.load(copies(chat.turns))
    assert again.turns[0].opening == opening
    again.load([Turn("go", Answer("text of another model"), [1, 2, 3])])
    assert again.turns[0].opening == []


def test_answer_now_without_room_for_the_end_of_the_thinking_is_a_full_context(folder: Path) -> None:
    with tiny_engine(folder, CONFIG, context=96) as engine:
        chat = engine.chat()
        prompt = len(engine.tokenizer.encode("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"))
        nearly = 96 - prompt - 3
        forward = engine.scripted.forward

        def hurry_when_nearly_full(*arguments: Any) -> Any:
            if chat._running is not None and len(chat._running.generated) == nearly:
                chat.answer_now()
            return forward(*arguments)

        engine.scripted.forward = hurry_when_nearly_full  # type: ignore[method-assign]
        engine.scripted.script = engine.tokenizer.encode("<think>" + "x" * 200)
        taken = []
        events = chat.send("go", SamplingParams(temperature=0.0, max_tokens=200))
        taken += [event.token_id for event in events]
        assert chat.last is not None
        assert chat.last.finish_reason is FinishReason.CONTEXT_FULL
        assert chat.last.token_ids == taken
        assert len(taken) == nearly + 1, "there was room for more, but not for the closing tokens"


def test_an_answer_at_the_last_position_goes_on_without_the_gaps_of_mask(folder: Path) -> None:
    """Hidden spans keep their positions; where these run out, the history is rendered as `exact` does it."""
    with tiny_engine(folder, CONFIG) as engine:
        engine.max_positions = 160
        chat = engine.chat(think_cache="mask")
        ask(engine, chat, "one", "x" * 70, "first")
        engine.scripted.script = engine.tokenizer.encode("y" * 100)
        list(chat.send("two", SamplingParams(temperature=0.0)))
        assert chat.last is not None
        assert chat.last.finish_reason is FinishReason.CONTEXT_FULL
        given = list(chat.last.token_ids)
        engine.scripted.script = say(engine, None, "on")
        engine.scripted.logits_seen.clear()
        list(chat.resume(GREEDY))
        assert chat.last.finish_reason is FinishReason.EOS
        prompt = rendered(engine, [("one", "first")], "two") + given
        assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, prompt)[-1])


def test_two_that_hide_the_same_span_at_once_both_succeed(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle work may have moved the rows, and forgotten where they came from, between somebody's warm and move."""
    rows = Rows.of(engine.tokenizer.encode("question<think>thoughts</think>the answer"))
    warm_rows, depth = engine.warm_rows, []

    def and_another(*arguments: Any) -> int:
        computed = warm_rows(*arguments)
        if not depth:
            depth.append(1)
            engine.hide(rows, [(8, 18)])
        return computed

    monkeypatch.setattr(engine, "warm_rows", and_another)
    hidden = engine.hide(rows, [(8, 18)])
    assert depth
    assert engine.cached_rows(hidden) == len(hidden)
