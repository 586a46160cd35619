"""Which calls run by earlier approval, and which ones a person is asked about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chatterm.tools.rules import PermissionRule, can_be_kept, read_rules, write_rules
from chatterm.tools.tool import Effect, ToolPlan

Answer = Literal["no", "once", "session", "always"]

MOST_UNASKED = 10
"""The most calls that run in a row without a key press, whatever is allowed."""


@dataclass(slots=True)
class Policy:
    """The calls that may run in a session without approval. Its methods do not ask anyone."""

    path: Path | None = None
    """The file of the rules; None: they are not saved."""
    session: list[PermissionRule] = field(default_factory=list)
    always: list[PermissionRule] = field(default_factory=list)
    unasked: int = 0
    """Calls that ran since the latest key press."""

    @classmethod
    def of(cls, path: Path) -> "Policy":
        """Return a policy with the rules of this file. Raises SettingsError."""
        return cls(path, always=read_rules(path))

    def why_ask(self, plan: ToolPlan) -> str:
        """Return why a person must be asked about this call; "" if it was allowed before."""
        if plan.dangers:
            return "It needs a closer look."
        if not any(rule.covers(plan) for rule in (*self.session, *self.always)):
            return "You have not allowed this yet."
        if self.unasked >= MOST_UNASKED:
            return f"{MOST_UNASKED} calls ran without a key press."
        return ""

    def ran(self) -> None:
        """Record that a call ran without asking."""
        self.unasked += 1

    def decided(self, plan: ToolPlan, answer: Answer) -> None:
        """Record a person's decision. Raises SettingsError if it cannot be saved; it still applies here."""
        self.unasked = 0
        if answer == "session" and can_be_kept(plan):
            self.session.append(session_rule(plan))
        elif answer == "always" and can_be_kept(plan):
            rule = PermissionRule(plan.tool, plan.subject)
            self.always.append(rule)
            if self.path is not None:
                # Another terminal may have added rules since.
                write_rules(self.path, [*read_rules(self.path), rule])

    def remove(self, rule: PermissionRule) -> None:
        """Remove a rule, so that its calls need approval again. Raises SettingsError."""
        self.session = [one for one in self.session if one != rule]
        self.always = [one for one in self.always if one != rule]
        if self.path is not None and rule in (kept := read_rules(self.path)):
            write_rules(self.path, [one for one in kept if one != rule])


def choices(plan: ToolPlan) -> Sequence[Answer]:
    """Return the answers a person can give; the first one does nothing."""
    if can_be_kept(plan):
        return ("no", "once", "session", "always")
    return ("no", "once")


def choice_text(plan: ToolPlan, answer: Answer) -> str:
    """Return an answer as a person reads it."""
    match answer:
        case "no":
            return "No, do not run it"
        case "once":
            return "Yes, this once"
        case "session":
            return f"Yes, and for this session: {_scope(plan)}"
        case "always":
            return f"Yes, always: {plan.tool} with exactly this {_SUBJECTS[plan.effect]}"


def session_rule(plan: ToolPlan) -> PermissionRule:
    """Return the rule that "for this session" adds."""
    if plan.effect == "read" or plan.effect == "server":
        return PermissionRule(plan.tool, "*")
    if plan.effect == "fetch":
        host = "/".join(plan.subject.split("/")[:3])
        return PermissionRule(plan.tool, f"{host}/*")
    return PermissionRule(plan.tool, plan.subject)


def _scope(plan: ToolPlan) -> str:
    rule = session_rule(plan)
    match plan.effect:
        case "read":
            return f"{plan.tool} anywhere in this folder"
        case "server":
            return f"{plan.tool} with any arguments"
        case "fetch":
            return f"{plan.tool} from {rule.pattern[:-2]}"
        case "write":
            return f"{plan.tool} to this file"
        case "run":
            return "exactly this command"


_SUBJECTS: dict[Effect, str] = {
    "read": "path",
    "write": "file",
    "run": "command",
    "fetch": "address",
    "server": "text",
}
