"""/retry N: several answers at once. One is kept, all are branches; whatever happens, they are saved as they come."""

import random
import threading
from pathlib import Path

import pytest

from chatterm.backends.backend import EngineError
from chatterm.screens.candidates import Candidates, CandidatesScreen
from chatterm.sessions.store import SessionStore
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.covering import each_value_once
from tests.fresh import seeds


def texts(driver: Driver) -> list[str]:
    """Every answer in the tree, oldest first."""
    return [exchange.text for exchange in driver.app.chat.conversation.tree.exchanges]


async def draws(driver: Driver, count: int, *, wait: bool = True) -> Candidates:
    await driver.send(f"/retry {count}", wait=wait)
    await driver.until(lambda: isinstance(driver.app.screen, CandidatesScreen))
    view = driver.app.screen.query_one(Candidates)
    await driver.until(lambda: view._turns and not (wait and view._is_running))
    return view


def backend(*answers: str, gate: threading.Event | None = None, after: int = 2) -> ScriptedBackend:
    return ScriptedBackend(
        [Script("first"), *(Script(text, gate=gate, gate_after=after) for text in answers)]
    )


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        (["enter"], "alpha"),
        (["right", "enter"], "beta"),
        (["3"], "gamma"),
        (["tab", "tab", "enter"], "gamma"),
    ],
)
async def test_one_is_kept_and_all_are_branches(keys: list[str], kept: str) -> None:
    script = backend("alpha", "beta", "gamma")
    async with driven(script, size=(140, 45)) as driver:
        await driver.send("q")
        await draws(driver, 3)
        assert all(text in driver.text() for text in ("alpha", "beta", "gamma", "3 answers"))
        await driver.pilot.press(*keys)
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        await driver.idle()
        assert driver.answers == [kept]
        assert f"< {texts(driver).index(kept) + 1}/4 >" in driver.text()
        assert texts(driver) == ["first", "alpha", "beta", "gamma"]
        await driver.until(lambda: script.history == [("q", kept)])
        await driver.send("next")
        assert script.history[0] == ("q", kept)


async def test_escape_goes_back_to_the_earlier_answer() -> None:
    script = backend("alpha", "beta")
    async with driven(script) as driver:
        await driver.send("q")
        await draws(driver, 2)
        assert "Esc keeps the earlier answer" in driver.text()
        await driver.pilot.press("escape")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["first"]
        assert "< 1/3 >" in driver.text()
        assert texts(driver) == ["first", "alpha", "beta"]


async def test_escape_stops_them_first() -> None:
    gate = threading.Event()
    async with driven(backend("one two three", "four five six", gate=gate)) as driver:
        await driver.send("q")
        await draws(driver, 2, wait=False)
        await driver.until(lambda: texts(driver)[1:] == ["one two ", "four fiv"])
        assert "Esc stops them" in driver.text()
        await driver.pilot.press("escape")
        await driver.idle()
        assert isinstance(driver.app.screen, CandidatesScreen)
        await driver.shows("stopped")
        await driver.pilot.press("2")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        await driver.idle()
        assert driver.answers == ["four fiv"]
        await driver.shows("/continue resumes")


async def test_one_is_kept_while_they_come() -> None:
    gate = threading.Event()
    script = backend("one two three", "four five six", gate=gate)
    async with driven(script) as driver:
        await driver.send("q")
        await draws(driver, 2, wait=False)
        await driver.until(lambda: texts(driver)[1:] == ["one two ", "four fiv"])
        await driver.pilot.press("2")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["four fiv"]
        assert not driver.app.chat.is_idle
        gate.set()
        await driver.idle()
        assert driver.answers == ["four five six"]
        exchanges = driver.app.chat.conversation.tree.exchanges
        assert [e.finish_reason for e in exchanges] == ["eos", "cancelled", "eos"]
        await driver.until(lambda: script.history == [("q", "four five six")])


async def test_stopped_before_a_word_nothing_was_ever_there() -> None:
    gate = threading.Event()
    async with driven(backend("one", "two", gate=gate, after=0)) as driver:
        await driver.send("q")
        await draws(driver, 2, wait=False)
        await driver.shows("reading")
        await driver.pilot.press("escape")
        await driver.idle()
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert (driver.answers, texts(driver)) == (["first"], ["first"])
        assert "/3" not in driver.text()


async def test_they_may_be_gone_while_the_map_of_the_cache_stands_over_them() -> None:
    gate = threading.Event()
    async with driven(backend("one", "two", gate=gate, after=0)) as driver:
        await driver.send("q")
        await draws(driver, 2, wait=False)
        await driver.pilot.press("f3")
        assert type(driver.app.screen).__name__ == "CacheScreen"
        driver.app.chat.conversation.stop()
        await driver.idle()
        await driver.pilot.pause(0.3)
        await driver.pilot.press("escape")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["first"]


async def test_an_error_of_one_is_not_that_of_the_others() -> None:
    bad = Script("never said", error=EngineError("no room"), error_after=0)
    late = Script("half said", error=EngineError("no more room"), error_after=1)
    async with driven(ScriptedBackend([Script("first"), bad, Script("good"), late])) as driver:
        await driver.send("q")
        await draws(driver, 3)
        await driver.shows("Answer 1 failed: no room")
        assert "1 token · failed" in driver.text()
        assert driver.text().count("no more room") == 1
        await driver.pilot.press("1")  # it is gone
        assert isinstance(driver.app.screen, CandidatesScreen)
        await driver.pilot.press("3")  # numbers stay as they were shown
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        await driver.idle()
        assert texts(driver) == ["first", "good", "half"]
        assert driver.answers == ["half"]
        await driver.until(lambda: "no more room" in " ".join(driver.errors))


async def test_one_that_is_gone_since_it_was_drawn_cannot_be_kept() -> None:
    bad = Script(error=EngineError("no room"), gate=(gate := threading.Event()), gate_after=0)
    async with driven(ScriptedBackend([Script("first"), Script("good"), bad])) as driver:
        await driver.send("q")
        view = await draws(driver, 2, wait=False)
        gone = view.numbered("2")
        assert gone is not None
        gate.set()
        await driver.until(lambda: gone not in driver.app.chat.conversation.choice)
        assert isinstance(driver.app.screen, CandidatesScreen)
        driver.app.screen._keep(gone)  # as by its key before the next frame
        await driver.pilot.press("1")
        await driver.idle()
        assert (driver.answers, texts(driver)) == (["good"], ["first", "good"])


async def test_one_that_fails_before_they_are_shown_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen is composed a little after it is asked for, on a busy machine much later."""
    bad = Script(error=EngineError("no room"))
    async with driven(ScriptedBackend([Script("first"), bad, Script("good")])) as driver:
        await driver.send("q")
        asked = []
        monkeypatch.setattr(driver.app, "push_screen", asked.append)
        await driver.send("/retry 2")
        assert len(driver.app.chat.conversation.choice) == 1
        monkeypatch.undo()
        driver.app.push_screen(asked.pop())
        await driver.shows("Answer 1 failed: no room")
        await driver.pilot.press("2")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        await driver.idle()
        assert driver.answers == ["good"]


async def test_refused_altogether() -> None:
    class Refusing(ScriptedBackend):
        def candidates(self, text: str, count: int):  # type: ignore[no-untyped-def]
            raise EngineError("the context is full")

    async with driven(Refusing([Script("first")])) as driver:
        await driver.send("q")
        await driver.send("/retry 2")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.errors == ["the context is full"]
        assert (driver.answers, texts(driver)) == (["first"], ["first"])


@pytest.mark.parametrize(
    "count", ["0", "9", "-1", "two", "1.5", "٣", "9" * 5000], ids=lambda count: count[:5]
)
async def test_a_number_that_makes_no_sense(count: str) -> None:
    async with driven(backend("x")) as driver:
        await driver.send("q")
        await driver.send(f"/retry {count}")
        assert "/retry takes a number from 1 to 8" in driver.errors[-1]
        assert driver.app.screen is driver.app.chat


async def test_they_are_saved_as_they_come(tmp_path: Path) -> None:
    gate = threading.Event()
    store = SessionStore.open(tmp_path / "sessions.db")
    try:
        async with driven(backend("one two three", "four five six", gate=gate), store=store) as driver:
            await driver.send("q")
            await draws(driver, 2, wait=False)
            await driver.until(lambda: texts(driver)[1:] == ["one two ", "four fiv"])
            session = driver.app.chat.conversation.saved.session
            assert session is not None
            store.flush()
            await driver.until(
                lambda: [len(e.token_ids) for e in store.load(session)[1].exchanges] == [2, 2, 2]
            )
            gate.set()
            await driver.idle()
            await driver.pilot.press("2")
            await driver.until(lambda: driver.app.screen is driver.app.chat)
        _, tree, _ = store.load(session)
        assert [e.text for e in tree.exchanges] == ["first", "one two three", "four five six"]
        assert tree[tree.head or 0].text == "four five six"
    finally:
        store.close()


async def test_a_click_keeps_one_that_can_be_read_and_opens_one_that_cannot() -> None:
    async with driven(backend("alpha", "beta"), size=(140, 45)) as driver:
        await driver.send("q")
        view = await draws(driver, 2)
        box = view._boxes[1]
        await driver.pilot.click(offset=(box.x + 6, box.y + 4))
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["beta"]
    async with driven(backend("alpha", "beta", "gamma"), size=(60, 20)) as driver:
        await driver.send("q")
        view = await draws(driver, 3)
        for _ in range(2):
            assert isinstance(driver.app.screen, CandidatesScreen)
            box = view._boxes[2]
            await driver.pilot.click(offset=(box.x + 6, box.y + 1))
            await driver.pilot.pause()
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["gamma"]


@each_value_once
@pytest.mark.parametrize("size", [(140, 45), (80, 24), (50, 12), (30, 8), (20, 5)])
@pytest.mark.parametrize("count", [2, 3, 8])
async def test_every_candidate_can_be_seen_and_nothing_stands_over_another(
    size: tuple[int, int], count: int
) -> None:
    answers = [f"answer{number} " * 40 for number in range(1, count + 1)]
    async with driven(backend(*answers), size=size) as driver:
        await driver.send("q")
        view = await draws(driver, count)
        for number, turn in enumerate(view._turns, 1):
            view.select(turn)
            await driver.pilot.pause()
            if size[1] >= 2 * count + 4:
                assert f"answer{number} " in driver.text()
            cells = [
                (x, y)
                for box in view._boxes
                for x in range(box.x, box.x + box.width)
                for y in range(box.y, box.y + box.height)
            ]
            assert len(cells) == len(set(cells))
        await driver.pilot.press("pagedown", "pagedown", "pageup", "up", "down", "f3", "escape", "enter")
        await driver.until(lambda: driver.app.screen is driver.app.chat)


async def test_a_window_without_a_row_for_them() -> None:
    async with driven(backend("alpha", "beta"), size=(80, 3)) as driver:
        await driver.send("q")
        await draws(driver, 2)
        await driver.pilot.press("pagedown", "2")
        await driver.until(lambda: driver.app.screen is driver.app.chat)
        assert driver.answers == ["beta"]


async def test_the_rest_of_a_long_one_is_a_page_away() -> None:
    long = "\n\n".join(f"paragraph {number}" for number in range(60))
    async with driven(backend(long, "short"), size=(140, 30)) as driver:
        await driver.send("q")
        await draws(driver, 2)
        assert "paragraph 0" in driver.text()
        assert "more lines" in driver.text()
        seen = set[str]()
        for _ in range(12):
            seen.update(driver.text().split())
            await driver.pilot.press("pagedown")
        await driver.shows("paragraph 59")
        assert {str(number) for number in range(59)} <= seen
        assert "▾" not in driver.text()
        assert "▴" in driver.text()


async def test_one_that_is_not_open_shows_how_it_begins_as_it_is_read() -> None:
    answers = ["plain", "**bold** and\n\n```python\nx = 1\n```", "last"]
    async with driven(backend(*answers)) as driver:
        await driver.send("q")
        await draws(driver, 3)
        assert "bold and python x = 1" in " ".join(driver.text().split())
        await driver.pilot.press("escape")


@pytest.mark.parametrize("seed", seeds(2))
async def test_random_keys(seed: int, tmp_path: Path) -> None:
    """Whatever is pressed meanwhile: in the end tree, store, screen and backend agree."""
    chance = random.Random(seed)
    keys = (
        "left",
        "right",
        "up",
        "down",
        "pagedown",
        "1",
        "2",
        "4",
        "9",
        "x",
        "tab",
        "f3",
        "escape",
        "enter",
    )
    scripts = [
        Script(
            f"answer {n} " + "word " * chance.randrange(20),
            reasoning="hm " * 5 if chance.random() < 0.3 else "",
            tokens_per_s=chance.choice([None, 200.0]),
            error=EngineError("bad luck") if chance.random() < 0.15 else None,
            error_after=chance.choice([0, 2]),
        )
        for n in range(30)
    ]
    scripted = ScriptedBackend([Script("first"), *scripts], thinks=True)
    store = SessionStore.open(tmp_path / "sessions.db")
    try:
        async with driven(scripted, store=store) as driver:
            await driver.send("q")
            for _ in range(6):
                driver.composer.put(chance.choice(["/retry 2", "/retry 5", "/retry", "more"]))
                await driver.pilot.press("enter", *chance.choices(keys, k=chance.randrange(4)))
                await driver.idle()
                for _ in range(40):
                    if driver.app.screen is driver.app.chat:
                        break
                    await driver.pilot.press(chance.choice(["enter", "escape"]))
                    await driver.pilot.pause(0.05)
                await driver.done()
                driver.composer.put("")
            talk, session = driver.app.chat.conversation, driver.app.chat.conversation.saved.session
            assert session is not None
            assert not talk.choice
            shown = [(e.user, e.text) for e in talk.path]
            assert list(zip(driver.questions, driver.answers, strict=True)) == shown
            await driver.until(lambda: scripted.history == shown)
            _, tree, _ = store.load(session)
            assert [(e.parent, e.text) for e in tree.exchanges] == [
                (e.parent, e.text) for e in talk.tree.exchanges
            ]
            assert tree.head == talk.tree.head
            assert all(e.finish_reason is not None for e in tree.exchanges)
    finally:
        store.close()
