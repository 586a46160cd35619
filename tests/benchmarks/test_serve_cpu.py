"""The benchmark of a server's processor time per token: its clock, and one round of everything."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.peers.serving import Workload
from benchmarks.scripted_server import pace_of, step_seconds
from benchmarks.serve_cpu import HERE, WORDS, Tree, checkpoint, median, told


def test_a_step_takes_what_the_pace_says() -> None:
    pace = pace_of("8:8000,1:2000,64:16000")
    assert [step_seconds(pace, streams) for streams in (1, 8, 64)] == pytest.approx([0.0005, 0.001, 0.004])
    assert step_seconds(pace, 36) == pytest.approx(0.0025)
    assert step_seconds(pace, 128) == pytest.approx(0.008)
    assert step_seconds(pace_of("none"), 5) == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell of threads")
def test_a_round_counts_every_token() -> None:
    work = Workload([[300 + number] * 40 for number in range(6)], [12] * 6, 3, 0.6)
    assert max(max(prompt) for prompt in work.prompts) < WORDS
    with ExitStack() as stack:
        tree = Tree(HERE, stack.enter_context(checkpoint()), 3, "none", stack)
        found = median([tree.round(work)])
    assert found.tokens_per_s > 0
    assert min(found.engine_us, found.alone_us, found.neighbours_us, found.web_us, found.client_us) > 0
    assert found.first_ms > 0
    assert told("this tree", 3, found).startswith("   3 streams, this tree:")
