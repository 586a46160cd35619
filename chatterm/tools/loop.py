"""The tool calls of an answer, one after the other: plan, policy, ask, perform, record.

A front end is a `CallHost`. An asynchronous one awaits `run_calls`; one that blocks passes it to `run_blocking`.
"""

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.settings.settings import SettingsError
from chatterm.tools.policy import Answer, Policy
from chatterm.tools.session import failed, refused, stopped
from chatterm.tools.tool import ToolError, ToolPlan

T = TypeVar("T")


class CallHost(Protocol):
    """A front end that shows calls, asks about them and runs them. Calls are known by their index."""

    def is_stopped(self) -> bool:
        """Return whether the person has stopped: the calls that are left do not run."""

    async def plan(self, index: int, call: ToolCall) -> ToolPlan:
        """Plan a call. Raises ToolError."""

    async def ask(self, index: int, call: ToolCall, plan: ToolPlan, why: str) -> Answer | ToolResult:
        """Return the person's answer, or the result of a call about which nobody was asked."""

    async def warn(self, text: str) -> None:
        """Tell the person that a rule could not be saved."""

    async def perform(self, index: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        """Run a call that is allowed."""

    async def record(self, index: int, result: ToolResult) -> None:
        """Show the result of a call."""


async def run_calls(policy: Policy, calls: Sequence[ToolCall], host: CallHost) -> list[ToolResult]:
    """Run the calls that may run, and return a result for each of `calls`."""
    results = []
    for index, call in enumerate(calls):
        result = stopped(call) if host.is_stopped() else await _run_call(policy, index, call, host)
        await host.record(index, result)
        results.append(result)
    return results


async def _run_call(policy: Policy, index: int, call: ToolCall, host: CallHost) -> ToolResult:
    try:
        plan = await host.plan(index, call)
    except ToolError as error:
        return failed(call, str(error))
    if host.is_stopped():
        return stopped(call)
    if not (why := policy.why_ask(plan)):
        policy.ran()
        return await host.perform(index, call, plan)
    answer = await host.ask(index, call, plan, why)
    if isinstance(answer, ToolResult):
        return answer
    if host.is_stopped():
        return stopped(call)
    try:
        policy.decided(plan, answer)
    except SettingsError as error:
        await host.warn(f"The rule holds for this session only: {error}")
    return refused(call) if answer == "no" else await host.perform(index, call, plan)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits, because the host's methods block instead."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("A host whose methods block has waited for an event loop.")
