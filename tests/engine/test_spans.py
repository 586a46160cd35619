"""Loops of calls under the policy `mask`: their thoughts leave the view at once, and nothing is computed again."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from chatterm.tool_calls.format import call_marks
from engine.conversation.requests import Requests
from engine.conversation.turns import Answer
from tests.chatterm.server.agent_formats import FORMATS, Format
from tests.counting import PATIENCE
from tests.engine.test_chat import GREEDY, masked_reference
from tests.engine.tiny import TinyEngine, close_to, tiny_engine
from tests.fresh import FRESH, seeds
from tests.models.checkpoints import tiny_qwen3

CONFIG = tiny_qwen3(vocab_size=272, max_position_embeddings=4096)
LOOPS = [format for format in FORMATS if format.thinks and format.shows == "last"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
GLUE = 90
"""What a template writes between two answers, in letters at most."""
RESULT = "rain and a little wind"


class Loop:
    """A client that sends everything back, and what a model that saw it that way computes."""

    def __init__(self, engine: TinyEngine, requests: Requests, format: Format) -> None:
        self.engine, self.requests, self.format = engine, requests, format
        self.messages: list[dict[str, Any]] = []
        self.stream: list[int] = []
        """Every token that was ever computed, in its place."""
        self.hidden: list[tuple[int, int, int]] = []
        """Rows of the stream that are hidden from a row on."""
        self.open: list[tuple[int, int]] = []
        self.number = 0
        self.together = 0
        """The most thoughts that left the view at once."""
        self.is_gone = True
        """Nothing of it is in the cache."""

    def ask(self, thought: str, call: bool, most: int) -> None:
        """One answer; so many tokens of its prompt may be computed."""
        engine, encode = self.engine, self.engine.tokenizer.encode
        self.number += 1
        given = f'{{"where": "place {self.number}"}}'
        text = "" if call else f"answer {self.number}"
        script = self.format.called("look", given, thought) if call else self.format.answered(text, thought)
        marks = call_marks(engine.tokenizer)
        asked = self.requests.asked(self.messages, think=self.format.setting, tools=TOOLS, shown=marks)
        engine.scripted.script, said = encode(script), encode(script)
        engine.scripted.logits_seen.clear()
        sequence = self.requests.begin(asked, GREEDY, 0, lambda number, event: None)
        assert sequence.finished.wait(PATIENCE)
        assert sequence.error is None
        self.follow(asked.rows.token_ids, asked.rows.positions)
        expected = masked_reference(CONFIG, self.stream, self.hidden)[-1]
        assert close_to(engine.scripted.logits_seen[0], expected)
        start = len(self.stream)
        self.stream += said
        if thought:
            lead = encode(self.format.answered("", thought))
            mark = encode(self.format.answered("")) if self.format.name == "harmony" else lead[-1:]
            # The prompt has written so many tokens of the span; of GLM's marks one stays in view.
            opening, closing = {"glm": (1, 1), "qwen": (2, 0)}.get(self.format.name, (0, 0))
            self.open.append((start - opening, start + len(lead) - len(mark) - closing))
        calls = [("look", {"where": f"place {self.number}"})] if call else []
        self.requests.over(asked, sequence, Answer(text, thought), calls)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call:
            function = {"name": "look", "arguments": calls[0][1]}
            message["tool_calls"] = [{"id": f"{self.number:09}", "type": "function", "function": function}]
        self.messages.append(message)
        stats = sequence.stats()
        assert self.is_gone or stats.prompt_tokens - stats.cached_tokens <= most
        self.is_gone = False

    def follow(self, ids: list[int], positions: list[int]) -> None:
        """The rows of a prompt are those of the stream that are in view, and what is new."""
        if self.messages[-1]["role"] == "user":
            self.together = max(self.together, len(self.open))
            self.hidden += [(*span, len(self.stream)) for span in self.open]
            self.open = []
        gone = {at for start, end, _ in self.hidden for at in range(start, end)}
        if self.stream and self.format.name == "harmony":
            # In channels what ends a turn is another token in the history; it was never computed.
            self.stream.pop()
            self.hidden = [(a, b, min(until, len(self.stream))) for a, b, until in self.hidden]
        kept = [at for at in range(len(self.stream)) if at not in gone]
        assert ids[: len(kept)] == [self.stream[at] for at in kept]
        assert positions[: len(kept)] == kept
        self.stream += ids[len(kept) :]
        assert positions[len(kept) :] == [*range(len(self.stream))][len(self.stream) - len(ids) + len(kept) :]


def thought(random: Random, format: Format) -> str:
    return random.choice([*([] if format.is_open else [""]), "so be it", "hm " * 20])


@pytest.mark.parametrize("format", LOOPS, ids=str)
@pytest.mark.parametrize("seed", seeds(3))
def test_thoughts_of_a_loop_are_hidden_together(tmp_path: Path, format: Format, seed: int) -> None:
    random = Random(seed)
    with tiny_engine(tmp_path, CONFIG, format.tokenizer()) as engine:
        loop, thoughts = Loop(engine, Requests(engine, think_cache="mask"), format), [0, 0, 0]
        for turn in range(3):
            text = f"question {turn}"
            loop.messages.append({"role": "user", "content": text})
            for _ in range(random.randint(0, 3)):
                loop.ask(said := thought(random, format), True, len(text) + GLUE)
                thoughts[turn] += said != ""
                id, text = loop.messages[-1]["tool_calls"][0]["id"], RESULT
                loop.messages.append({"role": "tool", "tool_call_id": id, "content": text})
            loop.ask(said := thought(random, format), False, len(text) + GLUE)
            thoughts[turn] += said != ""
            if random.random() < 0.3:
                engine.evict_all()
                loop.is_gone = True
        assert loop.together == max(thoughts[:-1])
        assert loop.together > 1 or FRESH
        engine.check()
