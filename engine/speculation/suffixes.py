"""Finds what followed earlier occurrences of the end of a text: longest match first, by hash chains of three tokens.

Each position links to the previous one that ends in a triple with the same hash, as in Deutsch 1996 (DEFLATE). A token
costs a microsecond or two, and 12 bytes.
"""

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from engine.speculation.sources import NOTHING, Guess

GRAM = 3
"""Tokens of the shortest match."""
LONGEST = 32
"""The most tokens of a match that are compared."""
LOOKED = 16
"""The most places that are examined, the latest first."""
FEW = 64
"""Fewer new tokens than this are linked one by one."""
_FIRST_BITS = 10
_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_WORD = 0xFFFFFFFF


class SuffixIndex:
    """A text that grows at its end, with an index of its earlier occurrences of the same tokens."""

    __slots__ = ("_bits", "_heads", "_links", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._links = array("i")
        """For each position the previous one with the same hash; -1: none."""
        self._bits = _FIRST_BITS
        self._heads = array("i", [-1]) * (1 << self._bits)
        """The latest position of each hash."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Memory of the index, the text included."""
        return 4 * (len(self.tokens) + len(self._links) + len(self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append these tokens."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self._links.extend([-1] * len(tokens))
        if len(self.tokens) > len(self._heads):
            while len(self.tokens) > 1 << self._bits:
                self._bits += 1
            self._heads = array("i", [-1]) * (1 << self._bits)
            start = 0
        if len(self.tokens) - start >= FEW:
            self._link_many(max(start, GRAM - 1))
        else:
            for at in range(max(start, GRAM - 1), len(self.tokens)):
                self._link(at)

    def guess(self, tail: Sequence[int], most: int) -> Guess:
        """Guess up to `most` tokens after a text that ends with `tail`: this text itself, or another."""
        if len(tail) < GRAM or len(self.tokens) < GRAM or most < 1:
            return NOTHING
        length, places = self.places(tail)
        if not places:
            return NOTHING
        return self._follow(places, length, most)

    def places(self, tail: Sequence[int]) -> tuple[int, list[int]]:
        """Return the length of the longest match with the end of `tail`, at least GRAM tokens, and the positions after
        each such match, the latest first."""
        tokens, links, last = self.tokens, self._links, len(self.tokens) - 1
        before = list(tail[-LONGEST:])[::-1]
        size = len(before)
        at = self._heads[self._bucket(before[2], before[1], before[0])]
        best, places = GRAM, list[int]()
        for _ in range(LOOKED):
            if at < 0:
                break
            if at < last:  # something follows
                length = 0
                while length < size and length <= at and tokens[at - length] == before[length]:
                    length += 1
                if length > best:
                    best, places = length, []
                if length == best:
                    places.append(at + 1)
            at = links[at]
        return best, places

    def _follow(self, places: list[int], length: int, most: int) -> Guess:
        """Return what most of `places` continue with, token by token; on a tie, the latest place wins."""
        tokens, found, agreed = self.tokens, list[int](), True
        for ahead in range(most):
            going = [at + ahead for at in places if at + ahead < len(tokens)]
            if not going:
                break
            if len(going) == 1:
                token = tokens[going[0]]
            else:
                counts = Counter(tokens[at] for at in going)
                token = max(counts, key=counts.__getitem__)
                agreed = agreed and (ahead > 0 or len(counts) == 1)
            places = [at - ahead for at in going if tokens[at] == token]
            found.append(token)
        return Guess(tuple(found), length, agreed)

    def _bucket(self, first: int, second: int, third: int) -> int:
        one, two, three = _FACTORS
        return ((first * one + second * two + third * three) & _WORD) >> (32 - self._bits)

    def _link(self, at: int) -> None:
        tokens = self.tokens
        bucket = self._bucket(tokens[at - 2], tokens[at - 1], tokens[at])
        self._links[at] = self._heads[bucket]
        self._heads[bucket] = at

    def _link_many(self, start: int) -> None:
        """Do what `_link` does for every position from `start` on, which is `GRAM - 1` or more."""
        text = np.frombuffer(self.tokens, np.int32).astype(np.int64)[start - GRAM + 1 :]
        links = np.frombuffer(self._links, np.int32)[start:]
        heads = np.frombuffer(self._heads, np.int32)
        one, two, three = _FACTORS
        buckets = ((text[:-2] * one + text[1:-1] * two + text[2:] * three) & _WORD) >> (32 - self._bits)
        order = np.argsort(buckets, kind="stable")  # by hash, then by position
        sorted_ones = buckets[order]
        first = np.ones(len(order), bool)
        first[1:] = sorted_ones[1:] != sorted_ones[:-1]
        links[order[1:]] = order[:-1] + start
        links[order[first]] = heads[sorted_ones[first]]
        last = np.roll(first, -1)
        heads[sorted_ones[last]] = order[last] + start
