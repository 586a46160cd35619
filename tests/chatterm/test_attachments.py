"""Files in messages, as functions: whatever somebody writes, it is text, a file or one line that says why not."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatterm.conversation.attachment_errors import AttachmentError, NoFileError
from chatterm.conversation.attachments import MessageWithFiles, attach, mentions, read_text, working_folder
from chatterm.widgets.path_completion import found_paths, path_token

WRITTEN = st.text(alphabet='@"/.~ab\n \\,é\t', max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a").write_text("text", encoding="utf-8")
    (folder / "b").mkdir()
    (folder / "b" / "a.b").write_text("é" * 3, encoding="utf-16")
    (folder / "b" / "Ab b").write_text("", encoding="utf-8")
    return folder


def attached_or_why_not(text: str, folder: Path) -> MessageWithFiles | str:
    try:
        return attach(text, folder)
    except AttachmentError as error:
        return str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WRITTEN)
def test_anything_may_be_written(folder: Path, text: str) -> None:
    attached = attached_or_why_not(text, folder)
    if isinstance(attached, str):
        assert "\n" not in attached
        return
    for start, end in attached.places:
        assert text[start] == "@"
        named = (folder / text[start + 1 : end].strip('"')).expanduser()
        assert named.is_file() or named.is_dir()
    if not attached.places:
        assert attached.message == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WRITTEN, st.integers(0, 40))
def test_completion_replaces_what_is_before_the_cursor(folder: Path, text: str, cursor: int) -> None:
    cursor = min(cursor, len(text))
    token = path_token(text, cursor)
    if token is not None:
        assert text[token.start : token.end].replace('"', "") == "@" + token.path
        assert token.end == cursor
        for found in found_paths(token.path, folder):
            assert token.path.rpartition("/")[2].lower() in found.path.lower()


@pytest.mark.parametrize(
    "text",
    [
        "me@notes.txt", "@nobody", "@property", "@pytest.fixture", '@app.route("/x.txt")', "@example.com", "@v1.2.3",
        "@types/node", "@user/repo", "@...", "@.", "@", "@ notes.txt", "(@missing.txt)",
    ],
)  # fmt: skip
def test_what_no_one_means_as_a_file_is_not_asked_about(folder: Path, text: str) -> None:
    assert attach(text, folder) == MessageWithFiles(text)


@pytest.mark.parametrize("text", ["@a", "@a,"])
def test_one_letter_is_a_name_where_there_is_such_a_file(folder: Path, text: str) -> None:
    attached = attach(text, folder)
    assert (attached.message, len(attached.blocks)) == (text[1:], 1)


@pytest.mark.parametrize(
    "text",
    [
        "@missing.txt", "@missing.txt.", "@MISSING.MD?", "@b", "@b,", "@b/missing", "@docs/missing.md",
        "@./x", "@../x", "@/x/y", "@~/no/such", '@"a b"', "and @missing.py too",
    ],
)  # fmt: skip
def test_what_looks_like_a_file_is_asked_about_once(folder: Path, text: str) -> None:
    with pytest.raises(
        NoFileError, match=r"^(There is no file .+\.|b is a folder; write @b/ to attach the files in it\.)$"
    ):
        attach(text, folder)
    assert attach(text, folder, as_text=True) == MessageWithFiles(text)


@pytest.mark.parametrize("text", ["@" + "x" * 5000 + "/y.txt", "@~nobody/x.txt", "@~nobody", '@"~nobody/x"'])
def test_names_that_no_disk_has(folder: Path, text: str) -> None:
    attached = attached_or_why_not(text, folder)
    said = attached if isinstance(attached, str) else attached.message
    assert said == text or said.startswith("There is no file")
    assert found_paths(text[1:], folder) == []


def test_what_is_mentioned() -> None:
    found = [m.path for m in mentions('@a (@b) x@c @"d e" @f, @ g @"h')]
    assert found == ["a", "d e", "f,"]


def test_utf16_is_text(folder: Path) -> None:
    assert read_text(folder / "b" / "a.b", "a.b") == "ééé"


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x", encoding="utf-8")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this account reads everything")
    with pytest.raises(AttachmentError, match="secret cannot be read: Permission denied"):
        read_text(path, "secret")


def test_own_names_come_first_and_what_is_hidden_stays_so(folder: Path) -> None:
    assert [found.path for found in found_paths("", folder)] == ["a", "b/"]
    assert [found.path for found in found_paths("b/B", folder)] == ["b/a.b", "b/Ab b"]
    assert [found.written for found in found_paths("b/A", folder)] == ["@b/a.b ", '@"b/Ab b" ']


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert working_folder() == Path("/")
