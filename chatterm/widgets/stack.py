"""A stack of items of different heights: finds the first row of an item and the item at a row."""


class Stack:
    """The heights of the items in rows, as a Fenwick tree: queries and updates take logarithmic time."""

    def __init__(self) -> None:
        self._heights: list[int] = []
        self._sums = [0]
        """At `i` (from 1), the sum of the last `i & -i` of the first `i` heights."""

    def __len__(self) -> int:
        return len(self._heights)

    @property
    def height(self) -> int:
        """The total height of all items, in rows."""
        return self.start(len(self))

    def add(self, height: int) -> None:
        """Add an item below the others."""
        self._heights.append(height)
        number, total, below = len(self._heights), height, 1
        while not number & below:
            total += self._sums[number - below]
            below <<= 1
        self._sums.append(total)

    def cut(self, count: int) -> None:
        """Keep only the first `count` items."""
        del self._heights[count:], self._sums[count + 1 :]

    def resize(self, index: int, height: int) -> None:
        """Change the height of the item at `index`."""
        more, number = height - self._heights[index], index + 1
        self._heights[index] = height
        while more and number <= len(self):
            self._sums[number] += more
            number += number & -number

    def start(self, index: int) -> int:
        """Return how many rows are above the item at `index`."""
        rows = 0
        while index:
            rows += self._sums[index]
            index &= index - 1
        return rows

    def at(self, row: int) -> int:
        """Return the index of the last item that begins at `row` or above it; -1 if there is none."""
        if row < 0 or not self._heights:
            return -1
        index, step = 0, 1 << len(self).bit_length()
        while step:
            if index + step <= len(self) and self._sums[index + step] <= row:
                index += step
                row -= self._sums[index]
            step >>= 1
        return min(index, len(self) - 1)
