"""Mixtures by themselves: what the reference gives, and to the bit the same in any company."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.execute.cpu.mixtures import NativeMixtures
from engine.execute.cuda import host_call
from engine.kernels.native.library import NativeError, NativeLibrary, Pool
from models.network import PLAIN, ExpertWeights, FeedForwardWeights, Linear, Weight
from models.reference.decoder import Decoder
from models.spec import Experts, FeedForward
from models.weights.block_formats import Kind
from tests.covering import each_value_once
from tests.engine.host_split import split
from tests.engine.native.test_native_decode import RoundedProduct
from tests.engine.native.test_native_experts import a_spec
from tests.models.test_reference import checkpoint, network_of

MIXTURES = {
    "silu": Experts(16, 3, FeedForward(96)),
    "gelu with biases": Experts(5, 5, FeedForward(32, activation="gelu_tanh", bias=True)),
    "clamped": Experts(4, 2, FeedForward(64, bias=True, limit=0.5, gain=1.702, up_offset=1.0)),
    "no gate": Experts(3, 1, FeedForward(64, gated=False, activation="relu")),
}
LAYER = 1
CASES = pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("silu", None),
        ("silu", Kind.Q4_1),
        ("gelu with biases", None),
        ("gelu with biases", Kind.Q8_0),
        ("clamped", None),
        ("clamped", Kind.Q8_0),
        ("no gate", None),
    ],
)


class Case:
    """The experts of a layer, the native kernels and the reference."""

    def __init__(self, name: str, kind: Kind | None, pool: Pool, variant: int | None = None) -> None:
        self.spec = MIXTURES[name]
        spec = a_spec(None, self.spec)
        tensors, names = checkpoint(spec, 1)
        self.network = split(network_of(spec, tensors, names), {LAYER}, kind)
        self.truth = Decoder(self.network, RoundedProduct())
        self.weights = self.network.on_host[LAYER]
        self.native = NativeMixtures({LAYER: (self.spec, self.weights)}, spec.hidden_size, pool, variant)

    def given(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids and shares of so many rows."""
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self.network.spec.hidden_size, generator=generator)
        ranks = torch.rand(rows, self.spec.count, generator=generator)
        ids = ranks.topk(self.spec.chosen).indices.int()
        return x, ids, torch.rand(rows, self.spec.chosen, generator=generator)

    def run(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out = torch.full((len(x), x.shape[1]), 7.0)
        self.native.run(self.native.job(LAYER, x, ids, shares, out))
        return out


@each_value_once
@CASES
@pytest.mark.parametrize("rows", [1, 2, 8, 40, 700])
def test_they_give_what_the_reference_gives(
    name: str, kind: Kind | None, rows: int, library: NativeLibrary, pool: Pool
) -> None:
    for variant in library.variants.values():
        case = Case(name, kind, pool, variant)
        x, ids, shares = case.given(rows)
        expected = case.truth._each(case.spec, case.weights, x, ids.long(), shares)
        errors = (case.run(x, ids, shares) - expected).norm(dim=1) / expected.norm(dim=1)
        # A number next to the middle of two int8 steps may go either way.
        assert errors.median() < 1e-5
        assert errors.max() < (1e-5 if kind is None else 0.02)


@CASES
def test_a_row_has_the_bits_that_it_has_alone_and_one_without_experts_none(
    name: str, kind: Kind | None, pool: Pool
) -> None:
    case = Case(name, kind, pool)
    x, ids, shares = case.given(40)
    ids[[3, 17]] = -1
    alone = [case.run(x[i : i + 1], ids[i : i + 1], shares[i : i + 1])[0] for i in range(40)]
    assert not alone[3].any()
    for rows in (2, 4, 8, 40):
        together = case.run(x[:rows], ids[:rows], shares[:rows])
        assert all(torch.equal(row, other) for row, other in zip(together, alone, strict=False))
    assert not case.run(x[:3], torch.full_like(ids[:3], -1), shares[:3]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_any_dtype(dtype: torch.dtype, pool: Pool) -> None:
    assert dtype in PLAIN
    case = Case("silu", None, pool)
    x, ids, shares = case.given(5)
    x = x.to(dtype)
    out = torch.zeros(x.shape)
    case.native.run(case.native.job(LAYER, x, ids, shares, out))
    assert torch.equal(out, case.run(x.float(), ids, shares))


def test_an_expert_that_there_is_not_shows(pool: Pool) -> None:
    case = Case("silu", None, pool)
    x, ids, shares = case.given(4)
    good = case.run(x, ids, shares)
    ids[1, 0], ids[2, 1] = case.spec.count, -5
    found = case.run(x, ids, shares)
    assert found[1:3].isnan().all()
    assert torch.equal(found[[0, 3]], good[[0, 3]])


def test_experts_that_do_not_fit_together_are_refused(pool: Pool) -> None:
    case = Case("silu", None, pool)
    odd = Linear((Weight.plain(torch.zeros(64, 40)),))
    first, *others = case.weights.experts
    wrong: ExpertWeights = replace(case.weights, experts=(FeedForwardWeights(first.gate_up, odd), *others))
    with pytest.raises(NativeError, match="do not fit together"):
        NativeMixtures({0: (case.spec, wrong)}, 64, pool)


class Driver:
    """Calls at once what CUDA's driver would call in the order of a stream."""

    def __init__(self, result: int) -> None:
        self.result = result

    def cuLaunchHostFunc(self, stream: int, function: int, data: int) -> int:
        assert stream == 7
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)
        return self.result


def test_a_driver_may_call_what_computes_a_job(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("silu", Kind.Q8_0, pool)
    x, ids, shares = case.given(9)
    out = torch.zeros(x.shape)
    job = case.native.job(LAYER, x, ids, shares, out)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(host_call, "_driver", lambda: Driver(0))
    host_call.enqueue_call(case.native.function, job)
    assert torch.equal(out, case.run(x, ids, shares))
    monkeypatch.setattr(host_call, "_driver", lambda: Driver(801))
    with pytest.raises(RuntimeError, match="error 801"):
        host_call.enqueue_call(case.native.function, job)
