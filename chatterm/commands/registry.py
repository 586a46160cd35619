"""The registry of commands. It feeds the parser, the completion, the palette, /help, F1, the keys and docs/chat.md.

The commands are functions decorated with `command`, in `chatterm.screens.chat.commands`; importing that fills it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from chatterm.backends.backend import EngineError
from chatterm.commands.context import ChatContext
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.settings.prompts import PromptFile
    from chatterm.tools.mcp.catalog import ServerPrompt

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    function: Callable[..., None]
    """Gets the chat and, if the command has arguments, what is written behind its name, without the space around it.
    Raises EngineError (one line) if it cannot do what is asked."""
    usage: str
    """The name and the arguments: "/reset", "/model [NAME]". In the arguments, upper case stands for any text."""
    help: str
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """The argument that each key runs the command with; None puts the command into the composer instead."""
    aliases: tuple[str, ...] = ()
    """Names of the same command in other programs."""
    offers: tuple[str, ...] = ()
    """Arguments that completion offers; may be left out if `usage` names all there are."""
    suggest: Callable[[], list[str]] | None = None
    """Returns arguments to offer that are known only at run time; one that ends with a space needs another word."""
    goes_on: Callable[[str], list[str]] | None = None
    """Returns completions of the whole argument, for arguments of more than one word."""
    accepts: Callable[[str], bool] | None = None
    """Returns whether an argument is valid as written, for commands that accept more than they offer."""
    takes_path: bool = False
    """Whether the argument is a file name to complete. It may follow one of the choices; with `goes_on` it must."""
    needs_screen: bool = False
    """Whether the function works with the chat screen only."""
    plain: "Command | None" = None
    """The command as it is in a chat without a screen, if it is another there."""

    def run(self, chat: ChatContext, argument: str) -> None:
        self.function(chat, *([argument] if self.arguments else []))

    @property
    def name(self) -> str:
        return self.usage[1:].partition(" ")[0]

    @property
    def arguments(self) -> str:
        return self.usage.partition(" ")[2]

    @property
    def choices(self) -> tuple[str, ...]:
        """The arguments that completion offers."""
        return self.offers or (tuple(self.arguments.strip("[]").split("|")) if self.takes_words_only else ())

    @property
    def takes_words_only(self) -> bool:
        """Whether no other arguments are allowed than the words in `usage`; never where `goes_on` completes them."""
        return self.arguments.islower() and self.goes_on is None

    @property
    def default(self) -> str | None:
        """The argument that the command runs with when chosen from a list; None if the user must give one first."""
        if not self.arguments or "" in self.keys.values():
            return ""
        return None

    @property
    def key(self) -> str:
        """The keys as the user reads them: "Alt+Left, Alt+Right"."""
        return ", ".join(map(key_text, self.keys))


COMMANDS: list[Command] = []
"""The commands, in the order in which they are listed."""


def command(*about: Any, **more: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as a command; it takes the other fields of `Command`."""

    def register(function: Function) -> Function:
        COMMANDS.append(Command(function, *about, **more))
        return function

    return register


screen_command = partial(command, needs_screen=True)
"""The same for a function that works with the chat screen (`screens.chat.chat.Chat`), not with any `ChatContext`."""


def without_screen(name: str, usage: str = "", about: str = "") -> Callable[[Function], Function]:
    """Return a decorator that registers what the command `name` does in a chat without a screen.

    Its usage and help there are `usage` and `about`, if less is possible than on the screen.
    """

    def register(function: Function) -> Function:
        place, known = next(pair for pair in enumerate(COMMANDS) if pair[1].name == name)
        plain = replace(known, usage=usage or known.usage, help=about or known.help, needs_screen=False)
        COMMANDS[place] = replace(known, plain=replace(plain, function=function))
        return function

    return register


KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "Send"),
    ("Ctrl+J", "New line (also Shift+Enter, if the terminal supports it)"),
    ("c e r t [ ]", "With a message selected: copy, edit, retry, thinking, branch"),
    ("y s x", "With an answer selected: copy, save or run a code block (running asks first)"),
    ("z", "With an answer selected that is JSON: its tree, the tree folded, its text"),
    ("Up, Down", "Your earlier messages, from the first or last line of the text"),
    ("Tab", "Accept the suggestion (after ↑ ↓ Enter, too)"),
    ("Ctrl+C", "Copy the selection, stop the answer, or clear the draft (Ctrl+Z: undo); twice: quit"),
    ("Page Up/Down", "Scroll; Ctrl+Home and Ctrl+End go to the top and bottom"),
    ("Ctrl+P", "Open the command palette"),
    (
        "Ctrl+L, then a key",
        "Stands in for Alt and function keys: Ctrl+L E is Alt+E, Ctrl+L 1 is F1; lists them all",
    ),
)
"""Keys that do not belong to a command."""

LEADER = "ctrl+l"
"""The first key of two-key sequences. No terminal reserves it, and editing text does not need it."""
_SECOND = {"pageup": "b", "pagedown": "space", "ctrl+home": "<", "ctrl+end": ">"}


def second_key(key: str) -> str | None:
    """Return the key that does the same after the leader, for a key that may not reach the program; else None.

    Alt does nothing on a Mac until the Option key is set to be "Meta"; GNOME's terminal reserves F1, F10 and F11,
    desktops reserve Ctrl with arrows; many keyboards have no function keys, and no Home, End and Page keys.
    """
    if key in _SECOND:
        return _SECOND[key]
    if re.fullmatch(r"f\d0?", key):
        return key[1:][-1]
    return key.removeprefix("alt+") if re.fullmatch(r"alt\+[a-z]+", key) else None


_NAMES = {"pageup": "Page Up", "pagedown": "Page Down", "escape": "Esc"}
_COMMAND_LINE = re.compile(r"/([A-Za-z?][\w-]*|\?)?(?:\s+(.*))?\Z", re.DOTALL)


def key_text(key: str) -> str:
    """Return a key of Textual as the user reads it: "alt+up" is "Alt+Up"."""
    return "+".join(_NAMES.get(part, part.title()) for part in key.split("+"))


def is_command(text: str) -> bool:
    """Return whether `text` is meant as a command. A path ("/usr/bin") or text after a space is a message."""
    return _COMMAND_LINE.match(text) is not None


def find(name: str) -> Command | None:
    """Return the command of this name or alias; None if there is none."""
    return next((command for command in all_commands() if name in (command.name, *command.aliases)), None)


def all_commands() -> tuple[Command, ...]:
    """Return the commands, then the user's prompts, then those of MCP servers; earlier names take precedence."""
    own, told = prompt_commands()
    return (*COMMANDS, *own, *told)


def plain_commands() -> list[Command]:
    """Return the commands of a chat without a screen, as they are there."""
    plain = [command.plain or command for command in COMMANDS]
    return [command for command in plain if not command.needs_screen]


def prompt_commands() -> tuple[list[Command], list[Command]]:
    """Return the commands of the user's prompts, and of those of MCP servers."""
    from chatterm.settings.prompts import prompt_files

    taken = {name for command in COMMANDS for name in (command.name, *command.aliases)}
    own = [_of_prompt(file) for file in prompt_files() if file.name not in taken]
    taken |= {command.name for command in own}
    told = [_of_server(name, *found) for name, found in _server_prompts().items() if name not in taken]
    return own, told


def command_key(name: str) -> str:
    """Return the keys of a command as the user reads them."""
    return next(command.key for command in COMMANDS if command.name == name)


def _server_prompts() -> dict[str, tuple[str, "ServerPrompt"]]:
    """Return the prompts of MCP servers by the names of their commands, each after its server."""
    from chatterm.tools.mcp.catalog import known

    return {
        name: (server, prompt)
        for server, offers in known().items()
        for name, prompt in offers.commands(server).items()
    }


def server_prompt(text: str) -> tuple[str, "ServerPrompt", int] | None:
    """Return the server and its prompt if the prompt's argument is being typed, and where that starts; else None."""
    match = re.fullmatch(r"/([A-Za-z][\w-]*__[\w-]+) +(.*)", text)
    found = _server_prompts().get(match[1].lower()) if match else None
    return (*found, match.start(2)) if match is not None and found is not None else None


def _of_server(name: str, server: str, prompt: "ServerPrompt") -> Command:
    def goes_on(text: str) -> list[str]:
        from chatterm.tools.mcp.catalog import left

        return left(prompt, text)

    about = f"{server}: {prompt.about}" if prompt.about else f"A prompt of {server}"
    return Command(_using(name, server), f"/{name} {prompt.usage}".strip(), about, goes_on=goes_on)


def _of_prompt(file: "PromptFile") -> Command:
    usage = f"/{file.name} {file.arguments}".strip()
    return Command(_using(file.name), usage, file.about or "Your prompt", takes_path=file.takes_file)


def _using(name: str, server: str = "") -> Callable[..., None]:
    def use(chat: ChatContext, argument: str = "") -> None:
        chat.use_prompt(name, argument, server)

    return use


def parse(text: str, *, has_screen: bool = True) -> tuple[Command, str]:
    """Parse a command line into the command, as it is with or without a screen, and its argument.

    Raises EngineError (one line) if it is invalid, or needs a screen that there is not.
    """
    match = _COMMAND_LINE.match(text)
    name = (match[1] or "").lower() if match else ""
    command = find(name)
    if command is None:
        raise EngineError(
            f"Unknown command /{one_line(name, 40)}; /help lists them all. To send it as text, start with a space."
        )
    argument, where = ((match[2] if match else "") or "").strip(), ""
    if not has_screen:
        plain = command.plain or command
        if plain.needs_screen:
            raise EngineError(f"/{command.name} needs the chat screen: run chatterm without --inline.")
        where = " without the chat screen" if plain.usage != command.usage else ""
        command = plain
    if argument and not command.arguments:
        raise EngineError(f"/{name} takes no argument{where}.")
    if not argument and command.arguments and not command.arguments.startswith("["):
        raise EngineError(f"/{name} needs {command.arguments}{where}.")
    if argument and command.takes_words_only and argument not in command.choices:
        raise EngineError(
            f"/{name} takes one of: {', '.join(command.choices)}; not {one_line(argument, 40)!r}."
        )
    return command, argument


def tables() -> str:
    """Return the commands and the other keys as Markdown tables, for docs/chat.md."""
    rows = ["| command | key | does |", "|---|---|---|"]
    for command in COMMANDS:
        usage = command.usage.replace("|", "\\|")
        rows.append(f"| `{usage}` | {command.key} | {command.help} |")
    rows += ["", "| key | does |", "|---|---|", *(f"| {key} | {text} |" for key, text in KEYS)]
    return "\n".join(rows) + "\n"
