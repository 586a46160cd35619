"""Tool calls of an answer: each is planned, approved and run in turn; then the model gets the results."""

import asyncio
import sys
import threading
from pathlib import Path
from time import monotonic

from chatterm.backends.backend import Backend, ToolCall, ToolResult
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.tools.loop import run_calls
from chatterm.tools.policy import Answer
from chatterm.tools.session import ToolSession, performed, refused
from chatterm.tools.tool import ToolPlan, ToolRun

_SWITCH = 0.0005
"""Thread switch interval in seconds while output is read, so that the screen stays responsive; the default is 10x."""
_LOOK = 0.1
"""Seconds between two updates of a running call's output."""


class ToolRunner(ScreenPart):
    """Runs one batch of calls at a time."""

    def __init__(self, screen: ChatBase) -> None:
        super().__init__(screen)
        self._session: ToolSession | None = None
        self.running: ToolRun | None = None
        self.is_stopped = False
        self.wanted = ""
        """The tools to switch on once a model is loaded."""

    @property
    def session(self) -> ToolSession:
        """The tools of this folder, created on first use."""
        if self._session is None:
            self._session = ToolSession.open(Path.cwd(), lambda text: self.screen.say(text, "error"))
        return self._session

    def from_any_thread(self) -> ToolSession:
        """Return `session` from any thread, such as one that waits for MCP servers."""
        if threading.current_thread() is threading.main_thread():
            return self.session
        return self.screen.app.call_from_thread(lambda: self.session)

    @property
    def said(self) -> tuple[str, ...] | None:
        """The tools that are on, as words for /tools; None if there are none."""
        return (self._session.box.said() or None) if self._session is not None else None

    def offer(self) -> None:
        """Offer the tools that are on to the model, from the next message on."""
        self.screen.submit(Backend.configure, {"tools": self.session.box.offered()})

    def leave(self) -> None:
        """Stop, and switch all tools off, before another conversation begins."""
        self.stop()
        if self._session is not None and self._session.forget():
            self.offer()

    def begin(self) -> bool:
        """Start the tool calls of the last answer. Return False if there are none."""
        entry = self.conversation.act()
        if entry is None:
            return False
        self.is_stopped = False
        self.screen.run_worker(self._batch(entry), exclusive=False)
        return True

    def stop(self) -> None:
        """Stop the running call, with everything that it started, and skip the others."""
        self.is_stopped = True
        if self.running is not None:
            self.running.stopped.set()

    def close(self) -> None:
        """Stop everything and close the MCP servers, because the program ends."""
        self.stop()
        if self._session is not None:
            self._session.close()

    async def _batch(self, entry: ToolsEntry) -> None:
        calls = [ToolCall(shown.name, shown.arguments) for shown in entry.calls]
        results = await run_calls(self.session.policy, calls, _Batch(self, entry))
        if self.conversation.acting is not entry:
            return  # another conversation has been opened
        self.conversation.tell(results, self.screen.model_name, is_stopped=self.is_stopped)
        if self.is_stopped:
            self.conversation.next(self.screen.model_name)


class _Batch:
    """The calls of one answer, as a `CallHost`."""

    def __init__(self, runner: ToolRunner, entry: ToolsEntry) -> None:
        self._runner, self._entry = runner, entry
        self._screen = runner.screen

    @property
    def _is_shown(self) -> bool:
        return self._runner.conversation.acting is self._entry

    def is_stopped(self) -> bool:
        """Return whether the person has stopped, or opened another conversation."""
        return self._runner.is_stopped or not self._is_shown

    async def plan(self, index: int, call: ToolCall) -> ToolPlan:
        """Plan a call in a thread. Raises ToolError."""
        return await asyncio.to_thread(self._runner.session.plan, call)

    async def ask(self, index: int, call: ToolCall, plan: ToolPlan, why: str) -> Answer | ToolResult:
        """Ask on a screen; leaving that screen stops the batch."""
        from chatterm.screens.approval import ApprovalScreen

        self._show(index, "asking")
        count, info = len(self._entry.calls), self._screen.info
        place = f", {index + 1} of {count}" if count > 1 else ""
        approval = ApprovalScreen(plan, why, place, model=info.label if info is not None else "The model")
        answer = await self._screen.app.push_screen_wait(approval)
        if answer is None and self._is_shown:
            self._runner.is_stopped = True
        return answer or refused(call)

    async def warn(self, text: str) -> None:
        """Show an error."""
        self._screen.say(text, "error")

    async def perform(self, index: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        """Run a call in a thread and show its output meanwhile."""
        lock, pieces = threading.Lock(), list[str]()

        def say(text: str) -> None:
            with lock:
                pieces.append(text)
                if sum(map(len, pieces[-50:])) > 20_000 or len(pieces) > 50:
                    pieces[:] = ["".join(pieces)[-8_000:]]

        running = self._runner.running = ToolRun(say=say)
        began = monotonic()
        work = asyncio.create_task(asyncio.to_thread(performed, call, plan, running))
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            while not work.done():
                if not self._is_shown:
                    running.stopped.set()
                with lock:
                    said = "".join(pieces)
                self._show(index, "running", monotonic() - began, said)
                await asyncio.wait([work], timeout=_LOOK)
            return work.result()
        finally:
            sys.setswitchinterval(before)
            running.stopped.set()
            self._runner.running = None

    async def record(self, index: int, result: ToolResult) -> None:
        """Show a result."""
        self._show(index, result.state, result.seconds, result.text)

    def _show(self, index: int, state: str, seconds: float = 0.0, text: str | None = None) -> None:
        self._entry.show_state(index, state, seconds, text)
        if self._is_shown:
            self._runner.transcript.update()
            self._runner.transcript.new_text()
