"""Messages that are joined from several sentences, always with these functions."""

from engine.errors import ContextFullError

_ENDS = (".", "!", "?", "…", ".)", '."', ".'", ".`")


def sentences(*parts: str) -> str:
    """Join the parts on one line, each closed as a sentence. Empty ones are left out."""
    said = [part.strip() for part in parts if part.strip()]
    return " ".join(part if part.endswith(_ENDS) else f"{part}." for part in said)


def in_chat(error: Exception) -> str:
    """Return an error's message for the chat, with commands that help; the engine knows no commands."""
    if isinstance(error, ContextFullError):
        way_out = "/compact makes room, /reset starts a new conversation"
        return sentences(str(error), way_out)
    return str(error)
