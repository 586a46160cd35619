"""Sessions to test with."""

from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree


def conversation(store: SessionStore, *messages: str, model: str = "smollm2") -> tuple[str, Tree]:
    """A saved session that asks `messages` one after the other; the answers say them again."""
    session, tree = store.new(SessionInfo(model=model)), Tree()
    for number, message in enumerate(messages):
        exchange = tree.add(tree.head, message, model)
        exchange.text, exchange.finish_reason = f"You said: {message}", "eos"
        exchange.token_ids = [number, 50_000 + number, 2]
        exchange.shown = (0, 2)
        store.save(session, exchange)
    store.head(session, tree.head)
    return session, tree
