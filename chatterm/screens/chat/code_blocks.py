"""The code blocks of answers: saved, copied, run."""

import asyncio
import json
from collections.abc import Callable
from time import monotonic

from chatterm.backends.backend import EngineError, ToolCall
from chatterm.commands.reports import NO_ANSWER
from chatterm.conversation.entries import AnswerEntry
from chatterm.conversation.tool_entry import RunEntry
from chatterm.markdown.code import CodeBlock, code_blocks
from chatterm.screens.chat.base import ChatBase
from chatterm.screens.chat.parts import ScreenPart
from chatterm.screens.chat.tool_runner import ToolRunner
from chatterm.settings.settings import SettingsError
from chatterm.terminal.sanitize import one_line
from chatterm.tools.session import performed
from chatterm.tools.tool import ToolError, ToolPlan, ToolRun

_LOOK = 0.1
"""Seconds between two updates of a block's output."""
_TAIL = 8_000
"""Characters of the output shown while it runs."""
_SHELLS = frozenset(["", "sh", "shell", "console", "terminal", "zsh"])
_PROGRAMS = {"bash": "bash", "python": "python3", "py": "python3", "python3": "python3"}


def shell_command(block: CodeBlock) -> str:
    """Return the command line that runs a block. Raise EngineError for an unsupported language."""
    if block.language in _SHELLS:
        return block.text
    program = _PROGRAMS.get(block.language)
    if program is None:
        raise EngineError(
            f"Only sh, bash and Python are run here, not {block.language[:40]}; s saves the block."
        )
    mark = "END"
    while mark in block.text:  # no line of the block can end the here-document
        mark += "_END"
    flag = "-" if program == "python3" else "-s"
    return f"{program} {flag} <<'{mark}'\n{block.text}\n{mark}"


class CodeBlocks(ScreenPart):
    def __init__(self, screen: ChatBase, tooling: ToolRunner) -> None:
        super().__init__(screen)
        self._tooling = tooling
        self._running: ToolRun | None = None

    def save(self) -> None:
        """Ask for a name, and save a block of the selected answer."""
        from chatterm.screens.code import SaveCodeScreen

        def name(block: CodeBlock) -> None:
            self.screen.ask(SaveCodeScreen(block), lambda path: self.screen.say(f"Saved to {path}."))

        self._choose("Save a code block", name)

    def choose_copy(self) -> None:
        """Copy a block of the selected answer, which the person chooses, else the latest block."""
        if isinstance(self.selected, AnswerEntry):
            self._choose("Copy a code block", lambda block: self.screen.copy_text(block.text))
        else:
            self.copy("-1")

    def copy(self, number: str, entry: AnswerEntry | None = None) -> None:
        """Copy a block of this answer, else of the selected one, else of the last one that has any."""
        try:
            index = int(number)
        except ValueError:
            raise EngineError(
                f"{one_line(number, 40)!r} is not a number; code blocks are numbered from 1."
            ) from None
        if entry is None and isinstance(self.selected, AnswerEntry):
            entry = self.selected
        path, entries_of = self.conversation.path, self.conversation.entries_of
        answers = [entry] if entry is not None else [entries_of(exchange)[1] for exchange in reversed(path)]
        found = next((answer for answer in answers if answer.code(1) is not None), None)
        if found is None:
            raise EngineError("There is no code block to copy." if answers else NO_ANSWER)
        code = found.code(index)
        if code is None:
            raise EngineError(f"There is no code block {index} in that answer.")
        self.screen.copy_text(code)

    def run(self) -> None:
        """Run a block of the selected answer after showing it and asking."""
        if self._running is not None:
            raise EngineError("A code block is running; Esc stops it.")
        self._choose("Run a code block", self._run_block)

    def _choose(self, title: str, then: Callable[[CodeBlock], None]) -> None:
        """Call `then` with the code block of the selected answer; if it has several, the person chooses one."""
        from chatterm.screens.code import ChooseCodeScreen

        blocks = self._blocks()
        if len(blocks) == 1:
            then(blocks[0])
        else:
            self.screen.ask(ChooseCodeScreen(title, blocks), then)

    def _run_block(self, block: CodeBlock) -> None:
        call = ToolCall("run_command", json.dumps({"command": shell_command(block)}))
        try:
            plan = self._tooling.session.box.planner("run_command").plan(json.loads(call.arguments))
        except ToolError as error:
            raise EngineError(str(error)) from None
        self._running = ToolRun()
        self.screen.run_worker(self._ask_and_run(call, plan, self._running))

    def change_view(self) -> None:
        """Switch the view of the selected answer, which must be JSON."""
        entry = self.selected
        if not isinstance(entry, AnswerEntry) or entry.tree is None:
            raise EngineError("Select an answer that is JSON; it is shown as a tree.")
        entry.change_view()
        self.transcript.update()

    def stop(self) -> bool:
        """Stop the running block. Return whether there was one."""
        if self._running is None:
            return False
        self._running.stopped.set()
        return True

    async def _ask_and_run(self, call: ToolCall, plan: ToolPlan, running: ToolRun) -> None:
        from chatterm.screens.approval import ApprovalScreen

        try:
            asked = ApprovalScreen(plan, "It runs only if you say so.", "", model="This code block")
            answer = await self.screen.app.push_screen_wait(asked)
            if answer is None or answer == "no":
                return
            try:
                self._tooling.session.policy.decided(plan, answer)
            except SettingsError as error:
                self.screen.say(f"The rule holds for this session only: {error}", "error")
            await self._run_shown(call, plan, running)
        finally:
            self._running = None

    async def _run_shown(self, call: ToolCall, plan: ToolPlan, running: ToolRun) -> None:
        entry, pieces = RunEntry(call), [""]
        self.screen.back_to_composer()
        self.screen.add(entry)

        def say(text: str) -> None:
            pieces[0] = (pieces[0] + text)[-_TAIL:]

        running.say = say
        began = monotonic()
        work = asyncio.create_task(asyncio.to_thread(performed, call, plan, running))
        try:
            while not work.done():
                entry.show_state("running", monotonic() - began, pieces[0])
                self.transcript.update()
                await asyncio.wait([work], timeout=_LOOK)
            result = work.result()
        finally:
            running.stopped.set()
        entry.show_state(result.state, result.seconds, result.text)
        self.transcript.update()
        self.screen.hint("Ctrl+T shows the output of the code block.", 4.0)

    def _blocks(self) -> list[CodeBlock]:
        entry = self.selected
        if not isinstance(entry, AnswerEntry):
            raise EngineError("First select the answer that has the code block.")
        blocks = code_blocks(entry.source_text)
        if not blocks:
            raise EngineError("There is no code block in this answer.")
        return blocks
