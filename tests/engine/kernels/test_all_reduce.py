"""What ranks send each other in a decode step, in Triton's interpreter, between processes that share memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from engine.execute.cuda.add_norm import AddNorm
from engine.execute.cuda.all_reduce import AllReduce
from engine.execute.cuda.all_reduce_layout import AllReduceLayout
from engine.execute.cuda.prefill_all_reduce import PromptSums
from engine.execute.cuda.slots import StepInput
from engine.kernels.triton import all_reduce
from models.network import NormWeights
from models.spec import Norm
from tests.engine.kernels.two_ranks import memory_in, run_ranks

CPU = torch.device("cpu")
PLAN = AllReduceLayout(ranks=3, rows=3, size=700, columns=6, vocab=17, layers=2)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 in the interpreter only")


def exchange(rank: int, folder: Path, plan: AllReduceLayout) -> AllReduce:
    memory = memory_in(folder, plan.ranks, plan.nbytes)
    found = AllReduce(memory, plan, rank, CPU, torch.float32, False)
    found.wait_at_most(60.0)  # looks, in the interpreter: as good as for ever
    return found


def given(rank: int, plan: AllReduceLayout, step: int) -> StepInput:
    """Three slots, the tokens of which rank 0 alone knows."""
    tokens = torch.tensor([step, 16 - step, 8]) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    nothing = torch.zeros(1, dtype=torch.int32)
    active = torch.tensor([2, 0, -1], dtype=torch.int32)
    counters = torch.zeros(3, 2, dtype=torch.int64)
    return StepInput(active, tokens, counters, (nothing.view(1, 1),), nothing, nothing, nothing)


def numbers(rank: int, step: int, place: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * place + rank)
    found = torch.randn(shape, generator=generator)
    found[..., : shape[-1] // 3] *= (place + rank) % 2  # words of zeros, too
    return found


def steps(rank: int, folder: Path, plan: AllReduceLayout, count: int) -> list[tuple[Tensor, ...]]:
    """What a rank has of each step: rows and tokens, tokens of the slots, sums, logits."""
    peers, found = exchange(rank, folder, plan), []
    for step in range(count):
        rows = 2 + step % 2
        told = given(rank, plan, step)
        first = rank * plan.columns
        rows_and_tokens = [x.clone() for x in peers.begin(told, rows, first, first + plan.columns)]
        sums = []
        for place in range(plan.sums):
            x, residual = (numbers(r, step, place, rows, plan.size) for r in (rank, 9))
            if place % 2:
                peers.add(x, residual, residual)
                sums.append(residual)
            else:
                parts = torch.stack((x - 1.0, torch.ones_like(x)))
                out = torch.empty_like(x)
                peers.add(parts, None, out)
                sums.append(out)
        logits = peers.join_columns(numbers(rank, step, 77, rows, plan.columns)).clone()
        peers.count(told.active[:rows], told.counters)
        found.append((*rows_and_tokens, told.token, torch.stack(sums), logits, told.counters))
    assert not peers.is_lost
    return found


def test_all_have_the_sums_and_the_first_the_logits(tmp_path: Path) -> None:
    of_each = run_ranks(PLAN.ranks, steps, tmp_path, PLAN, 4)
    for step, (one, *others) in enumerate(zip(*of_each, strict=True)):
        rows = 2 + step % 2
        assert all(torch.equal(one[3], other[3]) for other in others), "the same bits"
        for place, found in enumerate(one[3]):
            *parts, residual = (numbers(r, step, place, rows, PLAN.size) for r in (*range(PLAN.ranks), 9))
            torch.testing.assert_close(found, sum(parts) + (residual if place % 2 else 0.0))
        parts = [numbers(rank, step, 77, rows, PLAN.columns) for rank in range(PLAN.ranks)]
        assert torch.equal(one[4], torch.cat(parts, 1)[:, : PLAN.vocab])
        tokens = [8, step]
        for rank, (own_row, own_token, slots, *_) in enumerate((one, *others)):
            assert rank == 0 or slots.tolist() == [step, 0, 8], "the slots of this step"
            held = [token // PLAN.columns == rank for token in tokens]
            assert own_row.tolist()[:2] == [row if there else -1 for row, there in enumerate(held)]
            assert [int(own_token[row]) for row in (0, 1) if held[row]] == [
                token % PLAN.columns for token, there in zip(tokens, held, strict=True) if there
            ]
            assert (own_row[2:] == -1).all()
        assert all(each[5].tolist() == [[1, 1], [0, 0], [1, 1]] for each in (one, *others))


def test_who_does_not_come_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "LOOKS", tl.constexpr(16))
    peers = exchange(0, tmp_path, PLAN)
    peers.wait_at_most(0.000_000_02)  # 20 looks
    told = given(0, PLAN, 0)
    peers.begin(told, 2, 0, 9)
    assert not peers.is_lost, "rank 0 waits for nobody's tokens"
    peers.sum(torch.ones(2, PLAN.size))
    assert peers.is_lost
    peers.wait_at_most(1e9)
    peers.sum(torch.ones(2, PLAN.size))  # and the others of the step at once


def test_who_is_told_to_gives_up(tmp_path: Path) -> None:
    peers = exchange(1, tmp_path, PLAN)
    peers.give_up()
    peers.begin(given(1, PLAN, 0), 2, 9, 17)
    assert peers.is_lost


class Nobody:
    """Where more rows are summed than there is room for."""

    def sum(self, x: Tensor) -> Tensor:
        return x + 1.0

    def join_columns(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def norms(dtype: torch.dtype) -> tuple[AddNorm, AddNorm, AddNorm]:
    weights = [NormWeights(numbers(rank, 0, 5, PLAN.size).to(dtype)) for rank in range(2)]
    usual = Norm(1e-6), weights[0]
    return (
        AddNorm(None, 1.0, usual),
        AddNorm((Norm(1e-5, rounds_last=True), weights[1]), 0.5, None),
        AddNorm((Norm(1e-5, offset=1.0), weights[1]), 1.0, usual),
    )


def normed_sums(
    rank: int, folder: Path, plan: AllReduceLayout, dtype: torch.dtype, pulls: bool
) -> list[list[Tensor]]:
    """`out` and `total` of each sum, twice with each norm: of different numbers of rows, also of parts of products."""
    memory = memory_in(folder, plan.ranks, plan.nbytes)
    peers = AllReduce(memory, plan, rank, CPU, dtype, False)
    peers.wait_at_most(60.0)
    sums = PromptSums(peers, Nobody(), CPU, dtype) if pulls else peers
    found = []
    for step, between in enumerate(norms(dtype) * 2):
        rows = 1 + step % 3
        if not pulls and step % 3 == 0:
            peers.begin(given(rank, plan, step), 2, 0, 9)
        x, residual = (numbers(r, step, 1, rows, plan.size).to(dtype) for r in (rank, 9))
        if pulls and step % 2 and (place := sums.place(rows)) is not None:
            x = place.copy_(x)
        elif not pulls and step % 2:
            x = torch.stack((x.float() - 1.0, torch.ones(x.shape)))
        total = torch.empty_like(residual)
        out = total if between.norm is None else torch.empty_like(residual)
        sums.add_norm(x, residual, between, out, total)
        found.append([out, total])
    assert not peers.is_lost
    if pulls:  # more rows than there is room for
        many = torch.zeros(plan.prompt + 1, plan.size, dtype=dtype)
        out, total = torch.empty_like(many), torch.empty_like(many)
        assert sums.place(len(many)) is None
        sums.add_norm(many, many, AddNorm(None, 1.0, None), out, total)
        assert (total == 1.0).all()
    return found


NORMED = [(dtype, pulls) for dtype in (torch.float32, torch.bfloat16) for pulls in (False, True)]


def normed(dtype: torch.dtype) -> AllReduceLayout:
    return replace(PLAN, prompt=3, itemsize=dtype.itemsize)


def each_normed(rank: int, folder: Path) -> list[list[list[Tensor]]]:
    """`normed_sums` of each of NORMED, in the same processes: starting them takes longer than all else."""
    return [
        normed_sums(rank, folder / str(number), normed(dtype), dtype, pulls)
        for number, (dtype, pulls) in enumerate(NORMED)
    ]


@pytest.fixture(scope="module")
def sums_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[list[Tensor]]]]:
    folder = tmp_path_factory.mktemp("sums")
    for number in range(len(NORMED)):
        (folder / str(number)).mkdir()
    return run_ranks(PLAN.ranks, each_normed, folder)


@pytest.mark.parametrize("number", range(len(NORMED)))
def test_sums_are_normed_as_on_one_gpu(sums_of_ranks: list[list[list[list[Tensor]]]], number: int) -> None:
    """Of prompts, which ranks read, and of decode steps, which they send."""
    dtype, _ = NORMED[number]
    plan, of_each = normed(dtype), [found[number] for found in sums_of_ranks]
    for step, (between, (one, *others)) in enumerate(
        zip(norms(dtype) * 2, zip(*of_each, strict=True), strict=True)
    ):
        rows = 1 + step % 3
        for other in others:
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), "the same bits"
        *parts, residual = (numbers(r, step, 1, rows, plan.size).to(dtype) for r in (*range(plan.ranks), 9))
        total = torch.stack(parts).float().sum(0)
        if between.post is not None:
            norm, weights = between.post
            total = F.rms_norm(total, (plan.size,), None, norm.eps) * (weights.weight.float() + norm.offset)
        total = (between.scale * total + residual.float()).to(dtype)
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(one[1], total, **near)
        if between.norm is not None:
            norm, weights = between.norm
            out = F.rms_norm(one[1].float(), (plan.size,), None, norm.eps) * weights.weight.float()
            torch.testing.assert_close(one[0], out.to(dtype), **near)
