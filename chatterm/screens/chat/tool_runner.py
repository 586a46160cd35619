"""The calls of an answer: each is planned, asked for, done, and told to the model, one after the other."""

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
"""Seconds after which a thread that takes in output lets the screen go on; Python's own are ten times as many."""
_LOOK = 0.1
"""Seconds between two looks at what a running call has printed."""


class Tooling(ScreenPart):
    """One batch of calls at a time."""

    def __init__(self, screen: ChatBase) -> None:
        super().__init__(screen)
        self._session: ToolSession | None = None
        self._running: ToolRun | None = None
        self._is_stopped = False
        self.wanted = ""
        """What is to be switched on once there is a model."""

    @property
    def session(self) -> ToolSession:
        """The tools of this folder, once somebody wants any."""
        if self._session is None:
            try:
                policy = Policy.of(rules_path())
            except SettingsError as error:
                self.screen.say(f"{error} Until then no permanent rules apply.", "error")
                policy = Policy()
            self._session = ToolSession.of(Path.cwd(), policy)
        return self._session

    def from_any_thread(self) -> ToolSession:
        """The same for what waits for MCP servers elsewhere."""
        if threading.current_thread() is threading.main_thread():
            return self.session
        return self.screen.app.call_from_thread(lambda: self.session)

    @property
    def said(self) -> tuple[str, ...] | None:
        """What is on, in words; None for nothing."""
        return (self._session.box.said() or None) if self._session is not None else None

    def offer(self) -> None:
        """The model may use what is on, from the next message on."""
        self.screen.submit(worker.SetTools(self.session.box.offered()))

    def leave(self) -> None:
        """Another conversation begins: nothing is on there."""
        self.stop()
        if self._session is None:
            return
        self.session.policy.session.clear()
        if self.session.box.on:
            self.session.box.on.clear()
            self.offer()

    def begin(self) -> bool:
        """Begin with the calls of the last answer; False where there are none to be done."""
        entry = self.conversation.act()
        if entry is None:
            return False
        self._is_stopped = False
        self.screen.run_worker(self._batch(entry), exclusive=False)
        return True

    def stop(self) -> None:
        """End what runs, with all that came of it; nothing more is asked for."""
        self._is_stopped = True
        if self._running is not None:
            self._running.stopped.set()

    def close(self) -> None:
        """The program ends."""
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
                return  # another conversation is open by now
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
