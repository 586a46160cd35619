"""Weights that stay quantised, in the block formats of GGUF: how they lie in memory.

How a weight lies in memory
---------------------------
A weight [rows, columns] is one `Weight` (models/network.py): `rows` output features, `columns` input features, every
row a whole number of blocks. `data` is uint8 [rows, row_bytes], contiguous: row r begins at `data.data_ptr() + r *
row_bytes`, and its blocks follow each other without a gap. `format` is the type's number in GGUF files.
Little-endian; f16 is an IEEE half; nibbles are written low first, so byte j of a 32-block holds number j (low) and
number j + 16 (high).

   format  name  numbers  bytes  a block is
        2  Q4_0       32     18  f16 d, u8 qs[16]                        d * (q - 8)
        3  Q4_1       32     20  f16 d, f16 m, u8 qs[16]                 d * q + m
        8  Q8_0       32     34  f16 d, i8 qs[32]                        d * q
       12  Q4_K      256    144  f16 d, f16 dmin, u8 scales[12], u8 qs[128]
       13  Q5_K      256    176  f16 d, f16 dmin, u8 scales[12], u8 qh[32], u8 qs[128]
       14  Q6_K      256    210  u8 ql[128], u8 qh[64], i8 scales[16], f16 d
       39  MXFP4      32     17  u8 e, u8 qs[16]                        2 ** (e - 128) * v(q)

v is 0, 1, 2, 3, 4, 6, 8, 12 for q from 0 to 7, and the negative of that for q from 8 on.

No other type reaches a layer: what a file holds in another one becomes Q8_0 at load. Promises and limits:

- The memory may be a read-only mapping of the model file: never write to it. It lives as long as the tensor does.
- Any address is possible. Files align a tensor to 32 bytes as a rule, but blocks of 17, 18, 20, 34 and 210 bytes
  leave their fields at any address, and a file may ask for another alignment: load without assuming one.
- Nothing may be read past `data[rows - 1]`: it can be the last byte of the mapping.
- The blocks are those of the file. Scales may be zero, negative, denormal, and in a damaged file infinite or NaN.
- Rows lie in the order in which the layer yields its outputs: the q and k rows of a Llama file, which interleaves the
  two halves of every head, are put in order at load (those are copies, all else is a view of the mapping).
- `columns` is a multiple of the block. `rows` is any positive number.

The parts of a packed layer (q, k, v; gate, up) lie in packing order, each with a type of its own; its bias is one
vector over all of them, in the dtype of the activations, or None. Where the embedding is tied, the head's one part is
the embedding itself. Norms are plain, as everywhere. A network is quantised as a whole or not at all
(`Network.is_quantized`)."""

from models.weights.block_formats import Kind

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4)
"""The types that a layer can hold."""


def row_bytes(kind: Kind, columns: int) -> int:
    """Bytes of a row of `columns` numbers, a multiple of the block."""
    assert columns % kind.block == 0
    return columns // kind.block * kind.block_bytes
