"""The benchmark of quality: a model does not differ from itself, and shuffled channels compute the same."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.quality import bits_of, by_engine, by_modules, compare
from benchmarks.requantised import WAYS, requantised
from engine.kernels.native import library as native
from models.load import load_model
from tests.models.checkpoints import files_of, tiny_qwen3, write_checkpoint

CPU = torch.device("cpu")
WINDOWS = [[(7 * i * i + j) % 160 for i in range(40)] for j in range(2)]
CONFIG = tiny_qwen3(hidden_size=64, intermediate_size=96, head_dim=32, num_hidden_layers=2)


def test_figures_of_formats_and_of_the_kernels_that_run(tmp_path: Path) -> None:
    files = files_of(write_checkpoint(tmp_path, CONFIG))
    exact = load_model(files, dtype=torch.float32, device=CPU, context_length=512)
    expected = [by_modules(exact)(window) for window in WINDOWS]
    same = compare(WINDOWS, expected, by_modules(exact), "reference", "fp32", 16.0)
    assert same.kl < 1e-9
    assert same.same_first == 1.0
    losses = [
        F.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none")
        for logits, window in zip(expected, WINDOWS, strict=True)
    ]
    assert same.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    found = {}
    for way in WAYS[:3]:
        network = requantised(exact, way, torch.float32, 512, shuffle=True)
        found[way.name] = compare(WINDOWS, expected, by_modules(network), way.name, "fp32", bits_of(network))
    assert found["unquantised"].kl < 1e-6
    assert found["unquantised"].kl < found["int8"].kl < found["int4"].kl < 1
    assert found["int8"].bits < 9.5
    assert found["int4"].kl <= found["int4"].kl_99
    if native.problem() is None:
        network = requantised(exact, WAYS[1], torch.bfloat16, 512, shuffle=True)
        name, logits = by_engine(network)
        run = compare(WINDOWS, expected, logits, "int8", name, 8.5)
        # The loss from rounding activations in the real kernels adds to that from the weights.
        assert found["int8"].kl < run.kl < 0.1
