"""Damaged GGUF files: whatever the bytes, loading ends with one line, and with little work and memory."""

import resource
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from models.errors import ModelError
from models.loading.load import load_model
from models.weights.gguf import read_gguf
from tests.counting import calls_in, patience
from tests.fresh import seeds
from tests.models.checkpoints import files_of, random_model, run, tiny_llama, write_gguf

FILES = seeds(1500)
MOST_GROWTH_KB = 300_000

EXTREMES = (0, 1, 2, 3, 7, 8, 31, 32, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40)
EXTREMES += (2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Header:
    """A whole file, and where its header has numbers: (offset, bytes)."""

    data: bytes
    end: int
    """The offset of the tensors' bytes."""
    numbers: list[tuple[int, int]]


def walk(data: bytes) -> Header:
    """Find every number of a header, with a reader of its own."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    numbers: list[tuple[int, int]] = []
    at = 4

    def number(size: int) -> int:
        nonlocal at
        numbers.append((at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def string() -> None:
        nonlocal at
        length = number(8)
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            string()
        elif kind == 9:
            item, count = number(4), number(8)
            for _ in range(count):
                value(item)
        else:
            number(sizes[kind])

    number(4)
    tensors, values = number(8), number(8)
    for _ in range(values):
        string()
        value(number(4))
    for _ in range(tensors):
        string()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return Header(data, -(-at // 32) * 32, numbers)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    config = tiny_llama(num_hidden_layers=1, vocab_size=40)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return walk(write_gguf(path, random_model(config), Kind.Q4_0, rope_factors=[1.0] * 8).read_bytes())


def outcome(path: Path, data: bytes) -> str | None:
    """Return the one-line error for these bytes; None if a model comes out, which must then run."""
    path.write_bytes(data)
    try:
        model = load_model(files_of(path), dtype=torch.float32, device=torch.device("cpu"), context_length=64)
        run(model, list(range(min(8, model.spec.vocab_size))))
        message = None
    except ModelError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 1000 + len(str(path))
    return message


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_whole_file_is_read(header: Header, tmp_path: Path) -> None:
    assert outcome(tmp_path / "model.gguf", header.data) is None
    assert len(header.numbers) > 150
    assert min(tensor.offset for tensor in read_gguf(tmp_path / "model.gguf").tensors.values()) == header.end


def test_cut_at_every_byte_of_the_header(header: Header, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in range(header.end + 1):
        path.write_bytes(header.data[:length])
        with pytest.raises(ModelError) as caught:
            read_gguf(path)
        assert "download it again" in str(caught.value) or length < 4, length


def test_every_number_of_the_header_at_its_extremes(header: Header, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    before = peak_kb()
    refused = 0
    for at, size in header.numbers:
        for value in {value % 2 ** (8 * size) for value in EXTREMES}:
            changed = bytearray(header.data)
            changed[at : at + size] = value.to_bytes(size, "little")
            with patience():
                refused += outcome(path, bytes(changed)) is not None
    assert refused > len(header.numbers)
    assert peak_kb() - before < MOST_GROWTH_KB


def damage(data: bytes, header: Header, rng: np.random.Generator) -> bytes:
    """Apply some random damage, mostly in the header."""
    changed = bytearray(data)
    for _ in range(min(int(rng.geometric(0.6)), 4)):  # mostly one: with more, a file is refused earlier
        at = int(rng.integers(4, header.end if rng.random() < 0.9 else len(data)))
        match rng.integers(6):
            case 0:
                changed[at : at + 1] = rng.bytes(1)
            case 1:
                at, size = header.numbers[rng.integers(len(header.numbers))]
                changed[at : at + size] = (EXTREMES[rng.integers(len(EXTREMES))] % 2 ** (8 * size)).to_bytes(
                    size, "little"
                )
            case 2:
                del changed[at : at + int(rng.integers(1, 64))]
            case 3:
                changed[at:at] = rng.bytes(int(rng.integers(1, 64)))
            case 4:
                other = int(rng.integers(4, header.end))
                length = int(rng.integers(1, 64))
                changed[at : at + length] = data[other : other + length]
            case _:
                del changed[at + int(rng.integers(len(data))) :]
    return bytes(changed)


def test_random_damage(header: Header, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    before = peak_kb()
    refused = 0
    for number in FILES:
        try:
            with patience():
                refused += (
                    outcome(path, damage(header.data, header, np.random.default_rng(number))) is not None
                )
        except Exception as error:
            raise AssertionError(f"file {number}: its number alone makes it again") from error
    assert len(FILES) / 2 < refused < len(FILES) or len(FILES) < 100
    assert peak_kb() - before < MOST_GROWTH_KB


def an_array(kind: int, count: int, nbytes: int) -> bytes:
    """Return the key "a" with an array of `count` values of `kind`, followed by `nbytes` zero bytes."""
    return struct.pack("<Q1sIIQ", 1, b"a", 9, kind, count) + bytes(nbytes)


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        pytest.param(bytes(1 << 22), (0, 2**32), id="an endless list of empty keys"),
        pytest.param(bytes(1 << 22), (2**32, 0), id="an endless list of empty tensors"),
        pytest.param(an_array(0, 60 << 20, 60 << 20), (0, 1), id="bytes that would be numbers"),
        pytest.param(an_array(0, 1 << 27, 1 << 27), (0, 1), id="more than a header"),
        pytest.param(an_array(8, 1 << 24, 1 << 27), (0, 1), id="empty strings"),
        pytest.param(an_array(9, 1 << 23, 1 << 27), (0, 1), id="empty arrays"),
        pytest.param(
            struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 5000, (0, 1), id="deep arrays"
        ),
        pytest.param(struct.pack("<Q1sIQ", 1, b"a", 8, 1 << 27) + bytes(1 << 27), (0, 1), id="a long string"),
    ],
)
def test_what_would_take_much_memory(body: bytes, counts: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    before = peak_kb()

    def read() -> None:
        with pytest.raises(ModelError, match="damaged"):
            read_gguf(path)

    assert calls_in(read) < 1000
    assert peak_kb() - before < MOST_GROWTH_KB
