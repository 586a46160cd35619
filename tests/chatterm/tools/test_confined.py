"""Files below one folder, and nowhere else: whatever a path looks like, and whoever moves things meanwhile."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chatterm.tools.builtin.confined import MOST_BYTES, Confined
from chatterm.tools.tool import ToolError
from tests.fresh import examples

SECRET = "what nobody may see"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text(SECRET)
    (tmp_path / "outside" / "only-there.txt").write_text(SECRET)
    root = tmp_path / "work"
    (root / "src").mkdir(parents=True)
    (root / "a.txt").write_text("one\ntwo\n")
    (root / "src" / "b.txt").write_text("three\n")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "file-link").symlink_to(tmp_path / "outside" / "secret.txt")
    (root / "src" / "inner-link").symlink_to("../a.txt")
    return root


PIECES = st.sampled_from(
    [
        "..",
        ".",
        "",
        "src",
        "link",
        "file-link",
        "inner-link",
        "secret.txt",
        "outside",
        "a.txt",
        "~",
        "\0",
        "\\",
        "%2e%2e",
        "․․",
    ]
)
PATHS = st.lists(PIECES, max_size=6).map("/".join)


@examples(300, HealthCheck.function_scoped_fixture)
@given(path=PATHS, absolute=st.booleans())
def test_no_path_leads_outside(tree: Path, path: str, absolute: bool) -> None:
    files = Confined(tree)
    asked = f"{tree}/{path}" if absolute else path
    for read in (files.read_text, files.list, lambda p: list(files.walk(p))):
        try:
            found = str(read(asked))
        except ToolError as error:
            found = str(error)
        assert SECRET not in found
        assert "only-there" not in found, "the names of a folder outside were listed"
    before = names(tree.parent / "outside")
    with suppress(ToolError):
        files.write(asked, b"x", None)
    assert (tree.parent / "outside" / "secret.txt").read_text() == SECRET
    assert names(tree.parent / "outside") == before
    assert names(tree.parent) == ["outside", "work"]


@examples(200, HealthCheck.function_scoped_fixture)
@given(path=st.text(max_size=40))
def test_any_text_as_a_path_is_an_answer_or_one_line(tree: Path, path: str) -> None:
    said = ""
    try:
        Confined(tree).read_text(path)
    except ToolError as error:
        said = str(error)
    assert "\n" not in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret.txt",
        "/etc/passwd",
        "~/x",
        "src/../../outside/secret.txt",
        "a\x1b]0;x\x07.txt",
        "a\nb",
    ],
)
def test_what_is_outside_is_refused_before_anything_is_touched(tree: Path, path: str) -> None:
    with pytest.raises(ToolError):
        Confined(tree / "gone").parts(path)


@pytest.mark.parametrize("path", ["file-link", "link/secret.txt", "src/inner-link"])
def test_links_are_not_followed_and_that_is_said(tree: Path, path: str) -> None:
    with pytest.raises(ToolError, match="symbolic link"):
        Confined(tree).read(path)


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(tree: Path) -> None:
    files, done = Confined(tree), threading.Event()
    (tree / "src" / "secret.txt").write_text("mine")

    def swap() -> None:
        while not done.is_set():
            (tree / "src").rename(tree / "kept")
            (tree / "src").symlink_to(tree.parent / "outside")
            (tree / "src").unlink()
            (tree / "kept").rename(tree / "src")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        said = set()
        for _ in range(2_000):
            try:
                said.add(files.read_text("src/secret.txt"))
            except ToolError:
                said.add("refused")
    finally:
        done.set()
        thread.join()
    assert said <= {"mine", "refused"}


def test_a_write_into_a_folder_that_becomes_a_link_meanwhile_stays_inside(tree: Path) -> None:
    files, done = Confined(tree), threading.Event()

    def swap() -> None:
        while not done.is_set():
            with suppress(OSError):  # a write may have made the folder anew
                (tree / "src").rename(tree / f"kept-{len(names(tree))}")
                (tree / "src").symlink_to(tree.parent / "outside")
            with suppress(OSError):
                (tree / "src").unlink()

    thread = threading.Thread(target=swap)
    thread.start()
    before = names(tree.parent / "outside")
    written = 0
    try:
        for number in range(1_000):
            with suppress(ToolError):
                files.write(f"src/new-{number}.txt", b"x", None)
                written += 1
    finally:
        done.set()
        thread.join()
    assert written
    assert names(tree.parent / "outside") == before
    assert (tree.parent / "outside" / "secret.txt").read_text() == SECRET


def test_a_pipe_a_folder_and_a_device_are_no_files(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    files = Confined(tree)
    with pytest.raises(ToolError, match="not a regular file"):
        files.read("pipe")
    with pytest.raises(ToolError, match="is a folder"):
        files.read("src")


def test_a_large_file_is_refused_whatever_size_it_tells(tree: Path) -> None:
    with (tree / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ToolError, match="larger than"):
        Confined(tree).read("large")


def test_a_write_is_refused_where_the_file_is_not_what_was_shown(tree: Path) -> None:
    files = Confined(tree)
    with pytest.raises(ToolError, match="has changed"):
        files.write("a.txt", b"new", b"something else")
    with pytest.raises(ToolError, match="has changed"):
        files.write("a.txt", b"new", None)
    with pytest.raises(ToolError, match="no longer exists"):
        files.write("never.txt", b"new", b"old")
    assert (tree / "a.txt").read_text() == "one\ntwo\n"
    assert names(tree) == ["a.txt", "file-link", "link", "src"], "nothing is left behind"


def test_a_write_makes_folders_keeps_the_mode_and_leaves_other_names_of_the_file_alone(tree: Path) -> None:
    files = Confined(tree)
    files.write("new/deep/c.txt", b"hello", None)
    assert (tree / "new/deep/c.txt").read_bytes() == b"hello"
    (tree / "a.txt").chmod(0o750)
    os.link(tree / "a.txt", tree.parent / "outside" / "twin")
    files.write("a.txt", b"new", b"one\ntwo\n")
    assert (tree / "a.txt").stat().st_mode & 0o777 == 0o750
    assert (tree.parent / "outside" / "twin").read_text() == "one\ntwo\n"


def test_a_path_has_one_name(tree: Path) -> None:
    files = Confined(tree)
    assert files.name(f"{tree}//src/./b.txt") == files.name("src/b.txt") == "src/b.txt"
    assert files.name(".") == files.name(str(tree)) == "."
