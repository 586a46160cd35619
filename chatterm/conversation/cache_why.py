"""/cache why: how much of each turn's prompt was reused, prewarmed and computed, and the reasons in words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from chatterm.backends.backend import Exchange, TurnStats
from chatterm.conversation.figures import bar
from chatterm.markdown.lines import Line, cells, elided, line_cells, wrap
from chatterm.terminal.sanitize import one_line, visible
from engine.events import Cause, Parting
from models.units import counted

TITLE = "What each turn found in the cache"
_STYLES = ("accent", "code-string", "primary")
"""Styles of reused, prewarmed and computed tokens."""
_HEADS = ("▪ reused", "▪ prewarmed", "▪ computed")
_BAR = 16
_NARROW, _NO_BAR = 44, 64
"""Columns below which the counts stand under the message, and below which there is no bar."""
_CAUSES = {
    Cause.THINKING: "its thinking is left out of the history",
    Cause.TRIMMED: "the end of it is left out of the history",
    Cause.SYSTEM: "it was changed",
    Cause.EDITED: "there was another message at this place",
    Cause.BRANCH: "another branch continues differently from here",
    Cause.POLICY: "its thinking was cached under another think_cache setting",
    Cause.OPENED: "it was written before the model was loaded",
    Cause.EVICTED: "it was evicted to make room",
    Cause.DRAFT: "the draft was changed after it was prewarmed",
    Cause.STATE: "what recurrent layers remembered there was no longer kept",
}


@dataclass(frozen=True, slots=True)
class Explained:
    """A turn, and why parts of its prompt were not cached."""

    message: str
    stats: TurnStats | None
    """None if no figures were saved."""
    reasons: tuple[Line, ...] = ()


def explained(
    path: Sequence[Exchange], models: Sequence[str], token_text: Callable[[int], str | None]
) -> Iterator[Explained]:
    """Yield an explanation of each turn of a branch, each computed when it is asked for.

    `token_text` reads tokens of a model that has one of the names `models`.
    """
    earlier = dict[str, None]()
    for exchange in path:
        stats = TurnStats.of(exchange.stats) if exchange.stats.get("prompt_tokens") else None
        text = token_text if exchange.model in models else _no_text
        others = [model for model in earlier if model != exchange.model]
        partings = (stats.parting, stats.draft_parting) if stats is not None else ()
        reasons = tuple(_reason(parting, others, text) for parting in partings if parting is not None)
        yield Explained(one_line(exchange.user, 300), stats, reasons)
        earlier.pop(exchange.model, None)  # the latest comes last
        earlier[exchange.model] = None


def longest_prompt(path: Sequence[Exchange]) -> int:
    """Return the tokens of the longest prompt in a branch; at least 1."""
    return max((int(exchange.stats.get("prompt_tokens", 0)) for exchange in path), default=0) or 1


def each_why_line(turns: Iterator[Explained], longest: int, width: int) -> Iterator[Line]:
    """Yield a line with a bar for each turn and its reasons below, then a sum of what the user waited for.

    A bar of full length stands for `longest` tokens.
    """
    first = next(turns, None)
    if first is None:
        yield from wrap([("There are no messages on this branch yet.", "muted")], width)
        return
    figures: list[TurnStats] = []
    sizes = [cells(head) for head in _HEADS]
    if width >= _NARROW:
        line: Line = [(" " * (width - sum(sizes) - 2 * (len(sizes) - 1)), "")]
        for head, style in zip(_HEADS, _STYLES, strict=True):
            line += [("  ", "")] if len(line) > 1 else []
            line += [(head[0], style), (head[1:], "muted")]
        yield line
    for number, turn in enumerate(chain([first], turns), 1):
        figures += [turn.stats] if turn.stats is not None else []
        yield from _turn(number, turn, longest, sizes, width)
    yield []
    yield from wrap(_sum(figures), width)


def _turn(number: int, turn: Explained, longest: int, sizes: Sequence[int], width: int) -> list[Line]:
    head: Line = [(f"{number:>2}  ", "muted")]
    stats, indent = turn.stats, line_cells(head)
    counts = (stats.reused_tokens, stats.warmed_tokens, stats.prefilled_tokens) if stats is not None else None
    texts = [f"{count:,}" for count in counts] if counts is not None else ["–"] * len(sizes)
    if width < _NARROW:
        below = " + ".join(texts) if counts is not None else "no statistics"
        lines = [
            [*head, (elided(turn.message, width - indent), "")],
            [(" " * indent, ""), (elided(below, width - indent), "muted")],
        ]
    else:
        columns = [text.rjust(size) for text, size in zip(texts, sizes, strict=True)]
        right: Line = [("  ".join(columns), "")]
        if width >= _NO_BAR:
            shares = [
                (count / longest, style)
                for count, style in zip(counts or (), _STYLES, strict=False)
                if count > 0
            ]
            right = [*bar(shares, _BAR), ("  ", ""), *right]
        room = width - indent - line_cells(right) - 2
        message = elided(turn.message, room)
        lines = [[*head, (message, ""), (" " * (room - cells(message) + 2), ""), *right]]
    for reason in turn.reasons:
        for line in wrap(reason, width - indent):
            lines.append([(" " * indent, ""), *line])
    return lines


def _sum(figures: Sequence[TurnStats]) -> Line:
    """Return a sentence that sums up what the user waited for."""
    prompt = sum(stats.prompt_tokens for stats in figures)
    if not prompt:
        return [("There are no statistics for these turns.", "muted")]
    computed = sum(stats.prefilled_tokens for stats in figures)
    warmed = sum(stats.warmed_tokens for stats in figures)
    text = f"You waited for {computed:,} of {counted(prompt, 'prompt token')}"
    if warmed:
        text += f"; {warmed:,} were prewarmed while you read and typed"
    return [(text + ".", "accent")]


def _reason(parting: Parting, models: Sequence[str], token_text: Callable[[int], str | None]) -> Line:
    """Say where and why a prompt left the cache. `models` answered earlier in the branch, besides the turn's own."""
    kind = "answer" if parting.in_answer else "message"
    where = f"{kind} {parting.message}" if parting.message else "the system prompt"
    cause = _CAUSES[parting.cause]
    if parting.cause is Cause.OPENED and models:
        cause = f"it was answered by {one_line(models[-1], 60)}, and models do not share a cache"
    at = f"token {parting.row + 1:,}"
    if parting.cause is Cause.STATE:
        return [(f"{where[0].upper()}{where[1:]} was computed again from {at} on: {cause}.", "muted")]
    if parting.cached < 0:
        return [(f"Nothing was cached from {at} on, in {where}: {cause}.", "muted")]
    return [
        (f"{where[0].upper()}{where[1:]} differs from the cached text at {at}: cached ", "muted"),
        (_quoted(parting.cached, token_text), "code-inline"),
        (", needed ", "muted"),
        (_quoted(parting.wanted, token_text), "code-inline"),
        (f" ({cause}).", "muted"),
    ]


def _quoted(token: int, token_text: Callable[[int], str | None]) -> str:
    text = token_text(token)
    if text is None:
        return f"token {token}"
    return visible(text.replace(" ", "␣").replace("\n", "\\n").replace("\t", "\\t"))


def _no_text(_: int) -> None:
    return None
