"""Recurrences of prompts by kernels against the reference, on the GPU or else in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.attention import sdpa
from engine.attention.walks import WalkStep
from engine.batch import NONE
from engine.kernels.triton.recurrence import gated_norm, walk_rows
from engine.kernels.walks import Walks, walk_shape
from models.network import DeltaNetWeights, Linear, Mamba2Weights, NormWeights, Weight
from models.recurrences import DeltaNet, Mamba2, Recurrence
from models.reference import delta_net, mamba2
from tests.engine import test_hybrid_engine as engine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS: dict[str, Recurrence] = {
    "delta": DeltaNet(2, 4, 16, 16),
    "alternating": DeltaNet(2, 6, 16, 16, conv_width=3, alternating=True),
    "odd": DeltaNet(1, 2, 24, 40),
    "small": DeltaNet(1, 1, 8, 8, conv_width=2),
    "wide": DeltaNet(1, 1, 128, 8),
    "mamba": Mamba2(4, 16, 16, 2),
    "odd mamba": Mamba2(2, 24, 48, 1, conv_bias=False, step_limits=(0.02, 0.1)),
}


def random_weights(spec: Recurrence, seed: int = 0) -> DeltaNetWeights | Mamba2Weights:
    """States forget half of what they hold in 1 to 100 rows or so."""
    torch.manual_seed(seed)
    empty = Linear((Weight.plain(torch.empty(0, 0)),))
    heads = walk_shape(spec).heads
    filters = torch.randn(spec.conv_size, spec.conv_width, device=DEVICE) / 2
    dt_bias, decay = torch.randn(heads, device=DEVICE) - 4, -torch.rand(heads, device=DEVICE) * 16
    if isinstance(spec, DeltaNet):
        norm = NormWeights(torch.ones(spec.value_dim, device=DEVICE))
        return DeltaNetWeights(empty, empty, filters, dt_bias, decay, norm, empty)
    skip, bias = torch.randn(heads, device=DEVICE), torch.randn(spec.conv_size, device=DEVICE)
    return Mamba2Weights(empty, filters, dt_bias, decay, skip, empty, bias if spec.conv_bias else None)


def walked(
    spec: Recurrence, weights: DeltaNetWeights | Mamba2Weights, *given: Tensor
) -> tuple[Tensor, Tensor]:
    """What the reference computes."""
    if isinstance(spec, DeltaNet):
        assert isinstance(weights, DeltaNetWeights)
        return delta_net.walk(spec, weights, *given)
    assert isinstance(weights, Mamba2Weights)
    return mamba2.walk(spec, weights, *given)


def one_walk(start: int, stop: int, tail: int, source: int, saves: list[tuple[int, int]]) -> Walks:
    """Rows `start` to `stop` of a text whose row r has slot r of the log; the rows before `start` are in the log."""
    line = [*([NONE] * max(tail - start, 0)), *range(max(start - tail, 0), start)]
    line += [NONE - 1 - row for row in range(stop - start)]
    places, slots = torch.tensor(line).unfold(0, tail + 1, 1).contiguous(), torch.arange(start, stop)
    spans = torch.tensor([[0, 0, stop - start, 0, source, 0, len(saves), 0]])
    moved = torch.tensor([(row - start, slot) for row, slot in saves])
    return Walks(*(each.to(DEVICE, torch.int32) for each in (places, slots, spans, moved)))


def texts(spec: Recurrence, rows: int) -> tuple[Tensor, Tensor]:
    """Random log rows, and with zeros before them."""
    own = torch.randn(rows, spec.log_size, device=DEVICE)
    return own, torch.cat((own.new_zeros(spec.conv_width - 1, spec.log_size), own))


def by_kernel(
    spec: Recurrence,
    weights: DeltaNetWeights | Mamba2Weights,
    given: Walks,
    rows: Tensor,
    log: Tensor,
    held: Tensor,
) -> Tensor:
    """What the kernels compute of log rows."""
    parts = rows[:, : spec.conv_size], rows[:, spec.conv_size :]
    return walk_rows(spec, weights, given, parts, log, held)


def states(spec: Recurrence, slots: int) -> Tensor:
    return torch.full((slots, *spec.state_shape), float("nan"), device=DEVICE)


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_has_the_outputs_and_states_of_the_reference(name: str) -> None:
    spec = SPECS[name]
    weights, (rows, text), held = random_weights(spec), texts(spec, 45), states(spec, 3)
    given = one_walk(0, 45, spec.conv_width - 1, NONE, [(20, 2), (45, 0)])
    with torch.inference_mode():
        found = by_kernel(spec, weights, given, rows, (log := torch.full_like(rows, float("nan"))), held)
        expected, end = walked(spec, weights, text, rows.new_zeros(spec.state_shape))
        _, middle = walked(spec, weights, text[: 20 + spec.conv_width - 1], rows.new_zeros(spec.state_shape))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (held[0] - end).abs().max() < 1e-5 * end.abs().max()
    assert (held[2] - middle).abs().max() < 1e-5 * middle.abs().max()
    assert held[1].isnan().all()
    assert log.equal(rows)


@pytest.mark.parametrize("spec", [DeltaNet(1, 1, 8, 8), Mamba2(1, 8, 8)])
def test_a_prompt_cut_at_any_row_has_the_same_bits(spec: Recurrence) -> None:
    count, tail, few = 200, spec.conv_width - 1, 11
    weights, (rows, _), held = random_weights(spec), texts(spec, count), states(spec, count + 2)

    def part(start: int, stop: int, source: int, marks: list[tuple[int, int]]) -> Tensor:
        given = one_walk(start, stop, tail, source, marks)
        return by_kernel(spec, weights, given, rows[start:stop], rows, held)

    with torch.inference_mode():
        whole = part(0, count, NONE, [(count, count + 1)])
        assert part(0, count, NONE, [(row, row) for row in range(1, count + 1)]).equal(whole)
        assert held[count].equal(held[count + 1])
        for cut in range(1, count):
            stop = min(cut + few, count)
            assert part(cut, stop, cut, [(stop, 0)]).equal(whole[cut:stop])
            assert held[0].equal(held[stop])


@pytest.mark.parametrize("spec", [DeltaNet(1, 1, 16, 8), Mamba2(1, 8, 16)])
def test_long_texts_do_not_drift(spec: Recurrence) -> None:
    rows = 4096
    weights, (own, text), held = random_weights(spec), texts(spec, rows), states(spec, 1)
    with torch.inference_mode():
        found = by_kernel(spec, weights, one_walk(0, rows, 3, NONE, [(rows, 0)]), own, own.clone(), held)
        expected, end = walked(spec, weights, text, own.new_zeros(spec.state_shape))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (held[0] - end).abs().max() < 1e-4 * end.abs().max()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks whose recurrences kernels compute, wherever an engine begins one."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(sdpa, "recurrence_step", lambda device: WalkStep)


@pytest.mark.usefixtures("by_kernels")
def test_an_engine_goes_on_from_marks_and_the_log() -> None:
    engine.test_a_prefix_is_reused_to_the_row(native=False)


@pytest.mark.parametrize(
    "spec",
    [
        DeltaNet(2, 4, 16, 24),
        Mamba2(4, 12, 16),
        Mamba2(4, 12, 16, 2, norms_first=True),
        Mamba2(4, 12, 16, norm_eps=None),
    ],
)
def test_outputs_are_normed_and_gated(spec: Recurrence) -> None:
    """By z, which lies beside other numbers."""
    count = 21
    weights, z = random_weights(spec), torch.randn(count, spec.output_size, device=DEVICE)
    y = torch.randn(count, spec.output_size, device=DEVICE)
    wide = torch.cat((torch.full((count, 5), float("nan"), device=DEVICE), z), 1)
    if isinstance(spec, DeltaNet):
        assert isinstance(weights, DeltaNetWeights)
        weights.norm.weight.uniform_(0.5, 1.5)
        expected = delta_net.gated_norm(spec, weights, y, z)
    else:
        assert isinstance(weights, Mamba2Weights)
        norm = None if spec.norm_eps is None else NormWeights(torch.rand(spec.output_size, device=DEVICE))
        weights = replace(weights, norm=norm)
        expected = mamba2.gated_norm(spec, weights, y, z)
    assert (gated_norm(spec, weights, y, wide[:, 5:]) - expected).abs().max() < 1e-5
