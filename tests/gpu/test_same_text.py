"""How far "the same seed gives the same text" holds on a GPU, and how much of the rest agrees.

The size of a piece of a prompt selects kernels and tiles, so the last bits of its KV depend on where it was cut. The
claim is that the same work, done twice, gives the same text. The last test claims nothing and prints how many of N
cases agree (`pytest -s tests/gpu/test_same_text.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest
import torch

from engine import Engine, SamplingParams
from engine.conversation.chat import Chat
from tests.engine.inside import evict_all
from tests.engine.test_chat_paths import copies
from tests.gpu.engines import CONFIGS, an_engine
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = 32


@pytest.fixture(scope="module", params=["sdpa", "triton", "flash"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if request.param != "sdpa":
        pytest.importorskip({"triton": "triton", "flash": "flash_attn"}[request.param])
    folder = write_checkpoint(tmp_path_factory.mktemp("same"), CONFIGS["qwen3"])
    with an_engine(folder, torch.bfloat16, attention=request.param, block_size=None) as engine:
        yield engine


@dataclass
class Case:
    """A short conversation, and one more message."""

    messages: list[str]
    params: SamplingParams
    random: Random

    @classmethod
    def number(cls, number: int) -> "Case":
        random = Random(number)
        messages = ["".join(random.choices("abcdefgh \n", k=random.randint(5, 150))) + "." for _ in range(2)]
        return cls(messages, SamplingParams(temperature=1.0, seed=number, max_tokens=40), random)

    def begin(self, engine: Engine) -> Chat:
        """Return the conversation before the last message, computed anew."""
        evict_all(engine)
        chat = engine.chat(think="off")
        list(chat.send(self.messages[0], self.params))
        return chat

    def ask(self, chat: Chat) -> list[int]:
        return [event.token_id for event in chat.send(self.messages[1], self.params)]

    def afresh(self, engine: Engine) -> list[int]:
        return self.ask(self.begin(engine))


def retried(case: Case, engine: Engine) -> list[int]:
    chat = case.begin(engine)
    case.ask(chat)
    return [event.token_id for event in chat.retry(case.params)]


def typed(case: Case, engine: Engine) -> list[int]:
    chat = case.begin(engine)
    text = case.messages[1]
    for end in sorted(case.random.sample(range(1, len(text)), 3)):
        chat.prepare(text[:end], wait=True)
    return case.ask(chat)


def drawn_ahead(case: Case, engine: Engine) -> list[int]:
    chat = case.begin(engine)
    chat.prepare(case.messages[1], wait=True, params=case.params)
    return case.ask(chat)


def stopped_and_resumed(case: Case, engine: Engine) -> list[int]:
    chat = case.begin(engine)
    events = chat.send(case.messages[1], case.params)
    for _ in range(case.random.randint(1, 20)):
        next(events)
    events.close()  # type: ignore[attr-defined]
    assert chat.last is not None
    left = 40 - len(chat.last.token_ids)
    if left > 0:
        list(chat.resume(SamplingParams(temperature=1.0, seed=case.params.seed, max_tokens=left)))
    return list(chat.last.token_ids)


def opened_again(case: Case, engine: Engine) -> list[int]:
    turns = copies(case.begin(engine).turns)
    evict_all(engine)
    chat = engine.chat(think="off")
    chat.load(turns)
    return case.ask(chat)


def beside_another(case: Case, engine: Engine) -> list[int]:
    chat = case.begin(engine)
    other = engine.stream(engine.tokenizer.encode("Something else."), case.params)
    next(other)
    return case.ask(chat)


def test_the_same_conversation_twice_gives_the_same_text(engine: Engine) -> None:
    for number in range(CASES):
        case = Case.number(number)
        first = case.afresh(engine)
        assert len(first) == 40
        assert case.afresh(engine) == first


def test_every_retry_with_the_same_seed_gives_the_same_text(engine: Engine) -> None:
    for number in range(CASES):
        case = Case.number(number)
        chat = case.begin(engine)
        case.ask(chat)
        first, second = ([event.token_id for event in chat.retry(case.params)] for _ in range(2))
        assert first == second


def test_how_many_of_the_other_ways_agree(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    ways: dict[str, Callable[[Case, Engine], list[int]]] = {
        "a retry, beside the first answer": retried,
        "a message warmed while it was typed": typed,
        "a first token drawn ahead": drawn_ahead,
        "an answer stopped and resumed": stopped_and_resumed,
        "a session opened again": opened_again,
        "an answer beside another one": beside_another,
    }
    expected = [Case.number(number).afresh(engine) for number in range(CASES)]
    for name, way in ways.items():
        agree = sum(way(Case.number(n), engine) == expected[n] for n in range(CASES))
        with capsys.disabled():
            print(f"\n{engine.figures().attention}: {name}: {agree} of {CASES} texts agree", end="")
