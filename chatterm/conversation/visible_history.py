"""What the model sees of a branch: the whole conversation, except for what is compacted (`Compaction`)."""

from collections.abc import Sequence
from dataclasses import replace

from chatterm.backends.backend import Compaction, EngineError, Exchange
from chatterm.conversation.attachments import without_files

_BEFORE = "This is a summary of our conversation so far; go on from it:\n\n"
_TAKEN = "Understood. I go on from this summary."


def summarised(path: Sequence[Exchange]) -> int:
    """Return how many exchanges at the start of a branch the latest summary replaces; 0 if there is none."""
    found = (
        n for n, e in enumerate(path, 1) if e.compaction is not None and e.compaction.summary is not None
    )
    return max(found, default=0)


def seen(path: Sequence[Exchange]) -> list[Exchange]:
    """Return the exchanges of a branch as the model is to see them.

    Pinned ones come first, unchanged; then the summary, as an exchange with the id 0; then the rest. This keeps the
    beginning, and with it the cached KV, the same for as long as possible.
    """
    if all(exchange.compaction is None for exchange in path):  # the usual case
        return list(path)
    end = summarised(path)
    files = max((n for n, e in enumerate(path, 1) if e.compaction and e.compaction.without_files), default=0)
    found = [exchange for exchange in path[:end] if exchange.is_pinned]
    compaction = path[end - 1].compaction if end else None
    if compaction is not None and compaction.summary:
        found.append(summary_exchange(compaction.summary))
    for number, exchange in enumerate(path[end:], end + 1):
        is_whole = number > files or exchange.is_pinned
        found.append(exchange if is_whole else replace(exchange, user=without_files(exchange.user)))
    return found


def summary_exchange(summary: str) -> Exchange:
    """Return a summary as an exchange, because templates accept only alternating messages and answers."""
    return Exchange(0, None, _BEFORE + summary, text=_TAKEN, finish_reason="eos")


def sees_last(path: Sequence[Exchange]) -> bool:
    """Return whether the last answer of a branch is the last thing that the model sees."""
    found = seen(path)
    return bool(found) and found[-1].id == path[-1].id


def compactions(path: Sequence[Exchange], what: str) -> list[tuple[Exchange, Compaction | None]]:
    """Return the changes that hide all of a branch (`start`) or its attached files (`files`), or nothing (`off`).

    Raises EngineError if there is nothing to change.
    """
    if not path:
        raise EngineError("There is nothing to compact yet.")
    if what != "off":
        before = path[-1].compaction or Compaction()
        hidden = replace(before, summary="") if what == "start" else replace(before, without_files=True)
        return [(path[-1], hidden)]
    changed = [exchange for exchange in path if exchange.compaction is not None]
    if not changed:
        raise EngineError("The model sees everything already.")
    return [(exchange, None) for exchange in changed]
