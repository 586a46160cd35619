"""Commands about messages: answer, edit, go to another branch, select, copy, fold."""

from functools import partial

from chatterm.backends.backend import EngineError
from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.tool_entry import RunEntry, ToolsEntry
from chatterm.screens.chat.base import undone_text
from chatterm.screens.chat.command_part import LOADING, CommandPart
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.terminal import clipboard
from chatterm.terminal.sanitize import cleaned, one_line

_NO_ANSWER = "There is no answer yet."


_MOST = 8
"""The most candidates at once: more cannot be compared."""


def parse_candidate_count(text: str) -> int:
    """Parse the number of answers; "" is 1. Raise EngineError for anything but 1 to `_MOST`."""
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= _MOST):
        raise EngineError(f"/retry takes a number from 1 to {_MOST}, or nothing; not {one_line(text, 40)!r}.")
    return int(text)


class MessageActions(CommandPart):
    tooling: ToolRunner
    """Set by the screen, before any command."""

    def retry(self, count: str) -> None:
        number = parse_candidate_count(count)
        self._refuse_without_model()
        exchange = self.chosen_exchange()
        if exchange is None:
            raise EngineError("There is no answer to generate again.")
        if self.conversation.is_busy:
            is_chosen = self.selected is not None
            self.conversation.retry_later(exchange if is_chosen else None, number)
        else:
            self.conversation.retry(exchange, self.screen.model_name, number)
        self.screen.back_to_composer()
        self.show_candidates()

    def compare(self, model: str) -> None:
        self._refuse_without_model()
        exchange = self.chosen_exchange()
        if exchange is None:
            raise EngineError("There is no message to compare answers to; send one first.")
        if model in (self.screen.model_name, self.screen.backend.model):
            raise EngineError("That is the current model; /retry 2 has it answer twice.")
        self.conversation.compare(exchange, self.screen.model_name, one_line(model, 300))
        self.screen.back_to_composer()
        self.show_candidates()

    def show_candidates(self) -> None:
        """Open the choice between candidates if there is one to make."""
        if not self.conversation.choice:
            return
        from chatterm.screens.candidates import CandidatesScreen

        self.screen.app.push_screen(CandidatesScreen(self.conversation, self.screen.backend.blocks))

    def resume(self) -> None:
        self._refuse_without_model()
        if self.tooling.begin():  # tool calls left unanswered earlier
            return
        self.conversation.resume()
        self.transcript.follow()

    def answer_now(self) -> None:
        turn = self.conversation.turn
        if turn is None or not turn.answer.is_thinking:
            raise EngineError("The model is not thinking.")
        if (info := self.screen.info) is not None and info.is_remote:
            raise EngineError(
                "A remote model cannot be told to stop thinking; Esc stops it, /think off turns it off."
            )
        self.screen.worker_thread.answer_now()
        self.screen.hint("Thinking stopped; the answer follows.", 2.0)

    def stop(self) -> None:
        if self.conversation.turn is not None:
            self.conversation.stop()
        elif self.conversation.acting is not None:
            self.tooling.stop()
        elif self.conversation.waiting:
            self.conversation.take_back()
        elif self.screen.is_loading:
            self.screen.worker_thread.abandon()
            self.screen.hint("Loading is being stopped…", 3.0)
        else:
            self.screen.say("Nothing is running.")

    def undo(self) -> None:
        if self.screen.editing is not None:  # the undone message would be mixed into the edit
            raise EngineError("A message is being edited; Enter sends it anew, Esc leaves it unchanged.")
        if not self.conversation.undo():
            self.screen.say("There is nothing to undo.")

    def redo(self) -> None:
        text = self.conversation.redo()
        if text is None:
            raise EngineError("There is nothing to redo; /branch shows other versions of a message.")
        self.screen.composer.take_away(cleaned(text))
        self.transcript.follow()

    def edit(self, which: str) -> None:
        exchange = self.nth_exchange(which) if which else self.chosen_exchange()
        if exchange is None:
            raise EngineError("There is no message to edit yet.")
        self.writing.begin_edit(self.conversation.tree.asked(exchange))

    def branch(self, where: str) -> None:
        entry = self.selected
        if not where:
            undone = undone_text(len(self.conversation.undone))
            self.screen.say(
                "/branch prev and /branch next (Alt+Left, Alt+Right) switch between the alternatives."
                + (f"\n{undone}" if undone else "")
            )
            return
        there = self.conversation.step(entry, -1 if where == "prev" else 1)
        if there is None:
            raise EngineError(
                "There is no other branch here; /retry and /edit create one."
                if entry is None
                else "This message has no alternatives; retry and edit create one."
            )
        if entry is not None:
            self.transcript.select(there)

    def select(self, where: str) -> None:
        entry = self.transcript.neighbour(1 if where == "next" else -1)
        if entry is None:
            self.screen.back_to_composer()
        else:
            self.screen.select(entry)

    def find(self, text: str) -> None:
        if not self.conversation.path:
            raise EngineError("There is nothing to search yet; /sessions searches earlier conversations.")
        self.finding.open(text)

    def expand(self) -> None:
        entry = self.selected
        if not isinstance(entry, AnswerEntry | ToolsEntry):
            entry = next(filter(_can_fold, reversed(self.transcript.entries)), None)
        if isinstance(entry, RunEntry | ToolsEntry):
            entry.toggle()
        elif isinstance(entry, AnswerEntry) and entry.has_thought:
            entry.show_thinking(not entry.is_open)
        else:
            raise EngineError("There is no thinking to expand.")
        self.transcript.update()

    def change_view(self) -> None:
        """Switch the view of the selected answer, which must be JSON."""
        entry = self.selected
        if not isinstance(entry, AnswerEntry) or entry.tree is None:
            raise EngineError("Select an answer that is JSON; it is shown as a tree.")
        entry.change_view()
        self.transcript.update()

    def copy(self, what: str) -> None:
        name, _, number = what.partition(" ")
        if name == "all":
            if number:
                raise EngineError(f"/copy all takes nothing more, not {number.strip()!r}.")
            self._copy_all()
        elif name == "code":
            self.copy_code(number.strip() or "-1")
        elif name:
            self.copy_text(self.answer_of(self.nth_exchange(name)).source_text)
        elif isinstance(self.selected, UserEntry | AnswerEntry):
            self.copy_text(self.selected.source_text)
        elif (exchange := self.chosen_exchange()) is not None:
            self.copy_text(self.answer_of(exchange).source_text)
        else:
            raise EngineError(_NO_ANSWER)

    def copy_code(self, number: str, entry: AnswerEntry | None = None) -> None:
        """Copy a code block of this answer, else of the selected one, else of the last one that has any."""
        try:
            index = int(number)
        except ValueError:
            raise EngineError(
                f"{one_line(number, 40)!r} is not a number; code blocks are numbered from 1."
            ) from None
        if entry is None and isinstance(self.selected, AnswerEntry):
            entry = self.selected
        answers = (
            [entry] if entry is not None else [self.answer_of(e) for e in reversed(self.conversation.path)]
        )
        found = next((answer for answer in answers if answer.code(1) is not None), None)
        if found is None:
            raise EngineError("There is no code block to copy." if answers else _NO_ANSWER)
        code = found.code(index)
        if code is None:
            raise EngineError(f"There is no code block {index} in that answer.")
        self.copy_text(code)

    def copy_text(self, text: str) -> None:
        """Copy to the terminal's clipboard and the system's."""
        if not text:
            raise EngineError("There is nothing to copy: the message is empty.")
        self.screen.app.copy_to_clipboard(text.encode("utf-8", "replace").decode())

        def tell(program: str) -> None:
            self.screen.hint(clipboard.copied_text(text, program), 3.0)

        self.screen.in_thread(partial(self.screen.copy_with, text), tell)

    def _copy_all(self) -> None:
        from chatterm.sessions.as_markdown import to_markdown

        path = self.conversation.path
        if not path:
            raise EngineError(_NO_ANSWER)
        self.screen.in_thread(partial(to_markdown, self.conversation.info(), path), self.copy_text)

    def use_prompt(self, name: str, argument: str) -> None:
        from chatterm.settings.prompts import filled_in, prompt_text, prompts_folder

        def send(text: str) -> None:
            self.writing.send_for(filled_in(name, text, argument))

        self.screen.in_thread(partial(prompt_text, prompts_folder() / f"{name}.md"), send)

    def _refuse_without_model(self) -> None:
        if self.screen.is_loading:
            raise EngineError(LOADING)
        if self.screen.info is None:
            raise EngineError("No model is loaded; /model chooses one.")


def _can_fold(entry: Entry) -> bool:
    """Return whether the entry has a part that can be folded."""
    return isinstance(entry, RunEntry | ToolsEntry) or (isinstance(entry, AnswerEntry) and entry.has_thought)
