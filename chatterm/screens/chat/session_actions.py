"""Commands for sessions: new, open, rename, export, import."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from chatterm.backends.backend import Backend, EngineError
from chatterm.conversation.branching import Prepared
from chatterm.conversation.preset import Preset
from chatterm.markdown.lines import elided
from chatterm.screens.chat.library_actions import LibraryActions
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.speculation_texts import elsewhere
from chatterm.sessions.titles import given_title, pick
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import cleaned, one_line


def file_path(text: str) -> Path:
    """Parse a typed path, maybe with ~ or in quotes. Raise EngineError if ~NAME is not a user."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise EngineError(f"{text.split('/')[0]} is not a home folder here; write the full path.") from None


class SessionActions(LibraryActions):
    tooling: ToolRunner

    def ask_to_leave(self, then: Callable[[], None], what: str) -> None:
        """Stop a running answer, after asking (`what` describes what follows), then call `then`."""

        def leave() -> None:
            self.conversation.take_all_back()
            then()

        self.ask_to_stop(leave, what)

    def ask_to_stop(self, then: Callable[[], None], what: str) -> None:
        """Call `then`, which does `what` and ends a running answer; ask before an answer is ended."""
        if not self.conversation.is_answering:
            then()
            return
        from chatterm.screens.question import QuestionScreen

        kept = "What it said is kept." if self.screen.keeper.store is not None else "It is not saved."
        question = QuestionScreen(f"Stop the answer and {what}? {kept}", "stops it", "lets it go on")

        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self.screen.attempt(then)

        self.screen.app.push_screen(question, answered)

    def reset(self) -> None:
        self.ask_to_leave(self._reset, "begin a new conversation")

    def _reset(self) -> None:
        self.begin_anew()
        kept = Preset.of(self.screen.backend.options.system, self.conversation.sampling).kept
        if documents := self.conversation.documents:
            self.begin_with(())
            names = " ".join(document.name for document in documents)
            kept += f" It begins without documents; /library open {names} begins one with them."
        self.screen.tell("A new conversation." + kept + self.kept())

    def begin_anew(self) -> None:
        self.screen.back_to_composer()
        self._go_away()
        self.transcript.clear()
        self.conversation.clear()
        if (store := self.screen.keeper.store) is not None:
            self.screen.in_thread(store.new_draft, self.writing.show_draft)

    def _go_away(self) -> None:
        """Put away the edit, tools, draft and errors of this conversation before another one is shown."""
        self.writing.end_edit()  # its message is not in the new tree
        self.tooling.leave()
        self.writing.leave_draft()
        self.screen.remarks.leave()

    def sessions(self, name: str) -> None:
        store = self.screen.keeper.store
        if store is None:
            raise EngineError("Conversations are not saved (see /settings), so there are none to open.")
        if name:
            self.screen.in_thread(lambda: pick(store.find(""), name).id, self.open_session)
            return
        from chatterm.screens.sessions import SessionPicker

        self.screen.app.push_screen(SessionPicker(store, self.screen.keeper.session), self._picked)

    def _picked(self, session: str | None) -> None:
        if session is not None:
            self.open_session(session)

    def restore(self) -> None:
        """Restore the state of the last run: the session, the draft, the prompt history."""
        screen, session = self.screen, self.screen.keeper.session
        store = screen.keeper.store
        if store is None:
            return
        screen.in_thread(lambda: list(map(cleaned, store.prompts())), screen.composer.load_history)
        if session is not None:
            load = partial(store.load, session)
            screen.in_thread(self._prepared(load), lambda found: self.show_session(session, *found))
        else:
            screen.in_thread(store.new_draft, self.writing.show_draft)

    def know_others(self) -> None:
        """Use other branches and earlier sessions for speculation, if the settings allow it."""
        screen, talk = self.screen, self.conversation
        if not screen.settings.sessions.guesses or screen.settings.sampling.speculation == "off":
            return
        others = partial(
            elsewhere, screen.keeper.store, screen.keeper.session, talk.tree, screen.backend.model
        )
        screen.in_thread(others, lambda found: screen.submit(Backend.know, tuple(found)))

    def open_session(self, session: str) -> None:
        """Open a session of the store."""
        store = self.screen.keeper.store
        if store is None or session == self.screen.keeper.session:
            return

        def opened(found: tuple[SessionInfo, Tree, str, Prepared]) -> None:
            info = found[0]

            def go() -> None:
                self._go_away()
                self._take_settings(info)
                self.show_session(session, *found)

            self.ask_to_leave(go, f"open “{elided(one_line(info.title, 40), 20)}”")

        self.screen.in_thread(self._prepared(partial(store.load, session)), opened)

    def _prepared(
        self, load: Callable[[], tuple[SessionInfo, Tree, str]]
    ) -> Callable[[], tuple[SessionInfo, Tree, str, Prepared]]:
        """Return a function that loads a session and prepares it, to run in a thread."""

        def work() -> tuple[SessionInfo, Tree, str, Prepared]:
            info, tree, draft = load()
            made = self.conversation.prepared(tree)
            self.transcript.prepare(made.entries)
            return info, tree, draft, made

        return work

    def show_session(
        self, session: str | None, info: SessionInfo, tree: Tree, draft: str, made: Prepared
    ) -> None:
        """Show a loaded session as the conversation."""
        self.transcript.clear()
        self.conversation.open(session, tree, info.title, made)
        self.writing.show_draft(draft)
        self.transcript.follow()
        if self.screen.info is not None:  # otherwise once a model is loaded
            self.know_others()
        if tree.head is not None and tree[tree.head].finish_reason is None:
            self.screen.tell("The last answer was cut off when the program ended; /continue resumes it.")

    def _take_settings(self, info: SessionInfo) -> None:
        """Restore the settings and the model of a session."""
        screen = self.screen
        screen.submit(
            Backend.configure,
            {"system": info.system, "think": info.think, "think_cache": info.think_cache},
        )
        self.use_sampling(info.sampling)
        self.take_documents(info)
        if info.model and info.model != screen.backend.model and not screen.is_loading:
            screen.switch_model(info.model)

    def rename(self, title: str) -> None:
        title = given_title(title)
        if self.screen.keeper.session is None:
            raise EngineError("This conversation is not saved yet; send a message first.")
        self.screen.keeper.rename(title)
        self.screen.say(f"This conversation is now called “{title}”.")

    def export(self, text: str) -> None:
        from chatterm.sessions.export import FORMATS, choose_format, exported, file_name, write_export

        name, _, rest = text.partition(" ")
        chosen = next((form for form in FORMATS if form == name), None)
        target = rest.strip() if chosen else text
        if not self.conversation.path:
            raise EngineError("There is nothing to export yet.")
        info, tree = self.conversation.info(), self.conversation.tree
        place = file_path(target) if target else None
        form = chosen or (choose_format(place) if place else "md")
        path = place or Path(file_name(info, form))

        def write() -> Path:
            free, number = path, 2
            while not target and free.exists():  # a default name must not overwrite a file
                free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
            write_export(free, exported(info, tree, form))
            return free.absolute()

        self.screen.in_thread(write, lambda written: self.screen.say(f"Saved to {written}."))

    def import_session(self, path: str) -> None:
        from chatterm.sessions.export import read_import

        def load() -> tuple[SessionInfo, Tree, str]:
            return *read_import(place), ""

        place = file_path(path)
        self.screen.in_thread(self._prepared(load), self._imported)

    def _imported(self, found: tuple[SessionInfo, Tree, str, Prepared]) -> None:
        self.ask_to_leave(partial(self._show_imported, *found), "open what was imported")

    def _show_imported(self, info: SessionInfo, tree: Tree, draft: str, made: Prepared) -> None:
        self._go_away()
        store = self.screen.keeper.store
        session = store.add(info, tree.exchanges, tree.head) if store is not None else None
        self.take_documents(info)
        self.show_session(session, info, tree, draft, made)

    def kept(self) -> str:
        return (
            " The previous one is saved; /sessions opens it." if self.screen.keeper.store is not None else ""
        )
