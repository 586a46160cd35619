"""The files with choices: one that comes with each kind of GPU, and one that the tuner writes for a model on a machine.

The content of the latter is never trusted, only looked up.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from typing import Any

from models.files import write_whole
from models.hub.catalogue import cache_folder

VERSION = 1
TABLES = Path(__file__).parents[1] / "cuda" / "configs"
LARGEST = 1 << 18
"""The most bytes of a file that is read at all; a normal one has a few thousand."""
OLD_S = 3600.0
"""Seconds after which leftovers of a killed process are swept away."""
Identity = Mapping[str, str]
"""The conditions of a measurement: the GPU, its driver, the compiler, the kernels, the model."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The choices for a model, and what they gain."""

    model: str
    """The model's name, for people."""
    chosen: dict[str, tuple[int, ...]]
    seconds: dict[str, tuple[float, float]]
    """Seconds of a step by number of rows: with the defaults, and with the choices."""

    @property
    def gain(self) -> float:
        """The share of a token's time that is saved at batch 1."""
        before, after = next(iter(self.seconds.values()), (1.0, 1.0))
        return 1 - after / before


@dataclass(frozen=True, slots=True)
class Rule:
    """A choice for everything whose properties lie within bounds."""

    bounds: Mapping[str, tuple[float, float]]
    """The least and the most of some properties."""
    numbers: tuple[int, ...] | None
    """None: no kernel of ours."""
    narrows: bool
    """Whether fewer warps are used where there are too few columns."""

    def fits(self, properties: Mapping[str, int]) -> bool:
        """Return whether all bounded properties lie within their bounds."""
        return all(least <= properties[name] <= most for name, (least, most) in self.bounds.items())


@dataclass(frozen=True, slots=True)
class Table:
    """The choices for a kind of GPU before anything has been measured on it: by name, or else by the first rule."""

    room: int | None
    """Bytes of shared memory in which a program may hold weights; None: as much as fits twice."""
    chosen: Mapping[str, tuple[int, ...]]
    """As the tuner writes them (see `KernelConfigs.product`)."""
    rules: Mapping[str, tuple[Rule, ...]]
    candidates: Mapping[str, tuple[tuple[int, ...], ...]]
    """The choices worth measuring. Which is best depends on the GPU."""

    def rule(self, kernel: str, **properties: int) -> Rule:
        """Return the first rule for `kernel` that fits."""
        return next(rule for rule in self.rules[kernel] if rule.fits(properties))


@cache
def load_table(name: str = "default") -> Table:
    """Return the table `name` ("sm_90"); what it lacks is as in the default, and so is all for an unknown name."""
    path = TABLES / f"{name}.json"
    content = json.loads(path.read_bytes()) if path.exists() else {}
    default = load_table() if name != "default" else Table(None, {}, {}, {})
    rules = {kernel: tuple(map(_rule, rules)) for kernel, rules in content.get("rules", {}).items()}
    candidates = {kernel: tuple(map(tuple, found)) for kernel, found in content.get("candidates", {}).items()}
    return Table(
        content.get("room"),
        {**default.chosen, **{name: tuple(numbers) for name, numbers in content.get("chosen", {}).items()}},
        {
            kernel: rules.get(kernel, ()) + default.rules.get(kernel, ())
            for kernel in {**default.rules, **rules}
        },
        {**default.candidates, **candidates},
    )


def _rule(content: dict[str, Any]) -> Rule:
    """Read a rule: a bound is a number, or the least and the most, null if there is none."""
    take, narrows, _ = content.pop("take"), content.pop("narrows", False), content.pop("why", None)
    pairs = {name: bound if isinstance(bound, list) else [bound, bound] for name, bound in content.items()}
    bounds = {
        name: (-inf if least is None else least, inf if most is None else most)
        for name, (least, most) in pairs.items()
    }
    return Rule(bounds, None if take is None else tuple(take), bool(narrows))


def keep(identity: Identity, tuning: Tuning) -> None:
    """Write a tuning atomically. Raises OSError."""
    path = _path(identity)
    content = {
        "version": VERSION,
        "for": dict(identity),
        "model": tuning.model,
        "chosen": tuning.chosen,
        "seconds": tuning.seconds,
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")
    _sweep(path.parent)


def load_tuning(identity: Identity) -> Tuning | None:
    """Return the tuning for exactly this identity; None if there is none or the file is invalid."""
    found = _read(_path(identity))
    return found[1] if found is not None and found[0] == dict(identity) else None


def all_kept(identity: Identity) -> Iterator[Tuning]:
    """Yield the tunings of all models whose identity agrees with every entry of `identity`."""
    with suppress(OSError):
        for path in sorted(_folder().glob("*.json")):
            found = _read(path)
            if found is not None and identity.items() <= found[0].items():
                yield found[1]


def _folder() -> Path:
    return cache_folder() / "tuning"


def _path(identity: Identity) -> Path:
    text = json.dumps(dict(identity), sort_keys=True)
    return _folder() / f"{sha256(text.encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> tuple[dict[str, str], Tuning] | None:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        content = json.loads(raw) if len(raw) <= LARGEST else None
        return _checked(content)
    except (OSError, ValueError, RecursionError):
        return None


def _checked(content: Any) -> tuple[dict[str, str], Tuning] | None:
    """Return the identity and tuning of a file; None for another version. Raises ValueError for invalid content."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return None
    identity, chosen, seconds = (_entries(content.get(name)) for name in ("for", "chosen", "seconds"))
    if not all(isinstance(value, str) for value in identity.values()):
        return None
    cuts = {name: _numbers(value, int, 8) for name, value in chosen.items()}
    times = {name: _numbers(value, float, 2) for name, value in seconds.items()}
    if any(len(pair) != 2 or not all(isfinite(one) and one > 0 for one in pair) for pair in times.values()):
        return None
    pairs = {name: (pair[0], pair[1]) for name, pair in times.items()}
    return identity, Tuning(str(content.get("model"))[:200], cuts, pairs)


def _entries(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _numbers(value: Any, kind: type, most: int) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > most or not all(type(one) is kind for one in value):
        raise ValueError
    return tuple(value)


def _sweep(folder: Path) -> None:
    """Delete the leftovers of processes that were killed while writing."""
    for path in folder.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_S:
                path.unlink()
