"""How a model is asked for the title of a conversation."""

from chatterm.terminal.sanitize import cleaned

TITLE_TOKENS = 24
"""Tokens that a model may take for a title."""
_SAID = 600
"""Characters of a message and of an answer that a title is made from."""


def title_question(question: str, answer: str) -> str:
    """What to ask a model for a title of what was said."""
    said = f"User: {cleaned(question[:_SAID])}\n\nAssistant: {cleaned(answer[:_SAID])}"
    return f"{said}\n\nWrite a title for this conversation: at most six words, in its language, nothing else."
