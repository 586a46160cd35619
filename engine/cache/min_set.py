"""A set that knows its smallest member."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Any)


class MinSet(Generic[T]):
    """A set with a heap beside it. A discarded member stays in the heap until it reaches the top or until the heap is
    rebuilt, which keeps the heap at no more than about twice the largest size of the set.
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
        """Add `member`; it may be there already."""
        if member in self._members:
            return
        self._members.add(member)
        heapq.heappush(self._heap, member)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = sorted(self._members)

    def discard(self, member: T) -> None:
        """Remove `member`, if it is there."""
        self._members.discard(member)

    def smallest(self) -> T:
        """Return the smallest member. Raises IndexError if the set is empty."""
        while self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0]
