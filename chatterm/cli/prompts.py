"""The prompts: the texts of -p, and piped text."""

import sys
from collections.abc import Sequence
from typing import BinaryIO, cast

from chatterm.cli.options import check_utf8
from chatterm.cli.usage import WrongUsage


def checked_texts(prompts: Sequence[str]) -> list[str]:
    """Return the texts of -p. Raises WrongUsage for one that is empty or not UTF-8."""
    for text in prompts:
        if not text.strip():
            raise WrongUsage("The prompt is empty; add some text.")
        check_utf8(text)
    return list(prompts)


def checked_prompts(prompts: Sequence[str], stdin: BinaryIO | None = None, each: bool = False) -> list[str]:
    """Return the turns to send, from -p and from standard input; [] means the chat screen. Raises WrongUsage.

    Piped text goes before the first prompt, or before `each`.
    """
    from chatterm.cli.oneshot import InputError, join_prompts, read_input

    checked_texts(prompts)
    if stdin is None:
        # None if there is no standard input at all, as under some schedulers.
        if sys.stdin is None or sys.stdin.isatty():
            return list(prompts)
        stdin = cast("BinaryIO", sys.stdin.buffer)
    try:
        turns = join_prompts(read_input(stdin), prompts, each)
    except InputError as error:
        raise WrongUsage(str(error)) from error
    if not turns:
        raise WrongUsage("The prompt is empty: standard input had no text; add -p TEXT.")
    return turns
