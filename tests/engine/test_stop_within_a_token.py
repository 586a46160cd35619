"""A stop string that begins within a token: what comes before it is all that the model sees of the answer later."""

from pathlib import Path

import pytest

from engine import FinishReason, SamplingParams
from engine.conversation.requests import Requests
from engine.conversation.turns import Answer
from tests.engine.test_requests import user
from tests.engine.tiny import TinyEngine, say, tiny_engine, tiny_tokenizer

MERGES = [
    *[("p", "a"), ("s", "s"), ("pa", "ss"), ("w", "o"), ("r", "d"), ("wo", "rd"), ("pass", "word")],
    ("\u00a9", "s"),  # the second byte of "é", and an "s"
]
CASES = [
    ("The password is", "word", "The pass"),
    ("The password", "ass", "The p"),
    ("The passwords", "password", "The "),
    ("password", "password", ""),
    ("passpassword", "ord", "passpassw"),
    ("The password!", "d!", "The passwor"),
    ("les étés sont", "s so", "les été"),
    ("les étés", "é", "les "),
    ("caféss", "s", "café"),
]


@pytest.fixture
def engine(tmp_path: Path):
    with tiny_engine(tmp_path, tokenizer=tiny_tokenizer(merges=MERGES)) as engine:
        yield engine


@pytest.mark.parametrize("thought", [None, "the password"])
@pytest.mark.parametrize(("said", "stop", "shown"), CASES)
def test_a_chat_goes_on_from_what_was_shown(
    engine: TinyEngine, said: str, stop: str, shown: str, thought: str | None
) -> None:
    chat = engine.chat()
    engine.scripted.script = say(engine, thought, said)
    list(chat.send("go", SamplingParams(temperature=0.0, stop=(stop,))))
    assert (chat.last.text, chat.last.finish_reason) == (shown, FinishReason.STOP)
    assert engine.tokenizer.decode(chat.last.content_ids) == shown
    engine.scripted.script = say(engine, None, "fine")
    list(chat.send("go on", SamplingParams(temperature=0.0)))
    text = engine.tokenizer.decode(chat.history.token_ids, skip_special=False)
    assert f"<|im_start|>assistant\n{shown}<|im_end|>" in text


@pytest.mark.parametrize(("said", "stop", "shown"), CASES)
def test_what_a_client_sends_back_is_all_that_is_known_of_it(
    engine: TinyEngine, said: str, stop: str, shown: str
) -> None:
    requests, params = Requests(engine), engine.default_params(stop=(stop,))
    asked = requests.asked([user("one")])
    engine.scripted.script = say(engine, None, said)
    sequence = requests.begin(asked, params, 0, lambda number, event: None)
    sequence.finished.wait()
    requests.over(asked, sequence, Answer(shown))
    more = [user("one"), {"role": "assistant", "content": shown}, user("two")]
    text = engine.tokenizer.decode(requests.asked(more).rows.token_ids, skip_special=False)
    assert f"<|im_start|>assistant\n{shown}<|im_end|>" in text
