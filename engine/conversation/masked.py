"""Rows of the `mask` policy: answers as they were generated, with the thinking hidden that has left the view."""

from collections.abc import Callable
from collections.abc import Sequence as Items

from engine.cache.block_table import OutOfBlocksError
from engine.cache.rows import AnswerRows, Rows, Span
from engine.core import EngineCore
from engine.schedule.scheduler import MaskedRowsEvictedError
from engine.schedule.sequence import ANYBODY, Owner

Hide = Callable[[Rows, Items[Span], AnswerRows], Rows | None]
"""Returns rows without these spans, which leave the view after that answer; None if that fails."""


def masked_rows(said: Items[AnswerRows], hide: Hide = lambda rows, spans, _: rows.hide(spans)) -> Rows | None:
    """Return the rows of these answers and of the tokens before them; None if `hide` returns None."""
    rows, edges = Rows(), list[int]()
    spans: list[Span] = []
    for one in said:
        rows.extend(after(rows, one.before))
        start = len(rows)
        edges.append(start)
        if one.thought:
            spans.append((start, start + len(one.thought)))
        rows.extend([*one.thought, *one.ids])
        if one.leaves and spans:
            rows.edges = edges  # recurrent layers go on from where the first of the spans begins
            if (hidden := hide(rows, spans, one)) is None:
                return None
            edges = [edge - sum(min(max(edge - a, 0), b - a) for a, b in spans) for edge in edges]
            rows, spans = hidden, []
        edges.append(len(rows))
    rows.edges, rows.said = edges, said
    return rows


def masked_prompt(said: Items[AnswerRows], then: Items[int]) -> Rows:
    """Return the rows of these answers, and of the tokens `then` after them."""
    rows = masked_rows(said)
    assert rows is not None
    rows.extend(after(rows, then))
    return rows


def restore(engine: EngineCore, rows: Rows, owner: Owner = ANYBODY) -> bool:
    """Make the masked rows of `rows` present: evicted ones are brought back from disk or computed again. Return False
    if that fails."""
    if engine.cached_rows(rows) >= rows.masked_until:
        return True
    engine.bring_back(rows, owner)
    if engine.cached_rows(rows) >= rows.masked_until:
        return True

    def hide(before: Rows, spans: Items[Span], _: AnswerRows) -> Rows | None:
        return _hidden(engine, before, spans, owner)

    return masked_rows(rows.said, hide) is not None


def hide_last(engine: EngineCore, said: Items[AnswerRows], keep_rows: bool) -> None:
    """Hide what leaves the view after the last of these answers, unless that requires computing earlier answers.

    `keep_rows`: as in `Engine.hide`. Raises EngineError if hiding fails.
    """

    def hide(rows: Rows, spans: Items[Span], one: AnswerRows) -> Rows | None:
        if one is not said[-1]:
            return rows.hide(spans)
        is_there = engine.cached_rows(rows) >= rows.masked_until
        return _hidden(engine, rows, spans, ANYBODY, keep_rows) if is_there else None

    masked_rows(said, hide)


def after(rows: Rows, segment: Items[int]) -> Items[int]:
    """Return `segment` without the end of turn at its beginning, if the model has already generated that."""
    if rows.token_ids and segment and rows.token_ids[-1] == segment[0]:
        return segment[1:]
    return segment


def _hidden(
    engine: EngineCore, rows: Rows, spans: Items[Span], owner: Owner, keep_rows: bool = False
) -> Rows | None:
    if len(rows) > engine.context_length or rows.next_position >= engine.max_positions:
        return None
    try:
        return engine.hide(rows, spans, owner, keep_rows)
    except (OutOfBlocksError, MaskedRowsEvictedError):
        return None
