"""How long each action holds the chat screen up in a long conversation: the longest turn of its event loop.

    python benchmarks/tui_long.py               20 exchanges, then 2,000 with some 250,000 rows
    python benchmarks/tui_long.py --pasted      20 exchanges, then two messages of 2,000 rows
    python benchmarks/tui_long.py --repeats 9

The program runs without a terminal. Times are medians over the repetitions, and of the processor, so that other
programs do not count; yet a busy machine makes every action slower, hence the short conversation beside the long one.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from textual import events
from textual.geometry import Size
from textual.keys import _character_to_key
from textual.selection import Selection

from chatterm.backends.backend import Exchange
from chatterm.conversation.entries import AnswerEntry
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend

GOAL = 20.0
"""Milliseconds."""
_QUIET = 0.3
"""Seconds without activity after which an action counts as over."""


class LongestTurn:
    """The longest turn of the event loop, in seconds of this thread's processor time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.seconds = max(self.seconds, time.thread_time() - began)

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]


class Backend(ScriptedBackend):
    """A backend that counts no words, because a real model knows its token counts."""

    used_tokens = 90_000


def exchanges(count: int, *, pasted: bool) -> list[Exchange]:
    """Return the conversation: two long messages, or `count` exchanges of some 105 rows."""
    rows = "\n".join(f"line {number}: a river runs through the pasted text here" for number in range(2000))
    code = "\n".join(f"x{number} = {number}  # river" for number in range(40))
    prose = "It tells of **rivers**, `code` and the sea, and is long enough to wrap at a hundred columns or fewer."
    answer = f"{f'## A heading{chr(10)}{prose}{chr(10) * 2}' * 16}\n```python\n{code}\n```\n"
    said = [(rows, "I see a river."), ("And now?", rows)] if pasted else [("Tell me of it.", answer)] * count
    return [
        Exchange(
            id=number, parent=number - 1 or None, user=user, text=text, reasoning="A thought.\n" * 3,
            finish_reason="eos", model="scripted", created=1.7e9 + number,
        )
        for number, (user, text) in enumerate(said, 1)
    ]  # fmt: skip


def press(driver: Driver, *keys: str) -> None:
    """Send keys as fast as a program can."""
    for key in keys:
        event = events.Key(_character_to_key(key), key) if len(key) == 1 else events.Key(key, None)
        event.set_sender(driver.app)
        driver.app._driver.send_message(event)  # type: ignore[union-attr]


def resize(driver: Driver, width: int, height: int) -> None:
    driver.app.post_message(events.Resize(Size(width, height), Size(width, height)))


def actions(driver: Driver) -> dict[str, Callable[[], object]]:
    """Return what is timed, in order."""
    chat, do = driver.app.chat, driver.app.chat.action_run_command
    keys: dict[str, Sequence[str]] = {
        "type": ["x", "backspace"], "page up": ["pageup"], "to the top": ["ctrl+home"], "to the end": ["ctrl+end"],
        "search: open": ["ctrl+f"], "search: one letter": ["r"], "search: a word": list("iver"),
        "search: next": ["down"] * 5, "search: nothing": list("zzz"), "search: close": ["escape"],
    }  # fmt: skip
    more: dict[str, Callable[[], object]] = {
        "select": lambda: do("select", "prev"),
        "select up": lambda: press(driver, "up", "up"),
        "fold": lambda: press(driver, "t", "t", "escape"),
        "all thinking": lambda: do("think", "show"),
        "resize": lambda: resize(driver, 70, 30),
        "resize back": lambda: resize(driver, 100, 40),
        "theme": lambda: driver.app.use_theme("paper"),
        "select all text": lambda: setattr(chat, "selections", {chat.transcript: Selection(None, None)}),
        "copy the selection": lambda: press(driver, "ctrl+c"),
        "copy all": lambda: do("copy", "all"),
        "copy code": lambda: do("copy", "code"),
        "export": lambda: do("export", "html"),
        "statistics": lambda: do("stats", ""),
        "cache why": lambda: do("cache", "why"),
        "compact": lambda: do("compact", ""),
        "palette": lambda: press(driver, "ctrl+p"),
        "pin": lambda: do("pin", "1"),
        "send": lambda: chat.writing.send_as_it_is("hello", "hello"),
        "retry": lambda: do("retry", ""),
        "branch": lambda: do("branch", "prev"),
        "undo": lambda: do("undo", ""),
        "redo": lambda: do("redo", ""),
        "edit": lambda: do("edit", "1"),
        "leave the edit": lambda: press(driver, "escape"),
        "candidates": lambda: do("retry", "2"),
        "theme back": lambda: driver.app.use_theme("graphite"),
    }
    return {name: lambda what=what: press(driver, *what) for name, what in keys.items()} | more


async def settled(driver: Driver) -> None:
    """Wait until nothing is read or answered and everything is laid out, and a moment longer."""
    await asyncio.sleep(_QUIET)
    # What is asked must take no time: the turns of this program count, too.
    while driver._is_reading or driver.transcript._column.stale or not driver.app.chat.is_idle:
        await asyncio.sleep(0.05)
    await asyncio.sleep(_QUIET)


async def measured(turn: LongestTurn, made: list[Exchange], repeats: int, folder: Path) -> dict[str, float]:
    """Return the milliseconds of each action's longest turn, the median of `repeats`."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    store = SessionStore.open(folder / f"{len(made)}.db")
    session = store.add(SessionInfo(title="Rivers", model="scripted"), made, len(made))
    backend = Backend([Script("A **new** answer. " * 40)], context_length=131_072)
    async with driven(backend, (100, 40), store=store) as driver:
        driver.app.chat.copy_with = lambda text: ""

        async def act(name: str, action: Callable[[], object]) -> None:
            turn.seconds, began = 0.0, time.thread_time()
            action()  # it counts, although it runs in a turn of this program
            taken = time.thread_time() - began
            await settled(driver)
            found[name].append(1e3 * max(turn.seconds, taken))
            if driver.app.screen is not driver.app.chat:
                press(driver, "escape")
                await driver.until(lambda: driver.app.screen is driver.app.chat)

        await act("open", lambda: driver.app.chat.sessions.open(session))
        answers = [entry for entry in driver.transcript.entries if isinstance(entry, AnswerEntry)]
        print(f"{len(answers):,} answers, {driver.transcript.virtual_size.height:,} rows")
        for _ in range(repeats):
            for name, action in actions(driver).items():
                await act(name, action)
        await act("reset", lambda: driver.app.chat.action_run_command("reset", ""))
    store.close()
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exchanges", type=int, default=2000, help="how many the long conversation has")
    parser.add_argument("--pasted", action="store_true", help="two messages of 2,000 rows instead")
    parser.add_argument("--repeats", type=int, default=5, help="how often each action is timed")
    arguments = parser.parse_args()
    turn, both = LongestTurn(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CHATTERM_DATA": folder, "CHATTERM_CONFIG": f"{folder}/config.toml"}
        os.chdir(folder)
        for made in (exchanges(20, pasted=False), exchanges(arguments.exchanges, pasted=arguments.pasted)):
            both.append(asyncio.run(measured(turn, made, arguments.repeats, Path(folder))))
        os.chdir("/")
    print(f"{'longest turn, ms':<24}{'short':>10}{'long':>10}")
    for name, short in both[0].items():
        note = "  above the goal" if both[1][name] > GOAL else ""
        print(f"{name:<24}{short:>10.1f}{both[1][name]:>10.1f}{note}")


if __name__ == "__main__":
    main()
