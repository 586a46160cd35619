"""The tensor types of GGUF files, and block types of our own.

The gguf package has the same table, but importing it takes 40 ms or more, so it is only used for rare types.
"""

from enum import IntEnum


class Kind(IntEnum):
    """A type by its number in files, with the count of numbers and the bytes of a block."""

    block: int
    block_bytes: int

    # Called without sizes, this is a look-up by number.
    def __new__(cls, number: int, block: int = 0, block_bytes: int = 0) -> "Kind":
        kind = int.__new__(cls, number)
        kind._value_, kind.block, kind.block_bytes = number, block, block_bytes
        return kind

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    # Types of our own, found in no file: groups of a safetensors checkpoint as a GPU takes them (formats/blocks.py).
    INT4_64 = 1000, 64, 36
    INT4_128 = 1001, 128, 68
    INT8_32 = 1002, 32, 36
    FP8_128 = 1003, 128, 132

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` numbers, which must be a multiple of the block."""
        assert columns % self.block == 0
        return columns // self.block * self.block_bytes

    @property
    def is_own(self) -> bool:
        """Whether it is a type of our own, which no file has."""
        return self >= 1000
