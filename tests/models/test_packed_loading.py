"""Files whose quantised weights are packed for a GPU during loading, here on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF

from models.loading.load import fill_network, load_model
from models.loading.plan import Target, needed_bytes, plan_load, plan_tensors, read_tensors
from models.network import ExpertWeights, Network, Weight
from models.weights.matching import match
from models.weights.packed_groups import choose_packed, expansion_note
from models.weights.packing import unpack
from models.weights.staging import Staging
from tests.models.checkpoints import files_of, random_model, tiny_llama, tiny_qwen3, write_gguf
from tests.models.families import tiny_ernie_moe

CPU = torch.device("cpu")
LLAMA = tiny_llama(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2, attention_bias=True
)
QWEN3 = tiny_qwen3(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=2)
KINDS = {
    "token_embd": GGUF.Q6_K,
    "attn_q": GGUF.Q4_K,
    "attn_k": GGUF.Q4_0,
    "attn_v": GGUF.Q6_K,
    "attn_output": GGUF.Q5_1,
    "ffn_gate": GGUF.Q5_K,
    "ffn_up": GGUF.Q5_K,
    "ffn_down": GGUF.Q8_0,
    "output": GGUF.Q4_1,
}


def filled(path: Path, staging: Staging | None) -> Network:
    spec, tensors, names, _ = read_tensors(files_of(path))
    packed = choose_packed(tensors, match(spec, tensors, names))
    plan = plan_tensors(spec, tensors, Target(torch.float32, CPU), names, packed=packed)
    return fill_network(plan, staging=staging)


def numbers(weight: Weight) -> torch.Tensor:
    if weight.planes is None:
        return weight.data
    return unpack(weight.planes, torch.arange(weight.rows))


def matrices(network: Network) -> list[torch.Tensor]:
    """Return the numbers of the embedding, the head and every layer."""
    linears: list[Any] = [network.head]
    for layer in network.layers:
        feed: Any = layer.feed_forward
        linears += [layer.attention.qkv, layer.attention.out, feed.gate_up, feed.down]
    return [numbers(network.embedding)] + [
        torch.cat([numbers(weight) for weight in linear.parts]) for linear in linears
    ]


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("staging", [None, Staging(1024)], ids=["read", "streamed"])
def test_packed_matrices_are_the_expanded_ones(config: Any, staging: Staging | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(config), KINDS)
    network = filled(path, staging)
    expanded = load_model(files_of(path), dtype=torch.float32, device=CPU, quantize="none")
    assert all(map(torch.equal, matrices(network), matrices(expanded)))
    assert all(weight.planes is not None for weight in network.parts(Weight))
    assert (network.head.parts[0] is network.embedding) == config.tie_word_embeddings


def test_the_memory_that_is_asked_for_is_what_planes_take(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(LLAMA), KINDS)
    spec, tensors, names, _ = read_tensors(files_of(path))
    places = match(spec, tensors, names)
    packed = {places[name]: kind for name, kind in choose_packed(tensors, places).items()}
    network = filled(path, None)
    tables = network.positions * 64 * 4
    needed = needed_bytes(spec, torch.float32, network.positions, None, packed)
    assert needed == network.nbytes + tables
    plan = plan_load(files_of(path), Target(torch.float32, CPU, packs=lambda spec: True))
    assert plan.nbytes == needed


@pytest.mark.parametrize(
    ("changes", "expanded"),
    [
        ({"ffn_up": GGUF.Q4_K}, {"gate", "up"}),
        ({"attn_v": GGUF.F16}, {"q", "k", "v"}),
        ({"ffn_down": GGUF.TQ2_0}, {"down"}),
        ({}, set()),
    ],
    ids=["gate and up differ", "a part is plain", "no kernel", "all"],
)
def test_a_layer_is_packed_as_a_whole_or_expanded_and_named(
    changes: dict[str, GGUF], expanded: set[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(QWEN3), KINDS | changes)
    spec, tensors, names, _ = read_tensors(files_of(path))
    places = match(spec, tensors, names)
    packed = choose_packed(tensors, places)
    assert {places[name].part for name in packed} == {
        slot.part for slot in places.values() if slot.is_matrix and slot.part not in expanded
    }
    note = expansion_note(tensors, places, packed, torch.bfloat16)
    assert (note is None) == (not expanded)
    for part in expanded - {part for part in ("q", "k", "v") if changes.get(f"attn_{part}") == GGUF.F16}:
        assert f"{part} (" in str(note)


MOE = tiny_ernie_moe(hidden_size=64, moe_intermediate_size=64, intermediate_size=64)


def expert_numbers(network: Network) -> list[torch.Tensor]:
    """Return the numbers of gate and up together, and of down, of every expert, shared ones included."""
    feeds = [layer.feed_forward for layer in network.layers]
    each = [e for f in feeds if isinstance(f, ExpertWeights) for e in (*f.experts, f.shared)]
    return [
        torch.cat([numbers(part) for part in linear.parts])
        for expert in each
        if expert is not None
        for linear in (expert.gate_up, expert.down)
    ]


@pytest.mark.parametrize("staging", [None, Staging(1024)], ids=["read", "streamed"])
def test_experts_are_packed_one_behind_the_other(staging: Staging | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(MOE), GGUF.Q4_0)
    network = filled(path, staging)
    expanded = load_model(files_of(path), dtype=torch.float32, device=CPU, quantize="none")
    assert all(map(torch.equal, expert_numbers(network), expert_numbers(expanded)))
    feed = network.layers[1].feed_forward
    assert isinstance(feed, ExpertWeights)
    parts = [expert.gate_up.parts for expert in feed.experts]
    assert all(len(part) == 1 for part in parts)
    codes = [part[0].data for part in parts]
    assert [code.data_ptr() - codes[0].data_ptr() for code in codes] == [
        i * codes[0].nbytes for i in range(len(codes))
    ]


@pytest.mark.parametrize("kinds", [{"ffn_up_exps": GGUF.Q4_1}, {"ffn_down_exps": GGUF.F16}])
def test_experts_whose_types_differ_are_expanded_and_named(kinds: dict[str, GGUF], tmp_path: Path) -> None:
    names = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
             "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_shexp", "ffn_up_shexp",
             "ffn_down_shexp")  # fmt: skip
    path = write_gguf(tmp_path / "model.gguf", random_model(MOE), dict.fromkeys(names, GGUF.Q4_0) | kinds)
    notes: list[str] = []
    network = load_model(
        files_of(path), dtype=torch.float32, device=CPU, packs=lambda spec: True, on_note=notes.append
    )
    assert network.is_packed
    feed = network.layers[1].feed_forward
    assert isinstance(feed, ExpertWeights)
    differing = "ffn_up_exps" in kinds
    assert all(expert.gate_up.is_plain == differing for expert in feed.experts)
    assert all(expert.down.is_plain != differing for expert in feed.experts)
    assert [("experts (Q4_0, Q4_1)" in note) for note in notes] == [True] * differing


def test_experts_beyond_the_room_lie_in_host_memory_in_blocks_and_the_rest_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.weights.placement.fetch_bytes", lambda layers: 0)  # it exceeds these experts
    path = write_gguf(tmp_path / "model.gguf", random_model(MOE), GGUF.Q4_0)

    def load(room: int | None) -> Network:
        return load_model(
            files_of(path),
            dtype=torch.float32,
            device=CPU,
            packs=lambda spec: True,
            room=None if room is None else lambda spec: room,
        )

    whole = load(None)
    assert not whole.on_host
    tables = whole.positions * whole.spec.attention.head_dim * 4
    network = load(whole.nbytes + tables)
    assert not network.on_host
    network = load(whole.nbytes + tables - 1)
    assert list(network.on_host) == [3]
    first, last = network.layers[1].feed_forward, network.layers[3].feed_forward
    assert isinstance(first, ExpertWeights)
    assert isinstance(last, ExpertWeights)
    assert all(expert.down.parts[0].planes is not None for expert in first.experts)
    assert all(expert.down.parts[0].planes is None for expert in last.experts)
    assert not any(expert.down.is_plain for expert in last.experts)
