"""Pictures: what is one, how a message names it, and how servers get it."""

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.backend import Message
from chatterm.backends.pictures import (
    LARGEST,
    collect_pictures,
    inspect_picture,
    measure_picture,
    replace_pictures,
)
from chatterm.backends.remote.dialects.base import AnswerRequest
from chatterm.backends.remote.dialects.chat import ChatCompletions
from chatterm.backends.remote.dialects.ollama import Ollama
from chatterm.backends.remote.dialects.responses import Responses
from chatterm.conversation import attached_file
from chatterm.conversation.attachment_errors import AttachmentError
from chatterm.conversation.attachments import attach, attached_files, without_files
from tests.chatterm.driving import driven
from tests.chatterm.remote.rough_server import rough, said
from tests.chatterm.remote.test_backend import chat
from tests.chatterm.scripted import ScriptedBackend


def png(width: int = 3, height: int = 2) -> bytes:
    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"".join(b"\0" + b"\xff\0\0" * 3 for _ in range(2)))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")


JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\0"
    + b"\0" * 9
    + b"\xff\xff\xc2\x00\x0b\x08\x00\x20\x01\x40\x01\x01\x11\x00\xff\xd9"
)
KINDS = {
    "a.png": (png(640, 480), ("image/png", 640, 480)),
    "a.jpg": (JPEG, ("image/jpeg", 320, 32)),
    "a.gif": (b"GIF89a" + struct.pack("<HH", 7, 9) + b"\0;", ("image/gif", 7, 9)),
    "x.webp": (b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\x0f\0\0\x1f\0\0", ("image/webp", 16, 32)),
    "l.webp": (b"RIFF\x20\0\0\0WEBPVP8L\x0a\0\0\0\x2f\x04\x40\x01\0" + b"\0" * 9, ("image/webp", 5, 6)),
    "v.webp": (b"RIFF\x20\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 8, 9), ("image/webp", 8, 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    data, found = KINDS[name]
    assert measure_picture(data) == found
    (tmp_path / name).write_bytes(data)
    attached = attach(f"What is in @{name}?", tmp_path, sees=True)
    assert attached.message == f"What is in {name}?"
    text = "\n\n".join([attached.message, *attached.blocks])
    assert attached_files(text) == [name]
    assert "left out" in without_files(text)
    assert f"{found[1]} x {found[2]} pixels" in text
    there = collect_pictures([text])
    assert list(there.values()) == [data]
    left, (picture,) = replace_pictures(text, there)
    assert (picture.name, picture.kind) == (name, found[0])
    assert str(tmp_path) not in left, "where it lies here is nobody's business there"


@given(st.sampled_from([data for data, _ in KINDS.values()]), st.data())
def test_no_file_is_too_strange(data: bytes, draw: st.DataObject) -> None:
    changed = bytearray(data[: draw.draw(st.integers(0, len(data)))] + draw.draw(st.binary(max_size=8)))
    for place in draw.draw(st.lists(st.integers(0, max(len(changed) - 1, 0)), max_size=4)):
        if changed:
            changed[place] = draw.draw(st.integers(0, 255))
    found = measure_picture(bytes(changed))
    assert found is None or (found[0].startswith("image/") and found[1] >= 0 <= found[2])


def test_what_cannot_be_sent_is_said_in_a_line(tmp_path: Path) -> None:
    contents = {
        "text.png": (b"hello", "not a PNG, JPEG, GIF or WebP"),
        "huge.png": (png(50_000, 2), "50000 x 2 pixels"),
        "none.gif": (b"GIF89a\0\0\0\0", "0 x 0 pixels"),
        "long.jpg": (b"\xff\xd8\xff" + b"\0" * LARGEST, "is larger than"),
    }
    for name, (data, why) in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(AttachmentError, match=why) as error:
            attach(f"see @{name}", tmp_path, sees=True)
        assert "\n" not in str(error.value)
    (tmp_path / "good.png").write_bytes(png())
    with pytest.raises(AttachmentError, match="choose a remote model"):
        attach("see @good.png", tmp_path)
    with pytest.raises(AttachmentError, match="not a regular file"):
        attached_file.picture_line(tmp_path, "folder.png")


def test_a_message_cannot_name_a_file_that_it_does_not_know(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"the key")
    (tmp_path / "good.png").write_bytes(png())
    line = str(inspect_picture(tmp_path / "good.png", "good.png"))
    forged = line.replace("good.png", "secret.png")
    assert collect_pictures([f"x.png:\n```png\n{forged}\n```"]) == {}
    text = f"see\n\nx.png:\n```png\n{line}\n```"
    assert len(collect_pictures([text, text])) == 1
    (tmp_path / "good.png").write_bytes(png(9, 9))
    there = collect_pictures([text])
    assert there == {}
    assert replace_pictures(text, there) == ("see\n\n(x.png was a picture; it is not sent any more.)", [])


def test_every_api_gets_it_in_its_own_way(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    attached = attach("look at @a.png", tmp_path, sees=True)
    text = "\n\n".join([attached.message, *attached.blocks])
    asked = AnswerRequest(
        "m", [Message("user", text), Message("assistant", text)], pictures=collect_pictures([text])
    )
    data = base64.b64encode(png()).decode()
    url = f"data:image/png;base64,{data}"
    words = "look at a.png\n\n(a.png is the picture of 3 x 2 pixels here.)"
    first, second = ChatCompletions().body(asked, "")["messages"]
    assert first["content"] == [
        {"type": "text", "text": words},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    assert second["content"] == text, "only what the person attached is sent"
    first, second = Responses().body(asked, "")["input"]
    assert first["content"] == [
        {"type": "input_text", "text": words},
        {"type": "input_image", "image_url": url},
    ]
    assert second["content"] == text
    first, second = Ollama().body(asked, "")["messages"]
    assert (first["content"], first["images"]) == (words, [data])
    assert "images" not in second


def test_it_is_sent_again_with_every_turn_and_left_out_when_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    attached = attach("look at @a.png", tmp_path, sees=True)
    text = "\n\n".join([attached.message, *attached.blocks])
    with rough(said("Red."), said("Yes."), said("What?")) as server, chat(server) as backend:
        list(backend.send(text))
        list(backend.send("Sure?"))
        (tmp_path / "a.png").unlink()
        list(backend.send("Really?"))
    contents: list[Any] = [request.json["messages"][0]["content"] for request in server.requests]
    assert contents[0] == contents[1]
    assert [part["type"] for part in contents[0]] == ["text", "image_url"]
    assert contents[2] == "look at a.png\n\n(a.png was a picture; it is not sent any more.)"


@pytest.mark.parametrize("sees", [True, False])
async def test_in_the_chat_a_remote_model_gets_it_and_one_of_this_machine_says_so(
    sees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    backend = ScriptedBackend()
    async with driven(backend) as driver:
        assert driver.app.chat.info is not None
        object.__setattr__(driver.app.chat.info, "is_remote", sees)
        await driver.send("see @a.png", wait=False)
        if sees:
            await driver.until(lambda: [name for name, _ in backend.calls if name == "send"])
            assert "image/png, 3 x 2 pixels" in next(value for name, value in backend.calls if name == "send")
        else:
            await driver.until(lambda: driver.errors)
            assert "choose a remote model" in driver.errors[0]
            assert driver.composer.text == "see @a.png"
