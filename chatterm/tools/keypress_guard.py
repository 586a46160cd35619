"""Telling a key that answers a question from one that was meant for something else.

When a question appears, keys may be on their way: a sentence that is being typed, a paste that the terminal does not
mark as one, a key that is held down. So keys count only after a pause, and not while they come faster than a person
types.
"""

QUIET = 0.7
"""Seconds without any key after which keys count."""
FAST = 0.08
"""Seconds between two keys below which no person can have seen what the first one did."""


class Deliberate:
    """Decides which keys were pressed on purpose. Times are those of `time.monotonic()`."""

    def __init__(self, now: float) -> None:
        """Start when the question appears."""
        self._last = now
        self._is_open = False

    def press(self, now: float) -> bool:
        """Record a key press and return whether it counts."""
        gap, self._last = now - self._last, now
        if gap >= QUIET:
            self._is_open = True
        elif gap < FAST:
            self._is_open = False
        return self._is_open

    def ready(self, now: float) -> bool:
        """Return whether a key pressed now would count."""
        gap = now - self._last
        return gap >= QUIET or (self._is_open and gap >= FAST)
