"""The choice of another model: the picker of /model, and the switch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from chatterm.backends.backend import Backend, EngineError, ModelChoice, ModelError
from chatterm.commands.reports import LOADING
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.chat.sessions import Sessions
from chatterm.terminal.sanitize import one_line

if TYPE_CHECKING:
    from chatterm.screens.models import ModelPicker


class ModelChoosing(ScreenPart):
    _picker: "ModelPicker | None" = None

    def __init__(self, screen: ChatBase, sessions: Sessions) -> None:
        super().__init__(screen)
        self._sessions = sessions

    def use(self, name: str) -> None:
        """Switch to this model, or let the person choose one if it is ""."""
        screen = self.screen
        works = screen.info is not None and not screen.has_failed
        if not name:
            self._pick()
        elif screen.is_loading:
            raise EngineError(LOADING)
        elif works and name == screen.backend.model:
            screen.hint(f"{screen.model_name} is loaded already.", 3.0)
        elif self.conversation.is_busy:  # a mistyped name must not stop the answer
            what = f"switch to {one_line(name, 60)}"
            switch = partial(self._sessions.ask_to_stop, partial(self._switch, name), what)
            screen.in_thread(partial(self._check, name), lambda _: switch())
        else:
            self._switch(name)

    def _check(self, name: str) -> None:
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

    def _pick(self) -> None:
        from chatterm.screens.models import ModelPicker

        screen, waits = self.screen, "Reading the list…"
        if not screen.is_idle:
            when = "the model is loaded" if screen.is_loading else "the answer is finished"
            waits = f"The list comes when {when}."
        looks = self._looks_for_servers()
        self._picker = ModelPicker(screen.backend.model, waits, len(looks))
        screen.app.push_screen(self._picker, self._picked)
        screen.submit(Backend.catalogue)
        for look in looks:
            screen.in_thread(look, self._picker.add)

    def _picked(self, name: str | None) -> None:
        self._picker = None
        if name:
            self.screen.attempt(partial(self.use, name))

    def show(self, choices: Sequence[ModelChoice]) -> None:
        """Show the list of models in the picker if that is still open."""
        if self._picker is not None:
            self._picker.show(choices)

    def _looks_for_servers(self) -> list[Callable[[], list[ModelChoice]]]:
        """Return the functions that list the models of each known server."""
        looks = list(self.screen.looks)
        if (info := self.screen.info) is not None and info.is_remote and "://" in info.name:
            looks.insert(0, partial(_beside, info.name))
        return looks


def _beside(model: str) -> list[ModelChoice]:
    from chatterm.backends.remote.server_scan import choices_beside

    return choices_beside(model)
