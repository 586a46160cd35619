"""Functions that turn the value of an option into what it stands for. They raise WrongUsage if it is invalid."""

from math import isfinite
from pathlib import Path

from chatterm.cli.usage import WrongUsage
from engine.errors import EngineError, check_device
from models.errors import ModelError


def parse_disk(given: float | None) -> float | None:
    """Return the value of `--disk-gb`, in GB; None if it was not given. Raises WrongUsage unless it is finite."""
    if given is not None and not isfinite(given):
        raise WrongUsage(f"--disk-gb is {given}; it must be a finite number of GB, 0 or more.")
    return given


def parse_device(given: str | None) -> str:
    """Return the device that `--device` names; if it was not given, the one in the settings.

    Return "auto" if the settings cannot be read. Raises WrongUsage if `given` is no name of a device.
    """
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import load_settings

    if given is None:
        try:
            return load_settings(config_path()).model.device
        except EngineError:  # other commands report it
            return "auto"
    try:
        check_device(given)
    except EngineError as error:
        raise WrongUsage(f"--device: {error}") from None
    return given


def parse_ranks(given: str) -> int:
    """Return the number of GPUs that `--tensor-parallel` asks for; 0 for "auto". Raises WrongUsage."""
    if given == "auto":
        return 0
    if not given.isascii() or not given.isdigit() or not 0 < int(given[:5]) < 1000:
        raise WrongUsage(f"--tensor-parallel is {given[:20]!r}; it must be auto or a number of GPUs.")
    return int(given)


def seconds_given(text: str, name: str) -> float | None:
    """Return a time from the command line in seconds; None means no limit. Raises WrongUsage."""
    from chatterm.settings.durations import parse_duration

    try:
        return parse_duration(text, name)
    except EngineError as error:
        raise WrongUsage(str(error)) from None


def parse_draft(given: str | None) -> str | None:
    """Return the model that `--draft` names, files by their full path, or "auto"; None for none. Raises WrongUsage."""
    if given is None or given.strip().lower() in ("none", "auto"):
        return None if given is None or given.strip().lower() == "none" else "auto"
    from models.hub.sources import parse

    try:
        source = parse(given)
    except ModelError as error:
        raise WrongUsage(f"--draft: {error}") from None
    return str(source.resolve()) if isinstance(source, Path) else given
