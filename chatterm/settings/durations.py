"""Durations as people write them."""

import re

from engine.errors import EngineError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def parse_duration(text: str, name: str) -> float | None:
    """Parse a duration into seconds: "30m", "1h30m", "90" (seconds), "0"; None for "forever" and "-1".

    Raises EngineError, which says that `name` is not a duration.
    """
    plain = text.strip().lower()
    if plain in ("forever", "-1"):
        return None
    parts = _PART.findall(plain)
    is_whole = "".join(number + unit for number, unit in parts) == plain
    if not parts or not is_whole or (len(parts) > 1 and not all(unit for _, unit in parts)):
        raise EngineError(f"{name} is {text!r}; write a time like 30m, 1h30m, 90s, 0 or forever.")
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def duration_text(seconds: float) -> str:
    """Return a duration as text, in at most two units: "1 h 5 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 and whole % 60 else "")
    if whole < 86400:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 >= 60 else "")
    return f"{whole // 86400} d" + (f" {whole % 86400 // 3600} h" if whole % 86400 >= 3600 else "")
