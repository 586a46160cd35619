"""The table of IQ4_NL in registers: its instructions, one by one, as the manual says what they do."""

import struct

import pytest

pytest.importorskip("triton")

from engine.kernels.triton.gluon import LOOK_UP
from models.weights.formats.blocks import IQ4


def run(program: str, word: int) -> list[int]:
    """What is in $0 to $3 afterwards."""
    held = {"$4": word}

    def value(name: str) -> int:
        return held[name] if name in held else int(name, 0)

    for line in program.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation in ("", ".reg"):
            continue
        given = [value(name) for name in names[1:]]
        if operation == "and.b32":
            found = given[0] & given[1]
        elif operation == "shr.u32":
            found = given[0] >> given[1]
        elif operation == "lop3.b32":
            assert given[3] == 0xEA
            found = given[0] & given[1] | given[2]
        else:
            assert operation == "prmt.b32"
            both = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            chosen = [given[2] >> 4 * i & 15 for i in range(4)]
            assert max(chosen) < 8  # or a sign would be repeated
            found = int.from_bytes(bytes(both[i] for i in chosen), "little")
        held[names[0]] = found
    return [held[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("word", [0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0xFFFFFFFF, 0, 0x89ABCDEF, 0x80000008])
def test_every_code_stands_for_its_number(word: int) -> None:
    for pair, found in enumerate(run(LOOK_UP.value, word)):
        codes = word >> 4 * pair & 15, word >> 4 * pair + 16 & 15
        halves = struct.unpack(">ff", struct.pack(">HHHH", found & 0xFFFF, 0, found >> 16, 0))
        assert halves == tuple(IQ4[code] for code in codes)
