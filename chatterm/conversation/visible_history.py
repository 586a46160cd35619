"""What the model sees of a branch: what was said, but for what is compacted (`Compaction`)."""

from collections.abc import Sequence
from dataclasses import replace

from chatterm.backends.backend import Compaction, Exchange
from chatterm.backends.worker import LoadPath, Worker
from chatterm.conversation.attachments import without_files

_BEFORE = "This is a summary of our conversation so far; go on from it:\n\n"
_TAKEN = "Understood. I go on from this summary."


def summarised(path: Sequence[Exchange]) -> int:
    """How many exchanges at the start of a branch the latest summary stands for; 0 where there is none."""
    found = (
        n for n, e in enumerate(path, 1) if e.compaction is not None and e.compaction.summary is not None
    )
    return max(found, default=0)


def seen(path: Sequence[Exchange]) -> list[Exchange]:
    """The exchanges of a branch as the model is to see them.

    What is pinned stands first, as it was said; then the summary, in an exchange with the number 0; then the rest. So
    whatever is the same at the beginning is the same in the KV cache.
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


class BackendHistory:
    """What the backend has as its history."""

    def __init__(self, thread: Worker) -> None:
        self._worker = thread
        self._held: list[tuple[int, str]] | None = []
        """The exchanges, by number and message; None: nobody knows."""

    @property
    def is_known(self) -> bool:
        return self._held is not None

    def hold(self, path: Sequence[Exchange]) -> None:
        """Make it what the model is to see of this branch."""
        wanted = seen(path)
        if self._held != (held := _names(wanted)):
            self._held = held
            self._worker.submit(LoadPath(tuple(wanted)))

    def note(self, path: Sequence[Exchange]) -> None:
        """That is what it is, without anything being done."""
        self._held = _names(seen(path))

    def forget(self) -> None:
        """It may be anything."""
        self._held = None


def _names(exchanges: Sequence[Exchange]) -> list[tuple[int, str]]:
    return [(exchange.id, exchange.user) for exchange in exchanges]


def summary_exchange(summary: str) -> Exchange:
    """How a summary is told to the model: templates know messages and answers by turns, and nothing else."""
    return Exchange(0, None, _BEFORE + summary, text=_TAKEN, finish_reason="eos")


def sees_last(path: Sequence[Exchange]) -> bool:
    """Whether the last answer of a branch is the last thing that the model sees."""
    found = seen(path)
    return bool(found) and found[-1].id == path[-1].id


def compacted(exchange: Exchange, what: str) -> Compaction:
    """What is true of `exchange` once the model sees nothing up to it (`start`), or no attached files (`files`)."""
    before = exchange.compaction or Compaction()
    return replace(before, summary="") if what == "start" else replace(before, without_files=True)
