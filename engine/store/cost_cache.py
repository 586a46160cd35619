"""The measured times of a token, kept between runs in a file whose contents are checked before they are used."""

import json
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from engine.cache.host_memory import PromptCosts
from models.files import write_whole

LARGEST = 1 << 12
"""Bytes read of a file, at most; ours have about a hundred."""
OLD_S = 7 * 86400.0
"""Measurements are valid for this many seconds; then reading is measured again, even if computing won."""
SLOWEST_S = 1e4
"""The most seconds that a token can plausibly take."""


def keep(path: Path, costs: PromptCosts) -> None:
    """Write the measured times, all or nothing. Raises OSError."""
    known = {"brought_s": costs.brought, "computed_s": costs.computed, "cold_s": costs.cold, "at": time()}
    write_whole(path, json.dumps(known) + "\n")


def load_costs(path: Path) -> PromptCosts:
    """Return what was written within the last week; empty costs if there is no file or it is not one of ours."""
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return PromptCosts()
    if (
        not isinstance(found, dict)
        or not _is_number(found.get("at"))
        or not 0 <= time() - found["at"] < OLD_S
    ):
        return PromptCosts()
    values = found.get("brought_s"), found.get("computed_s"), found.get("cold_s")
    if not all(value is None or (_is_number(value) and 0 < value < SLOWEST_S) for value in values):
        return PromptCosts()
    return PromptCosts(*values)


def _is_number(value: object) -> bool:
    return isinstance(value, float) and isfinite(value)
