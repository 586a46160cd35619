"""Random use of the screen: it never ends, and screen, tree, store and backend agree whenever nothing runs."""

import random
from pathlib import Path

import pytest

from chatterm.conversation.entries import AnswerEntry, UserEntry
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.fresh import seeds

KEYS = (
    "alt+up", "alt+down", "alt+left", "alt+right", "up", "down", "left_square_bracket", "right_square_bracket",
    "c", "e", "r", "t", "y", "enter", "escape", "ctrl+r", "alt+e", "alt+u", "alt+g", "alt+a", "alt+c", "alt+k",
    "ctrl+t", "f1", "f2", "f4", "alt+s", "alt+x", "pageup", "ctrl+end", "x", "space", "backspace", "ctrl+n",
    "alt+z", "f9", "ctrl+k", "ctrl+x", "ctrl+w", "ctrl+u", "ctrl+z", "ctrl+y", "ctrl+v", "ctrl+j", "tab",
)  # fmt: skip
LINES = (
    "hello", "another message", "/retry", "/edit 1", "/edit -1", "/undo", "/branch prev", "/branch next",
    "/continue", "/copy", "/copy code", "/think show", "/think hide", "/stop", "/select prev", "/expand",
    "/model other", "/system Be terse.", "/rename x", "/reset", "/stats",
    "/undo", "/redo", "/branch",
)  # fmt: skip


def check(driver: Driver, backend: ScriptedBackend) -> None:
    talk = driver.app.chat.conversation
    shown = [e for e in driver.transcript.entries if isinstance(e, UserEntry | AnswerEntry)]
    assert shown == [entry for exchange in talk.path for entry in talk.entries_of(exchange)]
    for exchange in talk.path:
        assert talk.entries_of(exchange)[0].text == exchange.user
        assert "".join(talk.entries_of(exchange)[1].source) == exchange.text
        assert exchange.finish_reason is not None
    editing = driver.app.chat.editing
    paths = [talk.path, talk.tree.path(editing.parent)] if editing is not None else [talk.path]
    assert backend.history in [[(exchange.user, exchange.text) for exchange in path] for path in paths]
    assert len(talk.tree) == len({exchange.id for exchange in talk.tree.exchanges})


@pytest.mark.parametrize("seed", seeds(2))
async def test_random_use(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    scripts = [
        Script(
            f"answer {n} ```\ncode\n``` " + "word " * chance.randrange(30),
            reasoning="thinking " * 5 if chance.random() < 0.3 else "",
            tokens_per_s=chance.choice([None, 300.0]),
            error=RuntimeError("bad luck") if chance.random() < 0.1 else None,
            error_after=chance.choice([0, 3]),
        )
        for n in range(40)
    ]
    backend = ScriptedBackend(scripts, thinks=True)
    store = SessionStore.open(tmp_path / "sessions.db")
    async with driven(backend, store=store) as driver:
        driver.app.chat.copy_with = lambda _: "xclip"
        for _ in range(40):
            if chance.random() < 0.5:
                await driver.pilot.press(*chance.choices(KEYS, k=chance.randrange(1, 4)))
            else:
                driver.composer.put(chance.choice(LINES))
                driver.composer.focus()
                await driver.pilot.press("enter")
            if chance.random() < 0.3:
                await driver.done()
                if driver.app.chat.is_idle:
                    check(driver, backend)
        await driver.pilot.press("escape", "escape", "escape")
        await driver.idle()
        talk, session = driver.app.chat.conversation, driver.app.chat.conversation.saved.session
        if session is not None:
            _, tree, _ = store.load(session)
            assert [(e.user, e.text) for e in tree.exchanges] == [
                (e.user, e.text) for e in talk.tree.exchanges
            ]
            assert tree.head == talk.tree.head
    store.close()
