"""The welcome text, shown until the conversation begins."""

from chatterm.commands.registry import command_key
from chatterm.conversation.figures import Live, meter, progress_parts
from chatterm.conversation.preset import NOTHING, Preset, preset_lines
from chatterm.markdown.lines import Line, shortened, wrap
from chatterm.widgets.canvas import Canvas
from models.units import counted


class WelcomeView(Canvas):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._live: Live | None = None
        self._preset = NOTHING

    def show(self, live: Live, preset: Preset) -> None:
        if self.display and (live, preset) != (self._live, self._preset):
            self._live, self._preset = live, preset
            self.refresh()

    def build(self, width: int) -> list[Line]:
        lines = welcome_lines(self._live, width, self._preset) if self._live else []
        if len(lines) > self.size.height:
            lines = [line for line in lines if line]
        above = max((self.size.height - len(lines)) // 2, 0)
        return [[] for _ in range(above)] + lines


def welcome_lines(live: Live, width: int, preset: Preset = NOTHING) -> list[Line]:
    info, progress = live.info, live.progress
    lines: list[Line] = [[("chatterm", "strong primary")], []]
    if live.phase == "absent":
        lines += wrap([("No model is loaded. /model NAME loads one, /quit exits.", "warning")], width)
    elif info is not None and live.phase != "loading":
        room = f" · {counted(info.context_length, 'token')} of context" if info.context_length else ""
        about = f" · {info.where}{room}"
        lines += wrap([(info.label, "strong"), (about, "muted")], width)
    else:
        lines += wrap([(live.model, "strong"), (" is loading; you can already write", "muted")], width)
        done = progress.done / progress.total if progress and progress.total else 0.0
        lines.append(meter(done, min(32, width)))
        if progress is not None:
            lines += wrap([(f"{progress.stage} " + " · ".join(progress_parts(live)), "muted")], width)
    if preset:
        lines += [[], *preset_lines(preset, width)[0]]
    lines.append([])
    for key, what in (
        ("Enter", "send"),
        ("Ctrl+J", "new line (Shift+Enter if the terminal supports it)"),
        ("Esc", "stop the answer; its text is kept"),
        ("/", "commands"),
        (command_key("sessions"), "earlier conversations"),
        (command_key("help"), "all commands and keys"),
        ("Ctrl+C", "stop; twice to quit"),
    ):
        lines.append([(key.ljust(9), ""), (shortened(what, max(width - 9, 0)), "muted")])
    return lines
