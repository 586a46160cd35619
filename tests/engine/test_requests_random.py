"""Clients without a memory get what a chat gets: the same rows, the same logits, and nothing computed twice."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.conversation.history import ThinkCache
from engine.conversation.requests import Requests
from engine.conversation.turns import Answer
from models.text.tokenizer_parts import THINK_MARKERS
from tests.counting import PATIENCE
from tests.covering import each_value_once
from tests.engine.test_chat import CONFIG, GREEDY
from tests.engine.test_chat_paths import copies
from tests.engine.tiny import TinyEngine, close_to, harmony_tokenizer, say, tiny_engine, tiny_tokenizer
from tests.fresh import seeds

KINDS = {
    "think": tiny_tokenizer,
    "marked": lambda: tiny_tokenizer(markers=THINK_MARKERS[1]),
    "harmony": harmony_tokenizer,
}
ANSWERS = ["yes, as far as I can tell from here", "perhaps\n\nnot, who knows what it is"]
GLUE = 30
"""Tokens that a template writes around a message at most; fewer than an answer has."""


def script(engine: TinyEngine, thought: str | None, answer: str, think: bool | None) -> list[int]:
    if think is False and engine.tokenizer.channels is not None:
        return engine.tokenizer.encode(f"{answer}<|return|>")
    return say(engine, thought, answer)


@each_value_once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("think_cache", ["exact", "mask"])
@pytest.mark.parametrize("seed", seeds(2))
def test_a_client_without_a_memory_is_served_as_a_chat_is(
    tmp_path: Path, kind: str, think_cache: ThinkCache, seed: int
) -> None:
    tokenizer, random = KINDS[kind](), Random(seed)
    with (
        tiny_engine(tmp_path, CONFIG, tokenizer) as engine,
        tiny_engine(tmp_path, CONFIG, tokenizer) as other,
    ):
        requests, chat = Requests(engine, think_cache=think_cache), other.chat(think_cache=think_cache)
        messages: list[dict[str, Any]] = []
        bounded = 0
        for number in range(8):
            goes_on = bool(messages)
            if messages and random.random() < 0.25:  # a branch
                kept = random.randrange(len(chat.turns))
                messages, goes_on = messages[: 2 * kept], False
                chat.load(copies(chat.turns[:kept]))
            if random.random() < 0.2:
                engine.evict_all()
                goes_on = False
            think = random.choice([None, None, False])
            thought = None if think is False else random.choice([None, "so be it", "hm " * 5])
            text, answer = (
                f"message {number}",
                random.choice(
                    ["yes, as far as I can tell from here", "perhaps\n\nnot, who knows what it is"]
                ),
            )
            chat.think = "auto" if think is None else "off"
            other.scripted.script = script(other, thought, answer, think)
            other.scripted.logits_seen.clear()
            list(chat.send(text, GREEDY))
            chat.settle(wait=True)

            messages.append({"role": "user", "content": text})
            asked = requests.asked(messages, think=think)
            prompt = chat._history.prompt(chat.turns[:-1], text, think)
            assert (asked.rows.keys, asked.rows.positions) == (prompt.keys, prompt.positions)
            engine.scripted.script = script(engine, thought, answer, think)
            engine.scripted.logits_seen.clear()
            sequence = requests.begin(asked, GREEDY, 0, lambda number, event: None)
            assert sequence.finished.wait(PATIENCE)
            assert close_to(engine.scripted.logits_seen[0], other.scripted.logits_seen[0])
            stats = sequence.stats()
            if goes_on:
                bounded += 1
                assert stats.prompt_tokens - stats.cached_tokens <= len(text) + GLUE
            requests.over(asked, sequence, Answer(answer, thought or ""))
            messages.append({"role": "assistant", "content": answer})
            if think_cache == "exact":
                assert requests.settled(60)
            engine.check()
        assert bounded > 1
