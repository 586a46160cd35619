"""The prompt that asks a model for the title of a conversation."""

from chatterm.terminal.sanitize import cleaned

TITLE_TOKENS = 24
"""Token limit of a title."""
_SAID = 600
"""Characters of the message and of the answer that a title is made from."""


def title_question(question: str, answer: str) -> str:
    """Return the prompt that asks for a title of this exchange."""
    said = f"User: {cleaned(question[:_SAID])}\n\nAssistant: {cleaned(answer[:_SAID])}"
    return f"{said}\n\nWrite a title for this conversation: at most six words, in its language, nothing else."
