"""The code blocks of an answer, as the model wrote them."""

import re
from dataclasses import dataclass

from chatterm.markdown.blocks import parser

_MAY_BE_CODE = re.compile(r"```|~~~|^(?: {4}|.*\t)", re.MULTILINE)
"""What every code block has: a fence, or a line that is indented."""


def code_blocks(source: str) -> list[str]:
    """The content of every code block in order, without its fences and its last line break."""
    if not _MAY_BE_CODE.search(source):
        return []
    tokens = parser().parse(source)
    return [token.content.removesuffix("\n") for token in tokens if token.type in ("fence", "code_block")]


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One of them."""

    language: str
    """As the model named it, in lower case; "" where it did not."""
    text: str


def named_blocks(source: str) -> list[CodeBlock]:
    """Every code block in order, with its language."""
    return [
        CodeBlock((token.info.split() or [""])[0].lower(), token.content.removesuffix("\n"))
        for token in parser().parse(source)
        if token.type in ("fence", "code_block")
    ]
