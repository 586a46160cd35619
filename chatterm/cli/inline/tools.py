"""Tools in a chat without a screen: a call is shown in full, and only a person at a terminal can allow it."""

import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Protocol

from chatterm.backends.backend import Backend, EngineError, ToolCall, ToolResult
from chatterm.conversation.tool_entry import subject
from chatterm.terminal.console import console_keys
from chatterm.terminal.sanitize import one_line, visible
from chatterm.tools.danger import revealed
from chatterm.tools.loop import run_blocking, run_calls
from chatterm.tools.policy import Answer, choice_text, choices
from chatterm.tools.session import ToolSession, performed, refused, stopped
from chatterm.tools.tool import ToolPlan, ToolRun

_LOOK = 0.1
_NOBODY = "there is nobody to ask"


class Questioner(Protocol):
    """Reads a person's answers."""

    @property
    def by_hand(self) -> bool: ...

    def next(self, prompt: str) -> str | None: ...


class InlineTools:
    """The tools of one chat; all are off at first."""

    def __init__(self, lines: Questioner, say: Callable[[str], None]) -> None:
        """`say` writes a line for the person, beside the answers."""
        self._lines = lines
        self._say = say
        self._session: ToolSession | None = None

    @property
    def session(self) -> ToolSession:
        if self._session is None:
            self._session = ToolSession.open(Path.cwd(), self._say)
        return self._session

    def command(self, text: str, backend: Backend) -> list[str]:
        """Run /tools and return the lines to show. Raises EngineError."""
        session = self.session
        if not text:
            return self._told()
        if text.split()[0] == "forget":
            return [self._forget(text.removeprefix("forget").strip())]
        info = backend.info
        if info is not None and not info.calls_tools and text != "off":
            raise EngineError(f"{info.name} does not support tools; /model chooses another model.")
        for server in session.to_start(text):
            session.start(server)
        said = session.switch(text)
        backend.configure({"tools": session.box.offered()})
        return [said]

    def results(self, calls: Sequence[ToolCall]) -> list[ToolResult] | None:
        """Run the calls, asking for permission as needed; return their results, or None if the person stopped."""
        try:
            return run_blocking(run_calls(self.session.policy, calls, self))
        except KeyboardInterrupt:
            if not self._lines.by_hand:
                raise
            self._say("[stopped; nothing more is run]")
            return None

    def leave(self, backend: Backend) -> None:
        """Switch all tools off, for a new conversation."""
        if self._session is not None and self._session.forget():
            backend.configure({"tools": ()})

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def _told(self) -> list[str]:
        box, policy = self.session.box, self.session.policy
        lines = [f"{'on ' if name in box.on else 'off'} {name}" for name in box.names]
        with suppress(EngineError):
            lines += [
                f"off {name} (an MCP server)" for name in self.session.server_names() if name not in box.known
            ]
        for number, rule in enumerate((*policy.always, *policy.session), 1):
            kept = "always" if rule in policy.always else "now"
            lines.append(f"rule {number}: allowed {kept}: {rule.tool} {one_line(rule.pattern, 200)}")
        told = "/tools NAMES switches tools on, /tools off switches all of them off. You are asked before each call."
        if policy.always or policy.session:
            told += " /tools forget N removes a rule."
        return [*lines, told]

    def _forget(self, number: str) -> str:
        """Remove the rule of this number; return a sentence that says so. Raises EngineError."""
        policy = self.session.policy
        rules = [*policy.always, *policy.session]
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= len(rules)):
            raise EngineError("There is no such rule; /tools lists them with their numbers.")
        rule = rules[int(number) - 1]
        policy.remove(rule)
        return f"{rule.tool} {one_line(rule.pattern, 200)} is no longer allowed without asking."

    # --- as a `CallHost` ---

    def is_stopped(self) -> bool:
        """Return False: Ctrl+C ends everything."""
        return False

    async def plan(self, index: int, call: ToolCall) -> ToolPlan:
        """Plan a call. Raises ToolError."""
        return self.session.plan(call)

    async def warn(self, text: str) -> None:
        """Write a line."""
        self._say(text)

    async def record(self, index: int, result: ToolResult) -> None:
        """Write what became of a call."""
        about = one_line(subject(result.name, result.arguments), 100)
        self._say(f"[{one_line(result.name, 60)} {about}: {result.state}]")

    async def ask(self, index: int, call: ToolCall, plan: ToolPlan, why: str) -> Answer | ToolResult:
        """Return the person's answer. It must include a random number just shown, so that text typed ahead, pasted, or
        written by a model or a tool cannot be an answer."""
        if not self._lines.by_hand:
            self._say(f"[{plan.tool} is not run: {_NOBODY}]")
            return refused(call)
        self._say(f"The model asks to use {plan.tool}:")
        for text, _ in plan.shown:
            for row in revealed(visible(text)).split("\n"):
                self._say(f"| {row}")
        if plan.dangers:
            self._say(f"Caution: {'; '.join(plan.dangers)}.")
        number = f"{secrets.randbelow(90) + 10}"
        offered = [answer for answer in choices(plan) if answer != "no"]
        self._say(f"{why} Any other answer means no:")
        for answer in offered:
            self._say(f"  {answer} {number}  {visible(choice_text(plan, answer))}")
        _drop_typed_ahead()
        said: list[str] = []
        with suppress(UnicodeError):
            said = (self._lines.next("? ") or "").split()
        return next((answer for answer in offered if said == [answer, number]), "no")

    async def perform(self, index: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        """Run the call in a thread, so that Ctrl+C stops it and its result so far is kept."""
        running, found = ToolRun(), list[ToolResult]()
        thread = Thread(target=lambda: found.append(performed(call, plan, running)), daemon=True)
        thread.start()
        while thread.is_alive():
            try:
                thread.join(_LOOK)
            except KeyboardInterrupt:
                if not self._lines.by_hand:
                    raise
                running.stopped.set()
        return found[0] if found else stopped(call)


def _drop_typed_ahead() -> None:
    """Discard what was typed before the question: it cannot be the answer."""
    try:
        import termios
    except ImportError:  # Windows
        console_keys()
        return
    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
