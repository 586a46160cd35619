"""/cache: a live map of the KV blocks."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from chatterm.backends.backend import CachedChunk
from chatterm.conversation.cache_map import cache_lines
from chatterm.markdown.lines import Line
from chatterm.widgets.canvas import STYLE_CLASSES, Canvas
from engine.cache.block_map import BlockMap

_LOOK = 0.25
"""Seconds between two updates of the map."""


class CacheScreen(ModalScreen[None]):
    """Covers the conversation until Escape; an answer goes on. `look` must return at once (`Backend.blocks`)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,f3,ctrl+c", "close", "Back to the conversation", priority=True)
    ]

    def __init__(
        self,
        look: Callable[[], BlockMap | None],
        chunks: Callable[[], Sequence[CachedChunk]] = tuple,
        *,
        plain: bool = False,
    ) -> None:
        """Create the map; `chunks` returns the cached documents (`Figures.chunks`) and must return at once, too."""
        super().__init__()
        self._look = look
        self._chunks = chunks
        self._plain = plain

    def compose(self) -> ComposeResult:
        yield CacheMap(plain=self._plain)

    def on_mount(self) -> None:
        self._update()
        self.set_interval(_LOOK, self._update)

    def _update(self) -> None:
        self.query_one(CacheMap).show(self._look(), tuple(self._chunks()))

    def on_click(self) -> None:
        self.dismiss()

    def action_close(self) -> None:
        self.dismiss()


class CacheMap(Canvas):
    """Draws a BlockMap over the whole screen."""

    DEFAULT_CSS = "CacheMap { width: 100%; height: 100%; padding: 1 3; }"

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self._plain = plain
        self._found: BlockMap | None = None
        self._chunks: tuple[CachedChunk, ...] = ()
        self._lines: list[Line] = []
        self._made_for: tuple[int, int] | None = None

    def show(self, found: BlockMap | None, chunks: tuple[CachedChunk, ...] = ()) -> None:
        if (found, chunks) != (self._found, self._chunks):
            self._found, self._chunks, self._made_for = found, chunks, None
            self.refresh()

    def build(self, width: int) -> list[Line]:
        size = (width, self.size.height)
        if size != self._made_for:
            self._made_for, self._lines = size, self._drawn(*size)
        return self._lines

    def _drawn(self, width: int, height: int) -> list[Line]:
        foot: Line = [("Esc goes back.", "muted")]
        if self._found is None:
            return [
                [("KV cache", "heading")],
                [],
                [("There is nothing to show: no model is loaded.", "")],
                [],
                foot,
            ]
        lines = cache_lines(self._found, width, height - 2, plain=self._plain, chunks=self._chunks)
        lines = lines[: max(height - 2, 1)]
        return [*lines, *([[]] * (height - 1 - len(lines))), foot]
