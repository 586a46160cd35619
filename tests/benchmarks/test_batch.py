"""The benchmark of many streams: all sides get the same work, and the bound is computed as stated."""

from pathlib import Path

import pytest
import torch

from benchmarks.batch import bound_seconds, most_rows, workload
from benchmarks.long_prompt import first_token_s, watch
from benchmarks.peers.serving import Server, Workload
from benchmarks.shapes import SHAPES, kv_bytes, prefill_flops, random_engine, weight_bytes
from benchmarks.shared_prompt import prompts_of, step_seconds
from benchmarks.streams import Request, serve
from models.weights.slots import layer_parameters

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def test_every_round_has_other_tokens_and_the_same_lengths() -> None:
    first, second = (workload(2, [100, 1024], [100, 1024], 10_000, number) for number in (0, 1))
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    assert first.tokens == second.tokens
    assert all(a != b for a, b in zip(first.prompts, second.prompts, strict=True))
    assert len(first.tokens) == 8
    assert len(workload(64, [1, 2], [1, 2], 5, 0).tokens) == 64
    lengths = [len(prompt) for prompt in workload(256, [100, 1024], [100, 1024], 9, 0).prompts]
    assert min(lengths) >= 100
    assert max(lengths) <= 1024
    assert max(lengths) - min(lengths) > 800


def test_the_most_rows_are_those_of_the_longest_that_run_together() -> None:
    assert most_rows(Workload([[1] * 5, [1] * 10, [1]], [2, 3, 4], 2, 0.6)) == 13 + 7


def test_the_bound_counts_every_step_and_every_prompt_once() -> None:
    spec, bf16 = SHAPES["0.6B"], torch.bfloat16
    weights, row = weight_bytes(spec, bf16), kv_bytes(spec, bf16)
    # Products cost nothing: two prompts of 10 and 20, answers of 3 and 2; the first tokens come with the prompts.
    moved = 2 * weights + row * ((11 + 21) + 12)
    both = Workload([[0] * 10, [0] * 20], [3, 2], 2, 0.6)
    assert bound_seconds(spec, both, 1e12, 1e30) == pytest.approx(moved / 1e12)
    # One at a time, the weights are read once more.
    alone = Workload(both.prompts, both.tokens, 1, 0.6)
    assert bound_seconds(spec, alone, 1e12, 1e30) == pytest.approx((moved + weights) / 1e12)
    # Bytes cost nothing.
    per_token = 2 * (layer_parameters(spec) + spec.vocab_size * spec.hidden_size)
    attended = 4 * spec.attention.heads * spec.attention.head_dim * len(spec.layers) * (11 + 21 + 12)
    flops = 3 * per_token + attended + prefill_flops(spec, 10) + prefill_flops(spec, 20)
    assert bound_seconds(spec, both, 1e30, 1e12) == pytest.approx(flops / 1e12)


def test_streams_end_with_as_many_tokens_as_were_asked_for_and_no_more_run_than_may() -> None:
    requests = [Request([7 * n + 1, 3, n], 2 + n % 5) for n in range(9)]
    with random_engine(SHAPES["tiny"], device=CPU, dtype=torch.float32, context=64) as (engine, _):
        streams = serve(engine, requests, 3, 0.6)
    assert [stream.request for stream in streams] == requests
    assert all(stream.done and len(stream.times) == stream.request.tokens for stream in streams)
    assert all(stream.times == sorted(stream.times) for stream in streams)
    ends = [stream.times[-1] for stream in streams]
    for number, stream in enumerate(streams):
        running = sum(end > stream.started for end in ends[:number])
        assert running < 3


def test_a_long_prompt_and_shared_ones_are_watched() -> None:
    spec = SHAPES["tiny"]
    with random_engine(spec, device=CPU, dtype=torch.float32, context=4000) as (engine, _):
        assert first_token_s(engine, [5] * 40) > 0
        seen = watch(engine, spec, 2, [9, 8] * 150, 0.01)
        assert seen["longest_quiet_s"] >= seen["usual_gap_quiet_s"] > 0
        assert seen["more_s"] == seen["longest_beside_s"] - seen["longest_quiet_s"]
        shared = prompts_of(spec, "shared", 3, 50, 1)
        assert {len(prompt) for prompt in shared} == {50}
        assert len({tuple(prompt[:49]) for prompt in shared}) == 1
        assert len({tuple(prompt) for prompt in shared}) == 3
        assert step_seconds(engine, shared, 40) > 0
        assert engine.figures().blocks_held == 0


def test_servers_are_asked_line_by_line() -> None:
    server = Server("echo", "tests.benchmarks.echo", ["--x"], [ROOT])
    assert server.about == {"arguments": ["--x"]}
    assert [server.seconds(Workload([[1]], [n], 1, 0.6)) for n in (5, 7)] == [5.0, 7.0]
    with pytest.raises(RuntimeError, match=r"^echo: nobody may run$"):
        server.seconds(Workload([], [], 0, 0.6))
    server.close()
    with pytest.raises(RuntimeError, match="echo ended with code 3"):
        Server("echo", "tests.benchmarks.echo", ["--broken"], [ROOT])
