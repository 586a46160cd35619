"""Texts for speculation: other branches of a session, and the latest other sessions with the same model."""

from collections.abc import Iterator

from chatterm.backends.backend import Exchange
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree

_SESSIONS = 6
"""The most other sessions to use."""
_CHARACTERS = 100_000
"""The most characters of a message."""
_TOKENS = 1 << 17
"""The most tokens of all exchanges together, approximately."""


def elsewhere(store: SessionStore | None, session: str | None, tree: Tree, model: str) -> list[Exchange]:
    """Return exchanges, latest first, with only what guesses may come from. Reads the disk. Raises SessionError."""
    found, tokens = list[Exchange](), 0
    for exchange in _all(store, session, tree, model):
        message = exchange.user[:_CHARACTERS]
        tokens += len(exchange.token_ids) + len(message) // 4
        if tokens > _TOKENS:
            break
        bare = Exchange(exchange.id, None, message, model=exchange.model)
        bare.token_ids = list(exchange.token_ids)
        found.append(bare)
    return found


def _all(store: SessionStore | None, session: str | None, tree: Tree, model: str) -> Iterator[Exchange]:
    path = {exchange.id for exchange in tree.path(tree.head)}
    yield from (exchange for exchange in reversed(tree.exchanges) if exchange.id not in path)
    if store is not None:
        others = [info for info in store.find() if info.model == model and info.id != session]
        for info in others[:_SESSIONS]:
            yield from reversed(store.exchanges(info.id))
