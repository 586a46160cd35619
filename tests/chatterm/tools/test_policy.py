"""Who decides: what a person has allowed, and nothing else."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.settings.settings import SettingsError
from chatterm.tools.policy import MOST_UNASKED, Policy, choice_text, choices, session_rule
from chatterm.tools.rules import PermissionRule, read_rules
from chatterm.tools.tool import Effect, ToolPlan

EFFECTS = st.sampled_from(["read", "write", "run", "fetch", "server"])


def plan(subject: str, effect: Effect = "run", tool: str = "t", dangers: tuple[str, ...] = ()) -> ToolPlan:
    return ToolPlan(tool, effect, subject, ((subject, "text"),), lambda running: "", dangers)


@given(EFFECTS, st.text(max_size=20), st.text(max_size=20))
def test_nothing_is_allowed_that_nobody_allowed(effect: Effect, subject: str, other: str) -> None:
    assert Policy().why_ask(plan(subject, effect))
    policy = Policy()
    policy.decided(plan(subject, "run"), "always")
    assert (policy.why_ask(plan(other, "run")) == "") <= (other == subject)
    policy.decided(plan(subject, effect), "no")
    policy.decided(plan(other, effect, "u"), "once")
    assert policy.why_ask(plan(other, effect, "u"))


@given(EFFECTS, st.sampled_from(["session", "always"]))
def test_a_dangerous_call_is_always_asked_for(effect: Effect, answer: str) -> None:
    policy = Policy()
    policy.decided(plan("https://x/y", effect), answer)  # type: ignore[arg-type]
    assert not policy.why_ask(plan("https://x/y", effect))
    assert policy.why_ask(plan("https://x/y", effect, dangers=("deletes",)))
    assert choices(plan("https://x/y", effect, dangers=("deletes",))) == ("no", "once")
    policy.decided(plan("y", effect, dangers=("deletes",)), answer)  # type: ignore[arg-type]
    assert PermissionRule("t", "y") not in [*policy.session, *policy.always]


def test_a_star_stands_for_nothing_in_commands() -> None:
    policy = Policy(always=[PermissionRule("t", "git log*"), PermissionRule("t", "*")])
    assert policy.why_ask(plan("git log; rm x"))
    assert not policy.why_ask(plan("src/a", "read"))
    assert not Policy(always=[PermissionRule("t", "src/*")]).why_ask(plan("src/a.py", "read"))
    assert Policy(always=[PermissionRule("t", "src/[ab]?")]).why_ask(plan("src/a1", "read"))


def test_so_many_calls_and_a_key_is_needed() -> None:
    policy = Policy(session=[PermissionRule("t", "ls")])
    for _ in range(MOST_UNASKED):
        assert not policy.why_ask(plan("ls"))
        policy.ran()
    assert "without a key press" in policy.why_ask(plan("ls"))
    policy.decided(plan("ls"), "once")
    assert not policy.why_ask(plan("ls"))


def test_rules_lie_in_a_file_and_can_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "config" / "tools.json"
    policy = Policy.of(path)
    policy.decided(plan("ls"), "always")
    Policy.of(path).decided(plan("pwd"), "always")
    policy.decided(plan("date"), "always")
    assert [rule.pattern for rule in read_rules(path)] == ["ls", "pwd", "date"]
    policy.remove(PermissionRule("t", "pwd"))
    assert [rule.pattern for rule in read_rules(path)] == ["ls", "date"]
    assert not Policy.of(path).why_ask(plan("date"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"always": [1]}', '{"always": [{"tool": "t"}]}', "\xff", "[" * 10_000]
)
def test_a_file_that_is_no_list_of_rules_allows_nothing_and_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match="fix it, or delete it"):
        Policy.of(path)


def test_what_a_session_allows_is_said() -> None:
    page = plan("https://example.org/a/b?c", "fetch")
    assert session_rule(page).pattern == "https://example.org/*"
    assert "https://example.org" in choice_text(page, "session")
    assert not session_rule(page).covers(plan("https://example.org.evil.net/", "fetch"))
    assert session_rule(plan("ls")) == PermissionRule("t", "ls")
    assert session_rule(plan("a.txt", "write")) == PermissionRule("t", "a.txt")


def test_a_subject_with_a_star_makes_no_rule() -> None:
    assert choices(plan("src/*", "read")) == ("no", "once")
    assert choices(plan("a\x1b[0m")) == ("no", "once")
    assert json.dumps(choices(plan("src/a", "read"))) == '["no", "once", "session", "always"]'
