"""Products of the native kernels against the numbers that the gguf package reads from the same bytes, in float64.

The weights are exact; what the kernels round is the activation, to int8 with one scale for 32 numbers. Rounding moves
a number by at most half a step, so a product is off by at most

    sum over blocks of  step / 2 * sum of |weights of the block|        step = largest |x| of the block / 127

That is the bound of every test here, with a little room for sums in fp32. Random numbers come to about a sixth of it:
0.55% of the norm.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.kernels.native.library import Matrix, NativeLibrary, Pool

Array = np.ndarray[Any, np.dtype[Any]]
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4, *PLAIN)
SMALL = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.MXFP4)
"""Blocks of 32 numbers."""
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
TYPICAL = {kind: 1e-6 if kind in PLAIN else 0.0075 for kind in KINDS}
"""The most that the relative error (of norms) of a product of random numbers may be."""


@dataclass(frozen=True)
class Weight:
    """Bytes of rows, at any address, and the numbers in them."""

    data: Array
    """uint8 [rows, row bytes]"""
    numbers: Array
    """float64 [rows, columns]"""
    matrix: Matrix


def place(data: Array, kind: Kind, columns: int, numbers: Array, offset: int = 0) -> Weight:
    """A weight that begins `offset` bytes into its memory and ends with it: a sanitizer sees what reads on."""
    memory = np.zeros(offset + data.nbytes, dtype=np.uint8)
    put = memory[offset:].reshape(data.shape)
    put[:] = data
    matrix = Matrix(put.ctypes.data, data.shape[1], int(kind), data.shape[0], columns)
    return Weight(put, numbers, matrix)


def random_weight(kind: Kind, rows: int, columns: int, seed: int = 0, offset: int = 0) -> Weight:
    """Random digits and sensible scales: every bit pattern of the digits occurs."""
    random = np.random.default_rng(seed)
    if kind in PLAIN:
        values = random.standard_normal((rows, columns)).astype(np.float32)
        if kind == Kind.F32:
            data = values.view(np.uint8)
        elif kind == Kind.F16:
            data = values.astype(np.float16).view(np.uint8)
        else:
            data = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy()
        data = data.reshape(rows, -1)
    else:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        halves = 0.1 * random.standard_normal((rows, columns // block, 2)).astype(np.float32)
        if kind == Kind.MXFP4:
            blocks[..., 0] = random.integers(121, 125, blocks.shape[:2])
        where = {Kind.MXFP4: (), Kind.Q6_K: (208,), Kind.Q8_0: (0,), Kind.Q4_0: (0,)}.get(kind, (0, 2))
        for index, at in enumerate(where):
            half = halves[..., index : index + 1].astype(np.float16)
            blocks[..., at : at + 2] = np.ascontiguousarray(half).view(np.uint8)
        data = blocks.reshape(rows, -1)
    return place(data, kind, columns, numbers_of(data, kind), offset)


def numbers_of(data: Array, kind: Kind) -> Array:
    """float64, as the gguf package reads them."""
    with np.errstate(all="ignore"):
        numbers: Array = gguf.dequantize(data, kind).astype(np.float64)
    return numbers.reshape(len(data), -1)


def multiply_many(pool: Pool, variant: int, weight: Weight, x: Array) -> Array:
    """x [count, columns] -> [count, rows]"""
    out = np.full((len(x), len(weight.data)), np.nan, dtype=np.float32)
    with pool.held() as handle:
        done = pool.library.functions.ct_products(
            handle, variant, weight.matrix, len(x), x.ctypes.data, out.ctypes.data
        )
    assert done
    return out


def multiply(pool: Pool, variant: int, weight: Weight, x: Array) -> Array:
    """x [columns] -> [rows]"""
    product: Array = multiply_many(pool, variant, weight, x[None])[0]
    return product


def rounds(pool: Pool, variant: int, kind: Kind) -> bool:
    """Whether the variant rounds the inputs of such weights to bf16."""
    return kind == Kind.BF16 and variant == pool.library.variants.get("avx512bf16")


def bound(weight: Weight, kind: Kind, x: Array, rounded: bool = False) -> Any:
    """How far each output may be from the exact product; `rounded`: of inputs that are rounded to bf16."""
    absolute = np.abs(weight.numbers) * np.abs(x.astype(np.float64))
    # fp32 sums in some order, and the exact sum of large terms that cancel
    sums = 2e-6 * absolute.sum(1) + 1e-30
    if kind in PLAIN:
        return sums + (2.0**-8 * absolute.sum(1) if rounded else 0.0)
    steps = np.abs(x.astype(np.float64)).reshape(-1, 32).max(1) / 127
    weights = np.abs(weight.numbers).reshape(len(weight.numbers), -1, 32).sum(2)
    extra = 2e-6 * terms(weight, x)
    return sums + extra + 0.501 * (weights * steps).sum(1)


def terms(weight: Weight, x: Array) -> Any:
    """The size of what is added up inside: digits and minima are summed apart before they cancel."""
    largest = np.abs(x.astype(np.float64)).max()
    return np.abs(weight.numbers).max(1) * 8 * largest * len(x)


@pytest.fixture(params=["portable", "avx2", "avxvnni", "avx512", "avx512bf16", "dotprod", "i8mm"])
def variant(request: pytest.FixtureRequest, library: NativeLibrary) -> int:
    if request.param not in library.variants:
        pytest.skip(f"this machine does not run {request.param}")
    return library.variants[request.param]


def in_turns(columns: int, *shape: int) -> Array:
    """Return random numbers whose blocks of 32 columns have very different sizes."""
    x = np.random.default_rng(shape[0]).standard_normal((*shape, columns)).astype(np.float32)
    x *= np.repeat(np.float32(10.0) ** np.arange(columns // 32) % 977, 32)
    return x


def extreme_weight(kind: Kind, byte: int, rows: int = 5) -> Weight:
    """Return rows of two blocks whose digits all consist of `byte` and whose scales are 0.5."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.full((rows, 2, size), byte, dtype=np.uint8)
    for at in {Kind.Q6_K: (208,), Kind.Q8_0: (0,), Kind.Q4_0: (0,)}.get(kind, (0, 2)):
        data[..., at : at + 2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
    flat = data.reshape(rows, -1)
    return place(flat, kind, 2 * block, numbers_of(flat, kind))


# Up to 8 inputs are multiplied one by one, more with panels of 16 rows; 13 leave more than half a tile of 8. Each pair
# of a number of rows, of inputs and of blocks occurs.
SHAPES = [
    (rows, count, (1, 2, 5)[i % 3])
    for i, (count, rows) in enumerate(product((1, 2, 3, 8, 9, 13), (1, 3, 4, 16, 37)))
]


@every_kind
def test_products_are_within_what_rounding_the_activation_explains(
    pool: Pool, variant: int, kind: Kind
) -> None:
    for rows, count, blocks in SHAPES:
        columns = blocks * max(gguf.GGML_QUANT_SIZES[kind][0], 32)
        weight = random_weight(kind, rows, columns, seed=rows, offset=blocks % 2)
        x = in_turns(columns, count)
        found = multiply_many(pool, variant, weight, x)
        assert found.shape == (count, rows)
        for one, given in zip(found, x, strict=True):
            error = np.abs(one - weight.numbers @ given.astype(np.float64))
            most = bound(weight, kind, given, rounds(pool, variant, kind))
            assert (error <= most).all(), (rows, count, blocks)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_rows_of_any_length(pool: Pool, variant: int, kind: Kind) -> None:
    for columns in (1, 7, 8, 15, 17, 100):
        weight = random_weight(kind, 5, columns)
        x = np.random.default_rng(3).standard_normal(columns).astype(np.float32)
        error = np.abs(multiply(pool, variant, weight, x) - weight.numbers @ x.astype(np.float64))
        assert (error <= bound(weight, kind, x, rounds(pool, variant, kind))).all(), columns


@every_kind
def test_the_typical_error(pool: Pool, variant: int, kind: Kind) -> None:
    weight = random_weight(kind, 128, 1024)
    x = np.random.default_rng(1).standard_normal(1024).astype(np.float32)
    exact = weight.numbers @ x.astype(np.float64)
    error = np.linalg.norm(multiply(pool, variant, weight, x) - exact) / np.linalg.norm(exact)
    assert error < (2e-3 if rounds(pool, variant, kind) else TYPICAL[kind])


@every_kind
def test_any_address_will_do_and_nothing_past_the_end_matters(pool: Pool, variant: int, kind: Kind) -> None:
    x = np.random.default_rng(2).standard_normal(512).astype(np.float32)
    results = [multiply(pool, variant, random_weight(kind, 7, 512, offset=o), x) for o in (0, 1, 2, 31, 32)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@every_kind
def test_a_row_has_the_same_product_whatever_is_beside_it(pool: Pool, variant: int, kind: Kind) -> None:
    weight = random_weight(kind, 40, 512)
    x = np.random.default_rng(3).standard_normal((40, 512)).astype(np.float32)
    alone = np.stack([multiply(pool, variant, weight, row) for row in x])
    for count in (*range(2, 10), 12, 13, 21, 36, 40):
        np.testing.assert_array_equal(multiply_many(pool, variant, weight, x[-count:]), alone[-count:])


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in PLAIN], ids=lambda kind: kind.name)
def test_extreme_digits_do_not_overflow(pool: Pool, variant: int, kind: Kind) -> None:
    """Every product at its largest and of one sign: what is added up in 16 bits must fit them."""
    for byte in (0x00, 0x80, 0x81, 0xFF):
        weight = extreme_weight(kind, byte)
        x = np.ones((10, weight.numbers.shape[1]), dtype=np.float32)
        x[1::2] = -1.0
        exact = x.astype(np.float64) @ weight.numbers.T
        for row in (0, 1):
            alone = multiply(pool, variant, weight, x[row])
            np.testing.assert_allclose(alone, exact[row], rtol=1e-5, atol=1e-4)
        rough = 1e-5 * np.abs(weight.numbers).sum(1).max() + 1e-4
        for count in (2, 10):
            together = multiply_many(pool, variant, weight, x[:count])
            np.testing.assert_allclose(together, exact[:count], rtol=1e-5, atol=rough)


@every_kind
def test_zeros_give_zeros_and_what_is_no_number_stays_none(pool: Pool, variant: int, kind: Kind) -> None:
    weight = random_weight(kind, 20, 512)
    assert not multiply(pool, variant, weight, np.zeros(512, dtype=np.float32)).any()
    for bad, count in product((np.nan, np.inf, -np.inf), (1, 3, 11)):
        x = np.ones((count, 512), dtype=np.float32)
        x[count // 2, 300] = bad
        found = multiply_many(pool, variant, weight, x)
        assert not np.isfinite(found[count // 2]).any(), (bad, count)
        others = np.delete(found, count // 2, axis=0)
        assert np.isfinite(others).all(), (bad, count)
        assert (others == others[:1]).all()


@every_kind
def test_single_rows_have_the_numbers_of_the_gguf_package(library: NativeLibrary, kind: Kind) -> None:
    weight = random_weight(kind, 9, 768)
    out = np.zeros(768, dtype=np.float32)
    for row in range(9):
        assert library.functions.ct_dequantize_row(weight.matrix, row, out.ctypes.data)
        np.testing.assert_allclose(out, weight.numbers[row], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 63, 1000])
def test_any_number_of_threads_gives_the_same(library: NativeLibrary, rows: int) -> None:
    weight = random_weight(Kind.Q4_1, rows, 96)
    x = np.random.default_rng(4).standard_normal(96).astype(np.float32)
    alone, *others = (multiply(Pool(threads, library), library.best, weight, x) for threads in (1, 2, 3, 5))
    for other in others:
        np.testing.assert_array_equal(other, alone)


def test_what_does_not_fit_together_is_refused(pool: Pool) -> None:
    weight, x, out = random_weight(Kind.Q8_0, 2, 64), np.zeros(64, np.float32), np.zeros(2, np.float32)
    address, row_bytes = weight.matrix.data, weight.matrix.row_bytes
    for wrong in (
        Matrix(address, row_bytes, 99, 2, 64),
        Matrix(address, row_bytes, -1, 2, 64),
        Matrix(address, row_bytes, 8, 2, 63),
        Matrix(address, row_bytes - 1, 8, 2, 64),
        Matrix(address, row_bytes, 8, 0, 64),
        Matrix(None, row_bytes, 8, 2, 64),
    ):
        with pool.held() as handle:
            call, best = pool.library.functions.ct_products, pool.library.best
            assert not call(handle, best, wrong, 1, x.ctypes.data, out.ctypes.data)
            assert not call(handle, best, weight.matrix, 0, x.ctypes.data, out.ctypes.data)
            assert not call(handle, best, weight.matrix, -1, x.ctypes.data, out.ctypes.data)
            assert not call(handle, 99, weight.matrix, 1, x.ctypes.data, out.ctypes.data)
