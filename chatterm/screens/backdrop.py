"""The conversation, shaded, behind a screen that covers it in part."""

from functools import lru_cache
from typing import Any

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import events
from textual.color import Color
from textual.geometry import Size
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import Screen
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget


class Backdrop:
    """Makes a screen, the class after it, open faster over the conversation.

    Its backdrop is drawn from strips, several times as fast as in Textual, and its styles are computed once.
    """

    _was_shown = False
    _layout_required: bool
    _repaint_required: bool
    _dirty_widgets: set[Widget]

    def render(self) -> Any:
        shown = super().render()  # type: ignore[misc]
        return Shaded(shown.screen, shown.color) if isinstance(shown, BackgroundScreen) else shown

    def _on_screen_resume(self, event: events.ScreenResume) -> None:
        """Do not apply the stylesheet when the screen opens: mounting its widgets has just done that."""
        event.refresh_styles = event.refresh_styles and self._was_shown
        self._was_shown = True

    def _on_timer_update(self) -> None:
        """Draw one frame where both the layout and what it shows have changed: Textual draws two."""
        if self._layout_required and self._repaint_required:
            self._dirty_widgets.add(self)  # type: ignore[arg-type]  # what is dirty is drawn with the layout
            self._repaint_required = False
        super()._on_timer_update()  # type: ignore[misc]


class Shaded(Visual):
    """The screen below, with a translucent colour over it."""

    def __init__(self, below: Screen[Any], colour: Color) -> None:
        self._below = below
        self._colour = colour

    def render_strips(self, width: int, height: int | None, style: Style, options: object) -> list[Strip]:
        size = Size(width, self._below.size.height if height is None else height)
        base, colour = style.rich_style, self._colour
        return [
            Strip([Segment(text, shaded(own, colour, base), control) for text, own, control in strip], width)
            for strip in self._below._compositor.render_strips(size)
        ]

    def get_optimal_width(self, rules: object, container_width: int) -> int:
        return container_width

    def get_height(self, rules: object, width: int) -> int:
        return self._below.size.height


@lru_cache(maxsize=4096)
def shaded(style: RichStyle | None, colour: Color, base: RichStyle) -> RichStyle:
    """Return `style` without links and meta data, under a translucent colour; `base` has what it does not say."""
    segment = Segment("", style)
    (result,) = BackgroundScreen.process_segments([segment], colour)
    assert result.style is not None
    return base + result.style
