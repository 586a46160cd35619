"""What was said elsewhere: on other branches of a session, and in the latest other sessions with the same model."""

from chatterm.backends.backend import Exchange
from chatterm.sessions.store import Store
from chatterm.sessions.tree import Tree

_SESSIONS = 6
"""Earlier sessions that are looked into."""
_TOKENS = 1 << 17
"""Of answers, after which no more sessions are looked into."""


def elsewhere(store: Store | None, session: str | None, tree: Tree, model: str) -> list[Exchange]:
    """The latest first. It reads from the disk. Raises SessionError."""
    path = {exchange.id for exchange in tree.path(tree.head)}
    found = [exchange for exchange in reversed(tree.exchanges) if exchange.id not in path]
    if store is None:
        return found
    others = [info for info in store.find() if info.model == model and info.id != session]
    for info in others[:_SESSIONS]:
        if sum(len(exchange.token_ids) for exchange in found) < _TOKENS:
            found += reversed(store.exchanges(info.id))
    return found
