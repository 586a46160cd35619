"""Experts in host memory beside the fused kernels, in fp32 and in Triton's interpreter."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.attention.flash import FlashBackend
from engine.attention.sdpa import SdpaBackend
from engine.batch import Span, StepBatch
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.fused_program import FusedDecoder, unsupported
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.padded_prefill import PaddedPrefill
from engine.execute.cuda.plain_program import PlainDecoder
from engine.execute.cuda.prefill import FusedPrefill
from engine.execute.cuda.slots import Slots
from engine.kernels.native import library as native
from engine.kernels.native.library import Pool
from models.network import Network
from models.spec import Experts, FeedForward, each_layer
from models.weights.block_formats import Kind
from tests.engine import fake_flash
from tests.engine.host_split import split
from tests.engine.kernels.test_delta_steps import SQUARED
from tests.engine.kernels.test_experts import ERNIE, GEMMA, GEMMA_LAYER, GPT_OSS, QWEN, a_network, a_spec
from tests.engine.kernels.test_rows import BLOCKS, SLOTS, Case

EVEN = Experts(4, 2, FeedForward(32))
"""Whole blocks."""
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"),
    pytest.mark.skipif(native.problem() is not None, reason="needs the native kernels"),
]


@pytest.fixture(scope="module")
def whole() -> Network:
    changes: dict[int, dict[str, Any]] = {2: {"residual_scale": 0.5}, 3: GEMMA_LAYER}
    spec = a_spec(QWEN, ERNIE, GPT_OSS, GEMMA, SQUARED)
    return a_network(each_layer(spec, lambda index, layer: replace(layer, **changes.get(index, {}))))


@pytest.fixture(scope="module")
def halved(whole: Network) -> Network:
    """One layer of experts on the device, others in host memory: with a shared one beside, with biases and a clamp,
    with norms, without gates."""
    found = split(whole, {1, 2, 3, 4})
    assert unsupported(found) is None
    return found


@pytest.fixture(scope="module")
def host(halved: Network) -> HostExperts:
    found = HostExperts(halved, Pool(1))
    found.prepare(fetches=True, fixed=False)
    return found


def test_a_step_gives_what_it_gives_in_one_place_and_each_row_what_it_gets_alone(
    whole: Network, halved: Network, host: HostExperts
) -> None:
    case = Case(whole, [0, 3, 17])
    decoder = FusedDecoder(halved, case.cache, case.slots.given, pdl=False, on_host=host)
    plain = PlainDecoder(whole, case.cache, case.slots.given, "triton")
    slots = [2, 0]  # of three rows one has no sequence
    logits, cache = case.run(decoder, slots, 3)
    expected, written = case.run(plain, slots, 3)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, written, rtol=1e-4, atol=1e-4)
    for row, slot in enumerate(slots):
        assert torch.equal(case.run(decoder, [slot], 1)[0][0], logits[row])
    beside = PlainDecoder(halved, case.cache, case.slots.given, "triton", host)
    torch.testing.assert_close(case.run(beside, slots, 3)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "deterministic"), [(17, False), (16, True)])
def test_a_step_of_many_rows_gives_that_too(
    whole: Network, halved: Network, host: HostExperts, rows: int, deterministic: bool
) -> None:
    case = Case(whole, [0, 3, 17])
    case.slots = Slots(SLOTS, 32, BLOCKS, case.token)
    for slot, length in enumerate(case.lengths):
        case.slots.put(slot, length, length)
        case.slots.show(slot, case.tables[slot])
    found = []
    for decoder in (
        FusedDecoder(halved, case.cache, case.slots.given, False, deterministic, host),
        PlainDecoder(whole, case.cache, case.slots.given, "triton"),
    ):
        found.append(case.run(decoder, [2, 0, 1], rows)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fetches", [False, True])
def test_a_prompt_gives_what_it_gives_in_one_place(
    whole: Network, halved: Network, host: HostExperts, fetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "fetch_from", 37 if fetches else 38)
    tokens, found = 37, []
    for program in (FusedPrefill(whole), FusedPrefill(halved, host)):
        cache = KVCache.uniform(5, 4, 16, 1, 64, torch.float32, CPU)
        plan = SdpaBackend(cache).plan(StepBatch((Span((3, 1, 2), 0, tokens),)))
        with torch.inference_mode():
            found.append(program.forward(torch.arange(tokens) * 7 % 24, torch.arange(tokens), plan))
    if fetches:  # by the same kernels
        assert torch.equal(found[1], found[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_blocks_are_fetched_as_the_numbers_that_they_stand_for() -> None:
    whole = a_network(a_spec(EVEN, EVEN, hidden=32))
    halved = split(whole, {0, 1}, Kind.Q8_0)
    host = HostExperts(halved, Pool(1))
    host.prepare(fetches=True, fixed=True)
    found = []
    for program in (FusedPrefill(whole), FusedPrefill(halved, host)):
        with torch.inference_mode():
            found.append(program.forward(torch.arange(20), torch.arange(20), lambda _, q, k, v: q.clone()))
    errors = (found[1] - found[0]).norm(dim=1) / found[0].norm(dim=1)
    assert 1e-4 < errors.median() < 0.02  # that is what rounding weights to 8 bits does


@pytest.mark.parametrize("fetch_from", [11, None])
def test_padding_chooses_no_experts(
    whole: Network,
    halved: Network,
    host: HostExperts,
    fetch_from: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", fake_flash)
    monkeypatch.setattr(host, "fetch_from", fetch_from)
    rows, mixed = [], HostExperts.mix

    def noted(
        self: HostExperts, layer: int, x: torch.Tensor, ids: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        rows.append(int((ids[:, 0] >= 0).sum()))
        return mixed(self, layer, x, ids, *rest)

    monkeypatch.setattr(HostExperts, "mix", noted)
    span = Span((3, 1), 0, 10, tuple(range(10)), tuple(range(10)), wanted=True)
    found = []
    for network, experts in ((whole, None), (halved, host)):
        cache = KVCache.uniform(5, 5, 256, 1, 64, torch.float32, CPU)
        cache.kv.fill_(float("nan"))
        padded = PaddedPrefill(network, cache, FlashBackend(cache), 600, None, experts)
        found.append(padded.run((span,))[0].clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert rows == [10] * len(halved.on_host)
