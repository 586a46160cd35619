"""Continuing a session from the command line: finding it, and restoring its options."""

from dataclasses import replace

from chatterm.backends.backend import ChatOptions
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.sessions.titles import pick


def sessions_to_choose_from(store: SessionStore, text: str = "") -> list[SessionInfo]:
    """Return the sessions that `store.find` finds. Raises SessionError if the database cannot even be read."""
    found = store.find(text)
    if not found and store.trouble is not None:
        raise SessionError(store.trouble.in_shell)
    return found


def find_session(name: str | None) -> SessionInfo:
    """Find the session meant by `name` (see `titles.pick`), the latest for None. Raises SessionError."""
    store = SessionStore.open()
    try:
        sessions = sessions_to_choose_from(store)
        if name is None and not sessions:
            raise SessionError("There is no session to continue yet; chatterm run starts one.")
        found = sessions[0] if name is None else pick(sessions, name)
        return store.load(found.id)[0]
    finally:
        store.close()


def resumed(options: ChatOptions, session: SessionInfo, *, think: bool, think_cache: bool) -> ChatOptions:
    """Return `options` with the session's settings wherever the user chose nothing else now.

    `think` and `think_cache` say whether these were chosen now.
    """
    return replace(
        options,
        system=session.system if options.system is None else options.system,
        documents=session.documents,
        think=options.think if think else session.think,
        think_cache=options.think_cache if think_cache else session.think_cache,
        sampling={**session.sampling, **options.sampling},
    )
