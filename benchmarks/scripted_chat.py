"""A chat that is the same for all sides: messages, a stream of thinking and answer for each, and every prompt.

There is no small thinking model, so the weights are those of the default model and the thinking is scripted: the chat
template leaves think spans out of the history as Qwen3's does, and two unused tokens mark them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from benchmarks.rivers import prose
from engine import Engine
from engine.batch import StepBatch
from engine.sampling.sampler import SampledToken
from engine.schedule.answers import Answers
from engine.schedule.sequence import Sequence as Request
from models.text.gguf_tokenizer import parts_from_gguf
from models.text.tokenizer import Message, Tokenizer
from models.text.tokenizer_parts import ThinkMarkers
from models.weights.gguf import read_gguf

TEMPLATE = """\
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}{%- set content = content.split('<repo_name>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<reponame>\\n\\n<repo_name>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""Like Qwen3's template, with this model's markers."""
THINK_START, THINK_END = "<reponame>", "<repo_name>"
Way = Literal["send", "retry", "edit", "undo", "switch", "restart"]
"""How a turn begins: a message, the last one again, another one in place of the third last or of the last, one in the
branch that was left last, or one after the program was ended and started again."""
MESSAGES = (12, 24, 50, 100, 200, 400)
"""Lengths of the messages in tokens, in turn: from a short question to a pasted page."""


WAYS: tuple[Way, ...] = (
    *("send", "send", "send", "retry", "send", "edit", "send", "undo", "send", "switch"),
    *("send", "restart", "send", "retry", "edit", "send", "switch", "send", "restart", "undo"),
)
"""What a person does who looks for the right answer, in turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange of the script."""

    user: str
    stream: list[int]
    """The tokens that the model writes: thinking and answer, with markers and end of turn."""
    prompt: list[int]
    """The chat template's rendering of the conversation up to `user`, tokenised as one text."""
    way: Way = "send"
    path: tuple[int, ...] = ()
    """The exchanges before this one, by their numbers from 0."""
    new: int = 0
    """The tokens of the prompt that no earlier prompt or answer had in this place, at least the last one, whose logits
    are needed."""


def thinking_tokenizer(gguf: Path) -> Tokenizer:
    """Return the default model's tokenizer, changed to that of a thinking model."""
    tokenizer = Tokenizer(replace(parts_from_gguf(read_gguf(gguf).metadata), chat_template=TEMPLATE))
    tokenizer.think_markers = ThinkMarkers(THINK_START, THINK_END, "\n", "\n\n")
    tokenizer.think_start, tokenizer.think_end = map(tokenizer.token_id, (THINK_START, THINK_END))
    return tokenizer


def script(
    tokenizer: Tokenizer, turns: int, think: int, answer: int, seed: int, ways: Sequence[Way] = ("send",)
) -> tuple[str, list[Turn]]:
    """Return the system prompt and the turns, which are made in these `ways`, over and over.

    `think` and `answer` are exact numbers of tokens.
    """
    rng = random.Random(seed)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert None not in (tokenizer.think_start, tokenizer.think_end)
    system = f"You know about rivers and towns. This is conversation {seed}."
    made: list[Turn] = []
    answers: list[list[int]] = []
    for index in range(turns):
        way = ways[index % len(ways)]
        path = _path(way, made)
        if way == "retry":
            user = made[-1].user
        else:
            user = tokenizer.decode(_text(tokenizer, rng, MESSAGES[index % len(MESSAGES)]))
        said = _text(tokenizer, rng, answer)
        # The markers and the line breaks around them are tokens, too: `think` includes them.
        opening, closing = [tokenizer.think_start, *tokenizer.encode("\n")], tokenizer.encode("\n")
        breaks = tokenizer.encode("\n\n")
        thought = _text(tokenizer, rng, think - len(opening) - len(closing) - 1 - len(breaks))
        stream = [*opening, *thought, *closing, tokenizer.think_end, *breaks, *said, end]
        messages: list[Message] = [{"role": "system", "content": system}]
        for number in path:
            messages.append({"role": "user", "content": made[number].user})
            messages.append({"role": "assistant", "content": tokenizer.decode(answers[number])})
        messages.append({"role": "user", "content": user})
        prompt = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))
        before = [[*turn.prompt, *answer, end] for turn, answer in zip(made, answers, strict=True)]
        known = max((_common(prompt, text) for text in before), default=0)
        tokens = [token for token in stream if token is not None]
        made.append(Turn(user, tokens, prompt, way, path, max(len(prompt) - known, 1)))
        answers.append(said)
    return system, made


def _path(way: Way, made: Sequence[Turn]) -> tuple[int, ...]:
    """Return the exchanges before the next one: undo and retry leave out the last, and an edit the last three."""
    if not made:
        return ()
    paths = [(*turn.path, number) for number, turn in enumerate(made)]
    if way == "switch":
        inner = {number for turn in made for number in turn.path}
        others = [path for path in paths[:-1] if path[-1] not in inner]
        return others[-1] if others else paths[-1]
    left_out = {"retry": 1, "undo": 1, "edit": 3}.get(way, 0)
    return paths[-1][: max(len(paths[-1]) - left_out, 0)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text(tokenizer: Tokenizer, rng: random.Random, tokens: int) -> list[int]:
    """Return `tokens` tokens whose text is tokenised to exactly these."""
    while True:
        ids = tokenizer.encode_plain(prose(rng, 2 + tokens // 8))[:tokens]
        text = tokenizer.decode(ids)
        if len(ids) == tokens and text.strip() == text and tokenizer.encode_plain(text) == ids:
            return ids


@dataclass(slots=True)
class ScriptedAnswers(Answers):
    """Samples as usual, and then takes the script's token instead.

    The first token of an answer is a step of its own. The others are taken `stride` at a time and computed in one step,
    which leaves the same rows in the cache as single steps and makes a chat of 20 turns take about a minute.
    """

    stride: int = 64
    answer: Sequence[int] = ()
    """The answer to the message that is being written."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When each step was done, in seconds of `perf_counter`, and its number of rows."""

    def rows_between(self, begin: float, end: float) -> int:
        """Return the rows of the steps that ended after `begin` and not after `end`."""
        return sum(rows for at, rows in self.steps if begin < at <= end)

    def sample(self, sequence: Request, logits: torch.Tensor) -> SampledToken:
        Answers.sample(self, sequence, logits)
        at = len(sequence.generated)
        now = self.answer[at : at + self.stride] if at else self.answer[:1]
        for token_id in now[:-1]:
            self.take(sequence, SampledToken(token_id))
        return SampledToken(now[-1])


def follow_script(engine: Engine, stride: int = 64) -> ScriptedAnswers:
    """Make the engine write the `answer` of the result from now on."""
    step = engine.engine_step
    step.answers = answers = ScriptedAnswers(step.scheduler, step.answers.stop_ids, stride=stride)
    run = step.computing.runner.run

    def noted(batch: StepBatch) -> list[torch.Tensor]:
        logits = run(batch)
        answers.steps.append((perf_counter(), sum(span.count for span in batch.spans)))
        return logits

    step.computing.runner.run = noted  # type: ignore[method-assign]
    return answers


def strokes(message: str, seconds: float, rate: float) -> list[tuple[float, str]]:
    """Return when the draft changes, in seconds after the first key, and to what; Enter comes after `seconds`.

    A person types `rate` characters per second, and Enter is a key like the others. Text that does not fit into this
    time was there before, as if pasted.
    """
    keys = min(max(int(seconds * rate), 1), len(message))
    return [(key / rate, message[: len(message) - keys + key + 1]) for key in range(keys)]
