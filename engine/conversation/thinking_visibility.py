"""Remembers which thinking each prompt of a conversation left out, because finding out takes a rendering."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from threading import Lock

_MOST = 20_000
"""The most prompts remembered, at about 200 bytes each."""

Unseen = frozenset[int]
"""The indices of the messages whose thinking is left out."""


class Views:
    """What each prompt left out, by the prompt's hash. Thread-safe."""

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
        """Return what the prompt leaves out, as remembered or else as `find` returns it."""
        with self._lock:
            known = self._known.get(prompt)
        if known is None:
            self.note(prompt, known := find())
        return known


def leaving(
    known: Sequence[int], unseen: Callable[[int], Unseen], last: Unseen, thinks: Unseen
) -> set[int] | None:
    """Return the `known` answers after which all thinking so far leaves the view, of the thinking left out in `last`.

    `unseen` returns what was left out when an answer was asked for. Answers in `thinks` contain thinking; the others
    have at most an empty span, which stays as long as the thinking before it. Return None if the template leaves out
    thinking piece by piece.
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
