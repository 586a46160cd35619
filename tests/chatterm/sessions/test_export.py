"""Export and import: a whole tree goes out as JSON and comes in again; Markdown and HTML are one branch."""

import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Exchange
from chatterm.sessions.as_json import from_json, to_json
from chatterm.sessions.export import choose_format, exported, file_name, read_import, write_export
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import is_safe
from tests.fresh import examples

CODE = "Look:\n\n```c\nint x = 1 < 2;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"


@pytest.fixture
def info() -> SessionInfo:
    sampling = {"temperature": 0.5, "top_k": 4, "stop": ("A", "B"), "seed": None}
    return SessionInfo("x", "Less & <more>", "qwen3", "Be terse.", "on", "mask", sampling, 1000.5, 2000.5)


@pytest.fixture
def tree() -> Tree:
    """1 - 2 (an edit of it: 3, which is selected)."""
    return Tree(
        [
            Exchange(
                1,
                None,
                "Hi <b>",
                CODE,
                "hm\nhm",
                [5, 6, 7],
                (1, 2),
                [8],
                "eos",
                {"ttft_s": 0.5},
                "qwen3",
                3.0,
                1.5,
            ),
            Exchange(2, 1, "the other branch", "no", finish_reason="length"),
            Exchange(3, 1, "\x1b[31mred\u202e \x00 \x9b2J", "cut \x1b]0;x\x07", model="qwen3"),
        ],
        head=3,
    )


def ended(tree: Tree) -> list[Exchange]:
    """As they come out of a file: no answer of a file is one that this machine was just writing."""
    return [
        replace(exchange, finish_reason=exchange.finish_reason or "cancelled") for exchange in tree.exchanges
    ]


def test_json_holds_everything(info: SessionInfo, tree: Tree) -> None:
    text = to_json(info, tree)
    assert is_safe(text)
    again, branches = from_json(text)
    assert branches.exchanges == ended(tree)
    assert branches.head == 3
    info.id = ""
    assert again == info
    assert to_json(again, branches) == text.replace('"finish_reason": null', '"finish_reason": "cancelled"')


texts = st.text(st.characters(exclude_categories=[]), max_size=20)


@given(st.data())
@examples(40)
def test_any_tree_survives_json(data: st.DataObject) -> None:
    tree = Tree()
    for _ in range(data.draw(st.integers(0, 6))):
        parent = data.draw(st.sampled_from([None, *(exchange.id for exchange in tree.exchanges)]))
        exchange = tree.add(parent, data.draw(texts), "m")
        exchange.text, exchange.reasoning = data.draw(texts), data.draw(texts)
        exchange.token_ids = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=5))
        exchange.shown = (0, len(exchange.token_ids))
        exchange.finish_reason = data.draw(st.sampled_from([None, "eos", "cancelled"]))
    text = to_json(SessionInfo(), tree)
    assert is_safe(text)
    text.encode()
    _, again = from_json(text)
    assert again.exchanges == ended(tree)
    assert again.head == tree.head


def test_messages_as_chat_apis_know_them() -> None:
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    for data in (messages, {"messages": messages, "model": "x"}):
        info, tree = from_json(json.dumps(data))
        assert (info.system, info.title, tree.head) == ("Be terse.", "One?", 2)
        assert [(e.user, e.text, e.token_ids) for e in tree.exchanges] == [
            ("One?", "1", []),
            ("Two?", "", []),
        ]


def broken(change: Any) -> str:
    data = {
        "format": "chatterm-session",
        "version": 1,
        "session": {},
        "head": 1,
        "exchanges": [{"id": 1, "parent": None, "user": "hi"}, {"id": 2, "parent": 1, "user": "so"}],
    }
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "has format version 2; this chatterm reads version 1"),
        (lambda d: d.pop("version"), "does not give its format version"),
        (lambda d: d.update(version=None), "does not give its format version"),
        (lambda d: d.update(version="1"), "does not give its format version"),
        (lambda d: d.update(session=3), "session must be an object"),
        (lambda d: d.update(exchanges={}), "exchanges must be a list"),
        (lambda d: d.update(head=7), "head is 7"),
        (lambda d: d.update(head=[1]), "head is"),
        (lambda d: d["session"].update(think="\x1b[31mmaybe"), "think is .*one of auto, on, off"),
        (lambda d: d["session"].update(system=1), "system is 1"),
        (lambda d: d["session"].update(created=1e299), "created"),
        (lambda d: d["session"].update(created=float("nan")), "created"),
        (lambda d: d["session"].update(created=10**400), "created"),
        (lambda d: d["session"].update(sampling={"temperature": -1}), "sampling: temperature is -1"),
        (lambda d: d["session"].update(sampling={"temperature": "hot"}), "must be a number"),
        (lambda d: d["session"].update(sampling={"top_k": 1.5}), "top_k is 1.5"),
        (lambda d: d["session"].update(sampling={"stop": "x"}), "stop must be a list"),
        (lambda d: d["session"].update(sampling={"warmth": 1}), "an unknown setting"),
        (lambda d: d["exchanges"].append(1), "exchange 3 must be an object"),
        (lambda d: d["exchanges"][0].pop("user"), "exchange 1: user is missing; it must be text"),
        (lambda d: d["exchanges"][1].update(id=1), "Two exchanges have the id 1"),
        (lambda d: d["exchanges"][1].update(id=True), "id is true"),
        (lambda d: d["exchanges"][1].update(parent=2), "parent 2 is missing"),
        (lambda d: d["exchanges"][0].update(parent=2), "parent 2 is missing"),
        (lambda d: d["exchanges"][0].update(token_ids=[-1]), "list of token ids"),
        (lambda d: d["exchanges"][0].update(token_ids=[2**31]), "list of token ids"),
        (lambda d: d["exchanges"][0].update(token_ids=[1], shown=[0, 2]), "shown is"),
        (lambda d: d["exchanges"][0].update(shown=[0]), "shown is"),
        (lambda d: d["exchanges"][0].update(finish_reason="bored"), 'finish_reason is "bored"'),
        (lambda d: d["exchanges"][0].update(stats={"ttft_s": "fast"}), "stats is"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(change: Any, message: str) -> None:
    with pytest.raises(SessionError, match=message) as caught:
        from_json(broken(change))
    assert is_safe(str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[" * 100_000,
        "3",
        "{}",
        "[]",
        '[{"role": "assistant", "content": "x"}]',
        '[{"role": "tool", "content": "x"}]',
        '[{"role": "user"}]',
        '[{"role": "user", "content": [1]}]',
        "[1]",
        "9" * 10_000,
    ],
)
def test_what_is_no_session_is_refused(text: str) -> None:
    with pytest.raises(SessionError) as caught:
        from_json(text)
    assert len(str(caught.value)) < 300


def test_markdown_is_the_selected_branch_as_it_was_written(info: SessionInfo, tree: Tree) -> None:
    text = exported(info, tree, "md")
    assert is_safe(text)
    assert text.startswith("# Less & <more>\n")
    assert CODE in text
    assert "> **Thinking, 1.5 s**\n>\n> hm\n> hm\n" in text
    assert "## System\n\nBe terse.\n" in text
    assert "the other branch" not in text
    assert "*(cut off)*" in text
    tree.select(2)
    assert "the other branch" in exported(info, tree, "md")
    tree.select(None)
    assert "## You" not in exported(info, tree, "md")


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)
        self.addresses += [
            value or "" for name, value in attributes if name in ("src", "href", "action", "data")
        ]
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> ![pic](https://evil.example/p.png) "
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](https://good.example/) <https://auto.example/> [d](//x/y)\n\n"
    '```"><script>\n</code><script>x\n```\n\n```html\n<b onclick="x">\n```'
)


def test_html_is_one_page_that_loads_nothing(info: SessionInfo, tree: Tree) -> None:
    for field in ("user", "text", "reasoning"):
        setattr(tree[1], field, HOSTILE)
    tree[1].model = info.model = info.system = info.title = "</title><script>x</script>"
    page = exported(info, tree, "html")
    assert is_safe(page)
    found = Elements(page)
    assert not {"script", "img", "link", "iframe", "b"} & set(found.tags)
    assert found.tags.count("a") == len(found.addresses), "links: only a click follows them"
    assert set(found.addresses) == {
        "https://good.example/",
        "https://auto.example/",
        "https://evil.example/p.png",
    }
    assert found.open == []
    assert not re.search(r"url\(|@import", page)
    assert "default-src 'none'" in page
    assert "the other branch" not in found.words
    assert found.words.count("<script>alert(1)</script>") == 3


def test_html_of_what_a_model_writes(info: SessionInfo, tree: Tree) -> None:
    found = Elements(exported(info, tree, "html"))
    assert {"table", "pre", "code", "details"} <= set(found.tags)
    assert "int x = 1 < 2;" in found.words
    assert "Hi <b>" in found.words
    assert "(cut off)" in found.words


def test_names_of_files(info: SessionInfo) -> None:
    assert file_name(info, "md") == "less-more.md"
    for title in ("../../etc/passwd", "..", "", "\x1b[1m", "a/b\\c:d*?", "x" * 300, "CON ümläut"):
        name = file_name(SessionInfo(title=title), "json")
        assert re.fullmatch(r"[\w-]{1,60}\.json", name), name
    assert choose_format(Path("a.b.HTML")) == "html"
    for name in ("notes", "a.txt"):
        with pytest.raises(SessionError, match="does not say which format"):
            choose_format(Path(name))


def test_files(tmp_path: Path, info: SessionInfo, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_export(path, to_json(info, tree))
    assert read_import(path)[1].exchanges == ended(tree)
    with pytest.raises(SessionError, match="already exists"):
        write_export(path, "new")
    write_export(path, "new", replace=True)
    assert path.read_text() == "new"
    with pytest.raises(SessionError, match=r"a\.json: This is not JSON"):
        read_import(path)
    with pytest.raises(SessionError, match="cannot be written"):
        write_export(tmp_path / "no" / "a.md", "x")
    for bad in (tmp_path / "none.json", tmp_path):
        with pytest.raises(SessionError, match="cannot be read"):
            read_import(bad)
    os.mkfifo(tmp_path / "pipe.json")
    for endless in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(SessionError, match="not a regular file"):
            read_import(endless)
    with pytest.raises(SessionError, match="not a regular file"):
        write_export(tmp_path / "pipe.json", "x", replace=True)
    assert (tmp_path / "pipe.json").is_fifo()
    (tmp_path / "pipe.json").unlink()
    with pytest.raises(SessionError, match="cannot be written: File name too long"):
        write_export(tmp_path / f"{'x' * 300}.json", "x")
    with monkeypatch.context() as patched:
        patched.setattr("chatterm.sessions.export.LARGEST_IMPORT", 2)
        with pytest.raises(SessionError, match="longer than 2 B"):
            read_import(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SessionError, match="not UTF-8 text"):
        read_import(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
