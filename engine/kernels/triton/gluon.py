"""The parts of Gluon that kernels use: the variant of Triton's language in which kernels assign data to threads.

Triton's interpreter does not know Gluon. There, plain Triton computes the same, and layouts mean nothing.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,no-redef,untyped-decorator,misc"
import struct
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.weights.formats.blocks import IQ4

__all__ = [
    "async_copy",
    "constexpr_function",
    "described",
    "eighth_halves",
    "fence",
    "fence_async_shared",
    "gl",
    "halves",
    "input_layout",
    "jit",
    "lane_layout",
    "lane_rows_layout",
    "looked_up",
    "masked",
    "mbarrier",
    "mma_v2",
    "multiply",
    "own_layout",
    "paired",
    "row_layout",
    "signed_halves",
    "small_halves",
    "tma",
    "type_layout",
    "unpaired",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
jit = gluon.jit
constexpr_function = gluon.constexpr_function


def described(tensor: Any, rows: int, columns: int) -> Any:
    """Return the argument of a kernel that copies blocks [rows, columns] of `tensor` [n, m] with `tma`.

    Numbers outside are zeros. The tensor's address and the distance between its rows are multiples of 16 bytes.
    """
    dtype = getattr(gl, str(tensor.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


@constexpr_function
def type_layout(kind):
    """Return the layout of a tensor's type."""
    return kind.layout


@constexpr_function
def own_layout(warps):
    """Return the shared-memory layout for tiles of weights [warps, 16, 128]: what a warp reads at once is contiguous.

    A thread reads what it copied there itself: eight neighbouring columns at the places of its `DotOperandLayout`.
    """
    columns, lanes = (
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    )
    rest = [[0, 8, 0], [0, 0, 32], [0, 0, 64], *([1 << i, 0, 0] for i in range(warps.bit_length() - 1))]
    return gl.SharedLinearLayout(columns + lanes + rest)


@constexpr_function
def input_layout(warps, columns, rows):
    """Return the layout of inputs [warps, columns, rows]: an operand's, but a thread holds each number only once."""
    width = columns // 4
    neighbours = [[0, 1 << i, 0] for i in range(width.bit_length() - 1)]
    others = [[0, 0, 8 << i] for i in range(rows.bit_length() - 4)]
    lanes = [[0, width, 0], [0, 2 * width, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(neighbours + others, lanes, warp, [], [warps, columns, rows])


@constexpr_function
def row_layout(warps, count):
    """Return the layout of values [warps, 16, count] of a tile's rows: a thread has those of the rows that it sums."""
    warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    values = [[0, 0, 1 << i] for i in range(count.bit_length() - 1)]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout([*values, [0, 8, 0]], lanes, warp, [], [warps, 16, count])


@constexpr_function
def lane_layout(warps, lanes):
    """Return the layout of [warps, 16, 8 // lanes, lanes]: the sums [warps, 16, 8] of a tensor core, cut up."""
    columns = [[0, 0, 0, 1 << i] for i in range(lanes.bit_length() - 1)]
    columns += [[0, 0, 1 << i, 0] for i in range((8 // lanes).bit_length() - 1)]
    warp = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    threads = [*columns[1:], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        [columns[0], [0, 8, 0, 0]], threads, warp, [], [warps, 16, 8 // lanes, lanes]
    )


@constexpr_function
def lane_rows_layout(warps, count, lanes):
    """Return the layout of values [warps, 16, count] of a tile's rows: as in `lane_layout`, and all others alike."""
    values = [[0, 0, 1 << i] for i in range(count.bit_length() - 1)]
    split = lanes.bit_length() - 1
    threads = [*values[1:split], *([[0, 0, 0]] * (3 - split)), [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [values[0], *values[split:], [0, 8, 0]], threads, warp, [], [warps, 16, count]
    )


@jit
def fence(CUDA: tl.constexpr, SCOPE: tl.constexpr):
    """Order a thread's earlier accesses to memory before its later ones, for all GPUs ("sys") or this one ("gpu")."""
    if CUDA:
        gl.inline_asm_elementwise(
            "fence.acq_rel." + SCOPE + "; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@jit
def multiply(left, right):
    """Return left * right, rounded to their dtype, two numbers at a time."""
    return left * right


@jit
def masked(words, mask, rest):
    """Return words & mask | rest of int32 in one instruction; with two constants a compiler would emit two."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;",
        "=r,r,r,r",
        [words, mask, rest],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def halves(pairs):
    """Return the two bf16 of each int32 along a new last axis, the lower one first.

    Both stay in one register, a copy of the int32. Split into registers of 16 bits, they would have to be moved once
    more before a product.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [gl.join(pairs, pairs)], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@jit
def paired(numbers):
    """Return bf16 [a, b, c] as int32 [a, b // 2, c] of two neighbours each, which a loop carries in one register."""
    A: gl.constexpr = numbers.shape[0]
    B: gl.constexpr = numbers.shape[1]
    C: gl.constexpr = numbers.shape[2]
    twice = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [numbers], dtype=gl.int32, is_pure=True, pack=2
    )
    pairs, _ = gl.split(gl.permute(gl.reshape(twice, [A, B // 2, 2, C]), [0, 1, 3, 2]))
    return pairs


@jit
def unpaired(pairs, layout: gl.constexpr):
    """Return the numbers that `paired` joined, bf16 [a, b, c], in `layout`."""
    numbers = gl.permute(halves(pairs), [0, 1, 3, 2])
    return gl.convert_layout(
        gl.reshape(numbers, [pairs.shape[0], 2 * pairs.shape[1], pairs.shape[2]]), layout
    )


@jit
def signed_halves(pairs, less):
    """Return the `halves` of each int32 minus those of its counterpart in `less`. The differences must be exact."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 one; mov.b32 one, 0xBF80BF80; fma.rn.bf16x2 $0, $3, one, $1; }",
        "=r,r,r,r,r",
        [gl.join(pairs, pairs), gl.join(less, less)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _large_halves(pairs, LARGE: tl.constexpr):
    """Return the `halves` of each int32, times the bf16 that LARGE has in both halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 large, nothing; mov.b32 large, " + LARGE + "; mov.b32 nothing, 0x80008000; "
        "fma.rn.bf16x2 $0, $1, large, nothing; }",
        "=r,r,r",
        [gl.join(pairs, pairs)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def small_halves(pairs):
    """Return the `halves` of each int32, times 2 ** 127."""
    return _large_halves(pairs, "0x7F007F00")


@jit
def eighth_halves(pairs):
    """Return the `halves` of each int32, times 2 ** 120."""
    return _large_halves(pairs, "0x7B807B80")


_BF16 = [struct.unpack(">HH", struct.pack(">f", number))[0] for number in IQ4]
_LOW, _HIGH = (
    [hex(sum((bits >> low & 255) << 8 * i for i, bits in enumerate(_BF16[n : n + 4]))) for n in (0, 4, 8, 12)]
    for low in (0, 8)
)


def _four_bytes(found: str, codes: str, upper: str, table: list[str]) -> str:
    """Return instructions that look up one byte of the table for each of four codes."""
    return (
        f"prmt.b32 a, {table[0]}, {table[1]}, {codes}; prmt.b32 b, {table[2]}, {table[3]}, {codes}; "
        f"prmt.b32 {found}, a, b, {upper}; "
    )


LOOK_UP = tl.constexpr(
    "{ .reg .b32 s, t, m, n, a, b, c, d, e, f; and.b32 s, $4, 0x77777777; shr.u32 t, s, 16; shr.u32 m, $4, 1; "
    "lop3.b32 m, m, 0x44444444, 0x32103210, 0xEA; shr.u32 n, m, 16; "
    + _four_bytes("c", "s", "m", _LOW)
    + _four_bytes("d", "s", "m", _HIGH)
    + _four_bytes("e", "t", "n", _LOW)
    + _four_bytes("f", "t", "n", _HIGH)
    + "prmt.b32 a, c, d, 0x5140; prmt.b32 b, e, f, 0x5140; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; "
    "prmt.b32 a, c, d, 0x7362; prmt.b32 b, e, f, 0x7362; prmt.b32 $2, a, b, 0x5410; prmt.b32 $3, a, b, 0x7632; }"
)
"""See `looked_up`."""


@jit
def looked_up(words):
    """Look up the numbers of IQ4_NL for the eight codes of each int32: four int32 with the bf16 of codes 16 bits apart.

    A byte permutation looks up four codes among eight bytes. It runs for the low and the high bytes of the numbers,
    each for codes up to seven and from eight on; the highest bit of a code then selects the half.
    """
    return gl.inline_asm_elementwise(
        LOOK_UP,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


if knobs.runtime.interpret:
    from triton.runtime import interpreter

    def _without_layout(name):
        # Looked up at every call, because the interpreter puts its own functions into `tl` while it runs a kernel.
        return lambda *given, layout=None, **named: getattr(tl, name)(*given, **named)

    class _Shared:
        """A buffer, or its numbered places; `_stored` is the content."""

        def __init__(self, dtype=None, shape=None, layout=None, stored=None):
            self._stored, self._places = stored, {}

        def index(self, number):
            return self._places.setdefault(int(number), _Shared())

        def store(self, value):
            self._stored = value

        def load(self, layout):
            return self._stored

        def permute(self, order):
            return _Shared(stored=tl.permute(self._stored, order))

        def slice(self, start, length):
            """Return places `start` to `start + length` of a content with one axis."""
            start, length, kind = int(start), int(length), self._stored.dtype
            numbers = interpreter.TensorHandle(self._stored.handle.data[start : start + length], kind)
            return _Shared(stored=tl.tensor(numbers, tl.block_type(kind, [length])))

    def _copy(place, at, mask=None):
        place.store(tl.load(at) if mask is None else tl.load(at, mask=mask, other=0.0))

    def _nothing(*_, **__):
        pass

    def _copy_block(source, at, barrier, place, pred=True):
        if pred:
            place.store(source.load(at))

    def _multiply_blocks(left, right, sums, is_async=False):
        return mma_v2(left.load(None), right.load(None), sums)

    async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing
    )
    tma = SimpleNamespace(async_copy_global_to_shared=_copy_block)
    mbarrier = SimpleNamespace(
        MBarrierLayout=_nothing, init=_nothing, expect=_nothing, wait=_nothing, invalidate=_nothing
    )
    fence = fence_async_shared = _nothing
    warpgroup_mma = _multiply_blocks
    # There are no layouts.
    type_layout = own_layout = input_layout = row_layout = lane_layout = lane_rows_layout = _nothing
    _same = (
        *("arange", "zeros", "expand_dims", "load", "store", "sum", "max", "maximum", "minimum"),
        *("program_id", "num_programs"),
        *(
            "exp",
            "exp2",
            "log2",
            "fma",
            "rsqrt",
            "split",
            "where",
            "reshape",
            "permute",
            "join",
            "full",
            "broadcast",
        ),
    )
    gl = SimpleNamespace(
        NVMMADistributedLayout=gl.NVMMADistributedLayout,
        DotOperandLayout=gl.DotOperandLayout,
        SliceLayout=gl.SliceLayout,
        BlockedLayout=gl.BlockedLayout,
        convert_layout=lambda given, layout: given,
        SwizzledSharedLayout=gl.SwizzledSharedLayout,
        allocate_shared_memory=_Shared,
        **{name: _without_layout(name) for name in _same},
    )
    jit = triton.jit

    def constexpr_function(function):
        """Return the function."""
        return function

    def _as_fp32(bits):
        return bits.to(tl.float32, bitcast=True)

    def masked(words, mask, rest):
        """See above."""
        return words & mask | rest

    def halves(pairs):
        """Return fp32, whose leading bits are those of a bf16."""
        return tl.join(_as_fp32(pairs << 16), _as_fp32(pairs & -65536))

    def paired(numbers):
        """Return the numbers, which are fp32."""
        return numbers

    def unpaired(pairs, layout):
        """See above."""
        return pairs

    def signed_halves(pairs, less):
        """See above."""
        return halves(pairs) - halves(less)

    def small_halves(pairs):
        """See above."""
        return halves(pairs) * 2.0**127

    def eighth_halves(pairs):
        """See above."""
        return halves(pairs) * 2.0**120

    def looked_up(words):
        """See above."""
        found = []
        for pair in range(4):
            low, high = (words >> place & 15 for place in (4 * pair, 4 * pair + 16))
            both = [words * 0, words * 0]
            for code, half in enumerate(_BF16):
                both = [
                    tl.where(codes == code, half, known)
                    for codes, known in zip((low, high), both, strict=True)
                ]
            found.append(both[0] | both[1] << 16)
        return tuple(found)

    def mma_v2(left, right, sums):
        """Return left @ right + sums."""
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")

    def warpgroup_mma_wait(num_outstanding, deps):
        """Return the sums, which are there."""
        return deps[0] if len(deps) == 1 else deps

    def described(tensor: Any, rows: int, columns: int) -> Any:
        """See above."""
        return triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(tensor, [rows, columns])

    def multiply(left, right):
        """Multiply in fp32, because the interpreter multiplies nothing narrower."""
        return (left.to(tl.float32) * right.to(tl.float32)).to(left.dtype)
