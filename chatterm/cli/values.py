"""What the text of an option stands for. Each raises WrongUsage where it is nothing that can be."""

from math import isfinite
from pathlib import Path

from chatterm.cli.usage import WrongUsage
from engine.errors import EngineError, check_device
from models.errors import ModelError


def disk_of(given: float | None) -> float | None:
    """What `--disk-gb` says. Raises WrongUsage."""
    if given is not None and not isfinite(given):
        raise WrongUsage(f"--disk-gb is {given}; it must be a finite number of GB, 0 or more.")
    return given


def device_of(given: str | None) -> str:
    """What `--device` says; of None, the settings, where they can be read. Raises WrongUsage."""
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import load_settings

    if given is None:
        try:
            return load_settings(config_path()).model.device
        except EngineError:  # other commands say it
            return "auto"
    try:
        check_device(given)
    except EngineError as error:
        raise WrongUsage(f"--device: {error}") from None
    return given


def ranks_of(given: str) -> int:
    """What `--tensor-parallel` says; 0: auto. Raises WrongUsage."""
    if given == "auto":
        return 0
    if not given.isascii() or not given.isdigit() or not 0 < int(given[:5]) < 1000:
        raise WrongUsage(f"--tensor-parallel is {given[:20]!r}; it must be auto or a number of GPUs.")
    return int(given)


def seconds_given(text: str, name: str) -> float | None:
    """A time on the command line, in seconds; None: for ever. Raises WrongUsage."""
    from chatterm.settings.durations import seconds_of

    try:
        return seconds_of(text, name)
    except EngineError as error:
        raise WrongUsage(str(error)) from None


def draft_of(given: str | None) -> str | None:
    """The model that `--draft` names, a file by its whole path; None: there is none."""
    if given is None or given.strip().lower() in ("none", "auto"):
        return None if given is None or given.strip().lower() == "none" else "auto"
    from models.hub.sources import parse

    try:
        source = parse(given)
    except ModelError as error:
        raise WrongUsage(f"--draft: {error}") from None
    return str(source.resolve()) if isinstance(source, Path) else given
