"""The benchmark of quality: a model does not differ from itself, shuffled channels compute the same, a peer may die."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

from benchmarks.peers.llama_cpp_python import LlamaCppPython, PeerError
from benchmarks.quality import bits_of, by_engine, by_modules, compare, main
from benchmarks.requantized import WAYS, requantized
from engine.kernels.native import library as native
from models.loading.load import load_model
from tests.models.checkpoints import (
    files_of,
    random_model,
    tiny_llama,
    tiny_qwen3,
    write_checkpoint,
    write_gguf,
)

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
        network = requantized(exact, way, torch.float32, 512, shuffle=True)
        found[way.name] = compare(WINDOWS, expected, by_modules(network), way.name, "fp32", bits_of(network))
    assert found["unquantised"].kl < 1e-6
    assert found["unquantised"].kl < found["int8"].kl < found["int4"].kl < 1
    assert found["int8"].bits < 9.5
    assert found["int4"].kl <= found["int4"].kl_99
    if native.problem() is None:
        network = requantized(exact, WAYS[1], torch.bfloat16, 512, shuffle=True)
        name, logits = by_engine(network)
        run = compare(WINDOWS, expected, logits, "int8", name, 8.5)
        # The loss from rounding activations in the real kernels adds to that from the weights.
        assert found["int8"].kl < run.kl < 0.1


@pytest.mark.skipif(os.name != "posix", reason="signals and a shell")
def test_a_peer_that_dies_is_a_line_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with a signal when it is asked for the first window, as one that was built for another CPU."""
    model = write_gguf(tmp_path / "model.gguf", random_model(tiny_llama()), Kind.Q8_0)
    peer, figures = tmp_path / "python", tmp_path / "figures.json"
    ready = json.dumps({"version": "1", "built_for": "", "seconds": 1.0})
    peer.write_text(f"#!/bin/sh\necho '{ready}'\nread line\necho oh no >&2\nkill -ILL $$\n")
    peer.chmod(0o755)
    monkeypatch.setattr(
        "benchmarks.quality.load_tokenizer", lambda files: SimpleNamespace(encode=lambda text: [*range(20)])
    )
    monkeypatch.setattr(
        "sys.argv",
        ["quality", str(model), "--llama-python", str(peer), "--tokens", "20", "--json", str(figures)],
    )
    main()
    *others, first, second = json.loads(figures.read_text())["lines"]
    assert [line["weights"] for line in others] == ["reference", "expanded", "as stored"]
    assert [first["executor"], second["executor"]] == ["llama.cpp", "llama.cpp, prompt"]
    assert (
        first["error"]
        == second["error"]
        == ("llama-cpp-python ended with SIGILL (Illegal instruction): oh no")
    )
    assert first["error"] in capsys.readouterr().out


def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="python does not start: No such file or directory"):
        LlamaCppPython(str(tmp_path / "python"), tmp_path / "model.gguf", 1, 8)
    with pytest.raises(PeerError, match=r"^llama-cpp-python ended with exit code 1: .*[Ee]rror: "):
        LlamaCppPython(sys.executable, tmp_path / "model.gguf", 1, 8)
