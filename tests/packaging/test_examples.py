"""The examples that need no server: each runs as it stands, with a tiny model in place of its own."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from chatterm.app import ChatApp
from chatterm.backends.backend import Backend
from engine.engine import Engine
from tests.chatterm.driving import Driver
from tests.engine.tiny import tiny_engine
from tests.models.checkpoints import tiny_qwen3

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def output(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the lines that an example prints."""
    config = tiny_qwen3(vocab_size=272, max_position_embeddings=8192)  # bytes are tokens
    with tiny_engine(tmp_path, config) as engine:
        monkeypatch.setattr(Engine, "load", lambda model: engine)
        runpy.run_path(str(EXAMPLES / request.param), run_name="__main__")
        assert engine.is_closed
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("output", ["engine_only.py"], indirect=True)
def test_the_engine_in_thirty_lines(output: list[str]) -> None:
    assert len((EXAMPLES / "engine_only.py").read_text().splitlines()) <= 31
    tokens = [line for line in output if line.count("%") == 3]
    assert len(tokens) == 12
    assert output[-1] == "54 of 54 prompt tokens are in the cache."


@pytest.mark.parametrize("output", ["branches.py"], indirect=True)
def test_both_branches_of_a_chat_stay_in_the_cache(output: list[str]) -> None:
    (none, first), (then, second), (back, _), (again, _) = cached(output)
    assert none == 0
    assert min(then, back) >= first
    assert again >= second


@pytest.mark.parametrize("output", ["chunks.py"], indirect=True)
def test_a_document_is_computed_once(output: list[str]) -> None:
    (chunk,) = [
        int(found[1]) for line in output if (found := re.match(r"CachedChunk\(.* tokens=(\d+),", line))
    ]
    assert chunk > 500
    assert [known >= chunk for known, _ in cached(output)] == [True, True]


def cached(output: list[str]) -> list[tuple[int, int]]:
    """Return what an example says of each prompt: the tokens that were in the cache, and all."""
    found = [re.search(r"\((\d+) of (\d+) prompt tokens were in the cache\)", line) for line in output]
    return [(int(one[1]), int(one[2])) for one in found if one]


def test_no_example_hides_a_package_that_it_imports() -> None:
    """Python looks for modules in the folder of the program first."""
    for example in EXAMPLES.glob("*.py"):
        assert find_spec(example.stem) is None, example.name


async def test_a_chat_with_a_backend_of_ones_own() -> None:
    made = runpy.run_path(str(EXAMPLES / "backend.py"))["BackwardsBackend"]()
    assert [name for name in dir(Backend) if name[0] != "_" and not hasattr(made, name)] == []
    app = ChatApp(made, theme="graphite")
    async with app.run_test() as pilot:
        driver = Driver(app, pilot)
        await driver.idle()
        for message in ("one two three", "four five"):
            await driver.send(message)
            await driver.idle()
        assert driver.answers == ["three two one", "five four"]
        assert driver.errors == []
    assert app.worker.close()
