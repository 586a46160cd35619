"""The prompts and resources that a server offers to a person. They are saved beside its log at every start, so that
they can be typed and completed before it runs again."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chatterm.backends.backend import EngineError
from chatterm.sessions.schema import data_folder
from chatterm.settings.file import write
from chatterm.terminal.sanitize import cleaned, is_safe, one_line

MOST = 200
"""The most prompts, and the most resources, of one server."""
_MOST_ARGUMENTS = 20
_MOST_NAME = 128
_MOST_URI = 1_000
_LARGEST = 2_000_000
"""The largest saved file that is read, in bytes."""
_OTHER = re.compile(r"[^a-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class PromptArgument:
    name: str
    about: str = ""
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class ServerPrompt:
    """A prompt as its server describes it, with bounded texts."""

    name: str
    about: str = ""
    arguments: tuple[PromptArgument, ...] = ()

    @property
    def ordered(self) -> list[PromptArgument]:
        """The arguments in the order a person writes them: required ones first."""
        return sorted(self.arguments, key=lambda argument: not argument.is_required)

    @property
    def usage(self) -> str:
        return " ".join(a.name if a.is_required else f"[{a.name}]" for a in self.ordered)


@dataclass(frozen=True, slots=True)
class ServerResource:
    """A resource or a resource template (`is_template`), with bounded texts."""

    uri: str
    name: str = ""
    about: str = ""
    is_template: bool = False


@dataclass(frozen=True, slots=True)
class Offers:
    prompts: tuple[ServerPrompt, ...] = ()
    resources: tuple[ServerResource, ...] = ()

    def commands(self, server: str) -> dict[str, ServerPrompt]:
        """Return the prompts by the names of their slash commands: `server__prompt`."""
        found: dict[str, ServerPrompt] = {}
        for prompt in self.prompts:
            plain = _OTHER.sub("_", prompt.name.lower()).strip("_") or "prompt"
            name, number = f"{server.lower()}__{plain}", 2
            while name in found:  # two that differ only in replaced characters
                name, number = f"{server.lower()}__{plain}_{number}", number + 1
            found[name] = prompt
        return found

    def uri(self, written: str) -> str:
        """Return the URI of the resource that a person named by its URI, or by a name that only one has."""
        named = [resource.uri for resource in self.resources if resource.name == written]
        return named[0] if len(named) == 1 and not self.has(written) else written

    def has(self, uri: str) -> bool:
        return any(resource.uri == uri for resource in self.resources)


def parse_prompt(told: Any) -> ServerPrompt | None:
    """Parse a server's description of a prompt; return None for one that cannot be typed."""
    arguments = []
    for argument in list(told.arguments or ())[:_MOST_ARGUMENTS]:
        if not _is_word(argument.name) or "=" in argument.name:
            return None
        about = _about(argument.description)
        arguments.append(PromptArgument(argument.name, about, bool(argument.required)))
    if not _is_line(told.name, _MOST_NAME):
        return None
    return ServerPrompt(told.name, _about(told.description or told.title), tuple(arguments))


def parse_resource(told: Any) -> ServerResource | None:
    """Parse the description of a resource or template; return None for one that cannot be typed."""
    template = getattr(told, "uri_template", None)
    uri = str(template or told.uri)
    if not _is_word(uri, _MOST_URI) or '"' in uri:
        return None
    name = told.name if _is_line(told.name, _MOST_NAME) else ""
    return ServerResource(uri, name, _about(told.description or told.title), template is not None)


def given(name: str, prompt: ServerPrompt, text: str) -> dict[str, str]:
    """Parse a prompt's arguments: `name=value`, or values in order, of which the last takes the rest.

    Raises EngineError (one line) if a required argument is missing or there are too many.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    names = [argument.name for argument in prompt.ordered]
    for word in _words(text):
        key, equals, value = word.partition("=")
        if equals and key in names:
            found[key] = value
        else:
            rest.append(word)
    free = [argument for argument in names if argument not in found]
    while rest and free:
        argument = free.pop(0)
        found[argument] = " ".join(rest) if not free else rest[0]
        rest = [] if not free else rest[1:]
    if rest:
        raise EngineError(
            f"/{name} takes {prompt.usage or 'no arguments'}; {one_line(rest[0], 40)!r} is too much."
        )
    missing = [a.name for a in prompt.arguments if a.is_required and not found.get(a.name)]
    if missing:
        raise EngineError(f"/{name} needs {', '.join(missing)}.")
    return found


@dataclass(frozen=True, slots=True)
class DraftArgument:
    """The argument of a prompt that is being typed at the end of a text."""

    name: str
    begun: str
    """The typed part of its value."""
    start: int
    """Where its name begins in the text."""
    given: Mapping[str, str]
    """The arguments before it."""

    def line(self, text: str, value: str) -> str:
        """Return `text` with the argument completed to `value`."""
        return f"{text[: self.start]}{self.name}={shlex.quote(value) if value else ''}"


def left(prompt: ServerPrompt, text: str) -> list[str]:
    """Return the completions of `text` while the name of an argument is being typed."""
    start = text.rfind(" ") + 1
    word, asked = text[start:], writing(prompt, text)
    if asked is None or asked.begun or "=" in word:
        return []
    names = [argument.name for argument in prompt.ordered if argument.name not in asked.given]
    return [f"{text[:start]}{name}=" for name in names if name.startswith(word)]


def writing(prompt: ServerPrompt, text: str) -> DraftArgument | None:
    """Return the argument being typed, or None if none is left."""
    start = text.rfind(" ") + 1
    word, before = text[start:], text[:start]
    known: dict[str, str] = {}
    for one in _words(before):
        key, _, value = one.partition("=")
        known[key] = value
    free = [argument.name for argument in prompt.ordered if argument.name not in known]
    key, equals, value = word.partition("=")
    if equals:
        return DraftArgument(key, value.strip("'\""), start, known) if key in free else None
    name = next((name for name in free if name.startswith(word)), None)
    return DraftArgument(name, "", start, known) if name is not None else None


# --- saved offers ---


def offers_path(server: str) -> Path:
    return data_folder() / "mcp" / f"{server}.offers.json"


def keep(server: str, offers: Offers) -> None:
    """Save a server's offers. Raises SettingsError."""
    path = offers_path(server)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(path, json.dumps(asdict(offers)) + "\n")


def forget(server: str) -> None:
    offers_path(server).unlink(missing_ok=True)


def known() -> Mapping[str, Offers]:
    """Return the saved offers by server."""
    folder = data_folder() / "mcp"
    try:
        return _read(folder, folder.stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=4)
def _read(folder: Path, changed: int) -> Mapping[str, Offers]:
    """Read the saved offers; `changed`, the folder's modification time, makes the cache miss after a change."""
    found = {}
    for path in sorted(folder.glob("*.offers.json"))[:64]:
        try:
            if path.stat().st_size <= _LARGEST:
                found[path.name.removesuffix(".offers.json")] = _offers(json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue  # the next start of the server rewrites it
    return found


def _offers(data: Any) -> Offers:
    prompts = []
    for item in data["prompts"][:MOST]:
        arguments = tuple(PromptArgument(**argument) for argument in item["arguments"])
        prompts.append(ServerPrompt(item["name"], item["about"], arguments))
    return Offers(tuple(prompts), tuple(ServerResource(**item) for item in data["resources"][:MOST]))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _about(text: object) -> str:
    return one_line(cleaned(str(text or ""))[:1_000], 200)


def _is_line(text: object, most: int) -> bool:
    return isinstance(text, str) and 0 < len(text) <= most and is_safe(text) and text.isprintable()


def _is_word(text: object, most: int = _MOST_NAME) -> bool:
    return _is_line(text, most) and not any(character.isspace() for character in str(text))
