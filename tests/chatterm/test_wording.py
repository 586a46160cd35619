"""Sentences that are put together, and that nobody is told of commands where there are none."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.screens.chat.commands import COMMANDS
from chatterm.terminal.wording import in_chat, sentences
from engine.errors import ContextFullError, EngineError

ROOT = Path(__file__).parents[2]
SLASHED = re.compile(rf"(?<=[ (;])/({'|'.join(command.name for command in COMMANDS)})\b(?!/)")


def test_parts_are_closed_before_the_next_begins() -> None:
    said = sentences("It is not here; see: chatterm list", "/model loads another", "", "Really?")
    assert said == "It is not here; see: chatterm list. /model loads another. Really?"


@given(st.lists(st.text("ab. !?\"'`)\n", max_size=6), max_size=4))
def test_no_sentence_runs_into_another(parts: list[str]) -> None:
    said = sentences(*parts)
    for part in filter(str.strip, parts):
        assert re.search(re.escape(part.strip()) + r"""([.!?…)"'`]|(?<=[.!?…)"'`]))( |\Z)""", said)


def test_only_a_chat_is_told_of_its_commands() -> None:
    full = ContextFullError("It does not fit", needed=9, available=8)
    assert "/compact" in in_chat(full)
    assert in_chat(EngineError("No.")) == "No."


@pytest.mark.parametrize("folder", ["engine", "models", "chatterm/cli/oneshot.py", "chatterm/cli/models.py"])
def test_what_has_no_commands_names_none(folder: str) -> None:
    """The engine, the models and `-p` know nothing of slash commands, so what they say must not offer any."""
    place = ROOT / folder
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        # Docstrings may speak of anything.
        documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        offered = [n.value for n in texts if id(n) not in documented and SLASHED.search(str(n.value))]
        assert offered == [], file
