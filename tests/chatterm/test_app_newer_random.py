"""Random keys in the screens about tools, models, documents, presets and pictures.

The application never ends by itself, no message is lost, and no file is written that nobody allowed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.screen import ModalScreen

from chatterm.backends.backend import CachedChunk, Exchange, ModelChoice, ToolCall
from chatterm.screens.approval import ApprovalScreen
from chatterm.sessions.store import SessionStore
from chatterm.sessions.tree import Tree
from chatterm.tools.keypress_guard import QUIET
from tests.chatterm.approving import set_clock
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.chatterm.snapshots.test_screens import gauge
from tests.fresh import seeds

KEYS = (
    "up", "down", "left", "right", "enter", "escape", "tab", "shift+tab", "space", "delete", "backspace", "home", "end",
    "pageup", "pagedown", "1", "2", "a", "n", "y", "s", "x", "z", "t", "f1", "f2", "f3", "f4", "f5", "alt+l", "alt+o",
    "alt+d", "alt+v", "alt+p", "alt+up", "alt+left", "ctrl+t", "ctrl+r", "ctrl+p", "ctrl+l", "ctrl+u", "alt+m",
)  # fmt: skip
LINES = (
    "hello", "hello", "hello", "hello", "What is on the @gauge.png?", "/tools", "/tools read,write",
    "/tools broken", "/tools off", "/model", "/model work/big", "/compare other", "/compare work/big",
    "/library", "/library add notes.md", "/library open notes", "/library remove notes", "/preset",
    "/preset terse", "/preset save mine", "/pin", "/pin 1", "/retry", "/retry 2", "/continue", "/undo",
    "/redo", "/reset", "/compact start", "/compact off", "/greet notes.md", "/stop", "/broken__x",
)  # fmt: skip
CALLS = (
    ToolCall("read_file", '{"path": "notes.md"}'),
    ToolCall("write_file", '{"path": "made.txt", "text": "a\\nb\\n"}'),
    ToolCall("patch_file", json.dumps({"path": "notes.md", "old": "level", "new": "\x1b[2Jlevel\n" * 60})),
    ToolCall("weather", "{"),
)


@pytest.fixture
def folder(tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    gauge(tmp_path / "gauge.png")
    (tmp_path / "notes.md").write_text("The level was 3.21 m.\n" * 20)
    for place, text in (
        ("presets/terse.toml", 'system = "Be terse."\ntools = ["read"]\n[sampling]\ntop_k = 7\n'),
        ("presets/wrong.toml", "tools = 3\n"),
        ("prompts/greet.md", "Greet $FILE\n"),
        ("mcp.json", json.dumps({"mcpServers": {"broken": {"command": "false"}}})),
    ):
        (own_folders / place).parent.mkdir(exist_ok=True)
        (own_folders / place).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scripts(chance: random.Random) -> list[Script]:
    return [
        Script(
            f"answer {n} ```sh\necho {n}\n```\n" + "word " * chance.randrange(30),
            reasoning="thinking " * 5 if chance.random() < 0.3 else "",
            tokens_per_s=chance.choice([None, 300.0]),
            error=RuntimeError("bad luck") if chance.random() < 0.1 else None,
            error_after=chance.choice([0, 3]),
            calls=tuple(chance.choices(CALLS, k=chance.choice([0, 1, 3]))),
        )
        for n in range(60)
    ]


class Kept:
    """Every exchange that any session had: none of them may be gone, and none may be there that nobody began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: dict[str, dict[int, str]] = {}
        self._begun: list[tuple[int, str]] = []
        """All that were added to a tree and not taken back. A session may be left before the next check."""
        add, drop = Tree.add, Tree.drop

        def added(tree: Tree, parent: int | None, user: str, model: str) -> Exchange:
            exchange = add(tree, parent, user, model)
            self._begun.append((exchange.id, user))
            return exchange

        def dropped(tree: Tree, id: int) -> None:
            user = tree[id].user
            drop(tree, id)
            self._begun.remove((id, user))

        monkeypatch.setattr(Tree, "add", added)
        monkeypatch.setattr(Tree, "drop", dropped)

    def check(self, driver: Driver) -> None:
        talk, session = driver.app.chat.conversation, driver.app.chat.conversation.saved.session
        here = {
            exchange.id: exchange.user
            for exchange in talk.tree.exchanges
            if exchange.finish_reason is not None  # else it may still be refused, and given back
        }
        if session is None:
            assert not here or driver.app.chat.conversation.saved.problem
            return
        before = self._seen.setdefault(session, {})
        assert before.items() <= here.items(), "a message is gone"
        before.update(here)

    def check_store(self, store: SessionStore) -> None:
        there = {info.id: store.load(info.id)[1].exchanges for info in store.find()}
        for session, seen in self._seen.items():
            assert seen.items() <= {exchange.id: exchange.user for exchange in there.get(session, ())}.items()
        stored = [(exchange.id, exchange.user) for exchanges in there.values() for exchange in exchanges]
        assert sorted(stored) == sorted(self._begun)


@pytest.mark.parametrize("seed", seeds(2))
async def test_random_keys(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"newer {seed}")
    backend = ScriptedBackend(scripts(chance), thinks=True, is_remote=seed % 2 == 1)
    store = SessionStore.open(folder / "sessions.db")
    kept = Kept(monkeypatch)
    choices = [
        ModelChoice("work/big", None, False, None, server="work", label="big\x1b[31m", context=262_144)
    ]
    allowed = False
    async with driven(backend, chance.choice([(80, 24), (140, 45), (40, 12)]), store=store) as driver:
        driver.app.chat.copy_with = lambda _: "xclip"
        driver.app.chat.looks = (lambda: choices,)
        await driver.send("/tools read,write")
        for _ in range(50):
            screen = driver.app.screen
            if isinstance(screen, ApprovalScreen) and chance.random() < 0.5:
                set_clock(screen, lambda: QUIET)  # as if nothing was typed for long
            if (
                isinstance(screen, ModalScreen)
                and not isinstance(screen, ApprovalScreen)
                and chance.random() < 0.2
            ):
                await driver.pilot.press("escape")
            elif chance.random() < 0.4 or screen is not driver.app.chat:
                keys = chance.choices(KEYS, k=chance.randrange(1, 4))
                allowed |= isinstance(screen, ApprovalScreen) and "enter" in keys
                await driver.pilot.press(*keys)
            else:
                driver.composer.put(chance.choice(LINES))
                driver.composer.focus()
                await driver.pilot.press("enter")
            if chance.random() < 0.2:
                backend.chunks = (
                    CachedChunk("notes", 12_480, True, chance.randrange(12_480), 0, 3, 46_080, is_read=False),
                )
                backend.prefill = (chance.randrange(2_000), 2_000)
            if chance.random() < 0.3:
                await driver.until(lambda: driver.app.worker._jobs.empty())
                await driver.pilot.pause(0.05)
            kept.check(driver)
        while driver.app.screen is not driver.app.chat or not driver.app.chat.is_idle:
            await driver.pilot.press("escape")
            await driver.pilot.pause(0.05)
        await driver.idle()
        kept.check(driver)
        assert allowed or not (folder / "made.txt").exists()
    assert store.close()
    store = SessionStore.open(folder / "sessions.db")
    kept.check_store(store)
    store.close()
