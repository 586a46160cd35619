"""Run as a program: chats with itself until it is killed."""

import sys
from pathlib import Path
from time import sleep

from chatterm.backends.backend import TokenEvent
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree


def main(path: Path, steps_per_answer: int) -> None:
    store, tree = SessionStore.open(path), Tree()
    session = store.new(SessionInfo(model="m"))
    store.flush()  # the database is there
    print(session, flush=True)
    while True:
        exchange = tree.add(tree.head, f"question {len(tree) + 1}", "m")
        store.save(session, exchange)
        store.head(session, exchange.id)
        for step in range(steps_per_answer):
            event = TokenEvent(f"{step} ", step, "answer")
            exchange.add((event,))
            store.say(session, exchange, (event,))
            sleep(0.002)
        exchange.finish_reason = "eos"
        store.save(session, exchange)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
