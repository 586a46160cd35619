"""The code blocks of an answer, as the model wrote them."""

from chatterm.markdown.blocks import parser


def code_blocks(source: str) -> list[str]:
    """The content of every code block in order, without its fences and its last line break."""
    tokens = parser().parse(source)
    return [token.content.removesuffix("\n") for token in tokens if token.type in ("fence", "code_block")]
