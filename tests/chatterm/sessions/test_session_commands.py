"""`chatterm sessions` and `chatterm run --continue`, from the command line."""

import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from chatterm.backends.backend import ChatOptions
from chatterm.cli.main import call
from chatterm.sessions.records import SessionInfo
from chatterm.sessions.store import SessionStore
from chatterm.terminal.sanitize import cleaned
from tests.chatterm.sessions.saved import conversation


class Shell:
    """Calls the program and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        self._capsys.readouterr()
        code = call(arguments)
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return code


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("CHATTERM_DATA", str(path.parent))
    return Shell(capsys)


@pytest.fixture
def ids(path: Path) -> list[str]:
    """Two sessions, oldest first."""
    store = SessionStore.open(path)
    made = [conversation(store, *texts)[0] for texts in (("red apples", "more"), ("green pears \x1b[31m",))]
    assert store.close()
    return made


def titles(path: Path) -> list[str]:
    store = SessionStore.open(path)
    found = [info.title for info in store.find()]
    store.close()
    return found


def test_list_and_search(shell: Shell, ids: list[str]) -> None:
    for command in (["sessions"], ["sessions", "list"]):
        assert shell(*command) == 0
        rows = [line.split("\t") for line in shell.out.splitlines()]
        assert [(row[0], *row[2:]) for row in rows] == [
            (ids[1], "1", "smollm2", "green pears"),
            (ids[0], "2", "smollm2", "red apples"),
        ]
    assert shell("sessions", "search", "more", "said") == 0
    assert shell.out.startswith(ids[0])
    assert len(shell.out.splitlines()) == 1
    assert shell("sessions", "search", "nothing") == 1
    assert shell.err == "No session contains all of these words.\n"


def test_on_a_terminal_it_is_a_table(shell: Shell, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert shell("sessions") == 0
    assert "Last used" in shell.out
    assert "just now" in shell.out
    assert all(len(cleaned(line)) <= 80 for line in shell.out.splitlines())


def test_nothing_there_yet(shell: Shell) -> None:
    assert shell("sessions") == 0
    assert (shell.out, shell.err) == ("", "There are no sessions yet; chatterm run starts one.\n")
    assert shell("sessions", "show", "x") == 1
    assert shell.err.startswith("chatterm: Unknown session 'x'")


def test_show_and_rename(shell: Shell, ids: list[str], path: Path) -> None:
    assert shell("sessions", "show", "pears") == 0
    assert "You said: green pears ␛[31m" in shell.out
    assert shell("sessions", "rename", "pears", " Fruit\x1b[1m\n") == 0
    assert titles(path) == ["Fruit", "red apples"]
    assert shell("sessions", "rename", "Fruit", " ") == 1
    assert "title is empty" in shell.err


def test_delete(shell: Shell, ids: list[str], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert shell("sessions", "delete", "pears") == 2
    assert "add --yes" in shell.err
    for answer, left in (("n\n", 2), ("", 2), ("y\n", 1)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
        assert shell("sessions", "delete", "pears") == (0 if left == 1 else 1)
        assert "green pears (1 message)" in shell.err
        assert len(titles(path)) == left
    assert shell("sessions", "delete", "--yes", ids[0], "red") == 0
    assert shell.out == "Deleted: red apples\n"
    assert titles(path) == []


def test_export_and_import(shell: Shell, ids: list[str], tmp_path: Path, path: Path) -> None:
    assert shell("sessions", "export", "apples") == 0
    assert shell.out.startswith("# red apples\n")
    file = tmp_path / "apples.json"
    assert shell("sessions", "export", "apples", "-o", str(file)) == 0
    assert shell.out == ""
    assert shell("sessions", "export", "apples", "-o", str(file)) == 1
    assert "already exists" in shell.err
    assert shell("sessions", "export", "apples", "-o", str(file), "--force") == 0
    assert shell("sessions", "export", "apples", "-o", str(tmp_path / "a.txt")) == 1
    assert shell("sessions", "export", "apples", "--format", "html") == 0
    assert shell.out.startswith("<!doctype html>")
    assert shell("sessions", "import", str(file)) == 0
    id, title = shell.out.strip().split("\t")
    assert title == "red apples"
    store = SessionStore.open(path)
    assert store.load(id)[1].exchanges == store.load(ids[0])[1].exchanges
    store.close()
    file.write_text("[]")
    assert shell("sessions", "import", str(file)) == 1
    assert len(titles(path)) == 3


def test_a_database_that_cannot_be_used(shell: Shell, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    path.parent.mkdir()
    path.write_bytes(b"broken" * 1000)
    for command in (
        ["sessions"],
        ["sessions", "search", "x"],
        ["sessions", "show", "x"],
        ["sessions", "delete", "-y", "x"],
        ["run", "--continue", "-p", "hi"],
    ):
        assert shell(*command) == 1, command
        assert shell.err.startswith("chatterm: The session database is damaged"), command
        assert len(shell.err.splitlines()) == 1
        assert "in memory" not in shell.err


def test_what_cannot_be_written_is_said(
    shell: Shell, ids: list[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatterm.sessions.schema.LOCK_WAIT", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert shell("sessions") == 0
    assert len(shell.out.splitlines()) == 2
    assert shell("sessions", "delete", "-y", "pears") == 1
    assert "locked" in shell.err
    assert "Deleted" not in shell.out
    other.execute("ROLLBACK")
    other.close()


class Backend:
    """Remembers how it was made."""

    made: "list[tuple[str, ChatOptions]]"

    def __init__(self, model: str, options: ChatOptions) -> None:
        self.made.append((model, options))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, path: Path) -> dict[str, Any]:
    """What `chatterm run -p` hands on."""
    seen: dict[str, Any] = {"made": []}
    monkeypatch.setattr(Backend, "made", seen["made"], raising=False)
    monkeypatch.setattr("chatterm.backends.local.LocalBackend", Backend)
    monkeypatch.setattr("sys.stdin", None)

    def answer(backend: Any, prompts: Any, *, session: str | None = None, **options: Any) -> None:
        seen.update(prompts=prompts, session=session)

    monkeypatch.setattr("chatterm.cli.oneshot.answer", answer)
    store = SessionStore.open(path)
    remembered = SessionInfo(
        model="qwen3:0.6b", system="Terse", think="off", think_cache="mask", sampling={"top_k": 5, "seed": 1}
    )
    id = store.new(remembered)
    _, tree, _ = store.load(id)
    store.save(id, tree.add(None, "how it began", "qwen3:0.6b"))
    assert store.close()
    seen["id"] = id
    return seen


@pytest.mark.parametrize("option", [["--continue"], ["-c"], ["--session", "how it"]])
def test_a_session_goes_on_with_what_it_remembers(
    shell: Shell, run: dict[str, Any], option: list[str]
) -> None:
    assert shell("run", *option, "-p", "more") == 0, shell.err
    model, options = run["made"][0]
    assert (model, options.system, options.think, options.think_cache) == (
        "qwen3:0.6b",
        "Terse",
        "off",
        "mask",
    )
    assert options.sampling == {"top_k": 5, "seed": 1}
    assert (run["session"], run["prompts"]) == (run["id"], ["more"])


def test_what_is_chosen_now_counts_more(shell: Shell, run: dict[str, Any]) -> None:
    chosen = ["--think", "auto", "--think-cache", "exact", "--system", "Long", "--seed", "2"]
    assert shell("run", "smollm2", "--continue", *chosen, "-p", "more") == 0, shell.err
    model, options = run["made"][0]
    assert (model, options.system, options.think, options.think_cache) == ("smollm2", "Long", "auto", "exact")
    assert options.sampling == {"top_k": 5, "seed": 2}


def test_which_session_must_be_clear(shell: Shell, run: dict[str, Any]) -> None:
    assert shell("run", "-p", "x", "--session", "nothing") == 1
    assert "Unknown session 'nothing'" in shell.err
    assert shell("run", "-p", "x", "--session", run["id"], "--continue") == 2
    assert "cannot be combined" in shell.err
    assert run["made"] == []


def test_without_the_options_no_session_is_touched(shell: Shell, run: dict[str, Any]) -> None:
    assert shell("run", "-p", "x") == 0, shell.err
    assert run["session"] is None


def test_there_is_nothing_to_continue(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert shell("run", "--continue", "-p", "x") == 1
    assert "no session to continue" in shell.err


def test_json_is_whole(shell: Shell, ids: list[str]) -> None:
    assert shell("sessions", "export", "apples", "--format", "json") == 0
    assert [exchange["user"] for exchange in json.loads(shell.out)["exchanges"]] == ["red apples", "more"]


def test_show_tells_what_else_there_is(shell: Shell, path: Path) -> None:
    store = SessionStore.open(path)
    session, tree = conversation(store, "one", "two")
    store.head(session, None)
    store.close()
    assert shell("sessions", "show", session) == 0
    assert "two" not in shell.out
    assert shell.err == f"2 messages are undone; `chatterm run --session {session}` and /redo restore them.\n"
    store = SessionStore.open(path)
    exchange = tree.add(1, "three", "m")
    exchange.finish_reason = "eos"
    store.save(session, exchange)
    store.head(session, exchange.id)
    store.close()
    assert shell("sessions", "show", session) == 0
    assert shell.err == "This is one of 2 branches; `chatterm sessions export --format json` exports all.\n"


def test_what_is_imported_keeps_its_dates(shell: Shell, path: Path, tmp_path: Path) -> None:
    """Also where the file says nothing of the session but when its messages were."""
    then = 1_600_000_000.0
    exchanges = [
        {"id": number, "parent": number - 1 or None, "user": "old", "text": "a", "created": then + number}
        for number in (1, 2)
    ]
    for name, session in (("told", {"created": then, "updated": then + 9}), ("silent", {})):
        told = {"format": "chatterm-session", "version": 1, "session": {"title": name, **session}}
        (tmp_path / name).write_text(json.dumps({**told, "head": 2, "exchanges": exchanges}))
        assert shell("sessions", "import", str(tmp_path / name)) == 0
    store = SessionStore.open(path)
    dates = {info.title: (info.created, info.updated) for info in store.find()}
    store.close()
    assert dates == {"told": (then, then + 9), "silent": (then + 1, then + 2)}
