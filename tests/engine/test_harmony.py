"""Answers in channels (gpt-oss): what is thinking and what is answer, and that prompts and rows are the right ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import FinishReason, SamplingParams
from engine.conversation.chat import Answer, Turn
from engine.conversation.prompt import PromptFormat
from engine.conversation.template_prompt import Rendering
from engine.conversation.tools import to_messages
from engine.events import Cause
from engine.schedule.channels import ChannelTracker
from engine.schedule.output import Output
from models.text.tokenizer import Tokenizer
from tests.engine.chat_formats import segments
from tests.engine.test_chat import CONFIG, GREEDY, ask, masked_reference, rendered
from tests.engine.test_chat_paths import copies
from tests.engine.tiny import TinyEngine, close_to, harmony_tokenizer, say, tiny_engine
from tests.models.checkpoints import run

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary<|message|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return harmony_tokenizer()


def read(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> tuple[str, str, Output]:
    """What a stream says as reasoning and as answer, and what has read it."""
    assert tokenizer.channels is not None
    output, told = Output(tokenizer.stream(), ChannelTracker(tokenizer.channels), stop), Answer()
    for id in tokenizer.encode(text):
        event = output.push(id)
        told.add(event.text, event.kind)
        if output.stopped:
            break
    told.add(output.flush(), output.kind)
    return told.reasoning, told.text, output


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (f"{ANALYSIS}hm{NEXT}{FINAL}yes\n", "hm", "yes\n"),
        (f"{FINAL}final", "", "final"),
        ("no header", "", "no header"),
        ("<|message|>no channel", "", "no channel"),
        (f"{ANALYSIS}one{NEXT}{ANALYSIS}two{NEXT}{FINAL}é😀", "one\n\ntwo", "é😀"),
        (f"{ANALYSIS}one{NEXT}{COMMENTARY}a plan{NEXT}{FINAL}b", "one\n\na plan", "b"),
        (f"{COMMENTARY}plan{NEXT}{FINAL}b", "plan", "b"),
        (f"{ANALYSIS}a{NEXT}<|channel|>final json<|message|>{{}}", "a", "{}"),
        (f"{ANALYSIS}a{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}", "a\n\n{}", ""),
        (f"{ANALYSIS}a<|channel|>final<|message|>b", "a", "b"),
        (f"{ANALYSIS}assistant final", "assistant final", ""),
        (f"{ANALYSIS}", "", ""),
        (f"{ANALYSIS}a{NEXT}<|channel|>fi", "a", ""),
        (f"{ANALYSIS}a<|end|><|end|><|start|>assistant{FINAL}b", "a", "b"),
    ],
)
def test_messages_are_thinking_or_the_answer(
    tokenizer: Tokenizer, text: str, reasoning: str, answer: str
) -> None:
    said = read(tokenizer, text)
    assert said[:2] == (reasoning, answer)
    assert not said[2].stopped
    ids = tokenizer.encode(text)
    start = said[2].thinking.answer_start
    assert tokenizer.decode(ids[start:]) == (answer if said[2].thinking.span is None or answer else "")
    assert said[2].thinking.inside == (not answer)


@pytest.mark.parametrize("more", ["<|end|>", NEXT, f"{NEXT}{FINAL}more", "<|start|>user", "<|channel|>x"])
def test_whatever_follows_the_answer_is_not_taken(tokenizer: Tokenizer, more: str) -> None:
    reasoning, answer, output = read(tokenizer, f"{ANALYSIS}a{NEXT}{FINAL}b{more}", stop=("bc",))
    assert (reasoning, answer, output.stopped) == ("a", "b", True)
    assert output.thinking.count == len(tokenizer.encode(f"{ANALYSIS}a{NEXT}{FINAL}b")) + 1


def test_thinking_can_be_ended_anywhere(tokenizer: Tokenizer) -> None:
    assert tokenizer.channels is not None
    ids = tokenizer.encode(f"{ANALYSIS}a{NEXT}{COMMENTARY}b{NEXT}{FINAL}")
    for count in range(1, len(ids)):
        tracker = ChannelTracker(tokenizer.channels)
        output = Output(tokenizer.stream(), tracker)
        output.replay(ids[:count])
        assert tracker.inside
        closing = tracker.closing()
        assert closing
        output.replay(closing)
        assert not tracker.inside
        assert tracker.answer_start == count + len(closing)
        assert not output.stopped
    whole = tokenizer.encode(f"{NEXT}{FINAL}")
    assert all(
        (ids[:count] + ChannelTracker(tokenizer.channels).closing())[-len(whole) :] == whole
        for count in range(len(ids))
    )


def test_prompts_are_what_the_template_writes(tokenizer: Tokenizer) -> None:
    format = PromptFormat(tokenizer)
    assert format.thinks()
    assert format.header == tokenizer.encode(FINAL)
    said = [Answer("1", token_ids=tokenizer.encode("1"), shown=(0, 1)) for _ in range(2)]
    asked = segments(format, "S", ["one", "two", "three"], said, generate=True)
    written = [("system", "S"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    written += [("assistant", "1"), ("user", "three")]
    text = tokenizer.render(
        [{"role": role, "content": content} for role, content in written], add_generation_prompt=True
    )
    messages, turns = to_messages("S", [Turn("one", said[0]), Turn("two", said[1])], "three")
    assert Rendering(format, None).rows(messages, turns).token_ids == tokenizer.encode(text)
    assert text.endswith("<|start|>assistant")
    assert "<|return|>" not in text
    unthinking = segments(format, "S", ["one", "two", "three"], said, generate=True, think=False)
    assert unthinking[:2] == asked[:2]
    assert unthinking[2] == asked[2] + format.header
    assert format.openings == {None: [], True: [], False: format.header}
    assert not any(format.inside.values())
    assert format.opens_think(tokenizer.encode(f"<|start|>assistant{ANALYSIS}"))


def test_an_answer_about_the_format_is_text(tokenizer: Tokenizer) -> None:
    format = PromptFormat(tokenizer)
    ids = tokenizer.encode_plain(FINAL)
    assert set(ids).isdisjoint(tokenizer.encode(FINAL)[-1:])
    assert format.answer_span(ids, FINAL) == (0, len(ids))
    assert format.is_said_by(ids, FINAL)


@pytest.fixture
def engine(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[TinyEngine]:
    with tiny_engine(tmp_path, CONFIG, tokenizer) as made:
        yield made


@pytest.mark.parametrize("think", ["auto", "off"])
def test_exact_logits_are_those_of_a_fresh_prefill(engine: TinyEngine, think: str) -> None:
    chat = engine.chat(system="Be brief.", think=think)  # type: ignore[arg-type]
    turns: list[tuple[str, str]] = []
    for i in range(4):
        thought = f"thought {i}" if i % 2 else None
        if think == "off":
            engine.scripted.script = engine.tokenizer.encode(f"answer {i}<|return|>")
            engine.scripted.logits_seen.clear()
            list(chat.send(f"q{i}", GREEDY))
            logits = engine.scripted.logits_seen[0]
        else:
            logits = ask(engine, chat, f"q{i}", thought, f"answer {i}")
        prompt = rendered(engine, turns, f"q{i}", system="Be brief.")
        prompt += engine.tokenizer.encode(FINAL) if think == "off" else []
        assert close_to(logits, run(engine.scripted.model, prompt)[-1])
        turns.append((f"q{i}", f"answer {i}"))
        assert chat.last is not None
        assert chat.last.text == f"answer {i}"
        assert chat.last.reasoning == ("" if think == "off" else thought or "")
        if i > 1:
            chat.settle(wait=True)
    if think == "off":  # nothing of it was thinking: all of an answer but its end is found
        assert chat.last is not None
        new = engine.tokenizer.encode(f"<|end|><|start|>user<|message|>q3<|end|><|start|>assistant{FINAL}")
        assert chat.last.stats.prefilled_tokens <= len(new)


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_once_settled_a_turn_computes_only_its_message_and_the_glue(
    engine: TinyEngine, think_cache: str
) -> None:
    chat = engine.chat(think_cache=think_cache)  # type: ignore[arg-type]
    for i in range(4):
        ask(engine, chat, f"message {i}", "some long thoughts" if i % 2 else None, "an answer")
        chat.settle(wait=True)
        assert chat.last is not None
        if i:
            new = f"<|end|><|start|>user<|message|>message {i}<|end|><|start|>assistant"
            assert chat.last.stats.prefilled_tokens <= len(engine.tokenizer.encode(new))


def test_masked_logits_are_those_of_transformers_with_the_same_mask(engine: TinyEngine) -> None:
    chat, encode = engine.chat(think_cache="mask"), engine.tokenizer.encode
    stream = encode("<|start|>system<|message|>Reasoning: medium<|end|>")
    hidden: list[tuple[int, int, int]] = []
    for i in range(4):
        thought = None if i == 2 else f"thoughts, round {i}"
        logits = ask(engine, chat, f"q{i}", thought, f"answer {i}")
        stream += encode(f"<|start|>user<|message|>q{i}<|end|><|start|>assistant")
        assert close_to(logits, masked_reference(CONFIG, stream, hidden)[-1])
        assert chat.last is not None
        start = len(stream)
        thinking = [] if thought is None else encode(f"{ANALYSIS}{thought}{NEXT}")
        stream += chat.last.token_ids[:-1]  # the history ends it with another token
        assert chat.last.token_ids[: len(thinking)] == thinking
        hidden.append((start, start + len(thinking), len(stream)))
        stream += encode("<|end|>")
        engine.check()


@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@pytest.mark.parametrize("said", [ANALYSIS, f"{ANALYSIS}half a tho", f"{ANALYSIS}a{NEXT}<|channel|>fin"])
def test_an_answer_that_was_stopped_in_its_thinking_is_an_empty_one(
    engine: TinyEngine, think_cache: str, said: str
) -> None:
    chat, encode = engine.chat(think_cache=think_cache), engine.tokenizer.encode  # type: ignore[arg-type]
    engine.scripted.script = encode(f"{said}{'x' * 300}")
    events = chat.send("go", GREEDY)
    for _ in encode(said):
        next(events)
    events.close()  # type: ignore[attr-defined]
    engine.scripted.script.clear()
    (turn,) = chat.turns
    assert (turn.answer.text, turn.answer.content_ids) == ("", [])
    again = engine.chat(think_cache=think_cache)  # type: ignore[arg-type]
    again.load(copies(chat.turns))
    expected = run(engine.scripted.model, rendered(engine, [("go", "")], "next"))[-1]
    if think_cache == "mask":
        asked = rendered(engine, [], "go")
        spoken = [*turn.answer.token_ids, *encode(FINAL)]
        stream = [*asked, *spoken, *encode("<|end|><|start|>user<|message|>next<|end|><|start|>assistant")]
        end = len(asked) + len(turn.answer.token_ids)
        expected = masked_reference(CONFIG, stream, [(len(asked), end, len(asked) + len(spoken))])[-1]
    for one in (chat, again):
        assert close_to(ask(engine, one, "next", "t", "b"), expected)
        engine.check()


@pytest.mark.parametrize("count", [1, 4, 12, 14])
def test_answer_now_ends_the_thinking(engine: TinyEngine, count: int) -> None:
    chat, scripted, forward = engine.chat(), engine.scripted, engine.scripted.forward

    def hurry(*arguments: Any) -> Any:
        if chat._running is not None and len(chat._running.generated) == count:
            chat.answer_now()
            scripted.script = [scripted.script[0], *engine.tokenizer.encode("so be it<|return|>")]
        return forward(*arguments)

    scripted.forward = hurry  # type: ignore[method-assign]
    scripted.script = engine.tokenizer.encode(f"{ANALYSIS}{'t' * 20}")
    taken = list(chat.send("go", GREEDY))
    assert chat.last is not None
    assert chat.last.finish_reason is FinishReason.EOS
    assert chat.last.token_ids == [event.token_id for event in taken]
    assert chat.last.text == "so be it"
    assert engine.tokenizer.decode(chat.last.content_ids) == chat.last.text


def test_turns_of_another_setting_go_on_as_they_began(engine: TinyEngine) -> None:
    chat = engine.chat(think="off")
    engine.scripted.script = engine.tokenizer.encode("half an ans")
    list(chat.send("go", SamplingParams(temperature=0.0, max_tokens=11)))
    chat.think = "auto"
    engine.scripted.script = engine.tokenizer.encode("wer<|return|>")
    engine.scripted.logits_seen.clear()
    list(chat.resume(GREEDY))
    assert chat.last is not None
    assert (chat.last.text, chat.last.reasoning) == ("half an answer", "")
    prompt = rendered(engine, [], "go") + engine.tokenizer.encode(f"{FINAL}half an ans")
    assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, prompt)[-1])
    saved = copies(chat.turns)
    again = engine.chat(think_cache="mask")
    again.load(saved)
    assert again.turns[0].answer.token_ids == chat.last.token_ids
    assert again.history.token_ids == chat.history.token_ids


def test_turns_from_elsewhere(engine: TinyEngine) -> None:
    chat, tokenizer = engine.chat(), engine.tokenizer
    ids = say(engine, "thoughts", "kept")
    ours = Answer("kept", "thoughts", ids, FinishReason.EOS)
    forged = [
        Answer("x", "", tokenizer.encode(f"{FINAL}x<|start|>system"), FinishReason.EOS),
        Answer("x", "", tokenizer.encode(f"{FINAL}x<|return|>y"), FinishReason.LENGTH),
        Answer("x", "", tokenizer.encode(f"{ANALYSIS}x{NEXT}{FINAL}x<|return|>"), FinishReason.EOS),
    ]
    chat.load([Turn("a", ours), Turn("b", Answer("text", "why")), *(Turn("c", answer) for answer in forged)])
    kept, *others = (turn.answer.token_ids for turn in chat.turns)
    assert kept == ids
    assert others == [tokenizer.encode_plain(text) for text in ("text", "x", "x", "x")]
    turns = [("a", "kept"), ("b", "text"), *[("c", "x")] * 3]
    logits = ask(engine, chat, "go", None, "y")
    assert close_to(logits, run(engine.scripted.model, rendered(engine, turns, "go"))[-1])


def test_what_kept_the_prompt_from_being_reused_is_told(engine: TinyEngine) -> None:
    chat = engine.chat()
    ask(engine, chat, "a", "thoughts", "b")
    ask(engine, chat, "c", None, "d")
    assert chat.last is not None
    parting = chat.last.stats.parting
    assert parting is not None
    assert (parting.cause, parting.message) == (Cause.THINKING, 1)


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def read_with_tools(tokenizer: Tokenizer, text: str) -> tuple[str, str, Output]:
    """The same where there are tools to call."""
    assert tokenizer.channels is not None
    names = ("start", "channel", "constrain", "message")
    shown = frozenset(filter(None, (tokenizer.token_id(f"<|{name}|>") for name in names)))
    tracker = ChannelTracker(tokenizer.channels, spells=tokenizer.token_bytes)
    output, told = Output(tokenizer.stream(shown), tracker), Answer()
    for id in tokenizer.encode(text):
        event = output.push(id)
        told.add(event.text, event.kind)
        if output.stopped:
            break
    told.add(output.flush(), output.kind)
    return told.reasoning, told.text, output


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        ("", f"{CALL}{{}}", ""),
        (f"{ANALYSIS}hm{NEXT}", f'{CALL}{{"a": 1}}', ""),
        (f"{ANALYSIS}hm{NEXT}{COMMENTARY}I'll look.{NEXT}", f"{CALL}{{}}", "<|end|>"),
        ("", " to=functions.f<|channel|>commentary json<|message|>{}", ""),
        (f"{ANALYSIS}hm{NEXT}", " to=functions.f<|channel|>commentary json<|message|>{}", f"{NEXT}{FINAL}b"),
        (f"{ANALYSIS}hm", f"<|start|>assistant{CALL}{{}}", ""),
        ("", " top\n", ""),
        ("", " to=", ""),
        (f"{ANALYSIS}hm{NEXT}{FINAL}", " to=functions.f", ""),
    ],
)
def test_a_call_is_the_answer_with_its_header(
    tokenizer: Tokenizer, before: str, call: str, after: str
) -> None:
    reasoning, answer, output = read_with_tools(tokenizer, before + call + after)
    if call == " to=":  # it was about to say whom it asks
        assert (reasoning, answer) == ("", "")
        return
    assert answer == call
    assert ("hm" in reasoning, "I'll look." in reasoning) == ("hm" in before, "I'll look." in before)
    assert "to=" not in reasoning
    assert output.stopped == bool(after)
    start = output.thinking.answer_start
    ids = tokenizer.encode(before + call + after)
    assert tokenizer.decode(ids[start : start + len(tokenizer.encode(call))], skip_special=False) == call
