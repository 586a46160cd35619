"""Random conversations: whatever is done in whatever order, the tokens and the logits are the right ones."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine import ContextFullError, EngineError, SamplingParams
from engine.conversation.chat import Chat, Turn
from engine.conversation.import_turns import infer_thinking
from models.text.tokenizer_parts import THINK_MARKERS
from tests.covering import each_value_once
from tests.engine.test_chat import CONFIG
from tests.engine.test_chat_paths import copies
from tests.engine.tiny import TinyEngine, close_to, harmony_tokenizer, say, tiny_engine, tiny_tokenizer
from tests.fresh import seeds
from tests.models.checkpoints import run

STEPS = 40
OPERATIONS = (
    *("send", "send", "send", "resume", "resume", "retry", "load", "load", "crash", "stop", "now"),
    *("undo", "settle", "draft", "count", "evict", "think"),
)


@each_value_once
@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("think_cache", ["exact", "mask"])
def test_random_conversations(folder: Path, seed: int, think_cache: str) -> None:
    rng, markers = Random(seed), (0, 1, None, 3)[seed % 4]
    blocks = rng.choice([None, 110])
    tokenizer = harmony_tokenizer() if markers is None else tiny_tokenizer(markers=THINK_MARKERS[markers])
    with tiny_engine(folder, CONFIG, tokenizer, context=420, num_blocks=blocks) as engine:
        chat = engine.chat(think_cache=think_cache)
        saved: list[list[Turn]] = [[]]
        for _ in range(STEPS):
            operation = rng.choice(OPERATIONS)
            if operation == "load":
                saved.append(copies(chat.turns))
                chat.load(copies(rng.choice(saved)))
            try:
                one(engine, chat, rng, operation)
            except ContextFullError:
                chat.load(copies(chat.turns[: len(chat.turns) // 2]))
            engine.check()


def one(engine: TinyEngine, chat: Chat, rng: Random, operation: str) -> None:
    text = "".join(rng.choice("ab \u00e9\n\U0001f600 ") for _ in range(rng.randint(0, 30)))
    match operation:
        case "resume" | "retry" if chat.last is None or (operation == "resume" and chat.last.is_complete):
            with pytest.raises(EngineError, match=r"complete|no answer|no message"):
                next(chat.resume() if operation == "resume" else chat.retry())
        case "send" | "resume" | "retry":
            answer(engine, chat, rng, operation, text)
        case "stop" | "now":
            engine.scripted.script = say(engine, "thoughts " * 30, "")
            events = chat.send("s", SamplingParams(temperature=0.0, max_tokens=90))
            for _ in range(rng.randint(1, 8)):
                next(events)
            if operation == "now":
                chat.answer_now()
                list(events)
            events.close()  # type: ignore[attr-defined]
            engine.scripted.script.clear()
        case "crash" if chat.turns:
            turns = copies(chat.turns)
            kept = turns[-1].answer.token_ids[: rng.randint(0, 20)]
            turns[-1].answer = replace(turns[-1].answer, token_ids=kept, finish_reason=None, shown=(0, 0))
            chat.load(turns)
        case "undo":
            chat.undo()
        case "settle":
            chat.settle(wait=rng.random() < 0.5)
        case "draft":
            chat.prepare(text, wait=rng.random() < 0.5)
        case "count":
            chat.count(text)
        case "evict":
            engine.evict_all()
        case "think":
            chat.think = rng.choice(["auto", "on", "off"])


def answer(engine: TinyEngine, chat: Chat, rng: Random, operation: str, text: str) -> None:
    """One answer, often cut short, and whether it is what it should be."""
    params = SamplingParams(temperature=0.0, max_tokens=rng.choice([None, rng.randint(1, 30)]))
    thought = "t" * rng.randint(0, 25) if operation != "resume" and rng.random() < 0.6 else None
    script = say(engine, thought, text)
    engine.scripted.script = [*script, script[-1]]
    engine.scripted.logits_seen.clear()
    known = list(chat.last.token_ids) if operation == "resume" and chat.last is not None else []
    ask = {"send": lambda: chat.send("q", params), "retry": lambda: chat.retry(params)}
    events = list(ask.get(operation, lambda: chat.resume(params))())
    turn = chat.turns[-1]
    said = turn.answer
    assert [*known, *(event.token_id for event in events)] == said.token_ids
    assert said.stats.prompt_tokens == said.stats.cached_tokens + said.stats.prefilled_tokens
    assert said.stats.generated_tokens == len(events)
    if not known:
        assert "".join(event.text for event in events if event.kind == "answer") == said.text
    if chat.think_cache == "exact":
        prompt = chat._history.prompt(
            chat.turns[:-1], turn.user, infer_thinking(chat._format, turn.opening, chat._thinking)
        ).token_ids
        assert close_to(engine.scripted.logits_seen[0], run(engine.scripted.model, [*prompt, *known])[-1])
