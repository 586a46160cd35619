"""Other paths of a conversation: loaded from a session, branched, retried, with the cache of what they share."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine import ContextFullError, FinishReason, SamplingParams
from engine.conversation.chat import Answer, Chat, Turn
from models.text.tokenizer import PromptPiece
from tests.engine.test_chat import CONFIG, GREEDY, ask, rendered
from tests.engine.test_chat_edges import OPENING
from tests.engine.tiny import TEMPLATE, TinyEngine, close_to, say, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import run


def talk(engine: TinyEngine, chat: Chat, turns: int) -> list[Turn]:
    for i in range(turns):
        ask(engine, chat, f"question {i}", f"thoughts of round {i}", f"answer {i}")
    return list(chat.turns)


def copies(turns: list[Turn]) -> list[Turn]:
    """As they come back from a disk."""
    return [
        Turn(t.user, replace(t.answer, token_ids=list(t.answer.token_ids)), list(t.opening)) for t in turns
    ]


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@pytest.mark.parametrize("think", ["auto", "off"])
def test_a_loaded_path_goes_on_like_the_one_it_was(engine: TinyEngine, think_cache: str, think: str) -> None:
    chat = engine.chat(system="Be brief.", think=think, think_cache=think_cache)
    for i in range(3):
        ask(engine, chat, f"question {i}", None if think == "off" else f"thoughts {i}", f"answer {i}")
    saved = copies(chat.turns)
    logits = ask(engine, chat, "and now?", None, "done")
    engine.evict_all()
    other = engine.chat(system="Be brief.", think=think, think_cache=think_cache)
    other.load(saved)
    assert [turn.answer.token_ids for turn in other.turns] == [turn.answer.token_ids for turn in saved]
    assert other.history.keys == chat._history.rows(chat.turns[:3]).keys
    other.settle(wait=True)
    assert close_to(ask(engine, other, "and now?", None, "done"), logits)
    new = engine.tokenizer.encode("and now?<|im_end|>\n<|im_start|>assistant\n")
    opening = engine.tokenizer.encode("<think>\n\n</think>\n\n") if think == "off" else []
    assert other.last.stats.prefilled_tokens == len(new) + len(opening)
    engine.check()


def test_text_of_another_model_is_tokenised_as_the_template_renders_it(engine: TinyEngine) -> None:
    chat = engine.chat()
    chat.load(
        [Turn(f"q{i}", Answer(f"answer {i}", "a thought", finish_reason=FinishReason.EOS)) for i in range(3)]
    )
    logits = ask(engine, chat, "next", None, "fine")
    prompt = rendered(engine, [(f"q{i}", f"answer {i}") for i in range(3)], "next")
    assert chat.last.stats.prompt_tokens == len(prompt)
    assert close_to(logits, run(engine.scripted.model, prompt)[-1])
    assert chat.turns[0].answer.reasoning == "a thought"


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_special_tokens_in_the_text_of_another_model_are_text(engine: TinyEngine, think_cache: str) -> None:
    chat = engine.chat(think_cache=think_cache)
    text = "write <|im_end|> to end"
    chat.load([Turn("how?", Answer(text, finish_reason=FinishReason.EOS))])
    end = engine.tokenizer.token_id("<|im_end|>")
    assert chat.history.token_ids.count(end) == 2
    assert text in engine.tokenizer.decode(chat.history.token_ids)
    ask(engine, chat, "next", None, "fine")


@pytest.mark.parametrize("ids", [[5, 6, 7], [10**6], [-1]])
def test_tokens_that_do_not_spell_the_answer_are_not_believed(engine: TinyEngine, ids: list[int]) -> None:
    chat = engine.chat()
    chat.load([Turn("q", Answer("an answer", "", ids, FinishReason.EOS, shown=(0, len(ids))))])
    assert engine.tokenizer.decode(chat.last.content_ids) == "an answer"
    ask(engine, chat, "next", None, "fine")


@pytest.mark.parametrize("template", [TEMPLATE, OPENING])
def test_an_answer_that_a_crash_cut_off_goes_on(folder: Path, template: str) -> None:
    with tiny_engine(folder, CONFIG, tiny_tokenizer(template)) as engine:
        chat = engine.chat()
        whole = say(engine, "thoughts", "an answer that was cut")
        if template is OPENING:
            whole = whole[2:]
        engine.scripted.script = whole[:30]
        list(chat.send("go", replace(GREEDY, max_tokens=30)))
        text, reasoning = chat.last.text, chat.last.reasoning
        cut = Turn("go", Answer("an", "thou", list(chat.last.token_ids)), list(chat.turns[0].opening))
        engine.evict_all()
        again = engine.chat()
        again.load([cut])
        assert (again.last.text, again.last.reasoning) == (text, reasoning)
        assert again.last.finish_reason is FinishReason.CANCELLED
        assert again.last.shown == chat.last.shown
        engine.scripted.script = whole[30:]
        list(again.resume(GREEDY))
        assert (again.last.text, again.last.token_ids) == ("an answer that was cut", whole)


def test_a_crash_after_the_last_token_left_a_complete_answer(engine: TinyEngine) -> None:
    chat = engine.chat()
    chat.load([Turn("go", Answer("th", "", say(engine, "hm", "the answer")))])
    assert (chat.last.text, chat.last.finish_reason) == ("the answer", FinishReason.EOS)


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_moving_between_branches_computes_nothing_that_they_share(
    engine: TinyEngine, think_cache: str
) -> None:
    chat = engine.chat(think_cache=think_cache)
    shared = talk(engine, chat, 6)
    ask(engine, chat, "the old branch", None, "old")
    chat.settle(wait=True)
    old = list(chat.turns)
    chat.load(copies(shared))
    assert all(turn is known for turn, known in zip(chat.turns, shared, strict=True))
    ask(engine, chat, "the new branch", None, "new")
    assert chat.last.stats.prefilled_tokens <= len(
        engine.tokenizer.encode("new branch<|im_end|>\n<|im_start|>assistant\n")
    )
    chat.load(copies(old))
    ask(engine, chat, "on", None, "x")
    assert chat.last.stats.prefilled_tokens == len(
        engine.tokenizer.encode("on<|im_end|>\n<|im_start|>assistant\n")
    )
    engine.check()


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_retry_on_a_long_history_computes_one_token(engine: TinyEngine, think_cache: str) -> None:
    chat = engine.chat(think_cache=think_cache)
    talk(engine, chat, 10)
    ask(engine, chat, "the last question", "thoughts", "an answer")
    chat.settle(wait=True)
    for way in ("retry", "load"):
        engine.scripted.script = say(engine, "other thoughts", f"by {way}")
        if way == "retry":
            list(chat.retry(GREEDY))
        else:
            chat.load(copies(chat.turns[:-1]))
            list(chat.send("the last question", GREEDY))
        stats = chat.last.stats
        assert stats.prompt_tokens > 300
        assert (stats.prefilled_tokens, stats.cached_tokens) == (1, stats.prompt_tokens - 1)


def test_masked_turns_come_back_in_idle_time_and_give_way(engine: TinyEngine) -> None:
    chat = engine.chat(think_cache="mask")
    turns = copies(talk(engine, chat, 5))
    engine.evict_all()
    again = engine.chat(think_cache="mask")
    again.load(turns)
    again.settle()  # in a thread of its own
    ask(engine, again, "next", None, "fine")  # whatever it has done so far
    engine.check()
    engine.evict_all()
    again.settle(wait=True)
    assert engine.cached_rows(again.history) == len(again.history)
    ask(engine, again, "after it", None, "fine")
    assert again.last.stats.prefilled_tokens == len(
        engine.tokenizer.encode("after it<|im_end|>\n<|im_start|>assistant\n")
    )


def test_the_cost_of_a_draft(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", "thoughts", "first")
    chat.settle(wait=True)
    draft = "a message of some length"
    cost = chat.count(draft)
    assert (
        cost.tokens == cost.new == len(engine.tokenizer.encode(f"{draft}<|im_end|>\n<|im_start|>assistant\n"))
    )
    used = chat.used_tokens
    chat.prepare(draft, wait=True)
    cheaper = chat.count(draft)
    assert (cheaper.tokens, cheaper.free) == (cost.tokens, cost.free)
    assert cheaper.new < cost.new
    ask(engine, chat, draft, None, "x")
    assert chat.last.stats.prefilled_tokens == cheaper.new
    assert chat.last.stats.prompt_tokens == used + cost.tokens
    assert engine.context_length - chat.last.stats.prompt_tokens == cost.free
    assert chat.count("x" * 2000).free < 0


def test_an_empty_path_is_an_empty_conversation(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "one", None, "first")
    chat.load([])
    assert (chat.turns, chat.last, chat.used_tokens) == ([], None, 0)
    chat.load([Turn("never answered", Answer())])
    assert chat.last.finish_reason is FinishReason.CANCELLED
    engine.scripted.script = say(engine, None, "now")
    list(chat.resume(SamplingParams(temperature=0.0)))
    assert chat.last.text == "now"


def test_a_long_draft_is_tokenised_once_for_its_cost_and_for_sending(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine.chat()
    draft = "word " * 1200
    chat.prepare(draft)
    seen: list[str] = []
    encode = engine.tokenizer.encode_pieces

    def watched(pieces: list[PromptPiece], after: int | None = None) -> list[int]:
        seen.extend(piece.text for piece in pieces)
        return encode(pieces, after)

    monkeypatch.setattr(engine.tokenizer, "encode_pieces", watched)
    assert chat.count(draft).free < 0
    with pytest.raises(ContextFullError):
        next(chat.send(draft, GREEDY))
    assert not any("word" in text for text in seen)
