"""The first `chatterm run` without a model offers a larger one that runs well here besides the small default."""

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from chatterm.backends.backend import EngineError
from chatterm.conversation.figures import rate_text
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.spinner import Spinner
from models.units import bytes_text

if TYPE_CHECKING:
    from engine.machine.expected import Here, Speed

_PATIENCE = 1.5
"""Seconds in which the Hub has to answer: without it, the default should not start any later."""
_LARGEST = 20e9
"""The largest download offered, in bytes."""
_SPARE = 2e9
"""Bytes of the disk to leave free."""
_CONTEXT = 4096
"""The smallest context that must fit, in tokens."""


def first_model(device: str, dtype: str) -> str | None:
    """Ask which model to use, save the choice and return it. Return None, for the default, if this is not the first
    time, the Hub is not in reach, nothing better runs well here, or nothing is chosen.

    Call it on a terminal only. `device` and `dtype` as in ChatOptions.
    """
    from models.hub.download import in_reach

    if not is_first_time():
        return None
    with Spinner(sys.stderr, "Checking this machine"):
        offer = _offer(device, dtype) if in_reach(_repository(), _PATIENCE) else None
    if offer is None:
        return None
    chosen = ask(offer, sys.stdin.readline, sys.stderr)
    if chosen is not None:
        _remember(chosen)
    return chosen


def is_first_time() -> bool:
    """Return whether there has been no chat yet, and no download but maybe the default model's."""
    from chatterm.sessions.schema import database_path
    from models.hub.default import DEFAULT_MODEL
    from models.hub.sources import local_models

    return not database_path().exists() and all(model.name == DEFAULT_MODEL for model in local_models())


def _repository() -> str:
    from models.hub.catalogue import HUB_FILES

    return next(iter(HUB_FILES.values())).repo


def _offer(device: str, dtype: str) -> "tuple[Speed, Speed] | None":
    """Return the best model that runs well here, and the default (0 bytes to download if present); None without one."""
    from engine.machine.bandwidth import keep_bandwidth
    from engine.machine.expected import catalogue_speed
    from engine.machine.report import look_here
    from models.hub.default import DEFAULT_MODEL
    from models.hub.sources import local_models

    here = look_here(device, dtype)
    if here is None:
        return None
    if here.bandwidth is not None:
        keep_bandwidth(here.device, here.bandwidth)
    best = choose_model([catalogue_speed(name, here) for name in candidates(here)], free_disk())
    if best is None:
        return None
    default = catalogue_speed(DEFAULT_MODEL, here)
    return best, replace(default, download_bytes=0) if local_models() else default


def candidates(here: "Here") -> list[str]:
    """Return the names of the models to choose from: quantised ones if they are faster here, else unquantised ones."""
    from models.hub.catalogue import HUB_FILES, QWEN3

    quantized = [name for name, file in HUB_FILES.items() if file.model in QWEN3]
    return quantized if here.keeps_blocks else list(QWEN3)


def free_disk() -> int:
    """Return the free bytes on the disk of the Hub's cache."""
    from models.hub.download import HubSettings

    place: Path = HubSettings.read().cache
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def choose_model(speeds: "Sequence[Speed]", disk: int) -> "Speed | None":
    """Return the largest model that fits, runs faster than people read and is small enough to download; else None."""
    from engine.machine.expected import RUNS_WELL

    good = [
        speed
        for speed in speeds
        if speed.context >= _CONTEXT
        and (speed.tokens_per_s or 0.0) >= RUNS_WELL
        and (speed.download_bytes or 0) <= min(_LARGEST, disk - _SPARE)
    ]
    return max(good, key=lambda speed: speed.parameters, default=None)


def ask(offer: "tuple[Speed, Speed]", read: Callable[[], str], err: TextIO) -> str | None:
    """Show both models on `err`, read the choice and return its name; None at the end of standard input."""
    best, default = offer
    rows = [_row("1", best, "good answers"), _row("2", default, "small and quick, for a first look")]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["Which model do you want? You can switch at any time with /model.", ""]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[4]]))
    err.write("\n".join([*lines, "", ""]))
    while True:
        err.write("1 or 2 (Enter for 2): ")
        err.flush()
        answer = read()
        if not answer:
            err.write("\n")
            return None
        if (chosen := {"1": best, "2": default, "": default}.get(answer.strip())) is not None:
            return chosen.name


def _row(number: str, speed: "Speed", words: str) -> tuple[str, ...]:
    rate = f"about {rate_text(speed.tokens_per_s)} here" if speed.tokens_per_s else ""
    size = f"{bytes_text(speed.download_bytes)} to download" if speed.download_bytes else "on this machine"
    return number, speed.name, size, rate, words


def _remember(model: str) -> None:
    from chatterm.settings.file import store
    from chatterm.settings.paths import config_path

    try:
        store(config_path(), "model", "name", model)
    except EngineError as error:  # the chat works without it
        sys.stderr.write(f"chatterm: {one_line(str(error))}\n")
