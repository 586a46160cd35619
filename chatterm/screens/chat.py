"""The chat: what the person does becomes jobs for the worker, what the worker reports becomes entries."""

from collections import deque
from dataclasses import replace
from time import monotonic
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from chatterm import worker
from chatterm.backend import Backend, EngineError, ModelInfo, Outcome, Progress
from chatterm.commands import Command, is_command, parse
from chatterm.entries import AnswerEntry, BuiltEntry, Entry, NoticeEntry, UserEntry
from chatterm.figures import Live, SessionStats, new_notes
from chatterm.garbage import collect_now, collect_rarely
from chatterm.reports import THINKING, help_lines, stats_lines
from chatterm.sanitize import one_line
from chatterm.themes import load_theme, theme_names
from chatterm.turn import Turn, live_figures
from chatterm.widgets.canvas import STYLE_CLASSES
from chatterm.widgets.completion import Completion
from chatterm.widgets.composer import Composer
from chatterm.widgets.side_panel import SidePanel
from chatterm.widgets.status_line import StatusLine
from chatterm.widgets.transcript import Transcript
from chatterm.widgets.welcome import Welcome

_FRAME = 1 / 30
"""Seconds between two looks into the mailbox, whatever the token rate."""
_FIGURES = 0.2
"""Seconds between two updates of the figures: nobody reads numbers that change faster."""
_WIDE = 110
"""Columns from which the figures stand beside the conversation."""
_AGAIN = 3.0
"""Seconds in which a second Ctrl+C quits."""
_REST = 2.0
"""Seconds after an answer in which nobody minds a pause of some hundredths of a second."""
_PAUSE = 0.6
"""Seconds without a key after which a draft is warmed."""
_LOADING = "The model is still loading."


class ChatScreen(Screen[None]):
    """Implements `chatterm.commands.Actions`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = STYLE_CLASSES
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", priority=True),
        Binding("ctrl+c", "interrupt", "Stop or quit", priority=True),
        Binding("ctrl+t", "toggle_thinking", "Thinking", priority=True),
        Binding("f1", "show_help", "Help", priority=True),
        Binding("pageup", "page(-1)", "Page up", priority=True),
        Binding("pagedown", "page(1)", "Page down", priority=True),
        Binding("ctrl+home", "edge(-1)", "First message", priority=True),
        Binding("ctrl+end", "edge(1)", "Last message", priority=True),
    ]

    def __init__(self, backend: Backend, thread: worker.Worker) -> None:
        super().__init__()
        self._backend = backend
        self._worker = thread
        self._loading = True
        self._progress: Progress | None = None
        self._model = one_line(backend.model, limit=200)
        self._info: ModelInfo | None = None
        self._turn: Turn | None = None
        self._past: list[tuple[UserEntry, AnswerEntry]] = []
        """Exchanges that the history holds."""
        self._waiting: deque[UserEntry] = deque()
        self._session = SessionStats()
        self._ended: Turn | None = None
        """The latest turn that is over, for its figures."""
        self._show_thinking: bool | None = None
        self._interrupted = 0.0
        self._hint_until = 0.0
        self._paint_after = 0.0
        self._figures_after = 0.0
        self._draft_at: float | None = None
        self._noted: set[str] = set()

    def compose(self) -> ComposeResult:
        with Horizontal(id="columns"):
            with Vertical(id="conversation"):
                yield Welcome(id="welcome")
                yield Transcript(id="transcript")
                yield Completion(id="completion")
                yield Composer(intercept=self._intercept, id="composer")
                yield StatusLine(id="status")
            yield SidePanel(id="panel")

    def on_mount(self) -> None:
        self._transcript = self.query_one(Transcript)
        self._composer = self.query_one(Composer)
        self._completion = self.query_one(Completion)
        self._status = self.query_one(StatusLine)
        self._panel = self.query_one(SidePanel)
        self._welcome = self.query_one(Welcome)
        self._transcript.display = False
        self._composer.focus()
        self._show_live(monotonic())
        self._worker.submit(worker.Open())
        self.set_interval(_FRAME, self._frame)
        # The worker begins once the first frame is out: importing the engine would hold it up.
        self.call_after_refresh(self.set_timer, 0.05, self._begin_work)

    def _begin_work(self) -> None:
        collect_rarely()
        self._worker.start()

    def on_resize(self, event: events.Resize) -> None:
        wide = event.size.width >= _WIDE
        self._panel.display = wide
        self._status.keys_only(wide)
        self.set_class(event.size.height < 12, "-low")

    @property
    def is_idle(self) -> bool:
        """Nothing is being loaded or answered, and nothing waits."""
        return not self._loading and self._turn is None and not self._waiting

    # --- from the worker ---

    def _frame(self) -> None:
        now = monotonic()
        if self._hint_until and now > self._hint_until:
            self._hint("")
        if self._draft_at is not None and now > self._draft_at:
            self._draft_at = None
            self._prepare()
        reports = self._worker.take()
        if not reports and self._turn is None:
            return
        tokens = [report for report in reports if isinstance(report, worker.Token)]
        turn = self._turn
        told = len(reports) > len(tokens) or (turn is not None and not turn.has_begun and bool(tokens))
        if turn is not None and tokens:
            if turn.replaced is not None:
                self._transcript.drop(turn.replaced)
                turn.replaced = None
            turn.take(tokens)
        moved = turn is not None and turn.tick(now, self._backend.figures())
        for report in reports:
            if not isinstance(report, worker.Token):
                self._report(report, now)
        if tokens or moved or told:
            self._paint(now, last=self._turn is None)
        if told or now >= self._figures_after:
            self._figures_after = now + _FIGURES
            self._show_live(now)

    def _paint(self, now: float, *, last: bool) -> None:
        """Show what has changed; leave at least two thirds of the time to everything else."""
        if last or now >= self._paint_after:
            begun = monotonic()
            self._transcript.update()
            self._paint_after = now + 3 * (monotonic() - begun)

    def _report(self, report: worker.Report, now: float) -> None:
        match report:
            case worker.Loading(progress):
                self._progress = progress
            case worker.Loaded(info):
                self._info = replace(info, name=one_line(info.name, limit=200))
                self._loading, self._progress = False, None
                collect_rarely()
            case worker.Answered(outcome):
                self._answered(outcome, now)
            case worker.Failed(job, message):
                self._failed(job, message)
            case worker.Done(job, value):
                self._done(job, value)
        for note in new_notes(self._backend.figures(), self._noted):
            self._say(note)
        if self._turn is None and not self._loading:
            self._next()

    def _answered(self, outcome: Outcome | None, now: float) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        turn.end(outcome, now)
        if turn.is_dropped:
            return
        if turn.replaced is not None:
            self._transcript.drop(turn.replaced)
        self._past.append((turn.prompt, turn.answer))
        self._ended = turn
        if turn.stats is not None:
            self._session.add(turn.stats)
        self.set_timer(_REST, self._tidy)

    def _tidy(self) -> None:
        """Search for garbage while nothing happens, so that it need not be done while something does."""
        if self.is_idle:
            collect_now()

    def _failed(self, job: object, message: str) -> None:
        if isinstance(job, worker.Open | worker.Switch):
            self._loading, self._progress = False, None
            if self._backend.info is None:
                self._info = None
            self._model = one_line(self._backend.model, limit=200)
            if self._info is None:
                while self._waiting:
                    self._take_back(self._waiting.pop())
                message += " /model NAME loads another model, /quit leaves."
        turn = self._turn
        if isinstance(job, worker.Send | worker.Retry) and turn is not None:
            self._turn = None
            turn.end(None, monotonic())
            if turn.is_dropped:
                return
            if turn.has_begun:
                self._past.append((turn.prompt, turn.answer))
            elif isinstance(job, worker.Retry):
                self._transcript.drop(turn.answer)
                if turn.replaced is not None:
                    self._past.append((turn.prompt, turn.replaced))
            else:
                self._transcript.drop(turn.answer)
                self._take_back(turn.prompt)
        self._say(message, "error")

    def _done(self, job: object, value: object) -> None:
        match job:
            case worker.Switch():
                self._past.clear()
                self._say(f"Now chatting with {self._model_name}. The conversation begins anew.")
            case worker.Undo():
                self._undone(dropped=bool(value))
            case worker.SetSystem(None):
                self._say("The system prompt is gone.")
            case worker.SetSystem():
                self._say("The system prompt is set; it holds from the next message on.")
            case worker.SetThink(mode):
                self._say(THINKING[mode] + (self._no_thinking() if mode != "off" else ""))
            case worker.ListModels():
                self._say_models(value if isinstance(value, list) else [])

    def _undone(self, *, dropped: bool) -> None:
        if not dropped or not self._past:
            self._say("There is nothing to take back.")
            return
        prompt, answer = self._past.pop()
        self._transcript.drop(answer)
        self._take_back(prompt)
        self._ended = None

    # --- what is shown besides the conversation ---

    @property
    def _model_name(self) -> str:
        return self._info.name if self._info else self._model

    def _say(self, text: str, kind: str = "notice") -> None:
        self._add(NoticeEntry(text, kind))

    def _add(self, entry: Entry) -> None:
        self._welcome.display = False
        self._transcript.display = True
        self._transcript.add(entry)
        self._transcript.look_at(entry)

    def _take_back(self, entry: UserEntry) -> None:
        """Off the transcript and into the composer: nothing a person wrote is lost."""
        self._transcript.drop(entry)
        self._composer.put_back(entry.text)

    def _hint(self, text: str, seconds: float = 0.0) -> None:
        self._hint_until = monotonic() + seconds if text else 0.0
        self._status.hint(text)

    def _show_live(self, now: float) -> None:
        phase = "loading" if self._loading else "absent" if self._info is None else "ready"
        idle = Live(phase, self._model, self._info, self._progress)
        live = live_figures(idle, self._backend, self._turn, self._ended, now)
        self._status.show(live)
        self._panel.show(live)
        self._welcome.show(live)

    # --- from the person ---

    @on(Composer.Changed)
    def _typed(self) -> None:
        text = self._composer.text
        self._completion.look(text)
        self._draft_at = monotonic() + _PAUSE if text.strip() and not is_command(text) else None

    def _prepare(self) -> None:
        if self._turn is None and self._info is not None and not self._loading:
            self._worker.submit(worker.Prepare(self._composer.text))

    def _intercept(self, key: str) -> bool:
        """Keys that belong to the open list of commands."""
        if self._completion.display:
            self._completion.look(self._composer.text)  # keys may have come faster than it was told
        chosen = self._completion.chosen
        if chosen is None:
            return False
        if key in ("up", "down"):
            self._completion.move(-1 if key == "up" else 1)
        elif key == "tab" or (key == "enter" and self._composer.text.strip() != chosen.text.strip()):
            self._completion.close()
            self._composer.put(chosen.text)
            if key == "enter" and chosen.complete:
                self._submit(chosen.text)
        else:
            return False
        return True

    @on(Completion.Chosen)
    def _clicked(self, message: Completion.Chosen) -> None:
        self._composer.put(message.suggestion.text)
        self._composer.focus()

    @on(Composer.Submitted)
    def _submitted(self, message: Composer.Submitted) -> None:
        self._submit(message.text)

    def _submit(self, text: str) -> None:
        if not text.strip():
            return
        self._completion.close()
        if is_command(text):
            try:
                command, argument = parse(text.strip())
            except EngineError as error:
                self._say(str(error), "error")
                return
            self._composer.put("")
            command.run(self, argument)
        elif self._info is None and not self._loading:
            self._say("No model is loaded. /model NAME loads one; your text is kept.", "error")
        else:
            self._composer.put("")
            entry = UserEntry(text.strip("\n"))
            self._waiting.append(entry)
            entry.note = (
                "waits for the model" if self._loading else "waits for the answer" if self._turn else ""
            )
            self._add(entry)
            if self._turn is None and not self._loading:
                self._next()

    def _next(self) -> None:
        """Send the message that waits longest."""
        if not self._waiting or self._info is None:
            return
        prompt = self._waiting.popleft()
        prompt.note = ""
        prompt.changed()
        self._begin(worker.Send(prompt.text), prompt, prompt)

    def _begin(self, job: worker.Send | worker.Retry, prompt: UserEntry, place: Entry) -> Turn:
        answer = AnswerEntry(show_thinking=self._show_thinking)
        self._turn = turn = Turn(prompt, answer, monotonic())
        turn.tick(turn.started, None)
        self._transcript.insert_after(place, answer)
        self._transcript.follow()
        self._worker.submit(job)
        return turn

    def choose(self, command: Command) -> None:
        """A command was chosen from the palette."""
        if command.arguments:
            self._composer.put(f"/{command.name} ")
        else:
            command.run(self, "")

    def _stop(self) -> None:
        if self._turn is not None:
            self._turn.is_stopping = True
            self._worker.stop()

    # --- keys ---

    def action_stop(self) -> None:
        if self._completion.display:
            self._completion.close()
        elif self._turn is not None:
            self._stop()
        elif self._waiting:
            self._take_back(self._waiting.pop())
        else:
            self.clear_selection()

    def action_interrupt(self) -> None:
        now = monotonic()
        if text := self._composer.selected_text or self.get_selected_text():
            self.app.copy_to_clipboard(text)
            self.clear_selection()
            self._hint("Copied.", 2.0)
        elif now - self._interrupted < _AGAIN:
            self.quit()
        else:
            self._interrupted = now
            self._hint("Stopped. Ctrl+C again quits." if self._turn else "Ctrl+C again quits.", _AGAIN)
            self._stop()

    def action_toggle_thinking(self) -> None:
        answers = [e for e in self._transcript.entries if isinstance(e, AnswerEntry) and e.has_thought]
        if answers:
            answers[-1].show_thinking(not answers[-1].is_open)
            self._transcript.update()

    def action_page(self, step: int) -> None:
        self._transcript.page(step)

    def action_edge(self, step: int) -> None:
        self._transcript.edge(step)

    def action_show_help(self) -> None:
        self.show_help()

    # --- commands (chatterm.commands.Actions) ---

    def show_help(self) -> None:
        self._add(BuiltEntry(help_lines))

    def show_stats(self) -> None:
        turn = self._ended.stats if self._ended is not None else None
        session, info = self._session.copy(), self._info
        figures = self._backend.figures()
        self._add(BuiltEntry(lambda width: stats_lines(width, turn, session, info, figures)))

    def reset(self) -> None:
        self._stop()
        if self._turn is not None:
            self._turn.is_dropped = True
        while self._waiting:
            self._take_back(self._waiting.pop())
        self._past.clear()
        self._session, self._ended = SessionStats(), None
        self._transcript.clear()
        self._worker.submit(worker.Reset())
        self._say("A new conversation.")

    def retry(self) -> None:
        if self._turn is not None or self._loading:
            self._say("Retry when the answer is there; Esc stops it." if self._turn else _LOADING, "error")
        elif not self._past:
            self._say("There is nothing to answer once more.")
        else:
            prompt, answer = self._past.pop()
            self._begin(worker.Retry(), prompt, answer).replaced = answer

    def undo(self) -> None:
        self._stop()
        self._worker.submit(worker.Undo())

    def think(self, mode: str) -> None:
        match mode:
            case "on" | "off" | "auto":
                self._worker.submit(worker.SetThink(mode))
            case "show" | "hide":
                self._show_thinking = mode == "show"
                for entry in self._transcript.entries:
                    if isinstance(entry, AnswerEntry):
                        entry.show_thinking(self._show_thinking)
                self._say("Thinking stays open." if mode == "show" else "Thinking stays closed.")
            case _:
                self._say(THINKING[self._backend.think] + self._no_thinking())

    def system(self, text: str) -> None:
        if text:
            self._worker.submit(worker.SetSystem(None if text == "none" else text))
        else:
            now = self._backend.system
            self._say(f"System prompt: {now}" if now else "There is no system prompt; /system TEXT sets one.")

    def model(self, name: str) -> None:
        if not name:
            self._worker.submit(worker.ListModels())
        elif self._loading:
            self._say(_LOADING, "error")
        else:
            self._stop()
            self._loading, self._model = True, one_line(name, limit=200)
            self._worker.submit(worker.Switch(name))

    def theme(self, name: str) -> None:
        if not name:
            self._say(f"Theme: {self.app.theme}. There are {', '.join(theme_names())}.")
            return
        try:
            self.app.register_theme(load_theme(name))
        except EngineError as error:
            self._say(str(error), "error")
        else:
            self.app.theme = name

    def quit(self) -> None:
        self.app.exit(0)

    def _no_thinking(self) -> str:
        if self._info is None or self._info.thinks:
            return ""
        return f" ({self._model_name} does not know thinking.)"

    def _say_models(self, names: list[str]) -> None:
        here = ", ".join(one_line(name, limit=200) for name in names) or "none yet"
        self._say(f"Model: {self._model_name}. On this machine: {here}.\n/model NAME goes on with another.")
