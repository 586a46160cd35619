"""The check of a regular expression before it becomes part of a grammar."""

from engine.errors import EngineError
from engine.params import NAMES


def check_end(expression: str) -> None:
    """Raise EngineError if the expression ends in a backslash that would escape what a grammar writes after it."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise EngineError(
            f"The {NAMES['regex']} cannot be used: it ends in a backslash that escapes nothing."
        )
