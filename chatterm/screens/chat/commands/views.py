"""Commands for what is shown: figures, the cache, the panel, the theme, the settings, the editor."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import EngineError
from chatterm.commands.context import ChatContext
from chatterm.commands.registry import command, screen_command, without_screen
from chatterm.markdown.lines import Line

if TYPE_CHECKING:
    from chatterm.screens.chat.chat import Chat
    from chatterm.settings.settings import Settings


@screen_command("/stats", "Statistics of the last answer and the session", {"f2": ""})
def show_stats(chat: "Chat") -> None:
    from chatterm.conversation.stats import process_figures, stats_lines
    from chatterm.conversation.turn import exchange_stats

    talk = chat.conversation
    lines = partial(
        stats_lines,
        turn=exchange_stats(talk.path[-1]) if talk.path else None,
        session=talk.stats.copy(),
        info=chat.info,
        figures=chat.backend.figures(),
        process=talk.process.copy(),
        machine=process_figures(chat.begun),
    )
    chat.report("stats", "Statistics", lines)


@screen_command("/cache [why]", "Map of the KV cache; why: what each turn reused", {"f3": ""})
def cache(chat: "Chat", what: str) -> None:
    if what:
        explain_cache(chat)
        return
    _refuse_remote_cache(chat)
    from chatterm.screens.cache import CacheScreen

    chat.app.push_screen(CacheScreen(chat.backend.blocks, chat.documents.chunks))


def _refuse_remote_cache(chat: ChatContext) -> None:
    if (info := chat.info) is not None and info.is_remote:
        raise EngineError(f"The KV cache is on {info.device}; /stats shows what was found in it.")


@without_screen("cache", about="What of the KV cache each turn reused")
def explain_cache(chat: ChatContext, what: str = "") -> None:
    """Report what each turn reused of the KV cache."""
    _refuse_remote_cache(chat)
    from chatterm.conversation.cache_why import TITLE, each_why_line, explained, longest_prompt

    backend, path = chat.backend, chat.path
    longest = longest_prompt(path)

    def lines(width: int) -> Iterator[Line]:
        models = (chat.info.name, backend.model) if chat.info is not None else ()
        return each_why_line(explained(path, models, backend.token_text), longest, width)

    chat.report("cache", TITLE, lines)


@screen_command("/panel", "Show or hide the stats panel", {"f4": ""})
def toggle_panel(chat: "Chat") -> None:
    is_shown = bool(chat.panel.display)
    was_wanted = is_shown if chat.panel_wanted is None else chat.panel_wanted
    chat.show_panel(not was_wanted)
    if was_wanted and not is_shown:
        chat.hint("The stats panel stays closed.", 3.0)


def _theme_names() -> list[str]:
    from chatterm.settings.themes import theme_names

    return theme_names()


@screen_command(
    "/theme [NAME]", "Choose a colour theme, also for new chats", {"f7": ""}, suggest=_theme_names
)
def theme(chat: "Chat", name: str) -> None:
    if name:
        _keep_theme(chat, name, chat.themed_app.use_theme(name))
        return
    from chatterm.screens.theme import ThemePicker

    chat.ask(ThemePicker(chat.themed_app.chosen_theme), lambda taken: _keep_theme(chat, taken, ""))


def _keep_theme(chat: "Chat", name: str, note: str) -> None:
    """Save the theme as the default of new chats."""
    from chatterm.settings.file import store
    from chatterm.settings.paths import config_path

    path = config_path()
    said = f"The theme is {name}, also for new chats (saved in {path}). {note}"
    chat.in_thread(partial(store, path, "screen", "theme", name), lambda _: chat.say(said.strip()))


@screen_command("/settings", "View and change the settings", {"f8": ""})
def settings(chat: "Chat") -> None:
    from chatterm.screens.settings import SettingsScreen
    from chatterm.settings.paths import config_path
    from chatterm.settings.reading import load_settings

    path = config_path()

    def show(settings: "Settings") -> None:
        chat.app.push_screen(SettingsScreen(settings, path, partial(apply, chat)))

    chat.in_thread(partial(load_settings, path), show)


def apply(chat: "Chat", settings: "Settings", table: str, name: str) -> None:
    """Apply a changed setting if it can take effect at once. Raise SettingsError if it is invalid."""
    chat.settings = settings
    match table, name:
        case "screen", "theme":
            chat.themed_app.use_theme(settings.screen.theme)
        case "screen", "panel":
            chat.show_panel(settings.screen.panel_wanted)
        case "screen", "thinking":
            chat.show_thinking(settings.screen.thinking_open)
        case "screen", "tint":
            chat.set_class(settings.screen.tint, "-tinted")
        case "sampling", _:
            chat.use_sampling(chat.sampling)


@screen_command("/editor", "Write the message in your editor", {"ctrl+g": ""})
def editor(chat: "Chat") -> None:
    chat.composer.action_edit_outside()


@screen_command("/paste", "View pasted text", {"ctrl+o": ""})
def open_paste(chat: "Chat") -> None:
    chat.composer.action_open_paste()


@command("/quit", "Quit; everything stays saved", {"ctrl+q": ""}, ("exit", "bye"))
def leave(chat: ChatContext) -> None:
    chat.quit()
