"""The look of the application: its theme, and the capabilities of the terminal."""

import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

from textual.app import App
from textual.css.parse import parse
from textual.css.stylesheet import Stylesheet
from textual.filter import NoColor
from textual.widget import Widget

from chatterm.settings.settings import Glyphs
from chatterm.settings.themes import AUTO_THEME, DEFAULT_THEME, TERMINAL_THEME, load_theme
from chatterm.terminal.background import BackgroundReported, guessed_dark
from chatterm.terminal.driver import OwnDriver, terminal_driver
from chatterm.terminal.glyphs import ascii_filter
from chatterm.widgets.slices import in_slices

_PLAIN_TERMINALS = ("linux", "vt", "cons", "sun", "wsvt", "xterm-mono", "dumb")
"""Prefixes of TERM for terminals with few glyphs."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The capabilities of a terminal."""

    colours: bool = True
    """Whether colours are wanted: NO_COLOR is not set."""
    shades: bool = True
    """Whether it has more than 16 colours."""
    unicode: bool = True
    dark: bool = True
    """Whether its background is dark, as far as is known."""


def this_terminal(environment: Mapping[str, str] = os.environ, encoding: str | None = None) -> Terminal:
    """Return the capabilities of the terminal that this process runs in."""
    from rich.console import Console

    if encoding is None:
        encoding = getattr(sys.__stderr__, "encoding", None) or "ascii"
    system = Console(force_terminal=True, _environ=environment).color_system
    term = environment.get("TERM", "").lower()
    # Without a locale Python assumes UTF-8, as terminals do; LC_ALL=C is set deliberately.
    plain = environment.get("LC_ALL") in ("C", "POSIX") or term.startswith(_PLAIN_TERMINALS)
    utf8 = encoding.lower().replace("-", "") in ("utf8", "utf16", "utf16le", "cp65001")
    return Terminal(
        colours="NO_COLOR" not in environment,
        shades=system not in (None, "standard", "windows"),
        unicode=utf8 and not plain,
        dark=guessed_dark(environment),
    )


class ParsedOnce(Stylesheet):
    """Parses each source once for a theme. Textual does so again for the first new screen after a change of theme."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__(variables=variables)
        self._known = variables

    def set_variables(self, variables: dict[str, str]) -> None:
        """Forget what was parsed, if these are others."""
        if variables != self._known:
            self._known = variables
            super().set_variables(variables)

    def reparse(self) -> None:
        """Parse what was not parsed yet."""
        self.parse()

    def parse_in_pieces(self) -> Generator[None, None, None]:
        """Do what `reparse` does; yield after each rule."""
        for place, (css, is_default, tie_breaker, scope) in list(self.source.items()):
            key = (css, place, is_default, tie_breaker, scope)  # as in `Stylesheet._parse_rules`
            if key not in self._parse_cache:
                rules = []
                for rule in parse(scope, css, place, None, self._variable_tokens, is_default, tie_breaker):
                    rules.append(rule)
                    yield
                self._parse_cache[key] = rules
        self.parse()


class ThemedApp(App[int]):
    """An application with a theme. The default terminal has all capabilities."""

    def __init__(
        self, *, theme: str = DEFAULT_THEME, glyphs: Glyphs = "auto", terminal: Terminal | None = None
    ) -> None:
        """Apply the theme. Raise SettingsError if it does not exist or its file is invalid."""
        load_theme(theme)
        self.terminal = terminal or Terminal()
        super().__init__(driver_class=terminal_driver(), ansi_color=None if self.terminal.colours else True)
        self.stylesheet = ParsedOnce(self.get_css_variables())
        if not (self.terminal.colours or self.no_color):
            self.no_color = True
            self._filters.append(NoColor())
        plain = glyphs == "ascii" or (glyphs == "auto" and not self.terminal.unicode)
        self.shows_pictures = self.terminal.colours and self.terminal.shades and not plain
        if plain:
            self._filters.append(ascii_filter())
        self.chosen_theme = theme
        self._has_asked = False
        self._is_restyling = False
        self._wants_styles = False
        """Whether the theme has changed since the latest styling began."""
        self.use_theme(theme)

    def use_theme(self, name: str) -> str:
        """Apply a theme to the application. Return a note for the person; "" for none.

        Raise SettingsError if it does not exist or its file is invalid.
        """
        theme = load_theme(name, self.terminal.dark)
        self.chosen_theme = name
        self._ask_background()
        full = self.terminal.colours and self.terminal.shades
        shown = theme if full else load_theme(TERMINAL_THEME)
        self.register_theme(shown)
        self.theme = shown.name
        if not self.terminal.colours:
            return "NO_COLOR is set, so themes show no colours."
        return "" if full else "This terminal has 16 colours, so every theme uses those."

    def on_mount(self) -> None:
        self._ask_background()

    def _ask_background(self) -> None:
        """Ask the terminal whether it is dark, once, if that matters."""
        driver: object = self._driver
        if self.chosen_theme != AUTO_THEME or self._has_asked or not isinstance(driver, OwnDriver):
            return
        if self.terminal.colours and self.terminal.shades and self.terminal.unicode:
            self._has_asked = True
            driver.watch_background()

    def on_background_reported(self, message: BackgroundReported) -> None:
        """Change to the other theme of AUTO_THEME if the terminal is not as it was thought to be."""
        if message.is_dark != self.terminal.dark:
            self.terminal = replace(self.terminal, dark=message.is_dark)
            if self.chosen_theme == AUTO_THEME:
                self.use_theme(AUTO_THEME)

    def refresh_css(self, animate: bool = True) -> None:
        """Style everything for the theme, in slices; no frame is drawn meanwhile, since it would show two themes."""
        if not self.screen_stack:  # widgets are styled when they are mounted
            self.stylesheet.set_variables(self.get_css_variables())
            self.stylesheet.reparse()
            return
        self._wants_styles = True
        if not self._is_restyling:
            self._is_restyling = True
            self.run_worker(self._restyle())

    async def _restyle(self) -> None:
        try:
            while self._wants_styles:  # another theme may be chosen meanwhile
                self._wants_styles = False
                with self.batch_update():
                    await in_slices(self._apply_theme(), 0)
        finally:
            self._is_restyling = False
        for screen in self.screen_stack:
            screen.refresh()

    def _apply_theme(self) -> Generator[None, None, None]:
        """Parse the styles and apply them to every widget; yield after each piece."""
        styles = self.stylesheet
        assert isinstance(styles, ParsedOnce)
        styles.set_variables(self.get_css_variables())
        yield from styles.parse_in_pieces()
        styles.apply(self)
        for screen in reversed(self.screen_stack):
            for widget in screen.walk_children(Widget, with_self=True):
                if widget.is_attached:  # it may have been removed meanwhile
                    styles.update_nodes([widget])
                yield
            screen._css_update_count = self._css_update_count
