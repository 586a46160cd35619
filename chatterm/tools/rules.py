"""Permanent permissions: rules in a file of their own, which only /tools and an editor change."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from chatterm.settings.file import write
from chatterm.settings.paths import config_path
from chatterm.settings.settings import SettingsError
from chatterm.terminal.sanitize import is_safe
from chatterm.tools.tool import Effect, ToolPlan

_MOST = 1_000
_EXACT: tuple[Effect, ...] = ("run",)
"""Effects whose subjects are compared exactly: `git log*` would also match `git log; anything`."""


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """Permission for calls of one tool on matching subjects."""

    tool: str
    pattern: str
    """The subject itself; `*` stands for any text, but not in commands."""

    def covers(self, plan: ToolPlan) -> bool:
        if plan.tool != self.tool:
            return False
        if plan.effect in _EXACT:
            return plan.subject == self.pattern
        return plan.subject == self.pattern or fnmatchcase(plan.subject, _only_stars(self.pattern))


def rules_path() -> Path:
    """Return the path of the rules, beside the settings."""
    return config_path().parent / "tools.json"


def read_rules(path: Path) -> list[PermissionRule]:
    """Return the rules of a file, [] if it does not exist. Raises SettingsError for an invalid one."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path} cannot be read ({error}); fix it, or delete it.") from None
    found = data.get("always") if isinstance(data, dict) else None
    if not isinstance(found, list) or len(found) > _MOST:
        raise SettingsError(f'{path} has no list "always"; fix it, or delete it.')
    rules = []
    for item in found:
        texts = (item.get("tool"), item.get("pattern")) if isinstance(item, dict) else (None, None)
        if not all(isinstance(text, str) and text for text in texts):
            raise SettingsError(f'{path}: every rule needs a "tool" and a "pattern"; fix it, or delete it.')
        rules.append(PermissionRule(*texts))  # type: ignore[arg-type]
    return rules


def write_rules(path: Path, rules: Iterable[PermissionRule]) -> None:
    """Replace the file. Raises SettingsError."""
    made = [{"tool": rule.tool, "pattern": rule.pattern} for rule in dict.fromkeys(rules)]
    write(path, json.dumps({"always": made}, indent=1) + "\n")


def can_be_kept(plan: ToolPlan) -> bool:
    """Return whether this call can become a rule: it is not dangerous and its subject is readable."""
    return not plan.dangers and is_safe(plan.subject) and "*" not in plan.subject


def _only_stars(pattern: str) -> str:
    """Escape `pattern` for fnmatch so that only stars are special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
