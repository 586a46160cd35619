"""Source code as styled lines."""

from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING

from chatterm.markdown.lines import Line
from chatterm.markdown.preparing import thread

if TYPE_CHECKING:
    from pygments.lexer import Lexer

# Style names by token type: the first type that contains a token's type counts.
_STYLES = (
    ("Comment", "code-comment"),
    ("Keyword.Constant", "code-number"),
    ("Keyword", "code-keyword"),
    ("Operator.Word", "code-keyword"),
    ("Literal.String", "code-string"),
    ("Literal.Number", "code-number"),
    ("Name.Function", "code-name"),
    ("Name.Class", "code-name"),
    ("Name.Decorator", "code-name"),
    ("Name.Tag", "code-keyword"),
    ("Name.Attribute", "code-name"),
    ("Name.Builtin", "code-builtin"),
    ("Generic.Deleted", "code-removed"),
    ("Generic.Inserted", "code-added"),
    ("Generic.Heading", "code-name"),
    ("Generic.Subheading", "code-name"),
)


def highlight(code: str, language: str) -> list[Line]:
    """Return a line per line of `code`; plain if the language is unknown. Wait until `is_ready`."""
    code = code.expandtabs(4)
    lexer = _lexer(language.lower()).result() if language else None
    if lexer is None:
        return [[(line, "code")] for line in code.split("\n")]
    lines: list[Line] = [[]]
    for token_type, text in lexer.get_tokens(code + "\n"):  # some lexers need whole lines
        style = _style(str(token_type))
        for number, part in enumerate(text.split("\n")):
            if number:
                lines.append([])
            if part:
                lines[-1].append((part, style))
    count = code.count("\n") + 1
    return (lines + [[] for _ in range(count)])[:count]


def is_ready(language: str) -> bool:
    """Return whether code in this language can be highlighted at once. If not, that is being prepared."""
    return not language or _lexer(language.lower()).done()


@lru_cache(maxsize=32)
def _lexer(language: str) -> "Future[Lexer | None]":
    return thread().submit(_made, language)


def _made(language: str) -> "Lexer | None":
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@lru_cache(maxsize=512)
def _style(token_type: str) -> str:
    name = token_type.removeprefix("Token.")
    for prefix, style in _STYLES:
        if name == prefix or name.startswith(prefix + "."):
            return f"code {style}"
    return "code"
