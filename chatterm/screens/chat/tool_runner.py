"""Tool calls of an answer: each is planned, approved and run in turn; then the model gets the results."""

import asyncio
import sys
import threading
from pathlib import Path
from time import monotonic

from chatterm.backends import worker
from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.conversation.tool_entry import ToolsEntry
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.settings.settings import SettingsError
from chatterm.tools.policy import Answer, Policy
from chatterm.tools.rules import rules_path
from chatterm.tools.session import ToolSession, failed, performed, refused, stopped
from chatterm.tools.tool import ToolError, ToolPlan, ToolRun

_SWITCH = 0.0005
"""Thread switch interval in seconds while output is read, so that the screen stays responsive; the default is 10x."""
_LOOK = 0.1
"""Seconds between two updates of a running call's output."""


class Tooling(ScreenPart):
    """Runs one batch of calls at a time."""

    def __init__(self, screen: ChatBase) -> None:
        super().__init__(screen)
        self._session: ToolSession | None = None
        self._running: ToolRun | None = None
        self._is_stopped = False
        self.wanted = ""
        """The tools to switch on once a model is loaded."""

    @property
    def session(self) -> ToolSession:
        """The tools of this folder, created on first use."""
        if self._session is None:
            try:
                policy = Policy.of(rules_path())
            except SettingsError as error:
                self.screen.say(f"{error} Until then no permanent rules apply.", "error")
                policy = Policy()
            self._session = ToolSession.of(Path.cwd(), policy)
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
        self.screen.submit(worker.SetTools(self.session.box.offered()))

    def leave(self) -> None:
        """Stop, and switch all tools off, before another conversation begins."""
        self.stop()
        if self._session is None:
            return
        self.session.policy.session.clear()
        if self.session.box.on:
            self.session.box.on.clear()
            self.offer()

    def begin(self) -> bool:
        """Start the tool calls of the last answer. Return False if there are none."""
        entry = self.conversation.act()
        if entry is None:
            return False
        self._is_stopped = False
        self.screen.run_worker(self._batch(entry), exclusive=False)
        return True

    def stop(self) -> None:
        """Stop the running call, with everything that it started, and skip the others."""
        self._is_stopped = True
        if self._running is not None:
            self._running.stopped.set()

    def close(self) -> None:
        """Stop everything and close the MCP servers, because the program ends."""
        self.stop()
        if self._session is not None:
            self._session.close()

    async def _batch(self, entry: ToolsEntry) -> None:
        calls = [ToolCall(shown.name, shown.arguments) for shown in entry.calls]
        results: list[ToolResult] = []
        for number, call in enumerate(calls):
            if self._is_stopped:
                result = stopped(call)
            else:
                place = f", {number + 1} of {len(calls)}" if len(calls) > 1 else ""
                result = await self._one(entry, number, call, place)
            results.append(result)
            self._show(entry, number, result.state, result.seconds, result.text)
            if self.conversation.acting is not entry:
                return  # another conversation has been opened
        self.conversation.tell(results, self.screen.model_name, is_stopped=self._is_stopped)
        if self._is_stopped:
            self.conversation.next(self.screen.model_name)

    async def _one(self, entry: ToolsEntry, number: int, call: ToolCall, place: str) -> ToolResult:
        try:
            plan = await asyncio.to_thread(self.session.plan, call)
        except ToolError as error:
            return failed(call, str(error))
        if self.conversation.acting is not entry or self._is_stopped:
            return stopped(call)
        policy = self.session.policy
        if why := policy.why_ask(plan):
            self._show(entry, number, "asking")
            answer = await self._asked(plan, why, place)
            if self.conversation.acting is not entry:
                return stopped(call)
            if answer is None:
                self._is_stopped = True
                return refused(call)
            try:
                policy.decided(plan, answer)
            except SettingsError as error:
                self.screen.say(f"The rule holds for this session only: {error}", "error")
            if answer == "no":
                return refused(call)
        else:
            policy.ran()
        return await self._done(entry, number, call, plan)

    async def _asked(self, plan: ToolPlan, why: str, place: str) -> Answer | None:
        from chatterm.screens.approval import ApprovalScreen

        info = self.screen.info
        asked = ApprovalScreen(plan, why, place, model=info.label if info is not None else "The model")
        return await self.screen.app.push_screen_wait(asked)

    async def _done(self, entry: ToolsEntry, number: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        lock, pieces = threading.Lock(), list[str]()

        def say(text: str) -> None:
            with lock:
                pieces.append(text)
                if sum(map(len, pieces[-50:])) > 20_000 or len(pieces) > 50:
                    pieces[:] = ["".join(pieces)[-8_000:]]

        running = self._running = ToolRun(say=say)
        began = monotonic()
        work = asyncio.create_task(asyncio.to_thread(performed, call, plan, running))
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            while not work.done():
                if self.conversation.acting is not entry:
                    running.stopped.set()
                with lock:
                    said = "".join(pieces)
                self._show(entry, number, "running", monotonic() - began, said)
                await asyncio.wait([work], timeout=_LOOK)
            return work.result()
        finally:
            sys.setswitchinterval(before)
            running.stopped.set()
            self._running = None

    def _show(
        self, entry: ToolsEntry, number: int, state: str, seconds: float = 0.0, text: str | None = None
    ) -> None:
        entry.show_state(number, state, seconds, text)
        if self.conversation.acting is entry:
            self.transcript.update()
            self.transcript.new_text()
