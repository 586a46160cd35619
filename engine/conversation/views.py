"""What of the thinking each prompt of a conversation left out, remembered: a rendering tells it."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from threading import Lock

_MOST = 20_000
"""Prompts that are remembered, some 200 bytes each."""

Unseen = frozenset[int]
"""The messages whose thinking is left out."""


class Views:
    """From any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Unseen] = OrderedDict()
        self._lock = Lock()

    def note(self, prompt: bytes, unseen: Unseen) -> None:
        """Remember what the prompt with this hash leaves out."""
        with self._lock:
            self._known[prompt] = unseen
            self._known.move_to_end(prompt)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def of(self, prompt: bytes, find: Callable[[], Unseen]) -> Unseen:
        """What it leaves out: what is known, or what `find` says."""
        with self._lock:
            known = self._known.get(prompt)
        if known is None:
            self.note(prompt, known := find())
        return known


def leaving(
    known: Sequence[int], unseen: Callable[[int], Unseen], last: Unseen, thinks: Unseen
) -> set[int] | None:
    """After which of the `known` answers everything leaves the view that is left out in the end, `last`.

    `unseen` tells what was left out when an answer was asked for. Of `thinks` a thought is to be read, of others only
    an empty span is there, which stays as long as thoughts before it. None: a template leaves out thoughts one by one.
    """
    found: set[int] = set()
    inside: set[int] = set()
    for index, following in zip_longest(known, known[1:]):
        if index in last:
            inside.add(index)
        if not inside:
            continue
        gone = inside & (last if following is None else unseen(following))
        thoughts = inside & thinks
        if gone & thoughts and thoughts - gone:
            return None
        if gone and not thoughts - gone:
            found.add(index)
            inside = set()
    return found
