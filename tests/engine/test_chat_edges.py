"""Conversations at their edges: stopped early, thinking in odd places, text that is no whole tokens."""

from pathlib import Path
from typing import Any

import pytest

from engine import EngineError, FinishReason, SamplingParams
from engine.conversation.chat import Answer, Chat
from engine.conversation.prompt import PromptFormat
from engine.schedule.scheduler import MaskedRowsEvictedError
from models.text.tokenizer import Message, PromptPiece
from tests.counting import until
from tests.engine.chat_formats import segments
from tests.engine.test_chat import CONFIG, GREEDY, ask, masked_reference
from tests.engine.tiny import TEMPLATE, TinyEngine, close_to, say, tiny_engine, tiny_tokenizer
from tests.models.checkpoints import run

ENDLESS = SamplingParams(temperature=0.0, max_tokens=900)
OPENING = TEMPLATE.replace(
    "{%- if enable_thinking is defined",
    "{%- if not (enable_thinking is defined and enable_thinking is false) %}{{- '<think>\\n' }}{%- endif %}"
    "{%- if enable_thinking is defined",
)
"""A template that opens the think span itself."""


def wait_for_tokens(chat: Chat, count: int) -> None:
    """Until the loop has generated so many, whether or not anybody took them."""
    running = chat._running
    assert running is not None
    until(lambda: len(running.generated) >= count or running.finish_reason is not None, 0.0005)


def test_a_stop_between_asking_and_the_first_token_counts(engine: TinyEngine) -> None:
    chat = engine.chat()
    for events in (chat.send("go", ENDLESS), chat.retry(ENDLESS)):
        chat.stop()
        assert list(events) == []
        assert chat.last.finish_reason is FinishReason.CANCELLED
    ask(engine, chat, "and now", None, "it goes on")


def test_a_stop_while_masked_turns_are_computed_again_counts(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine.chat(think_cache="mask")
    ask(engine, chat, "one", "thoughts " * 30, "first")
    engine.evict_all()
    computed = engine.scripted.rows_computed
    submit = engine.submit

    def stop_and_submit(sequence: object) -> None:
        chat.stop()
        submit(sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "submit", stop_and_submit)
    assert list(chat.send("two", ENDLESS)) == []
    assert chat.last.finish_reason is FinishReason.CANCELLED
    assert engine.scripted.rows_computed == computed


def test_what_was_produced_but_not_taken_is_kept(engine: TinyEngine) -> None:
    chat = engine.chat()
    engine.scripted.script = say(engine, "hm", "an answer that goes on and on")
    events = chat.send("go", SamplingParams(temperature=0.0, stop=("on and on!",)))
    next(events)
    wait_for_tokens(chat, 25)
    events.close()  # type: ignore[attr-defined]
    engine.scripted.script.clear()
    tokens = engine.tokenizer.decode(chat.last.token_ids)
    assert tokens.startswith("<think>\nhm\n</think>\n\nan answer")
    assert f"<think>\n{chat.last.reasoning}</think>\n\n{chat.last.text}" == tokens
    assert engine.tokenizer.decode(chat.last.content_ids) == chat.last.text


def test_half_a_character_of_a_cut_thought_is_no_answer(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine.chat()
    half = engine.tokenizer.encode("<think>né")[:-1]
    engine.scripted.script = list(half)
    commit, tokens = engine.pieces.blocks.commit, []

    def fail_after_half(table: object, keys: list[int], origins: object) -> None:
        commit(table, keys, origins)  # type: ignore[arg-type]
        tokens.extend(keys)
        if tokens[-len(half) :] == half:
            raise RuntimeError("cut")

    monkeypatch.setattr(engine.pieces.blocks, "commit", fail_after_half)
    with pytest.raises(EngineError, match="cut"):
        list(chat.send("go", ENDLESS))
    assert (chat.last.text, chat.last.reasoning) == ("", "n\ufffd")
    assert chat.last.token_ids == half


def test_a_user_who_writes_a_think_marker_gets_an_answer(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "What does <think> mean?", None, "It opens a span.")
    assert chat.last.reasoning == ""
    assert engine.tokenizer.decode(chat.last.content_ids) == "It opens a span."


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_a_template_that_opens_the_think_span_itself(folder: Path, think_cache: str) -> None:
    with tiny_engine(folder, CONFIG, tiny_tokenizer(OPENING)) as engine:
        encode = engine.tokenizer.encode
        chat = engine.chat(think_cache=think_cache)  # type: ignore[arg-type]
        assert chat.thinks
        stream: list[int] = []
        hidden: list[tuple[int, int, int]] = []
        turns: list[tuple[str, str]] = []
        for i in range(3):
            engine.scripted.script = encode(f"thought {i}\n</think>\n\nanswer {i}<|im_end|>")
            engine.scripted.logits_seen.clear()
            list(chat.send(f"q{i}", ENDLESS))
            assert (chat.last.reasoning, chat.last.text) == (f"thought {i}\n", f"answer {i}")
            stream += encode(
                ("\n" if i else "") + f"<|im_start|>user\nq{i}<|im_end|>\n<|im_start|>assistant\n"
            )
            start = len(stream)
            stream += encode("<think>\n")
            if think_cache == "mask":
                expected = masked_reference(CONFIG, stream, hidden)[-1]
            else:
                messages: list[Message] = []
                for user, answer in turns:
                    messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
                messages.append({"role": "user", "content": f"q{i}"})
                text = engine.tokenizer.render(messages, add_generation_prompt=True)
                expected = run(engine.scripted.model, encode(text))[-1]
            assert close_to(engine.scripted.logits_seen[0], expected)
            stream += chat.last.token_ids
            hidden.append((start, start + len(encode(f"<think>\nthought {i}\n</think>\n\n")), len(stream)))
            turns.append((f"q{i}", f"answer {i}"))


def test_a_marker_after_the_answer_began_is_text(engine: TinyEngine) -> None:
    chat = engine.chat()
    engine.scripted.script = engine.tokenizer.encode("Use <think> here.<|im_end|>")
    list(chat.send("how?", ENDLESS))
    assert (chat.last.text, chat.last.reasoning) == ("Use <think> here.", "")
    assert engine.tokenizer.decode(chat.last.content_ids) == chat.last.text


@pytest.mark.parametrize("text", ["🙂 hi", "é", "a 🙂"])
@pytest.mark.parametrize("before", ["", "\n\n"])
def test_an_answer_that_begins_within_a_character_is_shown_whole(text: str, before: str) -> None:
    tokenizer = tiny_tokenizer()
    first, end = PromptFormat(tokenizer).answer_span(tokenizer.encode(before + text + "<|im_end|>"), text)
    assert (first, end) == (len(tokenizer.encode(before)), len(tokenizer.encode(before + text)))


def test_what_the_template_leaves_of_an_answer_is_found_where_it_stands() -> None:
    tokenizer = tiny_tokenizer()
    text = "b or a</" + "think>b"
    ids = [id for char in text for id in tokenizer.encode(char)]
    assert PromptFormat(tokenizer).answer_span(ids, text) == (len(ids) - 1, len(ids))


def test_segments_of_two_threads_do_not_get_in_each_others_way() -> None:
    tokenizer = tiny_tokenizer()
    format = PromptFormat(tokenizer)
    encode, entered = tokenizer.encode_pieces, []

    def encode_while_another_thread_asks(pieces: list[PromptPiece], after: int | None = None) -> list[int]:
        entered.append(pieces)
        if len(entered) == 2:
            segments(format, "other", ["conversation"], [], generate=True)
        return encode(pieces, after)

    expected = segments(PromptFormat(tokenizer), "S", ["one", "two"], [Answer()], generate=True)
    tokenizer.encode_pieces = encode_while_another_thread_asks  # type: ignore[method-assign]
    assert segments(format, "S", ["one", "two"], [Answer()], generate=True) == expected
    assert len(entered) > 2


def test_an_answer_that_has_begun_is_not_begun_again(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, scheduler, failed = engine.chat(), engine.pieces.scheduler, list[bool]()
    reserve = scheduler.blocks.reserve

    def fails_once(*given: Any, **more: Any) -> Any:
        """Behind the first token of the answer."""
        if not failed and any(sequence.generated for sequence in scheduler.running):
            failed.append(True)
            raise MaskedRowsEvictedError("gone")
        return reserve(*given, **more)

    monkeypatch.setattr(scheduler.blocks, "reserve", fails_once)
    with pytest.raises(EngineError, match="send a message"):
        list(chat.send("go", ENDLESS))
    assert len(chat.turns) == 1


def test_a_masked_turn_without_an_answer_whose_rows_are_gone(engine: TinyEngine) -> None:
    """Nothing follows the think span: there is nothing to move, only rows before it to compute again."""
    chat = engine.chat(think_cache="mask")
    ask(engine, chat, "one", "thoughts", "first")
    engine.scripted.script = engine.tokenizer.encode("<think>" + "x" * 900)
    events = chat.send("two", ENDLESS)
    for _ in range(4):
        next(events)
    events.close()  # type: ignore[attr-defined]
    engine.evict_all()
    ask(engine, chat, "three", None, "third")
    engine.check()


def test_a_think_setting_that_does_not_exist_is_refused(engine: TinyEngine) -> None:
    chat = engine.chat()
    with pytest.raises(EngineError, match="auto, on or off"):
        chat.think = "maybe"  # type: ignore[assignment]
    assert chat.think == "auto"


def test_the_settings_may_change_in_mid_chat(engine: TinyEngine) -> None:
    """Another system prompt and another think setting: logits of a fresh prefill under the new ones."""
    for think_cache in ("exact", "mask"):
        chat = engine.chat(system="A.", think="off", think_cache=think_cache)  # type: ignore[arg-type]
        ask(engine, chat, "one", None, "first")
        chat.system, chat.think = "Another.", "auto"
        ask(engine, chat, "two", "thoughts", "second")
        chat.undo()
        logits = ask(engine, chat, "three", None, "third")
        if think_cache == "exact":
            text = "<|im_start|>system\nAnother.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
            text += "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
            prompt = engine.tokenizer.encode(text + "<|im_start|>assistant\n")
            assert close_to(logits, run(engine.scripted.model, prompt)[-1])
        engine.check()


def test_a_retry_that_is_stopped_before_its_first_token_leaves_the_earlier_answer(engine: TinyEngine) -> None:
    chat = engine.chat()
    engine.scripted.script = say(engine, None, "kept")
    list(chat.send("one", GREEDY))
    events = chat.retry(GREEDY)
    chat.stop()
    assert list(events) == []
    assert [turn.answer.text for turn in chat.turns] == ["kept"]
