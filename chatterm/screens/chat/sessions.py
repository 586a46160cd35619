"""The conversation as a session: begun, opened, left for another one."""

from collections.abc import Callable
from functools import partial

from chatterm.backends.backend import Backend, Document
from chatterm.conversation.branching import Prepared
from chatterm.markdown.lines import elided
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.drafts import Writing
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.speculation_texts import elsewhere
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import cleaned, one_line


class Sessions(ScreenPart):
    def __init__(self, screen: ChatBase, writing: Writing, tooling: ToolRunner) -> None:
        super().__init__(screen)
        self._writing = writing
        self._tooling = tooling

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

        kept = "What it said is kept." if self.conversation.saved.store is not None else "It is not saved."
        question = QuestionScreen(f"Stop the answer and {what}? {kept}", "stops it", "lets it go on")
        self.screen.app.push_screen(question, lambda is_yes: self.screen.attempt(then) if is_yes else None)

    def begin_anew(self) -> None:
        """Begin a new conversation."""
        self.screen.back_to_composer()
        self.leave()
        self.transcript.clear()
        self.conversation.clear()
        if (store := self.conversation.saved.store) is not None:
            self.screen.in_thread(store.new_draft, self._writing.show_draft)

    def leave(self) -> None:
        """Put away the edit, tools, draft and errors of this conversation before another one is shown."""
        self._writing.end_edit()  # its message is not in the new tree
        self._tooling.leave()
        self._writing.leave_draft()
        self.screen.remarks.leave()

    def restore(self) -> None:
        """Restore the state of the last run: the session, the draft, the prompt history."""
        screen, session = self.screen, self.conversation.saved.session
        store = self.conversation.saved.store
        if store is None:
            return
        screen.in_thread(lambda: list(map(cleaned, store.prompts())), screen.composer.load_history)
        if session is not None:
            load = partial(store.load, session)
            screen.in_thread(self.prepared(load), lambda found: self.show(session, *found))
        else:
            screen.in_thread(store.new_draft, self._writing.show_draft)

    def know_others(self) -> None:
        """Use other branches and earlier sessions for speculation, if the settings allow it."""
        screen, talk = self.screen, self.conversation
        if not screen.settings.sessions.guesses or screen.settings.sampling.speculation == "off":
            return
        saved = talk.saved
        others = partial(elsewhere, saved.store, saved.session, talk.tree, screen.backend.model)
        screen.in_thread(others, lambda found: screen.submit(Backend.know, tuple(found)))

    def open(self, session: str) -> None:
        """Open a session of the store."""
        store = self.conversation.saved.store
        if store is None or session == self.conversation.saved.session:
            return

        def opened(found: tuple[SessionInfo, Tree, str, Prepared]) -> None:
            info = found[0]

            def go() -> None:
                self.leave()
                self._take_settings(info)
                self.show(session, *found)

            self.ask_to_leave(go, f"open “{elided(one_line(info.title, 40), 20)}”")

        self.screen.in_thread(self.prepared(partial(store.load, session)), opened)

    def prepared(
        self, load: Callable[[], tuple[SessionInfo, Tree, str]]
    ) -> Callable[[], tuple[SessionInfo, Tree, str, Prepared]]:
        """Return a function that loads a session and prepares it, to run in a thread."""

        def work() -> tuple[SessionInfo, Tree, str, Prepared]:
            info, tree, draft = load()
            made = self.conversation.prepared(tree)
            self.transcript.prepare(made.entries)
            return info, tree, draft, made

        return work

    def show(self, session: str | None, info: SessionInfo, tree: Tree, draft: str, made: Prepared) -> None:
        """Show a loaded session as the conversation."""
        self.transcript.clear()
        self.conversation.open(session, tree, info.title, made)
        self._writing.show_draft(draft)
        self.transcript.follow()
        if self.screen.info is not None:  # otherwise once a model is loaded
            self.know_others()
        if tree.head is not None and tree[tree.head].finish_reason is None:
            self.screen.tell("The last answer was cut off when the program ended; /continue resumes it.")

    def _take_settings(self, info: SessionInfo) -> None:
        """Restore the settings and the model of a session."""
        screen = self.screen
        screen.submit(
            Backend.configure, {"system": info.system, "think": info.think, "think_cache": info.think_cache}
        )
        screen.use_sampling(info.sampling)
        self.take_documents(info)
        if info.model and info.model != screen.backend.model and not screen.is_loading:
            screen.switch_model(info.model)

    def add(self, found: tuple[SessionInfo, Tree, str, Prepared]) -> None:
        """Save and show an imported session."""
        info, tree, _, _ = found

        def go() -> None:
            self.leave()
            store = self.conversation.saved.store
            session = store.add(info, tree.exchanges, tree.head) if store is not None else None
            self.take_documents(info)
            self.show(session, *found)

        self.ask_to_leave(go, "open what was imported")

    def take_documents(self, info: SessionInfo) -> None:
        """Restore the documents of a session."""
        if info.documents != self.conversation.documents:
            self.begin_with(info.documents)

    def begin_with(self, documents: tuple[Document, ...]) -> None:
        """Set the documents that the conversation begins with."""
        self.conversation.documents = documents
        self.screen.submit(Backend.configure, {"documents": documents})

    @property
    def kept(self) -> str:
        """A sentence that tells where the previous conversation is saved; "" if it is not."""
        is_saved = self.conversation.saved.store is not None
        return " The previous one is saved; /sessions opens it." if is_saved else ""
