"""The placement of experts when a device has no room for all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.spec import Experts, FeedForward
from models.weights.block_formats import Kind
from models.weights.placement import LayerExperts, expert_layers, fetch_bytes, place_experts
from models.weights.slots import slots
from tests.engine.native.test_native_experts import a_spec

SIZES = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=6)


@given(sizes=SIZES, dense=st.integers(0, 100), room=st.integers(0, 600))
def test_as_few_layers_as_possible_move_and_what_is_left_fits(
    sizes: list[tuple[int, bool]], dense: int, room: int
) -> None:
    layers = [
        LayerExperts(3 * i, 4 * size, size if packed else 4 * size, 4 * size)
        for i, (size, packed) in enumerate(sizes)
    ]
    needed = dense + sum(layer.on_device for layer in layers)

    def taken(moved: int) -> int:
        some = layers[len(layers) - moved :]
        return needed - sum(layer.on_device for layer in some) + fetch_bytes(some)

    found = place_experts(needed, layers, room)
    fitting = [moved for moved in range(len(layers) + 1) if taken(moved) <= room]
    assert (found is None) == (not fitting)
    if found is not None:
        some = layers[len(layers) - fitting[0] :]
        assert found.host_layers == {layer.layer for layer in some}
        assert found.host_bytes == sum(layer.on_host for layer in some)
        assert found.device_bytes == taken(fitting[0]) <= room


def test_two_layers_as_they_lie_and_one_in_plain_numbers_are_fetched_to() -> None:
    assert fetch_bytes([]) == 0
    assert fetch_bytes([LayerExperts(0, 100, 100, 100), LayerExperts(1, 80, 80, 80)]) == 200
    assert fetch_bytes([LayerExperts(0, 100, 30, 100), LayerExperts(1, 100, 40, 100)]) == 180
    assert fetch_bytes([LayerExperts(0, 30, 30, 100), LayerExperts(1, 40, 40, 100)]) == 180


@pytest.mark.parametrize("kind", [None, Kind.Q4_0])
def test_bytes_of_experts_are_those_of_their_blocks(kind: Kind | None) -> None:
    spec = a_spec(
        None, Experts(4, 2, FeedForward(96), shared=FeedForward(32)), Experts(2, 1, FeedForward(32))
    )
    found = list(slots(spec))
    of_host = {} if kind is None else {slot: kind for slot in found if slot.expert is not None}
    layers = expert_layers(found, torch.bfloat16, {}, of_host)
    assert [layer.layer for layer in layers] == [1, 2]
    numbers = [4 * 3 * 96 * 64, 2 * 3 * 32 * 64]
    assert [layer.on_device for layer in layers] == [2 * count for count in numbers]
    assert [layer.on_host for layer in layers] == [
        count * 18 // 32 if kind else 2 * count for count in numbers
    ]
