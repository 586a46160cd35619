"""One branch of a session as a self-contained web page: it loads no scripts, images or other resources."""

import re
from collections.abc import Sequence
from functools import lru_cache
from html import escape

from markdown_it import MarkdownIt

from chatterm.backends.backend import Exchange
from chatterm.backends.documents import list_names
from chatterm.sessions.as_markdown import ENDINGS, change_notes, thinking_head
from chatterm.sessions.dates import stamp
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.titles import UNTITLED
from chatterm.terminal.sanitize import one_line, visible

_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --back: #ffffff; --box: #f3f4f6; --mark: #0550ae }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --muted: #9ba3ad; --back: #16181c; --box: #22262c; --mark: #7cb7ff }
}
body { margin: 0 auto; padding: 2rem 1rem; max-width: 46rem; background: var(--back); color: var(--text);
  font: 1rem/1.6 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 }
header p, .who, .ending, summary { color: var(--muted); font-size: .875rem }
.who { margin: 2rem 0 .25rem }
.said { white-space: pre-wrap; border-left: 3px solid var(--mark); padding-left: .75rem }
details { color: var(--muted); margin: .5rem 0 }
details > div { white-space: pre-wrap; padding-left: .75rem; font-style: italic }
pre { background: var(--box); padding: .75rem 1rem; border-radius: .375rem; overflow-x: auto }
code { font: .9em/1.5 ui-monospace, monospace }
:not(pre) > code { background: var(--box); padding: .1em .3em; border-radius: .25rem }
table { border-collapse: collapse } th, td { border: 1px solid var(--muted); padding: .25rem .6rem }
blockquote { margin: 0; padding-left: 1rem; border-left: 3px solid var(--muted); color: var(--muted) }
a { color: var(--mark) }
"""


def to_html(info: SessionInfo, path: Sequence[Exchange]) -> str:
    title = _text(one_line(info.title, 200) or UNTITLED)
    facts = " · ".join(
        _text(fact) for fact in (info.model, stamp(info.created) if info.created else "") if fact
    )
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="referrer" content="no-referrer">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}{_code_style()}</style></head><body>",
        f"<header><h1>{title}</h1><p>{facts}</p></header><main>",
    ]
    if info.system:
        head.append(f'<p class="who">System</p><div class="said">{_text(info.system)}</div>')
    if info.documents:
        names = _text(list_names(info.documents))
        head.append(f'<p class="ending">(begun with documents from the library: {names})</p>')
    return "\n".join([*head, *map(_exchange, path), "</main></body></html>\n"])


def _exchange(exchange: Exchange) -> str:
    parts = [
        f'<section><p class="who">{"Tools" if exchange.results else "You"}</p>'
        f'<div class="said">{_text(exchange.user)}</div>',
        f'<p class="who">{_text(exchange.model) or "Answer"}</p>',
    ]
    if thinking := exchange.reasoning.strip():
        head = _text(thinking_head(exchange))
        parts.append(f"<details><summary>{head}</summary><div>{_text(thinking)}</div></details>")
    parts.append(_markdown().render(visible(exchange.text)))
    if exchange.finish_reason in ENDINGS:
        parts.append(f'<p class="ending">({_text(ENDINGS[exchange.finish_reason])})</p>')
    parts += [f'<p class="ending">({_text(note)})</p>' for note in change_notes(exchange)]
    return "\n".join([*parts, "</section>"])


def _text(text: str) -> str:
    return escape(visible(text))


@lru_cache(maxsize=1)
def _markdown() -> MarkdownIt:
    options = {"html": False, "highlight": _highlighted}
    parser = MarkdownIt("commonmark", options).enable(["table", "strikethrough"]).disable("image")
    parser.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    return parser


def _highlighted(code: str, language: str, attributes: str) -> str:
    """Return the highlighted HTML of a code block; "" for an unknown language: the code is then only escaped."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return ""
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))


def _code_style() -> str:
    from pygments.formatters import HtmlFormatter

    def rules(style: str) -> str:
        lines: list[str] = HtmlFormatter(style=style).get_style_defs("pre").split("\n")
        return "\n".join(line for line in lines if line.startswith("pre ."))

    return f"{rules('default')}\n@media (prefers-color-scheme: dark) {{\n{rules('monokai')}\n}}\n"
