"""The code blocks of an answer, as the model wrote them."""

import re
from dataclasses import dataclass

from chatterm.markdown.blocks import parser

_MAY_BE_CODE = re.compile(r"```|~~~|^(?: {4}|.*\t)", re.MULTILINE)
"""Matches in any text that has a code block: a fence or an indented line."""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A code block of an answer."""

    language: str
    """The language as the model named it, in lower case; "" if it did not."""
    text: str
    """Its content, without its fences and its last line break."""


def code_blocks(source: str) -> list[CodeBlock]:
    """Return every code block in order."""
    if not _MAY_BE_CODE.search(source):
        return []
    return [
        CodeBlock((token.info.split() or [""])[0].lower(), token.content.removesuffix("\n"))
        for token in parser().parse(source)
        if token.type in ("fence", "code_block")
    ]
