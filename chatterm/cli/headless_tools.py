"""Tools in scripts: those named on the command line run, all others are refused, and no permission is asked."""

from collections.abc import Callable
from pathlib import Path

from chatterm.backends.backend import EngineError, ToolCall, ToolResult
from chatterm.cli.usage import WrongUsage
from chatterm.tools.policy import Policy
from chatterm.tools.session import ToolSession, failed, performed
from chatterm.tools.tool import Effect, ToolError, ToolRun

_CHANGES: tuple[Effect, ...] = ("write", "run", "server")
"""Effects that need --allow-changes."""


class Unasked:
    """The tools of one command."""

    def __init__(self, names: str, may_change: bool, folder: Path) -> None:
        """`names` is the value of `--tools`. Raises WrongUsage."""
        self.session = ToolSession.of(folder, Policy())
        self.refused = False
        self._may_change = may_change
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
        return [self._result(call, say) for call in calls]

    def close(self) -> None:
        """Stop what the tools have started."""
        self.session.close()

    def _result(self, call: ToolCall, say: Callable[[str], None]) -> ToolResult:
        try:
            plan = self.session.plan(call)
        except ToolError as error:
            self.refused |= call.name not in self.session.box.on
            say(f"{call.name}: refused: {error}")
            return failed(call, str(error))
        if plan.dangers:  # nobody is present to review them
            self.refused = True
            why = " · ".join(plan.dangers)
            say(f"{call.name} {plan.subject}: refused: {why}")
            return ToolResult(call.name, call.arguments, f"This was not allowed: {why}.", "refused")
        result = performed(call, plan, ToolRun())
        say(f"{call.name} {plan.subject}: {result.state}")
        return result
