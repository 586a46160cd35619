"""Files whose quantised weights are packed for a GPU while they are loaded, here on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GGUF

from models.load import fill_network, load_model, match, needed_bytes, read_tensors
from models.network import Network, Weight
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
    return fill_network(spec, tensors, torch.float32, CPU, staging=staging, names=names, packed=packed)


def numbers(weight: Weight) -> torch.Tensor:
    if weight.planes is None:
        return weight.data
    return unpack(weight.planes, weight.format, torch.arange(weight.rows), weight.columns)


def matrices(network: Network) -> list[torch.Tensor]:
    """The numbers of the embedding, the head and every layer."""
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
    assert needed_bytes(spec, torch.float32, network.positions, None, packed) == network.nbytes + tables


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


def test_experts_are_expanded_and_named(tmp_path: Path) -> None:
    config = tiny_ernie_moe(hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    path = write_gguf(tmp_path / "model.gguf", random_model(config), GGUF.Q4_0)
    notes: list[str] = []
    network = load_model(
        files_of(path), dtype=torch.float32, device=CPU, packs=lambda spec: True, on_note=notes.append
    )
    assert network.is_packed
    assert all(expert.down.is_plain for expert in network.layers[1].feed_forward.experts)  # type: ignore[union-attr]
    assert len(notes) == 1
    assert "experts (Q4_0)" in notes[0]
