"""The memory of a KV cache whose layers with a window keep only its rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.cache.kv_needs import KVNeeds, kv_needs
from engine.cache.kv_rows import token_bytes
from engine.cache.layer_groups import layer_groups
from engine.cache.sizing import GPU_SHARE, expected_plan, least_beside, plan_kv
from engine.cache.window import Window
from engine.errors import OutOfRoomError
from models.spec import ModelSpec, each_attention
from tests.models.test_gemma4 import DENSE, E2B, hf

BF16, CPU, CUDA = torch.bfloat16, torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
SPEC = hf(DENSE)
CONTEXT = 32_768


def needs(step: int = 512, spec: ModelSpec = SPEC) -> KVNeeds:
    return kv_needs(spec, BF16, step=step)


def test_a_conversation_of_gemma4_31b_takes_an_eighth() -> None:
    found = needs()
    (group,) = found.groups
    assert (group.window, len(group.layers), group.token_bytes) == (1024, 50, 50 * 2 * 16 * 256 * 2)
    assert found.token_bytes == 10 * 2 * 4 * 512 * 2
    assert token_bytes(SPEC, BF16) * CONTEXT == pytest.approx(27.5 * GIB)
    assert found.conversation_bytes(CONTEXT) == pytest.approx(3.28 * GIB, abs=0.01 * GIB)
    assert found.conversation_bytes(512) == token_bytes(SPEC, BF16) * 512


@pytest.mark.parametrize(
    ("free", "gib", "windows"),
    [(4, 4.0, 0), (8, 4.37, 0), (12, 5.94, 2), (20, 9.37, 4), (40, 12.5, 8), (80, 12.5, 8)],
)
def test_branches_have_windows_as_far_as_there_is_memory(free: int, gib: float, windows: int) -> None:
    plan = plan_kv(needs(), free * GIB, SPEC.max_positions, CONTEXT, 1.0, branches=1 / 3)
    assert plan.context_length == CONTEXT
    assert plan.slots == (Window(1024, 512).most_blocks(32) + 1 + 32 * windows,)
    assert plan.nbytes == pytest.approx(gib * GIB, abs=0.01 * GIB)
    assert plan.nbytes <= free * GIB


def test_as_many_tokens_as_fit_are_planned() -> None:
    for free in range(2, 40, 3):
        plan = plan_kv(needs(), free * GIB, SPEC.max_positions, None, GPU_SHARE, branches=1 / 3)
        usable = int(free * GIB * GPU_SHARE)
        assert plan.nbytes <= usable
        if plan.context_length < SPEC.max_positions:
            assert plan.needs.nbytes(plan.num_blocks + 1, plan.slots) > usable
    with pytest.raises(
        OutOfRoomError, match=r"a context of 32,768 tokens needs 4\.0 GB for its KV cache; 3\.2 GB"
    ):
        plan_kv(needs(), 3 * GIB, SPEC.max_positions, CONTEXT, 1.0)


@pytest.mark.parametrize("streams", [2, 8, 64])
def test_streams_for_which_there_is_no_room_take_turns(streams: int) -> None:
    alone = plan_kv(needs(), 8 * GIB, SPEC.max_positions, CONTEXT, 1.0)
    plan = plan_kv(needs(), 8 * GIB, SPEC.max_positions, CONTEXT, 1.0, streams=streams)
    assert plan.context_length == CONTEXT
    assert alone.slots <= plan.slots
    assert plan.nbytes <= 8 * GIB
    large = plan_kv(needs(), 800 * GIB, SPEC.max_positions, CONTEXT, 1.0, streams=streams)
    assert large.slots[0] >= streams * Window(1024, 512).most_blocks(32)


def test_no_group_has_more_blocks_than_the_primary() -> None:
    plan = plan_kv(needs(), 80 * GIB, SPEC.max_positions, 256, 1.0)
    assert plan.slots == (plan.num_blocks,)
    assert plan.nbytes == token_bytes(SPEC, BF16) * plan.num_blocks * 32


def test_without_groups_nothing_changes() -> None:
    spec = each_attention(SPEC, lambda _, attention: replace(attention, window=None))
    plain = kv_needs(spec, BF16)
    assert (plain.groups, plain.token_bytes) == ((), token_bytes(SPEC, BF16))
    plan = plan_kv(plain, 80 * GIB, SPEC.max_positions, CONTEXT, 1.0)
    assert plan.nbytes == plan.num_blocks * 32 * token_bytes(SPEC, BF16)


def test_layers_that_others_read_are_in_the_group_of_those() -> None:
    spec = hf(E2B)
    (group,) = layer_groups(spec, BF16)
    assert group.layers == tuple(i for i, layer in enumerate(spec.layers) if layer.attention.window)
    assert group.token_bytes == 12 * 2 * 256 * 2, "three of the fifteen layers that keep rows see all of them"
    sees_all = replace(spec.layers[-2], mixer=replace(spec.layers[-2].attention, window=None))
    changed: Any = replace(spec, layers=(*spec.layers[:-2], sees_all, spec.layers[-1]))
    (fewer,) = layer_groups(changed, BF16)
    assert fewer.token_bytes == 11 * 2 * 256 * 2, "the layer that it reads keeps everything"


def test_estimates_know_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimates() -> tuple[int, int]:
        plan = expected_plan(SPEC, BF16, CUDA, 40 * GIB, 20 * GIB)
        return plan.context_length, least_beside(SPEC, BF16, CPU, CONTEXT).kv

    context, kv = estimates()
    monkeypatch.setattr("engine.cache.kv_needs.layer_groups", lambda *_: [])
    fewer, more = estimates()
    assert context > 3 * fewer
    assert kv < more / 6
