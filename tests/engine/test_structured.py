"""Answers that have to match something, through the whole engine: on the host, and in slots one step behind."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine import Constraint, EngineError, FinishReason, SamplingParams, TokenEvent
from engine.cache.rows import Rows
from engine.conversation.chat import Think
from engine.sampling.grammar import Matcher
from engine.schedule.sequence import Sequence
from models.text.tokenizer_parts import THINK_MARKERS
from tests.engine.fake_decoding import FakeRunner
from tests.engine.test_chat import CONFIG
from tests.engine.tiny import TinyEngine, harmony_tokenizer, say, tiny_engine, tiny_tokenizer

WORDS = 9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "state": {"enum": ["awake", "asleep", "away"]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "state", "marks"],
    "additionalProperties": False,
}
SCHEMA = Constraint("json_schema", json.dumps(PERSON))
REGEX = Constraint("regex", "(yes|no), because [a-z]{1,9}[.]")
LIST = Constraint("lark", 'start: item ("; " item)*\nitem: /[a-f]{2}/')
PROMPT = list(range(40, 70))
SOBER = {259: -100.0}
"""The token that begins the thinking of a model that does nothing but think."""


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "state", "marks"]
    assert value["state"] in PERSON["properties"]["state"]["enum"]  # type: ignore[index]
    return len(value["name"]) <= 3 and all(mark in (True, False) for mark in value["marks"])


MATCHES: dict[Constraint, Callable[[str], object]] = {
    SCHEMA: is_person,
    REGEX: lambda text: re.fullmatch(REGEX.text, text),
    LIST: lambda text: re.fullmatch("[a-f]{2}(; [a-f]{2})*", text),
}


@pytest.fixture(params=["host", "slots"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[TinyEngine]:
    with tiny_engine(folder, CONFIG) as engine:
        if request.param == "slots":
            runner = FakeRunner(engine.pieces.runner, 3, words=WORDS)
            engine.loop.call(lambda: engine.engine_step.decode_with(runner))
        yield engine


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events if event.kind == "answer")


def together(engine: TinyEngine, params: list[SamplingParams]) -> list[tuple[list[TokenEvent], Sequence]]:
    """Answers to the same prompt that are asked for between two steps."""
    sequences: list[Sequence] = []
    engine.loop.call(
        lambda: sequences.extend(
            engine.start(Rows.of([*PROMPT, index]), one) for index, one in enumerate(params)
        ),
    )
    return [(list(engine.events(sequence)), sequence) for sequence in sequences]


def test_everybody_gets_in_one_batch_what_he_gets_alone_and_it_matches(engine: TinyEngine) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=60),
        SamplingParams(temperature=1.5, seed=4, constraint=SCHEMA, logit_bias=SOBER, top_k=30),
        SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, frequency_penalty=0.5),
        SamplingParams(temperature=1.0, seed=5, constraint=REGEX, logprobs=3, logit_bias={70: 2.0}),
        SamplingParams(
            temperature=1.2, seed=6, constraint=LIST, presence_penalty=1.0, repetition_penalty=1.2
        ),
        SamplingParams(
            temperature=1.2, seed=7, constraint=SCHEMA, logit_bias=SOBER, frequency_penalty=0.5, min_p=0.02
        ),
    ]
    alone = []
    for index, one in enumerate(params):
        alone.append(list(engine.stream([*PROMPT, index], one)))
        engine.evict_all()
    for (events, sequence), before, one in zip(together(engine, params), alone, params, strict=True):
        assert [event.token_id for event in events] == [event.token_id for event in before]
        assert text_of(events) == text_of(before)
        if one.constraint is not None:
            assert sequence.finish_reason is FinishReason.EOS
            assert MATCHES[one.constraint](text_of(events)), text_of(events)
        for event, earlier in zip(events, before, strict=True):
            assert event.logprob == pytest.approx(earlier.logprob, abs=1e-3)
            assert len(event.top) == (one.logprobs or 0)
    engine.check()


def test_forced_tokens_take_no_step_each_and_change_nothing(engine: TinyEngine) -> None:
    """With log-probabilities each token is drawn by itself: the text is the same, and it takes more steps."""
    params = SamplingParams(temperature=1.0, seed=5, constraint=SCHEMA, logit_bias=SOBER)
    counts, texts = [], []
    run = engine.pieces.runner.run

    def counted(batch: Any) -> Any:
        counts[-1] += 1
        return run(batch)

    engine.pieces.runner.run = counted  # type: ignore[method-assign]
    for asked in (None, 0):
        engine.evict_all()
        counts.append(0)
        events = list(engine.stream(PROMPT, SamplingParams(**{**_fields(params), "logprobs": asked})))
        texts.append([event.token_id for event in events])
    assert texts[0] == texts[1]
    assert counts[0] < 0.6 * counts[1]
    engine.check()


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingParams.__slots__}


def test_a_deterministic_engine_computes_every_row_in_slots_by_a_decode_step(folder: Path) -> None:
    with tiny_engine(folder, CONFIG) as engine:
        runner = FakeRunner(engine.pieces.runner, 3, words=WORDS)
        engine.loop.call(lambda: engine.engine_step.decode_with(runner))
        engine.engine_step.jumps = False
        events = list(
            engine.stream(PROMPT, SamplingParams(temperature=0.0, constraint=SCHEMA, logit_bias=SOBER))
        )
        assert len(runner.launches) >= len(events) - 1


@pytest.mark.parametrize("most", [1, 2, 9, 10, 11, 12, 13, 20])
def test_a_limit_ends_it_wherever_it_is_and_says_so(engine: TinyEngine, most: int) -> None:
    whole = list(engine.stream(PROMPT, SamplingParams(temperature=0.0, constraint=SCHEMA, logit_bias=SOBER)))
    ((events, sequence),) = together(
        engine, [SamplingParams(temperature=0.0, constraint=SCHEMA, logit_bias=SOBER, max_tokens=most)]
    )
    assert len(events) == most < len(whole)
    assert sequence.finish_reason is FinishReason.LENGTH
    engine.check()


def test_a_stop_string_ends_it_within_what_is_forced(engine: TinyEngine) -> None:
    params = SamplingParams(temperature=0.0, constraint=SCHEMA, logit_bias=SOBER, stop=('"sta',))
    ((events, sequence),) = together(engine, [params])
    assert sequence.finish_reason is FinishReason.STOP
    assert re.fullmatch('{"name": "[^"]*", ', text_of(events))


def test_what_cannot_be_used_is_said_before_anything_runs(engine: TinyEngine) -> None:
    for constraint in (Constraint("json_schema", "{"), Constraint("regex", "(")):
        with pytest.raises(EngineError, match="cannot be used"):
            next(engine.stream(PROMPT, SamplingParams(constraint=constraint)))
    with pytest.raises(EngineError, match="token 272"):
        next(engine.stream(PROMPT, SamplingParams(logit_bias={272: 1.0})))


def test_one_that_gets_too_complex_fails_alone(engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    push = Matcher.push

    def fail(matcher: Matcher, token: int) -> None:
        pushed.append(token)
        if len(pushed) == 6:
            raise EngineError("too complex")
        push(matcher, token)

    free = SamplingParams(temperature=0.0, max_tokens=30)
    alone = [event.token_id for event in engine.stream([*PROMPT, 1], free)]
    engine.evict_all()
    monkeypatch.setattr(Matcher, "push", fail)
    sequences: list[Sequence] = []
    params = [SamplingParams(temperature=0.0, constraint=REGEX, logit_bias=SOBER), free]
    engine.loop.call(
        lambda: sequences.extend(
            engine.start(Rows.of([*PROMPT, index]), one) for index, one in enumerate(params)
        ),
    )
    assert [event.token_id for event in engine.events(sequences[1])] == alone
    with pytest.raises(EngineError, match="too complex"):
        list(engine.events(sequences[0]))
    engine.check()


def test_blocks_that_run_out_change_nothing(folder: Path) -> None:
    """Preempted, and drawn again: what was told stays, and the rest follows from it."""
    params = [
        SamplingParams(temperature=1.0, seed=i, constraint=SCHEMA if i % 2 else REGEX, logit_bias=SOBER)
        for i in range(3)
    ]
    found = []
    for blocks in (100, 24):
        with tiny_engine(folder, CONFIG, num_blocks=blocks) as engine:
            runner = FakeRunner(engine.pieces.runner, 3, words=WORDS)
            engine.loop.call(partial(engine.engine_step.decode_with, runner))
            engine.engine_step.jumps = False
            answers = together(engine, params)
            found.append([[event.token_id for event in events] for events, _ in answers])
            preempted = sum(sequence.preemptions for _, sequence in answers)
            assert (preempted > 0) == (blocks == 24)
            for (events, _), one in zip(answers, params, strict=True):
                assert one.constraint is not None
                assert MATCHES[one.constraint](text_of(events))
    assert found[0] == found[1]


# -- thinking


def scripted(engine: TinyEngine, script: list[int], params: SamplingParams, think: Think = "auto") -> Any:
    """A chat's answer, of a model that wants to say these tokens."""
    chat = engine.chat(think=think)
    engine.scripted.script = list(script)
    list(chat.send("go", params))
    engine.scripted.script = []
    assert chat.last is not None
    return chat.last


@pytest.mark.parametrize("kind", ["think", "marked", "labelled", "harmony"])
def test_the_constraint_begins_where_the_thinking_ends(tmp_path: Path, kind: str) -> None:
    tokenizer = {
        "think": tiny_tokenizer,
        "marked": lambda: tiny_tokenizer(markers=THINK_MARKERS[1]),
        "labelled": lambda: tiny_tokenizer(markers=THINK_MARKERS[3]),
        "harmony": harmony_tokenizer,
    }[kind]()
    with tiny_engine(tmp_path, CONFIG, tokenizer) as engine:
        end = sorted(tokenizer.stop_ids)[0]
        # It would end its turn while it thinks, and say something else afterwards.
        script = say(engine, 'I "think" { so', "no, because")
        thinking = script.index(tokenizer.encode_plain("k")[0])
        script.insert(thinking, end)
        params = SamplingParams(temperature=0.0, constraint=REGEX)
        answer = scripted(engine, script, params)
        assert answer.finish_reason is FinishReason.EOS
        assert answer.reasoning.startswith('I "thin')
        assert re.fullmatch(REGEX.text, answer.text)
        # Where thinking is off, it may not begin with it all the same.
        answer = scripted(engine, script, params, think="off")
        assert not answer.reasoning
        assert re.fullmatch(REGEX.text, answer.text)
        # No thinking, or a prompt that has opened the span.
        answer = scripted(engine, say(engine, None, "yes, because"), params)
        assert not answer.reasoning
        assert re.fullmatch(REGEX.text, answer.text)


@pytest.mark.parametrize("thoughts", [[], ["so"], ["so", "now a call"]])
def test_a_grammar_that_writes_its_own_header(tmp_path: Path, thoughts: list[str]) -> None:
    """A call, in the harmony format: it is a message of its own, after any number of messages of thinking."""
    tokenizer = harmony_tokenizer()
    ids = {name: tokenizer.token_id(f"<|{name}|>") for name in ("channel", "message", "call", "start")}
    header = f'<[{ids["channel"]}]> "commentary to=f" <[{ids["message"]}]>'
    grammar = f'start: {header} %json {{"type": "integer", "maximum": 99, "minimum": 0}} <[{ids["call"]}]>'
    with tiny_engine(tmp_path, CONFIG, tokenizer) as engine:
        said = "".join(f"<|channel|>analysis<|message|>{text}<|end|>" for text in thoughts)
        said += "<|channel|>commentary no{}<|call|>"  # what lies between is forced: nobody is asked for it
        params = SamplingParams(temperature=0.0, constraint=Constraint("lark", grammar))
        answer = scripted(engine, tokenizer.encode(said), params)
        text = tokenizer.decode(answer.token_ids, skip_special=False)
        end = text.rindex("<|channel|>")
        assert re.fullmatch(r"<\|channel\|>commentary to=f<\|message\|>[0-9]{1,2}<\|call\|>", text[end:])
        whole = "".join(f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant" for text in thoughts)
        assert text[:end] == whole
        assert answer.finish_reason is FinishReason.EOS


@pytest.mark.parametrize("stray", ["<|message|>", "<|channel|>final<|message|>", "<|start|>"])
def test_only_the_end_of_thinking_leads_to_a_grammar_that_writes_its_own_header(
    tmp_path: Path, stray: str
) -> None:
    tokenizer = harmony_tokenizer()
    channel, call = (tokenizer.token_id(f"<|{name}|>") for name in ("channel", "call"))
    constraint = Constraint("lark", f'start: <[{channel}]> "commentary to=f" <[{call}]>')
    with tiny_engine(tmp_path, CONFIG, tokenizer) as engine:
        said = tokenizer.encode(
            f"<|channel|>analysis<|message|>so{stray}no<|end|><|channel|>commentary<|call|>"
        )
        answer = scripted(engine, said, SamplingParams(temperature=0.0, constraint=constraint))
        text = tokenizer.decode(answer.token_ids, skip_special=False)
        assert text.endswith("no<|end|><|start|>assistant<|channel|>commentary to=f<|call|>")


def test_a_thinking_that_is_cut_short_leads_to_an_answer_that_matches(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, CONFIG) as engine:
        chat = engine.chat()
        engine.scripted.script = say(engine, "x" * 200, "no")
        events = []
        for event in chat.send("go", SamplingParams(temperature=0.0, constraint=REGEX)):
            events.append(event)
            if len(events) == 20:
                chat.answer_now()
                engine.scripted.script = []
        assert chat.last is not None
        assert chat.last.reasoning
        assert re.fullmatch(REGEX.text, chat.last.text)
        engine.scripted.script = []


def test_an_answer_goes_on_where_it_was_cut_off(engine: TinyEngine) -> None:
    chat, params = engine.chat(), SamplingParams(temperature=1.0, seed=2, constraint=SCHEMA, logit_bias=SOBER)
    list(chat.send("go", params))
    assert chat.last is not None
    whole = chat.last.text
    chat.reset()
    for _ in chat.send("go", params):
        if len(chat.turns[-1].answer.token_ids) > 14:
            chat.stop()
    assert not chat.last.is_complete
    list(chat.resume(params))
    assert chat.last.text == whole
    assert is_person(whole)


def test_a_first_token_that_was_drawn_ahead(engine: TinyEngine) -> None:
    chat, params = engine.chat(), SamplingParams(temperature=1.0, seed=2, constraint=REGEX, logit_bias=SOBER)
    list(chat.send("go", params))
    assert chat.last is not None
    whole = chat.last.text
    chat.reset()
    chat.prepare("go", wait=True, params=params)
    list(chat.send("go", params))
    assert chat.last.text == whole
    assert re.fullmatch(REGEX.text, whole)
