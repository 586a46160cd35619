"""What a person has allowed for good: rules in a file of their own, which only /tools and an editor change."""

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
"""Effects whose subjects are compared letter by letter: `git log*` would also be `git log; anything`."""


@dataclass(frozen=True, slots=True)
class PermissionRule:
    """Calls of this tool about this subject need not be asked for."""

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
    """The file, beside the settings."""
    return config_path().parent / "tools.json"


def read_rules(path: Path) -> list[PermissionRule]:
    """The rules of a file; [] where there is none. Raises SettingsError for one that cannot be understood."""
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
    """Whether a rule can be made of this call: not of a dangerous one, nor of what a person cannot read."""
    return not plan.dangers and is_safe(plan.subject) and "*" not in plan.subject


def _only_stars(pattern: str) -> str:
    """`pattern` for fnmatch, of which only the stars mean anything."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
