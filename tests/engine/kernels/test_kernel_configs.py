"""The choices of the tables: the same as when they were measured."""

from collections.abc import Iterator
from dataclasses import astuple
from hashlib import sha256

import pytest

pytest.importorskip("triton")

from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.tuning.store import Rule, load_table
from models.weights.block_formats import Kind

SIZES = (
    512,
    768,
    1024,
    1152,
    1536,
    2048,
    2560,
    3072,
    4096,
    5120,
    6144,
    8192,
    12_288,
    17_408,
    32_768,
    151_936,
)
ROWS = (1, 2, 3, 4, 5, 8, 9, 16)
KINDS = (
    *(
        None,
        Kind.Q4_0,
        Kind.Q4_1,
        Kind.Q5_0,
        Kind.Q5_1,
        Kind.Q8_0,
        Kind.Q4_K,
        Kind.Q5_K,
        Kind.Q6_K,
        Kind.MXFP4,
    ),
    *(
        Kind.Q2_K,
        Kind.Q3_K,
        Kind.IQ4_NL,
        Kind.IQ4_XS,
        Kind.INT4_64,
        Kind.INT4_128,
        Kind.INT8_32,
        Kind.FP8_128,
    ),
)


def choices() -> Iterator[object]:
    cuts = KernelConfigs()
    for outputs in SIZES:
        for inputs in SIZES:
            for gated in (False, True):
                for kind in KINDS:
                    for rows in ROWS:
                        yield tuple(astuple(cuts.product(rows, outputs, inputs, gated, kind)))
                    if kind is not None:
                        yield tuple(astuple(cuts.experts(outputs, inputs, 8, gated, kind)))
                for apart in (False, True):
                    for rows in (16, 32, 64, 128):
                        wide = cuts.wide(rows, outputs, inputs, gated, apart)
                        group = cuts.warpgroups(rows, outputs, inputs, gated, apart)
                        yield wide and tuple(astuple(wide)), group and tuple(astuple(group))


def test_the_choices_of_all_shapes_are_the_measured_ones() -> None:
    """A hash, because there are 80,000 of them; after a change of the tables it is what the change prints here."""
    found = sha256()
    for choice in choices():
        found.update(repr(choice).encode())
    assert found.hexdigest()[:16] == "a3196a3246b559e9"


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ((1, 4096, 1024, False, None), (1, 4, 2, 2, 1)),
        ((8, 12_800, 5120, True, None), (2, 4, 2, 2, 1)),
        ((16, 4096, 1024, False, None), (1, 4, 1, 4, 1)),
        ((1, 1024, 8192, False, None), (2, 8, 1, 3, 1)),
        ((2, 12_288, 4096, True, Kind.Q4_K), (1, 4, 2, 2, 4)),
        ((4, 12_288, 4096, True, Kind.Q4_K), (1, 4, 4, 2, 4)),
        ((5, 4096, 12_288, False, Kind.Q6_K), (1, 8, 1, 3, 4)),
        ((16, 4096, 64, False, Kind.Q8_0), (1, 1, 1, 2, 1)),
    ],
)
def test_a_few_choices(asked: tuple[int, int, int, bool, Kind | None], numbers: tuple[int, ...]) -> None:
    assert astuple(KernelConfigs().product(*asked)) == numbers


def test_the_first_rule_that_fits_is_taken() -> None:
    rule = Rule({"rows": (1, 8), "inputs": (2048, float("inf"))}, (1,), False)
    assert rule.fits({"rows": 8, "inputs": 1 << 20, "outputs": 1})
    assert not rule.fits({"rows": 9, "inputs": 2048})
    assert not rule.fits({"rows": 1, "inputs": 2047})
    assert load_table().rule("wide", rows=128, lines=1, weights=1, gated=0, apart=0).numbers is None
