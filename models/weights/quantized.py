"""Weights that stay quantised, in the block formats of GGUF, and their memory layout.

Memory layout
-------------
A weight [rows, columns] is one `Weight` (models/network.py) with `rows` output features and `columns` input features.
Every row is a whole number of blocks. `data` is uint8 [rows, row_bytes], contiguous: row r begins at
`data.data_ptr() + r * row_bytes`, and its blocks follow each other without a gap. `format` is the type's number in GGUF
files. Numbers are little-endian; f16 is an IEEE half; nibbles are stored low half first: byte j of a 32-block holds
number j (low) and number j + 16 (high).

   format  name  numbers  bytes  a block is
        2  Q4_0       32     18  f16 d, u8 qs[16]                        d * (q - 8)
        3  Q4_1       32     20  f16 d, f16 m, u8 qs[16]                 d * q + m
        8  Q8_0       32     34  f16 d, i8 qs[32]                        d * q
       12  Q4_K      256    144  f16 d, f16 dmin, u8 scales[12], u8 qs[128]
       13  Q5_K      256    176  f16 d, f16 dmin, u8 scales[12], u8 qh[32], u8 qs[128]
       14  Q6_K      256    210  u8 ql[128], u8 qh[64], i8 scales[16], f16 d
       39  MXFP4      32     17  u8 e, u8 qs[16]                        2 ** (e - 128) * v(q)

v is 0, 1, 2, 3, 4, 6, 8, 12 for q from 0 to 7, and the negative of these for q from 8 to 15.

No other type reaches a layer: weights of other types in a file become Q8_0 at load. Guarantees and limits:

- The memory may be a read-only mapping of the model file: never write to it. It lives as long as the tensor does.
- Any address is possible. Files usually align a tensor to 32 bytes, but in blocks of 17, 18, 20, 34 and 210 bytes
  fields lie at any address, and a file may ask for another alignment: loads must not assume one.
- Never read past `data[rows - 1]`: its last byte can be the last byte of the mapping.
- The blocks are those of the file. Scales may be zero, negative or denormal, and in a damaged file infinite or NaN.
- Rows lie in the order of the layer's outputs. A Llama file interleaves the two halves of every head; its q and k
  rows are put in order at load (they are copies; all other tensors are views of the mapping).
- `columns` is a multiple of the block. `rows` is any positive number.

The parts of a packed layer (q, k, v; gate, up) lie in packing order, each with its own type. The bias of the layer is
one vector over all parts, in the dtype of the activations, or None. If the embedding is tied, the head's only part is
the embedding itself. Norms are plain, as everywhere. A network is quantised as a whole or not at all
(`Network.is_quantized`)."""

from models.weights.block_formats import Kind

KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4)
"""The types that a layer can hold."""
