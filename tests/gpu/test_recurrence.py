"""The recurrence of prompts on a GPU, with sizes of published models: errors, bits, and whole networks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.stepping import blocks_for
from engine.attention.walks import WalkStep
from engine.batch import NONE, Span, StateMoves, StepBatch
from models.recurrences import DeltaNet, Mamba2, Recurrence
from tests.engine.keeping import GREEDY
from tests.gpu.engines import DEVICE, SIZES, alone, an_engine, at_once, random_tokens
from tests.gpu.test_logits import logits_of
from tests.models.checkpoints import reference_model, write_checkpoint
from tests.models.hybrids import tiny_qwen3_5

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NINE = DeltaNet(16, 32, 128, 128)
NEMOTRON = Mamba2(96, 80, 128, 8)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "spec",
    [NINE, replace(NINE, value_heads=48), replace(NINE, alternating=True), NEMOTRON, Mamba2(24, 64, 256)],
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_prompts_are_as_exact_as_the_reference(spec: Recurrence, dtype: torch.dtype) -> None:
    from tests.engine.kernels.test_recurrence import (
        by_kernel,
        one_walk,
        random_weights,
        states,
        texts,
        walked,
    )

    weights, (rows, text), held = random_weights(spec), texts(spec, 1000), states(spec, 2)
    rows, text = rows.to(dtype), text.to(dtype)
    with torch.inference_mode():
        given = one_walk(0, 1000, 3, NONE, [(600, 1), (1000, 0)])
        found = by_kernel(spec, weights, given, rows, rows.clone(), held).float()
        zeros = torch.zeros(spec.state_shape, device=DEVICE)
        expected, end = walked(spec, weights, text, zeros)
        _, middle = walked(spec, weights, text[:603], zeros)
    bound = 1e-4 if dtype == torch.float32 else 2e-2  # a convolution may be rounded to the other neighbour
    for one, other in ((found, expected.float()), (held[0], end), (held[1], middle)):
        assert (one - other).norm() < bound * other.norm()


@pytest.mark.parametrize("spec", [NINE, NEMOTRON])
def test_a_prompt_cut_anywhere_has_the_same_bits(spec: Recurrence) -> None:
    from tests.engine.kernels.test_recurrence import by_kernel, one_walk, random_weights, states, texts

    count = 5000
    weights, (rows, _), held = random_weights(spec), texts(spec, count), states(spec, 4)
    rows = rows.to(BF16)

    def part(start: int, stop: int, source: int, marks: list[tuple[int, int]]) -> Tensor:
        given = one_walk(start, stop, 3, source, marks)
        return by_kernel(spec, weights, given, rows[start:stop], rows, held)

    with torch.inference_mode():
        whole = part(0, count, NONE, [(count, 0)])
        for cut in (1, 2, 7, 8, 9, 63, 64, 100, 1023, 3333, 4999):
            assert part(0, count, NONE, [(cut, 1), (count, 2)]).equal(whole)
            assert held[2].equal(held[0])
            assert part(0, cut, NONE, [(cut, 2)]).equal(whole[:cut])
            assert held[2].equal(held[1])
            assert part(cut, count, 1, [(count, 3)]).equal(whole[cut:])
            assert held[3].equal(held[0])


def small_network(path: Path) -> Path:
    sizes = {f"linear_{name}_head_dim": 128 for name in ("key", "value")}
    return write_checkpoint(path, tiny_qwen3_5(**SIZES | sizes, hidden_size=256, head_dim=64))


def test_recorded_prompts_give_what_others_give(tmp_path: Path) -> None:
    """A prompt; what follows it, from an earlier state and beside another; and one more row: each step twice."""
    text, other = random_tokens(650, 0), random_tokens(300, 1)

    def span(given: list[int], table: list[int], start: int, stop: int, moves: StateMoves) -> Span:
        rows = range(start, stop)
        return Span(tuple(table), start, stop - start, given[start:stop], rows, wanted=1, states=moves)

    with an_engine(small_network(tmp_path), attention="triton", num_blocks=120) as engine:

        def job() -> list[list[Tensor]]:
            runner, cache = engine.pieces.runner, engine.pieces.cache
            padded, found = runner._padded, []
            assert padded is not None
            assert cache.states is not None
            with blocks_for(engine, [[], []], 650) as (table, own):
                steps = (
                    (span(text, table, 0, 600, StateMoves(NONE, 0, ((560, 2), (600, 0)))),),
                    (
                        span(text, table, 600, 649, StateMoves(2, 560, ((649, 1),))),
                        span(other, own, 0, 300, StateMoves(NONE, 0, ((300, 3),))),
                    ),
                    (span(text, table, 649, 650, StateMoves(1, 649, ((650, 1),))),),
                )
                for runs in (padded, None):
                    runner._padded = runs
                    for _ in range(3):  # the first records
                        rows = [row.clone().float() for step in steps for row in runner.run(StepBatch(step))]
                    kept = [layer[:4].clone() for layer in cache.states.layers.values()]
                    found.append([*rows, *kept])
            runner._padded = padded
            return found

        recorded, plain = engine.loop.call(job)
    for one, other_one in zip(recorded, plain, strict=True):
        assert (one - other_one).norm() < 3e-2 * other_one.norm()


def test_an_engine_answers_as_transformers_does(tmp_path: Path) -> None:
    """Of the second prompt the engine knows all but the end, and goes on from a mark; two more share a step."""
    folder = small_network(tmp_path)
    model, prompt = reference_model(folder).to(DEVICE), random_tokens(700, 0)
    with an_engine(folder, torch.float32, num_blocks=200) as engine:
        assert isinstance(engine.pieces.backend.plan(StepBatch(())), WalkStep)
        first = alone(engine, (prompt, GREEDY))
        longer = [*prompt, *first[:8], *random_tokens(90, 1)]
        second = alone(engine, (longer, GREEDY))
        others = [random_tokens(130, 2), random_tokens(41, 3)]
        answers = at_once(engine, [(other, GREEDY) for other in others])
    for given, found in zip([prompt, longer, *others], [first, second, *answers], strict=True):
        assert logits_of(model, given + found)[len(given) - 1 : -1].argmax(-1).tolist() == found
