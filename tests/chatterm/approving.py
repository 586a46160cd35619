"""Questions before a tool is used, on a clock that goes as a test says."""

from collections.abc import Callable

from chatterm.screens.approval import ApprovalScreen
from chatterm.tools.keypress_guard import QUIET
from tests.chatterm.driving import Driver


def set_clock(screen: ApprovalScreen, now: Callable[[], float]) -> None:
    """Have a question, in which nothing was typed so far, go by the clock `now`."""
    screen._now = now
    screen._keys._last = 0.0


class Clock:
    """The time of a question, which only goes by between its keys."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.go_to(0.0)

    @property
    def _screen(self) -> ApprovalScreen:
        screen = self._driver.app.screen
        assert isinstance(screen, ApprovalScreen)
        return screen

    def go_to(self, now: float) -> None:
        """Let it be `now`, with nothing typed."""
        self.now = now
        set_clock(self._screen, lambda: self.now)
        self._screen._look()

    async def press(self, *keys: str, after: float = QUIET) -> None:
        for key in keys:
            self.now += after
            assert self._screen
            await self._driver.pilot.press(key)


async def asked(driver: Driver) -> Clock:
    """Wait for a question; from then on the time goes by as the test says."""
    await driver.until(lambda: isinstance(driver.app.screen, ApprovalScreen))
    await driver.pilot.pause()
    return Clock(driver)
