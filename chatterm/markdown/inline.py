"""Text inside a block: emphasis, code, links."""

from collections.abc import Sequence

from markdown_it.token import Token

from chatterm.markdown.formulas import as_unicode, raised
from chatterm.markdown.lines import Run
from chatterm.markdown.tint import GUESSED, marked

_RAISED = {"sup_inline": "^", "sub_inline": "_"}
_STYLES = {"strong": "strong", "em": "em", "s": "strike", "link": "link"}


def inline_runs(tokens: Sequence[Token]) -> list[Run]:
    """Return the runs in order; a line break is a run of its own.

    A link shows its target: its address follows its text unless the text is the address. Nothing opens by itself, and
    the terminal gets no hyperlink with an invisible target.
    """
    runs: list[Run] = []
    styles: list[str] = []
    links: list[tuple[str, int]] = []
    for token in tokens:
        kind = token.type.removesuffix("_open").removesuffix("_close")
        style = " ".join(styles)
        if token.type == "text":
            runs += marked([(token.content, style)], token.meta.get(GUESSED, ()))
        elif token.type == "formula":
            runs += _changed(token, _in_a_line(as_unicode(token.content)), style)
        elif token.type in _RAISED:
            runs += _changed(token, raised(_RAISED[token.type], token.content), style)
        elif token.type == "footnote":
            number = token.content
            runs += _changed(token, raised("^", number) if number.isdecimal() else f"[{number}]", style)
        elif token.type == "code_inline":
            shown = [(token.content, f"{style} code-inline".strip())]
            runs += marked(shown, token.meta.get(GUESSED, ()))
        elif token.type == "softbreak":
            runs.append((" ", style))
        elif token.type == "hardbreak":
            runs.append(("\n", style))
        elif token.type == "image":
            runs.append((f"[image: {token.content}]", f"{style} link".strip()))
            runs.append((f" ({token.attrs.get('src', '')})", f"{style} address".strip()))
        elif token.type == "link_open":
            links.append((str(token.attrs.get("href", "")), len(runs)))
            styles.append("link")
        elif token.type == "link_close":
            styles.pop()
            address, start = links.pop()
            text = "".join(text for text, _ in runs[start:])
            if address and text not in (address, address.removeprefix("mailto:")):
                runs.append((f" ({address})", " ".join([*styles, "address"])))
        elif token.nesting == 1:
            styles.append(_STYLES.get(kind, kind))
        elif token.nesting == -1:
            styles.pop()
        elif token.content:
            runs.append((token.content, style))
    return runs


def _in_a_line(formula: str) -> str:
    return "; ".join(formula.split("\n")) if "\\" not in formula else formula


def _changed(token: Token, text: str, style: str) -> list[Run]:
    """Return what a token is shown as; all of it is marked if any of its source is."""
    style = style if text == token.content else f"{style} em".strip()
    return [(text, f"{style} {GUESSED}".strip() if token.meta.get(GUESSED) else style)]
