"""When something was, as a person says it. Pure functions."""

from datetime import datetime

LATEST = 250_000_000_000.0
"""Seconds since the epoch that the calendar can still tell, in the year 9892."""


def when_text(then: float, now: float) -> str:
    """A moment (seconds since the epoch) in at most 12 columns, in local time: "just now", "5 min ago", "14:03",
    "yesterday", "Mon 14:03", "12 Nov", "12 Nov 2024"."""
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
    """The moment to the minute, in local time: "2026-03-01 14:03"."""
    return f"{datetime.fromtimestamp(_known(then)):%Y-%m-%d %H:%M}"


def _known(then: float) -> float:
    """A moment that the calendar has, whatever a file says."""
    return min(max(then, 0.0), LATEST)
