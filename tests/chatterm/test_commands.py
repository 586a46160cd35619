"""The registry of slash commands: parsing, completion, help."""

from dataclasses import replace
from pathlib import Path

import pytest

from chatterm.app import ChatApp
from chatterm.backends.backend import EngineError
from chatterm.commands.completing import choice_completions, completions, path_start
from chatterm.commands.registry import is_command, parse, tables
from chatterm.commands.reports import help_lines
from chatterm.markdown.lines import line_text
from chatterm.screens.chat.commands import COMMANDS
from chatterm.screens.chat.screen import ChatScreen
from chatterm.widgets.completion import suggestions

PROMISED = {
    "continue",
    "answer",
    "edit",
    "branch",
    "copy",
    "export",
    "import",
    "sessions",
    "rename",
    "settings",
}
PROMISED |= {"cache", "panel", "expand", "stop", "select", "editor"}
PROMISED |= {"help", "reset", "stats", "think", "system", "retry", "undo", "model", "quit"}


def run(text: str) -> tuple[str, ...]:
    """Return the name of the function that a command line calls, and its arguments."""
    command, argument = parse(text)
    called: list[tuple[str, ...]] = []
    recorder = replace(
        command, function=lambda chat, *more: called.append((command.function.__name__, *more))
    )
    recorder.run(None, argument)  # type: ignore[arg-type]
    return called[0]


def test_every_promised_command_is_there_once() -> None:
    names = [command.name for command in COMMANDS]
    assert set(names) >= PROMISED
    everything = names + [alias for command in COMMANDS for alias in command.aliases]
    assert len(set(everything)) == len(everything)


def test_every_command_has_a_key_of_its_own() -> None:
    keys = [key for command in COMMANDS for key in command.keys]
    assert len(set(keys)) == len(keys)
    for command in COMMANDS:
        assert command.keys, command.name
        for argument in command.keys.values():
            assert argument is None or parse(f"/{command.name} {argument}".strip()) == (command, argument)


def test_the_chat_screen_binds_every_key() -> None:
    bound = {binding.key for binding in [*ChatScreen.BINDINGS, *ChatApp.BINDINGS]}  # type: ignore[union-attr]
    assert bound >= {key for command in COMMANDS for key in command.keys}


def test_the_page_has_the_commands_and_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert tables() in page, "put the output of chatterm.commands.registry.tables() into docs/chat.md"


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("/help", ("show_help",)),
        ("/?", ("show_help",)),
        ("/stats", ("show_stats",)),
        ("/reset", ("reset",)),
        ("/RESET", ("reset",)),
        ("/clear", ("reset",)),
        ("/retry", ("retry", "")),
        ("/retry 3", ("retry", "3")),
        ("/undo", ("undo",)),
        ("/redo", ("redo",)),
        ("/think", ("think", "")),
        ("/think  off ", ("think", "off")),
        ("/system You are\nterse.", ("system", "You are\nterse.")),
        ("/model Qwen/Qwen3-0.6B", ("model", "Qwen/Qwen3-0.6B")),
        ("/theme paper", ("theme", "paper")),
        ("/set", ("set_sampling", "")),
        ("/set temperature 0.2", ("set_sampling", "temperature 0.2")),
        ("/continue", ("resume",)),
        ("/edit 2", ("edit", "2")),
        ("/copy code 2", ("copy", "code 2")),
        ("/export md out.md", ("export", "md out.md")),
        ("/sessions a talk", ("sessions", "a talk")),
        ("/quit", ("leave",)),
        ("/exit", ("leave",)),
    ],
)
def test_a_command_line_calls_its_action(text: str, called: tuple[str, ...]) -> None:
    assert run(text) == called


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/nothing", "Unknown command /nothing"),
        ("/", "Unknown command /"),
        ("/reset now", "/reset takes no argument"),
        ("/rename", "/rename needs TITLE"),
        ("/think maybe", "one of: on, off, auto, show, hide"),
        ("/think " + "x" * 600, "not 'x{39}…'"),
        ("/" + "x" * 600, "x…; /help lists them all"),
    ],
)
def test_what_is_no_command_gets_one_clear_line(text: str, said: str) -> None:
    assert is_command(text)
    with pytest.raises(EngineError, match=said) as error:
        parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["/usr/bin/python is what?", " /help", "hello", "1/2", "/etc/passwd"])
def test_paths_and_text_after_a_space_are_messages(text: str) -> None:
    assert not is_command(text)


def test_completion_while_the_name_is_typed() -> None:
    assert completions("/") == [(command.name, command) for command in COMMANDS]
    assert [name for name, _ in completions("/re")] == [
        "retry",
        "redo",
        "reset",
        "rename",
        "regenerate",
        "resume",
    ]
    assert completions("/re t") == completions("hello") == completions("") == []
    assert choice_completions("/think o") == ["/think on", "/think off"]
    assert choice_completions("/think o x") == choice_completions("/nothing o") == []
    assert "/theme paper" in choice_completions("/theme ")
    assert [item.text for item in suggestions("/the")] == ["/theme "]
    assert [item.text for item in suggestions("/think s")] == ["/think show"]


def test_every_alias_completes_to_its_command() -> None:
    for command in COMMANDS:
        for alias in filter(str.isalpha, command.aliases):
            assert (alias, command) in completions(f"/{alias[:2]}")
            (offered,) = [item for item in suggestions(f"/{alias}") if item.text.strip() == f"/{alias}"]
            assert offered.help.startswith(f"/{command.name}: ")
            assert parse(f"/{alias} x" if command.arguments else offered.text)[0] == command
    assert choice_completions("/save m") == ["/save md"]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("/import ", 8),
        ("/import a b.js", 8),
        ("/export notes", 8),
        ("/save md ", 9),
        ("/export json out/x", 13),
        ("/export md", None),
        ("/import", None),
        ("/theme pa", None),
        ("/nothing x", None),
        ("/import a\nb", None),
        ("import x", None),
    ],
)
def test_where_a_command_wants_a_file(text: str, start: int | None) -> None:
    assert path_start(text) == start


@pytest.mark.parametrize("width", [36, 76, 104])
def test_help_names_every_command_and_fits(width: int) -> None:
    lines = [line_text(line) for line in help_lines(width)]
    assert all(len(line) <= width for line in lines)
    for command in COMMANDS:
        assert any(line.startswith(f"/{command.name}") for line in lines)
