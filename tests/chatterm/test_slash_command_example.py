"""The command of examples/slash_command.py, in the chat screen and without one."""

import io
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatterm.cli.inline.chat import Inline, LineInput
from chatterm.commands.completing import choice_completions, completions
from chatterm.commands.registry import plain_commands
from chatterm.commands.reports import help_lines
from chatterm.conversation.headless import Talk
from chatterm.markdown.lines import line_text
from chatterm.screens.chat.commands import COMMANDS
from tests.chatterm.driving import driven
from tests.chatterm.scripted import Script, ScriptedBackend

EXAMPLE = Path(__file__).parents[2] / "examples" / "slash_command.py"


@pytest.fixture(autouse=True)
def example() -> Iterator[None]:
    before = list(COMMANDS)
    runpy.run_path(str(EXAMPLE))
    yield
    COMMANDS[:] = before


async def test_it_runs_in_the_chat_screen() -> None:
    async with driven(ScriptedBackend([Script("A river runs.")])) as driver:
        await driver.send("/words")
        assert driver.errors == ["There are no words to count yet."]
        await driver.send("Tell me of it")
        for argument, count in (("", 7), ("me", 4), ("model", 3)):
            await driver.send(f"/wc {argument}".strip())
            assert driver.notices[-1] == f"{count} words in 1 exchange."


def test_it_runs_without_a_screen() -> None:
    backend, out, err = ScriptedBackend([Script("A river runs.")]), io.StringIO(), io.StringIO()
    lines = LineInput(io.BytesIO(b"Tell me of it\n/words model\n/words all\n"), by_hand=False)
    assert Inline(backend, Talk(backend), lines=lines, out=out, err=err).run() == 1
    assert "3 words in 1 exchange." in out.getvalue()
    assert "/words takes one of: me, model; not 'all'." in err.getvalue()


def test_it_is_offered_and_explained() -> None:
    assert [name for name, _ in completions("/wor")] == ["words"]
    assert choice_completions("/words m") == ["/words me", "/words model"]
    assert any("/words [me|model]" in line_text(line) for line in help_lines(100))
    assert "words" in [command.name for command in plain_commands()]
