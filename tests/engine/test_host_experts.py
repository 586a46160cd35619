"""Experts in host memory beside what a "GPU" computes, which here is the plain modules on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

import models.loading.load
import models.loading.plan
from chatterm.conversation.figures import weights_text
from engine.cache.sizing import weight_room
from engine.execute import compatibility, loading
from engine.execute.build_options import BuildOptions
from engine.execute.compatibility import NATIVE, not_on_host
from engine.execute.cuda import host_experts
from engine.execute.cuda.fetched_experts import FetchedExperts
from engine.execute.cuda.host_experts import MOST_ROWS, HostCosts, HostExperts
from engine.kernels.native import library as native
from engine.kernels.native.library import NativeError, Pool
from engine.machine.shapes import known_shape
from engine.params import SamplingParams
from engine.schedule.loop import Loop
from models.errors import ModelError
from models.features import Feature
from models.loading.load import load_model
from models.loading.plan import needed_bytes
from models.network import ExpertWeights, Network, Weight
from models.reference.decoder import Decoder
from models.spec import Experts, FeedForward, each_layer
from models.weights.block_formats import Kind
from models.weights.formats.blocks import dequantize
from tests.engine.host_split import joined, split
from tests.engine.native.test_native_decode import RoundedProduct
from tests.engine.tiny import TinyEngine, tiny_tokenizer
from tests.models.checkpoints import PlainAttention, files_of, random_model, run, write_checkpoint, write_gguf
from tests.models.families import tiny_qwen3_moe

pytestmark = pytest.mark.skipif(native.problem() is not None, reason="needs the native kernels")
CPU = torch.device("cpu")
CONFIG = tiny_qwen3_moe(
    hidden_size=64,
    moe_intermediate_size=96,
    vocab_size=272,
    max_position_embeddings=1024,
    decoder_sparse_step=1,
)
"""Four layers of experts."""
KINDS = pytest.mark.parametrize("kind", [None, Kind.Q8_0, Kind.Q4_1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("moe"), CONFIG)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Network:
    return load_model(files_of(folder), dtype=torch.float32, device=CPU)


def on_host(network: Network, fetch_from: int | None = None) -> HostExperts:
    found = HostExperts(network, Pool(2))
    found.prepare(fetches=fetch_from is not None, fixed=False)
    found.fetch_from = fetch_from
    return found


@torch.inference_mode()
def in_pieces(program: Decoder, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of all tokens, computed so many at a time."""
    attention, starts = PlainAttention(), accumulate(cuts, initial=0)
    hidden = [
        program.forward(ids[start : start + cut], torch.arange(start, start + cut), attention)
        for start, cut in zip(starts, cuts, strict=False)
    ]
    return program.logits(torch.cat(hidden))


def room_for(network: Network, layers: int) -> int:
    """Bytes in which the experts of all but so many layers fit, and what the others are fetched to."""
    feed = network.layers[0].feed_forward
    assert isinstance(feed, ExpertWeights)
    layer = sum(e.gate_up.weight.nbytes + e.down.weight.nbytes for e in feed.experts)
    return needed_bytes(network.spec, torch.float32, network.positions) - layers * layer + 2 * layer


@KINDS
def test_steps_and_chunks_of_all_lengths_give_what_the_network_gives_in_one_piece(
    whole: Network, kind: Kind | None
) -> None:
    network = split(whole, {1, 3}, kind)
    host = on_host(network)
    found, truth = Decoder(network, on_host=host.mix), Decoder(joined(network), RoundedProduct())
    ids = torch.randint(272, (200,), generator=torch.Generator().manual_seed(1))
    for cuts in ([200], [1, 8, 40, 1, 150]):
        ours, exact = (in_pieces(program, ids, cuts) for program in (found, truth))
        errors = (ours - exact).norm(dim=1) / exact.norm(dim=1)
        assert errors.median() < 1e-5
        assert errors.max() < (1e-5 if kind is None else 0.05)


@KINDS
def test_rows_of_a_step_get_the_bits_that_each_gets_alone(whole: Network, kind: Kind | None) -> None:
    host, spec = on_host(split(whole, {2}, kind)), whole.spec.layers[2].feed_forward
    assert isinstance(spec, Experts)
    generator = torch.Generator().manual_seed(2)
    x, shares = (
        torch.randn(MOST_ROWS + 70, 64, generator=generator),
        torch.rand(MOST_ROWS + 70, 3, generator=generator),
    )
    ids = torch.rand(len(x), spec.count, generator=generator).topk(3).indices.int()
    ids[2] = -1
    every = host.mix(2, x, ids, shares)
    assert not every[2].any()
    for row in (0, 1, 2, 7, len(x) - 1):
        some = slice(row, row + 1)
        assert torch.equal(host.mix(2, x[some], ids[some], shares[some])[0], every[row])
    for rows in (3, 5, 8):
        assert torch.equal(host.mix(2, x[:rows], ids[:rows], shares[:rows]), every[:rows])


def plain(weight: Weight) -> Tensor:
    if weight.is_plain:
        return weight.data
    numbers = torch.empty(weight.rows, weight.columns)
    dequantize(weight.data, weight.format, numbers)
    return numbers


@KINDS
def test_every_layer_is_fetched_in_turn(
    whole: Network, kind: Kind | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "engine.execute.cuda.fetched_experts.EXPANDED", 3 * 96 * 64
    )  # not all experts at once
    layers = split(whole, {0, 1, 3}, kind).on_host
    fetched = FetchedExperts(layers, torch.float32, CPU)
    for _ in range(2):
        fetched.begin()
        for layer, weights in layers.items():
            taken = fetched.take(layer)
            (first,) = taken.experts
            assert not taken.on_host
            assert taken.router is weights.router
            for side in ("gate_up", "down"):
                have = getattr(first, side).weight
                count = len(weights.experts)
                stack = have.as_strided((count, *have.shape), (have.numel(), *have.stride()))
                for expert, numbers in zip(weights.experts, stack, strict=True):
                    expected = torch.cat([plain(part) for part in getattr(expert, side).parts])
                    assert torch.equal(numbers, expected)
            fetched.give_back(layer)


def test_the_last_layers_that_do_not_fit_are_held_in_host_memory(folder: Path, whole: Network) -> None:
    for layers in range(3, 5):
        room = room_for(whole, layers)
        found = load_model(files_of(folder), dtype=torch.float32, device=CPU, room=lambda _, room=room: room)
        assert list(found.on_host) == list(range(4 - layers, 4))
        assert found.nbytes == whole.nbytes
        ids = list(range(40))
        host = on_host(found)
        torch.testing.assert_close(
            run(Decoder(found, on_host=host.mix), ids), run(Decoder(whole), ids), rtol=1e-4, atol=1e-4
        )
        assert host.nbytes == layers * (room_for(whole, 0) - room_for(whole, 1))
    everything = load_model(files_of(folder), dtype=torch.float32, device=CPU, room=lambda _: 1 << 40)
    assert not everything.on_host


def test_blocks_of_a_file_stay_blocks_in_host_memory(tmp_path: Path) -> None:
    """Of types that no kernel reads others are made; one expert lies behind the other."""
    kinds = {"ffn_gate_exps": GGMLQuantizationType.Q4_0, "ffn_up_exps": GGMLQuantizationType.Q5_0}
    path = write_gguf(tmp_path / "model.gguf", random_model(CONFIG), kinds)
    files = files_of(path)
    whole = load_model(files, dtype=torch.float32, device=CPU)
    found = load_model(files, dtype=torch.float32, device=CPU, room=lambda _: whole.nbytes * 3 // 4)
    assert found.on_host
    for layer, weights in found.on_host.items():
        other = whole.layers[layer].feed_forward
        assert isinstance(other, ExpertWeights)
        expert = weights.experts[0]
        assert [part.format for part in expert.gate_up.parts] == [Kind.Q4_0, Kind.Q8_0]
        for mine, theirs in zip(weights.experts, other.experts, strict=True):
            parts = [(*expert.gate_up.parts, *expert.down.parts) for expert in (mine, theirs)]
            for one, two in zip(*parts, strict=True):
                assert torch.equal(one.data, two.data)
    host = on_host(found)
    ids = list(range(30))
    assert torch.equal(
        run(Decoder(found, RoundedProduct(), host.mix), ids).argmax(-1),
        run(Decoder(whole, RoundedProduct()), ids).argmax(-1),
    )


def test_what_fits_nowhere_is_refused_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(room: int) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(files_of(folder), dtype=torch.float32, device=CPU, room=lambda _: room)
        return str(caught.value)

    monkeypatch.setattr(models.loading.plan, "available_bytes", lambda _: 300_000)
    assert "with its experts in host memory still" in load(10_000)
    assert "choose a smaller model" in load(10_000)


def test_host_memory_that_is_too_small_is_refused_with_what_would_fit(
    folder: Path, whole: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = room_for(whole, 4)
    free = iter([1_000_000, 100_000])  # of the device, and then of the host
    monkeypatch.setattr(models.loading.load, "available_bytes", lambda _: next(free))
    with pytest.raises(
        ModelError, match=r"for the experts of 4 layers, where 90 kB can be used; .* at most 1.1 MB"
    ):
        load_model(files_of(folder), dtype=torch.float32, device=CPU, room=lambda _: room)


def test_a_conversation_and_a_chunk_have_room_beside_the_weights(whole: Network) -> None:
    spec = whole.spec
    free = 1 << 34
    usual = weight_room(spec, free, torch.bfloat16, None)
    assert usual == weight_room(spec, free, torch.bfloat16, spec.max_positions)  # no more than it can hold
    assert usual < weight_room(spec, free, torch.bfloat16, 16) < free


def test_what_a_gpu_gives_the_weights_depends_on_whether_experts_may_stay_outside(
    whole: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda _: 1 << 34)
    room = loading.gpu_room(torch.bfloat16, torch.device("cuda"), None)
    assert room is not None
    assert room(whole.spec) == weight_room(whole.spec, 1 << 34, torch.bfloat16, None)
    monkeypatch.setattr(compatibility, "NATIVE", NATIVE - {Feature.CLAMP})
    assert room(whole.spec) is not None
    assert room(known_shape("gpt-oss:20b")) is None


def test_the_rule_compares_what_was_measured() -> None:
    chunks = ((16, 0.001), (32, 0.002), (64, 0.004))
    assert HostCosts(1e-4, chunks, 0.003).fetch_from() == 64
    assert HostCosts(1e-4, chunks, 0.0005).fetch_from() == 16
    assert HostCosts(1e-4, chunks, 0.004).fetch_from() is None
    assert HostCosts(1e-4, chunks).fetch_from() is None


def test_people_are_told_how_much_lies_where(whole: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostExperts(split(whole, {1, 2}), Pool(2))
    monkeypatch.setattr(host_experts, "MEASURED", (4, 8))
    host.prepare(fetches=False, fixed=False)
    line = host.told(4)
    assert line.startswith(
        "The experts of 2 of 4 layers are in host memory (1.2 MB), because the GPU has no room"
    )
    assert "computed on the CPU, and so are prompts (" in line
    assert not host.fetches(1 << 20)
    host.prepare(fetches=True, fixed=True)
    assert host.fetch_from is not None
    assert host.fetches(host.fetch_from)
    assert not host.fetches(host.fetch_from - 1)
    assert host.costs.fetched
    assert host.costs.token
    assert f"for prompts of {host.fetch_from} tokens or more they are copied to the GPU" in host.told(4)
    host.close()
    host.close()


def test_experts_that_the_native_kernels_do_not_know_are_not_given_to_them(
    whole: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    clamped = each_layer(
        whole.spec,
        lambda _, layer: replace(
            layer, feed_forward=replace(layer.feed_forward, expert=FeedForward(96, limit=7.0))
        ),
    )
    assert not_on_host(clamped) is None
    monkeypatch.setattr(compatibility, "NATIVE", NATIVE - {Feature.CLAMP})
    assert not_on_host(whole.spec) is None
    with pytest.raises(NativeError, match="clamp"):
        HostExperts(replace(split(whole, {1}), spec=clamped), Pool(1))


@pytest.fixture(scope="module")
def engines(folder: Path, whole: Network) -> Iterator[tuple[TinyEngine, TinyEngine]]:
    """With all experts in one place, and with two layers of them in host memory."""
    made = []
    for network in (whole, split(whole, {2, 3})):
        tokenizer = tiny_tokenizer()
        tokenizer.stop_ids = frozenset()
        made.append(
            TinyEngine(
                Loop(),
                network,
                tokenizer,
                BuildOptions(fused=False, threads=1, block_size=4, max_chunk=64, context=900),
                name="tiny",
                device=CPU,
            )
        )
    yield made[0], made[1]
    for engine in made:
        engine.check()
        engine.close()


def test_an_engine_answers_as_one_that_holds_all_in_one_place(engines: tuple[TinyEngine, TinyEngine]) -> None:
    """Long prompts, prompts beside answers, and answers that are cancelled in between."""
    told = [note for note in engines[1].figures().notes if "The experts of 2 of 4 layers" in note]
    assert len(told) == 1
    figures = engines[1].figures()
    assert figures.host_bytes * 2 < figures.weight_bytes
    assert "of them in host memory" in weights_text(figures)
    assert "host" not in weights_text(engines[0].figures())
    prompts = [
        torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 8, 40, 300)
    ]
    answers = []
    for engine in engines:
        found = []
        for prompt in prompts:
            stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=12))
            next(stream)
            stopped = engine.stream(prompt[::-1], SamplingParams(temperature=0.0, max_tokens=12))
            next(stopped)
            stopped.close()
            found.append([event.token_id for event in stream])
        answers.append(found)
    assert answers[0] == answers[1]
