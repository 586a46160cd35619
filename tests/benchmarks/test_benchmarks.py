"""What the benchmarks claim about themselves: peers compute the same network, and the arithmetic is right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import attention, structured
from benchmarks.decode import ratios, relative_errors, table
from benchmarks.formats import random_quantized, read_bytes
from benchmarks.machine import Record
from benchmarks.peers import llama_cpp
from benchmarks.peers import transformers as peer
from benchmarks.peers.compiled import Step
from benchmarks.profile_decode import Kernel, per_step
from benchmarks.shapes import (
    SHAPES,
    cache_bytes,
    kv_bytes,
    prefill_flops,
    random_engine,
    random_model,
    random_prompt,
    shared_tensors,
    weight_bytes,
)
from engine import SamplingParams
from models.network import ExpertWeights, Weight
from models.spec import Experts, FeedForward, each_layer
from models.weights.packing import unpack
from models.weights.slots import layer_parameters
from tests.engine.tiny import tiny_engine

CPU = torch.device("cpu")


@pytest.mark.parametrize("paged", [False, True], ids=["sdpa", "pages"])
def test_the_plain_torch_step_computes_what_transformers_does(paged: bool) -> None:
    config = SHAPES["tiny"]
    model = random_model(config, torch.float32, CPU, 256)
    prompt = random_prompt(config, 140, seed=1)  # more than one page
    network = peer.network_of(config, shared_tensors(model), CPU)
    reference = peer.all_logits(network, prompt, CPU)
    step = Step(config, model, 256, paged, None)
    step.open(200)
    with torch.no_grad():
        for position, token in enumerate(prompt):
            step.token.fill_(token)
            step.position.fill_(position)
            logits = step.logits()
    assert max(relative_errors(logits, reference[-1:])) < 1e-5


def test_weights_are_shared_by_reference() -> None:
    model = random_model(SHAPES["tiny"], torch.float32, CPU, 16)
    network = peer.network_of(SHAPES["tiny"], shared_tensors(model), CPU)
    theirs = {p.untyped_storage().data_ptr() for p in network.parameters()}
    ours = model.parts(torch.Tensor)
    assert theirs == {tensor.untyped_storage().data_ptr() for tensor in ours}


def test_the_engine_streams_random_words() -> None:
    config = SHAPES["tiny"]
    with random_engine(config, device=CPU, dtype=torch.float32, context=64) as (engine, _):
        events = list(
            engine.stream(random_prompt(config, 8, 0), SamplingParams(temperature=0.0, max_tokens=5))
        )
    assert [event.text for event in events] == [f"word{event.token_id} " for event in events]
    assert len(events) == 5


def test_figures_of_the_published_shapes() -> None:
    small, large = SHAPES["0.6B"], SHAPES["8B"]
    assert weight_bytes(small, torch.bfloat16) == pytest.approx(1.192e9, rel=1e-3)
    assert kv_bytes(small, torch.bfloat16) == 2 * 28 * 8 * 128 * 2
    # An untied model reads its head, but only one row of its embedding.
    head = large.vocab_size * large.hidden_size
    assert layer_parameters(large) + 2 * head == pytest.approx(8.19e9, rel=1e-3)
    assert weight_bytes(large, torch.bfloat16) == 2 * (layer_parameters(large) + head)
    assert cache_bytes(small, torch.bfloat16, 101) == 101 * kv_bytes(small, torch.bfloat16)
    assert prefill_flops(small, 1) == 2 * layer_parameters(small) + 2 * 16 * 128 * 28
    windowed = SHAPES["Mistral-7B-v0.1"]  # of its 8,192 tokens, each sees 4,096
    attended = prefill_flops(windowed, 8192) - 2 * layer_parameters(windowed) * 8192
    assert attended == 2 * (8192**2 - 4096**2) * 32 * 128 * 32
    assert cache_bytes(windowed, torch.bfloat16, 8192) == 4096 * 2 * 32 * 8 * 128 * 2
    hybrid = SHAPES[
        "Qwen3.5-9B"
    ]  # 8 of its 32 layers have attention; the others read three rows of their log
    states, log = 24 * 32 * 128 * 128 * 4, 24 * (2 * 16 * 128 + 32 * 128 + 2 * 32) * 2
    assert cache_bytes(hybrid, torch.bfloat16, 8192) == 8192 * 2 * 8 * 4 * 256 * 2 + 2 * states + 3 * log
    assert prefill_flops(hybrid, 512) - 2 * layer_parameters(hybrid) * 512 == 2 * 512**2 * 16 * 256 * 8


def test_llama_bench_and_greedy_are_read() -> None:
    assert llama_cpp.parse_bench('[{"n_gen": 128, "samples_ts": [600.5, 601]}]') == [600.5, 601.0]
    line = "greedy mode 2 P 500 N 256: TTFT median 8.125 ms (61538 tok/s), decode median 599.1 tok/s (1.6 ms/tok)"
    assert llama_cpp.parse_greedy("load\n" + line) == llama_cpp.Greedy(599.1, 0.008125)
    for parse in (llama_cpp.parse_bench, llama_cpp.parse_greedy):
        with pytest.raises(RuntimeError, match="no figures"):
            parse("CUDA error: out of memory")


def test_a_record_is_on_disk_after_every_figure_and_merges(tmp_path: Path) -> None:
    path = tmp_path / "results" / "figures.json"
    Record(path, {"device": "one", "versions": {"torch": "1"}}, merge=False).add(1.5, "shapes", "0.6B", "a")
    with pytest.raises(SystemExit, match="another device, one; here it is two"):
        Record(path, {"device": "two"}, merge=True)
    again = Record(path, {"device": "one", "versions": {"torch": "1"}}, merge=True)
    again.add(2.5, "shapes", "8B", "a")
    assert json.loads(path.read_text()) == {
        "device": "one",
        "versions": {"torch": "1"},
        "shapes": {"0.6B": {"a": 1.5}, "8B": {"a": 2.5}},
    }


def test_ratios_and_table_leave_out_what_was_skipped() -> None:
    rows: dict[str, dict[str, Any]] = {
        "512": {
            "ours": {"tokens_per_s": 3.0, "of_copy": 0.6},
            "a": {"tokens_per_s": 2.0},
            "b": {"skipped": "x"},
        }
    }
    assert ratios(rows["512"]) == {"a": 1.5}
    assert ratios({"a": {"tokens_per_s": 2.0}}) == {}
    rows["512"]["a"]["ours_over_it"] = 1.5
    assert [line.split()[-1] for line in table("0.6B", rows).splitlines()] == [
        "512", "3.0", "2.0", "-", "60.0%", "1.50",
    ]  # fmt: skip


def test_kernels_of_one_step_are_what_a_longer_run_has_more() -> None:
    short = {"matvec": Kernel(110, 1100.0), "setup": Kernel(7, 70.0)}
    long = {"matvec": Kernel(210, 2100.0), "setup": Kernel(7, 71.0)}
    assert per_step(short, long, 10) == {"matvec": Kernel(10.0, 100.0)}


def test_constrained_answers_are_measured_beside_free_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "PROMPT", "list")
    with tiny_engine(tmp_path) as engine:
        structured.compare(engine, tokens=6, rounds=1, streams=2)
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in (*structured.KINDS, "beside"))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_k_m"])
def test_random_quantized_weights_are_like_those_of_a_fresh_layer_and_few_bytes(name: str) -> None:
    spec = replace(SHAPES["0.6B"], layers=SHAPES["0.6B"].layers[:2], vocab_size=256)
    network = random_quantized(spec, name, torch.float32, CPU, 16)
    parts = [part for layer in network.layers for part in layer.attention.qkv.parts]
    for weight in (*parts, network.embedding):
        assert weight.planes is not None
        numbers = unpack(weight.planes, torch.arange(64))
        assert 0.015 < float(numbers.std()) < 0.03
    plain = weight_bytes(spec, torch.bfloat16)
    assert read_bytes(network) < {"q8_0": 0.54, "q4_0": 0.29, "q4_k_m": 0.33}[name] * plain


@pytest.mark.parametrize("name", ["q4_0", "mxfp4"])
def test_random_quantized_experts_are_packed_and_the_chosen_ones_are_read(name: str) -> None:
    spec = replace(SHAPES["30B-A3B"], layers=SHAPES["30B-A3B"].layers[:1], vocab_size=64)
    feed = Experts(6, 2, FeedForward(256))
    spec = each_layer(spec, lambda index, layer: replace(layer, feed_forward=feed))
    network = random_quantized(spec, name, torch.float32, CPU, 16)
    weights = network.layers[0].feed_forward
    assert isinstance(weights, ExpertWeights)
    first = weights.experts[0]
    for weight in (*first.gate_up.parts, *first.down.parts):
        assert weight.planes is not None
        numbers = unpack(weight.planes, torch.arange(64))
        assert 0.01 < float(numbers.std()) < 0.04
    experts = 6 * sum(part.nbytes for part in (*first.gate_up.parts, *first.down.parts))
    whole = sum(weight.nbytes for weight in network.parts(Weight)) - network.embedding.nbytes
    assert read_bytes(network) == whole - experts * 4 // 6


def test_attention_is_compared_with_what_it_should_give(capsys: pytest.CaptureFixture[str]) -> None:
    heads, length = SHAPES["tiny"].attention, 70
    found = attention.calls(heads, length, CPU, torch.float32)
    assert "flash is left out" in capsys.readouterr().out
    assert relative_errors(found["sdpa"]().view(1, -1), found[attention.PLAIN]().reshape(1, -1))[0] < 1e-5
    figures = attention.measure(found, 1, CPU)
    attention.show(length, figures)
    assert "sdpa" in capsys.readouterr().out
    drawn = ElementTree.fromstring(attention.picture("tiny", [length], {length: figures}))
    assert {"sdpa", "plain", "70"} <= {element.text for element in drawn.iter()}
