"""The one list of commands. It feeds the parser, the completion, the palette, /help, F1, the keys and docs/chat.md."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError
from chatterm.commands.actions import Actions
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.settings.prompts import PromptFile
    from chatterm.tools.mcp.catalog import ServerPrompt


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `run` gets the text after its name, without the space around it."""

    name: str
    arguments: str
    """The arguments as the usage shows them: "[NAME]"; "" for none."""
    help: str
    run: Callable[[Actions, str], None]
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """The argument that each key runs the command with; None puts the command into the composer instead."""
    aliases: tuple[str, ...] = ()
    """Names of the same command in other programs."""
    choices: tuple[str, ...] = ()
    """Arguments that completion offers."""
    is_free: bool = False
    """Whether arguments other than the choices are allowed."""
    suggest: Callable[[], list[str]] | None = None
    """Returns arguments to offer that are known only at run time; one that ends with a space needs another word."""
    goes_on: Callable[[str], list[str]] | None = None
    """Returns completions of the whole argument, for arguments of more than one word."""
    accepts: Callable[[str], bool] | None = None
    """Returns whether an argument is valid as written, for commands that accept more than they offer."""
    takes_path: bool = False
    """Whether the argument is a file name to complete. It may follow one of the choices; with `goes_on` it must."""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".strip()

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


def _theme_names() -> list[str]:
    from chatterm.settings.themes import theme_names

    return theme_names()


def _sampling() -> list[str]:
    from chatterm.commands.sampling import suggested

    return suggested()


def _is_sampling(text: str) -> bool:
    from chatterm.commands.sampling import is_choice

    return is_choice(text)


def _tool_groups() -> list[str]:
    return ["on", "off", "read", "search", "write", "run", "fetch", "all"]


def _presets() -> list[str]:
    from chatterm.settings.presets import WORDS, preset_names

    return [*preset_names(), *(f"{word} " for word in WORDS)]


def _library(text: str) -> list[str]:
    from chatterm.commands.library import suggested

    return suggested(text)


COMMANDS: tuple[Command, ...] = (
    Command("help", "", "Show commands and keys", lambda a, _: a.show_help(), {"f1": ""}, ("?",)),
    Command(
        "stop", "", "Stop the answer; its text is kept", lambda a, _: a.stop(), {"escape": ""}, ("cancel",)
    ),
    Command(
        "continue",
        "",
        "Continue an answer that was stopped",
        lambda a, _: a.resume(),
        {"alt+g": ""},
        ("go",),
    ),
    Command("answer", "", "Stop thinking and answer now", lambda a, _: a.answer_now(), {"alt+a": ""}),
    Command(
        "retry",
        "[N]",
        "Answer again, or N times to choose from; the old answer is kept",
        lambda a, text: a.retry(text),
        {"ctrl+r": ""},
        ("regenerate",),
        choices=("2", "3", "4"),
        is_free=True,
    ),
    Command(
        "compare",
        "MODEL",
        "Answer again together with another model, side by side, to choose from",
        lambda a, text: a.compare(text),
        {"alt+v": None},
    ),
    Command(
        "edit",
        "[N]",
        "Edit message N (default: the last)",
        lambda a, text: a.edit(text),
        {"alt+e": ""},
    ),
    Command(
        "branch",
        "[prev|next]",
        "Switch to another branch",
        lambda a, text: a.branch(text),
        {"alt+left": "prev", "alt+right": "next"},
        choices=("prev", "next"),
    ),
    Command("undo", "", "Undo the last message", lambda a, _: a.undo(), {"alt+u": ""}),
    Command(
        "redo",
        "",
        "Restore the message that /undo removed",
        lambda a, _: a.redo(),
        {"alt+z": ""},
    ),
    Command(
        "select",
        "[prev|next]",
        "Select a message to copy, edit or retry it",
        lambda a, text: a.select(text),
        {"alt+up": "prev", "alt+down": "next"},
        choices=("prev", "next"),
    ),
    Command(
        "copy",
        "[N|code N|all]",
        "Copy an answer, a code block, or everything",
        lambda a, text: a.copy(text),
        {"alt+c": "", "alt+k": "code"},
        choices=("code", "all"),
        is_free=True,
    ),
    Command("find", "[TEXT]", "Search this conversation", lambda a, text: a.find(text), {"ctrl+f": ""}),
    Command(
        "expand",
        "",
        "Expand or collapse the thinking",
        lambda a, _: a.expand(),
        {"ctrl+t": ""},
        ("fold", "collapse"),
    ),
    Command(
        "think",
        "[on|off|auto|show|hide]",
        "Turn thinking on or off, show or hide it",
        lambda a, text: a.think(text),
        {"alt+t": None},
        choices=("on", "off", "auto", "show", "hide"),
    ),
    Command(
        "compact",
        "[files|start|off]",
        "Make room: a summary, no files, or start from here",
        lambda a, text: a.compact(text),
        {"alt+m": ""},
        choices=("files", "start", "off"),
    ),
    Command(
        "pin",
        "[N]",
        "Pin a message, so that /compact leaves it whole; or unpin it",
        lambda a, text: a.pin(text),
        {"alt+p": ""},
        ("unpin",),
    ),
    Command(
        "reset",
        "",
        "Start a new conversation; this one stays saved",
        lambda a, _: a.reset(),
        {"ctrl+n": ""},
        ("clear", "new"),
    ),
    Command(
        "sessions",
        "[NAME]",
        "Find and open an earlier conversation",
        lambda a, text: a.sessions(text),
        {"f6": ""},
        ("resume", "open", "load"),
    ),
    Command(
        "library",
        "[add FILE|open NAME]",
        "List documents, add one, or begin a conversation with some",
        lambda a, text: a.library(text),
        {"alt+l": ""},
        ("documents",),
        choices=("add",),
        is_free=True,
        goes_on=_library,
        takes_path=True,
    ),
    Command("rename", "TITLE", "Rename this conversation", lambda a, text: a.rename(text), {"alt+n": None}),
    Command(
        "export",
        "[md|json|html] [FILE]",
        "Export the conversation to a file",
        lambda a, text: a.export(text),
        {"alt+x": None},
        ("save",),
        choices=("md", "json", "html"),
        is_free=True,
        takes_path=True,
    ),
    Command(
        "import",
        "FILE",
        "Import an exported conversation",
        lambda a, text: a.import_session(text),
        {"alt+i": None},
        takes_path=True,
    ),
    Command(
        "model",
        "[NAME]",
        "Choose a model, or switch to NAME",
        lambda a, text: a.model(text),
        {"f5": ""},
        ("models",),
    ),
    Command(
        "preset",
        "[NAME|save NAME]",
        "List presets, use one, or save these settings as one",
        lambda a, text: a.preset(text),
        {"alt+d": ""},
        is_free=True,
        suggest=_presets,
    ),
    Command(
        "system",
        "[TEXT|none]",
        "Show or set the system prompt",
        lambda a, text: a.system(text),
        {"alt+s": None},
    ),
    Command(
        "set",
        "[NAME [VALUE]]",
        "Show or change this conversation's sampling settings",
        lambda a, text: a.set_sampling(text),
        {"f9": ""},
        is_free=True,
        suggest=_sampling,
        accepts=_is_sampling,
    ),
    Command(
        "tools",
        "[on|off|NAMES]",
        "Choose what the model may ask to use; remove rules",
        lambda a, text: a.tools(text),
        {"alt+o": ""},
        choices=("on", "off"),
        is_free=True,
        suggest=_tool_groups,
    ),
    Command(
        "stats", "", "Statistics of the last answer and the session", lambda a, _: a.show_stats(), {"f2": ""}
    ),
    Command(
        "cache",
        "[why]",
        "Map of the KV cache; why: what each turn reused",
        lambda a, text: a.cache(text),
        {"f3": ""},
        choices=("why",),
    ),
    Command("panel", "", "Show or hide the stats panel", lambda a, _: a.toggle_panel(), {"f4": ""}),
    Command(
        "theme",
        "[NAME]",
        "Choose a colour theme, also for new chats",
        lambda a, text: a.theme(text),
        {"f7": ""},
        is_free=True,
        suggest=_theme_names,
    ),
    Command("settings", "", "View and change the settings", lambda a, _: a.settings(), {"f8": ""}),
    Command("editor", "", "Write the message in your editor", lambda a, _: a.editor(), {"ctrl+g": ""}),
    Command("paste", "", "View pasted text", lambda a, _: a.open_paste(), {"ctrl+o": ""}),
    Command(
        "quit", "", "Quit; everything stays saved", lambda a, _: a.quit(), {"ctrl+q": ""}, ("exit", "bye")
    ),
)

KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "Send"),
    ("Ctrl+J", "New line (also Shift+Enter, if the terminal supports it)"),
    ("c e r t [ ]", "With a message selected: copy, edit, retry, thinking, branch"),
    (
        "y s x",
        "With an answer selected: copy, save or run a code block (running asks first)",
    ),
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
    from chatterm.settings.prompts import prompt_files

    taken = {name for command in COMMANDS for name in (command.name, *command.aliases)}
    own = [_of_prompt(file) for file in prompt_files() if file.name not in taken]
    taken |= {command.name for command in own}
    told = [_of_server(name, *found) for name, found in _server_prompts().items() if name not in taken]
    return (*COMMANDS, *own, *told)


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
    def run(actions: Actions, argument: str) -> None:
        actions.use_server_prompt(server, name, argument)

    def goes_on(text: str) -> list[str]:
        from chatterm.tools.mcp.catalog import left

        return left(prompt, text)

    about = f"{server}: {prompt.about}" if prompt.about else f"A prompt of {server}"
    return Command(name, prompt.usage, about, run, goes_on=goes_on)


def _of_prompt(file: "PromptFile") -> Command:
    def run(actions: Actions, argument: str) -> None:
        actions.use_prompt(file.name, argument)

    return Command(file.name, file.arguments, file.about or "Your prompt", run, takes_path=file.takes_file)


def parse(text: str) -> tuple[Command, str]:
    """Parse a command line into the command and its argument. Raises EngineError (one line) if it is invalid."""
    match = _COMMAND_LINE.match(text)
    name = (match[1] or "").lower() if match else ""
    command = find(name)
    if command is None:
        raise EngineError(
            f"Unknown command /{one_line(name, 40)}; /help lists them all. To send it as text, start with a space."
        )
    argument = ((match[2] if match else "") or "").strip()
    if argument and not command.arguments:
        raise EngineError(f"/{name} takes no argument.")
    if not argument and command.arguments and not command.arguments.startswith("["):
        raise EngineError(f"/{name} needs {command.arguments}.")
    if argument and command.choices and not command.is_free and argument not in command.choices:
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
