"""The user's own prompts: each file `prompts/NAME.md` beside the settings is the slash command /NAME."""

import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from chatterm.settings.paths import check_regular, config_path
from chatterm.settings.settings import SettingsError
from chatterm.terminal.sanitize import cleaned, one_line

LARGEST = 100_000
"""The largest prompt file, in bytes."""
_MOST = 200
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_SLOT = re.compile(r"\$(\$|\*|FILE\b|[1-9])")


@dataclass(frozen=True, slots=True)
class PromptFile:
    name: str
    path: Path
    about: str
    """The first line that is not blank."""
    takes_file: bool
    arguments: str
    """The command's arguments, as its usage shows them."""


def prompts_folder() -> Path:
    return config_path().parent / "prompts"


def prompt_files() -> tuple[PromptFile, ...]:
    """Return the prompt files whose names can be commands, sorted by name."""
    folder = prompts_folder()
    try:
        return _read_folder(folder, folder.stat().st_mtime_ns)
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _read_folder(folder: Path, changed: int) -> tuple[PromptFile, ...]:
    """Read the prompt files. `changed` is when files were added or removed: until then the cache serves."""
    found = []
    for path in sorted(folder.glob("*.md"))[:_MOST]:
        if not _NAME.fullmatch(path.stem):
            continue
        try:
            text = prompt_text(path)
        except SettingsError:
            text = ""
        slots = {match[1] for match in _SLOT.finditer(text)} - {"$"}
        numbers = max((int(slot) for slot in slots if slot.isdigit()), default=0)
        words = ["FILE"] if "FILE" in slots else ["WORD"] * numbers
        about = one_line(next((line for line in text.split("\n") if line.strip()), ""), 100).lstrip("# ")
        found.append(PromptFile(path.stem, path, about, "FILE" in slots, " ".join(words) or "[TEXT]"))
    return tuple(found)


def prompt_text(path: Path) -> str:
    """Read a prompt file. Raises SettingsError (one line) if that fails."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise SettingsError(f"{path} has more than {LARGEST:,} bytes; make it shorter.")
        return cleaned(data.decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text; save it as UTF-8.") from error


def filled_in(name: str, text: str, argument: str) -> str:
    """Fill the argument of a command into its prompt. Raises SettingsError (one line) if a word or file is missing.

    $1 to $9 are the argument's words, $* is all of it, $FILE attaches the file that it names, $$ is a dollar sign.
    Without any of them the argument follows the prompt.
    """
    try:
        words = shlex.split(argument)
    except ValueError:
        words = argument.split()

    def value(match: re.Match[str]) -> str:
        slot = match[1]
        if slot in ("$", "*"):
            return "$" if slot == "$" else argument
        number = 1 if slot == "FILE" else int(slot)
        if number > len(words):
            what = (
                "the name of a file" if slot == "FILE" else f"{number} words, of which ${number} is the last"
            )
            raise SettingsError(f"/{name} needs {what}.")
        word = words[number - 1]
        if slot != "FILE":
            return word
        path = word.removeprefix("@")
        if not _is_there(path):
            raise SettingsError(f"/{name} needs the name of a file; there is no {one_line(path, 80)}.")
        return f'@"{path}"' if " " in path else f"@{path}"

    slots = [match[1] for match in _SLOT.finditer(text) if match[1] != "$"]
    filled = _SLOT.sub(value, text).strip("\n")
    return f"{filled}\n\n{argument}" if argument and not slots else filled


def _is_there(path: str) -> bool:
    """Return whether a file exists; True for URLs and server resources, which are looked up when attached."""
    if re.match(r"[\w-]+:", path):
        return True
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def clashes(taken: set[str]) -> list[str]:
    """Return a line for each prompt file whose command is among the `taken` names."""
    found = [file for file in prompt_files() if file.name in taken]
    return [
        f"{file.path}: /{file.name} is a command of chatterm; give the file another name." for file in found
    ]
