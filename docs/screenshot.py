"""Take the README's screenshots of the program with its default model: `python docs/screenshot.py [NAME...]`."""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from textual.pilot import Pilot

from chatterm.app import ChatApp
from chatterm.backends.backend import ChatOptions
from chatterm.backends.local import LocalBackend
from models.hub.catalogue import DEFAULT_MODEL

FUNCTION = "Write a Python function that reverses a string."
SKY = "Explain in two sentences why the sky is blue."


class Person:
    """A user at the keyboard."""

    def __init__(self, app: ChatApp, pilot: Pilot[int]) -> None:
        self.app = app
        self.pilot = pilot

    async def waits(self) -> None:
        while not self.app.chat.is_idle:
            await self.pilot.pause(0.1)
        await self.pilot.pause(0.5)

    async def asks(self, text: str) -> None:
        self.app.chat.composer.put(text)
        await self.presses("enter")

    async def presses(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.waits()


async def chat(person: Person) -> None:
    await person.asks(FUNCTION)
    await person.asks(SKY)


async def branches(person: Person) -> None:
    await person.asks(FUNCTION)
    await person.presses("ctrl+r")
    await person.presses("alt+up")


async def cache(person: Person) -> None:
    await person.asks(SKY)
    await person.presses("ctrl+r")
    await person.asks(FUNCTION)
    await person.asks("/cache")


@dataclass(frozen=True, slots=True)
class Picture:
    does: Callable[[Person], Awaitable[None]]
    theme: str
    size: tuple[int, int]
    temperature: float = 0.0


PICTURES = {
    "screenshot": Picture(chat, "graphite", (112, 31)),
    "branches": Picture(branches, "paper", (80, 24), temperature=0.4),
    "cache": Picture(cache, "graphite", (100, 30)),
}


async def take(picture: Picture) -> str:
    sampling = {"temperature": picture.temperature, "max_tokens": 200, "seed": 1}
    app = ChatApp(LocalBackend(DEFAULT_MODEL, ChatOptions(sampling=sampling)), theme=picture.theme)
    async with app.run_test(size=picture.size) as pilot:
        person = Person(app, pilot)
        await person.waits()
        await picture.does(person)
        svg = app.export_screenshot(title="chatterm")
    app.worker.close()
    return svg


def without_leading_spaces(svg: str) -> str:
    """Move texts that begin with spaces to the right: some viewers drop these and draw the rest too far left."""

    def moved(match: re.Match[str]) -> str:
        attributes, text = match.groups()
        bare = re.sub("^(?:&#160;)+", "", text)
        shift = 12.2 * (len(text) - len(bare)) / len("&#160;")
        if not bare or not shift:
            return match[0]
        attributes = re.sub(r' x="([\d.]+)"', lambda x: f' x="{float(x[1]) + shift:.1f}"', attributes)
        attributes = re.sub(
            r'textLength="([\d.]+)"', lambda x: f'textLength="{float(x[1]) - shift:.1f}"', attributes
        )
        return f"<text{attributes}>{bare}</text>"

    return re.sub(r"<text([^>]*textLength[^>]*)>([^<]*)</text>", moved, svg)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        svg = without_leading_spaces(asyncio.run(take(PICTURES[name])))
        (Path(__file__).parent / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
