"""Whether the machine should save its battery."""

from typing import Any

_AGAIN = 30.0
"""Seconds between two checks."""
_LOW = 20.0
"""Battery percentage below which power is saved."""


class Power:
    """Checks the battery now and then. Without psutil or a battery, power is never low."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._is_low = False

    def is_low(self, now: float) -> bool:
        """Return whether the machine runs on a nearly empty battery. `now` is in seconds; may read a file."""
        if now >= self._look_at:
            self._look_at = now + _AGAIN
            battery = _battery()
            self._is_low = battery is not None and battery.power_plugged is False and battery.percent < _LOW
        return self._is_low


def _battery() -> Any:
    try:
        import psutil
    except ImportError:
        return None
    try:
        return psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):  # not available on every system
        return None
