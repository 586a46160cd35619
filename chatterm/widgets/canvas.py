"""Drawing styled lines: the names of the styles, and a widget that shows a fixed set of lines."""

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from chatterm.markdown.lines import Line
from chatterm.terminal.sanitize import is_safe, visible

_CONVERSATION = "user user-bar muted accent primary strong rule chosen spark thinking thinking-head fold"
_SELECTION = "branch selected selected-bar edited found found-here"
_MESSAGES = "notice notice-mark warning error error-mark"
_MARKDOWN = "heading title em strike link address bullet quote quote-bar code code-inline code-label code-copy guessed"
_SOURCE_CODE = (
    "code-comment code-keyword code-string code-number code-name code-builtin code-added code-removed"
)
STYLES = frozenset(" ".join((_CONVERSATION, _SELECTION, _MESSAGES, _MARKDOWN, _SOURCE_CODE)).split())
STYLE_CLASSES = {f"text--{name}" for name in STYLES}
"""Every style that a line may name; the stylesheet defines `text--NAME`.

They are component classes of the screen, shared by all widgets, since each delays the first frame.
"""


class Painter(Widget):
    """A widget that turns lines into strips. Its screen must have STYLE_CLASSES.

    A picture's style names its own colours: `rgb`, six hex digits for the foreground, maybe six for the background.
    """

    def strip(self, line: Line) -> Strip:
        return Strip([Segment(_shown(text), self.style_of(names)) for text, names in line if text])

    def style_of(self, names: str) -> Style:
        """Return the named styles, combined in order on top of the widget's own."""
        cache: dict[str, Style] = self.__dict__.setdefault("_painter_styles", {})
        style = cache.get(names)
        if style is None:
            style = self.rich_style
            known = names.split()
            for name in known:
                if name in STYLES:
                    style += self.screen.get_component_rich_style(f"text--{name}", partial=True)
            if "picture" in known:  # too many to cache
                return style + _colours(next(name for name in known if name.startswith("rgb")))
            cache[names] = style
        return style

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self.__dict__.pop("_painter_styles", None)


class Canvas(Painter):
    """Shows the lines that `build` gives for its width."""

    def build(self, width: int) -> list[Line]:
        raise NotImplementedError

    def mark_parent(self, name: str, is_on: bool) -> None:
        """Set or remove the class `name` on the parent, so that siblings can make room."""
        if isinstance(self.parent, Widget):
            self.parent.set_class(is_on, name)

    def render_line(self, y: int) -> Strip:
        lines = self.build(self.size.width)
        line = lines[y] if y < len(lines) else []
        return self.strip(line).crop_extend(0, self.size.width, self.style_of(""))


def _colours(name: str) -> Style:
    drawn, ground = name[3:9], name[9:15]
    return Style(color=_colour(drawn), bgcolor=_colour(ground) if ground else None)


def _colour(digits: str) -> Color:
    return Color.from_rgb(*bytes.fromhex(digits))


def _shown(text: str) -> str:
    """Return `text` safe to print: the last defence against control characters that reach the terminal."""
    if text.isprintable() or (is_safe(text) and "\n" not in text and "\t" not in text):
        return text
    return visible(text).replace("\n", " ").replace("\t", " ")
