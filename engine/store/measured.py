"""What a token was measured to take, kept between runs. What is in the file is never trusted, only looked up."""

import json
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from engine.cache.host_memory import Costs
from models.files import write_whole

LARGEST = 1 << 12
"""Bytes of a file that is read at all; one of ours has about a hundred."""
OLD_S = 7 * 86400.0
"""So long it holds: where computing won, reading is measured again after it."""
SLOWEST_S = 1e4
"""No token takes longer."""


def keep(path: Path, costs: Costs) -> None:
    """Write what is known now, whole or not at all. Raises OSError."""
    known = {"brought_s": costs.brought, "computed_s": costs.computed, "at": time()}
    write_whole(path, json.dumps(known) + "\n")


def kept(path: Path) -> Costs:
    """What was written less than a week ago. Nothing is known where there is no file, or one that is none of ours."""
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return Costs()
    if (
        not isinstance(found, dict)
        or not _is_number(found.get("at"))
        or not 0 <= time() - found["at"] < OLD_S
    ):
        return Costs()
    values = found.get("brought_s"), found.get("computed_s")
    if not all(value is None or (_is_number(value) and 0 < value < SLOWEST_S) for value in values):
        return Costs()
    return Costs(*values)


def _is_number(value: object) -> bool:
    return isinstance(value, float) and isfinite(value)
