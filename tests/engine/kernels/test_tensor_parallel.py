"""Decode steps of a network that two processes compute together, by the fused kernels, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from engine.execute.cuda.following import NullSampler
from engine.execute.cuda.slots import Changes, DividedCheck, DividedStep, Slots
from engine.parallel.messages import of_decode, read_message
from engine.parallel.ring import ROOM
from tests.engine.kernels.divided_steps import CPU, SLOTS, decoded, each_logits
from tests.engine.kernels.two_ranks import run_ranks
from tests.models.checkpoints import (
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)
from tests.models.families import tiny_bamba, tiny_qwen3_moe
from tests.models.hybrids import tiny_qwen3_5_moe

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels know fp32 in the interpreter only"
)
QWEN3 = tiny_qwen3(num_hidden_layers=1, head_dim=64, vocab_size=27, hidden_size=64, intermediate_size=64)
EXPERTS = tiny_qwen3_moe(
    head_dim=64, vocab_size=27, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1,
    num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
)  # fmt: skip
LLAMA = tiny_llama(
    num_hidden_layers=1,
    hidden_size=192,
    intermediate_size=96,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    attention_bias=True,
    vocab_size=27,
)


KINDS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
NETS = tiny_qwen3_5_moe(
    **KINDS, vocab_size=27, hidden_size=64, head_dim=64, num_attention_heads=4, num_key_value_heads=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
MAMBA = tiny_bamba(
    num_hidden_layers=2, attn_layer_indices=[1], vocab_size=27, hidden_size=64, intermediate_size=64,
    num_attention_heads=1, num_key_value_heads=1, mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=16,
)  # fmt: skip


def test_two_ranks_have_the_logits_of_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", QWEN3)
    write_checkpoint(tmp_path / "llama", LLAMA)
    write_gguf(tmp_path / "blocks.gguf", random_model(QWEN3), {
        "token_embd": GGUF.Q8_0, "attn_q": GGUF.Q8_0, "attn_k": GGUF.Q8_0, "attn_v": GGUF.Q8_0,
        "attn_output": GGUF.Q8_0, "ffn_gate": GGUF.Q4_0, "ffn_up": GGUF.Q4_0, "ffn_down": GGUF.Q8_0,
    })  # fmt: skip
    write_checkpoint(tmp_path / "experts", EXPERTS)
    write_checkpoint(tmp_path / "nets", NETS)
    write_checkpoint(tmp_path / "mamba", MAMBA)
    few, many = [[3], [3, 1, 0]], list(range(SLOTS))
    steps = {"qwen3": [*few, many, [3]], "llama": few, "blocks.gguf": few, "experts": [*few, many]}
    steps |= {name: [[3, 1, 0], many, [3]] for name in ("nets", "mamba")}
    for name in steps:
        (tmp_path / f"{name}-memory").mkdir()
    asked = [(files_of(tmp_path / name), each) for name, each in steps.items()]
    expected = each_logits(0, 1, tmp_path, asked)
    found, _ = run_ranks(2, each_logits, 2, tmp_path, asked)
    for name, ones, twos in zip(steps, expected, found, strict=True):
        for step, (one, two) in enumerate(zip(ones, twos, strict=True)):
            told = f"{name}, step {step}: "
            torch.testing.assert_close(
                two, one, rtol=1e-4, atol=2e-4, msg=lambda text, told=told: told + text
            )


@pytest.mark.parametrize("config", [QWEN3, NETS], ids=["qwen3", "nets"])
def test_a_runner_that_is_told_follows_the_one_that_draws(tmp_path: Path, config: Any) -> None:
    """Also while both prepare: a step more on one of them, and they would wait for each other."""
    files, ring = files_of(write_checkpoint(tmp_path / "model", config)), tmp_path / "ring"
    ring.write_bytes(bytes(2 * ROOM))
    truth = decoded(0, 1, files, tmp_path, ring, 6, [])
    assert truth[0] == 9
    wrong = [(token + 1) % 27 for token in truth]
    guesses = [(truth[3], truth[4], wrong[5]), (wrong[6],), (truth[7],)]
    together, nothing = run_ranks(2, decoded, 2, files, tmp_path, ring, 2, guesses)
    assert together == truth[: len(together)]
    assert len(together) == 11
    assert len(set(together)) > 5
    assert not nothing


def test_who_follows_is_told_what_has_changed() -> None:
    """A rank that gets nothing but the messages has the same numbers in its slots, wherever rank 0 changed some."""
    told, followed = (Slots(3, 4, 5, torch.zeros(3, dtype=torch.int64)) for _ in range(2))
    for blocks, row in (([4, 7], 20), ([4, 7, 9], 40), ([4, 7, 9, 1], 50)):
        told.put(1, row, row + 3)
        told.show(1, blocks)
        told.activate([1, 2], 2)
        told.share([row, 0], [[1, 0], [2]])
        sent = told.send()
        step = read_message(of_decode(DividedStep(sent, 2, 640, row)))
        assert step == DividedStep(sent, 2, 640, row)
        assert isinstance(step, DividedStep)
        followed.change(step.changes)
        assert torch.equal(told._words, followed._words)
        assert torch.equal(told.given.counters, followed.given.counters)


@given(
    st.dictionaries(st.integers(0, 2**40), st.integers(-1, 2**31)),
    st.dictionaries(st.integers(0, 2**40), st.integers(-1, 2**31)),
    st.lists(
        st.tuples(st.integers(0, 255), st.lists(st.integers(0, 2**31), max_size=7).map(tuple)), max_size=4
    ),
)
def test_a_step_of_guesses_is_told_whole(
    words: dict[int, int], counters: dict[int, int], spans: list[tuple[int, tuple[int, ...]]]
) -> None:
    step = DividedCheck(Changes(words, counters), 8, 640, tuple(spans))
    assert read_message(of_decode(step)) == step


def test_a_follower_counts_where_rank_0_samples() -> None:
    counted: list[Tensor] = []
    counting = NullSampler(11, 2, CPU, lambda active, counters: counted.append(counters))
    counters = torch.zeros(2, 2)
    counting.sample(torch.zeros(1, 11), torch.zeros(1), None)
    assert not counted, "as where the first token of an answer is drawn"
    counting.sample(torch.zeros(1, 11), torch.zeros(1), counters, counting.draw([0]))
    assert counted == [counters]
