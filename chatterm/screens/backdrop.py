"""The conversation, shaded, behind a screen that covers it in part."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual import events
from textual.color import Color
from textual.geometry import Region, Size
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import Screen
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget


class Backdrop:
    """Makes a screen, the class after it, open faster over the conversation.

    Its backdrop is drawn from strips, several times as fast as in Textual, and again only where the screen below has
    changed; its styles are computed once.
    """

    _was_shown = False
    _shaded: "Shaded | None" = None
    """The backdrop, once it is drawn."""
    _layout_required: bool
    _repaint_required: bool
    _dirty_widgets: set[Widget]

    def render(self) -> Any:
        shown = super().render()  # type: ignore[misc]
        if not isinstance(shown, BackgroundScreen):
            return shown
        if self._shaded is None or not self._shaded.shows(shown.screen, shown.color):
            self._shaded = Shaded(shown.screen, shown.color)
        return self._shaded

    def refresh(self, *regions: Region, **what: bool) -> Any:
        """Refresh the screen. Textual names the `regions` in which the one below has changed."""
        if self._shaded is not None:
            self._shaded.forget(regions)
        return super().refresh(*regions, **what)  # type: ignore[misc]

    def _on_screen_resume(self, event: events.ScreenResume) -> None:
        """Do not apply the stylesheet when the screen opens: mounting its widgets has just done that."""
        event.refresh_styles = event.refresh_styles and self._was_shown
        self._was_shown = True
        self._shaded = None  # what is below may have changed while another screen was over this one

    def _on_timer_update(self) -> None:
        """Draw one frame where both the layout and what it shows have changed: Textual draws two."""
        if self._layout_required and self._repaint_required:
            self._dirty_widgets.add(self)  # type: ignore[arg-type]  # what is dirty is drawn with the layout
            self._repaint_required = False
        super()._on_timer_update()  # type: ignore[misc]


class Below:
    """Makes a screen, the class after it, draw only what has changed while another one covers it."""

    _repaint_required: bool
    app: Any

    def _compositor_refresh(self) -> None:
        super()._compositor_refresh()  # type: ignore[misc]
        if self is not self.app.screen:  # Textual draws all of it with the next change
            self._repaint_required = False


class Shaded(Visual):
    """The screen below, with a translucent colour over it. It keeps what it has drawn."""

    def __init__(self, below: Screen[Any], colour: Color) -> None:
        self._below = below
        self._colour = colour
        self._look: tuple[Size, RichStyle] | None = None
        self._rows: dict[int, Strip] = {}
        """What is drawn, all in the same look."""

    def shows(self, below: Screen[Any], colour: Color) -> bool:
        """Return whether it shows this screen in this colour."""
        return below is self._below and colour == self._colour

    def forget(self, regions: Iterable[Region]) -> None:
        """Draw the rows of these regions anew."""
        for region in regions:
            for row in region.line_range:
                self._rows.pop(row, None)

    def render_strips(self, width: int, height: int | None, style: Style, options: object) -> list[Strip]:
        size = Size(width, self._below.size.height if height is None else height)
        if self._look != (look := (size, style.rich_style)):
            self._look, self._rows = look, {}
        rows = range(min(size.height, self._below._compositor.size.height))
        if missing := sorted({*rows} - self._rows.keys()):
            crop = Region(0, missing[0], width, missing[-1] + 1 - missing[0])
            chops = self._below._compositor._render_chops(crop, {*missing}.__contains__)
            self._rows.update((row, self._shade(Strip.join(chops[row].values()))) for row in missing)
        return [self._rows[row] for row in rows]

    def _shade(self, strip: Strip) -> Strip:
        """Return `strip` under the colour."""
        assert self._look is not None
        (width, _), base = self._look
        return Strip(
            [Segment(text, shaded(own, self._colour, base), control) for text, own, control in strip], width
        )

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
