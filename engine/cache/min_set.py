"""A set that knows its smallest member."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Any)


class MinSet(Generic[T]):
    """A heap beside a set: what leaves the set stays in the heap until it comes to the top, or until too much of the
    heap has left. So the heap is never much longer than twice the most members that there were.
    """

    def __init__(self, members: Iterable[T] = ()) -> None:
        self._members = set(members)
        self._heap = sorted(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: T) -> bool:
        return member in self._members

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def add(self, member: T) -> None:
        """Put `member` in; it may be there already."""
        if member in self._members:
            return
        self._members.add(member)
        heapq.heappush(self._heap, member)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = sorted(self._members)

    def discard(self, member: T) -> None:
        """Take `member` out, if it is there."""
        self._members.discard(member)

    def smallest(self) -> T:
        """The smallest member. Raises IndexError when empty."""
        while self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0]
