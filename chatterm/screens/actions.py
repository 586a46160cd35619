"""Every command of the chat screen: implements `chatterm.actions.Actions`."""

from functools import partial

from chatterm import worker
from chatterm.backend import EngineError, ModelChoice
from chatterm.entries import AnswerEntry, BuiltEntry
from chatterm.reports import help_lines, no_thinking, thinking_text
from chatterm.screens.message_actions import MessageActions
from chatterm.screens.parts import LOADING
from chatterm.screens.session_actions import SessionActions


class ChatActions(MessageActions, SessionActions):
    def show_help(self) -> None:
        self.screen.add(BuiltEntry(help_lines))

    def show_stats(self) -> None:
        from chatterm.stats import process_figures, stats_lines
        from chatterm.turn import stats_of

        talk, screen = self.conversation, self.screen
        turn = stats_of(talk.path[-1]) if talk.path else None
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
        screen.add(BuiltEntry(lines))

    def cache(self, what: str) -> None:
        if what:
            self._explain_cache()
        else:
            from chatterm.screens.cache import CacheScreen

            self.screen.app.push_screen(CacheScreen(self.screen.backend.blocks))

    def _explain_cache(self) -> None:
        from chatterm.cache_why import explained, why_lines

        backend = self.screen.backend
        models = (self.screen.model_name, backend.model) if self.screen.info is not None else ()
        turns = explained(self.conversation.path, models, backend.token_text)
        self.screen.add(BuiltEntry(partial(why_lines, turns)))

    def toggle_panel(self) -> None:
        self.screen.show_panel(not self.screen.panel.display)

    def think(self, mode: str) -> None:
        match mode:
            case "on" if why := no_thinking(self.screen.info):
                raise EngineError(why)
            case "on" | "off" | "auto":
                self.screen.submit(worker.SetThink(mode))
                self.screen.keeper.update(think=mode)
            case "show" | "hide":
                self.conversation.show_thinking = mode == "show"
                for entry in self.transcript.entries:
                    if isinstance(entry, AnswerEntry):
                        entry.show_thinking(mode == "show")
                self.screen.say("Thinking stays open." if mode == "show" else "Thinking stays closed.")
            case _:
                self.screen.say(thinking_text(self.screen.backend.think, self.screen.info))

    def system(self, text: str) -> None:
        if text:
            system = None if text == "none" else text
            self.screen.submit(worker.SetSystem(system))
            self.screen.keeper.update(system=system)
        else:
            now = self.screen.backend.system
            say = f"System prompt: {now}" if now else "There is no system prompt; /system TEXT sets one."
            self.screen.say(say)

    def model(self, name: str) -> None:
        if not name:
            self.screen.submit(worker.Catalogue())
            if not self.screen.is_idle:
                wait = "the model is loaded" if self.screen.is_loading else "the answer is there"
                self.screen.hint(f"The list of models comes when {wait}.", 3.0)
        elif self.screen.is_loading:
            raise EngineError(LOADING)
        else:
            self.screen.switch_model(name)

    def choose_model(self, choices: list[ModelChoice]) -> None:
        """Show what there is."""
        from chatterm.screens.models import ModelPicker

        picker = ModelPicker(choices, self.screen.backend.model)
        self.screen.app.push_screen(
            picker, lambda name: self.screen.attempt(partial(self.model, name)) if name else None
        )

    def theme(self, name: str) -> None:
        from chatterm.look import LookApp
        from chatterm.themes import theme_names

        app = self.screen.app
        assert isinstance(app, LookApp)
        if not name:
            names = ", ".join(theme_names())
            keep = f"chatterm config set screen.theme {app.chosen_theme}"
            self.screen.say(
                f"Theme: {app.chosen_theme}. There are {names}.\n`{keep}` keeps it for the next time."
            )
        elif note := app.use_theme(name):
            self.screen.say(note)

    def settings(self) -> None:
        from chatterm.config_paths import config_path

        self.screen.say(
            f"Settings are in {config_path()}.\nchatterm config shows each one and what it means, "
            "chatterm config edit opens the file; a new chat reads it."
        )

    def editor(self) -> None:
        self.screen.composer.action_edit_outside()

    def open_paste(self) -> None:
        self.screen.composer.action_open_paste()

    def quit(self) -> None:
        self.screen.app.exit(0)
