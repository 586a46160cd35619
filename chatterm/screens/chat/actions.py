"""Every command of the chat screen: implements `chatterm.commands.actions.Actions`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import Backend, EngineError, ModelChoice, ModelError
from chatterm.commands.reports import help_lines
from chatterm.markdown.lines import Line
from chatterm.screens.chat.code_actions import CodeActions
from chatterm.screens.chat.command_part import LOADING
from chatterm.screens.chat.compacting import Compacting
from chatterm.screens.chat.preferences import Preferences
from chatterm.screens.chat.session_actions import SessionActions
from chatterm.screens.chat.tool_actions import ToolActions
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.screens.models import ModelPicker


class ChatActions(CodeActions, SessionActions, Preferences, ToolActions, Compacting):
    _picker: "ModelPicker | None" = None

    def show_help(self) -> None:
        self.report("help", "Help", help_lines)

    def show_stats(self) -> None:
        from chatterm.conversation.stats import process_figures, stats_lines
        from chatterm.conversation.turn import exchange_stats

        talk, screen = self.conversation, self.screen
        turn = exchange_stats(talk.path[-1]) if talk.path else None
        figures = screen.backend.figures()
        lines = partial(
            stats_lines,
            turn=turn,
            session=talk.stats.copy(),
            info=screen.info,
            figures=figures,
            process=talk.process.copy(),
            machine=process_figures(screen.begun),
        )
        self.report("stats", "Statistics", lines)

    def cache(self, what: str) -> None:
        if (info := self.screen.info) is not None and info.is_remote:
            raise EngineError(f"The KV cache is on {info.device}; /stats shows what was found in it.")
        if what:
            self._explain_cache()
        else:
            from chatterm.screens.cache import CacheScreen

            self.screen.app.push_screen(CacheScreen(self.screen.backend.blocks, self.chunks))

    def _explain_cache(self) -> None:
        from chatterm.conversation.cache_why import TITLE, each_why_line, explained, longest_prompt

        backend = self.screen.backend
        path = self.conversation.path
        longest = longest_prompt(path)

        def lines(width: int) -> Iterator[Line]:
            models = (self.screen.model_name, backend.model) if self.screen.info is not None else ()
            return each_why_line(explained(path, models, backend.token_text), longest, width)

        self.report("cache", TITLE, lines)

    def toggle_panel(self) -> None:
        screen, is_shown = self.screen, bool(self.screen.panel.display)
        was_wanted = is_shown if screen.panel_wanted is None else screen.panel_wanted
        screen.show_panel(not was_wanted)
        if was_wanted and not is_shown:
            screen.hint("The stats panel stays closed.", 3.0)

    def model(self, name: str) -> None:
        screen = self.screen
        works = screen.info is not None and not screen.has_failed
        if not name:
            self._pick_model()
        elif screen.is_loading:
            raise EngineError(LOADING)
        elif works and name == screen.backend.model:
            screen.hint(f"{screen.model_name} is loaded already.", 3.0)
        elif self.conversation.is_busy:  # a mistyped name must not stop the answer
            what = f"switch to {one_line(name, 60)}"
            switch = partial(self.ask_to_stop, partial(self._switch, name), what)
            screen.in_thread(partial(self._check_model, name), lambda _: switch())
        else:
            self._switch(name)

    def _check_model(self, name: str) -> None:
        """Raise the error that a switch to `name` would raise. Runs in a thread."""
        try:
            self.screen.check_model(name)
        except ModelError:
            if not self.screen.backend.has_loaded(name):  # only the server may know the name
                raise

    def _switch(self, name: str) -> None:
        if self.screen.is_loading:
            raise EngineError(LOADING)
        self.screen.switch_model(name)

    def _pick_model(self) -> None:
        from chatterm.screens.models import ModelPicker

        screen, waits = self.screen, "Reading the list…"
        if not screen.is_idle:
            when = "the model is loaded" if screen.is_loading else "the answer is finished"
            waits = f"The list comes when {when}."
        looks = self._looks_for_servers()
        self._picker = ModelPicker(screen.backend.model, waits, len(looks))
        screen.app.push_screen(self._picker, self._model_picked)
        screen.submit(Backend.catalogue)
        for look in looks:
            screen.in_thread(look, self._picker.add)

    def _model_picked(self, name: str | None) -> None:
        self._picker = None
        if name:
            self.screen.attempt(partial(self.model, name))

    def choose_model(self, choices: Sequence[ModelChoice]) -> None:
        """Show the list of models in the picker if that is still open."""
        if self._picker is not None:
            self._picker.show(choices)

    def _looks_for_servers(self) -> list[Callable[[], list[ModelChoice]]]:
        """Return the functions that list the models of each known server."""
        looks = list(self.screen.looks)
        if (info := self.screen.info) is not None and info.is_remote and "://" in info.name:
            looks.insert(0, partial(_beside, info.name))
        return looks

    def editor(self) -> None:
        self.screen.composer.action_edit_outside()

    def open_paste(self) -> None:
        self.screen.composer.action_open_paste()

    def quit(self) -> None:
        self.screen.app.exit(0)


def _beside(model: str) -> list[ModelChoice]:
    from chatterm.backends.remote.server_scan import choices_beside

    return choices_beside(model)
