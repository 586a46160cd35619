"""Make docs/screenshot.svg: the running program with its default model. `python docs/screenshot.py [THEME]`."""

import asyncio
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chatterm.app import ChatApp
from chatterm.backend import ChatOptions
from chatterm.local import LocalBackend
from chatterm.widgets.composer import Composer
from models.catalogue import DEFAULT_MODEL

QUESTIONS = (
    "Write a Python function that reverses a string.",
    "Explain in two sentences why the sky is blue.",
)
SIZE = (112, 31)


async def take(theme: str) -> str:
    options = ChatOptions(sampling={"temperature": 0.0, "max_tokens": 200})
    app = ChatApp(LocalBackend(DEFAULT_MODEL, options), theme=theme)
    async with app.run_test(size=SIZE) as pilot:
        for question in (*QUESTIONS, None):
            while not app.chat.is_idle:
                await pilot.pause(0.1)
            if question is not None:
                app.chat.query_one(Composer).put(question)
                await pilot.press("enter")
        await pilot.pause(0.5)
        picture = app.export_screenshot(title="chatterm")
    app.worker.close()
    return picture


def without_leading_spaces(svg: str) -> str:
    """Move texts that begin with spaces: some viewers drop those and draw the rest too far left."""

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
    svg = asyncio.run(take(*(sys.argv[1:] or ["graphite"])))
    (Path(__file__).parent / "screenshot.svg").write_text(
        without_leading_spaces(svg) + "\n", encoding="utf-8"
    )
