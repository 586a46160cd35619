"""How many random examples a test tries: its usual number, which are the same every time, or as many new ones as asked.

    CHATTERM_FRESH=1000 pytest tests/engine/test_blocks.py      a thousand new ones of each random test
    CHATTERM_FRESH=1:8271 pytest tests/engine/test_spans.py     the one with the seed 8271, which failed before

Hypothesis shows an example that fails, and tries it first the next time. Of the others, the end of the run says how to
run those that failed again.
"""

import os
import re
from collections.abc import Iterable
from secrets import randbits

from hypothesis import HealthCheck, settings

_count, _, _first = os.environ.get("CHATTERM_FRESH", "").partition(":")
FRESH = int(_count or 0)
"""So many new examples; 0 for the usual ones."""
_FIRST = int(_first or randbits(32))
if FRESH:
    os.environ["CHATTERM_FRESH"] = f"{FRESH}:{_FIRST}"  # the workers of pytest-xdist are to draw the same


def examples(usual: int, *allowed: HealthCheck) -> settings:
    """Return the settings of a property that is tried with `usual` examples, whatever time they take."""
    return settings(max_examples=FRESH or usual, suppress_health_check=[HealthCheck.too_slow, *allowed])


def seeds(usual: int) -> range:
    """Return the seeds of the random programs of a test: the first `usual` ones, or new ones."""
    return range(_FIRST, _FIRST + FRESH) if FRESH else range(usual)


def runs_again(failed: Iterable[str]) -> list[str]:
    """Return the commands that run the tests with these ids again which failed with a new seed."""
    told = []
    for name in failed:
        found = [int(part) for part in re.split(r"[\[\]-]", name) if part.isdecimal()]
        told += [f"CHATTERM_FRESH=1:{seed} pytest '{name}'" for seed in found if seed in seeds(0)]
    return told
