"""The files of the KV cache on disk: what is torn, damaged, removed or another's is never taken for a block."""

import os
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.store import checks, records
from engine.store import folder as folders
from engine.store.folder import Folder, forget
from engine.store.readers import Readers
from tests.fresh import examples, seeds


def block(number: int, size: int = 50) -> tuple[bytes, memoryview]:
    return number.to_bytes(32, "little"), memoryview(bytes((number * 7 + at) % 256 for at in range(size)))


READERS = Readers(2)


def read(folder: Folder, digest: bytes, size: int = 50) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if folder.read(digest, memoryview(into), READERS)() else None


def wrote(folder: Folder, owner: str, digest: bytes, payload: memoryview) -> bool:
    folder.begin(owner)
    return folder.append(owner, digest, payload)


def test_every_bit_that_is_flipped_is_noticed(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "f", 10**6)
    blocks = dict(block(number) for number in range(3))
    for digest, payload in blocks.items():
        assert wrote(folder, "one", digest, payload)
    folder.close()
    path = tmp_path / "f" / "one.kv"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = Folder(tmp_path, "f", 10**6)
        right = [read(found, digest) == payload for digest, payload in blocks.items()]
        wrong = [read(found, digest) not in (payload, None) for digest, payload in blocks.items()]
        assert not any(wrong), f"bit {bit}"
        assert not all(right), f"bit {bit} was not noticed"
        found.close()


@pytest.mark.parametrize("native", [True, False])
def test_a_damaged_byte_in_any_piece_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(records, "PIECE", 1000)
    if not native:
        monkeypatch.setattr(checks, "_native", lambda: None)
    digest, payload = block(1, 3456)
    folder = Folder(tmp_path, "f", 10**6)
    assert wrote(folder, "one", digest, payload)
    folder.close()
    monkeypatch.undo()  # whoever writes, the checksum is the same
    monkeypatch.setattr(records, "PIECE", 1000)
    path = tmp_path / "f" / "one.kv"
    whole = path.read_bytes()
    for at in (None, 0, 999, 1000, 2500, 3455):
        damaged = bytearray(whole)
        if at is not None:
            damaged[records.HEADER + at] ^= 1
        path.write_bytes(damaged)
        found = Folder(tmp_path, "f", 10**6)
        assert read(found, digest, len(payload)) == (payload if at is None else None)
        found.close()


def test_payloads_begin_where_a_processor_copies_fast(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "f", 10**6)
    for number in range(3):
        assert wrote(folder, "one", *block(number, 640))
    with (tmp_path / "f" / "one.kv").open("rb") as file:
        assert [record.offset % 64 for record in records.scan(file.fileno())] == [0, 0, 0]


def test_what_the_system_does_not_hold_in_memory_is_cold(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "f", 10**9)
    blocks = [block(number, 1 << 20) for number in range(4)]
    digests = [digest for digest, _ in blocks]
    for one in blocks:
        assert wrote(folder, "one", *one)
    assert not folder.is_cold(digests)
    assert not folder.is_cold([b"unknown"])
    with (tmp_path / "f" / "one.kv").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], 2 << 20, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError:
            pytest.skip("the system does not tell")
        else:
            pytest.skip("this file system keeps everything in memory")
    assert folder.is_cold(digests)
    assert [read(folder, digest, 1 << 20) for digest in digests] == [payload for _, payload in blocks]
    assert not folder.is_cold(digests)


@examples(60)
@given(st.data())
def test_what_a_crash_leaves_is_cut_off_and_the_rest_is_there(data: st.DataObject) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        root = Path(name)
        path = root / "f" / "one.kv"
        sizes = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
        ends = [0]
        folder = Folder(root, "f", 10**6)
        for number, size in enumerate(sizes):
            assert wrote(folder, "one", *block(number, size))
            ends.append(path.stat().st_size)
        folder.close()
        cut = data.draw(st.integers(0, ends[-1]))
        os.truncate(path, cut)
        with path.open("ab") as file:
            file.write(data.draw(st.binary(max_size=40)))
        folder = Folder(root, "f", 10**6)
        kept = sum(end <= cut for end in ends[1:])
        for number, size in enumerate(sizes):
            digest, payload = block(number, size)
            assert read(folder, digest, size) == (payload if number < kept else None)
        assert wrote(folder, "one", *block(99))
        folder.close()
        folder = Folder(root, "f", 10**6)
        assert read(folder, block(99)[0]) == block(99)[1], "what is appended then can be found"
        folder.close()


def test_the_conversation_that_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    digest, payload = block(0)
    one = len(records.header(digest, payload)) + len(payload)
    folder = Folder(tmp_path, "f", 4 * one)
    for number, owner in enumerate(("a", "b", "c", "d")):
        assert wrote(folder, owner, *block(number))
        os.utime(tmp_path / "f" / f"{owner}.kv", (number, number))
    folder.touch(block(0)[0])
    assert wrote(folder, "e", *block(4))
    assert sorted(path.stem for path in (tmp_path / "f").iterdir()) == ["a", "c", "d", "e"]
    assert read(folder, block(1)[0]) is None
    assert not wrote(Folder(tmp_path, "f", one - 1), "f", *block(5)), "there is no room for a single one"


def test_two_processes_share_a_folder_and_one_writes_a_file(tmp_path: Path) -> None:
    first, second = Folder(tmp_path, "f", 10**6), Folder(tmp_path, "f", 10**6)
    assert wrote(first, "one", *block(1))
    assert not wrote(second, "one", *block(2)), "it is being written to"
    assert wrote(second, "two", *block(2))
    assert wrote(first, "one", *block(3))
    third = Folder(tmp_path, "f", 10**6)
    assert [read(third, block(number)[0]) for number in (1, 2, 3)] == [block(n)[1] for n in (1, 2, 3)]
    first.close()
    assert wrote(third, "one", *block(4)), "whoever wrote it has gone"
    forget(tmp_path, "one")
    assert not (tmp_path / "f" / "one.kv").exists()
    assert wrote(third, "one", *block(5)), "it begins anew"
    fresh = Folder(tmp_path, "f", 10**6)
    assert read(fresh, block(4)[0]) is None
    assert read(fresh, block(5)[0]) == block(5)[1]


def test_a_file_in_the_place_of_one_that_was_removed_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST_OPEN", 1)
    first = Folder(tmp_path, "f", 10**6)
    for number in (1, 2, 3):
        assert wrote(first, "one", *block(number))
    assert wrote(first, "two", *block(4))  # the other is closed, and may be written by anybody
    for size in (10, 50, 200):
        forget(tmp_path, "one")
        second = Folder(tmp_path, "f", 10**6)
        assert wrote(second, "one", *block(7, size))
        second.close()
        assert wrote(first, "one", *block(8))
        assert read(first, block(1)[0]) is None
        fresh = Folder(tmp_path, "f", 10**6)
        assert read(fresh, block(7)[0], size) == block(7, size)[1], "what the other wrote is still there"
        assert read(fresh, block(8)[0]) == block(8)[1], "what is written behind it can be found"
        assert wrote(first, "two", *block(9))


@pytest.mark.parametrize("written", [0, 1, 2])
def test_what_was_deleted_is_not_written_again(tmp_path: Path, written: int) -> None:
    folder = Folder(tmp_path, "f", 10**6)
    assert folder.begin("one")
    for number in range(written):
        assert folder.append("one", *block(number))
    forget(tmp_path, "one")
    assert not folder.append("one", *block(5))
    assert not folder.append("one", *block(6))
    assert [*tmp_path.rglob("*.kv")] == []
    assert len(folder) == 0
    assert folder.begin("one")
    assert folder.append("one", *block(5)), "who goes on with it all the same begins anew"
    forget(tmp_path, "one")
    assert not folder.begin("one"), "what was written is gone"


def test_what_cannot_fit_removes_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "f", 1000)
    for number, owner in enumerate("ab"):
        assert wrote(folder, owner, *block(number))
    assert not wrote(folder, "c", *block(3, 1000))
    assert [read(folder, block(number)[0]) for number in (0, 1)] == [block(0)[1], block(1)[1]]


def test_a_disk_is_not_filled_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0

    def usage(_: Path) -> SimpleNamespace:
        taken = used + sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        return SimpleNamespace(total=1000, free=1000 - taken)

    monkeypatch.setattr(folders.shutil, "disk_usage", usage)
    folder = Folder(tmp_path, "f", 10**6)
    for number, owner in enumerate("ab"):
        assert wrote(folder, owner, *block(number, 250))
        os.utime(tmp_path / "f" / f"{owner}.kv", (number, number))
    assert wrote(folder, "c", *block(2, 300))
    assert sorted(path.stem for path in (tmp_path / "f").iterdir()) == ["b", "c"], "the oldest gives way"
    used = 500  # by others
    with pytest.raises(OSError, match="No space left"):
        wrote(folder, "c", *block(3, 300))
    assert read(folder, block(2)[0], 300) == block(2, 300)[1]


def test_a_block_that_two_conversations_have_is_there_when_one_goes(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "f", 500)
    for owner in "ab":
        assert wrote(folder, owner, *block(1))
    os.utime(tmp_path / "f" / "b.kv", (0, 0))
    assert wrote(folder, "c", *block(2, 300))
    assert sorted(path.stem for path in (tmp_path / "f").iterdir()) == ["a", "c"]
    assert read(folder, block(1)[0]) == block(1)[1]


@pytest.mark.parametrize("seed", seeds(20))
def test_several_that_write_and_delete_at_random_never_find_another_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = Random(seed)
    monkeypatch.setattr(folders, "MOST_OPEN", chance.choice([1, 2, 4]))
    most = chance.choice([600, 10**6])
    several = [Folder(tmp_path, "f", most) for _ in range(3)]
    sizes = [10 + 13 * number for number in range(12)]
    for _ in range(400):
        place, owner, number = chance.randrange(3), chance.choice("abc"), chance.randrange(12)
        folder = several[place]
        match chance.randrange(6):
            case 0:
                forget(tmp_path, owner)
            case 1:
                folder.close()
                several[place] = Folder(tmp_path, "f", most)
            case 2:
                folder.begin(owner)
            case 3 | 4:
                folder.append(owner, *block(number, sizes[number]))
            case 5:
                assert read(folder, block(number)[0], sizes[number]) in (
                    None,
                    block(number, sizes[number])[1],
                )
    for folder in several:
        folder.close()
    for path in tmp_path.rglob("*.kv"):
        with path.open("rb") as file:
            end = max((record.end for record in records.scan(file.fileno())), default=0)
        assert end == path.stat().st_size, "nothing is behind what can be found"


@pytest.mark.parametrize("owner", ["", "../up", "a/b", "a.b", "-x", "x" * 65, "ü"])
def test_a_name_that_is_none_of_a_file_is_refused(tmp_path: Path, owner: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        wrote(Folder(tmp_path, "f", 100), owner, *block(1))
    forget(tmp_path, owner)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "kv", "f", 10**6)
    wrote(folder, "one", *block(1))
    path = tmp_path / "kv" / "f" / "one.kv"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == path.parents[1].stat().st_mode & 0o777 == 0o700
