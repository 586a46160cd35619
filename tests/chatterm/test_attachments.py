"""Files, folders, pages and PDFs in messages: each is text, or one line that says why not; nothing is read unasked."""

import io
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatterm.conversation import web_page
from chatterm.conversation.attachment_errors import AttachmentError, NeedsYesError, NoFileError
from chatterm.conversation.attachments import MessageWithFiles, attach, mentions, read_text, working_folder
from chatterm.conversation.folder import folder_files
from chatterm.conversation.gitignore import files_below, is_ignored, parse_rules
from chatterm.conversation.web_page import page_text, readable
from chatterm.widgets.path_completion import found_paths, path_token
from tests.chatterm.dripping import dripping
from tests.chatterm.driving import driven
from tests.chatterm.scripted import ScriptedBackend

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


HTML = (
    """<html><head><title>t</title><script>evil()</script></head><body><nav>menu</nav>
<main><h1>Rivers</h1><p>Water &amp; <b>sediment</b>.</p><ul><li>bed load</li></ul>"""
    + "<p>more</p>" * 60
    + """
</main><footer>foot</footer></body></html>"""
)


@pytest.fixture
def site() -> Iterator[str]:
    """A server on loopback: `/` is a page, the rest is trouble."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = 200, "text/html; charset=utf-8", HTML.encode()
            if self.path in ("/loop", "/astray"):
                status = 302
            elif self.path == "/long":
                body = b"x" * 300_000
            elif self.path == "/image":
                kind = "image/png"
            elif self.path == "/empty":
                body = b"<script>only()</script>"
            elif self.path == "/gone":
                status = 404
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status == 302:
                self.send_header("Location", "/loop" if self.path == "/loop" else "http://[x")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\n/src/made/\n!keep.log\n")
    src = tmp_path / "src"
    for name in ("made", "inner", "node_modules"):
        (src / name).mkdir(parents=True)
    for name in ("a.py", "inner/b.py", "x.log", "keep.log", "made/c.py", "node_modules/d.js", ".env"):
        (src / name).write_text(f"text of {name}\n")
    (src / "picture.bin").write_bytes(b"\0\1")
    (src / "inner" / ".gitignore").write_text("secret*\n")
    (src / "inner" / "secrets.txt").write_text("s")
    (src / "link.py").symlink_to(tmp_path / ".gitignore")
    return tmp_path


def test_a_folder_brings_its_text_files_but_for_what_is_ignored(project: Path) -> None:
    with pytest.raises(NeedsYesError) as asked:
        attach("read @src/ now", project, said_yes=False)
    said = str(asked.value)
    assert said.startswith("src/ has 3 files, ")
    assert ": a.py, keep.log, inner/b.py; 1 left out." in said
    attached = attach("read @src/, now", project)
    assert attached.message == "read src/, now"
    assert attached.blocks[0].count("text of") == 3
    assert "src/inner/b.py:\n```py" in attached.blocks[0]


def test_a_folder_has_a_budget_and_may_be_empty(tmp_path: Path) -> None:
    for number in range(250):
        (tmp_path / f"{number:03}.txt").write_text("x")
    found = folder_files(tmp_path, "t/")
    assert len(found.texts) == 200
    assert len(found.left_out) == 50
    assert len(list(files_below(tmp_path, 7))) == 7
    (tmp_path / "none").mkdir()
    with pytest.raises(AttachmentError, match="no text files"):
        folder_files(tmp_path / "none", "none/")


@pytest.mark.parametrize(
    ("rules", "path", "ignored"),
    [
        ("*.o", "a/b.o", True),
        ("/x", "a/x", False),
        ("a/**/z", "a/b/c/z", True),
        ("a/**/z", "a/z", True),
        ("doc/", "doc", False),
        ("[!a].c", "b.c", True),
        ("*\n!b", "b", False),
        (r"\!x", "!x", True),
        ("# x", "# x", False),
    ],
)
def test_rules_of_gitignore(rules: str, path: str, ignored: bool) -> None:
    assert is_ignored(tuple(path.split("/")), False, parse_rules(rules, ())) == ignored


@given(st.text("a*?[]!/\\ #-\n", max_size=60), st.text("ab/", min_size=1, max_size=60))
def test_no_gitignore_is_too_hard(rules: str, path: str) -> None:
    assert is_ignored(tuple(path.split("/")), True, parse_rules(rules, ())) in (True, False)


def test_a_page_of_this_machine_needs_a_yes_and_is_read_as_text(site: str, tmp_path: Path) -> None:
    with pytest.raises(NeedsYesError, match="this machine or its network"):
        attach(f"see @{site}/", tmp_path, said_yes=False)
    attached = attach(f"see @{site}/.", tmp_path)
    assert attached.message == f"see {site}/."
    assert "# Rivers\n" in attached.blocks[0]
    assert "Water & sediment." in attached.blocks[0]
    assert "- bed load" in attached.blocks[0]
    assert not any(word in attached.blocks[0] for word in ("menu", "evil", "foot"))
    assert attach(f"see @{site}/", tmp_path, fetches=False).blocks == ()


def test_neither_pages_nor_resources_are_fetched_unless_asked_for(tmp_path: Path) -> None:
    class Servers:
        def server_names(self) -> list[str]:
            return ["here"]

        def resource(self, server: str, written: str) -> str:
            return f"the text of {written}"

    servers: Any = Servers()
    assert "the text of note" in attach("see @here:note", tmp_path, servers=servers).blocks[0]
    assert attach("see @here:note", tmp_path, servers=servers, fetches=False).blocks == ()


def test_what_is_wrong_with_a_page_is_one_line(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "LARGEST", 200_000)
    for path, said in {
        "/loop": "redirects more than",
        "/astray": "redirects to something that is not an address",
        "/long": "cannot be attached",
        "/image": "image/png",
        "/empty": "no text",
        "/gone": "answered 404",
    }.items():
        with pytest.raises(AttachmentError, match=said) as caught:
            page_text(site + path, may_be_private=True)
        assert "\n" not in str(caught.value)
    for address in ("http://", "http://user:pass@example.com/", "http://[::1", "http://h:99999999/"):
        with pytest.raises(AttachmentError, match="cannot be attached"):
            page_text(address)


def test_a_redirect_to_this_machine_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([["93.184.216.34"], ["127.0.0.1"]])
    monkeypatch.setattr(web_page, "_resolved", lambda parts, shown: next(told))
    real = web_page._asked
    monkeypatch.setattr(web_page, "_asked", lambda parts, ip, deadline: real(parts, "127.0.0.1", deadline))
    with pytest.raises(AttachmentError, match=r"redirects to 127\.0\.0\.1"):
        page_text(site + "/loop", may_be_private=True)


@pytest.mark.parametrize(
    "begins", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\nbegun"], ids=["head", "body"]
)
def test_a_server_that_never_ends_is_left(begins: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_page, "_SECONDS", 0.2)
    with dripping(begins) as address, pytest.raises(AttachmentError, match="it takes too long"):
        page_text(address, may_be_private=True)


@given(st.text("<>/abhdivmscript!-&;\"' ", max_size=80))
def test_any_page_can_be_read(page: str) -> None:
    assert "<script" not in readable(page).lower() or "&lt;" in page


def a_pdf(text: str) -> bytes:
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = io.BytesIO(), []
    out.write(b"%PDF-1.4\n")
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    start = out.tell()
    out.write(b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start)
    return out.getvalue()


def test_a_pdf_is_read_as_text(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "paper.pdf").write_bytes(a_pdf("Rivers move"))
    assert "Rivers move" in attach("see @paper.pdf", tmp_path).blocks[0]
    (tmp_path / "empty.pdf").write_bytes(a_pdf(""))
    (tmp_path / "torn.pdf").write_bytes(a_pdf("x")[:40])
    for name, said in {"empty.pdf": "has no text", "torn.pdf": "cannot be read as a PDF"}.items():
        with pytest.raises(AttachmentError, match=said):
            attach(f"see @{name}", tmp_path)


def test_without_pypdf_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    (tmp_path / "paper.pdf").write_bytes(a_pdf("x"))
    with pytest.raises(AttachmentError, match=r"pip install 'chatterm\[pdf\]'"):
        attach("see @paper.pdf", tmp_path)


def test_a_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.PNG").write_bytes(b"\x89PNG")
    with pytest.raises(AttachmentError, match="is a picture"):
        attach("see @photo.PNG", tmp_path)


async def test_a_folder_is_shown_before_it_is_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        driver.composer.put("read @src/ ")
        await driver.pilot.press("enter")
        await driver.shows("Press Enter again to attach")
        assert not [name for name, _ in backend.calls if name == "send"]
        await driver.until(lambda: not driver.composer.read_only)
        await driver.pilot.pause(0.6)
        await driver.pilot.press("enter")
        await driver.until(lambda: [name for name, _ in backend.calls if name == "send"])
        assert "text of a.py" in str(next(text for name, text in backend.calls if name == "send"))
