"""The tree of a session: which exchange follows which, and which branch is selected. No disk."""

from collections.abc import Iterable, Mapping
from time import time

from chatterm.backends.backend import Exchange, ToolCall


class Tree:
    """Exchanges by id. A path from the root is a branch; the `head` is the end of the selected one.

    Methods raise KeyError for an unknown id: that is a bug of the caller.
    """

    def __init__(self, exchanges: Iterable[Exchange] = (), head: int | None = None) -> None:
        """Build the tree from `exchanges` in any order; one whose parent is missing becomes a root.

        An unknown `head` selects the newest branch.
        """
        self._exchanges = {exchange.id: exchange for exchange in sorted(exchanges, key=lambda e: e.id)}
        self._children: dict[int | None, list[int]] = {}
        self._looked: dict[int | None, int] = {}
        """The child of each exchange that was last on the selected branch."""
        self._head: int | None = None
        for exchange in self._exchanges.values():
            # A child has a larger id than its parent: that rules out cycles, wherever the data came from.
            if exchange.parent not in self._exchanges or exchange.parent >= exchange.id:
                exchange.parent = None
            self._children.setdefault(exchange.parent, []).append(exchange.id)
        if head is not None and head not in self._exchanges:
            head = max(self._exchanges, default=None)
        self.select(head)

    def __len__(self) -> int:
        return len(self._exchanges)

    def __contains__(self, id: object) -> bool:
        return id in self._exchanges

    def __getitem__(self, id: int) -> Exchange:
        return self._exchanges[id]

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges, oldest first."""
        return list(self._exchanges.values())

    @property
    def head(self) -> int | None:
        """The last exchange of the selected branch; None before the first message."""
        return self._head

    def add(self, parent: int | None, user: str, model: str) -> Exchange:
        """Add an exchange after `parent`, without an answer yet. It becomes the head."""
        if parent is not None:
            self._exchanges[parent]
        exchange = Exchange(max(self._exchanges, default=0) + 1, parent, user, model=model, created=time())
        self._exchanges[exchange.id] = exchange
        self._children.setdefault(parent, []).append(exchange.id)
        self.select(exchange.id)
        return exchange

    def drop(self, id: int) -> None:
        """Remove an exchange that nothing follows (its message was refused). Raises ValueError if one does.

        If it was the head, the head moves to its parent.
        """
        if self._children.get(id):
            raise ValueError(f"exchange {id} has exchanges after it")
        exchange = self._exchanges.pop(id)
        self._children[exchange.parent].remove(id)
        if self._looked.get(exchange.parent) == id:
            del self._looked[exchange.parent]
        if self._head == id:
            self._head = exchange.parent

    def path(self, id: int | None) -> list[Exchange]:
        """Return the exchanges from the root to `id`; [] for None."""
        path: list[Exchange] = []
        while id is not None:
            path.append(self._exchanges[id])
            id = path[-1].parent
        return path[::-1]

    @property
    def open_calls(self) -> list[ToolCall]:
        """The tool calls of the selected branch's last answer, if it is complete and nothing follows it."""
        if self._head is None or self._children.get(self._head):
            return []
        last = self._exchanges[self._head]
        return last.calls if last.finish_reason in ("eos", "stop") else []

    def asked(self, exchange: Exchange) -> Exchange:
        """Return the exchange whose message the user wrote and that led to this one, through any tool calls."""
        while exchange.results and exchange.parent is not None:
            exchange = self._exchanges[exchange.parent]
        return exchange

    def children(self, id: int | None) -> list[Exchange]:
        """Return the exchanges directly after `id`, oldest first; for None those of the first messages."""
        return [self._exchanges[child] for child in self._children.get(id, ())]

    def siblings(self, id: int) -> list[Exchange]:
        """Return the alternatives at this place, `id` among them, oldest first.

        One with the same message is another answer to it (a retry), one with another message an edit.
        """
        return self.children(self._exchanges[id].parent)

    def answers(self, exchange: Exchange) -> list[Exchange]:
        """Return the exchanges with the same message at the same place, oldest first."""
        return [other for other in self.siblings(exchange.id) if other.user == exchange.user]

    def messages(self, exchange: Exchange) -> list[str]:
        """Return the different messages at this place, oldest first."""
        return list(dict.fromkeys(other.user for other in self.siblings(exchange.id)))

    def leaf(self, id: int) -> int:
        """Return the end of the branch below `id` that was selected last, else of the newest one."""
        ahead = self.ahead(id)
        return ahead[-1].id if ahead else id

    def ahead(self, id: int | None) -> list[Exchange]:
        """Return what follows `id` on the branch that was selected last, else on the newest one; next first."""
        found: list[Exchange] = []
        while children := self._children.get(id):
            id = self._looked.get(id, children[-1])
            found.append(self._exchanges[id])
        return found

    @property
    def branches(self) -> int:
        """The number of branches: exchanges that nothing follows."""
        return sum(not self._children.get(id) for id in self._exchanges)

    def select(self, id: int | None) -> None:
        """Make `id` the head; None selects the place before the first message."""
        for exchange in self.path(id):
            self._looked[exchange.parent] = exchange.id
        self._head = id


def extent(parents: Mapping[int, int | None], head: int | None) -> tuple[int, int]:
    """Return the length of the selected branch in exchanges, and the number of branches; `parents` by exchange.

    Invalid data is treated as `Tree` treats it.
    """
    if head is not None and head not in parents:
        head = max(parents, default=None)
    length = 0
    while head is not None:
        parent = parents[head]
        head, length = (
            parent if parent in parents and parent is not None and parent < head else None,
            length + 1,
        )
    return length, len(parents.keys() - {p for id, p in parents.items() if p is not None and p < id})
