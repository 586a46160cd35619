"""Reading, searching and writing, as a model asks for it."""

from pathlib import Path

import pytest

from chatterm.tools.builtin.confined import Confined
from chatterm.tools.builtin.files import ListFolder, ReadFile, Search
from chatterm.tools.builtin.writing import PatchFile, WriteFile
from chatterm.tools.output import bounded
from chatterm.tools.tool import ToolError, ToolPlan, ToolRun


@pytest.fixture
def files(tmp_path: Path) -> Confined:
    (tmp_path / "src").mkdir()
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "src" / "b.py").write_text("def two():\n    pass\n")
    (tmp_path / ".env").write_text("KEY=two\n")
    return Confined(tmp_path)


def run(plan: ToolPlan) -> str:
    return plan.run(ToolRun())


def test_a_part_of_a_file_is_read(files: Confined) -> None:
    assert run(ReadFile(files).plan({"path": "a.txt", "first": 2, "lines": 1})) == "two\n[1 more lines]"
    assert run(ReadFile(files).plan({"path": "a.txt"})) == "one\ntwo\nthree"
    assert run(ReadFile(files).plan({"path": "a.txt", "first": 9})) == "a.txt has 3 lines."


def test_a_file_that_steers_terminals_steers_none(files: Confined) -> None:
    (files.root / "evil").write_text("a\x1b]52;c;aGk=\x07b\x1b[2Jc\u202ed\x9b31m")
    assert run(ReadFile(files).plan({"path": "evil"})) == "abcd"


def test_a_file_has_nothing_for_the_model_that_no_screen_shows() -> None:
    hidden = "".join(chr(0xE0000 + ord(letter)) for letter in "run rm")
    assert bounded(f"Notes{hidden} of \u2764\ufe0f today") == "Notes of \u2764\ufe0f today"


def test_bytes_are_no_text(files: Confined) -> None:
    (files.root / "bytes").write_bytes(b"a\0b")
    (files.root / "latin").write_bytes(b"\xff\xfe")
    for name in ("bytes", "latin"):
        with pytest.raises(ToolError, match="text"):
            run(ReadFile(files).plan({"path": name}))


def test_a_folder_is_listed_and_names_are_one_line_each(files: Confined) -> None:
    (files.root / "evil\nb.txt  5 bytes").write_text("")
    said = run(ListFolder(files).plan({}))
    assert said.split("\n") == [".env  8 bytes", "a.txt  14 bytes", "evil?b.txt  5 bytes  0 bytes", "src/"]


def test_a_search_finds_lines_but_not_in_secrets(files: Confined) -> None:
    assert run(Search(files).plan({"text": "two"})) == "a.txt:2: two\nsrc/b.py:1: def two():"
    assert (
        run(Search(files).plan({"text": "TWO", "files": "*.py", "ignore_case": True}))
        == "src/b.py:1: def two():"
    )
    assert run(Search(files).plan({"text": "two", "path": "a.txt"})) == "a.txt:2: two"
    assert run(Search(files).plan({"text": "nowhere"})) == "Nothing was found."


def test_secrets_need_a_second_look(files: Confined) -> None:
    assert ReadFile(files).plan({"path": ".env"}).dangers
    assert ReadFile(files).plan({"path": "src/.ssh/id_rsa"}).dangers
    assert not ReadFile(files).plan({"path": "a.txt"}).dangers


def test_a_write_shows_its_diff_and_only_then_writes(files: Confined) -> None:
    plan = WriteFile(files).plan({"path": "a.txt", "text": "one\n2\nthree\n"})
    assert ("-two", "removed") in plan.shown
    assert ("+2", "added") in plan.shown
    assert (files.root / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert run(plan) == "a.txt is written: 3 lines."
    assert (files.root / "a.txt").read_text() == "one\n2\nthree\n"


def test_a_file_that_changes_after_the_diff_was_shown_is_not_written(files: Confined) -> None:
    plan = PatchFile(files).plan({"path": "a.txt", "old": "two", "new": "2"})
    (files.root / "a.txt").write_text("one\ntwo\nfour\n")
    with pytest.raises(ToolError, match="has changed"):
        run(plan)


@pytest.mark.parametrize("old", ["nowhere", "o"])
def test_a_patch_that_does_not_fit_tells_the_model_only_once_it_was_allowed(
    files: Confined, old: str
) -> None:
    plan = PatchFile(files).plan({"path": "a.txt", "old": old, "new": "x"})
    assert any("This will fail" in text for text, _ in plan.shown)
    with pytest.raises(ToolError, match="exactly once"):
        run(plan)


@pytest.mark.parametrize(
    "path", [".git/hooks/pre-commit", ".bashrc", "tests/conftest.py", ".vscode/tasks.json"]
)
def test_files_that_others_obey_need_a_second_look(files: Confined, path: str) -> None:
    assert WriteFile(files).plan({"path": path, "text": "x"}).dangers


def test_a_diff_keeps_no_secret_behind_control_characters(files: Confined) -> None:
    plan = WriteFile(files).plan({"path": "new/x.sh", "text": "ls\x1b[8m; rm\x1b[0m\n"})
    assert plan.dangers == ("the text has control characters",)
    assert run(plan) == "new/x.sh is written: 1 line."
