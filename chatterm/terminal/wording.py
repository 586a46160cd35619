"""Sentences that are put together from parts: who joins two texts does it here."""

from engine.errors import ContextFullError

_ENDS = (".", "!", "?", "…", ".)", '."', ".'", ".`")


def sentences(*parts: str) -> str:
    """The parts on one line, each of them closed before the next begins. Empty ones are left out."""
    said = [part.strip() for part in parts if part.strip()]
    return " ".join(part if part.endswith(_ENDS) else f"{part}." for part in said)


def in_chat(error: Exception) -> str:
    """What an error says to somebody who can type commands; the engine knows of none."""
    if isinstance(error, ContextFullError):
        way_out = "/compact makes room, /reset starts a new conversation"
        return sentences(str(error), way_out)
    return str(error)
