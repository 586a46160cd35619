"""Tools in scripts: those named on the command line run, all others are refused, and no permission is asked."""

from collections.abc import Callable
from pathlib import Path

from chatterm.backends.backend import EngineError, ToolCall, ToolResult
from chatterm.cli.usage import WrongUsage
from chatterm.tools.loop import run_blocking, run_calls
from chatterm.tools.policy import Answer, Policy
from chatterm.tools.session import ToolSession, performed
from chatterm.tools.tool import Effect, ToolError, ToolPlan, ToolRun

_CHANGES: tuple[Effect, ...] = ("write", "run", "server")
"""Effects that need --allow-changes."""


class HeadlessTools:
    """The tools of one command."""

    def __init__(self, names: str, may_change: bool, folder: Path) -> None:
        """`names` is the value of `--tools`. Raises WrongUsage."""
        self.session = ToolSession.of(folder, Policy())
        self.refused = False
        self._say: Callable[[str], None] = lambda line: None
        box = self.session.box
        for word in filter(None, (name.strip() for name in names.split(","))):
            try:
                if word not in box.known and word in self.session.server_names():
                    found = self.session.start(word)
                else:
                    found = box.found(word)
            except (EngineError, ToolError) as error:
                self.close()
                raise WrongUsage(f"--tools: {error}") from None
            changing = [name for name in found if box.planner(name).effect in _CHANGES]
            if changing and not may_change:
                self.close()
                raise WrongUsage(f"{word} may change things; add --allow-changes, or leave it out.")
            box.on |= set(found)

    def results(self, calls: list[ToolCall], say: Callable[[str], None]) -> list[ToolResult]:
        """Run or refuse each call and return the results; `say` gets a line for each."""
        self._say = say
        return run_blocking(run_calls(self.session.policy, calls, self))

    def close(self) -> None:
        """Stop what the tools have started."""
        self.session.close()

    # --- as a `CallHost`: nobody is present, so dangerous calls are refused and all others are allowed ---

    def is_stopped(self) -> bool:
        """Return False: Ctrl+C ends everything."""
        return False

    async def plan(self, index: int, call: ToolCall) -> ToolPlan:
        """Plan a call. Raises ToolError."""
        try:
            return self.session.plan(call)
        except ToolError as error:
            self.refused |= call.name not in self.session.box.on
            self._say(f"{call.name}: refused: {error}")
            raise

    async def ask(self, index: int, call: ToolCall, plan: ToolPlan, why: str) -> Answer | ToolResult:
        """Refuse a dangerous call; allow any other."""
        if not plan.dangers:
            return "once"
        self.refused = True
        why = " · ".join(plan.dangers)
        self._say(f"{call.name} {plan.subject}: refused: {why}")
        return ToolResult(call.name, call.arguments, f"This was not allowed: {why}.", "refused")

    async def warn(self, text: str) -> None:
        """Write a line."""
        self._say(text)

    async def perform(self, index: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        """Run a call."""
        result = performed(call, plan, ToolRun())
        self._say(f"{call.name} {plan.subject}: {result.state}")
        return result

    async def record(self, index: int, result: ToolResult) -> None:
        """Do nothing: the lines are written already."""
