"""Dates and times in words. Pure functions."""

from datetime import datetime

LATEST = 250_000_000_000.0
"""The latest time that `datetime` safely represents, in seconds since the epoch: in the year 9892."""


def when_text(then: float, now: float) -> str:
    """Return a time (seconds since the epoch) as local time, in <= 12 columns: "5 min ago", "Mon 14:03", "12 Nov"."""
    ago = now - (then := _known(then))
    if ago < 60:
        return "just now"
    if ago < 3600:
        return f"{int(ago // 60)} min ago"
    moment, today = datetime.fromtimestamp(then), datetime.fromtimestamp(now)
    days = (today.date() - moment.date()).days
    if days == 0:
        return f"{moment:%H:%M}"
    if days == 1:
        return "yesterday"
    if days < 7:
        return f"{moment:%a %H:%M}"
    return f"{moment.day} {moment:%b}" if moment.year == today.year else f"{moment.day} {moment:%b %Y}"


def stamp(then: float) -> str:
    """Return the time to the minute, in local time: "2026-03-01 14:03"."""
    return f"{datetime.fromtimestamp(_known(then)):%Y-%m-%d %H:%M}"


def _known(then: float) -> float:
    """Clamp a time from a file to what `datetime` can represent."""
    return min(max(then, 0.0), LATEST)
