"""The chat screen: its widgets, the frame loop, the worker's reports and the person's input."""

from dataclasses import replace
from functools import partial
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical

from chatterm.backends import worker
from chatterm.backends.backend import Backend, DraftCost, Progress
from chatterm.commands.registry import LEADER
from chatterm.conversation.entries import AnswerEntry, Entry, UserEntry
from chatterm.conversation.figures import Live, Watch, new_notes
from chatterm.conversation.preset import NOTHING, Preset, PresetEntry
from chatterm.conversation.session_tree import SessionTree
from chatterm.conversation.turn import RunningTurn, live_figures
from chatterm.screens.chat.auto_title import Titling
from chatterm.screens.chat.chat import Chat
from chatterm.screens.chat.commands import COMMANDS
from chatterm.screens.chat.draft_preparation import DraftPreparation
from chatterm.screens.chat.gc_tuning import Garbage
from chatterm.screens.chat.interrupt import Interrupt
from chatterm.screens.chat.keys import ask_for_second_key, command_bindings
from chatterm.screens.chat.picture_loader import Picturing
from chatterm.screens.chat.window_title import Presence
from chatterm.screens.paste import PasteScreen
from chatterm.screens.themed_app import ThemedApp
from chatterm.settings.prompts import clashes
from chatterm.settings.settings import Settings
from chatterm.terminal.sanitize import one_line
from chatterm.terminal.wording import sentences
from chatterm.widgets.canvas import STYLE_CLASSES
from chatterm.widgets.completion import Completion
from chatterm.widgets.composer import Composer
from chatterm.widgets.find_bar import FindBar
from chatterm.widgets.message_keys import CODE_KEYS, EDGE_KEYS, MESSAGE_KEYS
from chatterm.widgets.meter import ContextNote
from chatterm.widgets.new_below import NewBelow
from chatterm.widgets.once import call_once
from chatterm.widgets.remarks import Remarks
from chatterm.widgets.side_panel import SidePanel
from chatterm.widgets.status_line import StatusLine
from chatterm.widgets.transcript import Transcript
from chatterm.widgets.welcome import WelcomeView

_FRAME = 1 / 30
"""Seconds between two checks for reports of the worker, whatever the token rate."""
_FIGURES = 0.2
"""Seconds between two updates of the figures: faster ones could not be read."""
_IDLE_FIGURES = 1.0
"""The same while no answer runs."""
_LOW, _SHORT = 20, 30
"""Rows below which there are no margins, and below which remarks replace the context note."""
_REST = 1.0
"""Seconds after an answer when a pause of some hundredths of a second is not noticed."""


class ChatScreen(Chat):
    """One chat: its widgets, and what the worker and the person do to them."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        *command_bindings(),
        Binding("escape", "escape", "Stop or go back", priority=True),
        Binding(LEADER, "leader", "Alt and function keys", priority=True),
        Binding("ctrl+c", "interrupt", "Copy, stop or quit", priority=True),
        Binding("pageup", "page(-1)", "Page up", priority=True),
        Binding("pagedown", "page(1)", "Page down", priority=True),
        Binding("end", "jump_down", "Go to the new text", priority=True, show=False),
        Binding("ctrl+home", "edge(-1)", "First message", priority=True),
        Binding("ctrl+end", "edge(1)", "Last message", priority=True),
    ]

    def __init__(
        self, backend: Backend, thread: worker.Worker, saved: SessionTree, settings: Settings
    ) -> None:
        super().__init__(backend, thread, saved, settings)
        self.interrupt = Interrupt(self)
        self.preparation = DraftPreparation(self, self.writing)
        self.titling = Titling(self)
        self.titling.is_on = settings.sessions.titles
        self.picturing = Picturing(self)
        self.presence = Presence(self)
        self.presence.notify = settings.screen.notify
        self._progress: Progress | None = None
        self._watch = Watch()
        self._garbage = Garbage()
        self._paint_after = 0.0
        self._figures_after = 0.0
        self._problem = ""
        self._preset = NOTHING
        self._noted: set[str] = set()
        self._latest: RunningTurn | None = None
        """The turn that started last."""

    def compose(self) -> ComposeResult:
        completion = Completion(tools=self.tooling.from_any_thread, id="completion")
        with Horizontal(id="columns"):
            with Vertical(id="conversation"):
                yield WelcomeView(id="welcome")
                transcript = Transcript(id="transcript")
                yield transcript
                yield NewBelow(transcript)
                yield FindBar()
                yield completion
                yield ContextNote(id="note")
                yield Remarks(id="remarks")
                yield Composer(
                    completion=completion,
                    tools=self.tooling.from_any_thread,
                    sees=lambda: self.info is not None and self.info.is_remote,
                    history=self.settings.composer.history,
                    on_draft=self.writing.keep_draft,
                    vim=self.settings.composer.vim,
                    id="composer",
                )
                yield StatusLine(id="status")
            yield SidePanel(id="panel")

    def on_mount(self) -> None:
        self.transcript = self.query_one(Transcript)
        self.composer = self.query_one(Composer)
        self.panel = self.query_one(SidePanel)
        self._completion = self.query_one(Completion)
        self._note = self.query_one(ContextNote)
        self.remarks = self.query_one(Remarks)
        self.status = self.query_one(StatusLine)
        self.welcome = self.query_one(WelcomeView)
        self.transcript.display = False
        self.set_focus(self.composer)  # at once: the first keys may have come already
        self._vim_mode()
        self._show_live(monotonic())
        self.submit(Backend.open)
        self.set_interval(_FRAME, self._frame)
        # The worker starts after the first frame, which importing the engine would delay.
        self.call_after_refresh(call_once, self, 0.05, self._begin_work)
        self.sessions.restore()
        taken = {name for command in COMMANDS for name in (command.name, *command.aliases)}
        self.in_thread(partial(clashes, taken), self._say_clashes)

    def _say_clashes(self, found: list[str]) -> None:
        for text in found:
            self.say(text, "error")

    def _begin_work(self) -> None:
        self._garbage.collect_rarely()
        self.worker_thread.start()

    def on_unmount(self) -> None:
        """Close the tools and save the draft."""
        self.tooling.close()
        self.writing.keep_draft(self.composer.full_text)

    def on_resize(self, event: events.Resize) -> None:
        self.place_panel(event.size.width)
        self.set_class(event.size.height < _LOW, "-low")
        self.set_class(event.size.height < _SHORT, "-short")

    # --- from the worker ---

    def _frame(self) -> None:
        now = monotonic()
        self.remarks.expire(now)
        if self.hint_until and now > self.hint_until:
            self.hint_until = 0.0
            self.show_standing_hint()
        if self.editing is not None:  # the keys change when the answer ends
            self.show_standing_hint()
        self.preparation.tick(now)
        reports = self.worker_thread.take()
        turn = self.conversation.turn
        if turn is not None and turn is not self._latest:
            self._latest = turn
            self.remarks.over(turn.started)
        if self.conversation.saved.problem != self._problem:
            self._say_problem()
        if was_deleted := self.conversation.saved.was_deleted:
            self.say(was_deleted)
        self.titling.tick(now)
        self.compacting.offer_summary(now)
        if not reports and turn is None:
            if now >= self._figures_after:  # work in idle time goes on
                is_warming = self._show_live(now).is_warming
                self._figures_after = now + (_FIGURES if is_warming else _IDLE_FIGURES)
            return
        tokens = [report for report in reports if isinstance(report, worker.Token)]
        told = len(reports) > len(tokens) or (turn is not None and not turn.has_begun and bool(tokens))
        for report in reports:
            if isinstance(report, worker.AnswerBegan):
                self.conversation.begun(report.before, report.index)
        self.conversation.take(tokens)
        moved = self.conversation.tick(now)
        for report in reports:
            if not isinstance(report, worker.Token):
                self._report(report, now)
        if tokens:
            self.transcript.new_text()
        if tokens or moved or told:
            self._paint(now, last=self.conversation.turn is None)
        if told or now >= self._figures_after:
            self._figures_after = now + _FIGURES
            self._show_live(now)

    def _paint(self, now: float, *, last: bool) -> None:
        """Draw the changes; leave at least two thirds of the time to everything else."""
        if last or now >= self._paint_after:
            begun = monotonic()
            self.transcript.update()
            self._paint_after = now + 3 * (monotonic() - begun)

    def _report(self, report: worker.Report, now: float) -> None:
        match report:
            case worker.LoadProgress(progress):
                self._progress = progress
            case worker.Loaded(info):
                self.info = replace(info, name=one_line(info.name, limit=200))
                self.is_loading, self.has_failed, self._progress = False, False, None
                if self.conversation.path:
                    self.conversation.show()  # answers of another model show its name
                self._garbage.collect_rarely()
                self.sessions.know_others()
                self.documents.stop_reading()
                self.documents.read_unread()
                if wanted := self.tooling.wanted:
                    self.tooling.wanted = ""
                    self.attempt(partial(self.use_tools, wanted))
            case worker.Answered(outcome, index, problem):
                turn = self.conversation.turn
                self.conversation.answered(outcome, now, index, problem)
                self.presence.answered(turn if self.conversation.turn is None else None, now)
                self.titling.answered(now)
                if turn is not None and not turn.is_stopping and not turn.is_undone:
                    self.tooling.begin()
                call_once(self, _REST, self._tidy)
            case worker.AsideText(text):
                self.compacting.summary_grows(text)
            case worker.JobFailed(job, message, too_many):
                self.has_failed |= not too_many and job.method != "switch"
                self._failed(job, message, now)
                if too_many and job.method in ("send", "candidates"):
                    self.attempt(partial(self.compacting.context_is_full, too_many))
            case worker.JobDone(job, value):
                self._done(job, value)
        for note in new_notes(self.backend.notes(), self._noted):
            self.say(note)
        if self.info is not None and not self.is_loading and not self.conversation.choice:
            self.attempt(self._next)

    def _next(self) -> None:
        self.conversation.next(self.model_name)
        self.show_candidates()

    def _tidy(self) -> None:
        """Collect garbage while the chat is idle, so that no answer is interrupted by it."""
        if self.is_idle:
            self._garbage.collect_now()

    def _failed(self, job: worker.Job, message: str, now: float) -> None:
        match job:
            case worker.Job("open" | "switch"):
                self.is_loading, self._progress = False, None
                if self.backend.info is None:
                    self.info = None
                self.wanted_model = one_line(self.backend.model, limit=200)
                if self.info is None:
                    self.conversation.take_all_back()
                    message = sentences(message, "/model loads another model, /quit exits")
            case worker.Job("send" | "tell" | "resume" | "candidates" | "compare"):
                self.conversation.failed(now, message)
            case worker.Job("load_path"):
                self.conversation.forget()
                if self.info is None:
                    return  # reported already
            case worker.Job("configure", ({"documents": documents},)):
                self.documents.opened(documents, message)
                return
            case worker.Job("read", (document,)):
                self.documents.reads(document, None, message)
                return
            case worker.Job("answers"):
                self.compacting.summary_is_over(is_whole=False, problem=message)
                return
            case worker.Job("catalogue"):
                self.models.show([])
            case worker.Job("count" | "prepare" | "begin_title"):
                return  # sending the message will report it
        self.say(message, "error")

    def _done(self, job: worker.Job, value: object) -> None:
        match job:
            case worker.Job("switch"):
                self.conversation.hold_again()
                self.conversation.saved.update(model=self.backend.model)
                cache = "" if self.conversation.is_remote else "; its cache is rebuilt"
                history = f" The history is kept{cache}." if self.conversation.path else ""
                self.tell(f"Now chatting with {self.model_name}.{history}")
            case worker.Job("count", (draft,)) if isinstance(value, DraftCost):
                self.preparation.counted(draft, value)
            case worker.Job("answers"):
                self.compacting.summary_is_over(is_whole=bool(value))
            case worker.Job("configure", ({"documents": documents},)):
                self.documents.opened(documents)
            case worker.Job("read", (document,)):
                self.documents.reads(document, value if isinstance(value, int) else None)
            case worker.Job("begin_title") if value is False:
                self.titling.refused()
            case worker.Job("catalogue"):
                self.models.show(value if isinstance(value, list) else [])

    # --- display ---

    def _say_problem(self) -> None:
        self._problem, before = self.conversation.saved.problem, self._problem
        self.remarks.stand(self._problem)
        if before and not self._problem:
            self.say("The conversation is being saved again.")

    def _show_live(self, now: float) -> Live:
        talk = self.conversation
        phase = "loading" if self.is_loading else "absent" if self.info is None else "ready"
        documents = tuple(document.name for document in talk.documents)
        idle = Live(
            phase, self.wanted_model, self.info, self._progress, title=talk.title, documents=documents
        )
        figures = live_figures(idle, self.backend, talk.turn, talk.ended_here, talk.saved_stats, now)
        live = self._watch.see(figures, now)
        self.status.show(live)
        self.panel.show(live)
        if (preset := Preset.of(self.backend.options.system, talk.sampling, documents)) != self._preset:
            self._preset = preset
            self.transcript.show_head(*([PresetEntry(preset)] if preset else []))
        self.welcome.show(live, preset)
        self._note.show(live, self.preparation.cost)
        self.presence.show(live)
        self.documents.watch_reading(live.figures)
        return live

    # --- input ---

    @on(Composer.Changed)
    def _typed(self) -> None:
        now = monotonic()
        self.remarks.written(self.composer.text, now)
        if self.preparation.typed():
            self._show_live(now)

    @on(Completion.SuggestionSelected)
    def _clicked(self, message: Completion.SuggestionSelected) -> None:
        self.composer.choose(message.suggestion)
        self.composer.focus()

    @on(Composer.ModeChanged)
    def _vim_mode(self) -> None:
        self.status.show_mode(self.composer.vim_mode)

    @on(Composer.Problem)
    def _composer_problem(self, message: Composer.Problem) -> None:
        self.say(message.text, "error")

    @on(Composer.PasteOpened)
    def _paste_opened(self, message: Composer.PasteOpened) -> None:
        screen = PasteScreen(message.label, message.text, can_unfold=message.can_unfold)
        self.app.push_screen(screen, message.done)

    @on(Composer.Submitted)
    def _submitted(self, message: Composer.Submitted) -> None:
        self._completion.close()
        self.writing.submitted(message.text, message.recall)

    # --- the selected message: the transcript has the focus ---

    def action_code(self, what: str) -> None:
        code = self.code
        does = {"copy": code.choose_copy, "save": code.save, "run": code.run, "view": code.change_view}
        self.attempt(does[what])

    def on_transcript_clicked(self, message: Transcript.Clicked) -> None:
        entry, click = message.entry, message.click
        match click.what:
            case "prev" | "next":
                self.attempt(partial(self._step, entry, -1 if click.what == "prev" else 1))
            case "copy" if isinstance(entry, AnswerEntry):
                self.attempt(partial(self.code.copy, str(click.number), entry))
            case _ if entry is self.transcript.selected or not isinstance(entry, UserEntry | AnswerEntry):
                self.back_to_composer()
            case _:
                self.select(entry)

    def _step(self, entry: Entry, side: int) -> None:
        was_selected = entry is self.transcript.selected
        there = self.conversation.step(entry, side)
        if was_selected and there is not None:
            self.transcript.select(there)

    def on_key(self, event: events.Key) -> None:
        """Pass a key that the selected message does not use on to the composer."""
        known = (
            event.key in {*MESSAGE_KEYS, *EDGE_KEYS, *CODE_KEYS}
            or event.character is None
            or not event.is_printable
        )
        # The composer handles all its characters, so this one was on its way to the transcript.
        is_late = self.focused is self.composer and event.is_printable and not self.composer.read_only
        if (self.focused is self.transcript and not known) or is_late:
            event.stop()
            self.back_to_composer()
            self.composer.insert(event.character or "")

    def on_paste(self, event: events.Paste) -> None:
        """Pass a paste on to the composer, which has not handled it if it bubbles up to here."""
        self.back_to_composer()
        self.composer.post_message(events.Paste(event.text))

    # --- keys ---

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave End to the composer unless there is new text below and its cursor is at the end, and Ctrl+R to vim."""
        if action == "jump_down":
            at_end = self.composer.cursor_location == self.composer.document.end
            return self.is_mounted and self.transcript.has_news and at_end
        if action == "run_command" and parameters == ("retry", "") and self.is_mounted:
            vim = self.composer.vim  # Ctrl+R is vim's redo there
            return vim is None or vim.mode == "insert" or self.focused is not self.composer
        return super().check_action(action, parameters)

    def action_jump_down(self) -> None:
        self.transcript.follow()

    def action_escape(self) -> None:
        """Do the first thing that there is to leave or to stop."""
        for leave in (
            self._close_completion,
            self.finding.close,
            self._leave_selection,
            self._leave_vim_mode,
            self.stop_answer,
            self.code.stop,
            self.take_back,
            self.writing.give_up,
            self._hint_loading,
        ):
            if leave():
                return
        self.remarks.dismiss()
        self.clear_selection()

    def _close_completion(self) -> bool:
        was_open = bool(self._completion.display)
        if was_open:
            self._completion.close()
        return was_open

    def _leave_selection(self) -> bool:
        if self.transcript.selected is None:
            return False
        self.back_to_composer()
        return True

    def _leave_vim_mode(self) -> bool:
        return self.focused is self.composer and self.composer.vim_takes("escape")

    def _hint_loading(self) -> bool:
        if self.is_loading:
            self.hint("The model is still loading; /stop cancels it.", 3.0)
        return self.is_loading

    def action_interrupt(self) -> None:
        self.interrupt.press()

    def action_leader(self) -> None:
        ask_for_second_key(self)

    def action_page(self, step: int) -> None:
        self.transcript.page(step)

    def on_transcript_pictured(self, message: Transcript.Pictured) -> None:
        if isinstance(self.app, ThemedApp) and self.app.shows_pictures:
            self.picturing.want(message.entry)

    def on_find_bar_typed(self, message: FindBar.Typed) -> None:
        self.finding.look_for(message.text)

    def on_find_bar_stepped(self, message: FindBar.Stepped) -> None:
        self.finding.step(message.step)

    def action_edge(self, step: int) -> None:
        self.transcript.edge(step)
