"""Decodes the bytes of a quantised KV cache for tensor cores: two int16 words, which are four bytes, at a time.

The plain twin is `kv_rows.decoded`. Numbers come out in fp16, which holds those of both kinds of rows exactly. They
have to be multiplied with `byte_unit`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-redef,untyped-decorator,unreachable"
import triton.language as tl
from triton import knobs
from triton.language import target_info

from engine.kernels.triton.gluon import constexpr_function, gl, jit
from engine.kernels.triton.kv_rows import decoded


@constexpr_function
def converts_bytes():
    """Return whether the GPU has an instruction that converts E4M3 to fp16."""
    return target_info.cuda_capability_geq(8, 9)


@constexpr_function
def byte_unit(fp8):
    """Return the factor by which decoded numbers have to be multiplied."""
    return 256.0 if fp8 and not converts_bytes() else 1.0


@jit
def _decoded(words, instructions: tl.constexpr):
    """Return the two results, fp16, of instructions for two words in one register."""
    return gl.inline_asm_elementwise(
        instructions, "=&r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@jit
def converted(words, HALVES: tl.constexpr):
    """Return what `byte_halves` (HALVES) or `byte_neighbours` does, by an instruction that converts E4M3."""
    return _decoded(
        words,
        "{ .reg .b16 one, two; .reg .b32 a, b; mov.b32 {one, two}, $2; cvt.rn.f16x2.e4m3x2 a, one; "
        "cvt.rn.f16x2.e4m3x2 b, two; "
        + ("prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; }" if HALVES else "mov.b32 $0, a; mov.b32 $1, b; }"),
    )  # fmt: skip


@jit
def shifted(words, HALVES: tl.constexpr):
    """Do the same without that instruction: the bits of E4M3, placed in an fp16, are the number divided by 2 ** 8."""
    return _decoded(
        words,
        "{ .reg .b32 a, b, s, t; "
        + ("shl.b32 s, $2, 8; mov.b32 t, $2; " if HALVES else "prmt.b32 s, $2, 0, 0x1404; prmt.b32 t, $2, 0, 0x3424; ")
        + "shr.b32 a, s, 1; and.b32 a, a, 0x3F803F80; lop3.b32 a, s, 0x80008000, a, 0xEA; "
        "shr.b32 b, t, 1; and.b32 b, b, 0x3F803F80; lop3.b32 b, t, 0x80008000, b, 0xEA; "
        "mov.b32 $0, a; mov.b32 $1, b; }",
    )  # fmt: skip


@jit
def signed(words, HALVES: tl.constexpr):
    """Do the same for signed bytes: the lowest eight bits of the fp16 of 1,024 plus a number are that number."""
    return _decoded(
        words,
        "{ .reg .b32 a, b, t, less; xor.b32 t, $2, 0x80808080; mov.b32 less, 0xE480E480; "
        + (
            "lop3.b32 a, t, 0x00FF00FF, 0x64006400, 0xEA; prmt.b32 b, t, 0x64646464, 0x4341; "
            if HALVES
            else "prmt.b32 a, t, 0x64646464, 0x4140; prmt.b32 b, t, 0x64646464, 0x4342; "
        )
        + "add.rn.f16x2 $0, a, less; add.rn.f16x2 $1, b, less; }",
    )


@jit
def _bytes(words, FP8: tl.constexpr, HALVES: tl.constexpr):
    if FP8 and converts_bytes():
        return converted(words, HALVES)
    elif FP8:  # noqa: RET505 - a kernel is compiled for one of them
        return shifted(words, HALVES)
    else:
        return signed(words, HALVES)


@jit
def byte_halves(words, FP8: tl.constexpr):
    """Return the numbers of the lower bytes of int16 words, and those of the upper ones."""
    return _bytes(words, FP8, True)


@jit
def byte_neighbours(words, FP8: tl.constexpr):
    """Return the two numbers of every even word along the first axis, one below the other, and those of odd words."""
    return _bytes(words, FP8, False)


@jit
def quick_log2(x):
    """Return the logarithm to base 2 of a normal fp32, by one instruction."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


if knobs.runtime.interpret:

    def byte_unit(fp8):
        """Return 1."""
        return 1.0

    def byte_halves(words, FP8):
        """Return fp32."""
        return decoded(words & 0xFF, FP8), decoded((words >> 8) & 0xFF, FP8)

    def byte_neighbours(words, FP8):
        """Return fp32."""
        count, width = words.shape
        found = []
        for each in tl.split(tl.permute(tl.reshape(words, [count // 2, 2, width]), [0, 2, 1])):
            both = tl.join(*byte_halves(each, FP8))
            found.append(tl.reshape(tl.permute(both, [0, 2, 1]), [count, width]))
        return tuple(found)

    def quick_log2(x):
        """See above."""
        return tl.log2(x)
