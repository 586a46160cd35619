"""One branch of a session as Markdown, and the wording that it shares with the web page."""

from collections.abc import Sequence

from chatterm.backends.backend import Exchange
from chatterm.backends.documents import list_names
from chatterm.sessions.dates import stamp
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.titles import UNTITLED
from chatterm.terminal.sanitize import one_line, visible

ENDINGS = {
    None: "cut off",
    "cancelled": "stopped",
    "length": "cut off: the token limit was reached",
    "context_full": "cut off: the context was full",
    "repetition": "stopped: the answer was repeating itself",
}
"""The note below an answer that did not end by itself, by finish reason."""


def to_markdown(info: SessionInfo, path: Sequence[Exchange]) -> str:
    """Return one branch as Markdown, with messages and answers as they were written."""
    parts = [f"# {info.title or UNTITLED}"]
    facts = [fact for fact in (info.model, stamp(info.created) if info.created else "") if fact]
    if facts:
        parts.append(" · ".join(facts))
    if info.system:
        parts += ["## System", info.system]
    if info.documents:
        parts.append(f"*(begun with documents from the library: {list_names(info.documents)})*")
    for exchange in path:
        asked = [fence_text(exchange.user)] if exchange.results else [exchange.user]
        parts += ["## Tools" if exchange.results else "## You", *asked]
        parts.append(f"## {one_line(exchange.model) or 'Answer'}")
        if exchange.reasoning.strip():
            thinking = "\n".join(f"> {line}".rstrip() for line in exchange.reasoning.strip().split("\n"))
            parts.append(f"> **{thinking_head(exchange)}**\n>\n{thinking}")
        if exchange.text:
            parts.append(exchange.text)
        if exchange.finish_reason in ENDINGS:
            parts.append(f"*({ENDINGS[exchange.finish_reason]})*")
        parts += [f"*({note})*" for note in change_notes(exchange)]
    return visible("\n\n".join(part.strip("\n") for part in parts)) + "\n"


def change_notes(exchange: Exchange) -> list[str]:
    """Return notes on what the model sees differently from this exchange on."""
    compaction, notes = exchange.compaction, []
    if compaction is not None and compaction.summary is not None:
        summary = one_line(compaction.summary)
        seen = f"this summary of what is above: {summary}" if summary else "nothing of what is above"
        notes.append(f"from here on the model sees {seen}")
    if compaction is not None and compaction.without_files:
        notes.append("from here on the model sees only the names of files attached above")
    return [*notes, *(["pinned: the model sees this message whole"] if exchange.is_pinned else [])]


def thinking_head(exchange: Exchange) -> str:
    return f"Thinking, {exchange.thinking_s:.1f} s" if exchange.thinking_s else "Thinking"


def fence_text(text: str) -> str:
    """Return `text` as a code block, with a fence longer than any inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
