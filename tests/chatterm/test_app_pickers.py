"""The map of the cache and the model picker over the conversation, and the note about the context."""

from dataclasses import replace
from threading import Event

import pytest
from textual.geometry import Size
from textual.widgets import Input

from chatterm.backends.backend import DraftCost, EngineError, Figures, ModelChoice
from chatterm.markdown.lines import line_cells, line_text
from chatterm.screens.cache import CacheMap, CacheScreen
from chatterm.screens.models import ModelList, ModelPicker, choice_line, head_line
from chatterm.screens.picker import PickerList
from chatterm.widgets.meter import ContextNote
from engine.cache.block_map import BlockMap, BlockState
from models.hub.catalogue import names
from tests.chatterm.driving import Driver, driven
from tests.chatterm.scripted import Script, ScriptedBackend
from tests.counting import PATIENCE

MAP = BlockMap(16, bytes([BlockState.HELD] * 4 + [BlockState.FREE] * 16), (0, 1, 2, 3), 60, 60, 0, 0, 0)


async def test_the_map_follows_the_cache_while_it_is_open() -> None:
    backend = ScriptedBackend([Script("Hello.")], map=MAP)
    async with driven(backend) as driver:
        await driver.send("q")
        await driver.send("/cache")
        await driver.shows("60 tokens, all of them in the cache")
        backend.map = replace(MAP, tokens=80, present=70)
        await driver.shows("80 tokens, 70 of them in the cache")
        await driver.pilot.press("escape")
        assert not isinstance(driver.app.screen, CacheScreen)
        assert driver.answers == ["Hello."]


async def test_without_a_model_there_is_no_map() -> None:
    async with driven(ScriptedBackend()) as driver:
        await driver.send("/cache")
        await driver.shows("There is nothing to show")
        await driver.pilot.click(CacheMap)
        assert not isinstance(driver.app.screen, CacheScreen)


async def picking(driver: Driver) -> ModelPicker:
    await driver.send("/model")
    await driver.until(lambda: isinstance(driver.app.screen, ModelPicker))
    screen = driver.app.screen
    assert isinstance(screen, ModelPicker)
    await driver.until(lambda: screen.query(ModelList) and screen.query_one(ModelList).count)
    await driver.pilot.pause()
    return screen


def switched(backend: ScriptedBackend) -> list[object]:
    return [value for name, value in backend.calls if name == "switch"]


async def test_a_model_is_picked_with_keys() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await picking(driver)
        await driver.shows("downloaded")
        await driver.shows("does not fit")
        await driver.pilot.press("down", "down", "up", "enter")
        await driver.idle()
        assert switched(backend) == ["other"]
        await picking(driver)
        await driver.pilot.press("escape")
        assert switched(backend) == ["other"]


async def test_typing_searches_and_a_name_of_no_list_can_be_typed() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        screen = await picking(driver)
        await driver.types("hug")
        await driver.until(lambda: screen.query_one(ModelList).chosen == "huge")
        assert "scripted" not in driver.text().splitlines()[10]
        screen.query_one(Input).value = "some/one-else"
        await driver.shows("No match")
        await driver.pilot.press("enter")
        await driver.idle()
        assert switched(backend) == ["some/one-else"]


class Late(ScriptedBackend):
    """Its list of models comes when the gate is open, or with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate, self.fails = Event(), False

    def catalogue(self) -> list[ModelChoice]:
        assert self.gate.wait(PATIENCE)
        if self.fails:
            raise EngineError("The model cache cannot be read.")
        return super().catalogue()


async def opened_early(driver: Driver) -> None:
    await driver.send("/model", wait=False)
    await driver.shows("Reading the list")


async def test_what_is_typed_before_there_is_a_list_is_searched_and_entered_in_it() -> None:
    backend = Late()
    async with driven(backend) as driver:
        await opened_early(driver)
        await driver.pilot.press("enter")  # nothing to choose yet, nothing typed
        await driver.types("hug")
        await driver.pilot.press("enter")
        assert driver.composer.text == ""
        assert isinstance(driver.app.screen, ModelPicker)
        backend.gate.set()
        await driver.until(lambda: switched(backend) == ["huge"])
        await driver.idle()
        assert driver.answers == []


@pytest.mark.parametrize("moves", [False, True])
async def test_servers_that_answer_first_take_the_choice_from_nobody(moves: bool) -> None:
    backend = Late()
    async with driven(backend) as driver:
        far = [ModelChoice(f"far/{n}", None, False, None, server="far", label=str(n)) for n in range(3)]
        driver.app.chat.looks = (lambda: far,)
        await driver.send("/model", wait=False)
        screen = driver.app.screen
        await driver.until(lambda: screen.query(ModelList) and screen.query_one(ModelList).count == 3)
        if moves:
            await driver.pilot.press("down")
        backend.gate.set()
        await driver.shows("to download")
        assert screen.query_one(ModelList).chosen == ("far/1" if moves else "scripted")


async def test_who_types_on_after_enter_has_not_chosen_yet() -> None:
    backend = Late()
    async with driven(backend) as driver:
        await opened_early(driver)
        await driver.types("o")
        await driver.pilot.press("enter")
        await driver.types("t")
        backend.gate.set()
        await driver.shows("other")
        assert isinstance(driver.app.screen, ModelPicker)
        await driver.pilot.press("enter")
        await driver.until(lambda: switched(backend) == ["other"])


@pytest.mark.parametrize("fails", [False, True])
async def test_who_leaves_before_there_is_a_list_has_left(fails: bool) -> None:
    backend = Late()
    backend.fails = fails
    async with driven(backend) as driver:
        await opened_early(driver)
        await driver.types("hug")
        await driver.pilot.press("enter", "escape")
        backend.gate.set()
        await driver.idle()
        assert not isinstance(driver.app.screen, ModelPicker)
        assert switched(backend) == []


async def test_without_a_list_a_name_can_be_typed() -> None:
    backend = Late()
    backend.fails = True
    async with driven(backend) as driver:
        await opened_early(driver)
        backend.gate.set()
        await driver.shows("There is no list; type a name.")
        await driver.types("mine")
        await driver.pilot.press("enter")
        await driver.until(lambda: switched(backend) == ["mine"])
        await driver.shows("The model cache cannot be read.")


async def test_while_an_answer_runs_the_picker_says_when_its_list_comes() -> None:
    gate = Event()
    backend = ScriptedBackend([Script("Slowly said.", gate=gate)])
    async with driven(backend) as driver:
        await driver.send("q", wait=False)
        await driver.until(lambda: driver.app.chat.conversation.turn is not None)
        await driver.send("/model", wait=False)
        await driver.shows("The list comes when the answer is finished.")
        gate.set()
        await driver.shows("to download")


async def test_a_model_is_picked_with_the_mouse() -> None:
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        await picking(driver)
        await driver.pilot.click(ModelList, offset=(4, 1))
        await driver.idle()
        assert switched(backend) == ["other"]


async def test_a_long_list_scrolls_with_the_choice() -> None:
    backend = ScriptedBackend()
    backend.choices = [ModelChoice(f"model-{n}", 10**9, True, True) for n in range(60)]
    async with driven(backend, (60, 20)) as driver:
        await picking(driver)
        await driver.pilot.press(*["pagedown"] * 4, "down", "down")
        await driver.shows("model-42")
        assert "model-0 " not in driver.text()


SLOW = ModelChoice(
    "slow", 16 * 10**9, False, True, 17 * 10**9, tokens_per_s=0.8, int4_tokens_per_s=3.0, crawls=True
)


async def test_speed_memory_and_a_warning_of_what_crawls() -> None:
    backend = ScriptedBackend()
    good = ModelChoice("good", 25 * 10**8, True, True, 31 * 10**8, tokens_per_s=15.6)
    huge = ModelChoice("huge", 66 * 10**9, False, False, 67 * 10**9, tokens_per_s=0.1)
    backend.choices = [good, SLOW, huge]
    async with driven(backend) as driver:
        await picking(driver)
        text = driver.text()
        assert "2.5 GB   3.1 GB    15.6 tok/s  downloaded" in text
        assert "16 GB    17 GB     0.8 tok/s  to download" in text
        assert "66 GB    67 GB  does not fit  to download" in text
        await driver.shows("Speed: estimated.")
        await driver.pilot.press("down")
        await driver.shows("It fits but is slow: about 0.8 tok/s; with --quantize int4 about 3.0.")
        await driver.pilot.press("down")
        await driver.shows("It does not fit: it needs about 67 GB of free memory.")
        await driver.types("good")
        await driver.shows("Speed: estimated.")
        await driver.types("!")
        await driver.until(lambda: "estimated" not in driver.text())


async def test_every_name_of_the_catalogue_can_be_read_at_80_columns() -> None:
    backend = ScriptedBackend()
    backend.choices = [
        ModelChoice(name, 10**9, False, True, 2 * 10**9, tokens_per_s=123.4) for name in names()
    ]
    async with driven(backend, size=(80, 24)) as driver:
        await picking(driver)
        width = driver.app.screen.query_one(ModelList).size.width
    lines = [line_text(choice_line(choice, width, chosen=False)) for choice in backend.choices]
    assert [line.split()[0] for line in lines] == names()
    assert all("to download" in line and "123 tok/s" in line for line in lines)


def test_the_speed_is_the_last_to_be_left_out() -> None:
    for width in (31, 44, 60, 90):
        assert "0.8 tok/s" in line_text(choice_line(SLOW, width, chosen=False))
        assert "speed" in line_text(head_line(width))
    assert "17 GB" in line_text(choice_line(SLOW, 60, chosen=False))


@pytest.mark.parametrize("width", [12, 24, 40, 60, 90])
def test_a_choice_fits_and_shows_nothing_that_a_terminal_obeys(width: int) -> None:
    choice = ModelChoice("a/\x1b[2Jvery-long-name-of-a-model-" + "x" * 80, None, False, False)
    line = choice_line(choice, width, chosen=True, current="")
    assert line_cells(line) <= max(width, 6)
    assert "\x1b" not in line_text(line)


class NearlyFull(ScriptedBackend):
    """Its history takes what the test says."""

    used = 10

    @property
    def used_tokens(self) -> int:
        return self.used

    def figures(self) -> Figures | None:
        figures = super().figures()
        return replace(figures, warmed=self.used - 3) if figures is not None else None

    def count(self, draft: str) -> DraftCost | None:
        return DraftCost(len(draft), len(draft) + 5, self.context_length - self.used - len(draft))


async def test_the_note_comes_and_goes() -> None:
    backend = NearlyFull([Script("Hello.")], context_length=1000)
    async with driven(backend) as driver:
        note = driver.app.chat.query_one(ContextNote)
        assert not note.display
        driver.composer.put("long " * 80)
        await driver.shows("400 tokens")
        await driver.shows("leaves 590 of 1.0k")
        driver.composer.put("")
        await driver.until(lambda: not note.display)
        backend.used = 950
        await driver.send("q")
        await driver.shows("The context is 95% full, 50 tokens left.")
        await driver.shows("silently.")


def test_a_list_that_grows_is_scrolled_no_further_than_it_has_to_be() -> None:
    class Five(PickerList):
        count = 5  # type: ignore[assignment]
        height = 1

        @property
        def size(self) -> Size:
            return Size(40, self.height)

    lines = Five()
    lines.move(4)
    assert lines.in_view() == range(4, 5)
    lines.height = 3
    assert lines.in_view() == range(2, 5)
    lines.move(-1)
    assert lines.in_view() == range(2, 5)
    lines.move(-2)
    assert lines.in_view() == range(1, 4)
    lines.height = 9
    assert lines.in_view() == range(5)
