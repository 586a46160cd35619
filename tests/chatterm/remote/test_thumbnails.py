"""Pictures in the chat: thumbnails where a terminal can show them, a line where not, and files that are traps."""

import io
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.backends.pictures import Picture, inspect_picture, take_out_pictures
from chatterm.conversation import thumbnail as thumbnails
from chatterm.conversation.attachments import attach
from chatterm.conversation.entries import UserEntry
from chatterm.conversation.find import Finder
from chatterm.conversation.thumbnail import COLUMNS, ROWS, Thumbnail, thumbnail
from chatterm.markdown.lines import line_cells
from chatterm.screens.chat import picture_loader
from chatterm.screens.themed_app import Terminal
from tests.chatterm.driving import Driver, driven
from tests.chatterm.finding import found_by
from tests.chatterm.remote.test_pictures import png
from tests.chatterm.scripted import ScriptedBackend

Image = pytest.importorskip("PIL.Image")
TERMINALS = {
    "everything": Terminal(),
    "no colours": Terminal(colours=False),
    "16 colours": Terminal(shades=False),
    "ASCII": Terminal(unicode=False),
}


def saved(path: Path, size: tuple[int, int], kind: str = "PNG", mode: str = "RGB", **more: object) -> Picture:
    """A picture whose left half is red and whose right half is blue."""
    image = Image.new("RGB", size, (255, 0, 0))
    image.paste((0, 0, 255), (size[0] // 2, 0, *size))
    data = io.BytesIO()
    image.convert(mode).save(data, kind, **more)
    path.write_bytes(data.getvalue())
    return inspect_picture(path, path.name)


def colour(found: Thumbnail, x: int, y: int) -> tuple[int, ...]:
    place = 3 * (y * found.width + x)
    return tuple(found.pixels[place : place + 3])


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "RGB"), ("PNG", "P"), ("PNG", "1"), ("PNG", "LA"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("JPEG", "L"),
     ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGB")],
)  # fmt: skip
def test_every_kind_becomes_small(kind: str, mode: str, tmp_path: Path) -> None:
    found = thumbnail(saved(tmp_path / f"a.{kind.lower()}", (640, 480), kind, mode))
    assert found is not None
    assert (found.width, found.height) == (32, 24)
    assert len(found.pixels) == 3 * 32 * 24
    if mode in ("RGB", "P", "RGBA", "CMYK"):
        red, _, blue = colour(found, 3, 10)
        assert red > 200 > 60 > blue
        red, _, blue = colour(found, 28, 20)
        assert blue > 200 > 60 > red


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((9_000, 3), (48, 1)),
        ((3, 9_000), (1, 24)),
        ((2, 3), (2, 3)),
        ((1, 1), (1, 1)),
        ((480, 240), (48, 24)),
    ],
)
def test_of_any_form_it_has_bounds_and_is_never_enlarged(
    size: tuple[int, int], small: tuple[int, int], tmp_path: Path
) -> None:
    found = thumbnail(saved(tmp_path / "a.png", size))
    assert found is not None
    assert (found.width, found.height) == small


def test_one_that_lies_on_its_side_stands_and_what_is_seen_through_is_grey(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    found = thumbnail(saved(tmp_path / "a.jpg", (640, 480), "JPEG", exif=turned))
    assert found is not None
    assert (found.width, found.height) == (18, 24)
    assert colour(found, 9, 2)[0] > 200 > 60 > colour(found, 9, 21)[0]
    Image.new("RGBA", (4, 4), (255, 255, 255, 0)).save(tmp_path / "b.png")
    found = thumbnail(inspect_picture(tmp_path / "b.png", "b.png"))
    assert found is not None
    assert set(found.pixels) == {128}


@given(st.integers(1, COLUMNS), st.integers(1, 2 * ROWS), st.integers(1, 60), st.randoms())
def test_its_lines_are_as_wide_as_there_is_room(width: int, height: int, room: int, random: object) -> None:
    pixels = bytes(n % 251 for n in range(3 * width * height))
    lines = Thumbnail(width, height, pixels).lines(room)
    assert {line_cells(line) for line in lines} == {min(width, room)}
    assert 1 <= len(lines) <= ROWS
    shown = min(width, room)
    assert len(lines) == -(-max(height * shown // width, 1) // 2)
    for number, line in enumerate(lines):
        for text, style in line:
            assert set(text) == {"▀"}
            is_last = number == len(lines) - 1
            digits = style.removeprefix("picture rgb")
            assert len(bytes.fromhex(digits)) in ((3, 6) if is_last else (6,))


# --- what is no picture, or a trap ---


def bomb(path: Path, side: int) -> None:
    """A small file with very many pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-side // 8)) * side), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b""))


def test_a_bomb_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb(tmp_path / "a.png", 8_000)
    picture = inspect_picture(tmp_path / "a.png", "a.png")
    assert picture.bytes < 20_000
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it is opened"))
    assert thumbnail(picture) is None


def test_broken_files_and_those_that_have_changed_are_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = saved(tmp_path / "a.png", (64, 48))
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(data[:100])
    assert thumbnail(inspect_picture(tmp_path / "b.png", "b.png")) is None
    (tmp_path / "c.png").write_bytes(png(640, 480))  # has fewer pixels than it says
    assert thumbnail(inspect_picture(tmp_path / "c.png", "c.png")) is None
    (tmp_path / "a.png").write_bytes(data + b"x")
    assert thumbnail(whole) is None
    (tmp_path / "a.png").unlink()
    assert thumbnail(whole) is None
    assert capfd.readouterr() == ("", "")


@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]), st.data())
def test_no_file_is_too_strange(kind: str, draw: st.DataObject) -> None:
    image = io.BytesIO()
    Image.new("RGB", (8, 6), (1, 2, 3)).save(image, kind)
    data = bytearray(image.getvalue())
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=6)):
        data[place] = draw.draw(st.integers(0, 255))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thumbnails, "read_picture", lambda picture: bytes(data))
        found = thumbnail(Picture("a", f"image/{kind.lower()}", 8, 6, 0, "", ""))
    assert found is None or len(found.pixels) == 3 * found.width * found.height


def test_without_pillow_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = saved(tmp_path / "a.png", (64, 48))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert thumbnail(picture) is None


# --- in the chat ---


def message(folder: Path, text: str) -> str:
    attached = attach(text, folder, sees=True)
    return "\n\n".join([attached.message, *attached.blocks])


def test_a_message_is_shown_without_the_blocks_of_its_pictures(tmp_path: Path) -> None:
    saved(tmp_path / "a.png", (64, 48))
    (tmp_path / "b.txt").write_text("hello\n")
    text = message(tmp_path, "see @a.png and @b.txt")
    said, (picture,) = take_out_pictures(text)
    assert said == "see a.png and b.txt\n\nb.txt:\n```txt\nhello\n```"
    assert picture.name == "a.png"
    assert take_out_pictures("\n a\n\n\n") == ("\n a\n\n\n", []), "what was typed is not touched"
    entry = UserEntry(text)
    entry.lay_out(40)
    assert entry.source_text == text
    found = thumbnail(picture)
    assert found is not None
    before = entry.height
    entry.thumbnails[picture.digest] = found
    entry.changed()
    entry.lay_out(40)
    assert entry.height == before + 12
    assert [len(found_by(Finder(text), [entry], 40)) for text in ("▀", "a.png", "b.txt")] == [0, 1, 2]


def shown(driver: Driver) -> int:
    return driver.text().count("▀")


@pytest.mark.parametrize("name", TERMINALS)
async def test_it_is_drawn_where_the_terminal_can(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "a.png", (64, 48))
    monkeypatch.chdir(tmp_path)
    made: list[str] = []
    work = picture_loader.thumbnail
    monkeypatch.setattr(
        picture_loader, "thumbnail", lambda picture: made.append(picture.name) or work(picture)
    )
    async with driven(ScriptedBackend(), terminal=TERMINALS[name]) as driver:
        assert driver.app.chat.info is not None
        object.__setattr__(driver.app.chat.info, "is_remote", True)
        await driver.send("see @a.png")
        await driver.shows(
            "a.png · PNG, 64 x 48 pixels" if name != "ASCII" else "a.png . PNG, 64 x 48 pixels"
        )
        assert "sha256" not in driver.text()
        if name != "everything":
            await driver.send("/retry")
            assert (made, shown(driver)) == ([], 0)
            return
        await driver.until(lambda: shown(driver) == 32 * 12)
        red, blue = {
            (style.color.triplet.hex, style.bgcolor.triplet.hex)
            for text, style, _ in driver.segments()
            if "▀" in text and style is not None and style.color is not None and style.bgcolor is not None
        } & {("#ff0000", "#ff0000"), ("#0000ff", "#0000ff")}
        assert red != blue
        await driver.send("see @a.png again, and say more")
        await driver.until(lambda: shown(driver) == 32 * 12)
        await driver.send("/retry")
        assert made == ["a.png"], "nothing is decoded twice"
        await driver.pilot.press("alt+up", "alt+up", "c")
        driver.transcript.edge(-1)
        await driver.pilot.resize_terminal(24, 24)
        await driver.until(lambda: 0 < shown(driver) <= 12 * 22)


async def test_only_what_is_seen_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[str] = []
    monkeypatch.setattr(picture_loader, "thumbnail", lambda picture: made.append(picture.name))
    async with driven(ScriptedBackend()) as driver:
        entries = []
        for number in range(60):
            saved(tmp_path / f"{number}.png", (8, 8 + number))
            entries.append(UserEntry(message(tmp_path, f"see @{number}.png")))
        driver.app.chat.show_path(entries)
        await driver.until(lambda: "59.png" in made)
        await driver.until(lambda: not driver.app.chat.picturing._is_busy)
        assert len(made) < 20
        assert "5.png" not in made
        driver.transcript.edge(-1)
        await driver.until(lambda: "5.png" in made)
